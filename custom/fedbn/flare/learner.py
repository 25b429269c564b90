"""A site's learner in FLARE: receives shared entries, trains beside its own, sends shared entries.

Nothing here decides a number. The learner finds the site's data and its kept state, calls
:class:`fedbn.federation.site.Site`, writes the state back, and wraps the result into FLARE's
message. FLARE's simulator may build this object anew for every task, so nothing that matters
lives in it.

``ModelLearner`` is marked as deprecated in FLARE 2.9 in favour of its Client API and still
supported; it is what ``nvflare simulator`` jobs with an in-process executor use.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.fl_constant import FLMetaKey, ReturnCode
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model_learner import ModelLearner
from nvflare.app_common.app_constant import ValidateType

from fedbn.federation.best_round import BestRound
from fedbn.federation.devices import (
    DeviceChoice,
    described,
    device_facts,
    find_device,
    out_of_memory,
)
from fedbn.federation.experiment import Experiment
from fedbn.federation.installation import check_packages, missing_package
from fedbn.federation.results import (
    AFTER_TRAINING,
    BEFORE_TRAINING,
    FEDERATED,
    FINETUNED,
    Rounds,
    site_report,
    versions,
    without_nan,
)
from fedbn.federation.results import ALONE as ALONE_SCORES
from fedbn.federation.resume import CONTINUED_FROM, SIMULATOR_JOB, check_not_stale, seed_state
from fedbn.federation.site import OF_THE_SITE_ALONE, VALIDATION, Preparation, Site, make_network
from fedbn.federation.site_settings import SiteSettings
from fedbn.federation.site_state import SiteState, SiteStateError, network_fingerprint
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
    SITES_FOLDER,
    free_messages,
    job_experiment,
    redacted,
    site_settings,
    to_arrays,
    to_tensors,
)
from fedbn.flare.new_sites import SEND_AFFINE, SHARES_AFFINE, to_send
from fedbn.tasks.base import Scores
from fedbn.tasks.data import DataError, SiteData, default_data_root
from fedbn.tasks.loading import Loading

CACHE_FOLDER = "fedbn_images"
"""Folder of a client's workspace for prepared images, by site."""


_DELETED = "; FLARE deletes a simulator's workspace when another one is started in it"


class TaskAbortedError(RuntimeError):
    """FLARE asked this task to stop."""


class FedBNLearner(ModelLearner):
    """Train a network beside the site's own batch norm.

    What a site states in its own ``local/fedbn_site.yml`` wins over every argument here, because
    those come with the job.

    Parameters
    ----------
    data_root
        Folder with one site store per site; ``None`` means ``$FEDBN_DATA``, else ``~/fedbn_data``.
    torch_threads
        CPU threads for PyTorch; with 1, two runs of a job have the same bits. ``None`` leaves
        PyTorch's own choice.
    device
        ``"auto"`` (the process's first CUDA device if there is one, else the CPU), ``"cpu"``,
        ``"cuda"`` or ``"cuda:N"``.
    writer_id
        FLARE component through which curves are streamed to the server (TensorBoard).
    """

    def __init__(
        self,
        data_root: str | None = None,
        torch_threads: int | None = 1,
        device: str = "auto",
        writer_id: str = "log_writer",
    ):
        super().__init__()
        self.data_root = data_root
        self.torch_threads = torch_threads
        self.device = device
        self.writer_id = writer_id
        self._experiment: Experiment | None = None
        self._site: Site | None = None
        self._state: SiteState | None = None
        self._settings: SiteSettings | None = None
        self._device: DeviceChoice | None = None

    def validate(self, model: FLModel) -> FLModel | str | None:
        """Answer FLARE's validation task: the preflight before round 0 or the end of the run.

        FLARE also calls this before each training task; the scores before training are part of
        that task's own answer, so nothing is done twice here.
        """
        purpose = _report(model).get(PURPOSE)
        works = {
            PREFLIGHT: self._preflight,
            JUDGE: self._judge,
            FINAL: self._finish,
            FINETUNE: self._finetune,
            ALONE: self._train_alone,
        }
        if purpose in works:
            return self._answer(lambda: works[purpose](model))
        if model.meta.get(FLMetaKey.VALIDATE_TYPE) == ValidateType.BEFORE_TRAIN_VALIDATE:
            return None
        return self._answer(lambda: self._score(model))

    def train(self, model: FLModel) -> FLModel | str:
        """Do this site's part of a round."""
        return self._answer(lambda: self._train(model))

    def get_model(self, model_name: str) -> FLModel | str:
        """Refuse: a model that was trained beside one site's batch norm says nothing at another."""
        self.error(
            f"model {model_name!r} was asked for, but fedbn has no cross-site validation of local "
            "models: without this site's batch norm they are not complete"
        )
        return str(ReturnCode.BAD_TASK_DATA)

    def _answer(self, work: Callable[[], FLModel]) -> FLModel:
        """Do the work; an error becomes an answer with one sentence, not a bare return code."""
        try:
            return work()
        except Exception as error:
            said = self._sentence(error)
            sentence = public = self._named(said, error)
            if isinstance(error, DataError) and said == str(error):
                public = self._named(error.public, error)
            # No event: a job could have FLARE send it to the server with all that it names.
            self.log_error(self.fl_ctx, sentence, fire_event=False)
            if not isinstance(error, (ValueError, RuntimeError, ArithmeticError, OSError)):
                self.log_exception(self.fl_ctx, "not foreseen, please report it", fire_event=False)
            public = redacted(public, [*self._folders(), *self._private_names()])
            # What the site's data are tells more of a network that does not fit them.
            known = {} if self._site is None else {"signature": self._site.data.signature()}
            return FLModel(metrics={}, meta={REPORT: {ERROR: public, **known}})

    def _named(self, text: str, error: Exception) -> str:
        """Return one line that says which site it is about."""
        sentence = " ".join(text.split()) or type(error).__name__
        site = f"site {self._site_name()!r}"
        return sentence if site in sentence else f"{site}: {sentence}"

    def _sentence(self, error: Exception) -> str:
        """Say what happened; PyTorch's words about a full device are many, and hide what to do."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, torch.cuda.OutOfMemoryError) and self._device is not None:
                self.log_error(self.fl_ctx, str(cause), fire_event=False)
                return out_of_memory(
                    self._device,
                    site=self._site_name(),
                    batch_size=self._load_experiment().training.batch_size,
                )
            cause = cause.__cause__
        if isinstance(error, ModuleNotFoundError) and error.name:
            return missing_package(error)
        return str(error)

    def _folders(self) -> list[Path | str]:
        """Return the folders that must not be named outside, as they are written and as they are.

        Settings that cannot be read name no folder, and their error quotes none.
        """
        folders = [self._data_root(), self.data_root, self.workspace_root]
        if self._settings is not None:
            folders += [self._settings.data, self._settings.store]
        return [folder for folder in folders if folder]

    def _site_name(self) -> str:
        name = self.site_name or "?"
        try:
            return self._load_experiment().site_of(name)
        except Exception:
            return str(name)

    def _private_names(self) -> list[str]:
        """Return subject ids that are not in BIDS style, even of a store that cannot be read."""
        ids: Iterable[str] = []
        if self._site is not None:
            ids = self._site.data.private_names()
        else:
            table = self._store_folder(self._site_name()) / "participants.tsv"
            with contextlib.suppress(OSError):
                lines = table.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
                ids = {line.split("\t")[0] for line in lines}
        # "sub-…" is found by itself, and a short number names nobody: it is in every sentence.
        return [name for name in ids if not re.fullmatch(r"|sub-.*|[0-9]{1,3}", name)]

    def _load_experiment(self) -> Experiment:
        if self._experiment is None:
            self._experiment = job_experiment(self.fl_ctx)
        return self._experiment

    def _load_settings(self) -> SiteSettings:
        """Return the site's own settings, once they are known to be this site's."""
        if self._settings is None:
            settings = site_settings(self.fl_ctx)
            settings.check_site(self.site_name, self._load_experiment().site_of(self.site_name))
            self._settings = settings
        return self._settings

    def _load_state(self) -> SiteState:
        if self._state is None:
            self._load_settings()
            experiment = self._load_experiment()
            network, _ = make_network(experiment)
            self._state = SiteState.under(
                self._states_root(),
                job=str(self.job_id),
                site=experiment.site_of(self.site_name),
                network=network_fingerprint(experiment.network.name, network.state_dict()),
            )
        return self._state

    def _load_site(self, *, prepare: bool = False) -> Site:
        """Return the site's data and network; they are loaded once per process."""
        if self._site is None:
            threads = self._load_settings().stated("cpu_threads", self.torch_threads)
            if threads is not None:
                torch.set_num_threads(threads)
            experiment, state = self._load_experiment(), self._load_state()
            experiment.task.load_as(self._loading(state.site))
            # All values are looked at once, before round 0: it costs a second or two.
            data = self._read_data(state.site, verify=prepare)
            preparation = None
            if not prepare:
                tensors, facts = state.load_preparation()
                if facts.get("stamp") != data.stamp():  # a copy, or other content: look at it all
                    data = self._read_data(state.site, verify=True)
                preparation = Preparation.from_tensors(tensors, facts, data)
            self._site = Site(
                state.site,
                data,
                experiment,
                device=self._choose_device().device,
                preparation=preparation,
            )
        return self._site

    def _loading(self, site: str) -> Loading:
        settings = self._load_settings()
        folder = Path(self.workspace_root) / CACHE_FOLDER / site
        return Loading(settings.cache, settings.workers, settings.amp, folder)

    def _data_root(self) -> Path:
        return Path(self.data_root).expanduser() if self.data_root else default_data_root()

    def _store_folder(self, site: str) -> Path:
        own = None if self._settings is None else self._settings.store
        return own or self._data_root() / site

    def _read_data(self, site: str, *, verify: bool) -> SiteData:
        place = self._store_folder(site)
        if not self._load_experiment().task.has_data(place):
            raise DataError(
                f"site {site!r}: no site store at {place}; name this site's own store in "
                "local/fedbn_site.yml (data), or make one with `python -m data_prep`; "
                "`fedbn doctor` at the site says more"
            )
        return self._load_experiment().task.read(place, site, verify=verify)

    def _choose_device(self) -> DeviceChoice:
        if self._device is None:
            setting = self._load_settings().stated("device", self.device)
            self._device = find_device(setting, site=self._load_state().site)
        return self._device

    def _ensure_prepared(self, model: FLModel) -> int | None:
        """Prepare a site that joins late; refuse to start anew where a state must be there.

        Returns
        -------
        int or None
            The last round in which the server accepted this site's contribution, as it says.

        Raises
        ------
        SiteStateError
            If the server has seen this site's preflight but its state is gone.
        """
        state, accepted = self._load_state(), self._accepted(model)
        if state.exists:
            return accepted
        if self.site_name in _report(model).get(PREPARED, []):
            raise SiteStateError(
                f"site {state.site!r}: its batch norm of this job is missing in {state.folder}; "
                "restore the folder or start a new job (a new batch norm is not used silently)"
                + _DELETED
                * (self.job_id == SIMULATOR_JOB)
            )
        self._prepare(model)
        return accepted

    def _accepted(self, model: FLModel) -> int | None:
        rounds = _report(model).get(ACCEPTED)
        number = rounds.get(self._load_state().site) if isinstance(rounds, dict) else None
        return number if isinstance(number, int) else None

    def _prepare(self, model: FLModel) -> Site:
        """Make the site's state: a new one, or what it kept of the run that is continued."""
        state, continues = self._load_state(), self._load_experiment().continues
        site = self._load_site(prepare=True)
        if continues is not None:
            kept = seed_state(
                state,
                self._states_root(),
                continues,
                site.data,
                site.preparation,
                self._accepted(model),
            )
            if kept is not None:
                site.preparation = kept
                site.check_network()
                self.info(f"site {site.name!r} goes on from {kept.facts[CONTINUED_FROM]}")
                return site
            self.warning(f"site {site.name!r} was no part of job {continues.job!r}: it starts anew")
            facts = {**site.preparation.facts, CONTINUED_FROM: None}
            site.preparation = replace(site.preparation, facts=facts)
        site.check_network()
        state.save_preparation(site.preparation.tensors(), site.preparation.facts)
        state.save_local(site.initial_local(), round_number=-1)
        return site

    def _states_root(self) -> Path:
        return Path(self.workspace_root) / SITES_FOLDER

    def _preflight(self, model: FLModel) -> FLModel:
        self._load_experiment()  # its version first: another fedbn may need other packages
        check_packages()
        state = self._load_state()
        if state.exists:  # the task was sent twice: what is kept wins
            _, kept = state.load_local()
            continues = self._load_experiment().continues
            if kept > (continues.after_round if continues else -1):
                raise SiteStateError(
                    f"site {state.site!r}: {state.folder} holds its batch norm after round {kept} "
                    f"of an earlier run of job {state.job!r}; move it away to start anew"
                )
            site = self._load_site()
        else:
            site = self._prepare(model)
        remarks = site.task.remarks(site.preparation.facts)
        self.info("; ".join([f"site {site.name!r}: {site.partition.describe()}", *remarks]))
        if doubt := site.partition.warning():
            self.warning(f"site {site.name!r}: {doubt}")
        device = self._choose_device()
        facts = device_facts(device)
        self.info(f"site {site.name!r} trains on {described(facts)}: {device.reason}")
        report = {
            "site": site.name,
            "signature": site.data.signature(),
            "facts": {
                k: v for k, v in site.preparation.facts.items() if k not in OF_THE_SITE_ALONE
            },
            **facts,
            "versions": versions(),
            SHARES_AFFINE: self._load_settings().share_affine,
        }
        return FLModel(metrics={}, meta={REPORT: report})

    def _train(self, model: FLModel) -> FLModel:
        started = time.perf_counter()
        accepted = self._ensure_prepared(model)
        site, state = self._load_site(), self._load_state()
        local, kept = state.load_local()
        number = int(model.current_round or 0)
        if kept == number:  # this process's predecessor ended before its answer had arrived
            local, kept = state.load_local(at_most=number - 1)
        if kept >= number:
            raise SiteStateError(
                f"site {state.site!r}: its batch norm is that after round {kept}, but round "
                f"{number} is to be trained; it belongs to another run, or this round was trained "
                "here before"
            )
        check_not_stale(state.site, kept, accepted)
        shared = to_tensors(model.params, site.network.state_dict())
        self._keep_best(model)
        result = site.train_round(shared, local, number, self._on_epoch)
        self._judge_here(shared, local, number - 1, result.before)
        state.save_local(result.local, number)
        scored = {BEFORE_TRAINING: result.before, AFTER_TRAINING: result.after}
        state.save_scores(
            f"round_{number:06d}",
            {f"{when}/{part}": s for when, parts in scored.items() for part, s in parts.items()},
        )
        before, after = (_followed(site, parts) for parts in scored.values())
        report = {
            "site": site.name,
            BEFORE_TRAINING: before,
            AFTER_TRAINING: after,
            "training_loss": list(result.outcome.losses),
            "n_samples": result.outcome.n_samples,
            "n_steps": result.outcome.n_steps,
            "training_seconds": result.training_seconds,
            "seconds": time.perf_counter() - started,
        }
        self._stream(number, before, after, result.outcome.losses[-1])
        free_messages()
        return FLModel(
            params_type=ParamsType.FULL,
            params=to_arrays(result.shared),
            metrics=dict(before),
            meta={
                FLMetaKey.NUM_STEPS_CURRENT_ROUND: result.outcome.n_samples,
                REPORT: without_nan(report),
            },
        )

    def _keep_best(self, model: FLModel) -> None:
        """Keep the local entries of the round that the server says is the best so far."""
        number = _report(model).get(BEST)
        if isinstance(number, int):
            self._load_state().keep_best(number)

    def _judge_here(
        self,
        shared: Mapping[str, torch.Tensor],
        local: Mapping[str, torch.Tensor],
        number: int,
        scores: Mapping[str, Scores],
    ) -> None:
        """Keep all entries of a round that is this site's own best, where sites choose."""
        experiment, state = self._load_experiment(), self._load_state()
        if experiment.best_round != "site_validation" or number < 0:
            return
        best = BestRound(experiment)
        if state.best_path.exists():
            *_, kept, value = state.load_best()
            best.judge(kept, {state.site: {best.headline: value}})
        if best.judge(number, {state.site: experiment.task.follow(scores[VALIDATION])}):
            state.save_best(shared, local, number, best.value)

    def _judge(self, model: FLModel) -> FLModel:
        """Score the last shared weights on the validation units."""
        site, local = self._ready(model)
        judged = site.judged(to_tensors(model.params, site.network.state_dict()), local)
        return FLModel(metrics={}, meta={REPORT: {"site": site.name, BEFORE_TRAINING: judged}})

    def _ready(self, model: FLModel) -> tuple[Site, dict[str, torch.Tensor]]:
        """Return the site and its own entries after the last round, which are not stale."""
        accepted = self._ensure_prepared(model)
        state = self._load_state()
        local, kept = state.load_local()
        check_not_stale(state.site, kept, accepted)
        return self._load_site(), local

    def _chosen(self, model: FLModel) -> tuple[Site, Mapping[str, Any], Mapping[str, Any]]:
        """Return the site, and the shared and local entries that the run ends with here."""
        site, local = self._ready(model)
        shared: Mapping[str, torch.Tensor] = to_tensors(model.params, site.network.state_dict())
        experiment, state = self._load_experiment(), self._load_state()
        if experiment.best_round == "validation":
            self._keep_best(model)
            _, local, _, _ = state.load_best()
        elif experiment.best_round == "site_validation":
            site.load(shared, local)
            validation = site.scored_in_rounds[VALIDATION]
            last = {VALIDATION: site.task.score(site.network, validation)}
            _, number = state.load_local()
            self._judge_here(shared, local, number, last)
            shared, local, _, _ = state.load_best()
        return site, shared, local

    def _finish(self, model: FLModel) -> FLModel:
        """Score the run's shared weights with the site's own batch norm, and keep the model."""
        site, shared, local = self._chosen(model)
        state = self._load_state()
        final = site.evaluate(shared, local)
        state.save_model(*site.complete_model())
        state.save_scores("final", {FEDERATED: final})
        results = site_report(site, final, None, _rounds(state))
        report: dict[str, Any] = {"site": site.name, "results": results}
        if self._load_experiment().best_round != "last":
            report[BEST] = state.load_best()[2]
        answer = FLModel(metrics={}, meta={REPORT: report})
        if _report(model).get(SEND_AFFINE) is True and self._load_settings().share_affine:
            self.info(f"site {site.name!r} shares its gamma and beta for new hospitals")
            answer.params_type, answer.params = ParamsType.FULL, to_send(site, local)
        return answer

    def _finetune(self, model: FLModel) -> FLModel:
        """Train on from the run's model at this site, and score that beside it."""
        site, shared, local = self._chosen(model)
        site.load(shared, local)
        scores = site.finetune(self._on_epoch)
        self._load_state().save_model(*site.complete_model(), finetuned=True)
        return self._also_final(site, FINETUNED, scores)

    def _train_alone(self, model: FLModel) -> FLModel:
        """Train the same network on this site's data alone, and score that beside the run's."""
        self._ensure_prepared(model)
        site = self._load_site()
        return self._also_final(site, ALONE_SCORES, site.train_alone(self._on_alone_round))

    def _also_final(self, site: Site, name: str, scores: Scores) -> FLModel:
        state = self._load_state()
        kept = state.load_scores().get("final", {})
        state.save_scores("final", {**kept, name: scores})
        results: dict[str, Any] = {name: site.task.measure(scores)}
        if name == ALONE_SCORES and FEDERATED in kept:
            results["gain"] = site.task.changed(scores, kept[FEDERATED])
        report = {"site": site.name, "results": without_nan(results)}
        return FLModel(metrics={}, meta={REPORT: report})

    def _score(self, model: FLModel) -> FLModel:
        """Score weights that some other workflow sent, with the site's own batch norm."""
        site, state = self._load_site(), self._load_state()
        local, _ = state.load_local()
        shared = to_tensors(model.params, site.network.state_dict())
        return FLModel(metrics=site.task.follow(site.evaluate(shared, local)))

    def _on_epoch(self, epoch: int, loss: float) -> None:
        if self.is_aborted():
            raise TaskAbortedError("the task was aborted; the entries of the round before are kept")

    def _on_alone_round(self, number: int) -> None:
        self._on_epoch(number, 0.0)

    def _stream(
        self, number: int, before: dict[str, float], after: dict[str, float], loss: float
    ) -> None:
        """Send the round's curves to the server, as FLARE's TensorBoard users expect them."""
        writer = self.get_component(self.writer_id)
        if writer is None:
            return
        writer.add_scalar("training_loss", loss, number)
        for when, metrics in ((BEFORE_TRAINING, before), (AFTER_TRAINING, after)):
            for name, value in metrics.items():
                writer.add_scalar(f"{name}/{when}", value, number)


def _report(model: FLModel) -> dict[str, Any]:
    report = (model.meta or {}).get(REPORT)
    return report if isinstance(report, dict) else {}


def _followed(site: Site, parts: Mapping[str, Scores]) -> dict[str, float]:
    """Return the numbers of the part of the units that judges the rounds; none without one."""
    first = next(iter(parts.values()), None)
    return {} if first is None else site.task.follow(first)


def _rounds(state: SiteState) -> Rounds:
    """Return what the site has kept of its rounds."""
    rounds: dict[int, dict[str, dict[str, Scores]]] = {}
    for name, kept in state.load_scores().items():
        if not name.startswith("round_") or not kept:
            continue
        of_round = rounds.setdefault(int(name.removeprefix("round_")), {})
        for key, scores in kept.items():
            when, _, part = key.partition("/")
            of_round.setdefault(when, {})[part] = scores
    return rounds
