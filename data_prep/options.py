"""What the commands have in common: options as fields of one object, and what they make of it."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from data_prep.connectome import ConnectomeSettings
from data_prep.names import check_site_name
from data_prep.nifti import DEFAULT_SPACE, find_fmriprep_scans, find_scans, fmriprep_version
from data_prep.participants import JoinedSite, Person, parse_diagnosis_words, read_participants
from data_prep.preparation import FoldPlan, Preparation, SiteSource, make_site_store
from data_prep.quality import QualityRule
from data_prep.report import SiteReport
from data_prep.scans import Scan
from data_prep.site_store import SiteStore, default_data_root
from data_prep.terminal import progress_bar
from data_prep.timeseries import (
    CONFOUND_PRESETS,
    DEFAULT_CONFOUNDS,
    STANDARDIZATIONS,
    ExtractionSettings,
    check_tr,
    parse_confounds,
)

__all__ = [
    "Mismatch",
    "ParticipantOptions",
    "ScanOptions",
    "StoreOptions",
    "check_mismatch",
    "option",
    "refuse_taken_apart",
    "take_options",
]

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_WINDOW = 32


def option(text: str, *names: str, show: bool = True) -> Any:
    """Return an option of the command line; `show` says whether the help names its default."""
    return typer.Option(*names, help=text, show_default=show)


Mismatch = Annotated[
    str, option("Participants without scan, scans without participant: error, or drop and list.")
]


@dataclass(frozen=True)
class StoreOptions:
    """How a store is made of ROI time series: who is left out, and how connectomes are computed."""

    out: Annotated[
        Path | None,
        option("Folder that gets one store a site. Default: $FEDBN_DATA, else ~/fedbn_data."),
    ] = None
    window: Annotated[
        int | None, option(f"Length of the sliding window, in volumes. Default: {DEFAULT_WINDOW}.")
    ] = None
    window_seconds: Annotated[
        float | None, option("The same in seconds, where sites have other repetition times.")
    ] = None
    stride: Annotated[int, option("Step between windows, in volumes.")] = 1
    whole_scan: Annotated[bool, option("One connectome a subject.", "--whole-scan")] = False
    estimator: Annotated[
        str, option("Covariance estimator: ledoit-wolf or pearson (no shrinkage).")
    ] = "ledoit-wolf"
    kind: Annotated[
        str, option("correlation; for whole scans also 'partial correlation', covariance, tangent.")
    ] = "correlation"
    negative: Annotated[
        str, option("Negative values: keep, or zero as the paper's authors did.")
    ] = "keep"
    silent_rois: Annotated[
        str,
        option("A subject with an ROI without signal: exclude, or keep-zero (its edges are 0)."),
    ] = "exclude"
    min_timepoints: Annotated[
        int | None, option("Leave out shorter scans. Default: the window.")
    ] = None
    same_length: Annotated[
        bool, option("Leave out scans of another length than most.", "--same-length")
    ] = False
    folds: Annotated[int | None, option("Fix this many folds by subject in the store.")] = None
    fold: Annotated[int | None, option("With tangent: the fold kept out of the reference.")] = None
    seed: Annotated[int, option("Seed of the folds.")] = 0
    force: Annotated[bool, option("Write even if nothing has changed.", "--force")] = False

    @property
    def root(self) -> Path:
        """The folder of the stores."""
        return self.out or default_data_root()

    def preparation(
        self, tr: float | None = None, extraction: ExtractionSettings | None = None
    ) -> Preparation:
        """Return the settings that the options ask for, or raise a ValueError.

        `tr` is the site's repetition time in seconds, for a window in seconds; `extraction` is how
        time series are made of scans.
        """
        if self.fold is not None and self.folds is None:
            raise ValueError("--fold needs --folds")
        window: int | None = DEFAULT_WINDOW if self.window is None else self.window
        if self.window_seconds is not None:
            if self.window is not None or self.whole_scan:
                raise ValueError("--window-seconds goes with neither --window nor --whole-scan")
            window = round(self.window_seconds / tr) if tr else window
        stride: int | None = self.stride
        if self.whole_scan:
            window = stride = None
        return Preparation(
            ConnectomeSettings(
                *(self.kind, self.estimator, window, stride, self.negative, self.window_seconds)
            ),
            QualityRule(self.silent_rois, self.min_timepoints, self.same_length),
            folds=None if self.folds is None else FoldPlan(self.folds, self.seed, self.fold),
            extraction=extraction,
        )

    def make(
        self,
        source: SiteSource,
        preparation: Preparation,
        report: SiteReport,
        join: JoinedSite | None = None,
        **more: Any,
    ) -> SiteStore:
        """Make a site's store and add it to the report; more goes to `make_site_store`."""
        place = self.root / source.site
        store, unchanged = make_site_store(
            place, source, preparation, force=self.force, bar=progress_bar, **more
        )
        report.add(store, unchanged, join)
        return store


@dataclass(frozen=True)
class ParticipantOptions:
    """A hospital's name, and its table of participants."""

    participants: Annotated[
        Path, option("BIDS participants.tsv: participant_id, diagnosis, age, sex.")
    ]
    site: Annotated[str, option("Name of this hospital; its store gets this name.")]
    id_column: Annotated[
        str, option("Column of the participants table that names the participant.")
    ] = "participant_id"
    diagnosis_column: Annotated[str, option("Column of the participants table.")] = "diagnosis"
    diagnosis_word: Annotated[
        list[str] | None,
        option(
            "What a word there means, such as ASD=autism, TD=control, ADHD=leave-out; give it once "
            "a word.",
            show=False,
        ),
    ] = None
    mismatch: Mismatch = "error"

    def check(self) -> None:
        """Raise a ValueError for a value that is not allowed."""
        check_site_name(self.site)
        check_mismatch(self.mismatch)
        parse_diagnosis_words(self.diagnosis_word or [])

    def read(self) -> tuple[list[Person], list[tuple[str, str]]]:
        """Read the table, as `participants.read_participants` does."""
        return read_participants(
            self.participants,
            parse_diagnosis_words(self.diagnosis_word or []),
            diagnosis_column=self.diagnosis_column,
            id_column=self.id_column,
        )

    def describe(self) -> dict[str, Any]:
        """Return what the site store states."""
        return {
            "id_column": self.id_column,
            "diagnosis_column": self.diagnosis_column,
            "diagnosis_words": parse_diagnosis_words(self.diagnosis_word or []),
        }


@dataclass(frozen=True)
class ScanOptions:
    """Which scans are read, and how ROI time series are made of them."""

    images: Annotated[
        str | None,
        option(
            "Pattern of the scans, in quotation marks: 'sub-*/func/*_bold.nii.gz'. With "
            "--fmriprep: inside that folder."
        ),
    ] = None
    fmriprep: Annotated[Path | None, option("fMRIPrep's folder of derivatives, instead.")] = None
    session: Annotated[str | None, option("Take ses-<this> only.")] = None
    task: Annotated[str | None, option("Take task-<this> only.")] = None
    run: Annotated[str | None, option("Take run-<this> only.")] = None
    space: Annotated[
        str, option("With --fmriprep: the template space, which must be the atlas's.")
    ] = DEFAULT_SPACE
    confounds: Annotated[
        str | None,
        option(
            f"With --fmriprep: none, {', '.join(CONFOUND_PRESETS)}, or components of nilearn's "
            f"load_confounds. Default: {DEFAULT_CONFOUNDS}."
        ),
    ] = None
    tr: Annotated[
        float | None, option("Repetition time in seconds, instead of header and JSON sidecar.")
    ] = None
    high_pass: Annotated[float, option("Lower cut-off in Hz; 0 for none.")] = 0.01
    low_pass: Annotated[float, option("Upper cut-off in Hz; 0 for none.")] = 0.1
    no_detrend: Annotated[bool, option("Leave linear trends in.", "--no-detrend")] = False
    standardize: Annotated[str, option(f"Scale of the series: {', '.join(STANDARDIZATIONS)}.")] = (
        "zscore"
    )

    def extraction(self) -> ExtractionSettings:
        """Return the settings, or raise a ValueError for options that do not go together."""
        check_tr(self.tr)
        confounds = None
        if self.fmriprep is not None and self.confounds != "none":
            confounds = parse_confounds(self.confounds or DEFAULT_CONFOUNDS)
        elif self.fmriprep is None and self.images is None:
            raise ValueError("name the scans with --images, or fMRIPrep's folder with --fmriprep")
        elif self.fmriprep is None and self.confounds not in (None, "none"):
            raise ValueError("--confounds needs --fmriprep: only its tables of confounds are read")
        return ExtractionSettings(
            self.high_pass or None,
            self.low_pass or None,
            not self.no_detrend,
            self.standardize,
            confounds,
        )

    def find(self, settings: ExtractionSettings) -> list[Scan]:
        """Find one scan a participant."""
        wanted = {"ses": self.session, "task": self.task, "run": self.run}
        if self.fmriprep is None:
            return find_scans(self.images or "", wanted)
        return find_fmriprep_scans(
            self.fmriprep,
            wanted,
            space=self.space,
            pattern=self.images,
            smoothed_by_aroma=(settings.confounds or {}).get("ica_aroma") == "full",
        )

    def describe(self) -> dict[str, Any]:
        """Return what the site store states of the source."""
        source: dict[str, Any] = {"name": "NIfTI scans"}
        if self.fmriprep is not None:
            version = fmriprep_version(self.fmriprep)
            source = {"name": "fMRIPrep derivatives", "space": self.space, "generated_by": version}
        selection = {"session": self.session, "task": self.task, "run": self.run}
        return {**source, "tr_set_by_user": self.tr is not None, "selection": selection}


def check_mismatch(mismatch: str, join: JoinedSite | None = None) -> None:
    """Refuse another word than error and drop; with a match, refuse what is unmatched if error."""
    if mismatch not in ("error", "drop"):
        raise ValueError(f"mismatch is {mismatch!r}; allowed are error, drop")
    if join is not None and mismatch == "error":
        join.refuse_mismatch()


def refuse_taken_apart(context: typer.Context, name: str) -> None:
    """Refuse files that a shell has made of a pattern."""
    if context.args:
        raise ValueError(
            f"{context.args[0]!r} is no option; put the pattern of {name} in quotation marks, so "
            "that the shell leaves it as it is"
        )


def take_options(command: Command) -> Command:
    """Give a command an option for each field of the objects that it takes.

    A parameter whose type is a dataclass becomes that dataclass's fields on the command line, and
    is put together again when the command is called.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []

    def add(name: str, hint: Any, default: Any) -> None:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=hint))

    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            add(name, hints[name], parameter.default)
    for group in groups.values():
        of_fields = get_type_hints(group, include_extras=True)
        for f in fields(group):
            default = inspect.Parameter.empty if f.default is MISSING else f.default
            add(f.name, of_fields[f.name], default)

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        return command(**values)

    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return wrapped  # type: ignore[return-value]
