"""The server's side of a run: preflight, rounds with a deadline and a quorum, final scores.

FLARE's own ``FedAvg`` has neither: with it a dead client makes the job wait for ever.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.model_controller import ModelController

from data_prep.files import FileError, write_json, write_text
from fedbn.federation.best_round import BestRound
from fedbn.federation.experiment import Experiment
from fedbn.federation.installation import different_versions
from fedbn.federation.results import (
    AFTER_TRAINING,
    BEFORE_TRAINING,
    FEDERATED,
    FINETUNED,
    run_report,
    versions,
)
from fedbn.federation.results import ALONE as ALONE_SCORES
from fedbn.federation.resume import SIMULATOR_JOB
from fedbn.federation.run_folder import RESULTS_FILE
from fedbn.flare import new_sites
from fedbn.flare.aggregator import FedBNAggregator, Message
from fedbn.flare.job import (
    ACCEPTED,
    ALONE,
    BEST,
    ERROR,
    FINAL,
    FINETUNE,
    JUDGE,
    PREFLIGHT,
    PREPARED,
    PURPOSE,
    REPORT,
    TRAIN,
    free_messages,
    redacted,
    to_tensors,
)
from fedbn.flare.new_sites import SEND_AFFINE, SHARES_AFFINE
from fedbn.flare.persistor import SharedModelPersistor
from fedbn.models.new_site import MIN_WILLING_SITES
from fedbn.report.tables import render, run_tables

TABLE_FILE = "results.txt"


class RunFailedError(RuntimeError):
    """The run cannot go on; the message is the one sentence that the lead reads."""


class FedBNWorkflow(ModelController):
    """Run the job's experiment over all connected sites.

    Before round 0 each site looks at its own data, network and folder (the preflight); a sentence
    that one of them sends ends the job. In each round the shared entries go out, and the round ends
    when all sites have answered, at the deadline, or once the quorum has answered and nobody else
    can be expected: a site that is still at work is given twice the time that its own rounds, or
    its number of samples, tell, and ``grace_seconds``. A contribution that is late, missing or
    refused costs only itself, as long as the quorum is met. At the end every site scores the run's
    shared weights (those of the last or of the best round) with its own batch norm and keeps its
    complete model; fine-tuning and training alone are tasks of their own, each with the deadline
    of as many rounds as it takes.

    Parameters
    ----------
    min_sites
        Quorum of accepted contributions a round; 0 means all sites of the experiment. In FLARE's
        simulator with fewer threads than clients all are waited for in any case: they run one
        after another, and a site that has not begun yet would be counted as missing.
    round_seconds
        Deadline of a round, and of the final scores; training alone has that of all rounds. Where
        the simulator runs its clients one after another, each of them has it.
    preflight_seconds
        Deadline of the preflight.
    grace_seconds
        How long to wait at least for the rest once the quorum is met, or a preflight has failed.
    aggregator_id, persistor_id
        Components of the job.
    """

    def __init__(
        self,
        min_sites: int = 0,
        round_seconds: int = 3600,
        preflight_seconds: int = 600,
        grace_seconds: int = 60,
        aggregator_id: str = "aggregator",
        persistor_id: str = AppConstants.DEFAULT_PERSISTOR_ID,
    ):
        super().__init__(
            persistor_id=persistor_id,
            task_check_period=0.1,
            allow_empty_global_weights=True,  # where each site trains alone, nothing is shared
        )
        for name, value, least in (
            ("min_sites", min_sites, 0),
            ("round_seconds", round_seconds, 1),
            ("preflight_seconds", preflight_seconds, 1),
            ("grace_seconds", grace_seconds, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name} must be a whole number of at least {least}, got {value!r}"
                )
        self.min_sites = min_sites
        self.round_seconds = round_seconds
        self.preflight_seconds = preflight_seconds
        self.grace_seconds = grace_seconds
        self.aggregator_id = aggregator_id
        self.aggregator: FedBNAggregator
        self.experiment: Experiment
        self.site_of_client: dict[str, str] = {}
        self.site_facts: dict[str, dict[str, Any]] = {}
        self.signature: dict[str, Any] = {}
        self.willing: set[str] = set()
        self.prepared: set[str] = set()
        self.last_accepted: dict[str, int] = {}
        self.rounds: list[dict[str, Any]] = []
        self.n_samples: dict[str, int] = {}
        self.seconds_a_sample: dict[str, float] = {}
        self.seconds_now: dict[str, float] = {}
        self.silent: Counter[str] = Counter()
        self.best: BestRound
        self.best_model: tuple[list[Message], FLModel] | None = None
        self.model: FLModel | None = None
        self.results: dict[str, Any] | None = None

    def run(self) -> None:
        """Run the job from the preflight to the results; FLARE calls this once.

        A run that ends early after its first round also writes ``results.json``: its rounds, and
        why it has ended.
        """
        try:
            self._run()
        except (RunFailedError, FileError) as error:
            self._write_early_end("failed", str(error))
            self.panic(str(error))
        except Exception as error:
            self._write_early_end("failed", f"{type(error).__name__}: {error}")
            raise
        else:
            if self.abort_signal.triggered:
                self._write_early_end(
                    "aborted",
                    "the job was aborted: by a person, or by FLARE because a process of it ended",
                )

    def _run(self) -> None:
        if not isinstance(self.persistor, SharedModelPersistor):
            raise RunFailedError(f"component {self._persistor_id!r} must be a SharedModelPersistor")
        aggregator = self.engine.get_component(self.aggregator_id)
        if not isinstance(aggregator, FedBNAggregator):
            raise RunFailedError(f"component {self.aggregator_id!r} must be a FedBNAggregator")
        self.aggregator = aggregator
        try:
            self.experiment = self.persistor.experiment(self.fl_ctx)
        except Exception as error:  # a file or a network that cannot be used: one sentence
            raise RunFailedError(str(error)) from error
        self.last_accepted = self.persistor.last_accepted(self.fl_ctx)
        self.best = BestRound(self.experiment)
        self._name_sites()
        self._preflight()
        self.model = self.load_model()
        continues = self.experiment.continues
        for number in range(continues.after_round + 1 if continues else 0, self.experiment.rounds):
            self.model = self._round(number, self.model)
            if self.abort_signal.triggered:
                return
            if self.best.is_over:
                self.info(f"the run ends: no better round since round {self.best.number}")
                break
        if self.experiment.judges_rounds:
            self._judge_last(self.model)
        if self.abort_signal.triggered:
            return
        self._finish(self.model)

    def _name_sites(self) -> None:
        """Find out which site each connected client is."""
        sites: dict[str, str] = {}
        for client in self.sample_clients():
            try:
                site = self.experiment.site_of(client)
            except ValueError as error:
                raise RunFailedError(str(error)) from error
            if site in sites.values():
                raise RunFailedError(f"two clients stand for site {site!r}; {client!r} is one")
            sites[client] = site
        self.site_of_client = sites
        if self.min_sites > len(self.experiment.sites):
            raise RunFailedError(
                f"min_sites is {self.min_sites}, but the job has {len(self.experiment.sites)} sites"
            )
        if self.min_sites and self._one_after_another():
            self.info("fewer simulator threads than clients: each round waits for all sites")
            self.min_sites = 0
        if len(sites) < self.quorum:
            absent = [site for site in self.experiment.sites if site not in sites.values()]
            raise RunFailedError(
                f"{len(sites)} sites are connected, the job needs {self.quorum}; "
                f"not there: {', '.join(absent)}"
            )

    def _one_after_another(self) -> bool:
        """Tell whether this is FLARE's simulator and its clients cannot all run at one time."""
        threads = getattr(getattr(self.engine, "args", None), "threads", None)
        in_simulator = self.fl_ctx.get_job_id() == SIMULATOR_JOB
        return in_simulator and threads is not None and threads < len(self.site_of_client)

    @property
    def quorum(self) -> int:
        """Number of sites that a round needs."""
        return self.min_sites or len(self.experiment.sites)

    def _preflight(self) -> None:
        """Ask every site whether it can take part, and whether all hold the same kind of data."""
        answers: dict[str, dict[str, Any]] = {}

        def failed() -> bool:
            return any(answer.get(ERROR) for answer in answers.values())

        started = time.monotonic()
        self._ask(PREFLIGHT, None, self._reading(answers), failed)
        for answer in answers.values():
            if not answer.get(ERROR) and not isinstance(answer.get("signature"), dict):
                answer[ERROR] = "its answer does not say what its store holds"
        self._check_stores(answers)
        errors = [
            error if repr(self.site_of_client[client]) in error else f"{client}: {error}"
            for client, answer in sorted(answers.items())
            if (error := str(answer.get(ERROR) or ""))
        ]
        if errors:
            raise RunFailedError("preflight failed: " + "; ".join(errors))
        if len(answers) < self.quorum:
            silent = ", ".join(s for c, s in self.site_of_client.items() if c not in answers)
            if time.monotonic() - started < self.preflight_seconds - 1:
                raise RunFailedError(
                    f"preflight: {silent} ended without an answer; its own log says why"
                )
            raise RunFailedError(
                f"preflight: no answer within {self.preflight_seconds} s from {silent}"
            )
        self.site_facts = {
            self.site_of_client[client]: _site_facts(client, answer)
            for client, answer in answers.items()
        }
        for site, facts in sorted(self.site_facts.items()):
            if differences := different_versions(versions(), facts["versions"]):
                self.warning(f"{site} has other versions: {', '.join(differences)}")
        self.signature = answers[min(answers, key=self.site_of_client.__getitem__)]["signature"]
        for client, answer in answers.items():
            count = (answer.get("facts") or {}).get("n_train_samples")
            self.n_samples[client] = count if isinstance(count, int) and count > 0 else 1
        self.willing = {c for c, answer in answers.items() if answer.get(SHARES_AFFINE) is True}
        self.prepared = set(answers)
        self.info(f"preflight passed at {', '.join(sorted(self.site_facts))}")

    def _check_stores(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse stores that do not fit together, before a site's own error that follows of it."""
        signatures = sorted(
            (self.site_of_client[client], answer["signature"])
            for client, answer in answers.items()
            if isinstance(answer.get("signature"), dict)
        )
        for site, signature in signatures[1:]:
            first, expected = signatures[0]
            if differences := self.experiment.task.differences(expected, signature):
                raise RunFailedError(
                    f"preflight failed: the stores of {first} and {site} do not fit together: "
                    + "; ".join(differences)
                )

    def _round(self, number: int, model: FLModel) -> FLModel:
        """Send the shared entries, gather contributions, and return what is made of them."""
        started = time.monotonic()
        self.fl_ctx.set_prop(AppConstants.CURRENT_ROUND, number, private=True, sticky=False)
        self.event(AppEventType.ROUND_STARTED)
        self.aggregator.fl_ctx = self.fl_ctx
        self.aggregator.reset_stats()
        reports: dict[str, dict[str, Any]] = {}
        answered: set[str] = set()
        self.seconds_now = {}

        def collect(result: FLModel) -> bool:
            if not _report(result).get(ERROR):  # it has trained, so it has a state from now on
                self.prepared.add(_client(result))
            answered.add(_client(result))
            accepted = self.aggregator.accept_model(result)
            if accepted:
                report = reports[_client(result)] = _report(result)
                if (seconds := _number(report.get("seconds"))) is not None:
                    of_sample = seconds / self.n_samples.get(_client(result), 1)
                    self.seconds_now[_client(result)] = of_sample
            return accepted

        def enough() -> bool:
            return len(self.aggregator.accepted) >= self.quorum

        messages = self._messages()
        self._ask(TRAIN, messages, collect, enough, round_number=number)
        if self.abort_signal.triggered:
            return model
        record = self._record(number, reports, time.monotonic() - started)
        self.seconds_a_sample |= self.seconds_now
        self.silent.update(set(self.site_of_client) - answered)
        if number:
            self._judge(number - 1, record["sites"], messages, model)
        self.rounds.append(record)
        self.last_accepted |= dict.fromkeys(record["accepted"], number)
        if len(record["accepted"]) < self.quorum:
            raise RunFailedError(
                f"round {number}: {len(record['accepted'])} contributions were accepted, "
                f"{self.quorum} are needed; {_why(record)}"
            )
        self.event(AppEventType.BEFORE_AGGREGATION)
        mean = self.aggregator.aggregate_model()
        record |= self.aggregator.facts()
        self.fire_event_with_data(
            AppEventType.AFTER_AGGREGATION, self.fl_ctx, AppConstants.AGGREGATION_RESULT, mean
        )
        updated = FLModel(params_type=ParamsType.FULL, params=mean.params, meta={})
        learnable = make_model_learnable(weights=updated.params, meta_props=updated.meta)
        self.fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, learnable, private=True, sticky=True)
        self.fl_ctx.set_prop(ACCEPTED, dict(self.last_accepted), private=True, sticky=False)
        self.save_model(updated)
        self.event(AppEventType.ROUND_DONE)
        self.info(_progress(record, self.experiment.rounds, self.experiment.task.followed[0]))
        free_messages()
        return updated

    def _record(
        self, number: int, reports: Mapping[str, dict[str, Any]], seconds: float
    ) -> dict[str, Any]:
        site_of = self.site_of_client
        accepted = {site_of[client]: report for client, report in sorted(reports.items())}
        refused = {site_of[c]: why for c, why in sorted(self.aggregator.refused.items())}
        return {
            "round": number,
            "accepted": sorted(accepted),
            "refused": refused,
            "dropped_local_entries": {site_of[c]: n for c, n in self.aggregator.dropped.items()},
            "missing": sorted(set(site_of.values()) - set(accepted) - set(refused)),
            "seconds": seconds,
            "sites": {
                site: _numbers(report, self.experiment.task.followed)
                for site, report in sorted(accepted.items())
            },
        }

    def _judge(
        self,
        number: int,
        judged: Mapping[str, Mapping[str, Any]],
        messages: list[Message],
        model: FLModel,
    ) -> None:
        """Judge the model that a round has ended with, by what sites scored before they trained.

        `messages` are what the sites had received, `model` is what the server then held.
        """
        if not self.experiment.judges_rounds:
            return
        of_sites = {site: numbers.get(BEFORE_TRAINING) or {} for site, numbers in judged.items()}
        if self.best.judge(number, of_sites) and self.experiment.best_round == "validation":
            self.best_model = (messages, model)

    def _judge_last(self, model: FLModel) -> None:
        """Have the model of the last round judged, too, and take that of the best one."""
        answers: dict[str, dict[str, Any]] = {}
        messages = self._messages()
        self._ask(JUDGE, messages, self._reading(answers), self._enough(answers))
        judged = {self.site_of_client[client]: answer for client, answer in answers.items()}
        self._judge(self.rounds[-1]["round"], judged, messages, model)
        if self.best_model is not None:
            self.model = self.best_model[1]
            self.save_model(self.model)

    def _enough(self, answers: Mapping[str, Mapping[str, Any]]) -> Callable[[], bool]:
        return lambda: sum(ERROR not in answer for answer in answers.values()) >= self.quorum

    def _final_messages(self) -> list[Message]:
        return self._messages() if self.best_model is None else self.best_model[0]

    def _also(self, purpose: str, messages: list[Message] | None) -> dict[str, dict[str, Any]]:
        """Have every site do a work that is scored beside the run; a failure costs it alone."""
        answers: dict[str, dict[str, Any]] = {}
        self._ask(purpose, messages, self._reading(answers), self._enough(answers))
        found = {}
        for client, site in sorted(self.site_of_client.items()):
            answer = answers.get(client) or {ERROR: "no answer in time"}
            if answer.get(ERROR) or not isinstance(answer.get("results"), dict):
                self.error(f"{site} is not scored in {purpose}: {answer.get(ERROR)}")
            else:
                found[client] = answer["results"]
        return found

    def _finish(self, model: FLModel) -> None:
        """Let every site score the run's weights; write and print the results."""
        answers: dict[str, dict[str, Any]] = {}
        affine: dict[str, Mapping[str, Any] | None] = {}
        asked = self.willing if len(self.willing) >= MIN_WILLING_SITES else set()
        read = self._reading(answers)

        def collect(result: FLModel) -> bool:
            if _client(result) in asked:
                affine[self.site_of_client[_client(result)]] = result.params
            return read(result)

        told = {SEND_AFFINE: bool(asked)}
        self._ask(FINAL, self._final_messages(), collect, self._enough(answers), told=told)
        if self.abort_signal.triggered:
            return
        beside = [FINETUNE] * bool(self.experiment.finetune)
        beside += [ALONE] * self.experiment.compare_with_alone
        self.results = self._join(answers)
        if beside:  # it takes as long as the run did: what is known by now is kept
            self._write_early_end(
                "aborted", f"the sites are scored, but their work {beside[-1]!r} has not ended"
            )
        for purpose in beside:
            found = self._also(purpose, None if purpose == ALONE else self._final_messages())
            if self.abort_signal.triggered:
                return
            for client, more in found.items():
                if isinstance(answers.get(client, {}).get("results"), dict):
                    answers[client]["results"] |= more
            self.results = self._join(answers)
        for site, why in self.results["not_scored"].items():
            self.error(f"{site} is not scored: {why}")
        reason = self.results.get("reason")
        try:
            write_json(self._results_path, self.results)
            self.info(f"results of this run: {self._results_path}")
        except OSError as error:
            reason = reason or str(error)
        for step in (self._show, lambda: self._keep_affine(affine)):
            try:
                step()
            except Exception as error:  # the results of the run matter more
                self.error(f"after the results: {type(error).__name__}: {error}")
        if reason:
            raise RunFailedError(reason)

    def _join(self, answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Join what the sites have answered; an answer that cannot be read costs its site alone."""
        assert self.model is not None
        shared = self._tensors(self.model)
        reports, failed, kinds = {}, {}, {}
        for client, answer in sorted(answers.items()):
            site = self.site_of_client[client]
            if answer.get(ERROR):
                failed[site] = str(answer[ERROR])
                continue
            try:
                report = {**self.site_facts.get(site, {}), **answer["results"]}
                alone = run_report(self.experiment, {site: report}, [], shared)
                render(run_tables(alone))
                json.dumps(alone, allow_nan=False)
                kind = _metric_names(report)
            except Exception as error:
                failed[site] = f"its results cannot be read ({type(error).__name__})"
            else:
                reports[site], kinds[site] = report, kind
        usual = Counter(kinds.values()).most_common(1)
        for site in [site for site, kind in kinds.items() if kind != usual[0][0]]:
            failed[site] = "its results cannot be read (its metrics are not those of other sites)"
            del reports[site]
        not_scored = failed | {
            site: f"no answer within {self._deadline(FINAL)} s"
            for site in self.site_of_client.values()
            if site not in reports and site not in failed
        }
        outcome: dict[str, Any] = {"status": "completed"}
        if len(reports) < self.quorum:
            outcome = {
                "status": "failed",
                "reason": f"{len(reports)} sites were scored at the end, {self.quorum} are needed; "
                + "; ".join(f"{site}: {why}" for site, why in sorted(not_scored.items())),
            }
        return run_report(
            self.experiment,
            {site: reports[site] for site in self.experiment.sites if site in reports},
            self.rounds,
            shared,
            job=self.fl_ctx.get_job_id(),
            transport="NVFlare",
            not_scored=not_scored,
            signature=self.signature,
            **({"best_round": self._best_facts(answers)} if self.experiment.judges_rounds else {}),
            **outcome,
        )

    @property
    def _results_path(self) -> Path:
        return Path(self.get_run_dir()) / RESULTS_FILE

    def _show(self) -> None:
        assert self.results is not None
        text = render(run_tables(self.results))
        encoding = sys.stdout.encoding or "utf-8"  # a console that has no lines shows "?"
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
        write_text(Path(self.get_run_dir()) / TABLE_FILE, text)

    def _tensors(self, model: FLModel) -> dict[str, torch.Tensor]:
        assert isinstance(self.persistor, SharedModelPersistor)
        return to_tensors(model.params, self.persistor.server(self.fl_ctx).state())

    def _keep_affine(self, affine: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Save what hospitals that join later start from, beside the global model."""
        if not new_sites.has_affine(self.experiment):
            return
        assert isinstance(self.persistor, SharedModelPersistor)
        self.info(
            new_sites.keep(
                self.persistor.path(self.fl_ctx).parent,
                self.experiment,
                str(self.fl_ctx.get_job_id()),
                affine,
                n_willing=len(self.willing),
                warn=self.warning,
            )
        )

    def _write_early_end(self, status: str, reason: str) -> None:
        """Write what is known of a run that has ended, or may end, before all is done."""
        if not self.rounds or self.model is None:
            return
        results = self.results or run_report(
            self.experiment,
            {},
            self.rounds,
            self._tensors(self.model),
            job=self.fl_ctx.get_job_id(),
            transport="NVFlare",
            not_scored={},
        )
        try:
            write_json(self._results_path, results | {"status": status, "reason": reason})
        except OSError as error:  # the reason of the run's end is the one to tell
            self.error(f"the results until then are lost: {error}")

    def _ask(
        self,
        purpose: str,
        messages: Sequence[Message] | None,
        callback: Callable[[FLModel], bool],
        enough: Callable[[], bool],
        *,
        round_number: int = 0,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        """Send one task to every site and wait for the answers, at most until the deadline.

        Sites of one group receive the same arrays; without messages, all receive no arrays.

        Once ``enough`` is true, the wait is for those alone that can be expected, see
        :meth:`_expected`. FLARE's own count of answers would start the grace with errors.
        """
        answered: set[str] = set()

        def heard(result: FLModel) -> bool:
            answered.add(_client(result))
            return callback(result)

        self._callback = heard
        started = time.monotonic()
        seconds = self._deadline(purpose)
        if messages is None:
            messages = [(list(self.site_of_client), None)]
        for clients, params in messages:
            data = FLModel(
                params_type=ParamsType.FULL if params is not None else None,
                params=params,
                metrics={} if params is None else None,
                current_round=round_number,
                total_rounds=self.experiment.rounds,
                meta={
                    REPORT: {
                        PURPOSE: purpose,
                        PREPARED: sorted(self.prepared),
                        ACCEPTED: dict(self.last_accepted),
                        BEST: self.best.number,
                        **(told or {}),
                    }
                },
            )
            self.broadcast_model(
                data=data,
                task_name=(
                    AppConstants.TASK_TRAIN if purpose == TRAIN else AppConstants.TASK_VALIDATION
                ),
                targets=clients,
                min_responses=len(clients),
                timeout=seconds,
                blocking=False,
                callback=heard,
            )
        enough_since: float | None = None
        while self.get_num_standing_tasks():
            if self.abort_signal.triggered:
                self.cancel_all_tasks()
                return
            now = time.monotonic()
            if enough_since is None and enough():
                enough_since = now
            if enough_since is not None:
                late = set(self.site_of_client) - answered
                until = max([enough_since, *(started + self._expected(purpose, c) for c in late)])
                if now >= until + self.grace_seconds:
                    self.cancel_all_tasks()
            time.sleep(self._task_check_period)

    def _deadline(self, purpose: str) -> int:
        """Return the most seconds that a task may take, at all sites together."""
        experiment = self.experiment
        seconds = self.preflight_seconds if purpose == PREFLIGHT else self.round_seconds
        seconds *= self._as_many_rounds(purpose)
        if purpose == FINETUNE and experiment.finetune:
            seconds *= -(-experiment.finetune.epochs // experiment.training.local_epochs)
        return seconds * (len(self.site_of_client) if self._one_after_another() else 1)

    def _as_many_rounds(self, purpose: str) -> int:
        return self.experiment.rounds if purpose == ALONE else 1

    def _expected(self, purpose: str, client: str) -> float:
        """Return how many seconds a site may take, by what its own rounds or its size tell.

        A quorum of quick answers would otherwise leave out the largest hospital, round by round.
        Twice what it took last; of a site that has not answered yet four times what others took
        for as many samples, then eight and sixteen times, and from the fourth round on nothing.
        """
        known = {**self.seconds_a_sample, **self.seconds_now}
        if purpose == PREFLIGHT or not known:
            return 0.0
        factor = 2.0
        if client not in self.seconds_a_sample:
            factor = 4.0 * 2 ** self.silent[client] if self.silent[client] < 3 else 0.0
        usual = self.seconds_a_sample.get(client, max(known.values()))
        return factor * usual * self.n_samples.get(client, 1) * self._as_many_rounds(purpose)

    def _best_facts(self, answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        found = self.best.facts()
        if self.experiment.best_round == "site_validation":
            found["sites"] = {
                self.site_of_client[client]: _number(answer.get(BEST))
                for client, answer in answers.items()
            }
        return found

    def _messages(self) -> list[Message]:
        return self.aggregator.messages(list(self.site_of_client))

    def _accept_train_result(
        self, client_name: str, result: Shareable, fl_ctx: FLContext, is_unknown_task: bool = False
    ) -> bool:
        """Note a bare error code as that site's answer; FLARE only logs it, or ends the job."""
        code = result.get_return_code()
        if code and code != ReturnCode.OK:
            if not is_unknown_task:
                error = {ERROR: f"it answered with the error code {code}, its log says more"}
                self._callback(
                    FLModel(metrics={}, meta={"client_name": client_name, REPORT: error})
                )
            return False
        accepted: bool = super()._accept_train_result(client_name, result, fl_ctx, is_unknown_task)
        return accepted

    def _reading(self, answers: dict[str, dict[str, Any]]) -> Callable[[FLModel], bool]:
        """Make a callback that keeps what each site reports."""

        def read(result: FLModel) -> bool:
            report = _report(result)
            if not report:
                report = {ERROR: f"{_client(result)} sent an answer that is not fedbn's"}
            if report.get(ERROR):
                error = redacted(str(report[ERROR]))
                report = {ERROR: error, "signature": report.get("signature")}
            answers[_client(result)] = report
            return ERROR not in report

        return read


def _client(result: FLModel) -> str:
    return str(result.meta.get("client_name", AppConstants.CLIENT_UNKNOWN))


def _report(result: FLModel) -> dict[str, Any]:
    report = (result.meta or {}).get(REPORT)
    return report if isinstance(report, dict) else {}


def _metric_names(report: Mapping[str, Any]) -> str:
    """Say in JSON which metrics of which levels a site reports, the same of each of its models."""
    (names,) = {
        json.dumps(sorted((level, sorted(metrics)) for level, metrics in report[model].items()))
        for model in (FEDERATED, FINETUNED, ALONE_SCORES)
        if model in report
    }
    return names


def _site_facts(client: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what a site says of its device and packages, and nothing that it may have added."""
    told = answer.get("versions")
    facts: dict[str, Any] = {
        "client": client,
        "versions": _texts(told if isinstance(told, dict) else {}, versions()),
        **_texts(answer, ("device", "device_name")),
    }
    index = answer.get("device_index")
    if isinstance(index, int) and not isinstance(index, bool) and abs(index) < 1000:
        facts["device_index"] = index
    return facts


def _texts(told: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Keep short texts of one line, without a path."""
    return {
        name: redacted("".join(c if c.isprintable() else " " for c in told[name])[:80])
        for name in names
        if isinstance(told.get(name), str)
    }


def _numbers(report: Mapping[str, Any], followed: Sequence[str]) -> dict[str, Any]:
    """Keep a round's numbers of one site, and nothing that it may have added."""
    kept: dict[str, Any] = {}
    for name in ("n_samples", "n_steps", "training_seconds", "seconds"):
        kept[name] = _number(report.get(name))
    for name in (BEFORE_TRAINING, AFTER_TRAINING):
        scores = report.get(name)
        scores = scores if isinstance(scores, dict) else {}
        kept[name] = {key: _number(scores.get(key)) for key in followed}
    losses = report.get("training_loss")
    kept["training_loss"] = [_number(loss) for loss in losses] if isinstance(losses, list) else []
    return kept


def _number(value: Any) -> float | int | None:
    """Return a number that JSON has, or ``None`` for anything else that a site may have sent."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < 1e300 else None  # False for NaN and infinity, too


def _why(record: Mapping[str, Any]) -> str:
    parts = [f"refused {site}: {reason}" for site, reason in record["refused"].items()]
    parts += [f"no answer from {site}" for site in record["missing"]]
    return "; ".join(parts) or "no reason is known"


def _progress(record: Mapping[str, Any], rounds: int, headline: str) -> str:
    """Say in one line how a round went."""
    scores = ", ".join(
        f"{site} {_shown(numbers[BEFORE_TRAINING][headline], 2)} "
        f"(loss {_shown((numbers['training_loss'] or [None])[-1], 3)})"
        for site, numbers in record["sites"].items()
    )
    return (
        f"round {record['round'] + 1} of {rounds} in {record['seconds']:.1f} s; "
        f"{headline.replace('_', ' ')} before training: {scores}"
        + (f"; {_why(record)}" if record["refused"] or record["missing"] else "")
    )


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
