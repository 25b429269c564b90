"""How often `fedbn predict` warns of a scan that is unlike those of the training, and of which.

Held-out scans of each bundle's site are spoilt in one way at a time, and go through the same
functions as `fedbn predict`. Printed is, for each site and way, how many of them are warned of. "as
it is" are false alarms.

    python benchmarks/unlike_scans.py --source ABIDE --data STORES --bundles BUNDLES
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.ndimage import gaussian_filter1d

from data_prep.abide import find_abide
from data_prep.roi_files import read_roi_file
from fedbn.models.bundle import Bundle, read_bundle
from fedbn.models.prediction import predict, predict_files
from fedbn.tasks.connectome.prediction import rois_of, scan_of_series

ROW = "as it is"


def ways(series: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return a scan, (n_timepoints, n_rois), and what else it could have been."""
    z = (series - series.mean(axis=0)) / series.std(axis=0)
    shared = z.mean(axis=1, keepdims=True)
    noise = rng.standard_normal(z.shape)
    some = rng.choice(z.shape[1], 20, replace=False)
    partly = z.copy()
    partly[:, some] = noise[:, some]
    return {
        ROW: series,
        "white noise": noise,
        "regions in random order": series[:, rng.permutation(series.shape[1])],
        "a signal in all regions, SD 1": z + shared / shared.std(),
        "global signal regressed out": z - shared * (shared.T @ z) / (shared.T @ shared),
        "smoothed in time, sigma 2 volumes": gaussian_filter1d(series, 2, axis=0),
        "white noise added, as strong": z + noise,
        "20 regions of white noise": partly,
        "every second volume": series[::2],
    }


def counts(bundle: Bundle, store: Path, scans: Path) -> tuple[dict[str, int], int]:
    """Count the warnings of one site's held-out scans, for each way."""
    asked = [one.case for one in predict_files(bundle, [store])]
    held_out = [case.name for case in asked if case.in_training is False]
    rng = np.random.default_rng(0)
    found: dict[str, int] = {}
    for name in held_out:
        (file,) = scans.glob(f"*_{name.removeprefix('sub-')}_rois_ho.1D")
        for way, series in ways(read_roi_file(file, rois_of(bundle.trained_on)), rng).items():
            scan = scan_of_series(bundle.trained_on, name, series)
            found[way] = found.get(way, 0) + bool(predict(bundle, scan).far)
    return found, len(held_out)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="nilearn's folder of ABIDE")
    parser.add_argument("--data", type=Path, required=True, help="folder of the sites' stores")
    parser.add_argument("--bundles", type=Path, required=True, help="folder of the sites' bundles")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scans = find_abide(arguments.source) / "cpac" / "filt_noglobal"
    bundles = [read_bundle(path) for path in sorted(arguments.bundles.iterdir())]
    of_sites = [counts(bundle, arguments.data / bundle.site, scans) for bundle in bundles]
    table = Table(
        "held-out scans", *(f"{b.site} ({n})" for b, (_, n) in zip(bundles, of_sites, strict=True))
    )
    for way in of_sites[0][0]:
        table.add_row(way, *(str(found[way]) for found, _ in of_sites))
    Console().print(table)


if __name__ == "__main__":
    main()
