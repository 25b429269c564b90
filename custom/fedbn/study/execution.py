"""A comparison's runs in several processes: one thread each, stopped at once, whole files."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from data_prep.files import write_text
from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import Federation
from fedbn.study.method import FederatedRunner
from fedbn.study.methods import method
from fedbn.study.plan import ComparisonError, Run
from fedbn.study.records import FORMAT, make_record
from fedbn.tasks.data import SiteData
from fedbn.tasks.registry import make_task


@dataclass(frozen=True)
class Unit:
    """One run to be done, and where its file goes."""

    run: Run
    experiment: Experiment
    path: Path
    key: str


@dataclass(frozen=True)
class WorkGroup:
    """Runs that one process does one after the other; all begin with the same federation, if any.

    Attributes
    ----------
    units
        Of one seed and fold.
    data_root
        Folder with one store a site.
    fingerprints
        Site name to the fingerprint that its store must have.
    """

    units: tuple[Unit, ...]
    data_root: Path
    fingerprints: Mapping[str, str]


def together(units: Iterable[Unit]) -> list[tuple[Unit, ...]]:
    """Gather the runs that begin with the same federation; every other run is by itself."""
    groups: dict[Any, list[Unit]] = {}
    for unit in units:
        runner = method(unit.run.method).run
        key: Any = unit.run
        if isinstance(runner, FederatedRunner):
            key = runner.common(unit.experiment).model_dump_json()
        groups.setdefault(key, []).append(unit)
    return [tuple(group) for group in groups.values()]


def execute(groups: Sequence[WorkGroup], processes: int) -> Generator[Run]:
    """Do the work in several processes; yield each run when its file is there.

    Close what this returns when it is left early: only then are runs given up that have begun.
    joblib would end at Ctrl-C too, but its processes go on for as long as their work takes where
    this one is killed, and are killed themselves while they write.
    """
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(processes, len(groups)))
    stop = context.Event()
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(stop,)
    ) as pool:
        try:
            with _without_interrupts():
                futures = {pool.submit(do, group): group for group in groups}
            for future in as_completed(futures):
                future.result()
                yield from (unit.run for unit in futures[future].units)
        except BrokenProcessPool as error:
            raise ComparisonError(
                "a process of the comparison was ended from outside, for want of memory perhaps; "
                "start again with fewer --jobs: finished runs are kept"
            ) from error
        except (KeyboardInterrupt, GeneratorExit):
            stop.set()  # runs that have begun are given up: nobody waits for them
            raise
        finally:  # after a run that failed, those that have begun are finished and kept
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let processes that are started here never see Ctrl-C: the parent decides when to stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_writing = threading.Lock()
"""Held while a run's file is written: a process that is told to end does so before or after it."""


def _start_worker(stop: Event) -> None:
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    waits = [stop.wait] if parent is None else [stop.wait, parent.join]
    for wait in waits:  # no process is left behind whose parent has stopped or was killed
        threading.Thread(target=_end_after, args=(wait,), daemon=True).start()


def _end_after(wait: Callable[[], object]) -> None:
    wait()
    with _writing:
        os._exit(1)


@functools.cache
def _read(data_root: Path, task_settings: str, sites: tuple[str, ...]) -> dict[str, SiteData]:
    """Read the sites' data once a process."""
    task = make_task(json.loads(task_settings))
    return {site: task.read(data_root / site, site) for site in sites}


def do(work: WorkGroup) -> None:
    """Do the runs of a group one after the other, and write a file for each."""
    federation: Federation | None = None
    for unit in work.units:
        run, experiment = unit.run, unit.experiment
        task_settings = experiment.task.model_dump_json()
        stores = _read(work.data_root, task_settings, experiment.sites)
        for site, store in stores.items():
            if store.fingerprint() != work.fingerprints[site]:
                raise ComparisonError(f"the data of site {site!r} changed during the comparison")
        runner = method(run.method).run
        try:
            if isinstance(runner, FederatedRunner):
                federation = federation or runner.train(experiment, stores)
                outcomes = runner.finish(federation, experiment)
            else:
                outcomes = runner(experiment, stores)
        except (ValueError, RuntimeError, ArithmeticError) as error:
            raise ComparisonError(f"{run}: {error}") from error
        content = {
            "format": FORMAT,
            "key": unit.key,
            **asdict(run),
            "sites": {site: make_record(outcomes[site]) for site in sorted(outcomes)},
        }
        with _writing:  # it holds each subject's scores
            write_text(unit.path, json.dumps(content, allow_nan=False), private=True)
