import functools

import numpy as np
import pytest

from data_prep.connectome import correlation_connectomes
from data_prep.synthetic import SITES, generate_site, hospital


@functools.cache
def connectomes(site, shift):
    subjects = list(generate_site(site, shift=shift))
    features = np.stack([correlation_connectomes(s.series)[0] for s in subjects])
    return features, np.array([s.diagnosis == "autism" for s in subjects])


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    first, again = (next(generate_site("UM", seed=3)).series for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - next(generate_site("UM", seed=4)).series).max() > 0


def test_subjects_do_not_depend_on_how_many_there_are():
    few, many = list(generate_site("USM", n_subjects=3)), list(generate_site("USM", n_subjects=8))
    for a, b in zip(few, many, strict=False):
        assert a.participant_id == b.participant_id
        np.testing.assert_array_equal(a.series, b.series)


@pytest.mark.parametrize("site", SITES)
def test_every_site_is_balanced_and_of_its_size(site):
    subjects = list(generate_site(site))
    assert len(subjects) == SITES[site].n_subjects
    assert sum(s.diagnosis == "autism" for s in subjects) == len(subjects) // 2
    assert {s.series.shape for s in subjects} == {(SITES[site].n_timepoints, 111)}
    assert len({s.participant_id for s in subjects}) == len(subjects)


def site_distances(shift):
    """How far the sites' mean connectomes are apart, in standard errors of a mean, squared."""
    means, errors = [], []
    for site in SITES:
        features, _ = connectomes(site, shift=shift)
        means.append(features.mean(axis=0))
        errors.append(features.var(axis=0, ddof=1) / len(features))
    pairs = [(i, j) for i in range(4) for j in range(i)]
    return [float(np.mean((means[i] - means[j]) ** 2 / (errors[i] + errors[j]))) for i, j in pairs]


def test_sites_differ_with_the_shift_and_only_with_it():
    """Without a shift the squared distance is that of two samples of one population, 1."""
    assert min(site_distances(True)) > 3
    assert max(site_distances(False)) < 1.5


@pytest.mark.parametrize("shift", [True, False])
def test_the_disease_is_the_same_edges_everywhere(shift):
    effects = []
    for site in SITES:
        features, autism = connectomes(site, shift=shift)
        effects.append(features[autism].mean(axis=0) - features[~autism].mean(axis=0))
    strongest = np.argsort(np.abs(np.sum(effects, axis=0)))[-100:]
    signs = np.sign([effect[strongest] for effect in effects])
    assert (np.abs(signs.sum(axis=0)) == 4).mean() > 0.9


def test_any_other_name_is_a_hospital_of_its_own():
    oslo, again, bergen = hospital("Oslo"), hospital("Oslo"), hospital("Bergen")
    assert oslo == again != bergen
    first = [next(generate_site(name)) for name in ("Oslo", "Bergen", "NYU")]
    assert [subject.site for subject in first] == ["Oslo", "Bergen", "NYU"]
    assert first[0].series.shape == (oslo.n_timepoints, 111)
    values = [subject.series[:80] for subject in first]
    assert not any(np.array_equal(values[k], values[k - 1]) for k in range(3))
    with pytest.raises(ValueError, match=r"site is 'St\. Olav'; use letters"):
        hospital("St. Olav")
