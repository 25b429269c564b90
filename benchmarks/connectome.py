"""Compare the speed of sliding-window connectomes with a loop of nilearn's ConnectivityMeasure.

``python benchmarks/connectome.py --source DIR`` with a nilearn folder of ABIDE. Measured in one
run: our code on every window of the site, nilearn's loop on a sample of the same windows, in turn;
the largest difference; the memory beyond the output; and the time of the bare arithmetic (one
matrix product a window) and of writing the output, the limits of any code that does the same.

nilearn's loop runs twice, with its linear algebra free to use all cores and held to one, because
threads on matrices this small often cost more than they give. The ratio is against the faster.
"""

import argparse
import functools
import resource
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from nilearn.connectome import ConnectivityMeasure
from sklearn.covariance import EmpiricalCovariance, LedoitWolf

from data_prep import connectome
from data_prep.abide import Abide, find_abide
from data_prep.connectome import correlation_connectomes, window_starts
from data_prep.harvard_oxford import ROIS
from data_prep.quality import QualityRule, apply_rule
from data_prep.roi_files import read_subjects

TARGET = {"pearson": 20, "ledoit-wolf": 12}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="nilearn folder of ABIDE")
    parser.add_argument("--site", default="NYU")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sample", type=int, default=200, help="windows for nilearn's loop")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")

    scans = load_scans(arguments.source, arguments.site)
    window, stride = arguments.window, arguments.stride
    starts = [window_starts(len(scan), window, stride) for scan in scans]
    n_windows = sum(map(len, starts))
    n_rois = scans[0].shape[1]
    out = np.zeros((n_windows, n_rois * (n_rois - 1) // 2), dtype=np.float32)
    out += 1.0  # all of its memory is in use before anything is measured
    cores = connectome._available_cores()
    print(
        f"{arguments.site}: {len(scans)} subjects, {n_windows:,} windows of {window}, stride "
        f"{stride}, {n_rois} ROIs; output {out.nbytes / 1e6:.0f} MB; {cores} cores"
    )

    def ours(estimator: str) -> None:
        begin = 0
        for scan, s in zip(scans, starts, strict=True):
            correlation_connectomes(
                scan,
                window=window,
                stride=stride,
                estimator=estimator,
                out=out[begin : begin + len(s)],
            )
            begin += len(s)

    pairs = [(i, int(s)) for i, own in enumerate(starts) for s in own]
    chosen = np.linspace(0, len(pairs) - 1, min(arguments.sample, len(pairs))).astype(int)
    sample = [scans[pairs[c][0]][pairs[c][1] : pairs[c][1] + window] for c in chosen]
    print(
        f"nilearn's loop: {len(sample)} of these windows, evenly spread; medians of "
        f"{arguments.repeats} alternated repeats"
    )
    for estimator, target in TARGET.items():
        measure = nilearn_measure(estimator)
        extra = extra_memory(lambda e=estimator: ours(e))  # the first call, so nothing is warm
        theirs = np.array([measure.fit_transform([w])[0] for w in sample])
        error = np.abs(out[chosen] - np.arctanh(in_our_order(theirs, n_rois))).max()
        loop = functools.partial(nilearn_loop, measure, sample)
        our_times, free_times, held_times = [], [], []
        for _ in range(arguments.repeats):
            our_times.append(timed(lambda e=estimator: ours(e)) / n_windows)
            free_times.append(timed(loop) / len(sample))
            with connectome._one_blas_thread():
                held_times.append(timed(loop) / len(sample))
        us, free, held = map(statistics.median, (our_times, free_times, held_times))
        print(
            f"{estimator}: ours {us * 1e6:.1f} us a window, nilearn {free * 1e6:.0f} us (all "
            f"cores) and {held * 1e6:.0f} us (one): {min(free, held) / us:.1f} times the faster, "
            f"target {target}; max difference {error:.1e} in Fisher z; {extra:.0f} MB beyond the "
            "output"
        )
    product, write = limits(scans, starts, window, out, cores, arguments.repeats)
    print(
        f"limits, same run: matrix products alone {product * 1e6:.1f} us, writing the output "
        f"alone {write * 1e6:.1f} us a window; our ledoit-wolf took "
        f"{us / (product + write):.1f} times their sum"
    )


def load_scans(source: Path, site: str) -> list[np.ndarray]:
    """Return the series of the subjects that the default rule keeps."""
    subjects = list(read_subjects(Abide((find_abide(source),)).join(site)))
    kept, _ = apply_rule(subjects, QualityRule(), window=32, rois=ROIS)
    return [subject.series for subject in kept]


def nilearn_loop(measure: ConnectivityMeasure, sample: list[np.ndarray]) -> None:
    """Fit one window after the other."""
    for one in sample:
        measure.fit_transform([one])


def nilearn_measure(estimator: str) -> ConnectivityMeasure:
    """Return the peer: what the estimator is in nilearn's words."""
    covariance = (
        LedoitWolf(store_precision=False) if estimator == "ledoit-wolf" else EmpiricalCovariance()
    )
    return ConnectivityMeasure(
        cov_estimator=covariance, kind="correlation", vectorize=True, discard_diagonal=True
    )


def in_our_order(vectors: np.ndarray, n_rois: int) -> np.ndarray:
    """Put nilearn's lower triangle in the order of ``np.triu_indices``."""
    place = np.zeros((n_rois, n_rois), dtype=int)
    place[np.tril_indices(n_rois, k=-1)] = np.arange(vectors.shape[1])
    return vectors[:, place.T[np.triu_indices(n_rois, k=1)]]


def timed(work: Callable[[], object]) -> float:
    """Return the wall time in seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def resident_mb() -> float:
    """Return the memory of this process now, in MB (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def extra_memory(work: Callable[[], object]) -> float:
    """Return the largest growth of this process while it works, in MB, looked at every ms."""
    before, largest = resident_mb(), [0.0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            largest[0] = max(largest[0], resident_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(0.0, largest[0] - before)


def limits(
    scans: list[np.ndarray],
    starts: list[np.ndarray],
    window: int,
    out: np.ndarray,
    cores: int,
    repeats: int,
) -> tuple[float, float]:
    """Return seconds a window of the bare float64 products, and of writing the output."""
    n_rois, n_windows = scans[0].shape[1], len(out)
    x = np.random.default_rng(0).standard_normal((16, n_rois, window))
    transposed = np.ascontiguousarray(x.transpose(0, 2, 1))
    rounds = -(-n_windows // (16 * cores))

    def products(_: int) -> None:
        place = np.empty((16, n_rois, n_rois))
        for _ in range(rounds):
            np.matmul(x, transposed, out=place)

    def write(part: int) -> None:
        out[part::cores] = 0.5

    def spread(work: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(work, range(cores)))

    with connectome._one_blas_thread():
        product = statistics.median(timed(lambda: spread(products)) for _ in range(repeats))
    writing = statistics.median(timed(lambda: spread(write)) for _ in range(repeats))
    return product / n_windows, writing / n_windows


if __name__ == "__main__":
    main()
