"""The edges that weigh most, and where they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from data_prep.harvard_oxford import ROIS
from fedbn.federation.site import make_network
from fedbn.report import edges, site_models
from fedbn.report.edges import Edge


def test_a_path_weight_is_the_gradient_of_the_network_without_its_relu(settings, replaced):
    deep = settings.changed(
        network={"name": "ConnectomeMLP", "args": {"in_features": 66, "hidden": [8, 5]}}
    )
    network, partition = make_network(deep)
    for layer in partition.layers:
        norm = network.get_submodule(layer)
        nn.init.uniform_(norm.weight, 0.5, 2)
        norm.running_var.uniform_(0.2, 3)
    tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    models = site_models.SiteModels(deep, partition, {"NYU": tensors}, {}, (), "")
    for block in network.hidden:
        block.activation = nn.Identity()
    sample = torch.zeros(1, 66, requires_grad=True)
    logits = network.eval()(sample)
    (logits[0, 1] - logits[0, 0]).backward()
    assert edges.attribution(models) == pytest.approx(sample.grad[0].numpy(), rel=1e-4, abs=1e-6)


def test_other_networks_have_no_path_weights(settings):
    other = settings.changed(
        network={
            "name": "DenseNet121",
            "args": {"spatial_dims": 1, "in_channels": 1, "out_channels": 2, "init_features": 4},
        }
    )
    _, partition = make_network(other)
    assert edges.attribution(site_models.SiteModels(other, partition, {}, {}, (), "")) is None


def test_the_strongest_edges_come_first_whatever_their_sign():
    weights = np.array([0.1, -3.0, 2.0, 0.0, 0.5, -0.2])
    found = edges.strongest(weights, 4, n=3)
    assert found == [Edge(0, 2, -3.0), Edge(0, 3, 2.0), Edge(1, 3, 0.5)]


def test_every_region_but_3455_has_coordinates_on_its_own_side():
    known = edges.coordinates()
    assert set(ROIS) - set(known) == {("3455", "label 3455")}
    assert set(known) < set(ROIS)
    for (roi_id, name), (x, y, z) in known.items():
        assert (x < 0) == name.startswith("Left"), roi_id
        assert abs(x) < 75
        assert -110 < y < 75
        assert -50 < z < 80


@pytest.mark.parametrize(
    ("region", "near"),
    [
        ("Left Amygdala", (-23, -5, -18)),
        ("Right Thalamus", (11, -18, 7)),
        ("Left Frontal Pole", (-25, 53, 8)),
        ("Right Occipital Pole", (18, -95, 8)),
        ("Left Precentral Gyrus", (-34, -12, 49)),
    ],
)
def test_coordinates_are_where_anatomy_has_the_region(region, near):
    place = {name: xyz for (_, name), xyz in edges.coordinates().items()}
    assert np.linalg.norm(np.subtract(place[region], near)) < 5


def test_an_edge_to_a_region_without_coordinates_is_left_out():
    ids = [roi_id for roi_id, _ in ROIS]
    odd = ids.index("3455")
    inside, outside = edges.located([Edge(0, 1, 1.0), Edge(3, odd, 2.0)], ROIS)
    assert inside == [Edge(0, 1, 1.0)]
    assert outside == [Edge(3, odd, 2.0)]


def test_edges_are_drawn_from_three_sides():
    pictures = edges.on_a_brain([Edge(0, 40, 1.0), Edge(2, 3, -0.5)], ROIS, synthetic=False)
    assert [picture.name for picture in pictures] == ["edges_above", "edges_left", "edges_right"]
    assert all(picture.png.startswith(b"\x89PNG") for picture in pictures)
    assert len({picture.png for picture in pictures}) == 3
