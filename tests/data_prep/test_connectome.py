import resource
import warnings

import numpy as np
import pytest
from nilearn.connectome import ConnectivityMeasure
from sklearn.covariance import EmpiricalCovariance, LedoitWolf

from data_prep.abide import Abide, find_abide
from data_prep.connectome import (
    ConnectomeSettings,
    correlation_connectomes,
    tangent_connectomes,
    whole_scan_connectome,
    window_starts,
)
from data_prep.roi_files import read_roi_file

ESTIMATOR = {
    "ledoit-wolf": LedoitWolf(store_precision=False),
    "pearson": EmpiricalCovariance(store_precision=False),
}


def smooth_series(rng, n_timepoints=70, n_rois=23):
    """Signals as correlated as real ones: slow, with a component common to all."""
    x = rng.standard_normal((n_timepoints, n_rois)).cumsum(axis=0)
    return 30 * (x + 2 * rng.standard_normal((n_timepoints, 1))) + rng.normal(0, 100, n_rois)


def nilearn_loop(series, window, stride, estimator):
    """One fit a window, and nilearn's lower triangle in our upper-triangle order."""
    measure = ConnectivityMeasure(
        cov_estimator=ESTIMATOR[estimator],
        kind="correlation",
        vectorize=True,
        discard_diagonal=True,
    )
    n_rois = series.shape[1]
    place = np.zeros((n_rois, n_rois), dtype=int)
    place[np.tril_indices(n_rois, k=-1)] = np.arange(n_rois * (n_rois - 1) // 2)
    order = place.T[np.triu_indices(n_rois, k=1)]
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for start in range(0, len(series) - window + 1, stride):
            rows.append(measure.fit_transform([series[start : start + window]])[0][order])
    return np.arctanh(np.array(rows))


@pytest.mark.parametrize("estimator", ["ledoit-wolf", "pearson"])
@pytest.mark.parametrize(
    ("window", "stride"), [(32, 1), (32, 16), (5, 3), (70, 1)], ids=lambda v: str(v)
)
def test_same_values_as_nilearn(rng, estimator, window, stride):
    series = smooth_series(rng)
    ours = correlation_connectomes(series, window=window, stride=stride, estimator=estimator)
    expected = nilearn_loop(series, window, stride, estimator)
    assert ours.shape == expected.shape
    assert ours.dtype == np.float32
    assert np.abs(expected).max() > 0.5  # the comparison is about something
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("estimator", ["ledoit-wolf", "pearson"])
def test_same_values_as_nilearn_on_real_scans(abide_source, estimator):
    data = Abide((find_abide(abide_source),))
    for site in ("NYU", "UCLA"):
        series = read_roi_file(data.join(site).joined[0][1].file)
        ours = correlation_connectomes(series, window=32, stride=12, estimator=estimator)
        expected = nilearn_loop(series, 32, 12, estimator)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def test_estimators_differ(rng):
    series = smooth_series(rng)
    shrunk = correlation_connectomes(series, window=32, stride=8, estimator="ledoit-wolf")
    plain = correlation_connectomes(series, window=32, stride=8, estimator="pearson")
    assert np.abs(shrunk - plain).max() > 0.1


def test_a_silent_roi_has_zero_edges_and_the_rest_are_as_nilearn_has_them(rng):
    series = smooth_series(rng)
    series[:, 4] = 0.0
    ours = correlation_connectomes(series, window=32, stride=8)
    np.testing.assert_allclose(ours, nilearn_loop(series, 32, 8, "ledoit-wolf"), atol=1e-5)
    rows, columns = np.triu_indices(23, k=1)
    assert (ours[:, (rows == 4) | (columns == 4)] == 0).all()
    assert (ours[:, (rows != 4) & (columns != 4)] != 0).all()


@pytest.mark.parametrize("constant", [0.1, -7.3e5, 1e-9])
def test_an_roi_constant_within_one_window_only_has_zero_edges_there(rng, constant):
    series = smooth_series(rng)
    series[:32, 4] = constant
    ours = correlation_connectomes(series, window=32, stride=38, estimator="pearson")
    rows, columns = np.triu_indices(23, k=1)
    edges = (rows == 4) | (columns == 4)
    assert (ours[0, edges] == 0).all()
    assert (ours[1, edges] != 0).all()


@pytest.mark.parametrize("estimator", ["ledoit-wolf", "pearson"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_duplicate_roi_stays_finite(rng, estimator, sign):
    series = smooth_series(rng)
    series[:, 1] = sign * 3.0 * series[:, 0] + 5.0
    z = correlation_connectomes(series, window=16, stride=4, estimator=estimator)
    assert np.isfinite(z).all()
    assert np.abs(z).max() < 8.5
    if estimator == "pearson":
        assert (np.sign(z[:, 0]) == sign).all()
        assert np.abs(z[:, 0]).min() > 8.0


def test_all_rois_silent_gives_zeros():
    assert (correlation_connectomes(np.zeros((20, 4)), window=8, stride=4) == 0).all()


def test_negative_values_become_zero_and_no_other_changes(rng):
    series = smooth_series(rng)
    keep = correlation_connectomes(series, window=32, stride=8)
    zero = correlation_connectomes(series, window=32, stride=8, negative="zero")
    assert (keep < 0).any()
    np.testing.assert_array_equal(zero, np.where(keep > 0, keep, 0))


def test_edges_are_in_upper_triangle_order(rng):
    """Only edge (1, 3) of five ROIs is strong: it must be at its place in triu_indices."""
    series = rng.standard_normal((200, 5))
    series[:, 3] = series[:, 1] + 0.1 * rng.standard_normal(200)
    z = correlation_connectomes(series)[0]
    rows, columns = np.triu_indices(5, k=1)
    strongest = int(np.argmax(z))
    assert (rows[strongest], columns[strongest]) == (1, 3)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 50])
def test_threads_do_not_change_a_bit(rng, n_threads):
    series = smooth_series(rng, n_timepoints=120)
    one = correlation_connectomes(series, window=20, stride=1, n_threads=1)
    many = correlation_connectomes(series, window=20, stride=1, n_threads=n_threads)
    np.testing.assert_array_equal(one, many)


def test_writes_into_the_place_given(rng):
    series = smooth_series(rng)
    place = np.full((5, 253), np.nan, dtype=np.float32)
    result = correlation_connectomes(series, window=32, stride=16, out=place[1:4])
    assert np.isnan(place[[0, 4]]).all()
    np.testing.assert_array_equal(place[1:4], result)
    with pytest.raises(ValueError, match=r"out is float32 \(5, 253\), expected float32 \(3, 253\)"):
        correlation_connectomes(series, window=32, stride=16, out=place)


def test_gain_and_offset_of_an_roi_do_not_matter(rng):
    series = smooth_series(rng)
    changed = series * rng.uniform(0.1, 10, 23) + rng.normal(0, 1000, 23)
    np.testing.assert_allclose(
        correlation_connectomes(changed, window=32, stride=8),
        correlation_connectomes(series, window=32, stride=8),
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("n", "window", "stride", "expected"),
    [
        (176, 32, 1, 145),
        (116, 32, 16, 6),
        (32, 32, 1, 1),
        (31, 32, 1, 0),
        (176, None, None, 1),
    ],
)
def test_number_of_windows(n, window, stride, expected):
    starts = window_starts(n, window, stride)
    assert len(starts) == expected
    assert starts.dtype == np.int64
    if window and expected:
        assert starts[-1] + window <= n < starts[-1] + window + stride


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: np.where(x == x[3, 2], np.nan, x), "nan at time point 3, column 2"),
        (lambda x: np.where(x == x[3, 2], np.inf, x), "inf at time point 3, column 2"),
        (lambda x: x[:10], "the scan has 10 time points, the window needs 32"),
        (lambda x: x[:, 0], r"series has shape \(70,\)"),
    ],
)
def test_a_series_that_cannot_be_used_is_refused(rng, change, message):
    with pytest.raises(ValueError, match=message):
        correlation_connectomes(change(smooth_series(rng)), window=32, stride=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "precision"}, "kind is 'precision'; allowed are correlation, partial"),
        ({"estimator": "spearman"}, "estimator is 'spearman'; allowed are ledoit-wolf, pearson"),
        ({"negative": "abs"}, "negative is 'abs'; allowed are keep, zero"),
        ({"window": 2}, "window is 2; at least 3"),
        ({"stride": 0}, "stride is 0"),
        ({"stride": None}, "window and stride are given together"),
        ({"kind": "tangent"}, "kind 'tangent' is for whole scans only"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ConnectomeSettings(**arguments)


# ------------------------------------------------------------------------------------ other kinds


PEARSON = {"estimator": "pearson"}


def whole(kind, **changes):
    return ConnectomeSettings(kind, window=None, stride=None, **changes)


@pytest.mark.parametrize("estimator", ["ledoit-wolf", "pearson"])
@pytest.mark.parametrize("kind", ["correlation", "partial correlation", "covariance"])
def test_whole_scan_kinds_are_nilearns(rng, kind, estimator):
    series = smooth_series(rng)
    measure = ConnectivityMeasure(cov_estimator=ESTIMATOR[estimator], kind=kind)
    expected = measure.fit_transform([series])[0][np.triu_indices(23, k=1)]
    if kind != "covariance":
        expected = np.arctanh(expected)
    ours = whole_scan_connectome(series, whole(kind, estimator=estimator))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
    zero = whole_scan_connectome(series, whole(kind, estimator=estimator, negative="zero"))
    np.testing.assert_array_equal(zero, np.maximum(ours, 0))


def test_tangent_is_nilearns_with_the_reference_of_the_training_subjects(rng):
    scans = [smooth_series(rng, n_rois=8) for _ in range(7)]
    training = np.array([True, True, False, True, True, False, True])
    measure = ConnectivityMeasure(cov_estimator=ESTIMATOR["ledoit-wolf"], kind="tangent")
    measure.fit([s for s, use in zip(scans, training, strict=True) if use])
    rows, columns = np.triu_indices(8, k=1)
    expected = measure.transform(scans)[:, rows, columns]
    ours = tangent_connectomes(scans, training, whole("tangent"))
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_tangent_reference_never_sees_a_held_out_subject(rng):
    """Whatever the held-out subject's scan is, nobody else's connectome changes."""
    scans = [smooth_series(rng, n_rois=8) for _ in range(6)]
    training = np.array([True, True, True, True, True, False])
    first = tangent_connectomes(scans, training, whole("tangent"))
    scans[5] = 1000 * smooth_series(rng, n_rois=8)
    second = tangent_connectomes(scans, training, whole("tangent"))
    np.testing.assert_array_equal(first[:5], second[:5])
    assert np.abs(first[5] - second[5]).max() > 0.1
    scans[0] = smooth_series(rng, n_rois=8)  # a training subject does change the others
    assert np.abs(tangent_connectomes(scans, training, whole("tangent"))[1] - second[1]).max() > 0


@pytest.mark.parametrize(
    "compute",
    [
        lambda scans: whole_scan_connectome(scans[0], whole("partial correlation", **PEARSON)),
        lambda scans: tangent_connectomes(scans, np.ones(3, bool), whole("tangent", **PEARSON)),
    ],
    ids=["partial correlation", "tangent"],
)
def test_an_inverse_that_does_not_exist_is_refused(rng, compute):
    scans = [rng.standard_normal((20, 23)) for _ in range(3)]
    with pytest.raises(ValueError, match="20 time points and 23 ROIs does not allow; use ledoit"):
        compute(scans)


def test_tangent_needs_training_subjects(rng):
    with pytest.raises(ValueError, match="2 training subjects or more, there are 1"):
        tangent_connectomes([smooth_series(rng)], np.ones(1, bool), whole("tangent"))


# --------------------------------------------------------------------------------------- the size


def test_memory_beyond_the_output_is_small(rng):
    """A long scan of 111 ROIs: 49 MB of output, a few MB for the work."""
    series = smooth_series(rng, n_timepoints=2031, n_rois=111)
    out = np.zeros((2000, 6105), dtype=np.float32)
    out += 1  # so that all of its pages exist
    correlation_connectomes(series[:64], window=32, stride=1)  # BLAS has its buffers
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    correlation_connectomes(series, window=32, stride=1, out=out)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < 60
