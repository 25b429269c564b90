"""The command line: ``python -m data_prep abide | nifti | series | images | ...``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from data_prep.abide import (
    ABIDE_PREPROCESSING,
    ABIDE_SITES,
    DEFAULT_SITES,
    Abide,
    fetch_abide,
    find_abide,
    repetition_time,
)
from data_prep.atlas import UNLISTED_RULES, read_atlas, read_rois
from data_prep.compatibility import check_compatible
from data_prep.errors import StoreError, TooSmallError
from data_prep.files import file_checksum
from data_prep.folds import assign_folds
from data_prep.images.command import check_image_stores, images, synthetic_images
from data_prep.images.store import is_image_store
from data_prep.images.synthetic import SCANNERS, Cohort
from data_prep.nifti import (
    DEFAULT_SPACE,
    check_scan,
    find_fmriprep_scans,
    find_scans,
    fmriprep_version,
    one_repetition_time,
    read_nifti_subject,
)
from data_prep.options import (
    Mismatch,
    ParticipantOptions,
    StoreOptions,
    check_mismatch,
    refuse_taken_apart,
    take_options,
)
from data_prep.paper.command import COMMANDS
from data_prep.participants import JoinedSite, Subject, join_participants, who_is_named
from data_prep.preparation import FoldPlan, make_site_store
from data_prep.quality import Exclusion
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
from data_prep.timeseries import (
    CONFOUND_PRESETS,
    DEFAULT_CONFOUNDS,
    STANDARDIZATIONS,
    ExtractionSettings,
    check_tr,
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

app.command(context_settings={"allow_extra_args": True})(images)
for paper_command in COMMANDS:
    app.command()(paper_command)

#: Folds that a site must allow, to be worth training on; as `check` asks for.
USUAL_FOLDS = 5


def parse_sites(
    text: str, known: Sequence[str], aliases: dict[str, str] | None = None
) -> list[str]:
    """Split a list of sites; refuse an unknown one, naming the choices."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    names = [(aliases or {}).get(name, name) for name in names]
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
        typer.Option(
            help="Local nilearn folder of ABIDE, once a folder; nothing is downloaded then.",
            show_default=False,
        ),
    ] = None,
    sites: Annotated[
        str, typer.Option(help="Sites, separated by commas; all: every site with a scan.")
    ] = ",".join(DEFAULT_SITES),
    keep_small: Annotated[
        bool,
        typer.Option("--keep-small", help="With all: keep sites that are too small to train on."),
    ] = False,
    mismatch: Mismatch = "error",
) -> None:
    """Make site stores from ABIDE's ROI time series, downloaded or local."""
    every = sites.strip().lower() == "all"
    aliases = {abide_site: site for site, abide_site in ABIDE_SITES.items()}
    names = list(ABIDE_SITES) if every else parse_sites(sites, list(ABIDE_SITES), aliases)
    with usage_errors():
        check_mismatch(mismatch)
        options.preparation()
    folders = [find_abide(folder) for folder in source] if source else [fetch_abide(names)]
    data = Abide(tuple(folders))
    names = data.sites() if every else names
    joins = [data.join(name) for name in names]
    for join in joins:
        check_mismatch(mismatch, join)
    n_folds = None if not every or keep_small else options.folds or USUAL_FOLDS
    report = SiteReport()
    for join in joins:
        try:
            _make_abide_store(join, options, data.inputs(), report, n_folds)
        except TooSmallError as error:
            if not every:
                raise
            report.leave_out(str(error))
    report.show(options.root)


def _make_abide_store(
    join: JoinedSite,
    options: StoreOptions,
    inputs: dict[str, str],
    report: SiteReport,
    n_folds: int | None,
) -> None:
    times = sorted({repetition_time(scan.file) for _, scan in join.joined})
    if options.window_seconds and len(times) > 1:
        raise TooSmallError(
            f"site {join.site!r}: its scans have the repetition times "
            f"{', '.join(f'{tr:g}' for tr in times)} s, so no window is the same time in all"
        )
    preparation = options.preparation(times[0] if times else None)
    store, unchanged = make_site_store(
        options.root / join.site,
        site=join.site,
        preparation=preparation,
        subjects=read_subjects(join),
        n_subjects=len(join.joined),
        inputs={
            **inputs,
            **{scan.file.name: file_checksum(scan.file) for _, scan in join.joined},
            "without_scan": list(join.without_scan),
            "without_row": list(join.without_row),
        },
        description={
            "source": {
                "name": "ABIDE I, Preprocessed Connectomes Project",
                "SITE_ID": ABIDE_SITES[join.site],
                "derivative": "rois_ho",
                "layout": "nilearn.datasets.fetch_abide_pcp",
            },
            "preprocessing": ABIDE_PREPROCESSING,
            "synthetic": False,
            **_repetition_times(times),
            "join": join.describe(),
        },
        n_folds=n_folds,
        force=options.force,
        bar=progress_bar,
    )
    dropped = [entry for entry in join.dropped if entry[2] == "dropped"]
    report.add(store, unchanged, expected=join.expected, dropped=dropped)


def _repetition_times(times: Sequence[float]) -> dict[str, Any]:
    if len(times) > 1:
        return {"repetition_times_s": list(times)}
    return {"repetition_time_s": times[0]} if times else {}


# ----------------------------------------------------------------------------------------- series


@app.command(context_settings={"allow_extra_args": True})  # to explain them below
@one_sentence_errors
@take_options
def series(
    context: typer.Context,
    input: Annotated[
        str,
        typer.Option(
            help="Pattern of the files, in quotation marks: 'DIR/*.1D'; .1D, csv, tsv or npy, one "
            "a participant, with the id in its name."
        ),
    ],
    people: ParticipantOptions,
    options: StoreOptions,
    rois: Annotated[
        Path | None,
        typer.Option(
            help="Table of the regions' ids and names; it fixes the ROI list. Default: the header "
            "of the first file.",
            show_default=False,
        ),
    ] = None,
    atlas: Annotated[
        str | None,
        typer.Option(help="Name of the atlas, the same at every site.", show_default=False),
    ] = None,
    preprocessing: Annotated[
        str,
        typer.Option(help="How the series were made of scans, the same at every site."),
    ] = "not stated",
    tr: Annotated[
        float | None, typer.Option(help="Repetition time in seconds.", show_default=False)
    ] = None,
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
    scans = one_a_participant(scans, "--input")
    join = join_participants(people.site, rows, left_out, scans)
    check_mismatch(people.mismatch, join)
    table = read_rois(rois) if rois else rois_of(join.joined[0][1].file)
    inputs: dict[str, object] = {
        people.participants.name: file_checksum(people.participants),
        **({rois.name: file_checksum(rois)} if rois else {}),
        **{scan.key: file_checksum(scan.file) for _, scan in join.joined},
        "rois": [list(roi) for roi in table],
        "stated": [atlas, preprocessing, tr],
        **join.describe(),
    }
    store, unchanged = make_site_store(
        options.root / people.site,
        site=people.site,
        preparation=preparation,
        subjects=read_subjects(join, table),
        n_subjects=len(join.joined),
        inputs=inputs,
        description={
            "source": {"name": "ROI time series", **people.describe()},
            "preprocessing": preprocessing,
            "synthetic": False,
            **_repetition_times([tr] if tr else []),
            "join": join.describe(),
        },
        atlas=f"{atlas or 'atlas without a name'} ({len(table)} ROIs)",
        rois=table,
        force=options.force,
        bar=progress_bar,
    )
    report = SiteReport()
    report.add(store, unchanged, expected=join.expected, dropped=join.dropped)
    report.show(options.root)


# ------------------------------------------------------------------------------------------ nifti


@dataclass(frozen=True)
class ScanOptions:
    """Which scans are read, and how ROI time series are made of them."""

    images: Annotated[
        str | None,
        typer.Option(
            help="Pattern of the scans, in quotation marks: 'sub-*/func/*_bold.nii.gz'. "
            "With --fmriprep: inside that folder.",
            show_default=False,
        ),
    ] = None
    fmriprep: Annotated[
        Path | None,
        typer.Option(help="fMRIPrep's folder of derivatives, instead.", show_default=False),
    ] = None
    session: Annotated[str | None, typer.Option(help="Take ses-<this> only.")] = None
    task: Annotated[str | None, typer.Option(help="Take task-<this> only.")] = None
    run: Annotated[str | None, typer.Option(help="Take run-<this> only.")] = None
    space: Annotated[
        str, typer.Option(help="With --fmriprep: the template space, which must be the atlas's.")
    ] = DEFAULT_SPACE
    confounds: Annotated[
        str | None,
        typer.Option(
            help=f"With --fmriprep: none, {', '.join(CONFOUND_PRESETS)}, or components of "
            f"nilearn's load_confounds. Default: {DEFAULT_CONFOUNDS}.",
            show_default=False,
        ),
    ] = None
    tr: Annotated[
        float | None,
        typer.Option(help="Repetition time in seconds, instead of header and JSON sidecar."),
    ] = None
    high_pass: Annotated[float, typer.Option(help="Lower cut-off in Hz; 0 for none.")] = 0.01
    low_pass: Annotated[float, typer.Option(help="Upper cut-off in Hz; 0 for none.")] = 0.1
    no_detrend: Annotated[bool, typer.Option("--no-detrend", help="Leave linear trends in.")] = (
        False
    )
    standardize: Annotated[
        str, typer.Option(help=f"Scale of the series: {', '.join(STANDARDIZATIONS)}.")
    ] = "zscore"

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
        smoothed = (settings.confounds or {}).get("ica_aroma") == "full"
        return find_fmriprep_scans(
            self.fmriprep,
            wanted,
            space=self.space,
            pattern=self.images,
            smoothed_by_aroma=smoothed,
        )

    def describe(self) -> dict[str, Any]:
        """Return what the site store states of the source."""
        source: dict[str, Any] = {"name": "NIfTI scans"}
        if self.fmriprep is not None:
            version = fmriprep_version(self.fmriprep)
            source = {"name": "fMRIPrep derivatives", "space": self.space, "generated_by": version}
        selection = {"session": self.session, "task": self.task, "run": self.run}
        return {**source, "tr_set_by_user": self.tr is not None, "selection": selection}


@app.command(context_settings={"allow_extra_args": True})  # to explain them below
@one_sentence_errors
@take_options
def nifti(
    context: typer.Context,
    atlas: Annotated[
        Path, typer.Option(help="NIfTI label map: at each voxel the id of its region.")
    ],
    labels: Annotated[
        Path, typer.Option(help="Table of the regions' ids and names; it fixes the ROI list.")
    ],
    people: ParticipantOptions,
    of_scans: ScanOptions,
    options: StoreOptions,
    timeseries_out: Annotated[
        Path | None,
        typer.Option(help="Also write the ROI time series here, a .1D file a subject."),
    ] = None,
    label_offset: Annotated[
        int, typer.Option(help="Added to each id of the labels table (1 if it counts from 0).")
    ] = 0,
    unlisted_labels: Annotated[
        str, typer.Option(help="Atlas labels that the table does not name: error, or drop.")
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
    site, folder = people.site, options.root / people.site
    found = of_scans.find(extraction)
    join = join_participants(site, *people.read(), found)
    check_mismatch(people.mismatch, join)
    regions = read_atlas(atlas, labels, label_offset=label_offset, unlisted=unlisted_labels)
    refuse_foreign_folder(folder, TABLES_AND_ARRAY)  # now, not after hours of reading scans
    if timeseries_out is not None:
        refuse_foreign_series(timeseries_out)
    scans = []
    with progress_bar(f"{site}: checking", len(join.joined)) as step:
        for person, scan in join.joined:
            scans.append(check_scan(site, person, scan, extraction, of_scans.tr))
            step()
    seconds = one_repetition_time(site, scans)
    preparation = options.preparation(seconds, extraction)
    source = {**of_scans.describe(), **people.describe()}
    made_of = ", ".join(str(source[key]) for key in ("name", "space") if key in source)
    description: dict[str, Any] = {
        "source": source,
        "preprocessing": f"{extraction.title} ({made_of})",
        "synthetic": False,
        "atlas_files": regions.describe(),
        "repetition_time_s": seconds,
        "join": join.describe(),
    }

    def subjects() -> Iterator[Subject | Exclusion]:
        shortest = preparation.rule.shortest(preparation.settings.window)
        for checked in scans:  # one scan in memory at a time
            one = read_nifti_subject(checked, site, regions, extraction, shortest)
            if isinstance(one, Subject) and len(one.series) < checked.n_volumes:
                censored = description.setdefault("censored_volumes", {})
                censored[one.participant_id] = checked.n_volumes - len(one.series)
            yield one

    inputs: dict[str, object] = {people.participants.name: file_checksum(people.participants)}
    for checked in scans:
        inputs |= checked.inputs
    inputs |= {
        **dict([regions.image_file, regions.labels_file]),
        "label_offset": regions.label_offset,
        "unlisted_labels": list(regions.unlisted),
        "repetition_time": seconds,
        **join.describe(),
    }
    store, unchanged = make_site_store(
        folder,
        site=site,
        preparation=preparation,
        subjects=subjects(),
        n_subjects=len(scans),
        inputs=inputs,
        description=description,
        atlas=regions.title,
        rois=regions.rois,
        force=options.force,
        series_out=timeseries_out,
        bar=progress_bar,
    )
    report = SiteReport()
    report.add(store, unchanged, expected=join.expected, dropped=join.dropped)
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

    stride: Annotated[int, typer.Option(help="Step between windows, in time points.")] = 16
    seed: Annotated[int, typer.Option(help="Seed of the cohort, and of folds if any.")] = 0


@app.command()
@one_sentence_errors
@take_options
def synthetic(
    context: typer.Context,
    options: SyntheticOptions,
    sites: Annotated[
        str | None,
        typer.Option(
            help="Sites, separated by commas; of connectomes any name is a hospital of its own.",
            show_default="all four",
        ),
    ] = None,
    subjects: Annotated[
        int | None,
        typer.Option(help="Subjects at each site. Default: 40 to 52.", show_default=False),
    ] = None,
    no_shift: Annotated[
        bool, typer.Option("--no-shift", help="Give all sites the same scanner.")
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Make images with masks and classes, no connectomes.")
    ] = False,
    dim: Annotated[int, typer.Option(help="With --images: 2 or 3.")] = 2,
) -> None:
    """Make site stores of a made-up cohort of four hospitals or others, labelled synthetic."""
    known = list(SCANNERS if images else SITES)
    others = [] if images or not sites else [name.strip() for name in sites.split(",")]
    names = parse_sites(sites or ",".join(known), [*known, *others])
    with usage_errors():
        n_of = {name: subjects or hospital(name).n_subjects for name in names}
        if subjects is not None and subjects < 1:
            raise ValueError(f"subjects is {subjects}; at least 1 is needed")
        if options.seed < 0:
            raise ValueError(f"seed is {options.seed}; it must not be negative")
        if options.window_seconds:
            raise ValueError("made-up scans have no repetition time, so no --window-seconds")
        cohort = Cohort(dim, options.seed, subjects, not no_shift)
        preparation = options.preparation()
    if images:
        synthetic_images(context, options.root, names, cohort, force=options.force)
        return
    report = SiteReport()
    for name in names:
        _refuse_to_replace_real_data(options.root / name)
        n_subjects = n_of[name]
        seed, shift = options.seed, not no_shift
        store, unchanged = make_site_store(
            options.root / name,
            site=name,
            preparation=preparation,
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
            force=options.force,
            bar=progress_bar,
        )
        report.add(store, unchanged, expected=n_subjects)
    report.show(options.root)


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


@app.command()
@one_sentence_errors
def check(
    folders: Annotated[list[Path], typer.Argument(help="Site stores, or folders of site stores.")],
    folds: Annotated[
        int, typer.Option(help="Folds that every site must allow; 0 to leave this out.")
    ] = USUAL_FOLDS,
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
    show_stores(stores)


if __name__ == "__main__":
    app(prog_name="python -m data_prep")
