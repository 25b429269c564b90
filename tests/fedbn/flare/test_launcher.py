"""A job's process at a site, with real processes that do next to nothing."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time

import pytest
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle

from fedbn.flare.launcher import RestartingHandle, RestartingJobLauncher


class Site:
    """Starts `sleep`, or a shell command, as a job's process; it and its likes are ended."""

    def __init__(self, *commands, restarts=2):
        self.commands = list(commands)
        self.processes = []
        self.handle = RestartingHandle(self.start, restarts, 0.01, logging.getLogger("site"))

    def start(self):
        command = self.commands.pop(0) if self.commands else "sleep 60"
        process = subprocess.Popen(["sh", "-c", f"exec {command}"], start_new_session=True)
        self.processes.append(process)
        return ProcessHandle(process=process)

    def kill(self, number=signal.SIGKILL):
        os.kill(self.processes[-1].pid, number)

    def wait_for(self, n_processes):
        end = time.monotonic() + 10
        while len(self.processes) < n_processes:
            assert time.monotonic() < end
            time.sleep(0.005)


@pytest.fixture
def make_site():
    sites = []

    def make(*commands, **options):
        sites.append(Site(*commands, **options))
        return sites[-1]

    yield make
    for process in (process for site in sites for process in site.processes):
        process.kill()
        process.wait()


@pytest.fixture
def waiting(make_site):
    """Make a site, and a thread that waits for its job as FLARE does."""

    def make(*commands, **options):
        site = make_site(*commands, **options)
        thread = threading.Thread(target=site.handle.wait, daemon=True)
        thread.start()
        return site, thread

    return make


def test_a_killed_process_is_started_again_and_its_end_is_the_jobs(waiting, caplog):
    site, thread = waiting("sleep 60", "sleep 0.2")
    site.kill()
    thread.join(10)
    assert not thread.is_alive()
    assert len(site.processes) == 2
    assert site.handle.poll() == JobReturnCode.SUCCESS
    assert "the job's process was killed (signal 9); it is started again, 1 more" in caplog.text


def test_a_process_that_is_killed_too_often_ends_without_ending_the_job(waiting, caplog):
    site, thread = waiting(restarts=2)
    for count in (1, 2, 3):
        site.wait_for(count)
        site.kill(signal.SIGSEGV)
    thread.join(10)
    assert not thread.is_alive()
    assert len(site.processes) == 3
    assert site.handle.poll() == JobReturnCode.UNKNOWN, "FLARE ends a job for no unknown end"
    assert "killed (signal 11) once too often" in caplog.text


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("true", JobReturnCode.SUCCESS),
        ("false", JobReturnCode.EXECUTION_ERROR),
        ("sh -c 'exit 9'", JobReturnCode.ABORTED),
    ],
)
def test_an_exit_code_of_its_own_is_left_as_it_is(waiting, command, code):
    site, thread = waiting(command)
    thread.join(10)
    assert site.handle.poll() == code
    assert len(site.processes) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_operator_can_end_it(waiting, number):
    site, thread = waiting()
    assert site.handle.poll() == JobReturnCode.UNKNOWN, "it runs"
    site.kill(number)
    thread.join(10)
    assert site.handle.poll() == JobReturnCode.EXECUTION_ERROR
    assert len(site.processes) == 1


def test_flare_can_end_it_for_good(waiting):
    site, thread = waiting()
    site.handle.terminate()
    thread.join(10)
    assert not thread.is_alive()
    assert len(site.processes) == 1
    assert site.handle.poll() == JobReturnCode.EXECUTION_ERROR


@pytest.mark.parametrize("restarts", [-1, 1.5, True, "3"])
def test_the_number_of_restarts_is_checked_on_entry(restarts):
    with pytest.raises(ValueError, match="restarts must be a whole number of at least 0, got "):
        RestartingJobLauncher(restarts=restarts)
