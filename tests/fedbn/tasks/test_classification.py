"""Classes: probabilities by sample and by unit, what is called, and what that is worth."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from tables import table_experiment
from torch import nn

from fedbn.core.batches import TensorSamples
from fedbn.core.networks import build_network
from fedbn.core.training import TrainingSettings, train_epochs
from fedbn.tasks.base import Scores
from fedbn.tasks.classification import (
    OWN_THRESHOLD,
    THRESHOLD,
    called,
    class_targets,
    classification_metrics,
    make_scores,
    predict,
    probabilities,
    two_class_scores,
    unit_means,
)
from fedbn.tasks.connectome.task import ConnectomeTask

TASK = ConnectomeTask()
THREE = table_experiment(3).task


def make_network():
    return build_network("ConnectomeMLP", {"in_features": 9, "hidden": [4]}, seed=0)


def samples_of(inputs, targets=None):
    return TensorSamples(
        inputs, torch.zeros(len(inputs), dtype=torch.int64) if targets is None else targets
    )


def probability_of(model, inputs, *more):
    return predict(model, samples_of(inputs), *more)[0]


def of_classes(targets, probability, **facts):
    """Scores of any number of classes, a row a unit."""
    columns = {f"p_{k}": np.array(column) for k, column in enumerate(zip(*probability))}  # noqa: B905
    targets = np.array(targets, dtype=np.int64)
    return Scores(np.arange(len(targets)), {"target": targets, **columns}, facts=facts)


class TestPredict:
    def test_probabilities_of_the_eval_mode(self):
        model, x = make_network(), torch.randn(7, 9)
        probability, targets, owners = predict(model, samples_of(x, torch.arange(7) % 2))
        expected = model.eval()(x).softmax(dim=1).detach().double().numpy()
        np.testing.assert_allclose(probability, expected, atol=1e-6)
        np.testing.assert_allclose(probability.sum(axis=1), 1, atol=1e-15)
        assert targets.tolist() == [0, 1, 0, 1, 0, 1, 0]
        assert owners.tolist() == list(range(7))

    @pytest.mark.parametrize("batch_size", [1, 2, 6, 7, 8, 1000])
    def test_batch_size_does_not_matter(self, batch_size):
        model, x = make_network(), torch.randn(7, 9)
        np.testing.assert_allclose(
            probability_of(model, x, batch_size), probability_of(model, x), atol=1e-6
        )

    def test_leaves_the_model_and_the_randomness_as_they_were(self):
        model = make_network().train()
        model.hidden[0].norm.eval()  # a batch norm that the researcher has frozen
        modes = [module.training for module in model.modules()]
        state = {name: value.clone() for name, value in model.state_dict().items()}
        before = torch.get_rng_state()
        probability_of(model, torch.randn(7, 9, generator=torch.Generator()))
        assert [module.training for module in model.modules()] == modes
        assert torch.equal(before, torch.get_rng_state())
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name

    def test_restores_the_mode_after_an_error(self):
        model = make_network().train()
        with pytest.raises(ValueError, match="takes input of shape"):
            probability_of(model, torch.randn(7, 8))
        assert all(module.training for module in model.modules())

    def test_large_logits_stay_finite(self):
        model = nn.Linear(1, 2)
        nn.init.constant_(model.weight, 0)
        model.bias.data = torch.tensor([1e4, -1e4])
        assert probability_of(model, torch.zeros(1, 1)).tolist() == [[1.0, 0.0]]

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
            probability_of(model, x, batch_size)


class TestUnitMeans:
    @pytest.mark.parametrize("owners", [[5, 2, 5, 2, 2], ["b", "a", "b", "a", "a"]])
    def test_mean_of_samples(self, owners):
        scores, units = unit_means(np.array([0.2, 0.9, 0.4, 0.3, 0.6]), np.array(owners))
        assert units.tolist() == sorted(set(owners))
        np.testing.assert_allclose(scores, [0.6, 0.3])

    def test_class_probabilities(self):
        scores, _ = unit_means(np.array([[0.2, 0.8], [0.4, 0.6], [1, 0]]), np.array([0, 0, 1]))
        np.testing.assert_allclose(scores, [[0.3, 0.7], [1, 0]])

    def test_nothing(self):
        scores, units = unit_means(np.empty((0, 2)), np.empty(0))
        assert scores.shape == (0, 2)
        assert units.shape == (0,)

    @pytest.mark.parametrize(("values", "owners"), [((3,), (2,)), ((3,), (3, 1)), ((), (0,))])
    def test_refuses_another_shape(self, values, owners):
        with pytest.raises(ValueError, match="give one unit a sample"):
            unit_means(np.zeros(values), np.zeros(owners))


class TestMakeScores:
    targets = np.array([1, 1, 1, 0, 0, 1])
    positive = np.array([0.9, 0.4, 0.4, 0.6, 0.1, 0.2])
    units = np.array([3, 3, 3, 1, 1, 2])

    def scores(self, *, parts=True):
        probability = np.stack([1 - self.positive, self.positive], axis=1)
        return make_scores(probability, self.targets, self.units, parts=parts)

    def test_units_and_their_samples_by_hand(self):
        # Means: 1 -> 0.35 (class 0), 2 -> 0.2 (class 1), 3 -> 0.567 (class 1).
        scores = self.scores()
        assert scores.units.tolist() == [1, 2, 3]
        assert scores.columns["target"].tolist() == [0, 1, 1]
        np.testing.assert_allclose(scores.columns["p_1"], [0.35, 0.2, 1.7 / 3])
        result = TASK.measure(scores)
        assert result["window"]["accuracy"] == 2 / 6
        assert result["window"]["n"] == 6
        assert result["subject"]["accuracy"] == pytest.approx(2 / 3)
        assert result["subject"]["auc"] == 0.5
        assert result["subject"]["n"] == 3

    def test_without_parts_there_is_nothing_but_the_units(self):
        assert self.scores(parts=False).parts is None

    def test_what_every_round_follows_says_the_same(self):
        scores = self.scores()
        full, quick = TASK.measure(scores), TASK.follow(scores)
        assert tuple(quick) == TASK.followed
        assert quick["window_accuracy"] == full["window"]["accuracy"]
        assert quick["subject_accuracy"] == full["subject"]["accuracy"]
        expected = -np.mean(np.log([0.9, 0.4, 0.4, 0.4, 0.9, 0.2]))
        assert quick["cross_entropy"] == pytest.approx(expected)

    def test_one_who_is_certain_and_wrong_costs_a_finite_loss(self):
        scores = make_scores(np.array([[1.0, 0.0]]), np.array([1]), np.array([0]), parts=False)
        followed = THREE.follow(scores)
        assert math.isfinite(followed["cross_entropy"])
        assert tuple(followed) == ("subject_accuracy", "cross_entropy")

    def test_three_classes(self):
        probability = np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
        scores = make_scores(probability, np.array([0, 0, 2]), np.array([4, 4, 7]), parts=True)
        np.testing.assert_allclose(probabilities(scores), [[0.4, 0.3, 0.3], [0.1, 0.1, 0.8]])
        np.testing.assert_array_equal(probabilities(scores.parts), probability)
        assert scores.columns["target"].tolist() == [0, 2]

    @pytest.mark.parametrize("targets", [[0, 1, 1], [0, 2, 2], [1, 0, 2], [2, 0, 0]])
    def test_a_unit_of_two_classes_is_refused(self, targets):
        # The mean of 0 and 2 is a class, and nobody is of it.
        with pytest.raises(ValueError, match="1 of 2 subjects have samples of two classes"):
            make_scores(np.full((3, 3), 1 / 3), np.array(targets), np.array([1, 1, 0]), parts=False)

    @pytest.mark.slow
    def test_following_is_light(self):
        code = (
            "import sys, numpy as np; from fedbn.tasks.classification import make_scores; "
            "from fedbn.tasks.connectome.task import ConnectomeTask; p = np.eye(2); "
            "ConnectomeTask().follow(make_scores(p, np.array([0, 1]), np.arange(2), parts=True)); "
            "print('sklearn' in sys.modules)"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.stdout.strip() == "False", run.stderr


class TestCalled:
    def test_ties_at_the_threshold_are_positive(self):
        scores = two_class_scores(np.array([0, 0, 1]), np.array([0.5, np.nextafter(0.5, 0), 0.5]))
        assert called(scores).tolist() == [1, 0, 1]

    @pytest.mark.parametrize(
        ("threshold", "expected"), [(0.3, [1, 1]), (0.3001, [0, 1]), (0, [1, 1]), (0.9, [0, 0])]
    )
    def test_the_threshold_among_the_facts_decides(self, threshold, expected):
        scores = of_classes([0, 1], [(0.7, 0.3), (0.2, 0.8)], **{THRESHOLD: threshold})
        assert called(scores).tolist() == expected

    def test_of_three_equally_probable_classes_the_first_is_called(self):
        scores = of_classes([0, 0, 0], [(0.4, 0.4, 0.2), (0.2, 0.4, 0.4), (0.3, 0.3, 0.4)])
        assert called(scores).tolist() == [0, 1, 2]

    def test_a_threshold_has_no_say_over_three_classes(self):
        scores = of_classes([0], [(0.2, 0.3, 0.5)], **{THRESHOLD: 0.1})
        assert called(scores).tolist() == [2]


class TestTwoClasses:
    names = ("accuracy", "balanced_accuracy", "auc", "sensitivity", "specificity", "brier")

    def metrics(self, targets, positive, **facts):
        scores = two_class_scores(np.array(targets, dtype=np.int64), np.array(positive))
        return classification_metrics(dataclasses.replace(scores, facts=facts))

    def test_by_hand(self):
        result = self.metrics([1, 1, 1, 1, 0, 0], [0.9, 0.8, 0.5, 0.2, 0.7, 0.1])
        assert result == {
            "accuracy": pytest.approx(4 / 6),
            "balanced_accuracy": pytest.approx((3 / 4 + 1 / 2) / 2),
            "auc": pytest.approx(6 / 8),
            "sensitivity": 3 / 4,
            "specificity": 1 / 2,
            "brier": pytest.approx((0.01 + 0.04 + 0.25 + 0.64 + 0.49 + 0.01) / 6),
            "n": 6,
            "reasons": {},
        }

    def test_ties_count_half_in_the_auc(self):
        assert self.metrics([1, 0, 0], [0.5, 0.5, 0.2])["auc"] == 0.75
        assert self.metrics([1, 0], [0.5, 0.5])["auc"] == 0.5

    def test_thresholds(self):
        targets, positive = [1, 0], [0.3, 0.2]
        assert self.metrics(targets, positive)["sensitivity"] == 0
        assert self.metrics(targets, positive, **{THRESHOLD: 0.3})["accuracy"] == 1
        own = self.metrics(targets, positive, **{OWN_THRESHOLD: 0.3})
        assert (own["accuracy"], own["accuracy_own_threshold"]) == (0.5, 1)
        assert "accuracy_own_threshold" not in self.metrics(targets, positive)

    @pytest.mark.parametrize(
        ("label", "defined", "undefined", "missing"),
        [(1, "sensitivity", "specificity", 0), (0, "specificity", "sensitivity", 1)],
    )
    def test_one_class(self, label, defined, undefined, missing):
        result = self.metrics([label] * 4, [0.1, 0.9, 0.8, 0.7])
        assert result["accuracy"] == result[defined] == (0.75 if label else 0.25)
        nan = {name for name in self.names if math.isnan(result[name])}
        assert nan == {"auc", "balanced_accuracy", undefined} == set(result["reasons"])
        assert set(result["reasons"].values()) == {f"none of the 4 samples is of class {missing}"}

    def test_no_samples(self):
        result = self.metrics([], [])
        assert all(math.isnan(result[name]) for name in self.names)
        assert set(result["reasons"]) == set(self.names)
        assert result["n"] == 0

    def test_every_metric_is_one_that_the_task_states(self):
        stated = {metric.name for metric in TASK.metrics}
        assert set(self.metrics([1, 0], [0.6, 0.2])) - {"n", "reasons"} < stated
        assert not next(m for m in TASK.metrics if m.name == "brier").higher_is_better


class TestThreeClasses:
    def test_by_hand(self):
        probability = [(0.7, 0.2, 0.1), (0.3, 0.4, 0.3), (0.1, 0.8, 0.1), (0.2, 0.2, 0.6)]
        result = classification_metrics(of_classes([0, 0, 1, 2], probability))
        assert result == {
            "accuracy": 3 / 4,
            "balanced_accuracy": pytest.approx((1 / 2 + 1 + 1) / 3),
            "auc": 1.0,
            "recall_0": 1 / 2,
            "recall_1": 1,
            "recall_2": 1,
            "n": 4,
            "reasons": {},
        }
        stated = [metric.name for metric in THREE.metrics]
        assert [name for name in result if name not in ("n", "reasons")] == stated

    def test_auc_is_the_mean_of_one_against_the_rest(self):
        rng = np.random.default_rng(0)
        targets = rng.integers(0, 3, 60)
        probability = rng.dirichlet(np.ones(3), 60) + 0.3 * np.eye(3)[targets]
        probability /= probability.sum(axis=1, keepdims=True)
        one_against_rest = [roc_auc_score(targets == k, probability[:, k]) for k in range(3)]
        result = classification_metrics(of_classes(targets, probability))
        assert result["auc"] == pytest.approx(np.mean(one_against_rest))
        assert 0.5 < result["auc"] < 1

    def test_a_class_without_rows(self):
        result = classification_metrics(of_classes([0, 1], [(0.7, 0.2, 0.1), (0.3, 0.4, 0.3)]))
        assert (result["accuracy"], result["recall_0"], result["recall_1"]) == (1, 1, 1)
        assert set(result["reasons"]) == {"recall_2", "auc", "balanced_accuracy"}
        assert all(math.isnan(result[name]) for name in result["reasons"])
        assert result["reasons"]["auc"] == "none of the 2 samples is of class 2"

    def test_no_threshold_and_no_calibration(self):
        scores = of_classes([0, 1], [(0.7, 0.2, 0.1), (0.3, 0.4, 0.3)])
        assert THREE.decisions(scores) == {}
        assert THREE.calibration(scores) is None

    def test_who_is_corrected_and_who_worsened(self):
        sure = np.eye(3).tolist()
        was = of_classes([0, 1, 2, 2], [sure[0], sure[0], sure[0], sure[2]])
        now = of_classes([0, 1, 2, 2], [sure[0], sure[1], sure[1], sure[0]])
        assert THREE.changed(was, now) == {"corrected": 1, "lost": 1, "n": 4}


class TestDecisions:
    def test_a_threshold_is_chosen_on_the_scores_given(self):
        train = two_class_scores(np.array([0, 0, 1, 1]), np.array([0.1, 0.2, 0.3, 0.4]))
        facts = TASK.decisions(train)
        assert facts == {THRESHOLD: 0.5, OWN_THRESHOLD: pytest.approx(0.25)}
        assert TASK.calibration(train)["observed_share"] == 0.5


class TestLoss:
    def test_classes_that_the_network_has_not(self):
        model, x = nn.Linear(3, 2), torch.randn(6, 3)
        samples = samples_of(x, torch.tensor([0, 1, 2, 0, 1, 2]))
        settings = TrainingSettings(batch_size=3)
        with pytest.raises(ValueError, match="classes 0 to 2, but the network has 2 outputs"):
            train_epochs(model, samples, settings, seed=0, loss=THREE.criterion(settings, samples))

    @pytest.mark.parametrize(
        ("weights", "expected"),
        [([1, 2, 4], [1, 2, 4]), ("balanced", [2 / 3, 1, 2])],
    )
    def test_class_weights(self, weights, expected):
        targets = torch.tensor([0, 0, 0, 1, 1, 2])
        samples = samples_of(torch.randn(6, 3), targets)
        loss = THREE.criterion(TrainingSettings(class_weights=weights), samples)
        logits = torch.randn(6, 3)
        (batch,) = samples.batches(6)
        wanted = nn.functional.cross_entropy(logits, targets, torch.tensor(expected).float())
        torch.testing.assert_close(loss(logits, batch), wanted)

    @pytest.mark.parametrize("targets", [torch.zeros(3), torch.zeros(3, 2, dtype=torch.int64)])
    def test_targets_that_are_no_classes(self, targets):
        with pytest.raises(ValueError, match="classes are integers, one a sample"):
            class_targets(TensorSamples(torch.zeros(3, 2), targets))
