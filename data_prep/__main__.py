"""The command line: ``python -m data_prep abide | synthetic | check``."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from data_prep.connectome import ConnectomeSettings
from data_prep.preparation import FoldPlan, Preparation, build_site_store, unchanged_store
from data_prep.quality import Exclusion, QualityRule
from data_prep.site_store import (
    SiteStore,
    StoreError,
    assign_folds,
    check_compatible,
    default_data_root,
    file_checksum,
    find_site_stores,
    read_site_store,
)
from data_prep.sources import (
    ABIDE_PREPROCESSING,
    ABIDE_SITES,
    PHENOTYPIC,
    AbideSite,
    fetch_abide,
    find_abide,
    join_abide_site,
    read_abide_subject,
    read_phenotypic,
)
from data_prep.synthetic import GENERATOR_VERSION, NOTE, SITES, generate_site

app = typer.Typer(
    help="From scans to a site store of connectomes, at each hospital.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # errors stay one plain sentence
    pretty_exceptions_enable=False,
)
screen = Console()
errors = Console(stderr=True)

Command = TypeVar("Command", bound=Callable[..., Any])

OutOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder that gets one store a site. Default: $FEDBN_DATA, else ~/fedbn_data.",
        show_default=False,
    ),
]
WindowOption = Annotated[int, typer.Option(help="Length of the sliding window, in time points.")]
StrideOption = Annotated[int, typer.Option(help="Step between windows, in time points.")]
WholeScanOption = Annotated[
    bool, typer.Option("--whole-scan", help="One connectome a subject, no windows.")
]
EstimatorOption = Annotated[
    str, typer.Option(help="Covariance estimator: ledoit-wolf or pearson (no shrinkage).")
]
NegativeOption = Annotated[
    str, typer.Option(help="Negative values: keep, or zero as the paper's authors did.")
]
FoldsOption = Annotated[
    int | None, typer.Option(help="Fix this many folds by subject in the store.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Write even if nothing has changed.")]


def one_sentence_errors(command: Command) -> Command:
    """Turn the errors that a user can mend into one sentence and exit code 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (OSError, ValueError) as error:  # StoreError and SourceError are ValueErrors
            sentence = str(error)
            if isinstance(error, OSError) and error.filename and error.strerror:
                sentence = f"{error.filename}: {error.strerror}"
            errors.print(f"error: {sentence}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(1) from None

    return wrapped  # type: ignore[return-value]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a bad setting into a usage error, exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal; what it yields moves it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def parse_sites(text: str, known: Sequence[str]) -> list[str]:
    """Split a list of sites; refuse an unknown one, naming the choices."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(
            f"no site {', '.join(map(repr, unknown)) or 'named'}; choose from {', '.join(known)}",
            param_hint="'--sites'",
        )
    return list(dict.fromkeys(names))


@app.command()
@one_sentence_errors
def abide(
    out: OutOption = None,
    source: Annotated[
        Path | None,
        typer.Option(help="Local nilearn folder of ABIDE; nothing is downloaded then."),
    ] = None,
    sites: Annotated[str, typer.Option(help="Sites, separated by commas.")] = ",".join(ABIDE_SITES),
    window: WindowOption = 32,
    stride: StrideOption = 1,
    whole_scan: WholeScanOption = False,
    estimator: EstimatorOption = "ledoit-wolf",
    kind: Annotated[
        str,
        typer.Option(
            help="correlation; for whole scans also 'partial correlation', covariance, tangent."
        ),
    ] = "correlation",
    negative: NegativeOption = "keep",
    silent_rois: Annotated[
        str,
        typer.Option(
            help="A subject with an ROI without signal: exclude, or keep-zero (its edges are 0)."
        ),
    ] = "exclude",
    min_timepoints: Annotated[
        int | None,
        typer.Option(help="Leave out shorter scans. Default: the window.", show_default=False),
    ] = None,
    same_length: Annotated[
        bool,
        typer.Option("--same-length", help="Leave out scans of another length than most."),
    ] = False,
    mismatch: Annotated[
        str,
        typer.Option(
            help="Phenotypic rows without scan, scans without row: error, or drop and list them."
        ),
    ] = "error",
    folds: FoldsOption = None,
    fold: Annotated[
        int | None, typer.Option(help="With tangent: the fold kept out of the reference.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the folds.")] = 0,
    force: ForceOption = False,
) -> None:
    """Make site stores from ABIDE's ROI time series, downloaded or local."""
    names = parse_sites(sites, list(ABIDE_SITES))
    with usage_errors():
        if mismatch not in ("error", "drop"):
            raise ValueError(f"mismatch is {mismatch!r}; allowed are error, drop")
        preparation = Preparation(
            settings=ConnectomeSettings(
                kind,
                estimator,
                None if whole_scan else window,
                None if whole_scan else stride,
                negative,
            ),
            rule=QualityRule(silent_rois, min_timepoints, same_length),
            folds=_fold_plan(folds, fold, seed),
        )
    folder = fetch_abide(names) if source is None else find_abide(source)
    rows = read_phenotypic(folder)
    joins = [join_abide_site(folder, name, rows) for name in names]
    for join in joins:
        if mismatch == "error":
            join.refuse_mismatch()
    root = out or default_data_root()
    phenotypic = {PHENOTYPIC: file_checksum(folder / PHENOTYPIC)}
    report = SiteReport()
    for join in joins:
        _prepare_abide_site(root / join.site, join, preparation, phenotypic, report, force)
    report.show(root)


def _fold_plan(folds: int | None, fold: int | None, seed: int) -> FoldPlan | None:
    if folds is None:
        if fold is not None:
            raise ValueError("--fold needs --folds")
        return None
    return FoldPlan(folds, seed, fold)


def _prepare_abide_site(
    folder: Path,
    join: AbideSite,
    preparation: Preparation,
    phenotypic: dict[str, str],
    report: "SiteReport",
    force: bool,
) -> None:
    inputs: dict[str, object] = dict(phenotypic)
    inputs |= {row.scan.name: file_checksum(row.scan) for row in join.joined}
    inputs |= {"without_scan": list(join.without_scan), "without_row": list(join.without_row)}
    store = unchanged_store(folder, preparation.fingerprint(join.site, inputs))
    if store is not None and not force:
        report.add(store, expected=join.expected, join=join, unchanged=True)
        return
    subjects = []
    with progress_bar(f"{join.site}: reading", len(join.joined)) as step:
        for row in join.joined:
            subjects.append(read_abide_subject(row, join.site))
            step()
    with progress_bar(f"{join.site}: connectomes", len(subjects)) as step:
        store, _ = build_site_store(
            folder,
            site=join.site,
            subjects=subjects,
            preparation=preparation,
            inputs=inputs,
            description={
                "source": {
                    "name": "ABIDE I, Preprocessed Connectomes Project",
                    "SITE_ID": ABIDE_SITES[join.site],
                    "derivative": "rois_ho",
                    "layout": "nilearn.datasets.fetch_abide_pcp",
                },
                "preprocessing": ABIDE_PREPROCESSING,
                "synthetic": False,
                "join": {
                    "expected": join.expected,
                    "not_checked": [list(entry) for entry in join.not_checked],
                    "without_scan": list(join.without_scan),
                    "without_row": list(join.without_row),
                },
            },
            on_subject=step,
        )
    report.add(store, expected=join.expected, join=join)


@app.command()
@one_sentence_errors
def synthetic(
    out: OutOption = None,
    sites: Annotated[str, typer.Option(help="Sites, separated by commas.")] = ",".join(SITES),
    seed: Annotated[int, typer.Option(help="Seed of the cohort, and of folds if any.")] = 0,
    subjects: Annotated[
        int | None,
        typer.Option(help="Subjects at each site. Default: 40 to 52.", show_default=False),
    ] = None,
    no_shift: Annotated[
        bool, typer.Option("--no-shift", help="Give all sites the same scanner.")
    ] = False,
    window: WindowOption = 32,
    stride: StrideOption = 16,
    whole_scan: WholeScanOption = False,
    estimator: EstimatorOption = "ledoit-wolf",
    negative: NegativeOption = "keep",
    folds: FoldsOption = None,
    force: ForceOption = False,
) -> None:
    """Make site stores of a made-up cohort of four hospitals, labelled synthetic."""
    names = parse_sites(sites, list(SITES))
    with usage_errors():
        if subjects is not None and subjects < 1:
            raise ValueError(f"subjects is {subjects}; at least 1 is needed")
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must not be negative")
        preparation = Preparation(
            settings=ConnectomeSettings(
                "correlation",
                estimator,
                None if whole_scan else window,
                None if whole_scan else stride,
                negative,
            ),
            rule=QualityRule(),
            folds=_fold_plan(folds, None, seed),
        )
    root = out or default_data_root()
    report = SiteReport()
    for name in names:
        n_subjects = subjects or SITES[name].n_subjects
        inputs: dict[str, object] = {
            "generator": "data_prep.synthetic",
            "generator_version": GENERATOR_VERSION,
            "seed": seed,
            "n_subjects": n_subjects,
            "shift": not no_shift,
        }
        _refuse_to_replace_real_data(root / name)
        store = unchanged_store(root / name, preparation.fingerprint(name, inputs))
        if store is not None and not force:
            report.add(store, expected=n_subjects, unchanged=True)
            continue
        with progress_bar(f"{name}: connectomes", n_subjects) as step:
            store, _ = build_site_store(
                root / name,
                site=name,
                subjects=list(
                    generate_site(name, seed=seed, n_subjects=n_subjects, shift=not no_shift)
                ),
                preparation=preparation,
                inputs=inputs,
                description={
                    "Name": f"{name} (synthetic)",
                    "source": {"name": "synthetic cohort", "seed": seed, "shift": not no_shift},
                    "preprocessing": "synthetic",
                    "synthetic": True,
                    "synthetic_note": NOTE,
                },
                on_subject=step,
            )
        report.add(store, expected=n_subjects)
    report.show(root)


def _refuse_to_replace_real_data(folder: Path) -> None:
    try:
        store = read_site_store(folder)
    except StoreError:
        return
    if not store.is_synthetic:
        raise StoreError(
            f"{folder} holds real data of site {store.site!r}; synthetic data do not replace it: "
            "name another place with --out"
        )


class SiteReport:
    """What was found, kept and left out at each site; printed at the end."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, ...]] = []
        self._left_out: list[tuple[str, str, Exclusion]] = []
        self._unchanged: list[str] = []
        self._synthetic = False

    def add(
        self,
        store: SiteStore,
        *,
        expected: int,
        join: AbideSite | None = None,
        unchanged: bool = False,
    ) -> None:
        """Add one site."""
        counts = store.description["counts"]
        autism = int(store.labels.sum())
        self._rows.append(
            (
                store.site,
                str(expected),
                str(counts["found"]),
                str(counts["excluded"]),
                str(counts["kept"]),
                f"{autism} / {len(store.labels) - autism}",
                f"{len(store.connectomes):,}",
            )
        )
        left_out = [Exclusion(**entry) for entry in store.description["excluded"]]
        if join is not None:
            left_out += [
                Exclusion(who, "phenotypic row without scan", "dropped")
                for who in join.without_scan
            ]
            left_out += [
                Exclusion(scan, "scan without phenotypic row", "dropped")
                for scan in join.without_row
            ]
        self._left_out += [(store.site, e.participant_id, e) for e in left_out]
        if unchanged:
            self._unchanged.append(store.site)
        self._synthetic = self._synthetic or store.is_synthetic

    def show(self, root: Path) -> None:
        """Print every exclusion with its reason, then the counts."""
        if self._left_out:
            table = Table("site", "subject", "reason", "detail", title="Left out")
            for site, who, e in self._left_out:
                table.add_row(site, who, e.reason, e.detail)
            screen.print(table)
        table = Table(title="Site stores" + (" (SYNTHETIC)" if self._synthetic else ""))
        for name in ("site", "expected", "found", "left out", "kept"):
            table.add_column(name, justify="left" if name == "site" else "right")
        table.add_column("autism / control", justify="right")
        table.add_column("connectomes", justify="right")
        for row in self._rows:
            table.add_row(*row)
        screen.print(table)
        if self._synthetic:
            screen.print(NOTE)
        if self._unchanged:
            screen.print(
                f"Unchanged, same inputs and settings: {', '.join(self._unchanged)} "
                "(--force writes them again)."
            )
        screen.print(f"In {root}", soft_wrap=True, markup=False)


@app.command()
@one_sentence_errors
def check(
    folders: Annotated[list[Path], typer.Argument(help="Site stores, or folders of site stores.")],
    folds: Annotated[
        int, typer.Option(help="Folds that every site must allow; 0 to leave this out.")
    ] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the values and their checksum.")
    ] = False,
) -> None:
    """Validate site stores, and whether several fit together."""
    paths = [path for folder in folders for path in (find_site_stores(folder) or [folder])]
    stores = []
    with progress_bar("checking", len(paths)) as step:
        for path in paths:
            stores.append(read_site_store(path, verify=not quick))
            step()
    check_compatible(stores)
    for store in stores:
        if folds:
            ids = [p.participant_id for p in store.participants]
            assign_folds(ids, [p.diagnosis for p in store.participants], folds, 0, site=store.site)
    table = Table("site", "subjects", "autism / control", "connectomes", "made of")
    for store in stores:
        autism = int(store.labels.sum())
        settings = store.description["connectome"]
        length = f"window {settings['window']}, stride {settings['stride']}"
        table.add_row(
            store.site + (" (SYNTHETIC)" if store.is_synthetic else ""),
            str(len(store.labels)),
            f"{autism} / {len(store.labels) - autism}",
            f"{len(store.connectomes):,} x {store.n_edges}",
            f"{settings['kind']}, {settings['estimator']}, "
            + (length if settings["window"] else "whole scan"),
        )
    screen.print(table)
    fit = f"{len(stores)} stores are valid and fit together." if len(stores) > 1 else "Valid."
    screen.print(fit)


if __name__ == "__main__":
    app(prog_name="python -m data_prep")
