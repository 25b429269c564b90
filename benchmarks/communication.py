"""Bytes on FLARE's wire for one site and round: FedBN against FedAvg.

A job whose learner returns what it received runs in the simulator, and every frame that any of its
processes sends is counted. Two runs with different numbers of rounds are subtracted, so that
starting, the preflight and ending do not count. What is left is the task with the weights down to
the site, the result with the weights up, and FLARE's own messages around them.

Run: ``python benchmarks/communication.py``
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import simulator
from simulator import make_job, run

CLIENTS = 2
ROUNDS = (2, 6)

NETWORKS = {
    "ConnectomeMLP": {"name": "ConnectomeMLP", "args": {}},
    "DenseNet121": {
        "name": "DenseNet121",
        "args": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2},
    },
    'UNet(norm="batch")': {
        "name": "UNet",
        "args": {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "channels": [16, 32, 64, 128, 256],
            "strides": [2, 2, 2, 2],
            "num_res_units": 2,
            "norm": "batch",
        },
    },
}

COUNTER = '''
import atexit
import os
import sys

FOLDER = os.environ.get("FRAME_COUNT_FOLDER")


class Hook:
    """Counts what passes through the one method that sends a process's frames."""

    name = "nvflare.fuel.f3.sfm.sfm_conn"

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            original = module.SfmConnection.__init__

            def init(connection, conn, *args, **kwargs):
                send = conn.send_frame

                def counted(frame):
                    with open(os.path.join(FOLDER, str(os.getpid())), "ab") as file:
                        file.write(b"%d\\n" % len(frame))
                    return send(frame)

                conn.send_frame = counted
                original(connection, conn, *args, **kwargs)

            module.SfmConnection.__init__ = init

        spec.loader.exec_module = exec_module
        return spec


if FOLDER:
    sys.meta_path.insert(0, Hook())
'''


def counted_bytes(folder: Path) -> int:
    """Sum the sizes of all frames that a run has sent."""
    return sum(int(line) for file in folder.iterdir() for line in file.read_text().split())


def bytes_of_run(folder: Path, network: dict, policy: str, rounds: int) -> int:
    """Run the job and return the bytes that all of its processes sent."""
    job = make_job(folder / "job", nothing=True, rounds=rounds)
    file = job / "app" / "config" / "experiment.json"
    experiment = json.loads(file.read_text())
    experiment |= {"network": network, "policy": policy, "sites": ["NYU", "USM"]}
    file.write_text(json.dumps(experiment))
    frames = folder / "frames"
    frames.mkdir()
    os.environ["FRAME_COUNT_FOLDER"] = str(frames)
    run(job, folder / "workspace", CLIENTS, folder)
    return counted_bytes(frames)


def main() -> None:
    """Print bytes for each network under both policies."""
    simulator.CLIENTS = CLIENTS
    print(f"{'network':22}{'policy':>8}{'bytes a site and round, down + up':>36}{'of FedAvg':>12}")
    with tempfile.TemporaryDirectory() as temporary:
        hook = Path(temporary) / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(COUNTER)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(hook), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        for label, network in NETWORKS.items():
            counted = {}
            for policy in ("none", "fedbn"):
                totals = []
                for rounds in ROUNDS:
                    folder = Path(temporary) / f"{network['name']}_{policy}_{rounds}"
                    folder.mkdir()
                    totals.append(bytes_of_run(folder, network, policy, rounds))
                counted[policy] = (totals[1] - totals[0]) / ((ROUNDS[1] - ROUNDS[0]) * CLIENTS)
                share = counted[policy] / counted["none"]
                name = "FedAvg" if policy == "none" else "FedBN"
                print(f"{label:22}{name:>8}{counted[policy]:36,.0f}{share:12.2%}")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
