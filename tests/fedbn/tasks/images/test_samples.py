"""The same bits with any number of workers and any cache; never one sample alone."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from fedbn.tasks.data import DataError
from fedbn.tasks.loading import Loading

CPU = torch.device("cpu")
PATCH = {"size": [16, 16], "per_image": 2, "foreground": 0.5}


def samples_of(sites, loading=None, **task):
    experiment, data = sites(**task)
    if loading is not None:
        experiment.task.load_as(loading)
    store = data["NORTH"]
    return experiment.task.samples(store, np.arange(len(store.units)), {}, CPU)


def drawn(samples, seed=3, size=5):
    return [(b.inputs.clone(), b.targets.clone(), b.owners) for b in samples.batches(size, seed)]


def assert_same(left, right):
    assert len(left) == len(right) > 1
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
        assert np.array_equal(a[2], b[2])


@pytest.mark.parametrize("patch", [None, PATCH])
def test_caches_and_workers_do_not_change_a_bit(sites, tmp_path, patch):
    one = drawn(samples_of(sites, patch=patch))
    for loading in (
        Loading("none"),
        Loading("disk", folder=tmp_path),
        Loading("disk", folder=tmp_path, workers=2),
        Loading(workers=2),
    ):
        torch.rand(3)  # the global state of the caller is of no account
        assert_same(one, drawn(samples_of(sites, loading, patch=patch)))
    other = drawn(samples_of(sites, patch=patch), seed=4)
    assert not torch.equal(one[0][0], other[0][0])


def test_a_seed_leaves_the_global_state_alone(sites):
    samples = samples_of(sites)
    state = torch.get_rng_state()
    drawn(samples)
    assert torch.equal(state, torch.get_rng_state())


def test_no_batch_has_one_image(sites):
    samples = samples_of(sites)
    n = len(samples)
    for size in range(2, n + 1):
        for batches in (samples.batches(size, 1), samples.clean_batches(size)):
            counts = [len(batch.owners) for batch in batches]
            assert min(counts) > 1
            assert sum(counts) == n


def test_without_a_seed_images_come_in_order_and_as_they_are(sites):
    samples = samples_of(sites, patch=PATCH)
    batches = list(samples.batches(4))
    assert np.array_equal(np.concatenate([b.owners for b in batches]), samples.owners)
    assert batches[0].inputs.shape == (4, 1, 64, 64)
    assert batches[0].targets.dtype == torch.int64
    again = list(samples.batches(4))
    assert torch.equal(batches[0].inputs, again[0].inputs)


def test_patches_stand_for_their_images_unit(sites):
    batch = next(iter(samples_of(sites, patch=PATCH).batches(4, 0)))
    assert batch.inputs.shape == (8, 1, 16, 16)
    assert batch.owners[0] == batch.owners[1]


def test_statistics_see_patches_without_augmentation(sites):
    samples = samples_of(sites, patch=None)
    clean = torch.cat([batch.inputs for batch in samples.clean_batches(4)])
    plain = torch.cat([batch.inputs for batch in samples.batches(len(samples))])
    assert torch.equal(clean, plain)
    patches = next(iter(samples_of(sites, patch=PATCH).clean_batches(4)))
    assert patches.inputs.shape[2:] == (16, 16)


def test_a_warm_disk_cache_reads_no_image_and_knows_transforms_and_content(
    sites, tmp_path, monkeypatch
):
    import fedbn.tasks.images.samples as module

    loading = Loading("disk", folder=tmp_path)
    first = drawn(samples_of(sites, loading))

    def refuse(*_, **__):
        raise AssertionError("read")

    with monkeypatch.context() as patched:
        patched.setattr(module, "read_image", refuse)
        assert_same(first, drawn(samples_of(sites, loading)))
        with pytest.raises(RuntimeError, match="Prepare"):
            drawn(samples_of(sites, loading, preprocessing=[]))


def test_a_damaged_cache_is_made_again(sites, tmp_path):
    loading = Loading("disk", folder=tmp_path)
    first = drawn(samples_of(sites, loading))
    files = sorted(tmp_path.rglob("*.pt"))
    files[0].write_bytes(files[0].read_bytes()[:200])
    files[1].write_bytes(b"")
    assert_same(first, drawn(samples_of(sites, loading)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named_here_and_not_outside(sites, workers):
    samples = samples_of(sites, Loading("none", workers=workers))
    record = samples.images.data[0]
    record["image"] = record["image"].replace(".png", "_gone.png")
    with pytest.raises(
        DataError, match=r"site 'NORTH': image .*_gone\.png cannot be used: "
    ) as found:
        list(samples.batches(2, 0))
    assert "_gone" not in found.value.public
    assert found.value.public.startswith("site 'NORTH': an image cannot be used")
    assert "\n" not in str(found.value)


def test_a_loader_process_that_ends_is_one_sentence(sites, monkeypatch):
    import fedbn.tasks.images.samples as module

    samples = samples_of(sites, Loading(workers=1))
    monkeypatch.setattr(module, "prepared_item", lambda *_: os._exit(1))
    with pytest.raises(DataError, match=r"'NORTH': a loader process ended.*lower workers"):
        list(samples.batches(4, 0))
