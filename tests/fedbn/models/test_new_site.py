"""What a hospital starts from that took no part in a run."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from data_prep.__main__ import app as data_prep
from data_prep.site_store import StoreError, read_site_store
from fedbn.__main__ import app
from fedbn.core.aggregation import ContributionError
from fedbn.core.batches import TensorSamples
from fedbn.core.normalization import affine_names, entries, split, statistics_names
from fedbn.federation.results import FORMAT as RESULTS_FORMAT
from fedbn.federation.run_folder import SAVED_FILE
from fedbn.federation.simulation import federate, read_sites
from fedbn.federation.site import Site, make_network
from fedbn.federation.site_state import (
    COMPLETE_MODEL,
    SHARED_WEIGHTS,
    SiteStateError,
    load_checkpoint,
    network_fingerprint,
    save_checkpoint,
)
from fedbn.models.new_site import (
    AFFINE,
    AFFINE_FILE,
    REPORT_FILE,
    STARTS,
    AdaptationError,
    adapt,
    buildable,
    default_start,
    load_start,
    mean_over_sites,
    read_run,
    save_affine,
    unlabelled,
)
from fedbn.models.site_model import find_kept_model
from fedbn.tasks.classification import predict

NORM = "hidden.0.norm"
GAMMA_BETA = (f"{NORM}.weight", f"{NORM}.bias")
STATISTICS = (f"{NORM}.running_mean", f"{NORM}.running_var")


def write_run(
    folder, write_experiment, experiment, shared, *, affine=None, signature=None, facts=None
):
    """Write what a finished FLARE run leaves at its server."""
    app_folder = folder / "server" / "simulate_job" / "app_server"
    write_experiment(app_folder / "config", experiment)
    save_checkpoint(
        app_folder / SAVED_FILE, SHARED_WEIGHTS, shared, {"job": "simulate_job"} | (facts or {})
    )
    if affine is not None:
        save_affine(app_folder / AFFINE_FILE, experiment, "simulate_job", affine)
    if signature is not None:
        content = {"format": RESULTS_FORMAT, "signature": signature}
        (app_folder.parent / "results.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def new_store(tmp_path, write_store):
    folder = tmp_path / "new" / "UCLA"
    write_store(folder, "UCLA", n_subjects=14)
    return read_site_store(folder)


@pytest.fixture
def gammas():
    """Gamma and beta of two hospitals whose mean is 2 and -1."""
    return {
        site: dict(zip(GAMMA_BETA, (torch.full((8,), g), torch.full((8,), b)), strict=True))
        for site, g, b in (("NYU", 1.0, 0.0), ("UM", 3.0, -2.0))
    }


@pytest.fixture
def run_folder(tmp_path, write_experiment, experiment):
    def write(policy="fedbn", **files):
        settings = experiment(policy=policy)
        network, partition = make_network(settings)
        shared = {name: tensor + 0.5 for name, tensor in entries(network, partition.shared).items()}
        return write_run(tmp_path / "run", write_experiment, settings, shared, **files)

    return write


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# ------------------------------------------------------------------------------------- the pieces


def test_gamma_and_beta_are_told_from_statistics_by_what_is_trained():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
    )
    partition = split(model)
    assert affine_names(model, partition) == ("1.weight", "1.bias", "4.weight", "4.bias")
    assert statistics_names(model, partition) == (
        "1.running_mean",
        "1.running_var",
        "3.running_mean",
        "3.running_var",
    )


@pytest.mark.parametrize(("policy", "n"), [("fedbn", 2), ("silobn", 0), ("none", 0)])
def test_only_what_stays_at_a_site_has_to_be_found_elsewhere(experiment, policy, n):
    network, partition = make_network(experiment(policy=policy))
    assert len(affine_names(network, partition)) == n


def test_the_mean_over_sites_counts_each_the_same_and_refuses_what_does_not_fit(gammas):
    expected = gammas["NYU"]
    mean = mean_over_sites(gammas, expected)
    assert mean[GAMMA_BETA[0]].tolist() == [2.0] * 8
    assert mean[GAMMA_BETA[1]].tolist() == [-1.0] * 8
    gammas["UM"][GAMMA_BETA[0]][3] = torch.nan
    with pytest.raises(ContributionError, match="not finite"):
        mean_over_sites(gammas, expected)
    del gammas["UM"][GAMMA_BETA[0]]
    with pytest.raises(ContributionError, match="1 missing"):
        mean_over_sites(gammas, expected)


@pytest.mark.parametrize("n_willing", [0, 1])
def test_with_fewer_than_two_willing_sites_no_ones_gamma_is_kept(
    tmp_path, experiment, gammas, n_willing
):
    willing = dict(list(gammas.items())[1 : 1 + n_willing])
    sentence = save_affine(tmp_path / AFFINE_FILE, experiment(), "a-job", willing)
    assert f"gamma 1 and beta 0: {n_willing} of 2 sites share gamma and beta" in sentence
    tensors, meta = load_checkpoint(tmp_path / AFFINE_FILE, AFFINE)
    assert [tensors[name].unique().tolist() for name in GAMMA_BETA] == [[1.0], [0.0]]
    assert meta["sites"] == []
    assert "at least 2 are needed" in meta["fallback"]


@pytest.mark.parametrize("name", STARTS)
def test_a_start_is_made_of_what_its_name_says(experiment, new_store, name):
    start = STARTS[name]
    settings = experiment(policy=start.policy)
    site = Site("UCLA", new_store, settings, preparation=unlabelled(new_store, settings))
    network, partition = site.network, site.partition
    initial = entries(network, network.state_dict())
    shared = {key: initial[key] + 0.25 for key in partition.shared}
    affine = {key: torch.full((8,), 2.0) for key in affine_names(network, partition)}
    moving = {key: torch.full((8,), 3.0) for key in statistics_names(network, partition)}
    load_start(
        network, partition, start, shared, site.test.inputs, affine=affine, statistics=moving
    )
    state = network.state_dict()
    assert all(
        torch.equal(state[key], shared[key]) for key in shared if key not in partition.batch_norm
    )
    expected_affine = {
        "shared": [initial[key] + 0.25 for key in GAMMA_BETA],
        "initial": [torch.ones(8), torch.zeros(8)],
        "mean": [torch.full((8,), 2.0)] * 2,
    }[start.affine]
    for key, expected in zip(GAMMA_BETA, expected_affine, strict=True):
        assert torch.equal(state[key], expected), key
    with torch.no_grad():
        hidden = network.hidden[0].activation(network.hidden[0].linear(site.test.inputs))
    own = [hidden.mean(dim=0), hidden.var(dim=0)]
    expected_statistics = {
        "shared": [initial[key] + 0.25 for key in STATISTICS],
        "initial": [torch.zeros(8), torch.ones(8)],
        "mean": [torch.full((8,), 3.0)] * 2,
        "own": own,
    }[start.statistics]
    for key, expected in zip(STATISTICS, expected_statistics, strict=True):
        assert torch.allclose(state[key], expected, rtol=1e-4, atol=1e-5), key


def test_a_start_refuses_a_run_of_another_policy_and_a_missing_mean(experiment):
    network, partition = make_network(experiment())
    with pytest.raises(AdaptationError, match="needs a run of policy 'none', this one's is"):
        load_start(network, partition, STARTS["fedavg"], {}, torch.zeros(2, 66))
    with pytest.raises(AdaptationError, match="needs the mean affine of the sites"):
        load_start(network, partition, STARTS["fedbn_affine"], {}, torch.zeros(2, 66))


# ------------------------------------------------------------------------------- reading the run


def test_a_runs_affine_file_decides_what_can_be_built(run_folder, gammas):
    run = read_run(run_folder(affine=gammas))
    assert run.willing == ("NYU", "UM")
    assert run.affine[GAMMA_BETA[0]].tolist() == [2.0] * 8
    assert buildable(run) == ["fedbn_default", "fedbn_statistics", "fedbn_affine"]
    assert default_start(run) == "fedbn_affine"


def test_without_willing_sites_the_reason_is_kept(run_folder, gammas):
    run = read_run(run_folder(affine={"UM": gammas["UM"]}))
    assert run.affine is None
    assert "1 of 2 sites share gamma and beta" in run.no_affine
    assert default_start(run) == "fedbn_statistics"


@pytest.mark.parametrize(
    ("policy", "starts"),
    [("none", ["fedavg", "fedavg_statistics"]), ("silobn", ["silobn_statistics"])],
)
def test_other_policies_share_gamma_and_beta_by_themselves(run_folder, policy, starts):
    run = read_run(run_folder(policy))
    assert buildable(run) == starts
    assert run.no_affine == "the run's policy shares gamma and beta"


def test_a_run_that_cannot_be_used_is_refused(tmp_path, run_folder, write_experiment, experiment):
    with pytest.raises(AdaptationError, match=r"no FL_global_model\.pt in"):
        read_run(tmp_path)
    folder = run_folder()
    second = experiment(algorithm={"name": "alone"}, policy="none")
    write_run(tmp_path / "run" / "again", write_experiment, second, {})
    with pytest.raises(AdaptationError, match=r"2 files FL_global_model\.pt"):
        read_run(folder)
    with pytest.raises(AdaptationError, match="algorithm 'alone', which leaves no one model"):
        read_run(folder / "again")
    network, partition = make_network(experiment())
    shared = entries(network, partition.shared)
    del shared["classifier.bias"]
    broken = write_run(tmp_path / "broken", write_experiment, experiment(), shared)
    with pytest.raises(ValueError, match=r"1 missing \(classifier.bias\)"):
        read_run(broken)


# ------------------------------------------------------------------------------ the whole command


def test_adapt_writes_a_model_as_a_site_keeps_its_own(run_folder, gammas, new_store, tmp_path):
    folder = run_folder(affine=gammas, signature=new_store.signature())
    out = tmp_path / "out"
    done = invoke("adapt", "--run", folder, "--data", new_store.path, "--out", out)
    assert done.exit_code == 0, done.output
    assert "there is no evidence" in done.output
    assert "gamma and beta: mean over NYU, UM" in done.output
    tensors, meta = load_checkpoint(out / "model.pt", COMPLETE_MODEL)
    run = read_run(folder)
    network, partition = make_network(run.experiment)
    assert meta["site"] == "UCLA"
    assert meta["network"] == network_fingerprint("ConnectomeMLP", network.state_dict())
    assert meta["facts"]["signature"] == json.loads(json.dumps(new_store.signature()))
    assert meta["facts"]["local entries"] == list(partition.local)
    raw = np.asarray(new_store.connectomes)
    assert np.allclose(tensors["fitted.mean"], raw.mean(axis=0), atol=1e-5)
    assert np.allclose(tensors["fitted.std"], raw.std(axis=0), rtol=1e-4)
    assert set(tensors) == {*network.state_dict(), "fitted.mean", "fitted.std"}
    report = json.loads((out / REPORT_FILE).read_text())
    assert report["start"] == "fedbn_affine"
    assert report["used"]["labels"] == "none"
    assert report["stores compared"]
    ids = [participant.participant_id for participant in new_store.participants]
    text = (out / REPORT_FILE).read_text()
    assert not any(name in text for name in ids)
    assert str(tmp_path) not in text


def test_the_model_can_be_exported_and_asked_as_a_sites_own(
    run_folder, gammas, new_store, tmp_path
):
    run = read_run(run_folder(affine=gammas))
    adapt(run, new_store, tmp_path / "out", start="fedbn_affine", why="")
    kept = find_kept_model(tmp_path / "out", "UCLA")
    assert (kept.site, kept.job, kept.policy) == ("UCLA", "simulate_job", "fedbn")
    site = Site(
        "UCLA", new_store, run.experiment, preparation=unlabelled(new_store, run.experiment)
    )
    load_start(
        site.network,
        site.partition,
        STARTS["fedbn_affine"],
        run.shared,
        site.test.inputs,
        affine=run.affine,
    )
    raw = TensorSamples(torch.from_numpy(np.array(new_store.connectomes)), site.test.targets)
    expected = predict(site.network, site.test)[0]
    assert np.allclose(predict(kept.model, raw)[0], expected, atol=1e-5)


@pytest.mark.parametrize(("n", "code", "warned"), [(1, 1, 0), (2, 0, 1), (7, 0, 1), (8, 0, 0)])
def test_subjects_are_counted_and_few_are_refused_or_warned_of(
    run_folder, gammas, write_store, tmp_path, n, code, warned
):
    """A subject has three samples here, which resemble each other: they are no three subjects."""
    write_store(tmp_path / "few", "UCLA", n_subjects=n)
    out = tmp_path / "out"
    folder = run_folder(affine=gammas)
    done = invoke("adapt", "--run", folder, "--data", tmp_path / "few", "--out", out)
    assert done.exit_code == code, done.output
    assert done.stderr.count("accuracy 56 % from one subject, 63 from 2") == warned + code
    if code:
        assert "has 1 subject, too few to adapt to: give at least 2" in done.stderr
        assert not out.exists()
    else:
        assert f"of all {n} subjects here ({3 * n} samples), no label" in done.stdout
        report = json.loads((out / REPORT_FILE).read_text())
        assert len(report["warnings"]) == warned


def test_the_bundle_of_an_adapted_model_says_from_what_and_that_nobody_was_trained_on(
    run_folder, gammas, new_store, tmp_path, data_root
):
    adapt(read_run(run_folder(affine=gammas)), new_store, tmp_path / "out", start="fedbn_affine",
          why="")  # fmt: skip
    above = new_store.path.parent
    done = invoke("export", "--run", tmp_path / "out", "--site", "UCLA", "--data", above,
                  "--out", tmp_path / "b")  # fmt: skip
    assert done.exit_code == 0, done.output
    said = "nobody at UCLA was trained on"
    assert said in done.stdout
    facts = json.loads((tmp_path / "b" / "configs" / "metadata.json").read_text())["fedbn"]
    assert facts["adaptation"]["start"] == "fedbn_affine"
    assert facts["training"] == {"n_adaptation_subjects": 14}
    assert set(facts["distances"]) == {"features", "batch_norm", "pattern"}
    assert facts["scores"] is None
    assert said in (tmp_path / "b" / "docs" / "README.md").read_text()
    done = invoke("predict", "--model", tmp_path / "b", "--input", new_store.path,
                  data_root / "NYU", "--pictures", 0, "--out", tmp_path / "p")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "The model was made for UCLA: nobody there was trained on." in done.stdout
    assert "what spoke for it is not known: the attributions of" in done.stdout, "an extreme model"
    assert "of 20 subjects it is not known whether" in done.stdout, "NYU's took part in the run"
    rows = list(csv.DictReader((tmp_path / "p" / "predictions.tsv").open(), delimiter="\t"))
    assert {row["in_training"] for row in rows if "UCLA" in row["scan"]} == {"no"}
    assert all(said in row["model"] for row in rows)


def test_an_adapted_model_of_version_0_1_says_it_too(run_folder, new_store, tmp_path):
    """That version kept it beside the model alone."""
    out = tmp_path / "out"
    adapt(read_run(run_folder("none")), new_store, out, start="fedavg", why="")
    tensors, meta = load_checkpoint(out / "model.pt", COMPLETE_MODEL)
    del meta["facts"]["adaptation"]
    save_checkpoint(out / "model.pt", COMPLETE_MODEL, tensors, meta)
    assert find_kept_model(out, "UCLA").adaptation["start"] == "fedavg"
    report = json.loads((out / REPORT_FILE).read_text())
    (out / REPORT_FILE).write_text(json.dumps({**report, "job": "another"}))
    assert find_kept_model(out, "UCLA").adaptation is None


def test_an_adapted_model_is_exported_with_the_data_that_it_was_adapted_to(
    run_folder, new_store, tmp_path, write_store
):
    adapt(read_run(run_folder("none")), new_store, tmp_path / "out", start="fedavg", why="")
    write_store(tmp_path / "other", "UCLA", n_subjects=12)
    arguments = ("export", "--run", tmp_path / "out", "--site", "UCLA", "--out", tmp_path / "b")
    done = invoke(*arguments, "--data", tmp_path / "other")
    assert done.exit_code == 1
    assert "is not the one that its model was adapted to" in done.stderr
    assert not (tmp_path / "b").exists()


def test_adapt_and_export_take_a_store_and_the_folder_above(
    run_folder, gammas, new_store, tmp_path, write_store
):
    folder = run_folder(affine=gammas)
    for k, data in enumerate((new_store.path, new_store.path.parent)):
        out = tmp_path / f"out{k}"
        done = invoke("adapt", "--run", folder, "--data", data, "--out", out)
        assert done.exit_code == 0, done.output
        done = invoke("export", "--run", out, "--site", "UCLA", "--data", data,
                      "--out", tmp_path / f"b{k}")  # fmt: skip
        assert done.exit_code == 0, done.output
        assert "exported without" not in done.output
    write_store(new_store.path.parent / "KKI", "KKI", n_subjects=8)
    done = invoke("adapt", "--run", folder, "--data", data, "--out", tmp_path / "both")
    assert done.exit_code == 1
    assert "holds the data of 2 sites (KKI, UCLA); name one site's" in done.stderr


def test_labels_play_no_part(run_folder, gammas, new_store, tmp_path, write_store):
    """A store with every diagnosis turned around gives the same model, bit for bit."""
    turned = tmp_path / "turned" / "UCLA"
    diagnoses = [p.diagnosis for p in new_store.participants]

    def as_before(values, _participants):
        values[:] = new_store.connectomes

    write_store(turned, "UCLA", n_subjects=14, diagnoses=diagnoses[1::-1], edit=as_before)
    run = read_run(run_folder(affine=gammas))
    models = []
    for k, store in enumerate((new_store, read_site_store(turned))):
        adapt(run, store, tmp_path / f"out{k}", start="fedbn_affine", why="")
        models.append(load_checkpoint(tmp_path / f"out{k}" / "model.pt", COMPLETE_MODEL)[0])
    assert np.array_equal(new_store.labels, 1 - read_site_store(turned).labels)
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_hospital_of_one_diagnosis_can_be_adapted_to(run_folder, write_store, tmp_path):
    write_store(tmp_path / "one", "UCLA", n_subjects=6, diagnoses=("control",))
    run = read_run(run_folder("none"))
    adapt(run, read_site_store(tmp_path / "one"), tmp_path / "out", start="fedavg", why="")


def test_the_fallback_is_told(run_folder, gammas, new_store, tmp_path):
    folder = run_folder(affine={"UM": gammas["UM"]})
    done = invoke("adapt", "--run", folder, "--data", new_store.path, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "gamma is 1 and beta 0 at the start: 1 of 2 sites share gamma and beta" in done.output
    report = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    assert report["used"]["gamma and beta"].startswith("1 and 0 (1 of 2 sites share")
    tensors, _ = load_checkpoint(tmp_path / "out" / "model.pt", COMPLETE_MODEL)
    assert tensors[GAMMA_BETA[0]].tolist() == [1.0] * 8


def test_what_does_not_fit_is_one_sentence_and_leaves_nothing(
    run_folder, gammas, new_store, tmp_path, data_root, write_store
):
    folder = run_folder(affine=gammas, signature=new_store.signature())
    other = tmp_path / "other" / "UCLA"
    write_store(other, "UCLA", changes={"window": 30})
    wide = tmp_path / "wide" / "UCLA"
    write_store(wide, "UCLA", n_rois=13)
    out = tmp_path / "out"
    for data, more, sentence in (
        (data_root / "NYU", [], "'NYU' took part in the run: it is no new hospital"),
        (other, [], "do not fit together: window: 20 and 30"),
        (new_store.path, ["--start", "fedavg"], "needs policy 'none', and the run's is 'fedbn'"),
        (new_store.path, ["--start", "fedbn_mean"], "running statistics never leave them"),
        (new_store.path, ["--start", "fedbm"], "unknown start 'fedbm'; choose from fedbn_default"),
        (new_store.path, ["--evidence", tmp_path], "no summary of `fedbn unseen`"),
    ):
        done = invoke("adapt", "--run", folder, "--data", data, "--out", out, *more)
        assert done.exit_code == 1, done.output
        assert sentence in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert not out.exists()
    plain = read_run(run_folder())
    plain = type(plain)(**{**vars(plain), "signature": None})
    with pytest.raises(StoreError, match="cannot take the store's samples of 78 edges"):
        adapt(plain, read_site_store(wide), out, start="fedbn_default", why="")
    assert not out.exists()
    out.mkdir()
    (out / "model.pt").write_bytes(b"a model that matters")
    with pytest.raises(AdaptationError, match=re.escape("holds a model.pt already")):
        adapt(plain, new_store, out, start="fedbn_default", why="")


def test_the_saved_files_own_experiment_wins_and_a_run_that_ended_early_is_refused(
    tmp_path, write_experiment, experiment
):
    settings = experiment(algorithm={"name": "scaffold"}, training={"optimizer": "sgd"})
    network, partition = make_network(settings)
    saved = entries(network, partition.shared)
    saved["control_variate:classifier.bias"] = torch.zeros(2)
    saved["site NYU:control_variate:classifier.bias"] = torch.zeros(2)
    for after, name in ((0, "early"), (1, "finished")):
        write_run(
            tmp_path / name,
            write_experiment,
            experiment(rounds=7),
            saved,
            facts={"experiment": settings.model_dump(mode="json"), "round": after},
        )
    run = read_run(tmp_path / "finished")
    assert run.experiment == settings
    assert set(run.shared) == set(partition.shared)
    with pytest.raises(AdaptationError, match="ended after 1 of 2 rounds; continue it"):
        read_run(tmp_path / "early")


def test_a_damaged_affine_file_is_no_fallback(run_folder, gammas):
    folder = run_folder(affine=gammas)
    path = next(folder.rglob(AFFINE_FILE))
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(SiteStateError, match="damaged"):
        read_run(folder)


# -------------------------------------------------------------------------------- is it any good?


@pytest.mark.slow
def test_adapting_beats_untouched_batch_norm_at_a_new_scanner(
    tmp_path, experiment, write_experiment
):
    """Three synthetic hospitals train, the fourth has another scanner and no labels.

    Raw features, no standardisation: only the running statistics can take the new scanner out.
    """
    done = CliRunner().invoke(
        data_prep,
        ["synthetic", "--whole-scan", "--subjects", "40", "--out", str(tmp_path / "data")],
    )
    assert done.exit_code == 0, done.output
    gains = []
    for new in ("USM", "UM"):
        others = tuple(site for site in ("NYU", "USM", "UM", "UCLA") if site != new)
        settings = experiment(
            sites=others,
            network={
                "args": {"in_features": 6105, "hidden": [32], "input_dropout": 0.0, "dropout": 0.0}
            },
            standardization="none",
            rounds=20,
            training={
                "optimizer": "sgd",
                "local_epochs": 2,
                "learning_rate": 0.1,
                "weight_decay": 0.001,
                "batch_size": 16,
            },
            n_folds=4,
            seed=0,
        )
        federation = federate(settings, read_sites(tmp_path / "data", settings), score_rounds=False)
        folder = write_run(
            tmp_path / new,
            write_experiment,
            settings,
            federation.shared,
            affine={
                site: {name: federation.local[site][name] for name in GAMMA_BETA} for site in others
            },
        )
        store = read_site_store(tmp_path / "data" / new)
        accuracy = {}
        for name, more in (("adapted", []), ("untouched", ["--start", "fedbn_default"])):
            out = tmp_path / new / name
            done = invoke("adapt", "--run", folder, "--data", store.path, "--out", out, *more)
            assert done.exit_code == 0, done.output
            tensors, _ = load_checkpoint(out / "model.pt", COMPLETE_MODEL)
            network, _ = make_network(settings)
            network.load_state_dict({key: tensors[key] for key in network.state_dict()})
            samples = settings.task.samples(
                store, np.arange(len(store.units)), {}, torch.device("cpu")
            )
            scores = settings.task.measure(settings.task.score(network, samples))
            accuracy[name] = scores["subject"]["accuracy"]
        gains.append(accuracy["adapted"] - accuracy["untouched"])
    assert min(gains) > 0.1, gains
    assert sum(gains) / len(gains) > 0.2, gains
