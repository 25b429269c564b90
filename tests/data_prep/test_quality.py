import pytest

from data_prep.participants import Subject
from data_prep.quality import QualityRule, apply_rule

ROIS = (("10", "Left Thalamus"), ("3455", "label 3455"), ("4802", "Left Occipital Pole"))


def subject(number, rng, *, n_timepoints=40, silent=(), value=0.0):
    series = rng.standard_normal((n_timepoints, len(ROIS)))
    series[:, list(silent)] = value
    return Subject(f"sub-{number}", "control", None, "n/a", "NYU", series)


@pytest.fixture
def subjects(rng):
    return [
        subject(1, rng),
        subject(2, rng, silent=[1]),
        subject(3, rng, silent=[0, 2], value=7.5),
        subject(4, rng, n_timepoints=31),
        subject(5, rng, n_timepoints=36),
        subject(6, rng),
    ]


def left_out(subjects, rule, window):
    kept, excluded = apply_rule(subjects, rule, window=window, rois=ROIS)
    assert sorted([s.participant_id for s in kept] + [e.participant_id for e in excluded]) == [
        s.participant_id for s in subjects
    ]
    return {e.participant_id[-1]: e for e in excluded}


@pytest.mark.parametrize(
    ("rule", "window", "expected"),
    [
        (QualityRule(), 32, "234"),
        (QualityRule(), None, "23"),
        (QualityRule(silent_rois="keep-zero"), 32, "4"),
        (QualityRule(min_timepoints=37), None, "2345"),
        (QualityRule(min_timepoints=10), 32, "234"),  # never shorter than the window
        (QualityRule(same_length=True), None, "2345"),
        (QualityRule(silent_rois="keep-zero"), None, ""),
    ],
)
def test_who_is_left_out(subjects, rule, window, expected):
    assert "".join(left_out(subjects, rule, window)) == expected


def test_reasons_name_what_was_found(subjects):
    out = left_out(subjects, QualityRule(same_length=True), 32)
    assert out["2"].reason == "ROI without signal"
    assert out["2"].detail == "no signal in 3455 (label 3455)"
    assert out["3"].detail == "no signal in 10 (Left Thalamus), 4802 (Left Occipital Pole)"
    assert (out["4"].reason, out["4"].detail) == (
        "too few time points",
        "31 time points, 32 needed",
    )
    assert out["5"].detail == "36 time points, most at the site have 40"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"silent_rois": "drop"}, "silent_rois is 'drop'; allowed are exclude, keep-zero"),
        ({"min_timepoints": 2}, "min_timepoints is 2; at least 3"),
    ],
)
def test_rules_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        QualityRule(**arguments)
