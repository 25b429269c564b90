"""How much the sites' batch norms differ, against numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_prep.site_store import read_site_store
from fedbn.federation.simulation import read_sites
from fedbn.federation.site_state import SiteStateError
from fedbn.report import site_models
from fedbn.report.site_models import share_between
from fedbn.tasks.data import DataError

LAYER = "hidden.0.norm"


@pytest.fixture
def models(workspace, settings):
    return site_models.from_workspace(workspace, settings, "a_job")


def with_norms(models, replaced, **entries):
    """Give the first site's layer these values, and the second's those of an untrained layer."""
    untrained = {"running_mean": 0.0, "running_var": 1.0, "weight": 1.0, "bias": 0.0}
    by_site = {}
    for k, (name, tensors) in enumerate(models.by_site.items()):
        values = untrained | (entries if k == 0 else {})
        by_site[name] = tensors | {
            f"{LAYER}.{entry}": torch.full((8,), value) for entry, value in values.items()
        }
    return replaced(models, by_site=by_site)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, 0.0),
        ({"running_mean": 2.0}, 2.0),
        ({"running_var": 7.0}, (7**0.5 - 1) / 2),  # in units of sqrt((7 + 1) / 2)
        (
            {"running_mean": 3.0, "running_var": 7.0},
            ((3 / 2) ** 2 + ((7**0.5 - 1) / 2) ** 2) ** 0.5,
        ),
        ({"weight": 5.0}, 0.0),
    ],
)
def test_statistics_are_as_far_as_their_normal_distributions(models, replaced, entries, expected):
    found = site_models.statistics_distance(with_norms(models, replaced, **entries), LAYER)
    assert found == pytest.approx(np.array([[0, expected], [expected, 0]]), abs=1e-6)


def test_gamma_and_beta_are_compared_by_themselves(models, replaced):
    changed = with_norms(models, replaced, weight=4.0, bias=4.0, running_mean=9.0)
    assert site_models.affine_distance(changed, LAYER)[0, 1] == pytest.approx(5.0)


def test_pairs_are_named_as_they_are_counted(models):
    matrix = np.array([[0, 3], [3, 0]])
    assert site_models.by_pair(matrix).tolist() == [3]
    assert site_models.pairs(models) == ["NYU - UM"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[0.0], [0.0], [1.0], [1.0]], 1.0),
        ([[0.0], [1.0], [0.0], [1.0]], 0.0),
        ([[0.0], [2.0], [2.0], [4.0]], 0.5),
        ([[1.0], [1.0], [1.0], [1.0]], 0.0),
    ],
)
def test_share_between_sites(values, expected):
    assert share_between(np.array(values), np.array([0, 0, 1, 1])) == pytest.approx(expected)


def test_models_of_a_workspace_are_those_of_the_run(models, results):
    assert list(models.by_site) == ["NYU", "UM"]
    for name, tensors in models.by_site.items():
        for entry, tensor in {**results.shared, **results.local[name]}.items():
            assert torch.equal(tensors[entry], tensor)


def test_a_workspace_without_models_has_none(tmp_path, settings):
    assert site_models.from_workspace(tmp_path, settings, "a_job") is None


def test_the_model_of_another_network_is_refused(workspace, settings):
    other = settings.changed(
        network={"name": "ConnectomeMLP", "args": {"in_features": 66, "hidden": [8, 8]}}
    )
    with pytest.raises(SiteStateError, match="is not the model of site 'NYU' in this run"):
        site_models.from_workspace(workspace, other, "a_job")


def test_embeddings_have_a_point_a_subject(models, stores_root, settings):
    sites = site_models.checked_sites(models, read_sites(stores_root, settings))
    found = site_models.embeddings(sites)
    assert [one.points.shape for one in found] == [(104, 2)] * 3
    for one in found:
        assert np.bincount(one.owner).tolist() == [64, 40]
        assert 0 <= one.between <= 1


def test_batch_norm_takes_out_a_shift_of_a_site(models, stores_root, settings):
    sites = site_models.checked_sites(models, read_sites(stores_root, settings))
    stored, _, after = site_models.embeddings(sites)
    assert stored.between > 3 * after.between


def test_other_data_than_the_models_were_trained_on_are_refused(models, write_store, tmp_path):
    write_store(tmp_path / "NYU", "NYU", n_subjects=40)
    with pytest.raises(DataError, match=r"site 'NYU': the store at .* is not the one"):
        site_models.checked_site(models, "NYU", read_site_store(tmp_path / "NYU"))
