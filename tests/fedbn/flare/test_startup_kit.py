from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from fedbn.flare.startup_kit import (
    Server,
    StartupKitError,
    batch_norm_policies,
    read_startup_kit,
)

PROJECT_FILE = Path(__file__).parents[3] / "sites" / "project.yml"


@pytest.mark.parametrize(
    ("target", "scheme", "server"),
    [
        ("fl.hospital.org:8002", "grpc", Server("fl.hospital.org", 8002, "grpc")),
        ("10.0.0.1:80", "HTTP", Server("10.0.0.1", 80, "http")),
        ("[::1]:8002", "grpc", Server("::1", 8002, "grpc")),
        ("fl.hospital.org", "https", Server("fl.hospital.org", 443, "https")),
    ],
)
def test_a_kit_says_where_the_server_is(make_kit, target, scheme, server):
    kit = read_startup_kit(make_kit(target=target, scheme=scheme))
    assert kit.servers == (server,)
    assert (kit.client, kit.security) == ("NYU", "mtls")


def spoilt(text):
    return lambda kit: (kit / "startup" / "fed_client.json").write_text(text)


def renamed(name):
    return lambda kit: (kit / "startup" / "fed_client.json").rename(kit / "startup" / name)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (shutil.rmtree, "has no startup/fed_client.json; give the folder that holds startup/ and"),
        (renamed("fed_server.json"), "it is the kit of the server, and this command looks at"),
        (renamed("fed_admin.json"), "it is the kit of a person, and this command looks at the"),
        (spoilt("{"), "cannot be read (JSONDecodeError); unpack the startup kit again"),
        (spoilt("[]"), "startup/fed_client.json cannot be read (TypeError)"),
        (spoilt('{"servers": [], "client": {"fqsn": "NYU"}}'), "names no server; ask the lead"),
        (
            spoilt('{"servers": [{"service": {"target": "x:y"}}], "client": {"fqsn": "NYU"}}'),
            "startup/fed_client.json cannot be read (ValueError)",
        ),
    ],
)
def test_what_is_no_kit_of_a_hospital_is_refused(make_kit, spoil, sentence):
    kit = make_kit()
    spoil(kit)
    with pytest.raises(StartupKitError) as caught:
        read_startup_kit(kit)
    assert sentence in str(caught.value)


def test_certificates_say_whom_they_name_and_how_long(make_kit):
    root, client = read_startup_kit(make_kit(start=-1, days=10)).certificates()
    assert (root.common_name, client.common_name) == ("project", "NYU")
    assert client.valid_to - client.valid_from == timedelta(days=10)
    assert client.valid_from.utcoffset() == timedelta(0)


def test_a_certificate_of_another_project_is_found(make_kit, other_project):
    kit = make_kit()
    other_project.write_certificate(kit / "other", "client", "NYU")
    shutil.copy(kit / "other" / "client.crt", kit / "startup")
    with pytest.raises(StartupKitError, match="files of two kits are mixed; unpack the startup"):
        read_startup_kit(kit).certificates()
    (kit / "startup" / "client.crt").write_text("nothing")
    with pytest.raises(StartupKitError, match=r"startup/client.crt cannot be read as a cert"):
        read_startup_kit(kit).certificates()


def test_edited_added_and_missing_startup_files_are_found(make_kit):
    kit = read_startup_kit(make_kit())
    assert kit.is_signed()
    assert kit.edited_files() == []
    config = kit.startup / "fed_client.json"
    config.write_text(config.read_text().replace("localhost", "elsewhere"))
    (kit.startup / "extra.json").write_text("{}")
    (kit.startup / "start.sh").unlink()
    (kit.startup / "rootCA.pem").touch()
    assert kit.edited_files() == [
        "extra.json was added",
        "fed_client.json was edited",
        "start.sh is missing",
    ]
    (kit.local / "anything.json").write_text("{}")
    assert len(kit.edited_files()) == 3, "local/ belongs to the site"


def test_a_kit_without_a_signature_says_so(make_kit):
    assert not read_startup_kit(make_kit(signed=False)).is_signed()


FILTER = {"path": "fedbn.flare.filters.BatchNormFilter", "args": {"policy": "silobn"}}
METRICS = {"path": "nvflare.app_common.filters.exclude_vars.ExcludeVars", "args": {}}


@pytest.mark.parametrize(
    ("scopes", "policies"),
    [
        ([], {}),
        ([{"name": "a", "task_result_filters": [FILTER]}], {"a": {"silobn"}}),
        ([{"name": "a", "task_result_filters": [METRICS, FILTER]}], {"a": {"silobn"}}),
        ([{"name": "a", "task_result_filters": [METRICS]}], {"a": set()}),
        ([{"name": "a", "task_data_filters": [FILTER]}], {"a": set()}),
        ([{"name": "a", "task_result_filters": [FILTER | {"direction": "in"}]}], {"a": set()}),
        (
            [{"name": "a", "task_result_filters": [FILTER]}, {"name": "b"}],
            {"a": {"silobn"}, "b": set()},
        ),
    ],
)
def test_each_scope_of_the_privacy_file_is_read_by_flare(make_kit, scopes, policies):
    kit = read_startup_kit(make_kit(privacy=False))
    assert batch_norm_policies(kit) == {}
    (kit.local / "privacy.json").write_text(json.dumps({"scopes": scopes}))
    assert batch_norm_policies(kit) == policies


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"scopes": [{"name": "a", "task_result_filters": [{"path": "no.such.Filter"}]}]}',
        '{"scopes": [{"name": "a"}, {"name": "a"}]}',
        '{"scopes": [{"name": "a"}], "default_scope": "b"}',
    ],
)
def test_a_privacy_file_with_which_a_client_would_not_start_is_refused(make_kit, text, capsys):
    kit = read_startup_kit(make_kit())
    (kit.local / "privacy.json").write_text(text)
    with pytest.raises(StartupKitError, match=r"local/privacy\.json cannot be used by FLARE: "):
        batch_norm_policies(kit)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_kit_that_flare_provisions_is_read_and_is_unedited(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path)}
    nvflare = Path(sys.executable).with_name("nvflare")
    command = [str(nvflare), "provision", "-p", str(PROJECT_FILE), "-w", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env=environment, timeout=120)
    kit = read_startup_kit(tmp_path / "fedbn" / "prod_00" / "UCLA")
    assert kit.client == "UCLA"
    (server,) = kit.servers
    assert (server.host, server.port) == ("localhost", 8002)
    assert kit.edited_files() == []
    assert [each.common_name for each in kit.certificates()] == ["fedbn", "UCLA"]
    with pytest.raises(StartupKitError, match="it is the kit of the server"):
        read_startup_kit(tmp_path / "fedbn" / "prod_00" / "fedbn-server")
