"""``fedbn report``: one page and its pictures from a finished comparison or run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fedbn.report.comparison_page import comparison_page
from fedbn.report.run_page import run_page
from fedbn.study.comparison import IDENTITY_FILE, SUMMARY_FILE, ComparisonError

REPORT_FOLDER = "report"


def write_report(
    folder: Path,
    out: Path | None = None,
    data_root: Path | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write ``report.html`` and the PNGs beside it.

    Parameters
    ----------
    folder
        Of a comparison, of a FLARE run (a simulator workspace or a downloaded job), or a
        ``results.json``.
    out
        Folder to write to; by default ``report`` inside `folder`, or beside the file.
    data_root
        Folder of the site stores, for the parts that need a model or a sample.
    on_step
        Called with what is begun, for a reader who waits.

    Returns
    -------
    Path
        Of the page.

    Raises
    ------
    ValueError
        If there is nothing finished to report on, or the data are others.
    """
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; give the folder of a comparison or a run")
    inside = folder if folder.is_dir() else folder.parent
    out = out or inside / REPORT_FOLDER
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is not a folder; give another --out")
    torch.set_num_threads(1)  # as in every run: the same bits
    if (inside / IDENTITY_FILE).is_file():
        if not (inside / SUMMARY_FILE).is_file():
            raise ComparisonError(
                f"{inside} holds a comparison that is not finished; start it again, it runs what "
                "is missing"
            )
        page = comparison_page(inside, data_root, on_step)
    else:
        page = run_page(folder, data_root, on_step)
    return page.write(out)
