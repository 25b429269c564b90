"""The tangent space: by hand, against scipy and nilearn, and what a store has to be for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from nilearn.connectome import ConnectivityMeasure
from scipy.linalg import expm, logm, sqrtm
from sklearn.covariance import EmpiricalCovariance

from data_prep.site_store import StoreError, read_site_store
from fedbn.study.methods import METHODS
from fedbn.tasks.connectome.tangent import (
    correlation_matrices,
    matrix_exponential,
    matrix_logarithm,
    tangent_stores,
    tangent_vectors,
)

N_ROIS = 5


def random_correlations(n, rng):
    series = rng.standard_normal((n, 4 * N_ROIS, N_ROIS))
    series += rng.standard_normal((n, 4 * N_ROIS, 1))
    return np.stack([np.corrcoef(one, rowvar=False) for one in series])


def edges(matrices):
    rows, columns = np.triu_indices(N_ROIS, k=1)
    return matrices[:, rows, columns]


def circulant(row):
    return np.stack([np.roll(row, k) for k in range(len(row))])


@pytest.fixture
def rng():
    return np.random.default_rng(4)


@pytest.fixture
def stores(tmp_path, write_store):
    def small(values, participants):
        values *= 0.05

    def make(**changes):
        made = {}
        for site, n in (("NYU", 8), ("UM", 6)):
            folder = tmp_path / f"{site}{len(list(tmp_path.iterdir()))}"
            write_store(folder, site, n_subjects=n, **{"edit": small, **changes})
            made[site] = read_site_store(folder)
        return made

    return make


def test_two_rois_by_hand():
    """All matrices [[1, r], [r, 1]] have the same eigenvectors, and the edge of log C is z."""
    z = np.array([[0.2], [0.9], [-0.5]])
    matrices = correlation_matrices(z, 2)
    assert matrices[1] == pytest.approx(np.array([[1, np.tanh(0.9)], [np.tanh(0.9), 1]]))
    logarithms = matrix_logarithm(matrices)
    assert logarithms[:, 0, 1] == pytest.approx(z[:, 0])
    found = tangent_vectors(matrices, logarithms.mean(axis=0))
    assert found == pytest.approx(z - z.mean())


def test_each_step_is_that_of_scipy(rng):
    matrices = random_correlations(6, rng)
    log_reference = matrix_logarithm(matrices[:4]).mean(axis=0)
    reference = expm(np.mean([logm(one) for one in matrices[:4]], axis=0))
    assert matrix_exponential(log_reference) == pytest.approx(reference)
    whitening = np.linalg.inv(sqrtm(reference))
    steps = np.stack([logm(whitening @ one @ whitening) for one in matrices])
    found = tangent_vectors(matrices, log_reference)
    assert found == pytest.approx(edges(steps))


def test_nilearn_agrees_where_the_geometric_mean_is_the_log_euclidean_one():
    """So it is where matrices commute, as circulant ones do."""
    rows = [[1, r, s, s, r] for r, s in ((0.3, 0.1), (-0.2, 0.2), (0.4, -0.1), (0.1, 0.35))]
    matrices = np.stack([circulant(row) for row in rows])
    rng = np.random.default_rng(0)
    series = []
    for matrix in matrices:
        noise = rng.standard_normal((40, N_ROIS))
        basis, _ = np.linalg.qr(noise - noise.mean(axis=0))
        series.append(basis @ np.linalg.cholesky(matrix).T)
    measure = ConnectivityMeasure(EmpiricalCovariance(), kind="tangent", standardize=False)
    expected = edges(measure.fit_transform(series))
    logarithms = matrix_logarithm(matrices)
    assert tangent_vectors(matrices, logarithms.mean(axis=0)) == pytest.approx(expected, abs=1e-6)


def test_sites_together_have_the_reference_of_one_place(stores):
    given = stores()
    rows = {"NYU": np.arange(15), "UM": np.arange(3, 12)}
    found = tangent_stores(given, rows)
    matrices = {
        name: correlation_matrices(store.connectomes, store.n_rois) for name, store in given.items()
    }
    training = np.concatenate([matrices[name][rows[name]] for name in rows])
    log_reference = matrix_logarithm(training).mean(axis=0)
    scale = np.sqrt(np.mean(tangent_vectors(training, log_reference) ** 2))
    for name, store in found.items():
        expected = tangent_vectors(matrices[name], log_reference) / scale
        assert store.connectomes == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert store.connectomes.dtype == np.float32
        assert store.participants == given[name].participants


def test_the_order_of_sites_changes_no_bit(stores):
    given = stores()
    rows = {name: np.arange(9) for name in given}
    first = tangent_stores(given, rows)
    second = tangent_stores(dict(reversed(given.items())), rows)
    for name in given:
        assert np.array_equal(first[name].connectomes, second[name].connectomes)


def test_samples_that_are_not_for_training_change_no_other(stores):
    given = stores()
    rows = {"NYU": np.arange(15), "UM": np.arange(9)}
    values = np.array(given["UM"].connectomes)
    values[12:] *= -0.7
    changed = {**given, "UM": replace(given["UM"], connectomes=values)}
    first, second = tangent_stores(given, rows), tangent_stores(changed, rows)
    assert np.array_equal(first["NYU"].connectomes, second["NYU"].connectomes)
    assert np.array_equal(first["UM"].connectomes[:12], second["UM"].connectomes[:12])
    assert not np.array_equal(first["UM"].connectomes[12:], second["UM"].connectomes[12:])


def test_alone_a_site_has_a_reference_of_its_own(stores, experiment):
    given = stores()
    both, alone = experiment(sites=("NYU", "UM"), n_folds=3), experiment(sites=("UM",), n_folds=3)
    for name, same in (("tangent_single", True), ("tangent", False)):
        method = METHODS[name]
        found = [method.run(method.experiment(e), given)["UM"] for e in (both, alone)]
        equal = np.array_equal(*(one.test.parts.columns["p_1"] for one in found))
        assert equal == same, name


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"negative": "zero"}, "site 'NYU': .* negative values set to zero, .* --negative keep"),
        ({"kind": "partial correlation"}, "site 'NYU': .* of kind 'partial correlation'"),
    ],
)
def test_stores_that_hold_no_full_correlations_are_refused(stores, changes, sentence):
    given = stores(changes=changes)
    with pytest.raises(StoreError, match=sentence):
        tangent_stores(given, {name: np.arange(6) for name in given})


@pytest.mark.parametrize("row", [2, 20])
def test_a_matrix_that_is_not_positive_definite_is_refused(stores, row):
    """Whether for training or held out."""
    given = stores()
    values = np.array(given["NYU"].connectomes)
    values[row] = 3
    values[row, 0] = -3
    given["NYU"] = replace(given["NYU"], connectomes=values)
    with pytest.raises(StoreError, match=r"site 'NYU': .* not positive definite .* ledoit-wolf"):
        tangent_stores(given, {name: np.arange(12) for name in given})
