import math
import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
import torch
from fedbn.tasks.evaluation import (
    AFTER_TRAINING,
    BEFORE_TRAINING,
    METRICS,
    across_sites,
    assert_disjoint_subjects,
    binary_metrics,
    evaluate_site,
    predict,
    quick_accuracy,
    subject_scores,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedbn.core.networks import build_network


def make_network():
    return build_network("ConnectomeMLP", {"in_features": 9, "hidden": [4]}, seed=0)


class TestPredict:
    def test_probabilities_of_the_eval_mode(self):
        model, x = make_network(), torch.randn(7, 9)
        probability = predict(model, x)
        expected = model.eval()(x).softmax(dim=1).detach().double().numpy()
        np.testing.assert_allclose(probability, expected, atol=1e-6)
        np.testing.assert_allclose(probability.sum(axis=1), 1, atol=1e-15)

    @pytest.mark.parametrize("batch_size", [1, 2, 6, 7, 8, 1000])
    def test_batch_size_does_not_matter(self, batch_size):
        model, x = make_network(), torch.randn(7, 9)
        np.testing.assert_allclose(predict(model, x, batch_size), predict(model, x), atol=1e-6)

    def test_leaves_the_model_and_the_randomness_as_they_were(self):
        model = make_network().train()
        model.hidden[0].norm.eval()  # a batch norm that the researcher has frozen
        modes = [module.training for module in model.modules()]
        state = {name: value.clone() for name, value in model.state_dict().items()}
        before = torch.get_rng_state()
        predict(model, torch.randn(7, 9, generator=torch.Generator()))
        assert [module.training for module in model.modules()] == modes
        assert torch.equal(before, torch.get_rng_state())
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name

    def test_restores_the_mode_after_an_error(self):
        model = make_network().train()
        with pytest.raises(ValueError, match="takes input of shape"):
            predict(model, torch.randn(7, 8))
        assert all(module.training for module in model.modules())

    def test_large_logits_stay_finite(self):
        model = nn.Linear(1, 2)
        nn.init.constant_(model.weight, 0)
        model.bias.data = torch.tensor([1e4, -1e4])
        assert predict(model, torch.zeros(1, 1)).tolist() == [[1.0, 0.0]]

    @pytest.mark.parametrize(
        ("model", "x", "batch_size", "error", "match"),
        [
            (nn.Linear(2, 2), torch.zeros(0, 2), 5, ValueError, "no sample to predict"),
            (nn.Linear(2, 2), torch.zeros(3, 2), 0, ValueError, "batch_size is 0"),
            (nn.Conv2d(1, 2, 1), torch.zeros(3, 1, 4, 4), 5, ValueError, "logits"),
            (
                nn.Linear(2, 2),
                torch.tensor([[0.0, 0.0], [math.nan, 0.0]]),
                5,
                FloatingPointError,
                "no finite score for 1 samples",
            ),
        ],
    )
    def test_refuses(self, model, x, batch_size, error, match):
        with pytest.raises(error, match=match):
            predict(model, x, batch_size)


class TestSubjectScores:
    @pytest.mark.parametrize("owners", [[5, 2, 5, 2, 2], ["b", "a", "b", "a", "a"]])
    def test_mean_of_windows(self, owners):
        scores, subjects = subject_scores(np.array([0.2, 0.9, 0.4, 0.3, 0.6]), np.array(owners))
        assert subjects.tolist() == sorted(set(owners))
        np.testing.assert_allclose(scores, [0.6, 0.3])

    def test_class_probabilities(self):
        scores, _ = subject_scores(np.array([[0.2, 0.8], [0.4, 0.6], [1, 0]]), np.array([0, 0, 1]))
        np.testing.assert_allclose(scores, [[0.3, 0.7], [1, 0]])

    def test_nothing(self):
        scores, subjects = subject_scores(np.empty((0, 2)), np.empty(0))
        assert scores.shape == (0, 2)
        assert subjects.shape == (0,)

    def test_refuses_another_length(self):
        with pytest.raises(ValueError, match="one subject for each window"):
            subject_scores(np.zeros(3), np.zeros(2))


class TestBinaryMetrics:
    def test_by_hand(self):
        result = binary_metrics(
            np.array([1, 1, 1, 1, 0, 0]), np.array([0.9, 0.8, 0.5, 0.2, 0.7, 0.1])
        )
        assert result == {
            "accuracy": pytest.approx(4 / 6),
            "balanced_accuracy": pytest.approx((3 / 4 + 1 / 2) / 2),
            "auc": pytest.approx(6 / 8),
            "sensitivity": 3 / 4,
            "specificity": 1 / 2,
            "n": 6,
            "reasons": {},
        }

    def test_threshold(self):
        targets, scores = np.array([1, 0]), np.array([0.3, 0.2])
        assert binary_metrics(targets, scores)["sensitivity"] == 0
        assert binary_metrics(targets, scores, threshold=0.3)["accuracy"] == 1

    @pytest.mark.parametrize(
        ("label", "defined", "undefined", "missing"),
        [(1, "sensitivity", "specificity", 0), (0, "specificity", "sensitivity", 1)],
    )
    def test_one_class(self, label, defined, undefined, missing):
        result = binary_metrics(np.full(4, label), np.array([0.1, 0.9, 0.8, 0.7]))
        assert result["accuracy"] == result[defined] == (0.75 if label else 0.25)
        nan = {name for name in METRICS if math.isnan(result[name])}
        assert nan == {"auc", "balanced_accuracy", undefined} == set(result["reasons"])
        assert set(result["reasons"].values()) == {f"none of the 4 samples is of class {missing}"}

    def test_no_samples(self):
        result = binary_metrics(np.empty(0, dtype=int), np.empty(0))
        assert all(math.isnan(result[name]) for name in METRICS)
        assert set(result["reasons"]) == set(METRICS)
        assert result["n"] == 0

    @pytest.mark.parametrize(
        ("targets", "scores", "match"),
        [
            ([0, 1], [0.5, math.nan], "1 of 2 scores are not finite"),
            ([0, 1], [math.inf, 0.5], "1 of 2 scores are not finite"),
            ([0, 2], [0.5, 0.5], "targets must be 0 or 1"),
            ([0, 1, 1], [0.5, 0.5], r"shape \(3,\), but scores \(2,\)"),
        ],
    )
    def test_refuses(self, targets, scores, match):
        with pytest.raises(ValueError, match=match):
            binary_metrics(np.array(targets), np.array(scores))


class TestEvaluateSite:
    targets = np.array([1, 1, 1, 0, 0, 1])
    scores = np.array([0.9, 0.4, 0.4, 0.6, 0.1, 0.2])
    subjects = np.array([3, 3, 3, 1, 1, 2])

    def test_window_and_subject_by_hand(self):
        # Subject means: 1 -> 0.35 (class 0), 2 -> 0.2 (class 1), 3 -> 0.567 (class 1).
        probability = np.stack([1 - self.scores, self.scores], axis=1)
        result = evaluate_site(self.targets, probability, self.subjects)
        assert result["window"]["accuracy"] == 2 / 6
        assert result["window"]["n"] == 6
        assert result["subject"]["accuracy"] == pytest.approx(2 / 3)
        assert result["subject"]["auc"] == 0.5
        assert result["subject"]["n"] == 3

    def test_probability_of_class_1_alone(self):
        probability = np.stack([1 - self.scores, self.scores], axis=1)
        assert evaluate_site(self.targets, self.scores, self.subjects) == evaluate_site(
            self.targets, probability, self.subjects
        )

    def test_quick_accuracy_says_the_same(self):
        full = evaluate_site(self.targets, self.scores, self.subjects)
        quick = quick_accuracy(self.targets, self.scores, self.subjects)
        assert quick["window_accuracy"] == full["window"]["accuracy"]
        assert quick["subject_accuracy"] == full["subject"]["accuracy"]
        expected = -np.mean(np.log([0.9, 0.4, 0.4, 0.4, 0.9, 0.2]))
        assert quick["cross_entropy"] == pytest.approx(expected)

    def test_quick_accuracy_limits(self):
        certain_and_wrong = quick_accuracy(np.array([1]), np.array([0.0]), np.array([0]))
        assert math.isfinite(certain_and_wrong["cross_entropy"])
        nothing = quick_accuracy(np.empty(0), np.empty(0), np.empty(0))
        assert all(math.isnan(value) for value in nothing.values())

    @pytest.mark.parametrize("score", [evaluate_site, quick_accuracy])
    def test_refuses(self, score):
        with pytest.raises(ValueError, match="1 of 2 subjects have windows of both classes"):
            score(np.array([0, 1, 1]), np.array([0.1, 0.2, 0.3]), np.array([0, 0, 1]))
        with pytest.raises(ValueError, match=r"shape \(2, 3\); they must be"):
            score(np.array([0, 1]), np.zeros((2, 3)), np.array([0, 1]))

    @pytest.mark.slow
    def test_quick_accuracy_is_light(self):
        code = (
            "import sys, numpy as np; from fedbn.tasks.evaluation import quick_accuracy; "
            "quick_accuracy(np.array([0, 1]), np.array([0.1, 0.9]), np.array([0, 1])); "
            "print('sklearn' in sys.modules)"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.stdout.strip() == "False", run.stderr


def site_metrics(n, **changes):
    return {**dict.fromkeys(METRICS, 0.5), **changes, "n": n, "reasons": {}}


class TestAcrossSites:
    def test_both_means_by_hand(self):
        result = across_sites(
            {"UM": site_metrics(30, accuracy=0.5), "NYU": site_metrics(10, accuracy=0.9)}
        )
        assert result["macro"]["accuracy"] == pytest.approx(0.7)
        assert result["sample_weighted"]["accuracy"] == pytest.approx(0.6)
        assert result["weights"] == {"NYU": 10, "UM": 30}
        assert result["n_sites"] == dict.fromkeys(METRICS, 2)

    def test_undefined_stays_out_and_is_counted(self):
        result = across_sites(
            {
                "NYU": site_metrics(10, auc=0.8),
                "UM": site_metrics(30, auc=math.nan),
                "USM": site_metrics(20, auc=0.5),
            }
        )
        assert result["macro"]["auc"] == pytest.approx(0.65)
        assert result["sample_weighted"]["auc"] == pytest.approx(0.6)
        assert result["n_sites"]["auc"] == 2
        assert result["n_sites"]["accuracy"] == 3

    def test_undefined_everywhere(self):
        result = across_sites({"NYU": binary_metrics(np.empty(0), np.empty(0))})
        assert math.isnan(result["macro"]["auc"])
        assert math.isnan(result["sample_weighted"]["accuracy"])
        assert result["n_sites"]["auc"] == 0

    @given(
        st.lists(
            st.tuples(st.integers(1, 500), st.floats(0, 1) | st.just(math.nan)),
            min_size=1,
            max_size=5,
        )
    )
    @settings(max_examples=40, deadline=None)
    def test_same_bits_in_any_order(self, sites):
        per_site = {f"site-{k}": site_metrics(n, auc=auc) for k, (n, auc) in enumerate(sites)}
        results = {
            str(across_sites({name: per_site[name] for name in order}))
            for order in permutations(per_site)
        }
        assert len(results) == 1

    @pytest.mark.parametrize(
        ("per_site", "match"),
        [
            ({}, "no site to average"),
            (
                {"NYU": site_metrics(3), "UM": {"accuracy": 0.5, "n": 3, "reasons": {}}},
                "sites 'NYU' and 'UM' differ in their metrics: auc, balanced_accuracy",
            ),
        ],
    )
    def test_refuses(self, per_site, match):
        with pytest.raises(ValueError, match=match):
            across_sites(per_site)


def test_before_and_after_are_named():
    assert (BEFORE_TRAINING, AFTER_TRAINING) == ("before_training", "after_training")


@pytest.mark.parametrize("kind", [list, np.array, set])
def test_disjoint_subjects(kind):
    assert_disjoint_subjects(kind(["sub-1", "sub-2"]), kind(["sub-3"]))
    with pytest.raises(ValueError, match="training and the test samples: 2;") as caught:
        assert_disjoint_subjects(kind(["sub-1", "sub-2", "sub-3"]), kind(["sub-3", "sub-2"]))
    assert "sub-" not in str(caught.value), "ids stay out of logs"


def test_disjoint_windows_of_subjects():
    with pytest.raises(ValueError, match="samples: 1;"):
        assert_disjoint_subjects(np.array([1, 1, 2]), np.array([2, 2, 3]))
