"""A bundle holds what predicts, is what MONAI takes for one, and is written whole or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from data_prep.files import FileError
from data_prep.site_store import read_site_store
from fedbn.federation.site_state import SiteStateError
from fedbn.models import bundle as bundle_module
from fedbn.models.bundle import BundleError, export_bundle, read_bundle
from fedbn.models.site_model import NOTICE, SiteFacts, find_kept_model


def exported(run, site, out):
    return run.export(site, out)


@pytest.fixture
def damaged(bundles, tmp_path):
    shutil.copytree(bundles["NYU"], tmp_path / "bundle")
    return tmp_path / "bundle"


def connectomes(run, site="NYU"):
    return torch.from_numpy(read_site_store(run.data / site).connectomes[:9].copy())


def test_the_weights_are_a_plain_state_dict(bundles, finished_run):
    weights = torch.load(bundles["NYU"] / "models" / "model.pt", weights_only=True)
    kept = find_kept_model(finished_run.workspace, "NYU").model.state_dict()
    assert list(weights) == list(kept)
    assert all(torch.equal(weights[name], kept[name]) for name in kept)


def test_every_file_computes_what_the_kept_model_does(bundles, finished_run):
    x = connectomes(finished_run)
    kept = find_kept_model(finished_run.workspace, "NYU").model
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = kept.network((x - kept.mean) / kept.std)
        compiled = torch.jit.load(str(bundles["NYU"] / "models" / "model.ts"))
        assert torch.equal(read_bundle(bundles["NYU"]).model(x), expected)
        assert (compiled(x) - expected).abs().max() < 1e-5


def test_with_another_sites_batch_norm_the_outputs_differ(bundles, finished_run):
    """The same shared weights: only what each site keeps tells the two models apart."""
    own, other = (read_bundle(bundles[site]).model for site in ("NYU", "UM"))
    shared = ("network.classifier.weight", "network.hidden.0.linear.weight")
    assert all(torch.equal(own.state_dict()[k], other.state_dict()[k]) for k in shared)
    x = connectomes(finished_run)
    with torch.no_grad():
        assert (own(x) - other(x)).abs().max() > 0.01
        swapped = {k: v for k, v in other.state_dict().items() if ".norm." in k}
        before = own(x)
        own.load_state_dict({**own.state_dict(), **swapped})
        assert (own(x) - before).abs().max() > 0.01


def test_facts_of_the_site_and_the_notice_are_kept(bundles, finished_run):
    content = json.loads((bundles["UM"] / "configs" / "metadata.json").read_text())
    facts = content["fedbn"]
    assert facts["connectome"]["rois"][0] == ["10", "region 0"]
    assert facts["scores"] == finished_run.results["sites"]["UM"]["federated"]
    assert content["eval_metrics"]["n"] == 5
    assert facts["threshold"] == 0.5
    assert facts["training"]["n_train_subjects"] == 15
    assert NOTICE in content["intended_use"]
    readme = (bundles["UM"] / "docs" / "README.md").read_text()
    assert NOTICE in readme
    assert "It stays at the site" in readme


def test_no_subject_and_no_path_is_in_a_bundle(bundles, finished_run):
    for path in bundles["NYU"].rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"sub-" not in content, path.name
            assert str(finished_run.workspace).encode() not in content, path.name
            assert str(finished_run.data).encode() not in content, path.name


def test_a_bundle_says_what_it_does_not_know(finished_run, tmp_path):
    kept = find_kept_model(finished_run.workspace, "NYU")
    folder, _ = export_bundle(kept, SiteFacts(), tmp_path / "bare")
    readme = (folder / "docs" / "README.md").read_text()
    assert "Its scores are not known" in readme
    assert "it cannot say whether what it is asked about is unlike" in readme
    assert read_bundle(folder).facts["distances"] is None


def test_monais_own_commands_take_the_bundle(bundles, finished_run, tmp_path, monkeypatch):
    """What ``python -m monai.bundle`` calls, without a network: the schema is the bundle's file."""
    import monai.bundle

    shutil.copytree(bundles["NYU"], tmp_path / "bundle")
    scan = finished_run.write_series(tmp_path / "scan.1D", "sub-NY00")
    monkeypatch.chdir(tmp_path / "bundle")
    meta, config = "configs/metadata.json", "configs/inference.json"
    monai.bundle.verify_metadata(meta_file=meta, filepath="configs/metadata_schema.json")
    monai.bundle.verify_net_in_out("network_def", meta_file=meta, config_file=config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monai.bundle.ckpt_export(
            "network_def",
            filepath="models/new.ts",
            ckpt_file="models/model.pt",
            meta_file=meta,
            config_file=config,
        )
    assert (tmp_path / "bundle" / "models" / "new.ts").is_file()
    broken = {**json.loads(Path(meta).read_text()), "monai_version": 1}
    Path("broken.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match="Failed validating"):
        monai.bundle.verify_metadata(
            meta_file="broken.json", filepath="configs/metadata_schema.json"
        )
    monai.bundle.run(meta_file=meta, config_file=config, inputs=[str(scan)])
    table = Path("predictions", "predictions.tsv").read_text().splitlines()
    assert table[0].startswith("scan\t")
    assert table[1].endswith(NOTICE)


# ------------------------------------------------------------------------------------- refusals


def test_nothing_is_written_if_the_outputs_differ(finished_run, tmp_path, monkeypatch):
    kept = find_kept_model(finished_run.workspace, "NYU")
    write = bundle_module._write_files

    def write_other_weights(folder, kept, facts):
        compiled = write(folder, kept, facts)
        weights = torch.load(folder / "models" / "model.pt", weights_only=True)
        weights["network.classifier.bias"][0] += 1e-3
        torch.save(weights, folder / "models" / "model.pt")
        return compiled

    monkeypatch.setattr(bundle_module, "_write_files", write_other_weights)
    with pytest.raises(BundleError, match=r"the logits of models/model\.pt differ .* by 1\.0e-03"):
        export_bundle(kept, SiteFacts(), tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_an_older_bundle_is_replaced_and_anything_else_is_not(finished_run, damaged, tmp_path):
    (damaged / "models" / "model.pt").write_bytes(b"")
    exported(finished_run, "NYU", damaged)
    read_bundle(damaged)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(BundleError, match="holds something that is not a bundle of fedbn"):
        exported(finished_run, "NYU", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    with pytest.raises(FileError, match=r"bundle is not written .*thesis\.txt: File exists"):
        exported(finished_run, "NYU", tmp_path / "mine" / "thesis.txt" / "bundle")
    (damaged / "predictions").mkdir()
    (damaged / "predictions" / "predictions.tsv").write_text("")
    (damaged / "models" / "notes.txt").write_text("")
    with pytest.raises(
        BundleError, match=r"bundle also holds models/notes\.txt, predictions, which replacing it"
    ):
        exported(finished_run, "NYU", damaged)
    assert (damaged / "predictions" / "predictions.tsv").exists()


def test_an_older_bundle_stays_if_the_new_one_cannot_be_written(finished_run, damaged, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle_module, "_check_files", fail)
    with pytest.raises(FileError, match=r"stays as it was \(No space left on device\); free some"):
        exported(finished_run, "UM", damaged)
    assert read_bundle(damaged).site == "NYU"


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from fedbn.__main__ import app
app()
"""


@pytest.mark.parametrize("full_at", ["models/model.pt", "models/model.ts", "configs/metadata.json"])
def test_a_full_disk_is_one_sentence_and_nothing_is_left(finished_run, bundles, tmp_path, full_at):
    """PyTorch ends the process where its own file cannot be written."""
    size = (bundles["NYU"] / full_at).stat().st_size
    words = ["export", "--run", finished_run.workspace, "--site", "NYU", "--out", tmp_path / "b"]
    words += ["--data", finished_run.data]
    command = [sys.executable, "-c", FULL_DISK, str(size * 9 // 10), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"fedbn: {tmp_path / 'b'} is not written and stays as it was (File too large); free some "
        "space, or name another place"
    )
    assert list(tmp_path.iterdir()) == []


def test_links_are_followed_and_stay_links(finished_run, tmp_path):
    """A link to nothing, to an empty folder and to an older bundle."""
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    for prepare in (lambda: None, lambda: shutil.rmtree(target) or target.mkdir(), lambda: None):
        prepare()
        exported(finished_run, "NYU", link)
        assert link.is_symlink()
        assert read_bundle(target).site == "NYU"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]
    (target / "thesis.txt").write_text("")
    with pytest.raises(BundleError, match=r"link also holds thesis\.txt"):
        exported(finished_run, "NYU", link)


def test_a_bundle_is_for_its_user_alone(bundles):
    """It holds the site's own batch norm."""
    assert {path.stat().st_mode & 0o077 for path in bundles["NYU"].rglob("*")} == {0}


@pytest.mark.parametrize("value", ["$__import__('os')", "@bundle_root", "%file.json#x"])
def test_arguments_that_monai_would_run_are_refused(finished_run, tmp_path, value):
    kept = find_kept_model(finished_run.workspace, "NYU")
    kept.network["args"] = {"hidden": [8], "act": [value]}
    with pytest.raises(BundleError, match="configuration files would run as code"):
        export_bundle(kept, SiteFacts(), tmp_path / "bundle")


def without(part, facts):
    del facts[part]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: f["connectome"].update(window="x"), r"connectome\.window: it must be a "),
        (lambda f: f["connectome"].update(window=-3), r"connectome\.window: it must be gre"),
        (lambda f: f["connectome"].update(stride=0), r"connectome\.stride: it must be grea"),
        (lambda f: f["connectome"].update(rois=[1]), r"connectome\.rois\.0: it must be a "),
        (lambda f: f["connectome"].update(rois=[["1", "a"]]), "28 edges for 1 regions"),
        (lambda f: f.update(distances={"features": [1.0]}), r"distances\.features: it must"),
        (lambda f: f.update(scan=[1]), r"fedbn\.scan: it must be an object"),
        (lambda f: f.update(threshold="0.5"), r"fedbn\.threshold: it must be a valid number"),
        (lambda f: without("connectome", f), r"fedbn\.connectome: it is missing"),
        (lambda f: without("weights_sha256", f), r"fedbn\.weights_sha256: it is missing"),
        (lambda f: f.update(network={"name": "os:system", "args": {}}), "'os:system' is not a ne"),
    ],
)
def test_facts_of_another_form_are_refused(damaged, change, sentence):
    path = damaged / "configs" / "metadata.json"
    content = json.loads(path.read_text())
    change(content["fedbn"])
    path.write_text(json.dumps(content))
    with pytest.raises(BundleError, match=f"is damaged or not a bundle .*{sentence}.*export it a"):
        read_bundle(damaged)


def test_the_shared_weights_are_refused_in_place_of_a_bundle(finished_run):
    shared = next(finished_run.workspace.rglob("FL_global_model.pt"))
    for path in (shared, shared.parent):
        with pytest.raises(
            SiteStateError, match="without any site's batch norm and cannot predict"
        ):
            read_bundle(path)


def test_what_is_not_a_bundle_is_refused(finished_run, damaged, tmp_path):
    with pytest.raises(BundleError, match=r"the file that a site keeps, not a bundle; make one"):
        read_bundle(finished_run.folder("NYU") / "model.pt")
    with pytest.raises(BundleError, match="no bundle at"):
        read_bundle(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match=r"is not a bundle, it has no configs/metadata\.json"):
        read_bundle(tmp_path / "empty")
    weights = torch.load(damaged / "models" / "model.pt", weights_only=True)
    weights["network.classifier.bias"][0] += 1
    torch.save(weights, damaged / "models" / "model.pt")
    with pytest.raises(BundleError, match="was changed after the export: its checksum"):
        read_bundle(damaged)
    (damaged / "models" / "model.pt").write_bytes(b"nonsense")
    with pytest.raises(BundleError, match="is damaged or not a bundle"):
        read_bundle(damaged)
