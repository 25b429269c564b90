"""What a network is trained on and asked about: samples in batches, none of a single sample.

A site's samples may lie in memory as one tensor (:class:`TensorSamples`) or be read from disk as
they are needed; training and scoring know :class:`Samples` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


class Batch(NamedTuple):
    """Some samples as a network takes them.

    Attributes
    ----------
    inputs, targets
        On the network's device; what they are is the task's affair. The memory may be used again
        for the next batch.
    owners
        int64 (n,): the unit (patient, subject) that each sample is of.
    """

    inputs: Any
    targets: Any
    owners: np.ndarray


class Samples(Protocol):
    """The samples of some units, to be gone through as often as wanted."""

    @property
    def owners(self) -> np.ndarray:
        """int64 (n_samples,): the unit of each sample, as an index into the site's units."""
        ...

    def __len__(self) -> int: ...

    def batches(self, batch_size: int, seed: int | None = None) -> Iterable[Batch]:
        """Go through all samples once.

        With a seed they come as in training: shuffled, augmented if the task does that, and never
        alone in a batch. Without one they come in order and as they are.
        """
        ...


class TensorSamples:
    """Samples that lie in memory, one contiguous tensor on the network's device.

    Parameters
    ----------
    inputs
        (n, ...), floating point.
    targets
        (n, ...); classes are integers.
    owners
        int64 (n,); by default each sample is a unit of its own.
    """

    def __init__(
        self, inputs: torch.Tensor, targets: torch.Tensor, owners: np.ndarray | None = None
    ):
        if targets.ndim < 1 or len(targets) != len(inputs):
            raise ValueError(
                f"targets have shape {tuple(targets.shape)}, but there are {len(inputs)} samples: "
                "give one for each sample"
            )
        self.inputs = inputs.detach().contiguous()
        self.targets = targets.to(inputs.device)
        self.owners = np.arange(len(inputs)) if owners is None else owners
        self._memory: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def batches(self, batch_size: int, seed: int | None = None) -> Iterator[Batch]:
        """Go through all samples once; see :meth:`Samples.batches`."""
        if seed is None:
            for start in range(0, len(self), batch_size):
                part = slice(start, start + batch_size)
                yield Batch(self.inputs[part], self.targets[part], self.owners[part])
            return
        memory = self._batch_memory(batch_size)
        order = torch.Generator().manual_seed(seed)
        for rows in batch_indices(len(self), batch_size, order):
            place = rows.to(self.inputs.device)
            inputs = torch.index_select(self.inputs, 0, place, out=memory[: len(rows)])
            yield Batch(inputs, self.targets.index_select(0, place), self.owners[rows.numpy()])

    def _batch_memory(self, batch_size: int) -> torch.Tensor:
        """Return one piece of memory for the samples of every batch.

        On a CPU, giving megabytes back to the system at each step and asking for them again (page
        faults) costs as much as the arithmetic of a small network. So the samples have memory of
        their own, and glibc is shown a larger block that comes and goes untouched: from then on it
        keeps freed blocks below that size (``mallopt(3)``: the threshold is dynamic, up to 32 MB).
        """
        rows = min(batch_size + 1, len(self))
        if self._memory is None or len(self._memory) != rows:
            self._memory = self.inputs.new_empty((rows, *self.inputs.shape[1:]))
        if self._memory.device.type == "cpu":
            torch.empty(min(8 * self._memory.nbytes, 2**25 - 2**16), dtype=torch.uint8)
        return self._memory


def check_batch_size(batch_size: int) -> int:
    """Return a batch size that batch norm can train with.

    Raises
    ------
    ValueError
        If it is less than two.
    """
    if batch_size < 2:
        raise ValueError(
            f"batch_size is {batch_size}; it must be at least 2: "
            "batch norm cannot train on a batch of one sample"
        )
    return batch_size


def batch_indices(n: int, batch_size: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Shuffle ``0 … n-1`` into the batches of one epoch, none of which has a single sample.

    Batch norm cannot be trained on one sample, so a last sample that would be alone joins the
    batch before it. Every sample is in exactly one batch.

    Parameters
    ----------
    n : int
        Number of samples, at least two.
    batch_size : int
        At least two.
    generator : torch.Generator
        On the CPU. The order is that of a ``torch.utils.data.RandomSampler`` with this generator.

    Returns
    -------
    list of torch.Tensor
        int64, on the CPU. All have `batch_size` entries but the last, which has 2 to
        ``batch_size + 1`` (or `n`, if that is less).

    Raises
    ------
    ValueError
        If `n` or `batch_size` is less than two.
    """
    check_batch_size(batch_size)
    if n < 2:
        raise ValueError(
            f"a site needs at least two training samples, got {n}: batch norm cannot train on less"
        )
    batches = list(torch.randperm(n, generator=generator).split(batch_size))
    if len(batches[-1]) == 1:
        alone = batches.pop()
        batches[-1] = torch.cat([batches[-1], alone])
    return batches
