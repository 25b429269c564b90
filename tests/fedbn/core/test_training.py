import gc
import math

import pytest
import torch
from classifier import train_classifier
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedbn.core.batches import batch_indices
from fedbn.core.networks import build_network
from fedbn.core.normalization import split
from fedbn.core.training import (
    TrainingSettings,
    derive_seed,
    proximal_term,
)
from fedbn.tasks.connectome.network import ConnectomeMLP

N_FEATURES = 12
STORED_SEEDS = (7520536977032167579, 3550557372503273953)


def make_network(seed=0, **args):
    return build_network("ConnectomeMLP", {"in_features": N_FEATURES, "hidden": [4], **args}, seed)


def make_data(n=23, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, N_FEATURES, generator=generator)
    return inputs, (inputs[:, 0] > 0).long()


def copy_state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal_states(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class TestSettings:
    def test_defaults(self):
        assert TrainingSettings().model_dump() == {
            "optimizer": "adam",
            "learning_rate": 1e-3,
            "weight_decay": 0.0,
            "momentum": 0.0,
            "batch_size": 32,
            "local_epochs": 1,
            "class_weights": None,
            "proximal_mu": 0.0,
        }

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"optimizer": "lamb"}, "'sgd', 'adam' or 'adamw'"),
            ({"learning_rate": 0}, "learning_rate\n.*greater than 0"),
            ({"learning_rate": math.nan}, "finite"),
            ({"weight_decay": -1}, "weight_decay\n.*greater than or equal to 0"),
            ({"momentum": 1.0, "optimizer": "sgd"}, "momentum\n.*less than 1"),
            ({"momentum": 0.9}, "optimizer 'adam' takes none"),
            ({"batch_size": 1}, "cannot train on a batch of one sample"),
            ({"local_epochs": 0}, "greater than or equal to 1"),
            ({"class_weights": [1.0]}, "one positive number for each class"),
            ({"class_weights": [1.0, 0.0]}, "one positive number for each class"),
            ({"class_weights": "equal"}, "class_weights"),
            ({"proximal_mu": -0.1}, "greater than or equal to 0"),
            ({"epochs": 3}, "Extra inputs are not permitted"),
        ],
    )
    def test_refuses(self, changes, match):
        with pytest.raises(ValueError, match=match):
            TrainingSettings(**changes)

    def test_is_frozen_and_survives_json(self):
        chosen = TrainingSettings(class_weights=[1, 2], optimizer="sgd", momentum=0.9)
        assert TrainingSettings.model_validate_json(chosen.model_dump_json()) == chosen
        with pytest.raises(ValueError, match="frozen"):
            chosen.batch_size = 3


class TestDeriveSeed:
    def test_value_is_stable(self):
        # Stored, so that a change of the hash is noticed: it would change every result.
        assert derive_seed(0) == STORED_SEEDS[0]
        assert derive_seed(7, "NYU", 3, "order") == STORED_SEEDS[1]

    def test_labels_are_not_confused(self):
        labels = [(), ("a",), ("a", "b"), ("ab",), ("b", "a"), (1,), ("1",), (1, 1), (11,), ("",)]
        seeds = [derive_seed(0, *some) for some in labels]
        assert len(set(seeds)) == len(labels)
        assert derive_seed(1, "a") != derive_seed(0, "a")

    @given(st.integers(0, 2**63), st.lists(st.text() | st.integers(), max_size=4))
    def test_fits_a_generator(self, seed, labels):
        value = derive_seed(seed, *labels)
        assert 0 <= value < 2**63
        torch.Generator().manual_seed(value)

    def test_refuses_a_float(self):
        with pytest.raises(TypeError):
            derive_seed(0, 1.5)


class TestBatchIndices:
    @given(n=st.integers(2, 300), batch_size=st.integers(2, 70), seed=st.integers(0, 2**31))
    @settings(max_examples=200, deadline=None)
    def test_every_sample_once_and_none_alone(self, n, batch_size, seed):
        batches = batch_indices(n, batch_size, torch.Generator().manual_seed(seed))
        assert sorted(torch.cat(batches).tolist()) == list(range(n))
        sizes = [len(batch) for batch in batches]
        assert set(sizes[:-1]) <= {batch_size}
        assert 2 <= sizes[-1] <= batch_size + 1

    @pytest.mark.parametrize(
        ("n", "batch_size", "sizes"),
        [
            (2, 2, [2]),
            (2, 100, [2]),
            (3, 2, [3]),
            (100, 100, [100]),
            (101, 100, [101]),
            (102, 100, [100, 2]),
            (7, 3, [3, 4]),
            (5, 2, [2, 3]),
        ],
    )
    def test_sizes(self, n, batch_size, sizes):
        batches = batch_indices(n, batch_size, torch.Generator())
        assert [len(batch) for batch in batches] == sizes

    def test_order_is_the_generators(self):
        orders = [
            torch.cat(batch_indices(50, 8, torch.Generator().manual_seed(seed))).tolist()
            for seed in (1, 1, 2)
        ]
        assert orders[0] == orders[1]
        assert orders[0] != orders[2]
        assert orders[0] != list(range(50))

    @pytest.mark.parametrize(
        ("n", "batch_size", "match"),
        [
            (1, 10, "a site needs at least two training samples, got 1"),
            (0, 10, "a site needs at least two training samples, got 0"),
            (10, 1, "batch_size is 1; it must be at least 2"),
        ],
    )
    def test_refuses(self, n, batch_size, match):
        with pytest.raises(ValueError, match=match):
            batch_indices(n, batch_size, torch.Generator())


class TestProximalTerm:
    def test_by_hand(self):
        weights = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([[3.0]])]
        fixed = [torch.tensor([0.0, 4.0]), torch.tensor([[1.0]])]
        # 0.5 / 2 * (1^2 + 2^2 + 2^2): squared, and not the square root of it.
        term = proximal_term(weights, fixed, mu=0.5)
        assert float(term.detach()) == 2.25
        term.backward()
        assert weights[0].grad.tolist() == [0.5, -1.0]

    def test_pulls_the_step_by_its_gradient(self):
        # One SGD step, full batch: the term's gradient mu (w - w_ref) is all that differs.
        inputs, targets = make_data(8)
        plain = TrainingSettings(optimizer="sgd", learning_rate=0.1, weight_decay=0, batch_size=8)
        after = {}
        start = copy_state(make_network())
        shared = split(make_network()).shared
        reference = {name: start[name] - 1 for name in shared}
        for mu in (0.0, 0.3):
            model = make_network()
            changed = plain.model_copy(update={"proximal_mu": mu})
            train_classifier(
                model, inputs, targets, changed, seed=1, shared_names=shared, reference=reference
            )
            after[mu] = copy_state(model)
        for name, value in after[0.0].items():
            expected = value - 0.1 * 0.3 if name in shared else value
            torch.testing.assert_close(after[0.3][name], expected, atol=1e-6, rtol=0)

    def test_no_batch_norm_entry_even_if_shared(self):
        # FedAvg (policy "none") shares gamma and beta too; the term still leaves them alone.
        inputs, targets = make_data(8)
        model = make_network()
        names = split(model, "none").shared
        start = copy_state(model)
        reference = {name: start[name] - 100 for name in names}
        chosen = TrainingSettings(
            optimizer="sgd", learning_rate=1e-6, weight_decay=0, batch_size=8, proximal_mu=1.0
        )
        train_classifier(
            model, inputs, targets, chosen, seed=1, shared_names=names, reference=reference
        )
        moved = (copy_state(model)["classifier.bias"] - start["classifier.bias"]).abs().min()
        assert float(moved) > 9e-5
        for name in ("hidden.0.norm.weight", "hidden.0.norm.bias"):
            torch.testing.assert_close(copy_state(model)[name], start[name], atol=2e-5, rtol=0)

    def test_reference_is_the_start_by_default(self):
        inputs, targets = make_data()
        chosen = TrainingSettings(batch_size=4, local_epochs=2, proximal_mu=0.5)
        states = []
        for given_reference in (False, True):
            model = make_network()
            shared = split(model).shared
            reference = {name: copy_state(model)[name] for name in shared}
            train_classifier(
                model,
                inputs,
                targets,
                chosen,
                seed=1,
                shared_names=shared,
                reference=reference if given_reference else None,
            )
            states.append(copy_state(model))
        assert_equal_states(*states)

    def test_tied_weight_counts_once(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(2, 2, bias=False)
                self.b = self.a
                self.norm = nn.BatchNorm1d(2)

            def forward(self, x):
                return self.norm(self.b(x)) * 0 + self.a(x) * 0

        model = Tied()
        start = copy_state(model)["a.weight"]
        chosen = TrainingSettings(
            optimizer="sgd", learning_rate=1, weight_decay=0, batch_size=2, proximal_mu=0.25
        )
        zeros = {name: torch.zeros(2, 2) for name in ("a.weight", "b.weight")}
        train_classifier(
            model,
            torch.randn(2, 2),
            torch.tensor([0, 1]),
            chosen,
            seed=0,
            shared_names=zeros,
            reference=zeros,
        )
        torch.testing.assert_close(model.a.weight.detach(), 0.75 * start)

    @pytest.mark.parametrize(
        ("names", "reference", "match"),
        [
            ([], None, "shared_names has no trainable entry outside of batch norm"),
            (["hidden.0.norm.weight"], None, "no trainable entry outside of batch norm"),
            (["module.classifier.bias"], None, "no entry 'module.classifier.bias'"),
            (["classifier.bias"], {}, "no such entry for 'classifier.bias'"),
            (["classifier.bias"], {"classifier.bias": torch.zeros(3)}, r"shape \(3,\)"),
        ],
    )
    def test_refuses(self, names, reference, match):
        inputs, targets = make_data()
        chosen = TrainingSettings(proximal_mu=0.1)
        with pytest.raises(ValueError, match=match):
            train_classifier(
                make_network(),
                inputs,
                targets,
                chosen,
                seed=0,
                shared_names=names,
                reference=reference,
            )


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"optimizer": "sgd", "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"optimizer": "adam"}),
    "adamw": (torch.optim.AdamW, {"optimizer": "adamw"}),
}


class TestTrainEpochs:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("class_weights", [None, [0.3, 1.7]])
    def test_equals_a_plain_loop(self, name, class_weights):
        kind, changes = OPTIMIZERS[name]
        chosen = TrainingSettings(
            learning_rate=0.01,
            weight_decay=5e-2,
            batch_size=5,
            local_epochs=3,
            class_weights=class_weights,
            **changes,
        )
        inputs, targets = make_data(21)
        quiet = {"input_dropout": 0.0, "dropout": 0.0}
        model, plain = make_network(**quiet), make_network(**quiet)
        outcome = train_classifier(model, inputs, targets, chosen, seed=9)

        extra = {"momentum": 0.9} if name == "sgd" else {}
        optimizer = kind(plain.parameters(), lr=0.01, weight_decay=5e-2, **extra)
        weight = None if class_weights is None else torch.tensor(class_weights)
        losses = []
        for epoch in range(3):
            order = torch.Generator().manual_seed(derive_seed(9, "order", epoch))
            total = 0.0
            for batch in batch_indices(21, 5, order):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(plain(inputs[batch]), targets[batch], weight)
                loss.backward()
                optimizer.step()
                total += float(loss.detach()) * len(batch)
            losses.append(total / 21)
        for entry, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[entry], value, atol=1e-6, rtol=1e-5)
        assert outcome.losses == pytest.approx(losses, abs=1e-6)
        assert outcome.n_samples == 21
        assert outcome.n_steps == 3 * 4

    def test_learns(self):
        inputs, targets = make_data(200)
        model = make_network(input_dropout=0.0, dropout=0.0)
        chosen = TrainingSettings(learning_rate=0.02, batch_size=20, local_epochs=15)
        losses = train_classifier(model, inputs, targets, chosen, seed=0).losses
        assert losses[-1] < 0.5 * losses[0]

    def test_seed_alone_decides(self):
        inputs, targets = make_data()
        chosen = TrainingSettings(batch_size=5, local_epochs=2)
        states = []
        for seed, global_seed in ((1, 5), (1, 6), (2, 5)):
            model = make_network()
            torch.manual_seed(global_seed)
            before = torch.get_rng_state()
            train_classifier(model, inputs, targets, chosen, seed=seed)
            assert torch.equal(before, torch.get_rng_state()), "the global state was changed"
            states.append(copy_state(model))
        assert_equal_states(states[0], states[1])
        name = "hidden.0.linear.weight"
        assert not torch.equal(states[0][name], states[2][name])

    def test_callback_cannot_disturb_the_randomness(self):
        inputs, targets = make_data()
        chosen = TrainingSettings(batch_size=5, local_epochs=3)
        quiet, noisy = make_network(), make_network()
        calls = []

        def on_epoch(epoch, loss):
            calls.append((epoch, loss))
            torch.randn(100)

        train_classifier(quiet, inputs, targets, chosen, seed=1)
        outcome = train_classifier(noisy, inputs, targets, chosen, seed=1, on_epoch=on_epoch)
        assert calls == list(enumerate(outcome.losses))
        assert_equal_states(copy_state(quiet), copy_state(noisy))

    def test_optimizer_is_fresh_in_each_call(self):
        # Two calls of one epoch = a first call and a second one in a new process.
        inputs, targets = make_data()
        chosen = TrainingSettings(batch_size=5, learning_rate=0.05)
        model, restarted = make_network(), make_network(seed=3)
        train_classifier(model, inputs, targets, chosen, seed=1)
        restarted.load_state_dict(copy_state(model))
        for network in (model, restarted):
            train_classifier(network, inputs, targets, chosen, seed=2)
        assert_equal_states(copy_state(model), copy_state(restarted))

    @pytest.mark.parametrize("n", [2, 3, 5, 9, 101])
    def test_batch_norm_never_sees_one_sample(self, n):
        inputs, targets = make_data(n)
        for batch_size in (2, 4, 100):
            chosen = TrainingSettings(batch_size=batch_size)
            train_classifier(make_network(), inputs, targets, chosen, seed=0)

    def test_images(self):
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
        )
        model(torch.randn(2, 1, 32, 32))
        chosen = TrainingSettings(batch_size=4)
        outcome = train_classifier(
            model, torch.randn(5, 1, 32, 32), torch.tensor([0, 1, 2, 0, 1]), chosen, seed=0
        )
        assert outcome.n_steps == 1

    def test_frozen_parameters_stay(self):
        inputs, targets = make_data()
        model = make_network()
        model.classifier.requires_grad_(False)
        start = copy_state(model)
        train_classifier(model, inputs, targets, TrainingSettings(), seed=0)
        assert torch.equal(model.classifier.weight, start["classifier.weight"])
        assert not torch.equal(model.hidden[0].linear.weight, start["hidden.0.linear.weight"])

    def test_balanced_equals_the_weights_by_hand(self):
        inputs, _ = make_data(8)
        targets = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
        states = []
        for class_weights in ("balanced", [8 / (2 * 6), 8 / (2 * 2)]):
            model = make_network()
            chosen = TrainingSettings(class_weights=class_weights, batch_size=4)
            train_classifier(model, inputs, targets, chosen, seed=0)
            states.append(copy_state(model))
        assert_equal_states(*states)

    def test_balanced_with_one_class_present(self):
        inputs, targets = make_data(6)
        chosen = TrainingSettings(class_weights="balanced")
        outcome = train_classifier(make_network(), inputs, targets * 0, chosen, seed=0)
        assert math.isfinite(outcome.losses[0])

    @pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
    def test_a_wrapped_model_trains_what_is_inside(self, wrap):
        inputs, targets = make_data()
        chosen = TrainingSettings(batch_size=5, proximal_mu=0.1)
        bare, inner = make_network(), make_network()
        shared = split(bare).shared
        train_classifier(bare, inputs, targets, chosen, seed=1, shared_names=shared)
        train_classifier(wrap(inner), inputs, targets, chosen, seed=1, shared_names=shared)
        for name, value in bare.state_dict().items():
            torch.testing.assert_close(inner.state_dict()[name], value)

    def test_inputs_are_not_changed(self):
        inputs, targets = make_data()
        copy = inputs.clone()
        train_classifier(make_network(), inputs, targets, TrainingSettings(batch_size=4), seed=0)
        assert torch.equal(inputs, copy)

    def test_nothing_is_kept_from_call_to_call(self):
        inputs, targets = make_data()
        model = make_network()

        def n_tensors():
            gc.collect()
            return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

        chosen = TrainingSettings(batch_size=5, proximal_mu=0.1)
        shared = split(model).shared
        train_classifier(model, inputs, targets, chosen, seed=0, shared_names=shared)
        before = n_tensors()
        for call in range(5):
            train_classifier(model, inputs, targets, chosen, seed=call, shared_names=shared)
        assert n_tensors() == before
        assert all(parameter.grad is None for parameter in model.parameters())

    @pytest.mark.parametrize(
        ("value", "match"),
        [
            (math.nan, r"local epoch 1 of 2: the loss is nan; lower learning_rate \(0.001\)"),
            (math.inf, r"local epoch 1 of 2: the loss is nan"),
        ],
    )
    def test_not_finite_loss(self, value, match):
        inputs, targets = make_data()
        inputs[3, 4] = value
        with pytest.raises(FloatingPointError, match=match):
            train_classifier(
                make_network(input_dropout=0.0),
                inputs,
                targets,
                TrainingSettings(local_epochs=2),
                seed=0,
            )

    def test_not_finite_weights(self):
        inputs, targets = make_data()
        model = make_network()
        chosen = TrainingSettings(optimizer="sgd", learning_rate=1e38, weight_decay=1e38)
        with pytest.raises(FloatingPointError, match=r"entry '.*' has values that are not finite"):
            train_classifier(model, inputs, targets, chosen, seed=0)

    @pytest.mark.parametrize(
        ("targets", "changes", "match"),
        [
            (torch.tensor([0, 1, 2, 0]), {}, "classes 0 to 2, but the network has 2 outputs"),
            (torch.tensor([0, 1, -1, 0]), {}, "classes -1 to 1"),
            (torch.tensor([0, 1, 0]), {}, "but there are 4 samples"),
            (torch.tensor([[0], [1], [0], [1]]), {}, r"shape \(4, 1\)"),
            (torch.tensor([0.0, 1.0, 0.0, 1.0]), {}, "classes are integers"),
            (torch.tensor([0, 1, 0, 1]), {"class_weights": [1, 1, 1]}, "class_weights has 3"),
        ],
    )
    def test_refuses(self, targets, changes, match):
        inputs, _ = make_data(4)
        with pytest.raises(ValueError, match=match):
            train_classifier(make_network(), inputs, targets, TrainingSettings(**changes), seed=0)

    @pytest.mark.parametrize("n", [0, 1])
    def test_refuses_a_site_with_too_few_samples(self, n):
        inputs, targets = make_data(n)
        with pytest.raises(ValueError, match="a site needs at least two training samples"):
            train_classifier(make_network(), inputs, targets, TrainingSettings(), seed=0)

    def test_refuses_a_network_without_logits(self):
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        with pytest.raises(ValueError, match=r"logits \(n, n_classes\), got \(3, 2, 4, 4\)"):
            train_classifier(
                model, torch.randn(3, 1, 4, 4), torch.zeros(3).long(), TrainingSettings(), seed=0
            )

    def test_refuses_a_network_without_parameters(self):
        inputs, targets = make_data()
        model = ConnectomeMLP(in_features=N_FEATURES).requires_grad_(False)
        with pytest.raises(ValueError, match="ConnectomeMLP has no parameter to train"):
            train_classifier(model, inputs, targets, TrainingSettings(), seed=0)
