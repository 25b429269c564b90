"""The lines that a hospital's IT reads, from real sockets, certificates and stores."""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import shutil
import socket
import ssl
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.federation.installation import required_packages
from fedbn.flare import doctor
from fedbn.flare.doctor import FAILED, OK, WARNING, Finding, examine


def lines(subject, **arguments):
    """Return status and sentence of all findings on one subject."""
    found = examine(**arguments)
    return [(each.status, each.sentence) for each in found if each.subject == subject]


def only(subject, **arguments):
    (line,) = lines(subject, **arguments)
    return line


@pytest.fixture(scope="module")
def packages():
    return required_packages()


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path, packages):
    """Nothing of this machine: no device, no store, no proxy; what is installed is read once."""
    monkeypatch.setattr(doctor, "required_packages", lambda: packages)
    monkeypatch.setenv("FEDBN_DATA", str(tmp_path / "no-data"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "SECONDS", 2.0)
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def job(tmp_path, write_experiment, experiment):
    folder = tmp_path / "job"

    def make(arguments=None, **changes):
        write_experiment(folder / "app" / "config", experiment(**changes))
        learner = {"id": "learner", "path": "fedbn.flare.learner.FedBNLearner"}
        client = {"components": [learner | {"args": arguments or {}}]}
        (folder / "app" / "config" / "config_fed_client.json").write_text(json.dumps(client))
        return folder

    return make


@contextlib.contextmanager
def listening(serve=None):
    """Listen on a free loopback port; each connection is given to `serve` in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        done = threading.Event()

        def accept():
            while not done.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    connection.settimeout(3)
                    with connection, contextlib.suppress(OSError):
                        if serve is not None:
                            serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"localhost:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


@pytest.fixture
def tls(project, tmp_path):
    """Speak TLS as the project's server, and then what is given; ask for a certificate."""

    def make(words, maker=project, trusted=project, host="localhost", **dates):
        folder = tmp_path / f"server-{time.monotonic_ns()}"
        maker.write_certificate(folder, "server", "server", server_default_host=host, **dates)
        (folder / "trusted.pem").write_bytes(trusted.certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        context.load_verify_locations(folder / "trusted.pem")
        context.verify_mode = ssl.CERT_REQUIRED

        def serve(connection):
            with context.wrap_socket(connection, server_side=True) as secure:
                if b"HTTP" in words:
                    secure.recv(1000)
                secure.sendall(words)
                secure.recv(1)

        return serve

    return make


# ------------------------------------------------------------------------------------ the whole


def test_a_site_that_is_ready(make_kit, tls, data_root, job, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))  # noqa: PTH120
    with listening(tls(b"\0\0\x18\4")) as target:
        kit = make_kit(target=target)
        text = f"site: NYU\ndata: {data_root / 'NYU'}\ndevice: cpu\n"
        (kit / "local" / "fedbn_site.yml").write_text(text)
        found = list(examine(kit, job=job()))
    assert [each for each in found if each.status != OK] == []
    assert [each.subject for each in found] == [
        "Python",
        "packages",
        "startup kit",
        "job",
        "site settings",
        "device",
        "data store",
        "data store",
        "startup files",
        "privacy",
        "certificates",
        "certificates",
        "clock",
        "state folder",
        "stale files",
        "server",
        "TLS",
        "TLS",
        "job and store",
    ]


def test_the_command_prints_a_line_for_each_and_fails_if_one_did(make_kit, data_root, monkeypatch):
    kit = make_kit(security="clear")
    settings = kit / "local" / "fedbn_site.yml"
    settings.write_text(f"data: {data_root / 'NYU'}")
    done = CliRunner().invoke(app, ["doctor", "--kit", str(kit)])
    assert done.exit_code == 1
    found = done.stdout.splitlines()
    failed = [line for line in found if line.startswith("FAILED")]
    assert len(failed) == 1
    assert failed[0].startswith("FAILED   server: nobody answers at localhost:1 (")
    assert f"1 of {len(found)} lines failed: do what they say" in done.stderr
    with listening() as target:
        shutil.rmtree(kit)
        kit = make_kit(target=target, security="clear")
        settings.write_text(f"data: {data_root / 'NYU'}")
        monkeypatch.chdir(kit)
        done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "client 'NYU', server" in done.stdout, "the folder itself is a kit"


def test_without_a_kit_the_rest_is_looked_at(tmp_path, data_root, job, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "fedbn_site.yml"
    settings.write_text(f"site: UM\ndata: {data_root / 'UM'}")
    arguments = ["doctor", "--site-config", str(settings), "--job", str(job())]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "ok       job and store: the job can train here: 12 subjects to train on, 4 held" in (
        done.stdout
    )
    assert "no startup kit was looked at: give --kit FOLDER" in done.stdout


def test_a_check_that_breaks_does_not_hide_the_others(make_kit, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: 1 / 0)
    found = list(examine(make_kit()))
    assert Finding(FAILED, "kit folder", "ZeroDivisionError: division by zero") in found
    assert found[-1].subject == "server"


# ------------------------------------------------------------------------------- this machine


def test_a_python_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.8.1")
    status, sentence = only("Python")
    assert status == FAILED
    assert "3.8.1, but fedbn takes >=3.10; make an environment" in sentence


def test_a_python_that_start_sh_would_not_find(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (first, _), (status, sentence) = lines("Python")
    assert (first, status) == (OK, WARNING)
    assert "start.sh runs 'python3', here nothing, which is not this one; activate" in sentence


def test_packages_that_do_not_fit_are_lines_of_their_own(monkeypatch):
    monkeypatch.setattr(doctor, "required_packages", required_packages)
    needed = ["torch>=99", "no-such-package>=1,<2", "numpy>=1"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needed)
    (torch_line, other_line) = lines("packages")
    assert torch_line[0] == other_line[0] == FAILED
    assert f"fedbn takes torch>=99, but {torch.__version__} is installed; pip" in torch_line[1]
    assert "no-such-package<2,>=1, but it is missing; pip install" in other_line[1]


@pytest.mark.parametrize(
    ("text", "status", "sentence"),
    [
        ("device: cuda", FAILED, "device 'cuda' is asked for, but this process sees no CUDA"),
        ("device: auto", OK, "cpu: this process sees no CUDA device (device: auto)"),
        ("device: cpu", OK, "cpu: asked for (device: cpu)"),
        ("site: NYU", FAILED, "device 'cuda:3' is asked for"),
    ],
)
def test_the_device_is_that_of_the_file_and_else_of_the_job(tmp_path, job, text, status, sentence):
    settings = tmp_path / "fedbn_site.yml"
    settings.write_text(text)
    found = only("device", settings_file=settings, job=job({"device": "cuda:3"}))
    assert found[0] == status
    assert sentence in found[1]


# ------------------------------------------------------------------------- settings, job, store


@pytest.mark.parametrize(
    ("text", "status", "sentence"),
    [
        (None, WARNING, "no local/fedbn_site.yml: this site does what the job says; write one"),
        ("", OK, "nothing is stated"),
        ("site: NYU\ndevice: cpu", OK, "device: cpu, site: NYU"),
        ("devise: cpu", FAILED, "local/fedbn_site.yml: devise: there is no such field; did you"),
        ("site: UM", FAILED, "it says 'UM', but this client is 'NYU' and stands for site 'NYU'"),
    ],
)
@pytest.mark.parametrize("with_job", [False, True])
def test_the_site_settings(make_kit, job, text, status, sentence, with_job):
    kit = make_kit()
    if text is not None:
        (kit / "local" / "fedbn_site.yml").write_text(text)
    found = only("site settings", kit=kit, **({"job": job()} if with_job else {}))
    assert found[0] == status
    assert sentence in found[1]


def test_settings_that_cannot_be_read_lead_to_no_other_store_or_device(make_kit):
    kit = make_kit()
    (kit / "local" / "fedbn_site.yml").write_text("devise: cpu")
    for subject in ("device", "data store"):
        expected = (WARNING, "not looked at: correct the site settings first")
        assert only(subject, kit=kit) == expected


def test_a_settings_file_that_is_named_must_be_there(tmp_path):
    status, sentence = only("site settings", settings_file=tmp_path / "fedbn_site.yml")
    assert status == FAILED
    assert f"there is no file {tmp_path / 'fedbn_site.yml'}; give the site's" in sentence


def test_a_numbered_client_may_be_any_site_until_the_job_says_which(make_kit, job):
    kit = make_kit(client="site-2")
    (kit / "local" / "fedbn_site.yml").write_text("site: NYU")
    assert only("site settings", kit=kit)[0] == OK
    status, sentence = only("site settings", kit=kit, job=job())
    assert status == FAILED
    assert "this client is 'site-2' and stands for site 'UM'" in sentence


@pytest.mark.parametrize(
    ("client", "changes", "sentence"),
    [
        ("NYU", {"fedbn_version": ">=9"}, "the job needs fedbn >=9, but fedbn "),
        ("XYZ", {}, "client 'XYZ' is not a site of this job: name it one of NYU, UM"),
    ],
)
def test_a_job_that_is_not_for_this_site_or_version(make_kit, job, client, changes, sentence):
    status, text = only("job", kit=make_kit(client=client), job=job(**changes))
    assert status == FAILED
    assert sentence in text


def test_a_job_says_which_versions_it_takes(job, tmp_path):
    assert "small takes any fedbn; sites NYU, UM" in only("job", job=job())[1]
    version = doctor.installed_version()
    assert f"takes fedbn >=0.1, here {version}" in only("job", job=job(fedbn_version=">=0.1"))[1]
    assert only("job", job=tmp_path / "nothing")[0] == FAILED


def test_a_store_is_looked_for_where_a_run_would(make_kit, job, data_root, tmp_path, monkeypatch):
    kit = make_kit()
    monkeypatch.setenv("FEDBN_DATA", str(data_root))
    place = data_root / "NYU"
    assert f"{place} (from FEDBN_DATA): 20 subjects, 60" in lines("data store", kit=kit)[0][1]
    other = tmp_path / "other"
    shutil.copytree(data_root, other)
    with_root = job({"data_root": str(other)})
    assert f"{other / 'NYU'} (from the job): " in lines("data store", kit=kit, job=with_root)[0][1]
    settings = kit / "local" / "fedbn_site.yml"
    settings.write_text(f"data: {place}")
    found = lines("data store", kit=kit, job=with_root)
    assert f"{place} (from local/fedbn_site.yml): " in found[0][1]
    assert found[1] == (OK, "every value is finite and every checksum is right")


def test_a_store_that_cannot_be_used(make_kit, data_root):
    kit = make_kit()
    settings = kit / "local" / "fedbn_site.yml"
    settings.write_text(f"data: {data_root / 'UM'}")
    status, sentence = only("data store", kit=kit)
    assert status == FAILED
    assert "is that of site 'UM', not of 'NYU'; correct data in the site settings" in sentence
    settings.write_text(f"data: {data_root / 'NYU'}")
    with (data_root / "NYU" / "connectomes.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x41")
    quick, full = lines("data store", kit=kit)
    assert quick[0] == OK, "only reading every value finds it"
    assert full[0] == FAILED
    assert "connectomes.npy was changed after the store was written" in full[1]
    shutil.rmtree(data_root / "NYU")
    assert "no site store at" in only("data store", kit=kit)[1]


def test_without_any_name_of_a_site_no_store_is_guessed():
    status, sentence = only("data store")
    assert status == WARNING
    assert "neither a kit nor the site settings say which site this is" in sentence


def test_a_job_that_cannot_train_on_this_store(make_kit, job, data_root):
    kit = make_kit()
    (kit / "local" / "fedbn_site.yml").write_text(f"data: {data_root / 'NYU'}")
    narrow = job(network={"args": {"in_features": 65, "hidden": [8]}})
    status, sentence = only("job and store", kit=kit, job=narrow)
    assert status == FAILED
    assert "site 'NYU': network ConnectomeMLP cannot take the store's samples of 66" in sentence


# ------------------------------------------------------------------------------ the startup kit


def test_an_edited_kit(make_kit):
    kit = make_kit()
    assert only("startup files", kit=kit) == (OK, "unedited, by the kit's signature")
    (kit / "startup" / "start.sh").write_text("echo\n")
    status, sentence = only("startup files", kit=kit)
    assert status == FAILED
    assert sentence.startswith("not as the lead made them: start.sh was edited; unpack the")


def test_an_unsigned_kit_and_an_open_key(make_kit):
    kit = make_kit(signed=False)
    (kit / "startup" / "client.key").chmod(0o644)
    unsigned, readable = lines("startup files", kit=kit)
    assert unsigned[0] == readable[0] == WARNING
    assert "they carry no signature, so that an edit is not noticed" in unsigned[1]
    assert "other users of this machine can read startup/client.key; chmod 600" in readable[1]


def privacy(kit, *scopes):
    (kit / "local" / "privacy.json").write_text(json.dumps({"scopes": scopes}))


def filtered(policy="fedbn", name="a"):
    path = "fedbn.flare.filters.BatchNormFilter"
    return {"name": name, "task_result_filters": [{"path": path, "args": {"policy": policy}}]}


@pytest.mark.parametrize(
    ("scopes", "status", "sentence"),
    [
        ((filtered(),), OK, "local/privacy.json keeps batch norm here (policy fedbn)"),
        ((), FAILED, "no local/privacy.json with a scope: a job alone decides what leaves; put"),
        ((filtered(), {"name": "b"}), FAILED, "has no BatchNormFilter in scope 'b', which any"),
        ((filtered("all"),), FAILED, "local/privacy.json cannot be used by FLARE: "),
    ],
)
def test_the_privacy_policy(make_kit, scopes, status, sentence):
    kit = make_kit()
    privacy(kit, *scopes)
    found = only("privacy", kit=kit)
    assert found[0] == status
    assert sentence in found[1]


@pytest.mark.parametrize(
    ("kept", "policy", "warns"),
    [
        ("fedbn", "fedbn", False),
        ("fedbn", "silobn", True),
        ("silobn", "silobn", False),
        ("silobn", "fedbn", False),
        ("silobn", "none", True),
    ],
)
def test_a_job_that_shares_what_the_site_keeps(make_kit, job, kept, policy, warns):
    kit = make_kit()
    privacy(kit, filtered(kept))
    found = lines("privacy", kit=kit, job=job(policy=policy))
    assert [status for status, _ in found] == [OK, WARNING][: 1 + warns]
    if warns:
        assert f"the job's policy {policy!r} shares what this site's filter" in found[1][1]


@pytest.mark.parametrize(
    ("dates", "status", "sentence"),
    [
        ({"start": -100, "days": 99}, FAILED, "(NYU) expired on "),
        ({"start": 1, "days": 9}, FAILED, "UTC, and the clock of this machine says "),
        ({"start": -1, "days": 20}, WARNING, "ask the lead for a new startup kit"),
        ({"start": -1, "days": 40}, OK, "startup/client.crt (NYU) is valid until "),
    ],
)
def test_the_dates_of_the_client_s_certificate(make_kit, dates, status, sentence):
    root, client = lines("certificates", kit=make_kit(**dates))
    assert root[0] == OK
    assert client[0] == status
    assert sentence in client[1]


def test_certificates_of_two_kits(make_kit, project, other_project):
    kit = make_kit()
    other_project.write_certificate(kit / "other", "client", "NYU")
    shutil.copy(kit / "other" / "client.crt", kit / "startup")
    assert only("certificates", kit=kit)[0] == FAILED
    project.write_certificate(kit / "startup", "client", "UM")
    status, sentence = lines("certificates", kit=kit)[-1]
    assert status == FAILED
    assert "startup/client.crt is that of 'UM', and the kit that of 'NYU'" in sentence


def test_a_clock_that_was_set_back(make_kit):
    kit = make_kit()
    assert only("clock", kit=kit)[0] == OK
    later = time.time() + 3600
    os.utime(kit / "startup" / "fed_client.json", (later, later))
    status, sentence = only("clock", kit=kit)
    assert status == WARNING
    assert "after the" in sentence
    assert "set NTP" in sentence


@pytest.mark.parametrize(("free", "status"), [(10 * 2**20, FAILED), (2**30, WARNING), (2**40, OK)])
def test_disk_space(make_kit, monkeypatch, free, status):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    found = only("state folder", kit=make_kit())
    assert found[0] == status
    assert f"{free / 2**30:.1f} GiB are free" in found[1]


def test_a_state_folder_that_cannot_be_written(make_kit, monkeypatch):
    kit = make_kit()
    (kit / "fedbn_sites").mkdir()

    def refuse(dir):
        assert dir == kit / "fedbn_sites"
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    status, sentence = only("state folder", kit=kit)
    assert status == FAILED
    assert "cannot be written (Permission denied); this site keeps its batch norm there" in sentence


def test_what_an_earlier_stop_left(make_kit):
    kit = make_kit()
    (kit / "shutdown.fl").touch()
    status, sentence = only("stale files", kit=kit)
    assert status == FAILED
    assert f"rm {kit / 'shutdown.fl'}" in sentence
    (kit / "shutdown.fl").unlink()
    (kit / "daemon_pid.fl").write_text(f"{os.getpid()}\n")
    assert only("stale files", kit=kit)[0] == OK
    assert only("client", kit=kit) == (WARNING, f"a client runs already (process {os.getpid()})")


def test_a_folder_that_is_no_kit(tmp_path):
    found = list(examine(tmp_path))
    failed = [each.subject for each in found if each.status == FAILED]
    assert failed == ["startup kit"]  # and no data store is guessed
    assert "TLS" not in {each.subject for each in found}


# ----------------------------------------------------------------------------------- the server


def test_a_server_that_listens_and_one_that_does_not(make_kit):
    with listening() as target:
        kit = make_kit(target=target, security="clear")
        taken, plain = lines("server", kit=kit)
    assert taken == (OK, f"{target} (127.0.0.1) takes connections")
    assert plain[0] == WARNING
    assert "not encrypted" in plain[1]
    status, sentence = only("server", kit=kit)
    assert status == FAILED
    assert sentence.startswith(f"nobody answers at {target} (127.0.0.1): Connection refused; ask")
    assert f"open TCP port {target.partition(':')[2]}" in sentence


def test_a_host_name_that_nobody_knows(make_kit):
    status, sentence = only("server", kit=make_kit(target="no-such-host.invalid:8002"))
    assert status == FAILED
    assert "the name 'no-such-host.invalid' is not known here (" in sentence
    assert "/etc/hosts" in sentence


def test_a_proxy_that_would_be_asked(make_kit, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    kit = make_kit()
    status, sentence = lines("server", kit=kit)[0]
    assert status == WARNING
    assert "the environment has https_proxy" in sentence
    assert "no_proxy=localhost" in sentence
    monkeypatch.setenv("no_proxy", "localhost")
    assert len(lines("server", kit=kit)) == 1


def test_a_server_of_the_project(make_kit, tls):
    with listening(tls(b"\0\0\x18\4")) as target:
        shaken, taken = lines("TLS", kit=make_kit(target=target))
    assert shaken[0] == taken[0] == OK
    assert "the server's certificate fits 'localhost', this project and this clock" in shaken[1]
    assert taken[1] == "the server takes this site's certificate"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"maker": "other"}, "the server's certificate is refused: unable to get local issuer"),
        ({"host": "elsewhere.org"}, "is refused: Hostname mismatch"),
        ({"start": -9, "days": 8}, "is refused: certificate has expired; ask the lead"),
        ({"start": 1}, "certificate is not yet valid; ask the lead for a startup kit of this"),
        ({"trusted": "other"}, "the server ends the connection when it sees this site's cert"),
    ],
)
def test_a_server_that_does_not_fit(make_kit, tls, other_project, arguments, sentence):
    arguments = {k: other_project if v == "other" else v for k, v in arguments.items()}
    with listening(tls(b"x", **arguments)) as target:
        found = lines("TLS", kit=make_kit(target=target))
    assert found[-1][0] == FAILED
    assert sentence in found[-1][1]


def test_a_server_whose_certificate_expires_soon(make_kit, tls):
    with listening(tls(b"x", start=-1, days=20)) as target:
        assert [status for status, _ in lines("TLS", kit=make_kit(target=target))] == [
            OK,
            WARNING,
            OK,
        ]


def test_something_else_at_the_port(make_kit):
    with listening(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n")) as target:
        status, sentence = only("TLS", kit=make_kit(target=target))
    assert status == FAILED
    assert "something else may answer at this port, or a firewall opens TLS" in sentence


@pytest.mark.parametrize(
    ("hours", "status", "words"),
    [(0, OK, "s after the server's"), (-2, WARNING, "s after the"), (2, WARNING, "s before the")],
)
def test_the_clock_is_compared_where_the_server_says_the_time(make_kit, tls, hours, status, words):
    date = email.utils.formatdate(time.time() + 3600 * hours, usegmt=True)
    words_of_server = f"HTTP/1.1 426 Upgrade Required\r\nDate: {date}\r\n\r\n".encode()
    with listening(tls(words_of_server)) as target:
        found = lines("clock", kit=make_kit(target=target, scheme="http"))
    assert found[-1][0] == status
    assert words in found[-1][1]
    assert timedelta(hours=abs(hours)) <= timedelta(seconds=int(found[-1][1].split()[4]) + 5)
