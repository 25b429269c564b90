"""Samples in memory: every one once, in the order of the seed, and none alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn.core.batches import TensorSamples, batch_indices, check_batch_size


def numbered(n, shape=(3,), owners=None):
    inputs = torch.arange(n, dtype=torch.float32).reshape(n, *[1] * len(shape)).expand(n, *shape)
    return TensorSamples(inputs, torch.arange(n), owners)


@given(n=st.integers(1, 60), batch_size=st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_without_a_seed_they_come_in_order(n, batch_size):
    samples = numbered(n)
    batches = [(b.inputs.clone(), b.targets.clone(), b.owners) for b in samples.batches(batch_size)]
    assert [len(one) for one, _, _ in batches[:-1]] == [batch_size] * (len(batches) - 1)
    inputs, targets, owners = (
        np.concatenate([np.asarray(b[k]) for b in batches]) for k in range(3)
    )
    assert inputs[:, 0].tolist() == targets.tolist() == owners.tolist() == list(range(n))


@pytest.mark.parametrize("shape", [(3,), (2, 4, 4), ()])
def test_with_a_seed_each_comes_once_beside_its_target_and_owner(shape):
    samples = numbered(23, shape, owners=np.arange(23) // 2)
    seen = []
    for batch in samples.batches(5, seed=3):
        assert batch.inputs.shape[1:] == shape
        firsts = batch.inputs.reshape(len(batch.inputs), -1)[:, 0]
        assert firsts.tolist() == batch.targets.tolist()
        assert batch.owners.tolist() == [k // 2 for k in batch.targets.tolist()]
        seen += batch.targets.tolist()
    assert sorted(seen) == list(range(23))
    generator = torch.Generator().manual_seed(3)
    assert seen == torch.cat(batch_indices(23, 5, generator)).tolist()
    assert seen != [k for b in samples.batches(5, seed=4) for k in b.targets.tolist()]


def test_the_last_one_is_never_alone():
    sizes = [len(batch.inputs) for batch in numbered(21).batches(5, seed=0)]
    assert sizes == [5, 5, 5, 6]


def test_they_can_be_gone_through_again_and_with_other_sizes():
    samples = numbered(21)
    first = [batch.targets.tolist() for batch in samples.batches(4, seed=1)]
    assert [len(b.inputs) for b in samples.batches(7, seed=1)] == [7, 7, 7]
    assert [batch.targets.tolist() for batch in samples.batches(4, seed=1)] == first


def test_what_was_given_is_not_changed_by_training_on_it():
    given_inputs = torch.arange(12.0).reshape(6, 2)
    samples = TensorSamples(given_inputs, torch.zeros(6, dtype=torch.int64))
    for batch in samples.batches(3, seed=0):
        batch.inputs.zero_()
    assert torch.equal(given_inputs, torch.arange(12.0).reshape(6, 2))
    assert torch.equal(samples.inputs, given_inputs)


def test_inputs_carry_no_gradient_and_owners_default_to_one_each():
    samples = TensorSamples(torch.zeros(3, 2, requires_grad=True), torch.zeros(3))
    assert not samples.inputs.requires_grad
    assert samples.owners.tolist() == [0, 1, 2]
    assert len(samples) == 3


@pytest.mark.parametrize("targets", [torch.zeros(2), torch.tensor(1.0)])
def test_targets_are_one_a_sample(targets):
    with pytest.raises(ValueError, match="but there are 3 samples: give one for each sample"):
        TensorSamples(torch.zeros(3, 2), targets)


@pytest.mark.parametrize("batch_size", [1, 0])
def test_a_batch_of_one_cannot_be_trained_on(batch_size):
    with pytest.raises(ValueError, match=f"batch_size is {batch_size}; it must be at least 2"):
        check_batch_size(batch_size)
    with pytest.raises(ValueError, match="at least 2"):
        list(numbered(5).batches(batch_size, seed=0))
    assert check_batch_size(2) == 2
