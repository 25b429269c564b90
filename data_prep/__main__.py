"""The command line: ``python -m data_prep abide | nifti | series | images | synthetic | check``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from data_prep.abide import (
    ABIDE_SITES,
    DEFAULT_SITES,
    Abide,
    fetch_abide,
    find_abide,
    repetition_times,
)
from data_prep.atlas import UNLISTED_RULES, read_atlas, read_rois
from data_prep.compatibility import check_compatible
from data_prep.errors import StoreError, TooSmallError
from data_prep.files import file_checksum
from data_prep.folds import assign_folds
from data_prep.heart import heart
from data_prep.images.command import check_image_stores, images, synthetic_images
from data_prep.images.store import is_image_store
from data_prep.images.synthetic import SCANNERS, Cohort
from data_prep.nifti import check_scan, nifti_source, one_repetition_time
from data_prep.options import (
    Mismatch,
    ParticipantOptions,
    ScanOptions,
    StoreOptions,
    check_mismatch,
    option,
    refuse_taken_apart,
    take_options,
)
from data_prep.paper.command import COMMANDS
from data_prep.participants import JoinedSite, join_participants, who_is_named
from data_prep.preparation import FoldPlan, SiteSource
from data_prep.report import SiteReport, show_stores
from data_prep.roi_files import read_subjects, refuse_foreign_series, rois_of
from data_prep.scans import Scan, find_files, one_a_participant, scan_of
from data_prep.site_store import TABLES_AND_ARRAY, find_site_stores, read_site_store
from data_prep.store_folder import refuse_foreign_folder
from data_prep.synthetic import GENERATOR_VERSION, NOTE, SITES, generate_site, hospital
from data_prep.terminal import (
    one_sentence_errors,
    progress_bar,
    screen,
    show_any_text,
    usage_errors,
)
from data_prep.timeseries import check_tr

app = typer.Typer(
    callback=show_any_text,
    help="From scans or images to a site store, at each hospital.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # errors stay one plain sentence
    pretty_exceptions_enable=False,
)

EXPLAINED = {"allow_extra_args": True}  # what the shell made of a pattern, to explain it

app.command(context_settings=EXPLAINED)(images)
for command in (*COMMANDS, heart):
    app.command()(command)

#: Folds that a site must allow, to be worth training on; as `check` asks for.
USUAL_FOLDS = 5

SitesOption = Annotated[
    str | None,
    typer.Option(
        help="Sites, separated by commas; of connectomes any name is a hospital of its own.",
        show_default="all four",
    ),
]


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


# ------------------------------------------------------------------------------------------ abide


@app.command()
@one_sentence_errors
@take_options
def abide(
    options: StoreOptions,
    source: Annotated[
        list[Path] | None,
        option("Local nilearn folder of ABIDE, once a folder; then nothing is downloaded."),
    ] = None,
    sites: Annotated[str, option("Sites, separated by commas; all: every one with a scan.")] = (
        ",".join(DEFAULT_SITES)
    ),
    keep_small: Annotated[
        bool, option("With all: keep sites that are too small to train on.", "--keep-small")
    ] = False,
    mismatch: Mismatch = "error",
) -> None:
    """Make site stores from ABIDE's ROI time series, downloaded or local."""
    every = sites.strip().lower() == "all"
    for name, abide_site in ABIDE_SITES.items():
        sites = ",".join(name if s.strip() == abide_site else s for s in sites.split(","))
    names = list(ABIDE_SITES) if every else parse_sites(sites, list(ABIDE_SITES))
    with usage_errors():
        check_mismatch(mismatch)
        options.preparation()
    data = Abide(tuple(map(find_abide, source)) if source else (fetch_abide(names),))
    joins = [data.join(name) for name in (data.sites() if every else names)]
    for join in joins:
        check_mismatch(mismatch, join)
    report = SiteReport()
    for join in joins:
        try:
            tr = _one_time(join, options)
            n_folds = None if not every or keep_small else options.folds or USUAL_FOLDS
            shown = replace(join, left_out=())  # by ABIDE's quality check: hundreds
            options.make(data.source(join), options.preparation(tr), report, shown, n_folds=n_folds)
        except TooSmallError as error:
            if not every:
                raise
            report.leave_out(str(error))
    report.show(options.root)


def _one_time(join: JoinedSite, options: StoreOptions) -> float | None:
    times = repetition_times(join)
    if options.window_seconds and len(times) > 1:
        raise TooSmallError(
            f"site {join.site!r}: its scans have the repetition times "
            f"{', '.join(f'{tr:g}' for tr in times)} s, so no window is the same time in all"
        )
    return times[0] if times else None


# ----------------------------------------------------------------------------------------- series


@app.command(context_settings=EXPLAINED)
@one_sentence_errors
@take_options
def series(
    context: typer.Context,
    input: Annotated[
        str,
        option(
            "Pattern of the files, in quotation marks: 'DIR/*.1D'; .1D, csv, tsv or npy, one a "
            "participant, with the id in its name."
        ),
    ],
    people: ParticipantOptions,
    options: StoreOptions,
    rois: Annotated[
        Path | None,
        option(
            "Table of the regions' ids and names; it fixes the ROI list. Default: the first file's "
            "header."
        ),
    ] = None,
    atlas: Annotated[
        str, option("Name of the atlas, the same at every site.")
    ] = "atlas without a name",
    preprocessing: Annotated[
        str, option("How the series were made of scans, the same at every site.")
    ] = "not stated",
    tr: Annotated[float | None, option("Repetition time in seconds.")] = None,
) -> None:
    """Make the site store of a hospital from ROI time series, of any atlas."""
    with usage_errors():
        people.check()
        refuse_taken_apart(context, "--input")
        check_tr(tr)
        if options.window_seconds and tr is None:
            raise ValueError("--window-seconds needs --tr")
        preparation = options.preparation(tr)
    rows, left_out = people.read()
    ids = [*(person.participant_id for person in rows), *(who for who, _ in left_out)]
    files = find_files(input, "--input", "*.1D")
    scans = [scan_of(file) or Scan(who_is_named(file, ids) or file.name, file) for file in files]
    join = join_participants(people.site, rows, left_out, one_a_participant(scans, "--input"))
    check_mismatch(people.mismatch, join)
    table = read_rois(rois) if rois else rois_of(join.joined[0][1].file)
    source = SiteSource(
        site=people.site,
        subjects=read_subjects(join, table),
        n_subjects=len(join.joined),
        inputs={
            people.participants.name: file_checksum(people.participants),
            "rois": [list(roi) for roi in table],
            "stated": [atlas, preprocessing, tr],
            **join.inputs(),
        },
        description={
            "source": {"name": "ROI time series", **people.describe()},
            "preprocessing": preprocessing,
            "synthetic": False,
            **({"repetition_time_s": tr} if tr else {}),
            "join": join.describe(),
        },
        atlas=f"{atlas} ({len(table)} ROIs)",
        rois=table,
    )
    report = SiteReport()
    options.make(source, preparation, report, join)
    report.show(options.root)


# ------------------------------------------------------------------------------------------ nifti


@app.command(context_settings=EXPLAINED)
@one_sentence_errors
@take_options
def nifti(
    context: typer.Context,
    atlas: Annotated[Path, option("NIfTI label map: at each voxel the id of its region.")],
    labels: Annotated[Path, option("Table of the regions' ids and names; it fixes the ROI list.")],
    people: ParticipantOptions,
    of_scans: ScanOptions,
    options: StoreOptions,
    timeseries_out: Annotated[
        Path | None, option("Also write the ROI time series here, a .1D file a subject.")
    ] = None,
    label_offset: Annotated[
        int, option("Added to each id of the labels table (1 if it counts from 0).")
    ] = 0,
    unlisted_labels: Annotated[
        str, option("Atlas labels that the table does not name: error, or drop.")
    ] = "error",
) -> None:
    """Make the site store of a hospital from its NIfTI scans and an atlas."""
    with usage_errors():
        people.check()
        refuse_taken_apart(context, "--images")
        if unlisted_labels not in UNLISTED_RULES:
            raise ValueError(
                f"unlisted labels is {unlisted_labels!r}; allowed are {', '.join(UNLISTED_RULES)}"
            )
        extraction = of_scans.extraction()
        options.preparation(of_scans.tr, extraction)
    found = of_scans.find(extraction)
    join = join_participants(people.site, *people.read(), found)
    check_mismatch(people.mismatch, join)
    regions = read_atlas(atlas, labels, label_offset=label_offset, unlisted=unlisted_labels)
    # Now, not after hours of reading scans.
    refuse_foreign_folder(options.root / people.site, TABLES_AND_ARRAY)
    if timeseries_out is not None:
        refuse_foreign_series(timeseries_out)
    scans = []
    with progress_bar(f"{people.site}: checking", len(join.joined)) as step:
        for person, scan in join.joined:
            scans.append(check_scan(people.site, person, scan, extraction, of_scans.tr))
            step()
    seconds = one_repetition_time(people.site, scans)
    preparation = options.preparation(seconds, extraction)
    about = {**of_scans.describe(), **people.describe()}
    participants = {people.participants.name: file_checksum(people.participants)}
    source = nifti_source(join, scans, regions, preparation, seconds, about, participants)
    report = SiteReport()
    store = options.make(source, preparation, report, join, series_out=timeseries_out)
    report.show(options.root)
    if censored := store.description.get("censored_volumes", {}):
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


# ---------------------------------------------------------------------------- synthetic and check


@dataclass(frozen=True)
class SyntheticOptions(StoreOptions):
    """The same, with fewer windows."""

    stride: Annotated[int, option("Step between windows, in volumes.")] = 16
    seed: Annotated[int, option("Seed of the cohort, and of folds if any.")] = 0


@app.command()
@one_sentence_errors
@take_options
def synthetic(
    context: typer.Context,
    options: SyntheticOptions,
    sites: SitesOption = None,
    subjects: Annotated[int | None, option("Subjects at each site. Default: 40 to 52.")] = None,
    no_shift: Annotated[bool, option("Give all sites the same scanner.", "--no-shift")] = False,
    images: Annotated[
        bool, option("Make images with masks and classes, no connectomes.", "--images")
    ] = False,
    dim: Annotated[int, option("With --images: 2 or 3.")] = 2,
) -> None:
    """Make site stores of a made-up cohort of four hospitals or others, labelled synthetic."""
    known = list(SCANNERS if images else SITES)
    others = [] if images or not sites else [name.strip() for name in sites.split(",")]
    names = parse_sites(sites or ",".join(known), [*known, *others])
    seed, shift = options.seed, not no_shift
    with usage_errors():
        n_of = {name: subjects or hospital(name).n_subjects for name in names}
        if subjects is not None and subjects < 1:
            raise ValueError(f"subjects is {subjects}; at least 1 is needed")
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must not be negative")
        if options.window_seconds:
            raise ValueError("made-up scans have no repetition time, so no --window-seconds")
        cohort = Cohort(dim, seed, subjects, shift)
        preparation = options.preparation()
    if images:
        synthetic_images(context, options.root, names, cohort, force=options.force)
        return
    report = SiteReport()
    for name in names:
        _refuse_to_replace_real_data(options.root / name)
        n_subjects = n_of[name]
        source = SiteSource(
            site=name,
            subjects=generate_site(name, seed=seed, n_subjects=n_subjects, shift=shift),
            n_subjects=n_subjects,
            inputs={
                "generator": "data_prep.synthetic",
                "generator_version": GENERATOR_VERSION,
                "seed": seed,
                "n_subjects": n_subjects,
                "shift": shift,
            },
            description={
                "Name": f"{name} (synthetic)",
                "source": {"name": "synthetic cohort", "seed": seed, "shift": shift},
                "preprocessing": "synthetic",
                "synthetic": True,
                "synthetic_note": NOTE,
            },
        )
        options.make(source, preparation, report)
    report.show(options.root)


def _refuse_to_replace_real_data(folder: Path) -> None:
    try:
        store = read_site_store(folder)
    except StoreError:
        return
    if not store.synthetic:
        raise StoreError(
            f"{folder} holds real data of site {store.site!r}; synthetic data do not replace it: "
            "name another place with --out"
        )


@app.command()
@one_sentence_errors
def check(
    folders: Annotated[list[Path], typer.Argument(help="Site stores, or folders of site stores.")],
    folds: Annotated[
        int, option("Folds that every site must allow; 0 to leave this out.")
    ] = USUAL_FOLDS,
    quick: Annotated[bool, option("Leave out the values and their checksum.", "--quick")] = False,
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
    show_stores(stores)


if __name__ == "__main__":
    app(prog_name="python -m data_prep")
