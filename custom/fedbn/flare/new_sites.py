"""Gamma and beta of willing sites on their way to the server, for hospitals that join later.

They travel once, with a site's final answer, under names that no entry of a network has, and only
from a site whose own settings say ``share_affine: true``. The server asks for them only if at least
two sites are willing: the mean over one would be that site's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbn.core.normalization import affine_names, check_entries, entries
from fedbn.federation.experiment import Experiment
from fedbn.federation.site import Site, make_network
from fedbn.flare.job import redacted, to_arrays, to_tensors

SHARES_AFFINE = "shares gamma and beta"
"""Key of a site's preflight answer."""

SEND_AFFINE = "send gamma and beta"
"""Key of the server's last task."""

PREFIX = "affine_for_new_sites:"
"""No state-dict entry begins with it: it holds a colon, and names of modules end with a dot."""


def has_affine(experiment: Experiment) -> bool:
    """Whether the run leaves one shared model that lacks gamma and beta."""
    if experiment.algorithm.name in ("alone", "clustered"):
        return False
    return bool(affine_names(*make_network(experiment)))


def to_send(site: Site, local: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return a site's gamma and beta under the names in which they travel; nothing else of it."""
    names = affine_names(site.network, site.partition)
    return {
        PREFIX + name: array
        for name, array in to_arrays({name: local[name] for name in names}).items()
    }


def keep(
    folder: Path,
    experiment: Experiment,
    job: str,
    arrived: Mapping[str, Mapping[str, Any] | None],
    *,
    n_willing: int,
    warn: Callable[[str], None],
) -> str:
    """Average what has arrived, and save it beside the global model.

    Parameters
    ----------
    folder
        The server's app folder.
    experiment, job
        What was run.
    arrived
        Name of each willing site to the arrays of its final answer. What does not fit is left out,
        with a warning that names the site.
    n_willing
        How many sites were willing at the preflight.
    warn
        Takes a sentence.

    Returns
    -------
    str
        One sentence for the log.
    """
    from fedbn.models.new_site import AFFINE_FILE, MIN_WILLING_SITES, save_affine

    network, partition = make_network(experiment)
    expected = entries(network, affine_names(network, partition))
    fitting: dict[str, dict[str, torch.Tensor]] = {}
    for site, arrays in sorted(arrived.items()):
        try:
            named = {str(name): array for name, array in (arrays or {}).items()}
            own = to_tensors(
                {name.removeprefix(PREFIX): a for name, a in named.items() if PREFIX in name},
                expected,
            )
            check_entries(own, expected, "its gamma and beta")
            if not all(bool(torch.isfinite(tensor).all()) for tensor in own.values()):
                raise ValueError("its gamma and beta hold values that are not finite")
        except (ValueError, TypeError) as error:
            warn(f"gamma and beta of {site} are not used: {redacted(str(error))}")
        else:
            fitting[site] = own
    count = len(fitting) if n_willing >= MIN_WILLING_SITES else n_willing
    return save_affine(folder / AFFINE_FILE, experiment, job, fitting, n_willing=count)
