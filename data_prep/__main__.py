"""The command line: ``python -m data_prep abide | nifti | images | synthetic | check``."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from data_prep.atlas import UNLISTED_RULES, Atlas, read_atlas
from data_prep.connectome import ConnectomeSettings
from data_prep.files import atomic_folder, file_checksum
from data_prep.images.command import check_image_stores, images, synthetic_images
from data_prep.images.store import is_image_store
from data_prep.images.synthetic import SCANNERS, Cohort
from data_prep.nifti import (
    DEFAULT_SPACE,
    CheckedScan,
    NiftiSite,
    Scan,
    check_scan,
    find_fmriprep_scans,
    find_scans,
    fmriprep_version,
    join_participants,
    one_repetition_time,
    parse_diagnosis_words,
    read_nifti_subject,
    read_participant_table,
)
from data_prep.preparation import FoldPlan, Preparation, build_site_store, unchanged_store
from data_prep.quality import Exclusion, QualityRule
from data_prep.roi_files import (
    describe_series,
    holds_series,
    refuse_foreign_series,
    write_roi_file,
)
from data_prep.site_store import (
    TABLES_AND_ARRAY,
    SiteStore,
    StoreError,
    assign_folds,
    check_compatible,
    default_data_root,
    find_site_stores,
    read_site_store,
)
from data_prep.sources import (
    ABIDE_PREPROCESSING,
    ABIDE_SITES,
    PHENOTYPIC,
    AbideSite,
    Subject,
    fetch_abide,
    find_abide,
    join_abide_site,
    read_abide_subject,
    read_phenotypic,
)
from data_prep.store_folder import refuse_foreign_folder
from data_prep.synthetic import GENERATOR_VERSION, NOTE, SITES, generate_site
from data_prep.terminal import (
    one_sentence_errors,
    progress_bar,
    screen,
    show_any_text,
    usage_errors,
)
from data_prep.timeseries import (
    CONFOUND_PRESETS,
    DEFAULT_CONFOUNDS,
    STANDARDIZATIONS,
    TR_RANGE,
    ExtractionSettings,
    parse_confounds,
)

app = typer.Typer(
    callback=show_any_text,
    help="From scans or images to a site store, at each hospital.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # errors stay one plain sentence
    pretty_exceptions_enable=False,
)

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
KindOption = Annotated[
    str,
    typer.Option(
        help="correlation; for whole scans also 'partial correlation', covariance, tangent."
    ),
]
SilentRoisOption = Annotated[
    str,
    typer.Option(
        help="A subject with an ROI without signal: exclude, or keep-zero (its edges are 0)."
    ),
]
MinTimepointsOption = Annotated[
    int | None,
    typer.Option(help="Leave out shorter scans. Default: the window.", show_default=False),
]
SameLengthOption = Annotated[
    bool, typer.Option("--same-length", help="Leave out scans of another length than most.")
]
FoldOption = Annotated[
    int | None, typer.Option(help="With tangent: the fold kept out of the reference.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the folds.")]
FoldsOption = Annotated[
    int | None, typer.Option(help="Fix this many folds by subject in the store.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Write even if nothing has changed.")]


app.command(context_settings={"allow_extra_args": True})(images)


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
    kind: KindOption = "correlation",
    negative: NegativeOption = "keep",
    silent_rois: SilentRoisOption = "exclude",
    min_timepoints: MinTimepointsOption = None,
    same_length: SameLengthOption = False,
    mismatch: Annotated[
        str,
        typer.Option(
            help="Phenotypic rows without scan, scans without row: error, or drop and list them."
        ),
    ] = "error",
    folds: FoldsOption = None,
    fold: FoldOption = None,
    seed: SeedOption = 0,
    force: ForceOption = False,
) -> None:
    """Make site stores from ABIDE's ROI time series, downloaded or local."""
    names = parse_sites(sites, list(ABIDE_SITES))
    with usage_errors():
        _refuse_other_mismatch(mismatch)
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


def _refuse_other_mismatch(mismatch: str) -> None:
    if mismatch not in ("error", "drop"):
        raise ValueError(f"mismatch is {mismatch!r}; allowed are error, drop")


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


@app.command(context_settings={"allow_extra_args": True})  # to explain them below
@one_sentence_errors
def nifti(
    context: typer.Context,
    atlas: Annotated[
        Path, typer.Option(help="NIfTI label map: at each voxel the id of its region.")
    ],
    labels: Annotated[
        Path, typer.Option(help="Table of the regions' ids and names; it fixes the ROI list.")
    ],
    participants: Annotated[
        Path, typer.Option(help="BIDS participants.tsv: participant_id, diagnosis, age, sex.")
    ],
    site: Annotated[str, typer.Option(help="Name of this hospital; its store gets this name.")],
    images: Annotated[
        str | None,
        typer.Option(
            help="Pattern of the scans, in quotation marks: 'sub-*/func/*_bold.nii.gz'. "
            "With --fmriprep: inside that folder.",
            show_default=False,
        ),
    ] = None,
    fmriprep: Annotated[
        Path | None,
        typer.Option(help="fMRIPrep's folder of derivatives, instead.", show_default=False),
    ] = None,
    out: OutOption = None,
    timeseries_out: Annotated[
        Path | None,
        typer.Option(help="Also write the ROI time series here, a .1D file a subject."),
    ] = None,
    session: Annotated[str | None, typer.Option(help="Take ses-<this> only.")] = None,
    task: Annotated[str | None, typer.Option(help="Take task-<this> only.")] = None,
    run: Annotated[str | None, typer.Option(help="Take run-<this> only.")] = None,
    space: Annotated[
        str, typer.Option(help="With --fmriprep: the template space, which must be the atlas's.")
    ] = DEFAULT_SPACE,
    confounds: Annotated[
        str | None,
        typer.Option(
            help=f"With --fmriprep: none, {', '.join(CONFOUND_PRESETS)}, or components of "
            f"nilearn's load_confounds. Default: {DEFAULT_CONFOUNDS}.",
            show_default=False,
        ),
    ] = None,
    tr: Annotated[
        float | None,
        typer.Option(help="Repetition time in seconds, instead of header and JSON sidecar."),
    ] = None,
    high_pass: Annotated[float, typer.Option(help="Lower cut-off in Hz; 0 for none.")] = 0.01,
    low_pass: Annotated[float, typer.Option(help="Upper cut-off in Hz; 0 for none.")] = 0.1,
    no_detrend: Annotated[
        bool, typer.Option("--no-detrend", help="Leave linear trends in.")
    ] = False,
    standardize: Annotated[
        str, typer.Option(help=f"Scale of the series: {', '.join(STANDARDIZATIONS)}.")
    ] = "zscore",
    label_offset: Annotated[
        int, typer.Option(help="Added to each id of the labels table (1 if it counts from 0).")
    ] = 0,
    unlisted_labels: Annotated[
        str, typer.Option(help="Atlas labels that the table does not name: error, or drop.")
    ] = "error",
    diagnosis_column: Annotated[
        str, typer.Option(help="Column of the participants table.")
    ] = "diagnosis",
    diagnosis_word: Annotated[
        list[str] | None,
        typer.Option(
            help="What a word there means, such as ASD=autism, TD=control, ADHD=leave-out; "
            "give it once a word.",
            show_default=False,
        ),
    ] = None,
    window: WindowOption = 32,
    stride: StrideOption = 1,
    whole_scan: WholeScanOption = False,
    estimator: EstimatorOption = "ledoit-wolf",
    kind: KindOption = "correlation",
    negative: NegativeOption = "keep",
    silent_rois: SilentRoisOption = "exclude",
    min_timepoints: MinTimepointsOption = None,
    same_length: SameLengthOption = False,
    mismatch: Annotated[
        str,
        typer.Option(
            help="Participants without scan, scans without participant: error, or drop and list."
        ),
    ] = "error",
    folds: FoldsOption = None,
    fold: FoldOption = None,
    seed: SeedOption = 0,
    force: ForceOption = False,
) -> None:
    """Make the site store of a hospital from its NIfTI scans and an atlas."""
    with usage_errors():
        _refuse_other_mismatch(mismatch)
        if context.args:
            raise ValueError(
                f"{context.args[0]!r} is no option; put the pattern of --images in quotation "
                "marks, so that the shell leaves it as it is"
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", site):
            raise ValueError(f"site is {site!r}; use letters, digits, '-', '_' and '.'")
        if tr is not None and not TR_RANGE[0] <= tr <= TR_RANGE[1]:
            raise ValueError(f"tr is {tr:g} s, which no functional scan has; it is in seconds")
        if unlisted_labels not in UNLISTED_RULES:
            raise ValueError(
                f"unlisted labels is {unlisted_labels!r}; allowed are {', '.join(UNLISTED_RULES)}"
            )
        words = parse_diagnosis_words(diagnosis_word or [])
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
            extraction=ExtractionSettings(
                high_pass or None,
                low_pass or None,
                not no_detrend,
                standardize,
                _confounds(confounds, images, fmriprep),
            ),
        )
    scans = _nifti_scans(images, fmriprep, space, preparation, ses=session, task=task, run=run)
    rows, left_out = read_participant_table(participants, words, diagnosis_column)
    join = join_participants(site, rows, left_out, scans)
    if mismatch == "error":
        join.refuse_mismatch()
    regions = read_atlas(atlas, labels, label_offset=label_offset, unlisted=unlisted_labels)
    source: dict[str, object] = {"name": "NIfTI scans"}
    if fmriprep is not None:
        source = {
            "name": "fMRIPrep derivatives",
            "space": space,
            "generated_by": fmriprep_version(fmriprep),
        }
    source |= {
        "tr_set_by_user": tr is not None,
        "selection": {"session": session, "task": task, "run": run},
        "diagnosis_column": diagnosis_column,
        "diagnosis_words": words,
    }
    report = SiteReport()
    root = out or default_data_root()
    store = _prepare_nifti_site(
        root / site,
        join,
        regions,
        preparation,
        inputs={participants.name: file_checksum(participants)},
        source=source,
        tr=tr,
        series_out=timeseries_out,
        report=report,
        force=force,
    )
    report.show(root)
    censored = store.description.get("censored_volumes", {})
    if censored:
        screen.print(
            f"Censored by the confounds: {sum(censored.values())} volume(s) of {len(censored)} "
            f"scan(s), at most {max(censored.values())} of one."
        )
    if regions.without_voxel:
        named = ", ".join(f"{roi_id} ({name})" for roi_id, name in regions.without_voxel)
        screen.print(
            f"{len(regions.without_voxel)} row(s) of {labels.name} label no voxel of the atlas and "
            f"are no ROI: {named}",
            soft_wrap=True,
            markup=False,
        )


def _confounds(
    text: str | None, images: str | None, fmriprep: Path | None
) -> dict[str, Any] | None:
    """Return the confound strategy, and refuse options that do not go together."""
    if fmriprep is None:
        if images is None:
            raise ValueError("name the scans with --images, or fMRIPrep's folder with --fmriprep")
        if text not in (None, "none"):
            raise ValueError("--confounds needs --fmriprep: only its tables of confounds are read")
        return None
    return None if text == "none" else parse_confounds(text or DEFAULT_CONFOUNDS)


def _nifti_scans(
    images: str | None,
    fmriprep: Path | None,
    space: str,
    preparation: Preparation,
    **wanted: str | None,
) -> list[Scan]:
    if fmriprep is None:
        assert images is not None
        return find_scans(images, wanted)
    assert preparation.extraction is not None
    confounds = preparation.extraction.confounds or {}
    return find_fmriprep_scans(
        fmriprep,
        wanted,
        space=space,
        pattern=images,
        smoothed_by_aroma=confounds.get("ica_aroma") == "full",
    )


def _prepare_nifti_site(
    folder: Path,
    join: NiftiSite,
    atlas: Atlas,
    preparation: Preparation,
    *,
    inputs: dict[str, object],
    source: dict[str, object],
    tr: float | None,
    series_out: Path | None,
    report: "SiteReport",
    force: bool,
) -> SiteStore:
    assert preparation.extraction is not None
    site = join.site
    refuse_foreign_folder(folder, TABLES_AND_ARRAY)  # now, not after hours of reading scans
    if series_out is not None:
        refuse_foreign_series(series_out)
    scans: list[CheckedScan] = []
    with progress_bar(f"{site}: checking", len(join.joined)) as step:
        for row, scan in join.joined:
            scans.append(check_scan(site, row, scan, preparation.extraction, tr))
            step()
    seconds = one_repetition_time(site, scans)
    for checked in scans:
        inputs |= checked.inputs
    inputs |= {
        **dict([atlas.image_file, atlas.labels_file]),
        "label_offset": atlas.label_offset,
        "unlisted_labels": list(atlas.unlisted),
        "repetition_time": seconds,
        "left_out": [list(entry) for entry in join.left_out],
        "without_scan": list(join.without_scan),
        "without_row": list(join.without_row),
    }
    fingerprint = preparation.fingerprint(site, inputs)
    store = unchanged_store(folder, fingerprint)
    complete = series_out is None or holds_series(series_out, fingerprint)
    if store is not None and complete and not force:
        report.add(store, expected=join.expected, join=join, unchanged=True)
        return store
    subjects: list[Subject] = []
    unread: list[Exclusion] = []
    censored: dict[str, int] = {}
    shortest = preparation.rule.shortest(preparation.settings.window)
    writing = atomic_folder(series_out, private=True) if series_out else nullcontext()
    with writing as series_folder:
        with progress_bar(f"{site}: time series", len(scans)) as step:
            for checked in scans:  # one scan in memory at a time
                found = read_nifti_subject(checked, site, atlas, preparation.extraction, shortest)
                if isinstance(found, Exclusion):
                    unread.append(found)
                else:
                    subjects.append(found)
                    if len(found.series) < checked.n_volumes:
                        censored[found.participant_id] = checked.n_volumes - len(found.series)
                    if series_folder is not None:
                        write_roi_file(
                            series_folder, found.participant_id, found.series, atlas.rois
                        )
                step()
        made_of = ", ".join(str(source[key]) for key in ("name", "space") if key in source)
        description = {
            "source": source,
            "preprocessing": f"{preparation.extraction.title} ({made_of})",
            "synthetic": False,
            "atlas_files": atlas.describe(),
            "repetition_time_s": seconds,
            **({"censored_volumes": censored} if censored else {}),
            "join": {
                "expected": join.expected,
                "left_out": [list(entry) for entry in join.left_out],
                "without_scan": list(join.without_scan),
                "without_row": list(join.without_row),
            },
        }
        with progress_bar(f"{site}: connectomes", len(subjects)) as step:
            store, _ = build_site_store(
                folder,
                site=site,
                subjects=subjects,
                preparation=preparation,
                inputs=inputs,
                description=description,
                atlas=atlas.title,
                rois=atlas.rois,
                unread=unread,
                on_subject=step,
            )
        if series_folder is not None:
            names = (*description, "extraction", "absent_rois", "inputs", "versions", "fingerprint")
            describe_series(
                series_folder,
                atlas.rois,
                {
                    "Name": f"{site}: ROI time series",
                    "atlas": atlas.title,
                    **{key: store.description[key] for key in names if key in store.description},
                },
            )
    report.add(store, expected=join.expected, join=join)
    return store


@app.command()
@one_sentence_errors
def synthetic(
    context: typer.Context,
    out: OutOption = None,
    sites: Annotated[
        str | None, typer.Option(help="Sites, separated by commas.", show_default="all four")
    ] = None,
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
    images: Annotated[
        bool, typer.Option("--images", help="Make images with masks and classes, no connectomes.")
    ] = False,
    dim: Annotated[int, typer.Option(help="With --images: 2 or 3.")] = 2,
    force: ForceOption = False,
) -> None:
    """Make site stores of a made-up cohort of four hospitals, labelled synthetic."""
    known = list(SCANNERS if images else SITES)
    names = parse_sites(sites or ",".join(known), known)
    with usage_errors():
        if subjects is not None and subjects < 1:
            raise ValueError(f"subjects is {subjects}; at least 1 is needed")
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must not be negative")
        cohort = Cohort(dim, seed, subjects, not no_shift)
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
    if images:
        synthetic_images(context, root, names, cohort, force=force)
        return
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
        join: AbideSite | NiftiSite | None = None,
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
            left_out += [Exclusion(*entry) for entry in join.dropped]
        self._left_out += [(store.site, e.participant_id, e) for e in left_out]
        if unchanged:
            self._unchanged.append(store.site)
        self._synthetic = self._synthetic or store.is_synthetic

    def show(self, root: Path) -> None:
        """Print every exclusion with its reason, then the counts."""
        if self._left_out:
            table = Table("site", "subject", "reason", "detail", title="Left out")
            for site, who, e in self._left_out:
                table.add_row(*map(escape, (site, who, e.reason, e.detail)))  # may hold brackets
            screen.print(table)
        table = Table(title="Site stores" + (" (SYNTHETIC)" if self._synthetic else ""))
        for name in ("site", "expected", "found", "left out", "kept"):
            table.add_column(name, justify="left" if name == "site" else "right")
        table.add_column("autism / control", justify="right")
        table.add_column("connectomes", justify="right")
        for row in self._rows:
            table.add_row(*map(escape, row))
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
    with usage_errors():
        if folds:
            FoldPlan(folds, 0)
    paths = [path for folder in folders for path in (find_site_stores(folder) or [folder])]
    if any(map(is_image_store, paths)):
        check_image_stores(paths, folds, quick=quick)
        return
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
            escape(store.site) + (" (SYNTHETIC)" if store.is_synthetic else ""),
            str(len(store.labels)),
            f"{autism} / {len(store.labels) - autism}",
            f"{len(store.connectomes):,} x {store.n_edges}",
            escape(f"{settings['kind']}, {settings['estimator']}, ")
            + (length if settings["window"] else "whole scan"),
        )
    screen.print(table)
    fit = f"{len(stores)} stores are valid and fit together." if len(stores) > 1 else "Valid."
    screen.print(fit)


if __name__ == "__main__":
    app(prog_name="python -m data_prep")
