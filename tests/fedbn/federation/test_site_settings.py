from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from fedbn.federation.site_settings import (
    SITE_SETTINGS_FILE,
    SiteSettings,
    SiteSettingsError,
    read_site_settings,
)


def written(folder, text):
    path = folder / "local" / SITE_SETTINGS_FILE
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(folder, text):
    with pytest.raises(SiteSettingsError) as caught:
        read_site_settings(written(folder, text))
    sentence = str(caught.value)
    assert sentence.startswith("local/fedbn_site.yml: ")
    assert "\n" not in sentence
    assert str(folder) not in sentence
    return sentence


def test_without_a_file_a_site_states_nothing(tmp_path):
    settings = read_site_settings(tmp_path / "local" / SITE_SETTINGS_FILE)
    assert settings == SiteSettings()
    assert settings.share_affine is False
    assert settings.stated("device", "cuda:3") == "cuda:3"


@pytest.mark.parametrize("text", ["", "# device: cpu\n", "---\n", "{}"])
def test_a_file_without_fields_is_no_file(tmp_path, text):
    assert read_site_settings(written(tmp_path, text)) == SiteSettings()


def test_every_field_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    text = """
        # ours
        site: NYU
        data: ~/stores/NYU   # one store
        device: cuda:1
        cpu_threads: 4
        cache: none
        workers: 2
        amp: off
        share_affine: true
        allow_networks: [nets.small.Small, "nets:Large"]
        allow_tasks: [tasks.Own]
    """
    settings = read_site_settings(written(tmp_path, text))
    assert settings.model_dump() == {
        "site": "NYU",
        "data": "~/stores/NYU",
        "device": "cuda:1",
        "cpu_threads": 4,
        "cache": "none",
        "workers": 2,
        "amp": "off",
        "share_affine": True,
        "allow_networks": ["nets.small.Small", "nets:Large"],
        "allow_tasks": ["tasks.Own"],
    }
    assert settings.store == Path("/home/ann/stores/NYU")


def test_what_the_file_states_wins_even_where_it_is_the_default(tmp_path):
    settings = read_site_settings(written(tmp_path, "device: auto\ncpu_threads: null\n"))
    assert settings.stated("device", "cuda:3") == "auto"
    assert settings.stated("cpu_threads", 1) is None
    assert settings.stated("share_affine", True) is True, "the file is silent"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("devise: cpu", "devise: there is no such field; did you mean 'device'?"),
        ("Data: /stores/NYU", "Data: there is no such field; did you mean 'data'?"),
        ("q: 1", "q: there is no such field; the fields are site, data, device, cpu_threads, cac"),
        ("1: 2", "1: there is no such field"),
        ("data: stores/NYU", "data: a relative folder means another place in each of FLARE's"),
        ("data: ~nobody-of-that-name/x", "data: its '~' stands for no home folder here; give the"),
        ("data: 3", "data: it cannot be used; give the folder of this site's own store, absolute"),
        ("data:", "data: it has no value; give the folder of this site's own store"),
        ("data: ~", "data: it has no value"),
        ("device: gpu", "device: it cannot be used; give auto, cpu, cuda or cuda:N"),
        ("device: CUDA", "give auto, cpu, cuda or cuda:N (such as cuda:1); did you mean 'cuda'?"),
        ("device: cuda:-1", "device: it cannot be used"),
        ("device: cuda:01", "device: it cannot be used"),
        ("device: 0", "device: it cannot be used"),
        ("cpu_threads: 0", "cpu_threads: it cannot be used; give a whole number of at least 1, or"),
        ("cpu_threads: 1.5", "cpu_threads: it cannot be used"),
        ("cpu_threads: true", "cpu_threads: it cannot be used"),
        ("cpu_threads: '4'", "cpu_threads: it cannot be used"),
        ("share_affine: 'false'", "share_affine: it cannot be used; give true or false"),
        ("share_affine: 1", "share_affine: it cannot be used"),
        ("allow_networks: nets.Small", "allow_networks: it cannot be used; give a list of classes"),
        ("allow_networks: [Small]", "allow_networks.0: it cannot be used; give a list of classes"),
        ("allow_networks: [nets.*]", "allow_networks.0: it cannot be used"),
        ("allow_tasks: [Own]", "allow_tasks.0: it cannot be used; give a list of classes"),
        ("site: NO", "site: it cannot be used; give the site's name in letters, digits, '_' and"),
        ("site: a/b", "site: it cannot be used"),
        ("device: cpu\ndevice: cuda", "device: it stands there twice (again in line 2); keep one"),
        ("data: &here [*here]", "data: it cannot be used"),
        ("device: [cpu", "it is not valid YAML (line 1); write one 'field: value' a line"),
        ("site: NYU\n\tdevice: cpu", "it is not valid YAML (line 2)"),
        ("data: !!python/object/apply:os.system ['true']", "it is not valid YAML (line 1)"),
        ("a: 1\n---\nb: 2", "it is not valid YAML"),
        ("device", "it holds no fields; write one 'field: value' a line"),
        ("- device: cpu", "it holds no fields"),
        (b"site: N\xff\xfeYU", "it cannot be read (it is not text in UTF-8); make it readable"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_the_field_and_what_to_do(tmp_path, text, sentence):
    assert sentence in refused(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    ["data: my secret folder", "data: [/secret/a b]", "device: /secret/a b", "site: /sec ret"],
)
def test_a_sentence_quotes_no_value(tmp_path, text):
    assert "sec" not in refused(tmp_path, text)


def test_a_folder_in_the_file_s_place_is_named(tmp_path):
    path = tmp_path / "local" / SITE_SETTINGS_FILE
    path.mkdir(parents=True)
    with pytest.raises(SiteSettingsError, match=r"local/fedbn_site.yml: it cannot be read \("):
        read_site_settings(path)


@pytest.mark.parametrize("site", [None, "NYU", "site-1"])
def test_a_file_for_this_client_or_its_site_is_taken(site):
    SiteSettings(site=site).check_site("site-1", "NYU")


def test_a_file_for_another_site_is_refused():
    with pytest.raises(SiteSettingsError) as caught:
        SiteSettings(site="UM").check_site("site-1", "NYU")
    assert str(caught.value) == (
        "local/fedbn_site.yml: site: it says 'UM', but this client is 'site-1' and stands for "
        "site 'NYU'; correct the file, or install the startup kit of the right site"
    )


def test_settings_cannot_be_changed_in_place():
    with pytest.raises(ValidationError, match="frozen"):
        SiteSettings().share_affine = True


@pytest.mark.parametrize("kind", ["networks", "tasks"])
def test_classes_are_the_file_s_and_the_environment_s(monkeypatch, kind):
    settings = SiteSettings(**{f"allow_{kind}": ["nets.Small"]})
    monkeypatch.delenv(f"FEDBN_ALLOW_{kind.upper()}", raising=False)
    assert getattr(settings, kind) == ["nets.Small"]
    monkeypatch.setenv(f"FEDBN_ALLOW_{kind.upper()}", " nets.Large,, a.b.C ")
    assert getattr(settings, kind) == ["nets.Small", "nets.Large", "a.b.C"]
