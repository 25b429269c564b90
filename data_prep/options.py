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
from data_prep.participants import (
    JoinedSite,
    Person,
    parse_diagnosis_words,
    read_participants,
)
from data_prep.preparation import FoldPlan, Preparation
from data_prep.quality import QualityRule
from data_prep.site_store import default_data_root
from data_prep.timeseries import ExtractionSettings

__all__ = [
    "Mismatch",
    "ParticipantOptions",
    "StoreOptions",
    "check_mismatch",
    "refuse_taken_apart",
    "take_options",
]

Command = TypeVar("Command", bound=Callable[..., Any])

Mismatch = Annotated[
    str,
    typer.Option(
        help="Participants without scan, scans without participant: error, or drop and list them."
    ),
]
DEFAULT_WINDOW = 32


@dataclass(frozen=True)
class StoreOptions:
    """How a store is made of ROI time series: who is left out, and how connectomes are computed."""

    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder that gets one store a site. Default: $FEDBN_DATA, else ~/fedbn_data.",
            show_default=False,
        ),
    ] = None
    window: Annotated[
        int | None,
        typer.Option(
            help=f"Length of the sliding window, in time points. Default: {DEFAULT_WINDOW}.",
            show_default=False,
        ),
    ] = None
    window_seconds: Annotated[
        float | None,
        typer.Option(
            help="The same in seconds, where sites have other repetition times.",
            show_default=False,
        ),
    ] = None
    stride: Annotated[int, typer.Option(help="Step between windows, in time points.")] = 1
    whole_scan: Annotated[
        bool, typer.Option("--whole-scan", help="One connectome a subject, no windows.")
    ] = False
    estimator: Annotated[
        str, typer.Option(help="Covariance estimator: ledoit-wolf or pearson (no shrinkage).")
    ] = "ledoit-wolf"
    kind: Annotated[
        str,
        typer.Option(
            help="correlation; for whole scans also 'partial correlation', covariance, tangent."
        ),
    ] = "correlation"
    negative: Annotated[
        str, typer.Option(help="Negative values: keep, or zero as the paper's authors did.")
    ] = "keep"
    silent_rois: Annotated[
        str,
        typer.Option(
            help="A subject with an ROI without signal: exclude, or keep-zero (its edges are 0)."
        ),
    ] = "exclude"
    min_timepoints: Annotated[
        int | None,
        typer.Option(help="Leave out shorter scans. Default: the window.", show_default=False),
    ] = None
    same_length: Annotated[
        bool, typer.Option("--same-length", help="Leave out scans of another length than most.")
    ] = False
    folds: Annotated[
        int | None, typer.Option(help="Fix this many folds by subject in the store.")
    ] = None
    fold: Annotated[
        int | None, typer.Option(help="With tangent: the fold kept out of the reference.")
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the folds.")] = 0
    force: Annotated[bool, typer.Option("--force", help="Write even if nothing has changed.")] = (
        False
    )

    @property
    def root(self) -> Path:
        """The folder of the stores."""
        return self.out or default_data_root()

    def preparation(
        self, tr: float | None = None, extraction: ExtractionSettings | None = None
    ) -> Preparation:
        """Return the settings that the options ask for, or raise a ValueError.

        Parameters
        ----------
        tr : float, optional
            The site's repetition time in seconds, for a window in seconds.
        extraction : ExtractionSettings, optional
            How time series are made of scans.
        """
        if self.fold is not None and self.folds is None:
            raise ValueError("--fold needs --folds")
        window, stride = self.window or DEFAULT_WINDOW, self.stride
        if self.window_seconds is not None:
            if self.window is not None or self.whole_scan:
                raise ValueError("--window-seconds goes with neither --window nor --whole-scan")
            window = round(self.window_seconds / tr) if tr else DEFAULT_WINDOW
        return Preparation(
            settings=ConnectomeSettings(
                self.kind,
                self.estimator,
                None if self.whole_scan else window,
                None if self.whole_scan else stride,
                self.negative,
                self.window_seconds,
            ),
            rule=QualityRule(self.silent_rois, self.min_timepoints, self.same_length),
            folds=None if self.folds is None else FoldPlan(self.folds, self.seed, self.fold),
            extraction=extraction,
        )


@dataclass(frozen=True)
class ParticipantOptions:
    """A hospital's name, and its table of participants."""

    participants: Annotated[
        Path, typer.Option(help="BIDS participants.tsv: participant_id, diagnosis, age, sex.")
    ]
    site: Annotated[str, typer.Option(help="Name of this hospital; its store gets this name.")]
    id_column: Annotated[
        str, typer.Option(help="Column of the participants table that names the participant.")
    ] = "participant_id"
    diagnosis_column: Annotated[str, typer.Option(help="Column of the participants table.")] = (
        "diagnosis"
    )
    diagnosis_word: Annotated[
        list[str] | None,
        typer.Option(
            help="What a word there means, such as ASD=autism, TD=control, ADHD=leave-out; "
            "give it once a word.",
            show_default=False,
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
        words = parse_diagnosis_words(self.diagnosis_word or [])
        return read_participants(
            self.participants,
            words,
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


def check_mismatch(mismatch: str, join: JoinedSite | None = None) -> None:
    """Refuse another word than error and drop; with a match, refuse what is unmatched if error."""
    if mismatch not in ("error", "drop"):
        raise ValueError(f"mismatch is {mismatch!r}; allowed are error, drop")
    if join is not None and mismatch == "error":
        join.refuse_mismatch()


def refuse_taken_apart(context: typer.Context, option: str) -> None:
    """Refuse files that a shell has made of a pattern."""
    if context.args:
        raise ValueError(
            f"{context.args[0]!r} is no option; put the pattern of {option} in quotation marks, so "
            "that the shell leaves it as it is"
        )


def take_options(command: Command) -> Command:
    """Give a command an option for each field of the objects that it takes.

    A parameter whose type is a dataclass becomes that dataclass's fields on the command line, and
    is put together again when the command is called.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    empty = inspect.Parameter.empty
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
            add(f.name, of_fields[f.name], empty if f.default is MISSING else f.default)

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        return command(**values)

    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return wrapped  # type: ignore[return-value]
