"""What fedbn adds to each client task, beside a learner that does nothing.

Two jobs run in turn in FLARE's simulator, with the same server workflow, network and messages: the
main job, and one whose learner imports torch and returns the weights as they came. Once with the
bare command (one thread: a new process for every task) and once with a thread per client. From the
time of a round is taken what the learner reports as spent inside the local epochs; the rest, beyond
the other job's round, is what fedbn adds: imports, reading the store, standardisation, two
evaluations, the state on disk.

Run: ``python benchmarks/simulator.py [--data DIR] [--repeats 2] [--modes bare,threads]``
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "jobs" / "abide_fedbn"
CLIENTS = 4

WORKFLOW = '''
"""The rounds of fedbn's workflow, without the final scores."""

from pathlib import Path

from fedbn.flare.workflow import FedBNWorkflow
from fedbn.federation.site_state import write_json


class RoundsOnly(FedBNWorkflow):
    def _finish(self, model):
        write_json(Path(self.get_run_dir()) / "rounds.json", self.rounds)
'''
NOTHING = '''
"""A learner that does nothing, but is a learner on PyTorch: the cost of FLARE and of torch."""

import torch  # noqa: F401
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model_learner import ModelLearner


class Nothing(ModelLearner):
    def validate(self, model):
        if model.meta.get("fedbn", {}).get("purpose") == "preflight":
            return FLModel(metrics={}, meta={"fedbn": {"site": self.site_name, "signature": {}}})
        return None

    def train(self, model):
        meta = {"fedbn": {"training_seconds": 0.0}}
        return FLModel(params_type=ParamsType.FULL, params=model.params, meta=meta)
'''


def make_job(folder: Path, *, nothing: bool, rounds: int) -> Path:
    """Copy the main job, with the workflow above and, if asked for, the learner above."""
    shutil.copytree(JOB, folder)
    custom = folder / "app" / "custom"
    (custom / "benchmark_workflow.py").write_text(WORKFLOW)
    (custom / "benchmark_nothing.py").write_text(NOTHING)
    config = folder / "app" / "config"
    experiment = json.loads((config / "experiment.json").read_text())
    experiment["rounds"] = rounds
    (config / "experiment.json").write_text(json.dumps(experiment))
    server = json.loads((config / "config_fed_server.json").read_text())
    server["workflows"][0]["path"] = "benchmark_workflow.RoundsOnly"
    (config / "config_fed_server.json").write_text(json.dumps(server))
    if nothing:
        client = json.loads((config / "config_fed_client.json").read_text())
        client["components"] = [
            {"id": "learner", "path": "benchmark_nothing.Nothing", "args": {}},
            *client["components"][1:],
        ]
        (config / "config_fed_client.json").write_text(json.dumps(client))
    return folder


def run(job: Path, workspace: Path, threads: int, data: Path) -> list[dict]:
    """Run a job in the simulator and return its rounds."""
    command = [
        str(Path(sys.executable).with_name("nvflare")), "simulator", str(job),
        "-n", str(CLIENTS), "-t", str(threads), "-w", str(workspace),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env={**os.environ, "FEDBN_DATA": str(data)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    file = workspace / "server" / "simulate_job" / "rounds.json"
    if done.returncode or not file.exists():
        sys.exit(f"{job.name} failed (exit code {done.returncode}):\n{done.stdout[-3000:]}")
    return json.loads(file.read_text())


def round_times(rounds: list[dict], threads: int) -> tuple[float, float]:
    """Return the median round, and the median time that local epochs took of it, in seconds.

    Sites that train at the same time share the processors, so with a thread per client the
    slowest site counts; one after the other, their sum does. The first round is left out: with a
    thread per client it alone pays for imports and data.
    """
    pick = sum if threads == 1 else max
    training = [
        pick(site.get("training_seconds", 0.0) for site in entry["sites"].values())
        for entry in rounds[1:]
    ]
    return statistics.median(r["seconds"] for r in rounds[1:]), statistics.median(training)


def main() -> None:
    """Run both jobs in turn, in both modes, and print what fedbn adds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="stores of the four sites; default: synthetic")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--modes", default="bare,threads")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = options.data
        if data is None:
            data = folder / "data"
            command = [sys.executable, "-m", "data_prep", "synthetic", "--out", str(data)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        modes = {"bare": (1, 3), "threads": (CLIENTS, 9)}
        for mode in options.modes.split(","):
            threads, rounds = modes[mode]
            jobs = {
                name: make_job(folder / f"{mode}_{name}", nothing=name == "nothing", rounds=rounds)
                for name in ("nothing", "fedbn")
            }
            kept: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
            for _ in range(options.repeats):
                for name, job in jobs.items():
                    result = run(job, folder / "workspace", threads, data.resolve())
                    kept[name].append(round_times(result, threads))
            print(
                f"\n{mode}: -n {CLIENTS} -t {threads}, {rounds} rounds, {options.repeats} runs each"
            )
            for name, values in kept.items():
                times = ", ".join(f"{seconds:.2f}" for seconds, _ in values)
                print(f"  {name:8} median round of each run: {times} s")
            nothing = statistics.median(seconds for seconds, _ in kept["nothing"])
            ours = statistics.median(seconds for seconds, _ in kept["fedbn"])
            training = statistics.median(t for _, t in kept["fedbn"])
            added = ours - nothing - training
            print(
                f"  local epochs {training:.2f} s a round; fedbn adds {added:+.2f} s a round "
                f"({added / CLIENTS:+.3f} s a task)\n"
                f"  ratio to a learner that does nothing: {added / nothing:+.1%} (at most 10 %)"
            )


if __name__ == "__main__":
    main()
