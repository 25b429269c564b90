import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedbn.core.networks import build_network, check_allowed
from fedbn.tasks.connectome.network import (
    DROPOUT_RESOLUTION,
    ConnectomeMLP,
    PackedDropout,
    _byte_to_factors,
    _packed_bernoulli,
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def own_network(tmp_path, monkeypatch):
    (tmp_path / "researcher_nets.py").write_text(
        "from torch import nn\n"
        "class SmallNet(nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.norm = nn.BatchNorm1d(width)\n"
        "class Loads(nn.Module):\n"
        "    def __init__(self, weights=None, use_checkpoint=False, checkpoint_path=None):\n"
        "        super().__init__()\n"
        "class NotANet:\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
def test_import_is_light():
    # Each FLARE task is a new process that pays for every import.
    code = (
        "import sys, fedbn.core.networks, fedbn.core.training, fedbn.tasks.classification; "
        "heavy = {'monai', 'sklearn', 'scipy', 'pandas', 'nvflare', 'nilearn'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class TestPackedDropout:
    @pytest.mark.parametrize("p", [1 / 256, 0.1, 0.2, 0.25, 0.5, 0.625, 0.9, 255 / 256])
    def test_keep_rate_and_scale(self, p):
        x = torch.full((100, 6105), 3.0)
        y = PackedDropout(p)(x)
        kept = y != 0
        standard_error = (p * (1 - p) / x.numel()) ** 0.5
        assert float(kept.float().mean()) == pytest.approx(1 - p, abs=5 * standard_error)
        torch.testing.assert_close(
            y[kept], torch.full_like(y[kept], 3 / (1 - p)), rtol=1e-3, atol=0
        )
        assert torch.equal(x, torch.full((100, 6105), 3.0)), "the input was changed"

    @pytest.mark.parametrize("eighths", range(1, 8))
    def test_exact_probability_of_every_digit_pattern(self, eighths, monkeypatch):
        # With the random words replaced by all patterns once, the share of ones is exact.
        patterns = iter([0b10101010, 0b11001100, 0b11110000])
        monkeypatch.setattr(
            "fedbn.tasks.connectome.network._fair_bits", lambda n: torch.full((n,), next(patterns))
        )
        word = int(_packed_bernoulli(1, eighths * DROPOUT_RESOLUTION // 8)[0])
        assert (word & 0xFF).bit_count() == eighths

    @pytest.mark.parametrize("k", [1, 37, 128, 255])
    def test_scale_is_exact_for_multiples_of_1_over_256(self, k):
        y = PackedDropout(1 - k / 256)(torch.ones(20000, dtype=torch.float64))
        assert set(y.unique().tolist()) <= {0.0, 256 / k}

    def test_mean_is_exact_for_a_rounded_probability(self):
        # 0.1 is rounded; the scale belongs to the rounded value.
        keep = round(0.9 * DROPOUT_RESOLUTION) / DROPOUT_RESOLUTION
        y = PackedDropout(0.1)(torch.ones(20000, dtype=torch.float64))
        assert float(y.max()) == 1 / keep

    def test_gradient_is_the_mask(self):
        x = torch.randn(7, 13, requires_grad=True)
        y = PackedDropout(0.5)(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad * x.detach(), y.detach())
        assert set(x.grad.unique().tolist()) == {0.0, 2.0}

    def test_no_graph_for_an_input_without_gradient(self):
        assert not PackedDropout(0.5)(torch.randn(4, 5)).requires_grad

    def test_same_mask_with_and_without_gradient(self):
        x = torch.randn(4, 5)
        outputs = []
        for y in (x, x.clone().requires_grad_()):
            torch.manual_seed(3)
            outputs.append(PackedDropout(0.5)(y).detach())
        assert torch.equal(*outputs)

    @pytest.mark.parametrize("p", [0.5, 0.3])
    def test_rows_columns_and_calls_are_independent(self, p):
        layer = PackedDropout(p)
        kept = [(layer(torch.ones(64, 4001)) != 0).double() for _ in range(2)]
        rows = torch.corrcoef(torch.cat(kept))  # 128 rows of 4001 fair draws
        off_diagonal = rows[~torch.eye(len(rows), dtype=torch.bool)]
        assert float(off_diagonal.abs().max()) < 6 / 4001**0.5
        both = torch.cat(kept)
        neighbours = torch.corrcoef(torch.stack([both[:, :-1].flatten(), both[:, 1:].flatten()]))
        assert abs(float(neighbours[0, 1])) < 6 / both.numel() ** 0.5

    def test_every_position_is_dropped_sometimes(self):
        layer = PackedDropout(0.5)
        share = sum((layer(torch.ones(3, 101)) != 0).double() for _ in range(400)) / 400
        assert float(share.min()) > 0.35
        assert float(share.max()) < 0.65

    def test_seed_repeats_it_whatever_the_number_of_threads(self):
        x = torch.randn(50, 777)
        threads = torch.get_num_threads()
        outputs = []
        try:
            for n in (1, 2, 3):
                torch.set_num_threads(n)
                torch.manual_seed(11)
                outputs.append(PackedDropout(0.5)(x))
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])
        assert not torch.equal(outputs[0], PackedDropout(0.5)(x)), "the next mask is another one"

    @pytest.mark.parametrize(
        "layer", [PackedDropout(0.5).eval(), PackedDropout(0.0), PackedDropout(0)]
    )
    def test_identity_draws_nothing(self, layer):
        x = torch.randn(3, 4)
        before = torch.get_rng_state()
        assert layer(x) is x
        assert torch.equal(before, torch.get_rng_state())

    @given(
        shape=st.lists(st.integers(0, 9), max_size=4),
        dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        p=st.floats(0, 1, exclude_max=True),
    )
    @settings(max_examples=60, deadline=None)
    def test_any_shape_dtype_and_probability(self, shape, dtype, p):
        x = torch.ones(shape, dtype=dtype)
        y = PackedDropout(p)(x)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        assert y.unique().numel() <= 2

    def test_not_contiguous_input(self):
        x = torch.randn(6, 10).t()[::2]
        y = PackedDropout(0.5)(x)
        assert torch.equal(y[y != 0], 2 * x[y != 0])

    def test_other_devices_use_the_stock_layer(self):
        x = torch.ones(3, 4, device="meta")
        assert PackedDropout(0.5)(x).device.type == "meta"

    def test_table_is_not_changed_by_its_use(self):
        layer, x = PackedDropout(0.5), torch.full((8, 64), 7.0)
        layer(x)
        assert set(_byte_to_factors(2.0, torch.float32).unique().tolist()) == {0.0, 2.0}

    @pytest.mark.parametrize("p", [-0.1, 1, 1.5, float("nan"), "0.5", None, True])
    def test_refuses_a_wrong_probability(self, p):
        with pytest.raises(ValueError, match="must be a number in"):
            PackedDropout(p)

    def test_refuses_integers(self):
        with pytest.raises(TypeError, match="floating point"):
            PackedDropout(0.5)(torch.ones(3, dtype=torch.int64))

    def test_is_shown(self):
        assert repr(PackedDropout(0.25)) == "PackedDropout(p=0.25)"


class TestConnectomeMLP:
    def test_is_the_reference_network(self):
        network = ConnectomeMLP()
        order = [type(m).__name__ for m in network.modules() if not list(m.children())]
        assert order == [
            "PackedDropout",
            "Linear",
            "ReLU",
            "BatchNorm1d",
            "PackedDropout",
            "Linear",
        ]
        shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
        assert shapes["hidden.0.linear.weight"] == (16, 6105)
        assert shapes["classifier.weight"] == (2, 16)
        assert network(torch.randn(3, 6105)).shape == (3, 2)

    def test_equals_the_plain_layers_in_eval_mode(self):
        network = ConnectomeMLP(in_features=30).eval()
        block = network.hidden[0]
        x = torch.randn(5, 30)
        expected = network.classifier(block.norm(torch.relu(block.linear(x))))
        torch.testing.assert_close(network(x), expected)

    @pytest.mark.parametrize("hidden", [(16, 16), [16, 16]])
    def test_three_layers(self, hidden):
        network = ConnectomeMLP(in_features=30, hidden=hidden, n_classes=3)
        assert sum(isinstance(m, nn.Linear) for m in network.modules()) == 3
        assert sum(isinstance(m, nn.BatchNorm1d) for m in network.modules()) == 2
        assert network(torch.randn(4, 30)).shape == (4, 3)

    @pytest.mark.parametrize("shape", [(4, 31), (30,), (4, 1, 30)])
    def test_refuses_another_width(self, shape):
        with pytest.raises(ValueError, match=r"takes input of shape \(n, 30\), got"):
            ConnectomeMLP(in_features=30)(torch.zeros(shape))

    @pytest.mark.parametrize(
        ("args", "match"),
        [
            ({"in_features": 0}, "in_features is 0"),
            ({"in_features": 6105.0}, "in_features is 6105.0"),
            ({"hidden": ()}, "hidden is"),
            ({"hidden": 16}, "hidden is 16"),
            ({"hidden": "16"}, "hidden is '16'"),
            ({"hidden": (16, -1)}, "width in hidden is -1"),
            ({"n_classes": 1}, "n_classes is 1"),
            ({"dropout": 1.0}, "dropout probability is 1.0"),
        ],
    )
    def test_refuses_wrong_arguments(self, args, match):
        with pytest.raises(ValueError, match=match):
            ConnectomeMLP(**args)


class TestBuildNetwork:
    def test_seed_decides_the_weights_and_leaves_the_global_state(self):
        before = torch.get_rng_state()
        first, again, other = (
            build_network("ConnectomeMLP", {"in_features": 20}, seed) for seed in (1, 1, 2)
        )
        assert torch.equal(before, torch.get_rng_state())
        name = "hidden.0.linear.weight"
        assert torch.equal(first.state_dict()[name], again.state_dict()[name])
        assert not torch.equal(first.state_dict()[name], other.state_dict()[name])

    def test_without_a_seed_the_global_state_decides(self):
        outputs = []
        for _ in range(2):
            torch.manual_seed(5)
            outputs.append(build_network("ConnectomeMLP", {"in_features": 20}).classifier.weight)
        assert torch.equal(*outputs)

    @pytest.mark.parametrize(
        ("name", "args"),
        [
            ("DenseNet121", {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}),
            ("resnet18", {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 2}),
        ],
    )
    def test_monai_by_name(self, name, args):
        network = build_network(name, args, seed=0)
        assert type(network).__module__.startswith("monai.networks.nets")

    @pytest.mark.parametrize("path", ["researcher_nets:SmallNet", "researcher_nets.SmallNet"])
    def test_own_network_by_path(self, own_network, path):
        assert build_network(path, {"width": 3}).norm.num_features == 3

    @pytest.mark.parametrize(
        ("name", "args", "match"),
        [
            ("DenseNet12", {}, r"unknown network 'DenseNet12'; close names: .*DenseNet121"),
            ("ConectomeMLP", {}, "close names: ConnectomeMLP"),
            ("zzqqxx", {}, "there is no close name"),
            ("ConnectomeMLP", {"width": 3}, r"unexpected keyword.*its arguments are in_features"),
            ("ConnectomeMLP", {"hidden": [0]}, r"cannot be built with the arguments .*hidden"),
            ("DenseNet121", {}, "missing a required argument: 'spatial_dims'"),
            ("researcher_nets.SmalNet", {}, "no network 'SmalNet'; close names: SmallNet"),
            ("researcher_nets:NotANet", {}, r"must be a subclass of torch\.nn\.Module"),
            ("os.system", {}, "is not a network"),
            ("no_such_package_here.Net", {}, "cannot be imported"),
            (".Net", {}, "cannot be imported: it names no module"),
        ],
    )
    def test_refuses_with_one_sentence(self, own_network, name, args, match):
        with pytest.raises(ValueError, match=match) as caught:
            build_network(name, args)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "args", "argument"),
        [
            (
                "DenseNet121",
                {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "pretrained": True},
                "pretrained is True",
            ),
            ("resnet18", {"pretrained": "a.pt"}, "pretrained is 'a.pt'"),
            ("EfficientNetBN", {"model_name": "b0"}, "pretrained is True where it is not given"),
            ("MILModel", {"num_classes": 2}, "pretrained is True where it is not given"),
            ("HoVerNet", {"pretrained_url": "https://a.b"}, "pretrained_url is 'https://a.b'"),
            ("TorchVisionFCModel", {"weights": "DEFAULT"}, "weights is 'DEFAULT'"),
            ("researcher_nets.Loads", {"weights": "a.pt"}, "weights is 'a.pt'"),
            ("researcher_nets.Loads", {"checkpoint_path": "a.pt"}, "checkpoint_path is 'a.pt'"),
        ],
    )
    def test_refuses_weights_from_elsewhere(self, own_network, name, args, argument):
        with pytest.raises(ValueError, match=f"argument {argument}, which brings weights from els"):
            build_network(name, args)

    def test_takes_the_same_arguments_where_they_bring_nothing(self, own_network):
        args = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "pretrained": False}
        assert build_network("DenseNet121", {**args, "progress": True}).state_dict()
        build_network("researcher_nets.Loads", {"weights": [0.5, 1], "use_checkpoint": True})

    def test_a_function_that_downloads_is_no_network(self):
        with pytest.raises(ValueError, match="unknown network 'get_pretrained_resnet_medicalnet'"):
            build_network("get_pretrained_resnet_medicalnet", {"resnet_depth": 10, "device": "cpu"})


class TestCheckAllowed:
    @pytest.mark.parametrize(
        "name", ["ConnectomeMLP", "DenseNet121", "fedbn.tasks.connectome.network.ConnectomeMLP"]
    )
    def test_monai_s_and_our_own_need_no_list(self, name):
        check_allowed(name, [])

    @pytest.mark.parametrize("listed", ["nets.small.Small", "nets.small:Small"])
    @pytest.mark.parametrize("name", ["nets.small.Small", "nets.small:Small"])
    def test_what_is_listed_is_allowed_in_either_spelling(self, name, listed):
        check_allowed(name, ["other.Net", listed])

    @pytest.mark.parametrize(
        "name", ["nets.small.Large", "nets.small", "os.system", "torch.nn.BatchNorm1d", "a:b", "."]
    )
    def test_any_other_class_is_refused(self, name):
        with pytest.raises(ValueError, match=rf"network '{name}' is a class that is not allowed"):
            check_allowed(name, ["nets.small.Small"])
