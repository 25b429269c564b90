"""Whether memory stays flat over a hundred short rounds, at the server and at every client.

Two jobs run one after the other in FLARE's simulator with a thread per client, as in
``benchmarks/simulator.py``: the main job with one local epoch a round, and one whose learner only
returns the weights as they came: what grows there is FLARE's own. Meanwhile the resident memory of
each process is read four times a second. Growth is the median over the last ten rounds against that
over ten rounds around the twentieth, when every import is done.

Run: ``python benchmarks/memory.py [--data DIR] [--rounds 100]``
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil  # comes with NVFlare
from simulator import CLIENTS, ROOT, make_job

PARTS = ("server", *(f"site-{k + 1}" for k in range(CLIENTS)))
WARM = (15, 25)
MIB = 2**20


def make_short(job: Path) -> Path:
    """Give a job the shortest rounds that it can have."""
    file = job / "app" / "config" / "experiment.json"
    experiment = json.loads(file.read_text())
    experiment["training"]["local_epochs"] = 1
    file.write_text(json.dumps(experiment))
    return job


def sample(root: psutil.Process) -> dict[str, int]:
    """Return the resident bytes of the process and of all its children, by part."""
    found: dict[str, int] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            words = process.cmdline()
            part = next((name for name in PARTS if name in words), "server")
            found[part] = found.get(part, 0) + process.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return found


def run(job: Path, workspace: Path, data: Path) -> list[tuple[int, dict[str, int]]]:
    """Run a job in the simulator; return (rounds done, resident bytes by part) of each sample."""
    command = [
        str(Path(sys.executable).with_name("nvflare")), "simulator", str(job),
        "-n", str(CLIENTS), "-t", str(CLIENTS), "-w", str(workspace),
    ]  # fmt: skip
    log = workspace.parent / "log.txt"
    samples = []
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, "FEDBN_DATA": str(data)}, stdout=output, stderr=output
        )
        root = psutil.Process(process.pid)
        while process.poll() is None:
            done = log.read_text(errors="replace").count("; subject accuracy before training")
            samples.append((done, sample(root)))
            time.sleep(0.25)
    if process.returncode:
        sys.exit(f"the job failed (exit code {process.returncode}):\n{log.read_text()[-3000:]}")
    return samples


def main() -> None:
    """Run both jobs and print what each part of them needs, and how much that has grown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="stores of the four sites; default: synthetic")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    if options.rounds < WARM[1] + 15:
        parser.error(f"--rounds must be at least {WARM[1] + 15}")
    growth = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = options.data
        if data is None:
            data = folder / "data"
            command = [sys.executable, "-m", "data_prep", "synthetic", "--out", str(data)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        print(f"resident memory in MiB, {options.rounds} rounds, {CLIENTS} clients at a time")
        for name in ("nothing", "fedbn"):
            job = make_job(folder / name, nothing=name == "nothing", rounds=options.rounds)
            samples = run(make_short(job), folder / "workspace", data.resolve())
            print(f"\n{name:8} {'round 20':>9} {'at the end':>11} {'growth':>8}")
            total = {"warm": 0.0, "end": 0.0}
            for part in PARTS:
                medians = {
                    when: statistics.median(
                        sizes[part] / MIB
                        for done, sizes in samples
                        if first <= done < last and part in sizes
                    )
                    for when, first, last in (
                        ("warm", *WARM),
                        ("end", options.rounds - 10, options.rounds),
                    )
                }
                print(f"{part:8} {medians['warm']:9.1f} {medians['end']:11.1f} {_growth(medians)}")
                total = {when: total[when] + size for when, size in medians.items()}
            print(f"{'all':8} {total['warm']:9.1f} {total['end']:11.1f} {_growth(total)}")
            growth[name] = total["end"] - total["warm"]
    print(
        f"\ngrowth of all processes: {growth['fedbn']:+.1f} MiB; with a learner that does "
        f"nothing {growth['nothing']:+.1f} MiB"
    )


def _growth(sizes: dict[str, float]) -> str:
    return f"{sizes['end'] / sizes['warm'] - 1:+8.1%}"


if __name__ == "__main__":
    main()
