"""What a FLARE client process pays to import fedbn's learner.

FLARE's simulator with its default single thread starts a new process for every task, so an import
is paid 4 times the number of rounds. The peer is what no learner on PyTorch can do without: torch
and FLARE's own ``ModelLearner``.

Run: ``python benchmarks/startup.py [--repeats 7]``
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

PEER = "import torch; from nvflare.app_common.abstract.model_learner import ModelLearner"
OURS = "import fedbn.flare.learner"
HEAVY = ("nilearn", "matplotlib", "pandas", "monai", "sklearn", "scipy", "tensorboard", "rich")


def measure(statement: str) -> tuple[float, float]:
    """Return wall and CPU seconds of a fresh interpreter that runs one statement."""
    before = os.times()
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    wall = time.perf_counter() - started
    after = os.times()
    cpu = after.children_user - before.children_user
    return wall, cpu + after.children_system - before.children_system


def main() -> None:
    """Measure both in turn, in one run, and print the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    for statement in ("pass", PEER, OURS):  # once for the file cache
        measure(statement)
    times: dict[str, list[tuple[float, float]]] = {"pass": [], PEER: [], OURS: []}
    for _ in range(repeats):
        for statement, kept in times.items():
            kept.append(measure(statement))
    print(f"median of {repeats} fresh processes each, in turn\n")
    print(f"{'':34}{'wall s':>8}{'min':>7}{'max':>7}{'CPU s':>8}")
    for label, statement in (
        ("bare interpreter", "pass"),
        ("torch + FLARE's ModelLearner", PEER),
        ("fedbn.flare.learner", OURS),
    ):
        wall, cpu = zip(*times[statement], strict=True)
        print(
            f"{label:34}{statistics.median(wall):8.2f}{min(wall):7.2f}{max(wall):7.2f}"
            f"{statistics.median(cpu):8.2f}"
        )
    ratios = [ours[0] / peer[0] for ours, peer in zip(times[OURS], times[PEER], strict=True)]
    print(f"\nratio (median of pairs): {statistics.median(ratios):.2f}, to be at most 1.3")
    check = f"{OURS}; import sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", check], check=True, capture_output=True, text=True
    )
    print(f"heavy packages loaded by it: {loaded.stdout.strip()}")


if __name__ == "__main__":
    main()
