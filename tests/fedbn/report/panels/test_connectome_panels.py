"""The edges that weigh most, on a brain."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from data_prep.harvard_oxford import ROIS
from fedbn.report.panels import connectome
from fedbn.report.panels.base import Panels
from fedbn.report.panels.classification import ClassificationPanels
from fedbn.report.panels.connectome import ConnectomePanels, Edge
from fedbn.report.panels.registry import panels_of
from fedbn.tasks.base import Features, Task
from fedbn.tasks.connectome.task import ConnectomeTask
from fedbn.tasks.tabular import TabularTask


def features_of(rois):
    names = tuple((*a, *b) for a, b in itertools.combinations(rois, 2))
    return Features("edge", ("roi_a", "name_a", "roi_b", "name_b"), names, ("name_a", "name_b"))


def test_each_task_has_the_panels_of_its_family():
    table = TabularTask(target="ill", classes={"no": ["0"], "yes": ["1"]}, numbers=["age"])
    assert type(panels_of(ConnectomeTask())) is ConnectomePanels
    assert type(panels_of(table)) is ClassificationPanels
    other = type("Other", (Task,), {})
    other.__abstractmethods__ = frozenset()
    assert type(panels_of(other(name="other"))) is Panels


def test_the_strongest_edges_are_drawn_whatever_their_sign():
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connectome, "on_a_brain", lambda edges, **_: drawn.extend(edges) or ["one"])
        weights = np.array([0.1, -3.0, 2.0, 0.0, 0.5, -0.2])
        panels = panels_of(ConnectomeTask())
        found = panels.draw_features(features_of(ROIS[:4]), weights, 3, synthetic=False)
    assert found == ["one"]
    a, b, c, d = ROIS[:4]
    assert drawn == [Edge(a, c, -3.0), Edge(a, d, 2.0), Edge(b, d, 0.5)]


def test_what_is_not_drawn_is_said():
    panels = panels_of(ConnectomeTask())
    unknown = features_of([("1", "a"), ("2", "b")])
    assert panels.draw_features(unknown, np.ones(1), synthetic=False) == []
    assert "whose coordinates this package has" in panels.about_features(unknown)
    odd = next(roi for roi in ROIS if roi[0] == "3455")
    assert "ROI 3455 is not drawn" in panels.about_features(features_of([*ROIS[:3], odd]))
    assert "not drawn" not in panels.about_features(features_of(ROIS[:3]))


def test_every_region_but_3455_has_coordinates_on_its_own_side():
    known = connectome.coordinates()
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
    place = {name: xyz for (_, name), xyz in connectome.coordinates().items()}
    assert np.linalg.norm(np.subtract(place[region], near)) < 5


def test_an_edge_to_a_region_without_coordinates_is_left_out():
    odd = next(roi for roi in ROIS if roi[0] == "3455")
    inside, outside = connectome.located([Edge(ROIS[0], ROIS[1], 1.0), Edge(ROIS[3], odd, 2.0)])
    assert inside == [Edge(ROIS[0], ROIS[1], 1.0)]
    assert outside == [Edge(ROIS[3], odd, 2.0)]


def test_edges_are_drawn_from_three_sides():
    edges = [Edge(ROIS[0], ROIS[40], 1.0), Edge(ROIS[2], ROIS[3], -0.5)]
    pictures = connectome.on_a_brain(edges, synthetic=False)
    assert [picture.name for picture in pictures] == ["edges_above", "edges_left", "edges_right"]
    assert all(picture.png.startswith(b"\x89PNG") for picture in pictures)
    assert len({picture.png for picture in pictures}) == 3
