"""Sections on how the sites differ, where there is more or less to show than usual."""

from __future__ import annotations

import pytest
import torch

from fedbn.federation.site import make_network
from fedbn.report import parts
from fedbn.report.html import Page
from fedbn.report.site_models import SiteModels

DEEP = {
    "name": "DenseNet121",
    "args": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "init_features": 4},
}


def models_of(experiment, sites=("NYU", "UM", "USM")):
    """Return untrained networks whose statistics differ between sites."""
    network, partition = make_network(experiment)
    generator = torch.Generator().manual_seed(0)
    by_site = {}
    for site in sites:
        state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        for name in state:
            if name.endswith("running_mean"):
                state[name] += torch.randn(state[name].shape, generator=generator)
        by_site[site] = state
    return SiteModels(experiment, partition, by_site, {})


def page_of(models):
    page = Page("A", synthetic=False)
    parts.sites_inside(page, models, None, "why not", lambda _: None)
    return page


@pytest.mark.slow
def test_a_deep_network_has_one_map_of_layers_by_pairs(settings):
    page = page_of(models_of(settings.changed(network=DEEP)))
    assert set(page.pictures) == {"distance_statistics", "distance_gamma_and_beta"}


@pytest.mark.parametrize(
    ("policy", "sites", "sentence"),
    [
        ("none", ("NYU", "UM"), "Under policy &#x27;none&#x27; the statistics are shared"),
        ("fedbn", ("NYU",), "The models of NYU alone are here"),
    ],
)
def test_what_cannot_be_compared_is_said(settings, policy, sites, sentence):
    page = page_of(models_of(settings.changed(policy=policy), sites))
    assert page.pictures == {}
    assert sentence in page.html()


def test_shared_gamma_and_beta_have_no_map(settings):
    page = page_of(models_of(settings.changed(policy="silobn")))
    assert set(page.pictures) == {"distance_statistics_1"}


def test_without_models_both_sections_say_why():
    page = page_of(None)
    assert page.html().count("why not") == 3
