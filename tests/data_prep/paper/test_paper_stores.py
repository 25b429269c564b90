"""Stores of the paper's image sets, by the commands that make them, on made-up folders."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from data_prep import __main__ as cli
from data_prep.images.store import read_image_store
from data_prep.paper import sources
from data_prep.paper.splits import Rule, SplitError
from data_prep.paper.stores import Plan, plan_sites, unseen_domain


@pytest.fixture
def call(monkeypatch, tmp_path):
    monkeypatch.setattr(cli.screen, "width", 200)

    def run(*arguments, code=0):
        given = [str(a) for a in (*arguments, "--out", tmp_path / "out")]
        done = CliRunner().invoke(cli.app, given)
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.output
        return done.output

    return run


@pytest.fixture
def stores(tmp_path):
    def read():
        return {
            folder.name: read_image_store(folder, verify=True)
            for folder in sorted((tmp_path / "out").iterdir())
            if folder.is_dir()
        }

    return read


def sections(store):
    return [
        sum(image.section == s for image in store.images)
        for s in ("training", "validation", "test")
    ]


def test_digits_become_stores(call, stores, digits):
    said = call("digits", "--source", digits, "--share", "0.1", "--smallest", "100")
    made = stores()
    assert list(made) == ["MNIST", "MNIST-M", "SVHN", "SynthStandIn", "USPS"]
    assert {name: sections(store)[0] for name, store in made.items()} == dict.fromkeys(made, 10)
    assert sections(made["MNIST"]) == [10, 0, 12]
    assert "MNIST: 10 training, 0 validation, 12 test" in said
    assert "SynthStandIn: these digits stand in for SynthDigits and are not it" in said
    assert "no training image is of" in said
    assert made["USPS"].classes == tuple("0123456789")
    assert made["USPS"].stack().shape == (22, 28, 28, 3)
    assert made["USPS"].description["source"]["rule"]["smallest"] == 100
    assert len({json.dumps(store.signature()) for store in made.values()}) == 1


def test_the_images_and_classes_of_a_store_are_those_of_the_source(call, stores, digits):
    call("digits", "--source", digits, "--smallest", "100")
    store = stores()["MNIST"]
    with np.load(digits / "mnist.npz") as archive:
        pixels = np.concatenate([archive["x_train"], archive["x_test"]])
        labels = np.concatenate([archive["y_train"], archive["y_test"]])
    for image in store.images:
        row = int(image.participant_id.removeprefix("image-"))
        np.testing.assert_array_equal(store.stack()[image.row, :, :, 0], pixels[row].T)
        assert image.class_name == str(labels[row])


def test_a_house_number_is_one_unit(call, stores, digits):
    call("digits", "--source", digits, "--smallest", "100", "--test-rest")
    svhn = stores()["SVHN"]
    with np.load(digits / "svhn.npz") as archive:
        houses = archive["house"]
    seen = {}
    for unit, section in zip(svhn.units, svhn.sections, strict=True):
        seen[unit.id] = section
        assert unit.n_samples <= 2
    assert sum(name.startswith("group-") for name in seen) == len(set(houses.tolist()))
    assert sum(name.startswith("image-") for name in seen) == 10
    assert sum(sections(svhn)) == 70  # with whole houses in front, next to nothing is left out


def test_the_same_again_is_unchanged_and_another_seed_is_not(call, stores, digits):
    arguments = ("digits", "--source", digits, "--smallest", "100")
    call(*arguments)
    before = {name: store.fingerprint() for name, store in stores().items()}
    assert "Unchanged, same files and settings: MNIST, SVHN, USPS" in call(*arguments)
    assert "Unchanged" not in call(*arguments, "--force")
    assert {name: store.fingerprint() for name, store in stores().items()} == before
    assert "Unchanged" not in call(*arguments, "--seed", "1")
    assert stores()["MNIST"].fingerprint() != before["MNIST"]


def test_a_domain_becomes_several_clients_with_the_same_test(call, stores, digits):
    call("digits", "--source", digits, "--smallest", "40", "--parts", "3")
    made = stores()
    assert sum(name.startswith("MNIST-M") for name in made) == 3
    assert len(made) == 15
    ids = [{i.participant_id: i.section for i in made[f"USPS-{k}"].images} for k in (1, 2, 3)]
    train = [{who for who, section in part.items() if section == "training"} for part in ids]
    test = [{who for who, section in part.items() if section == "test"} for part in ids]
    assert [len(part) for part in train] == [4, 4, 4]
    assert len(set.union(*train)) == 12
    assert test[0] == test[1] == test[2]


def test_too_few_images_leave_nothing_behind(call, tmp_path, digits):
    said = call("digits", "--source", digits, code=1)
    assert "site 'MNIST' has 48 training images, and rows 0 to 743 are asked for" in said
    assert not (tmp_path / "out").exists()
    assert "fewer" in said
    assert "SVHN: 56 training" in call("digits", "--source", digits, "--fewer")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--share", "2"), 2, "share is 2"),
        (("--size", "4"), 2, "--size"),
        (("--parts", "0"), 2, "--parts"),
        (("--source", "nowhere"), 1, "nowhere has no mnist.npz"),
    ],
)
def test_wrong_options_are_one_sentence(call, digits, arguments, code, says):
    assert says in call("digits", "--source", digits, *arguments, code=code)


def test_a_folder_of_something_else_is_not_replaced(call, tmp_path, digits):
    place = tmp_path / "out" / "USPS"
    place.mkdir(parents=True)
    (place / "thesis.tex").write_text("years of work")
    call("digits", "--source", digits, "--smallest", "100", code=1)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["USPS"]
    assert (place / "thesis.tex").read_text() == "years of work"


def test_office_has_training_validation_and_test(call, stores, office):
    call("office", "--source", office, "--size", "16")
    made = stores()
    assert list(made) == ["amazon", "caltech", "dslr", "webcam"]
    assert sections(made["amazon"]) == [24, 19, 12]  # of 60: 48 for training, a half and 40 % of it
    assert made["dslr"].classes[5] == "laptop_computer"
    assert made["dslr"].stack().shape[1:] == (16, 16, 3)


def test_domainnet_keeps_its_split_and_does_not_take_one_class_alone(call, stores, domainnet):
    call("domainnet", "--source", domainnet, "--size", "8", "--share", "0.3", "--validation", "0.2")
    made = stores()
    assert list(made) == list(sources.DOMAINNET_DOMAINS)
    for store in made.values():
        assert sections(store) == [12, 8, 10]
        trained = {i.class_name for i in store.images if i.section == "training"}
        assert len(trained) > 4
        tested = {
            int(i.participant_id.removeprefix("image-"))
            for i in store.images
            if i.section == "test"
        }
        assert tested == set(range(40, 50))


def test_the_plan_is_refused_before_anything_is_read():
    for change in ({"size": 4}, {"n_parts": 0}):
        with pytest.raises(SplitError, match="at least 8 pixels and 1 part"):
            Plan("digits", Rule(0.1), **({"size": 28} | change))


def test_an_unseen_client_shares_no_digit_with_the_federation(call, stores, digits):
    pytest.importorskip("skimage")
    with np.load(digits / "mnist.npz") as archive:
        arrays = dict(archive)
    y, x = np.mgrid[:28, :28]
    for name in ("x_train", "x_test"):
        for k, image in enumerate(arrays[name]):  # rings of different widths, in place of noise
            r = np.hypot(y - 13.5, x - 13.5)
            image[:] = np.where((r > 5) & (r < 8 + k % 4), 255 - k - (name == "x_test"), 0)
    np.savez(digits / "mnist.npz", **arrays)
    mnist = sources.read_digits(digits)[0]
    federation = plan_sites([mnist], Plan("digits", Rule(0.5), 28))["MNIST"][1]
    client = unseen_domain(mnist, "global", seed=0)
    assert client.labels.tolist() == mnist.labels[federation.test].tolist()
    call("morpho", "--source", digits)
    made = stores()
    assert list(made) == ["Morpho-global", "Morpho-local"]
    assert all(sections(store) == [6, 0, 6] for store in made.values())
    assert made["Morpho-global"].fingerprint() != made["Morpho-local"].fingerprint()
