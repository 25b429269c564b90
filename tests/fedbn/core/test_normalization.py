from __future__ import annotations

import numpy as np
import pytest
import torch
from odd_networks import OwnBesideStock
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from fedbn.core.normalization import (
    AVERAGED,
    POLICIES,
    NoBatchNormError,
    StateMismatchError,
    bits,
    check_entries,
    entries,
    load_entries,
    recompute_in_batches,
    recompute_statistics,
    require_batch_norm,
    split,
    unwrap_model,
)

STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def names(module, prefix):
    return [f"{prefix}.{name}" for name in module.state_dict()]


def assert_is_partition(model, partition):
    """Local and shared are disjoint, are everything, and stand in state-dict order."""
    keys = list(model.state_dict())
    assert set(partition.local).isdisjoint(partition.shared)
    for part in (partition.local, partition.shared, partition.batch_norm):
        assert list(part) == [key for key in keys if key in set(part)]
    assert sorted(partition.local + partition.shared) == sorted(keys)


def counted_by_hand(model):
    """Return batch-norm layers and entries: gamma, beta, mean, variance, counter of each layer.

    DynUNet registers each of its blocks under two names: both are entries of the state dict.
    """
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    layers = [module for module in modules if isinstance(module, _BatchNorm)]
    return len(layers), sum(
        2 * layer.affine + 3 * bool(layer.track_running_stats) for layer in layers
    )


# ----------------------------------------------------------------------------- the grid of networks


def monai(name, **arguments):
    from monai.networks import nets

    arguments = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, **arguments}
    return getattr(nets, name)(**{key: v for key, v in arguments.items() if v is not None})


def grid():
    unet = {"channels": (4, 8, 16), "strides": (2, 2), "norm": "batch"}
    dyn = {
        "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [4, 8, 16],
        "norm_name": "batch",
    }
    no_channels = {"in_channels": None, "out_channels": None}
    efficient = {"model_name": "efficientnet-b0", "pretrained": False, "out_channels": None}
    dense = {"init_features": 4, "growth_rate": 2, "bn_size": 2}
    # id: name, arguments, entries of batch norm, entries that the substring "bn" misses
    return {
        "DenseNet121": ("DenseNet121", dense, 605, 605),
        "DenseNet121 3D": ("DenseNet121", {**dense, "spatial_dims": 3}, 605, 605),
        "resnet18 3D": (
            "resnet18",
            {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 2, **no_channels},
            100,
            15,
        ),
        "UNet": ("UNet", unet, 20, 20),
        "UNet residual": ("UNet", {**unet, "num_res_units": 2}, 45, 45),
        "UNet 3D": ("UNet", {**unet, "num_res_units": 2, "spatial_dims": 3}, 45, 45),
        "SegResNet": ("SegResNet", {"init_filters": 4, "norm": "batch"}, 125, 125),
        "BasicUNet": ("BasicUNet", {"features": (4,) * 6, "norm": "batch"}, 90, 90),
        "DynUNet": ("DynUNet", dyn, 100, 100),
        "EfficientNetBN": ("EfficientNetBN", {**efficient, "num_classes": 2}, 245, 0),
        "SEResNet50": ("SEResNet50", {"num_classes": 2, "out_channels": None}, 265, 260),
    }


GRID = grid()


def slow(cases, *of_them):
    """Mark those cases that take seconds."""
    return [pytest.param(c, marks=[pytest.mark.slow] * (c in of_them)) for c in cases]


CASES = slow(GRID, "SEResNet50", "resnet18 3D", "DenseNet121 3D")


@pytest.fixture(scope="module")
def network():
    """Build each network of the grid once."""
    built = {}

    def build(case):
        if case not in built:
            name, arguments, *_ = GRID[case]
            built[case] = monai(name, **arguments)
        return built[case]

    return build


@pytest.mark.parametrize("case", CASES)
def test_local_entries_of_a_monai_network_are_those_of_its_batch_norm_modules(case, network):
    model = network(case)
    *_, expected, missed = GRID[case]
    partition = split(model)
    n_layers, n_entries = counted_by_hand(model)
    assert (len(partition.layers), len(partition.local)) == (n_layers, n_entries)
    assert n_entries == expected == 5 * n_layers
    assert partition.local == partition.batch_norm
    assert_is_partition(model, partition)
    require_batch_norm(model, partition)
    assert f"{n_layers} batch-norm layers, {n_entries} entries stay" in partition.describe()
    # Independent of named_modules: shared entries have no batch-norm module on their path.
    for key in partition.shared:
        assert not isinstance(model.get_submodule(key.rpartition(".")[0]), _BatchNorm)
    # What a substring rule would have sent.
    assert sum("bn" not in key for key in partition.local) == missed


@pytest.mark.parametrize("case", CASES)
def test_three_policies_on_a_monai_network(case, network):
    model = network(case)
    n_layers, _ = counted_by_hand(model)
    counts = {}
    for policy in POLICIES:
        partition = split(model, policy)
        assert_is_partition(model, partition)
        assert partition.batch_norm == split(model).batch_norm
        counts[policy] = len(partition.local)
        if policy == "silobn":
            assert {key.rpartition(".")[2] for key in partition.local} == STATISTICS
        if policy == "none":
            assert all(key.endswith("num_batches_tracked") for key in partition.local)
    assert counts == {"fedbn": 5 * n_layers, "silobn": 3 * n_layers, "none": n_layers}


def test_round_trip_on_a_monai_network(network):
    model, other = network("UNet residual"), monai(*GRID["UNet residual"][:1], **GRID["UNet"][1])
    partition = split(model)
    shared, local = entries(model, partition.shared), entries(model, partition.local)
    with pytest.raises(StateMismatchError, match="missing"):
        load_entries(other, shared, local)
    other = monai(GRID["UNet residual"][0], **GRID["UNet residual"][1])
    load_entries(other, shared, local)
    assert all(torch.equal(other.state_dict()[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("policy", ["fedbn", "silobn"])
def test_a_network_without_batch_norm_is_refused_by_name(policy):
    model = monai("UNet", channels=(4, 8), strides=(2,))
    with pytest.raises(
        NoBatchNormError,
        match=rf"network UNet has no .* \(.*found: 2 InstanceNorm2d\).*'{policy}'.*norm='batch'",
    ):
        require_batch_norm(model, split(model, policy))


def test_a_network_without_batch_norm_is_welcome_to_fedavg():
    model = monai("UNet", channels=(4, 8), strides=(2,))
    partition = split(model, "none")
    require_batch_norm(model, partition)
    assert partition.shared == tuple(model.state_dict())


def test_a_network_without_any_normalisation_says_none():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(NoBatchNormError, match="layers found: none"):
        require_batch_norm(model, split(model))


# ------------------------------------------------------------------ which modules, by type not name


class Named(nn.Module):
    """Names that mislead a rule by name, both ways."""

    def __init__(self):
        super().__init__()
        self.abnormality_head = nn.Linear(4, 2)
        self.bn_projection = nn.Linear(4, 4)
        self.bn1 = nn.BatchNorm1d(4)
        self.bn10 = nn.Linear(4, 4)
        self.bn1_extra = nn.LayerNorm(4)
        self.adn = nn.Sequential(nn.InstanceNorm1d(4, affine=True), nn.BatchNorm1d(4))


def test_names_do_not_matter():
    model = Named()
    partition = split(model)
    assert set(partition.local) == {*names(model.bn1, "bn1"), *names(model.adn[1], "adn.1")}
    assert partition.layers == ("bn1", "adn.1")
    assert {"abnormality_head.weight", "bn_projection.weight", "bn10.weight", "bn1_extra.bias"} <= {
        *partition.shared
    }
    assert any("bn" in key for key in partition.shared)
    assert_is_partition(model, partition)


class OwnNorm(nn.BatchNorm2d):
    """A network's own subclass."""


@pytest.mark.parametrize(
    ("layer", "n_entries"),
    [
        (nn.BatchNorm1d(3), 5),
        (nn.BatchNorm2d(3), 5),
        (nn.BatchNorm3d(3), 5),
        (nn.SyncBatchNorm(3), 5),
        (OwnNorm(3), 5),
        (nn.BatchNorm1d(3, affine=False), 3),
        (nn.BatchNorm1d(3, track_running_stats=False), 2),
        (nn.BatchNorm1d(3, affine=False, track_running_stats=False), 0),
        (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), None),
        (nn.GroupNorm(1, 3), None),
        (nn.LayerNorm(3), None),
    ],
    ids=lambda value: str(value),
)
def test_kinds_of_layers(layer, n_entries):
    model = nn.Sequential(nn.Linear(3, 3), layer)
    partition = split(model)
    assert partition.layers == (() if n_entries is None else ("1",))
    assert len(partition.batch_norm) == (n_entries or 0)
    assert set(partition.batch_norm) <= set(names(layer, "1"))
    assert_is_partition(model, partition)


def test_converted_to_synchronised_batch_norm_has_the_same_partition():
    assert split(nn.SyncBatchNorm.convert_sync_batchnorm(small())) == split(small())


def test_statistics_that_do_not_exist_leave_silobn_nothing_but_is_no_error():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False))
    partition = split(model, "silobn")
    assert partition.local == ()
    assert partition.layers == ("1",)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", [{"track_running_stats": False}, {"affine": False}])
def test_batch_norm_without_running_statistics_is_refused(policy, layer):
    """A score would depend on who shares the batch."""
    layer = nn.BatchNorm1d(4, **{"track_running_stats": False, **layer})
    for model in (nn.Sequential(nn.Linear(3, 4), layer), nn.Sequential(small(), layer)):
        with pytest.raises(NoBatchNormError, match=r"layer '1' of network .*track_running_stats=T"):
            require_batch_norm(model, split(model, policy))


class Bare(nn.Module):
    """A norm that holds nothing."""


@pytest.mark.parametrize("policy", ["fedbn", "silobn"])
def test_batch_norm_without_entries_is_no_batch_norm(policy):
    """No entry would stay: the policy would be plain FedAvg, to the bit."""
    model = nn.Sequential(nn.Linear(3, 4), Bare())
    partition = split(model, policy, types=[f"{__name__}.Bare"])
    assert partition.layers == ("1",)
    with pytest.raises(NoBatchNormError, match=rf"no batch-norm layer with entries .*'{policy}'"):
        require_batch_norm(model, partition)


@pytest.mark.parametrize("path", ["torch.nn.InstanceNorm1d", "torch.nn:InstanceNorm1d"])
def test_further_types_can_be_named(path):
    model = nn.Sequential(
        nn.Linear(3, 3), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    )
    assert split(model).layers == ()
    assert split(model).statistics_like == ("1.running_mean", "1.running_var")
    partition = split(model, types=[path])
    assert partition.layers == ("1",)
    assert partition.local == tuple(names(model[1], "1"))
    assert partition.warning() is None
    statistics = split(model, "silobn", types=(path,)).local
    assert {name.rpartition(".")[2] for name in statistics} == STATISTICS


def test_a_norm_of_ones_own_that_stands_beside_batch_norm_is_seen_and_can_be_named():
    model = OwnBesideStock()
    partition = split(model)
    assert partition.statistics_like == ("own.mean", "own.var")
    assert "2 shared entries look like running statistics" in partition.warning()
    assert "(own.mean, own.var): if they shall stay" in partition.warning()
    assert split(model, "none").warning() is None
    named = split(model, types=["odd_networks.OwnNorm"])
    assert named.layers == ("norm", "own")
    assert set(named.local) == {*names(model.norm, "norm"), *names(model.own, "own")}
    assert named.warning() is None
    silobn = split(model, "silobn", types=["odd_networks.OwnNorm"])
    assert {"own.gamma", "own.beta"} <= set(silobn.shared)
    with pytest.raises(NoBatchNormError, match=r"layer 'own' is a OwnNorm.*cannot be recomputed"):
        recompute_statistics(model, torch.ones(4, 66), named.layers)


@pytest.mark.parametrize(
    "path", ["odd_networks.Nothing", "not.imported.Norm", "torch.nn.Linear2", "torch.nn.Conv1d"]
)
def test_a_type_that_no_module_has_is_refused_and_never_imported(path, tmp_path, monkeypatch):
    (tmp_path / "not").mkdir()
    (tmp_path / "not" / "imported.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    reason = (
        f"names '{path}', and no module of the network is of this class; there are odd_.*Linear"
    )
    with pytest.raises(ValueError, match=reason):
        split(OwnBesideStock(), types=[path])


@pytest.mark.parametrize(
    ("entries", "like"),
    [
        ({"gamma": 4, "mean": (4,), "var": (4,)}, ["mean", "var"]),
        ({"gamma": 4, "moving_mean": (3,), "Running_Var": (4,)}, ["moving_mean", "Running_Var"]),
        ({"mean": (3,), "std": (3,)}, []),  # of the inputs, fixed
        ({"gamma": 4, "meaning": (4,), "weight_u": (4,), "mask": (4,)}, []),
        ({"gamma": 4, "mean": ()}, []),
    ],
)
def test_what_looks_like_statistics(entries, like):
    model = small()
    for name, shape in entries.items():
        if isinstance(shape, int):
            model.register_parameter(name, nn.Parameter(torch.ones(shape)))
        else:
            model.register_buffer(name, torch.ones(shape))
    assert list(split(model).statistics_like) == like


@pytest.mark.parametrize("policy", POLICIES)
def test_integers_are_never_shared(policy):
    model = small()
    model.register_buffer("steps", torch.tensor(3))
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("scale", torch.ones(2))
    partition = split(model, policy)
    assert {"steps", "mask", "1.num_batches_tracked"} <= set(partition.local)
    assert "scale" in partition.shared
    assert all(model.state_dict()[name].is_floating_point() for name in partition.shared)
    assert_is_partition(model, partition)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", AVERAGED)
def test_floating_entries_of_every_width_are_shared_and_those_of_batch_norm_stay(policy, dtype):
    """An entry without elements is an entry."""
    model = small()
    model[0].weight = nn.Parameter(model[0].weight.detach().to(dtype))
    model.register_buffer("scale", torch.ones(2, dtype=dtype))
    model.register_buffer("nothing", torch.zeros(0, 3, dtype=dtype).t())
    model[1].running_mean = torch.zeros(4, dtype=dtype)
    partition = split(model, policy)
    assert {"0.weight", "scale", "nothing"} <= set(partition.shared)
    assert ("1.running_mean" in partition.local) == (policy != "none")
    assert_is_partition(model, partition)
    shared = entries(model, partition.shared)
    load_entries(model, shared, entries(model, partition.local))
    assert {name: bits(tensor) for name, tensor in shared.items()}["nothing"] == b""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.zeros(2).to(torch.float8_e4m3fn), "is torch.float8_e4m3fn; an entry .*bfloat16"),
        (torch.zeros(2).to_sparse(), "is torch.sparse_coo; an entry to be federated is dense"),
    ],
)
def test_what_cannot_be_averaged_exactly_is_refused_by_name(value, reason):
    model = small()
    model.register_buffer("scale", value)
    with pytest.raises(ValueError, match=f"entry 'scale' of Sequential {reason}"):
        split(model)


def test_a_conjugate_is_copied_as_the_numbers_that_it_stands_for():
    model = small()
    model.register_buffer("wave", torch.tensor([1 + 2j]).conj())
    (copy,) = entries(model, ["wave"]).values()
    assert bits(copy) == np.complex64(1 - 2j).tobytes()


def test_tied_modules_are_local_under_each_name():
    model = nn.ModuleDict({"first": small(), "last": nn.Linear(2, 2)})
    model["again"] = model["first"][1]
    partition = split(model)
    expected = [*names(model["again"], "first.1"), *names(model["again"], "again")]
    assert set(partition.local) == set(expected)
    assert set(partition.layers) == {"first.1", "again"}
    local = entries(model, partition.local)
    load_entries(model, entries(model, partition.shared), local)
    assert_is_partition(model, partition)


class Aliased(nn.Module):
    """Tensors of a batch norm, registered a second time outside of it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = self.norm.weight
        self.register_buffer("center", self.norm.running_mean)
        self.register_buffer("same_memory", self.norm.running_var.detach())
        self.head.bias = self.norm.bias


def test_a_tensor_of_batch_norm_is_local_under_every_name():
    model = Aliased()
    partition = split(model)
    assert partition.shared == ("head.weight",)
    aliases = {"scale", "center", "same_memory", "head.bias"}
    assert set(partition.batch_norm) == {*names(model.norm, "norm"), *aliases}
    silobn = split(model, "silobn")
    assert {"scale", "head.bias", "norm.weight", "norm.bias"} <= set(silobn.shared)
    assert {"center", "same_memory"} <= set(silobn.local)


def test_aliases_are_found_on_a_model_without_memory():
    with torch.device("meta"):
        model = Aliased()
    partition = split(model)
    assert {"scale", "center", "head.bias"} <= set(partition.local)
    assert "head.weight" in partition.shared


def test_parametrised_batch_norm_is_batch_norm():
    model = small()
    nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Softplus(), unsafe=True)
    partition = split(model)
    assert "1.parametrizations.weight.original" in partition.local
    assert len(partition.local) == 5


def test_a_network_that_is_one_batch_norm_has_nothing_to_share():
    model = nn.BatchNorm1d(3)
    partition = split(model)
    assert partition.layers == ("",)
    assert partition.local == tuple(model.state_dict())
    with pytest.raises(NoBatchNormError, match="network BatchNorm1d consists of batch norm alone"):
        require_batch_norm(model, partition)
    silobn = split(model, "silobn")
    require_batch_norm(model, silobn)
    assert silobn.shared == ("weight", "bias")


def test_unknown_policy_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="unknown policy 'FedBN'; choose one of fedbn, silobn, no"):
        split(small(), "FedBN")


@pytest.mark.parametrize("lazy", [nn.LazyBatchNorm1d(), nn.LazyLinear(2)])
def test_a_lazy_layer_is_refused_until_it_has_a_shape(lazy):
    model = nn.Sequential(nn.Linear(3, 4), lazy)
    way_out = r"1\.\w+' of Sequential has no shape yet; give .*\(BatchNorm1d\(64\) in place of"
    with pytest.raises(ValueError, match=way_out):
        split(model)
    model(torch.randn(5, 3))
    assert_is_partition(model, split(model))


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        pass


def test_extra_state_is_refused_by_name():
    model = nn.Sequential(WithExtraState(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"entry '0._extra_state' of Sequential is a dict, not a"):
        split(model)


# ----------------------------------------------------------------------------------------- wrappers


class Compiled(nn.Module):
    """What torch.compile returns: keys get a prefix."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model


def compiled_by_torch(model):
    return torch.compile(model, backend="eager")


WRAPPERS = {
    "data-parallel": nn.DataParallel,
    "compiled": Compiled,
    "torch.compile": compiled_by_torch,
    "compiled data-parallel": lambda model: Compiled(nn.DataParallel(model)),
    "data-parallel compiled": lambda model: nn.DataParallel(Compiled(model)),
    "three deep": lambda model: nn.DataParallel(Compiled(nn.DataParallel(model))),
}


@pytest.mark.parametrize("kind", slow(WRAPPERS, "torch.compile"))
def test_wrappers_are_taken_off(kind):
    model = small()
    wrapped = WRAPPERS[kind](model)
    assert unwrap_model(wrapped) is model
    assert split(wrapped) == split(model)
    partition = split(wrapped)
    shared, local = entries(wrapped, partition.shared), entries(wrapped, partition.local)
    assert list(shared) == list(partition.shared)
    shared["0.weight"] += 1
    load_entries(wrapped, shared, local)
    assert torch.equal(model.state_dict()["0.weight"], shared["0.weight"])
    plain = WRAPPERS[kind](nn.Linear(2, 2))
    with pytest.raises(NoBatchNormError, match="network Linear has no"):
        require_batch_norm(plain, split(plain))


def test_a_model_that_is_merely_called_module_is_no_wrapper():
    model = nn.Module()
    model.module = small()
    assert unwrap_model(model) is model
    assert split(model).layers == ("module.1",)
    averaged = AveragedModel(small())
    assert split(averaged).layers == ("module.1",)
    assert "n_averaged" in split(averaged).local


def test_a_wrapper_inside_that_hides_its_name_from_the_keys():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(nn.Linear(3, 4), checkpoint_wrapper(nn.Sequential(nn.BatchNorm1d(4))))
    assert "_checkpoint_wrapped_module" not in "".join(model.state_dict())
    partition = split(model)
    assert partition.local == tuple(names(nn.BatchNorm1d(4), "1.0"))
    assert partition.shared == ("0.weight", "0.bias")


class Gathered(nn.Module):
    """Its state dict shows copies under names of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {f"flat/{name}": tensor.clone() for name, tensor in state.items()}


def test_a_state_dict_that_hides_batch_norm_is_refused():
    with pytest.raises(ValueError, match="Gathered has no entry of its batch-norm layer 'norm'"):
        split(Gathered())


# ------------------------------------------------------------------------ taking out and putting in


def test_entries_are_copies_in_the_order_asked_for():
    model = small()
    asked = ["3.bias", "1.running_mean", "0.weight", "1.num_batches_tracked"]
    taken = entries(model, asked)
    before = {name: tensor.clone() for name, tensor in taken.items()}
    model.train()
    model(torch.randn(8, 3)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert list(taken) == asked
    for name, tensor in taken.items():
        assert torch.equal(tensor, before[name])
        assert not torch.equal(tensor, model.state_dict()[name])
        assert not tensor.requires_grad
        assert not isinstance(tensor, nn.Parameter)


def test_loading_does_not_alias_what_was_given():
    model = small()
    partition = split(model)
    shared, local = entries(model, partition.shared), entries(model, partition.local)
    load_entries(model, shared, local)
    shared["0.weight"].zero_()
    local["1.running_var"].zero_()
    assert model.state_dict()["0.weight"].abs().sum() > 0
    assert model.state_dict()["1.running_var"].sum() == 4


def test_a_round_trip_changes_nothing_and_keeps_training_possible():
    source, target = small(), small()
    source(torch.randn(16, 3))
    partition = split(source)
    parameters = list(target.parameters())
    load_entries(target, entries(source, partition.shared), entries(source, partition.local))
    assert all(a is b for a, b in zip(parameters, target.parameters(), strict=True))
    x = torch.randn(5, 3)
    assert torch.equal(source.eval()(x), target.eval()(x))


def replaced(**changes):
    model = small()
    given = entries(model, model.state_dict())
    for name, value in changes.items():
        key = name.removeprefix("k").replace("_at_", ".")
        given[key] = value
        if value is None:
            del given[key]
    return given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (replaced(k0_at_bias=None), r"1 missing \(0\.bias\)"),
        (replaced(extra=torch.ones(1)), r"1 unknown \(extra\)"),
        (replaced(k0_at_bias=None, extra=torch.ones(1)), r"1 missing \(0\.bias\), 1 unknown \(ex"),
        ({}, r"9 missing \(0\.weight, 0\.bias, 1\.weight, …\)"),
        (replaced(k0_at_bias=torch.ones(5)), r"'0\.bias' is \(5,\) .*expected \(4,\)"),
        (replaced(k0_at_bias=torch.ones(1)), r"'0\.bias' is \(1,\)"),
        (replaced(k0_at_bias=torch.ones(4).double()), r"float64, expected \(4,\) torch\.float32"),
        (replaced(k1_at_num_batches_tracked=torch.tensor(1.0)), "float32, expected .*int64"),
        (replaced(k0_at_bias=[1.0] * 4), r"'0\.bias' is a list, expected a tensor"),
    ],
)
def test_loading_is_strict_and_a_refusal_changes_nothing(given, message):
    model = small()
    before = entries(model, model.state_dict())
    with pytest.raises(StateMismatchError, match=message):
        load_entries(model, given)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_an_entry_given_twice_is_refused():
    model = small()
    everything = entries(model, model.state_dict())
    with pytest.raises(StateMismatchError, match=r"given twice: 0\.bias, 0\.weight"):
        load_entries(model, everything, entries(model, ["0.bias", "0.weight"]))


def test_a_data_parallel_prefix_shows_both_sides_of_the_difference():
    model = small()
    prefixed = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    with pytest.raises(
        StateMismatchError,
        match=r"what came do not fit .*9 missing \(0\.weight.*9 unknown \(module\.0\.weight",
    ):
        check_entries(prefixed, model.state_dict(), "what came")


# ------------------------------------------------------------------------ recomputed statistics


def test_recomputed_statistics_are_those_of_the_samples_layer_by_layer():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Dropout(0.5), nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3), nn.ReLU(),
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2),
    )  # fmt: skip
    inputs = 3 + 2 * torch.randn(50, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    model[0].eval()
    recompute_statistics(model, inputs)
    first = model[1](inputs)
    torch.testing.assert_close(model[2].running_mean, first.mean(0))
    torch.testing.assert_close(model[2].running_var, first.var(0))
    normalised = (first - first.mean(0)) / (first.var(0, correction=0) + model[2].eps).sqrt()
    second = model[4](normalised.relu())
    torch.testing.assert_close(model[5].running_mean, second.mean(0))
    torch.testing.assert_close(model[5].running_var, second.var(0))
    assert model[2].momentum == 0.3
    assert [module.training for module in model] == [False] + [True] * 6
    for name, tensor in model.state_dict().items():
        same = torch.equal(tensor, before[name])
        assert same == (name.rpartition(".")[2] not in STATISTICS), name


def test_recomputed_statistics_do_not_depend_on_the_old_ones():
    inputs, found = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)), []
    for start in (0.0, 7.0):
        torch.manual_seed(0)
        model = small()
        model[1].running_mean.fill_(start)
        recompute_statistics(model, inputs)
        found.append(model[1].running_mean)
    assert torch.equal(*found)


def test_statistics_that_cannot_be_recomputed_are_refused():
    with pytest.raises(ValueError, match="at least two samples, got 1"):
        recompute_statistics(small(), torch.ones(1, 3))
    for model in (nn.Linear(3, 2), nn.BatchNorm1d(3, track_running_stats=False)):
        with pytest.raises(NoBatchNormError, match="could be recomputed"):
            recompute_statistics(model, torch.ones(4, 3))


def spatial_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm2d(3)
    )


def test_statistics_in_one_batch_are_those_of_the_whole():
    inputs = torch.randn(9, 2, 6, 6)
    one, other = spatial_network(), spatial_network()
    recompute_statistics(one, inputs)
    other.eval()
    recompute_in_batches(other, [inputs], lambda network, batch: network(batch))
    for name, tensor in one.state_dict().items():
        if "num_batches" not in name:
            assert torch.allclose(tensor, other.state_dict()[name], rtol=1e-5, atol=1e-6), name
    assert not any(module.training for module in other.modules())
    assert [m.momentum for m in other.modules() if isinstance(m, nn.BatchNorm2d)] == [0.1, 0.1]


def test_statistics_of_batches_of_unequal_size_count_every_value_once():
    inputs = 1e4 + torch.randn(11, 3, 4, 4)  # a large mean: a plain sum of squares would lose it
    network = nn.Sequential(nn.BatchNorm2d(3))
    recompute_in_batches(network, inputs.split([2, 7, 2]), lambda model, batch: model(batch))
    values = inputs.double().transpose(0, 1).flatten(1)
    assert torch.allclose(network[0].running_mean.double(), values.mean(dim=1), rtol=1e-7)
    assert torch.allclose(network[0].running_var.double(), values.var(dim=1), rtol=1e-6)


def test_statistics_stay_where_there_is_no_batch_or_a_fault():
    network = spatial_network()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ValueError, match="at least one batch"):
        recompute_in_batches(network, [], lambda model, batch: model(batch))
    with pytest.raises(RuntimeError):
        recompute_in_batches(network, [torch.ones(2, 5, 9, 9)], lambda model, batch: model(batch))
    assert not network[1]._forward_pre_hooks
    kept = network.state_dict()
    assert all(torch.equal(t, kept[n]) for n, t in before.items() if "num_batches" not in n)
    with pytest.raises(NoBatchNormError):
        recompute_in_batches(nn.Linear(2, 2), [torch.ones(2, 2)], lambda model, batch: model(batch))
