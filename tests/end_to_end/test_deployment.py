"""From the simulator to hospitals: real processes, over TLS, by each of FLARE's ways to submit."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import zipfile
from pathlib import Path

import pytest
from deployment import ADMIN, LEAD, MEMBER, SERVER, SITES, job_id_in
from nvflare.fuel.flare_api.api_spec import AuthorizationError
from nvflare.recipe import ProdEnv

from fedbn.federation.site import make_network
from fedbn.federation.site_state import LOCAL_ENTRIES, load_checkpoint
from fedbn.flare.recipe import FedBNRecipe

pytestmark = pytest.mark.slow

COMPLETED = "FINISHED:COMPLETED"


def report_in(folder):
    return json.loads((folder / "workspace" / "results.json").read_text())


@pytest.fixture(scope="module")
def small(simulation, deployment):
    """The main job on the four small stores: two rounds."""
    return simulation(stores=deployment.data, sites=list(SITES))


@pytest.fixture(scope="module")
def expected(small, in_process):
    """What the federation inside one process makes of it."""
    return in_process(small)


@pytest.fixture(scope="module")
def of_two(simulation, deployment):
    """Make the main job for two hospitals only: half the processes, where that is enough."""

    def make(**changes):
        job = simulation(stores=deployment.data, sites=["NYU", "UCLA"], **changes).job
        meta = json.loads((job / "meta.json").read_text())
        meta["deploy_map"] = {"app": ["server", "NYU", "UCLA"]}
        (job / "meta.json").write_text(json.dumps(meta))
        return job

    return make


@pytest.fixture(scope="module")
def foreign_kit(deployment):
    """UCLA's startup kit of another project with the same server; its client runs meanwhile."""
    kit = deployment.provision("others", folder="elsewhere") / "UCLA"
    process = deployment.start_one("foreign", kit, "--once")
    (kit / "joined before").write_text(str(deployment.starts("UCLA")))
    yield kit
    process.kill()
    process.wait()


def by_recipe(deployment, job, **changes):
    """Submit by FLARE's Recipe API, as the lead does to the real hospitals."""
    recipe = FedBNRecipe(job, name="by_recipe", **changes)
    kit = str(deployment.kit(LEAD))
    return recipe.run(ProdEnv(kit, username=LEAD, login_timeout=30.0)).get_job_id()


@pytest.fixture(scope="module")
def by_hand(deployment, small, of_two, foreign_kit):
    """Jobs by the console and by `nvflare job`, at the same time, as FLARE runs them."""
    found = {}
    with deployment.console() as console:
        by_console = job_id_in(console.type(f"submit_job {deployment.copy_of(small.job)}"))
        found["list_jobs"] = console.type("list_jobs")
        long = job_id_in(console.type(f"submit_job {deployment.copy_of(of_two(rounds=500))}"))
        found["fedavg"] = by_recipe(deployment, small.job, policy="none")
        by_command = job_id_in(
            deployment.command("submit", "-j", str(deployment.copy_of(small.job)))
        )

        deployment.wait_until(lambda: "round 1 of" in deployment.job_log(SERVER, long))
        console.type(f"abort_job {long}", "Are you sure (y/N): ")
        found["abort"] = console.type("y")
        found["aborted"] = long

        deployment.wait(by_console)
        found["downloaded"] = console.type(f"download_job {by_console}")
        found["console"] = deployment.kit(LEAD) / "transfer" / by_console
    found["wait"] = deployment.command("wait", by_command)
    deployment.command("download", by_command, "-o", str(deployment.folder / "by_command"))
    (found["command"],) = {
        p.parents[1] for p in deployment.folder.glob("by_command/**/results.json")
    }
    found["ids"] = {"console": by_console, "command": by_command}
    return found


def assert_equals_in_process(report, result):
    for name in ("experiment", "shared_weights_sha256", "across_sites", "synthetic"):
        assert report[name] == result.report[name], name
    for site, scores in result.report["sites"].items():
        assert {key: report["sites"][site][key] for key in scores} == scores
    assert [record["accepted"] for record in report["rounds"]] == [sorted(SITES)] * 2
    assert report["transport"] == "NVFlare"


@pytest.mark.parametrize("way", ["console", "command"])
def test_a_job_submitted_by_hand_gives_the_numbers_of_the_in_process_run(way, by_hand, expected):
    assert_equals_in_process(report_in(by_hand[way]), expected)


def test_each_way_tells_where_a_job_is(deployment, by_hand):
    assert by_hand["ids"]["console"] in by_hand["list_jobs"]
    assert "SUBMITTED" in by_hand["list_jobs"] or "RUNNING" in by_hand["list_jobs"]
    assert "COMPLETED" in by_hand["wait"]
    assert "content downloaded to" in by_hand["downloaded"]
    for job_id in by_hand["ids"].values():
        assert deployment.status(job_id) == COMPLETED


def test_each_site_keeps_its_own_batch_norm_in_its_own_kit(deployment, by_hand, expected):
    for site in SITES:
        folder = deployment.state(site, by_hand["ids"]["console"])
        kept, _ = load_checkpoint(folder / "local_entries.pt", LOCAL_ENTRIES)
        for name, tensor in expected.local[site].items():
            assert kept[name].equal(tensor), (site, name)
        assert (folder / "model.pt").exists()


def test_an_aborted_job_ends_everywhere_and_leaves_whole_files(deployment, by_hand):
    job_id = by_hand["aborted"]
    assert deployment.wait(job_id) == "FINISHED:ABORTED"
    deployment.wait_until(lambda: not deployment.pids(job=job_id), 30, "processes of it live on")
    for site in ("NYU", "UCLA"):
        file = deployment.state(site, job_id) / "local_entries.pt"
        _, facts = load_checkpoint(file, LOCAL_ENTRIES)
        assert 0 <= facts["round"] < 499


def test_a_hospital_keeps_its_batch_norm_from_a_job_that_asks_for_it(deployment, by_hand):
    """FedAvg sends batch norm; the filter in the hospitals' own privacy.json holds it back.

    The job is a recipe's: it finds the same sites, and their settings win over it as over any job.
    """
    job_id = by_hand["fedavg"]
    assert deployment.wait(job_id) == "FINISHED:EXECUTION_EXCEPTION"
    for site in ("NYU", "UCLA"):
        log = deployment.job_log(site, job_id)
        assert "4 of 8 entries kept at this site by its own policy 'fedbn'" in log
    assert "refused NYU: its entries do not fit the network: 4 missing" in deployment.job_log(
        SERVER, job_id
    )


def test_a_client_of_another_project_does_not_join(deployment, foreign_kit, by_hand):
    log = foreign_kit / "log.txt"
    deployment.wait_until(lambda: "CERTIFICATE_VERIFY_FAILED" in log.read_text(errors="replace"))
    assert "Successfully registered" not in log.read_text(errors="replace")
    assert deployment.starts("UCLA") == int((foreign_kit / "joined before").read_text())


def lets_in(deployment, *certificate):
    """Knock with the project's root certificate and perhaps one's own: does the server speak?"""
    root = deployment.kit("NYU") / "startup" / "rootCA.pem"
    context = ssl.create_default_context(cafile=str(root))
    if certificate:
        context.load_cert_chain(*certificate)
    try:
        with (
            socket.create_connection(("localhost", deployment.port), timeout=30) as connection,
            context.wrap_socket(connection, server_hostname="localhost") as channel,
        ):
            channel.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return channel.read(5) == b"HTTP/"
    except (ssl.SSLError, ConnectionError):
        return False


def test_the_server_wants_a_certificate_of_the_project(deployment, foreign_kit):
    own, foreign = (kit / "startup" for kit in (deployment.kit("NYU"), foreign_kit))
    assert lets_in(deployment, own / "client.crt", own / "client.key")
    assert not lets_in(deployment)
    assert not lets_in(deployment, foreign / "client.crt", foreign / "client.key")


def test_an_edited_kit_does_not_start(deployment):
    kit = deployment.folder / "edited" / "NYU"
    shutil.copytree(deployment.kit("NYU") / "startup", kit / "startup")
    shutil.copytree(deployment.kit("NYU") / "local", kit / "local")
    file = kit / "startup" / "fed_client.json"
    file.write_text(file.read_text().replace('"localhost:', '"example.org:'))
    output = deployment.call(str(kit / "startup" / "sub_start.sh"), "--once", check=False)
    assert "The following files are not secure content.\nfed_client.json" in output
    assert not (kit / "log.txt").exists() or "Connect" not in (kit / "log.txt").read_text()


def test_who_may_only_look_cannot_submit(deployment, small):
    with (
        deployment.session(MEMBER) as session,
        pytest.raises(AuthorizationError, match=f"'{MEMBER}' is not authorized for 'submit_job'"),
    ):
        session.submit_job(str(deployment.copy_of(small.job)))


def test_nobody_outside_can_look_into_a_hospital(deployment):
    """By FLARE's own policy the administrator can read a site's log from afar."""
    with deployment.session(ADMIN) as session:
        assert deployment.clients(session) == set(SITES)
        with pytest.raises(AuthorizationError, match="not authorized"):
            session.cat_target("NYU", file="log.txt")
        answers = json.dumps(session.get_client_env(["NYU"]))
        assert str(deployment.folder) not in answers


@pytest.fixture(scope="module")
def strict(deployment, by_hand):
    """UCLA forbids code that comes with a job; its own store is at first not where it says."""
    deployment.install("UCLA", strict=True, data=deployment.folder / "moved away")
    deployment.stop("UCLA")
    deployment.restart("UCLA")
    return deployment


def without_code(job):
    """Take the documented step: the copy to submit has no app/custom."""
    shutil.rmtree(job / "app" / "custom")
    return job


def test_a_hospital_that_forbids_custom_code_refuses_a_job_with_it(strict, small):
    job_id = strict.submit(small.job)
    assert strict.wait(job_id) == "FINISHED:FAILED_TO_RUN"
    with strict.session() as session:
        details = session.get_job_meta(job_id)["job_deploy_detail"]
    assert "UCLA: NVFLARE_ERROR: BYOC not permitted" in details
    assert "NYU: OK" in details


@pytest.fixture(scope="module")
def failed(strict, of_two):
    """A job that fails at UCLA, whose log names the folder."""
    job_id = strict.submit(without_code(of_two()))
    status = strict.wait(job_id)
    strict.install("UCLA", strict=True)
    return job_id, status


def test_what_is_wrong_at_one_site_reaches_the_lead_without_its_folder(strict, failed):
    job_id, status = failed
    assert status == "FINISHED:EXECUTION_EXCEPTION"
    server = strict.job_log(SERVER, job_id)
    assert "preflight failed: site 'UCLA'" in server
    assert "moved away" not in server
    assert "moved away" in strict.job_log("UCLA", job_id)


def test_the_python_api_and_a_job_without_code_give_the_same_numbers(
    strict, failed, small, expected
):
    with strict.session() as session:
        job_id = session.submit_job(str(without_code(strict.copy_of(small.job))))
        session.monitor_job(job_id, timeout=120)
        assert session.get_job_meta(job_id)["status"] == COMPLETED
        folder = Path(session.download_job_result(job_id, str(strict.folder / "by_api")))
    assert_equals_in_process(report_in(folder), expected)


def everything_at_the_server(deployment):
    """Yield (name, bytes) of every file that the server, the lead and the administrator have."""
    kits = [deployment.kit(name) for name in (SERVER, LEAD, ADMIN)]
    for root in (*kits, deployment.storage, deployment.folder / "by_command"):
        for path in root.rglob("*"):
            if not path.is_file():
                continue
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    for name in archive.namelist():
                        yield f"{path}/{name}", archive.read(name)
            else:
                yield str(path), path.read_bytes()


@pytest.fixture(scope="module", params=["files at the server", "messages"])
def seen(request, deployment, by_hand, failed):
    """What is outside after jobs that ended well and badly: (name, bytes) each."""
    if request.param == "messages":  # of every process, before TLS makes them unreadable
        return [(path.name, path.read_bytes()) for path in deployment.frames.iterdir()]
    return list(everything_at_the_server(deployment))


def places(needle, seen):
    return [name for name, content in seen if needle in content]


def test_no_subject_and_no_folder_of_a_hospital_is_seen_outside(deployment, seen):
    folders = [deployment.data, *(deployment.kit(site) for site in SITES)]
    needles = [*map(str, folders), "stores with blanks", "moved away"]
    for needle in [*needles, *(f"sub-{site}" for site in SITES)]:
        assert not places(needle.encode(), seen), needle
    assert places(b"site 'UCLA': ", seen), "a control: sentences of failures are"
    assert places(b"subject_accuracy", seen), "and so are scores"


def test_no_batch_norm_is_seen_outside_but_shared_weights_are(seen, small, expected):
    for site, entries in expected.local.items():
        for name, tensor in entries.items():
            if tensor.is_floating_point():
                assert len(tensor.unique()) == 8, "so that its bytes stand for nothing else"
                assert not places(tensor.numpy().tobytes(), seen), (site, name)
    _, partition = make_network(small.experiment)
    for name in partition.shared:
        assert places(expected.shared[name].numpy().tobytes(), seen), name


def test_a_site_s_own_log_does_name_what_may_not_leave(deployment, failed):
    """The control: FLARE's default is to send this file to the server."""
    job_id, _ = failed
    assert "moved away" in (deployment.kit("UCLA") / job_id / "error_log.txt").read_text()
