"""What a hospital's gain goes with: rank correlations over hospitals, with intervals.

Of a finished ``fedbn compare`` at sites of connectome stores: Spearman's correlation over
hospitals of FedBN's difference to FedAvg, and to training alone, with how far the hospital's share
of patients is from the mean, its repetition time, the length of its scans in volumes and in
seconds, the mean age, and its training subjects. Every hospital counts the same. A dozen of them
can tell a strong relation from none, and no more; no interval is adjusted for their number.

Run: ``python benchmarks/what_decides.py COMPARISON --data DIR``
"""

import argparse
from pathlib import Path

import numpy as np

from data_prep.site_store import read_site_store
from fedbn.study.comparison import read_summary
from fedbn.study.over_sites import LOCAL_ONLY, rank_correlation, training_units

METRICS = ("accuracy", "auc")


def facts(data: Path, sites: list[str]) -> dict[str, np.ndarray]:
    """Return what is known of each hospital, by name."""
    stores = [read_site_store(data / site) for site in sites]
    people = [store.participants for store in stores]
    share = np.array([np.mean([one.diagnosis == "autism" for one in site]) for site in people])
    ages = [[one.age for one in site if one.age is not None] for site in people]
    volumes = np.array([np.mean([one.n_timepoints for one in site]) for site in people])
    times = np.array([np.mean(store.description["repetition_time_s"]) for store in stores])
    return {
        "share of patients, distance from the mean": np.abs(share - share.mean()),
        "repetition time": times,
        "volumes": volumes,
        "seconds of scan": volumes * times,
        "age, mean": np.array([np.mean(of_site) for of_site in ages]),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparison", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    given = parser.parse_args()
    summary = read_summary(given.comparison)
    sites = summary["sites"]
    known = facts(given.data, sites) | {"training subjects": training_units(summary)}

    def means(name: str, metric: str) -> np.ndarray:
        scores = summary["scores"][name]
        return np.array([scores[site]["subject"][metric]["mean"] for site in sites], np.float64)

    columns = [(other, metric) for other in ("fedavg", LOCAL_ONLY) for metric in METRICS]
    print("| | " + " | ".join(f"FedBN - {other}, {metric}" for other, metric in columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name, values in known.items():
        cells = []
        for other, metric in columns:
            found = rank_correlation(values, means("fedbn", metric) - means(other, metric))
            cells.append("{:+.2f} ({:+.2f} to {:+.2f})".format(*found))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
