"""How fast a site trains on a CPU, against a DataLoader and stock dropout in the same run.

    python benchmarks/training.py [--source STORE] [--threads N] [--batch-size 32]

Two questions, each a ratio of samples per second (fedbn / peer), the median over repeats in each of
which one follows the other at once:

1. Dropout off: same batch order, same final weights; the ratio must be at least 1.
2. The reference's dropout of 0.5 on the inputs and the hidden layer: at least 3.

The peer is ``DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)``, Adam as
``torch.optim.Adam`` makes it, and ``nn.Dropout``. A step is then compared with what its arithmetic
and its memory traffic cannot do without, both measured in the same run. The exit code is 1 if a
ratio or the equality of the weights is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from fedbn.core.batches import TensorSamples
from fedbn.core.networks import build_network
from fedbn.core.training import TrainingSettings, derive_seed, train_epochs
from fedbn.tasks.connectome.network import ConnectomeMLP, PackedDropout
from fedbn.tasks.connectome.task import ConnectomeTask

SEED = 0
RANDOM_SHAPE = (1300, 6105)
REQUIRED_RATIO = {"off": 1.0, "0.5": 3.0}
LARGEST_DIFFERENCE = 1e-5


def main() -> int:
    """Run both comparisons and print them; return the exit code."""
    options = _parse_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    inputs, targets, what = _load(options.source)
    settings = TrainingSettings(batch_size=options.batch_size, local_epochs=options.epochs)
    n_steps = options.epochs * -(-len(inputs) // options.batch_size)
    print(
        f"{what}; Adam, batch {settings.batch_size}, {settings.local_epochs} epochs, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{options.repeats} alternated repeats"
    )
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"other work is running (load {load:.1f}): threads then wait for each other")
    passed = True
    step_seconds = {}
    for dropout, required in REQUIRED_RATIO.items():
        p = 0.0 if dropout == "off" else float(dropout)
        ours, peer, ratio, difference = _compare(inputs, targets, settings, p, options.repeats)
        step_seconds[dropout] = ours / n_steps
        passed &= ratio >= required
        rates = [len(inputs) * options.epochs / seconds for seconds in (ours, peer)]
        print(
            f"\ndropout {dropout}: fedbn {rates[0]:,.0f} samples/s, peer {rates[1]:,.0f} samples/s"
            f"\n  ratio {ratio:.2f} (required: {required:g})"
        )
        if p == 0:
            passed &= difference <= LARGEST_DIFFERENCE
            print(
                f"  largest difference of final weights {difference:.1e} "
                f"(allowed: {LARGEST_DIFFERENCE:g})"
            )
    _print_dropout(options.batch_size, inputs.shape[1])
    _print_limits(step_seconds, options.batch_size, inputs.shape[1])
    print("\npassed" if passed else "\nFAILED")
    return 0 if passed else 1


def train_as_peer(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, settings: TrainingSettings
) -> None:
    """Train with the usual loop, in the batch order that ``train_epochs`` derives from the seed."""
    # shuffle=True makes this sampler; it is made here so that its generator can be seeded alone.
    order = torch.Generator()
    dataset = TensorDataset(inputs, targets)
    loader = DataLoader(
        dataset, batch_size=settings.batch_size, sampler=RandomSampler(dataset, generator=order)
    )
    optimizer = torch.optim.Adam(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    criterion = nn.CrossEntropyLoss()
    model.train()
    for epoch in range(settings.local_epochs):
        order.manual_seed(derive_seed(SEED, "order", epoch))
        for batch, classes in loader:
            optimizer.zero_grad()
            criterion(model(batch), classes).backward()
            optimizer.step()


def train_as_site(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, settings: TrainingSettings
) -> None:
    """Train as a site does in a round."""
    samples = TensorSamples(inputs, targets)
    loss = ConnectomeTask().criterion(settings, samples)
    train_epochs(model, samples, settings, seed=SEED, loss=loss)


def _compare(
    inputs: torch.Tensor, targets: torch.Tensor, settings: TrainingSettings, p: float, repeats: int
) -> tuple[float, float, float, float]:
    """Return both median times in seconds, the median ratio, and the difference of weights."""
    args = {"in_features": inputs.shape[1], "input_dropout": p, "dropout": p}
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        ours = build_network("ConnectomeMLP", args, SEED)
        peer = _with_stock_dropout(build_network("ConnectomeMLP", args, SEED))
        runs: list[Callable[[], object]] = [
            lambda ours=ours: train_as_site(ours, inputs, targets, settings),
            lambda peer=peer: train_as_peer(peer, inputs, targets, settings),
        ]
        for k in (0, 1) if repeat % 2 else (1, 0):
            start = time.perf_counter()
            runs[k]()
            if repeat:  # the first is to warm up
                seconds[k].append(time.perf_counter() - start)
    state = peer.state_dict()
    difference = max(
        float((value - state[name]).abs().max()) for name, value in ours.state_dict().items()
    )
    ratio = statistics.median(slow / fast for fast, slow in zip(*seconds, strict=True))
    return statistics.median(seconds[0]), statistics.median(seconds[1]), ratio, difference


def _with_stock_dropout(network: nn.Module) -> nn.Module:
    """Replace packed dropout by the stock layer, or by nothing where it is off."""
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, PackedDropout):
                setattr(module, name, nn.Dropout(child.p) if child.p else nn.Identity())
    return network


def _print_dropout(batch_size: int, n_edges: int) -> None:
    print()
    for rows in sorted({batch_size, 100}):
        x = torch.randn(rows, n_edges)
        stock, packed = nn.Dropout(0.5), PackedDropout(0.5)
        print(
            f"dropout 0.5 on ({rows}, {n_edges}): stock {_median_ms(lambda: stock(x)):.3f} ms, "  # noqa: B023
            f"packed {_median_ms(lambda: packed(x)):.3f} ms"  # noqa: B023
        )


def _print_limits(step_seconds: dict[str, float], batch_size: int, n_edges: int) -> None:
    """Print a step's time next to its bare matrix products and its bare memory traffic."""
    network = ConnectomeMLP(in_features=n_edges)
    x = torch.randn(batch_size, n_edges)
    weight = torch.randn(16, n_edges)
    upstream = torch.randn(batch_size, 16)
    arithmetic = _median_ms(lambda: (x @ weight.t(), upstream.t() @ x))
    n_weights = sum(parameter.numel() for parameter in network.parameters())
    # Input: read once. Weights: read forward, read and written by Adam, as are both moments.
    # Gradients: written backward, read by Adam.
    n_bytes = 4 * (batch_size * n_edges + n_weights * (1 + 2 + 2 * 2 + 2))
    large = torch.zeros(2**25)
    target = torch.empty_like(large)
    bandwidth = 2 * 4 * large.numel() / (_median_ms(lambda: target.copy_(large), 15) / 1e3)
    memory = n_bytes / bandwidth * 1e3
    print(
        f"\na step's limits: {arithmetic:.3f} ms for the bare matrix products (forward and weight "
        f"gradient, {4 * 16 * batch_size * n_edges / arithmetic / 1e6:.0f} GFLOP/s);\n"
        f"  {memory:.3f} ms for {n_bytes / 1e6:.1f} MB that must move (input, weights, gradients, "
        f"Adam's state) at {bandwidth / 1e9:.1f} GB/s of a plain copy"
    )
    for dropout, seconds in step_seconds.items():
        step = seconds * 1e3
        print(
            f"  dropout {dropout}: a step takes {step:.3f} ms, {step / arithmetic:.1f} times the "
            f"arithmetic, {step / memory:.1f} times the memory limit, "
            f"{step / (arithmetic + memory):.1f} times their sum"
        )


def _median_ms(run: Callable[[], object], repeats: int = 100) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _load(source: Path | None) -> tuple[torch.Tensor, torch.Tensor, str]:
    if source is None:
        rng = np.random.default_rng(SEED)
        inputs = rng.standard_normal(RANDOM_SHAPE, dtype=np.float32)
        targets = rng.integers(0, 2, RANDOM_SHAPE[0])
        what = "random data"
    else:
        from data_prep.site_store import read_site_store

        store = read_site_store(source)
        inputs = np.array(store.connectomes)
        targets = store.labels[store.sample_participant]
        what = f"site store {store.site}"
    return (
        torch.from_numpy(inputs),
        torch.from_numpy(targets),
        f"{what}, {inputs.shape[0]} windows x {inputs.shape[1]} edges",
    )


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="a site store (default: random data)")
    parser.add_argument("--threads", type=int, help="default: the machine's")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
