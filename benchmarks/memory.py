"""Whether memory stays flat over a hundred short rounds, at the server and at every client.

The main job runs in FLARE's simulator with a thread per client, one local epoch a round. Meanwhile
the resident memory of each of its processes is read four times a second, with the number of rounds
that the first site has finished then. Growth is the median of the last ten rounds over that of ten
rounds around the twentieth, which is the peer: by then every import is done and every cache is
full.

Run: ``python benchmarks/memory.py [--data DIR] [--rounds 100]``
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil  # comes with NVFlare

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "jobs" / "abide_fedbn"
CLIENTS = 4
WARM = (15, 25)


def make_job(folder: Path, rounds: int) -> Path:
    """Copy the main job, with many short rounds."""
    shutil.copytree(JOB, folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "app" / "config" / "experiment.json"
    experiment = json.loads(file.read_text())
    experiment |= {"rounds": rounds, "compare_with_alone": False}
    experiment["training"]["local_epochs"] = 1
    file.write_text(json.dumps(experiment))
    return folder


def name_of(process: psutil.Process) -> str:
    """Return which part of the simulator a process is: a client by its name, else the server."""
    words = process.cmdline()
    clients = [f"site-{k + 1}" for k in range(CLIENTS)]
    return next((client for client in clients if client in words), "server")


def sample(root: psutil.Process) -> dict[str, int]:
    """Return the resident bytes of the process and of all its children, by part."""
    found: dict[str, int] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            name = name_of(process)
            found[name] = found.get(name, 0) + process.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return found


def run(job: Path, workspace: Path, data: Path) -> list[tuple[int, dict[str, int]]]:
    """Run a job in the simulator; return (rounds done, resident bytes by part) of each sample."""
    command = [
        str(Path(sys.executable).with_name("nvflare")), "simulator", str(job),
        "-n", str(CLIENTS), "-t", str(CLIENTS), "-w", str(workspace),
    ]  # fmt: skip
    samples = []
    with (workspace.parent / "log.txt").open("w+") as log:
        process = subprocess.Popen(
            command, env={**os.environ, "FEDBN_DATA": str(data)}, stdout=log, stderr=log
        )
        root = psutil.Process(process.pid)
        while process.poll() is None:
            done = len(list(workspace.glob("site-1/fedbn_sites/*/*/predictions/round_*.npz")))
            samples.append((done, sample(root)))
            time.sleep(0.25)
        if process.returncode:
            log.seek(0)
            sys.exit(f"the job failed (exit code {process.returncode}):\n{log.read()[-3000:]}")
    return samples


def main() -> None:
    """Run the job once and print what each part of it needs, and how much that has grown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="stores of the four sites; default: synthetic")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    if options.rounds < WARM[1] + 15:
        parser.error(f"--rounds must be at least {WARM[1] + 15}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = options.data
        if data is None:
            data = folder / "data"
            command = [sys.executable, "-m", "data_prep", "synthetic", "--out", str(data)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        samples = run(
            make_job(folder / "job", options.rounds), folder / "workspace", data.resolve()
        )

    def median(name: str, first: int, last: int) -> float:
        found = [parts[name] for done, parts in samples if first <= done < last and name in parts]
        return statistics.median(found) / 2**20

    print(f"resident memory in MiB, {options.rounds} rounds, {CLIENTS} clients, one thread each\n")
    print(f"{'':8} {'round 20':>9} {'at the end':>11} {'growth':>8}")
    total = [0.0, 0.0]
    for name in ["server", *(f"site-{k + 1}" for k in range(CLIENTS))]:
        warm = median(name, *WARM)
        end = median(name, options.rounds - 10, options.rounds)
        total = [total[0] + warm, total[1] + end]
        print(f"{name:8} {warm:9.1f} {end:11.1f} {end / warm - 1:+8.1%}")
    print(f"{'all':8} {total[0]:9.1f} {total[1]:11.1f} {total[1] / total[0] - 1:+8.1%}")


if __name__ == "__main__":
    main()
