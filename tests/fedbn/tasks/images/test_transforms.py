"""What a job may name: MONAI's own transforms, losses and inferers, and nothing that runs code."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch
from images import EXPERIMENT

from fedbn.federation.experiment import ExperimentError, validated
from fedbn.tasks.images.transforms import ALLOWED, LOADERS, build


def refused(**task):
    content = EXPERIMENT | {"task": EXPERIMENT["task"] | task}
    with pytest.raises(ExperimentError) as caught:
        validated(content, "experiment.json")
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


SCALE = {"_target_": "ScaleIntensityd", "keys": "image"}


@pytest.mark.parametrize(
    ("target", "more"),
    [
        ("os.system", {"command": "touch /tmp/owned"}),
        ("torch.load", {"f": "weights.pt"}),
        ("builtins.eval", {}),
        ("subprocess.run", {}),
        ("monai.transforms.Lambdad", {"keys": "image", "func": "x"}),
        ("Lambdad", {"keys": "image", "func": "$lambda x: x"}),
        ("monai.transforms.SaveImaged", {"keys": "image"}),
        ("monai.apps.download_url", {"url": "http://example.org"}),
        ("monai.transforms.TorchVisiond", {"keys": "image", "name": "ToTensor"}),
        ("torch.ScaleIntensityd", {}),
        ("monai.networks.nets.resnet50", {"pretrained": True}),
    ],
)
def test_code_is_refused_with_its_place(target, more):
    entry = {"_target_": target, **more}
    sentence = refused(preprocessing=[SCALE, entry])
    assert "task.preprocessing.1: " in sentence
    assert f"_target_ {target!r} is not allowed here" in sentence
    assert "task.loss: " in refused(loss=entry)
    assert "task.inferer: " in refused(inferer=entry)
    assert "task.augmentation.0: " in refused(augmentation=[entry])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (SCALE | {"minv": "$import('os')"}, "expressions are not evaluated"),
        (SCALE | {"keys": ["image", "@network"]}, "expressions are not evaluated"),
        (SCALE | {"factor": {"a": ["%x"]}}, "expressions are not evaluated"),
        (SCALE | {"dtype": "os.system"}, "dtype is 'os.system'; give one of float16"),
        (SCALE | {"_requires_": "x"}, "_requires_ has no meaning here"),
        ({"_target_": "EnsureTyped", "keys": "image", "device": "cuda:3"}, "decided by each site"),
        ({"keys": "image"}, 'give an object with "_target_"'),
        ({"_target_": "LoadImaged", "keys": "image"}, "only stand at the beginning"),
        ({"_target_": "RandFlipd", "keys": "image"}, "not allowed here"),
    ],
)
def test_what_is_wrong_with_an_entry_is_said(entry, words):
    sentence = refused(preprocessing=[SCALE, entry])
    assert "task.preprocessing" in sentence
    assert words in sentence


def test_every_allowed_name_exists():
    for of_field in ALLOWED.values():
        for module, names in of_field.items():
            for name in names:
                assert isinstance(getattr(importlib.import_module(module), name), type), name


def test_reading_an_experiment_does_not_import_monai():
    code = (
        "import sys, json; from fedbn.federation.experiment import Experiment\n"
        "Experiment.model_validate(json.loads(sys.argv[1])); print('monai' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(EXPERIMENT)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_types_and_weights_are_built_from_json():
    cast = build("preprocessing", {"_target_": "CastToTyped", "keys": "image", "dtype": "float64"})
    assert cast({"image": torch.zeros(2)})["image"].dtype == torch.float64
    loss = build("loss", {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1, 2]})
    assert loss.weight.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"ScaleIntensityd cannot be built with .*nonsense"):
        build("preprocessing", SCALE | {"nonsense": 1})
    assert LOADERS[0] == "LoadImaged"
