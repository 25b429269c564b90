"""ABIDE I's ROI time series: downloaded, or from folders that nilearn filled.

Columns are matched by the ids in each file's header, never by position, and a file that is not
complete is refused. With a local folder nothing is ever downloaded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data_prep.errors import SourceError
from data_prep.files import file_checksum
from data_prep.participants import JoinedSite, Person
from data_prep.preparation import SiteSource
from data_prep.roi_files import read_subjects
from data_prep.scans import Scan
from data_prep.tables import read_table

__all__ = [
    "ABIDE_PREPROCESSING",
    "ABIDE_SITES",
    "DEFAULT_SITES",
    "Abide",
    "fetch_abide",
    "find_abide",
    "repetition_times",
]

#: The sites of the paper, which the main job runs on.
DEFAULT_SITES = ("NYU", "USM", "UM", "UCLA")
#: Site name here -> ABIDE's SITE_ID.
ABIDE_SITES: Mapping[str, str] = {
    **{"NYU": "NYU", "USM": "USM", "UM": "UM_1", "UCLA": "UCLA_1"},
    **{name: name for name in ("CALTECH", "CMU", "KKI", "LEUVEN_1", "LEUVEN_2", "MAX_MUN")},
    **{name: name for name in ("OHSU", "OLIN", "PITT", "SBL", "SDSU", "STANFORD", "TRINITY")},
    **{name: name for name in ("UCLA_2", "UM_2", "YALE")},
}
ABIDE_PREPROCESSING = "C-PAC, band-pass filtered, no global signal regression (filt_noglobal)"

PHENOTYPIC = "Phenotypic_V1_0b_preprocessed1.csv"
SCANS = Path("cpac") / "filt_noglobal"
SUFFIX = "_rois_ho.1D"

# Repetition time in seconds by the beginning of the file name, 2 s elsewhere. ABIDE's tables do not
# hold it: these are the published scan parameters, and where the files are at hand the upper edge
# of C-PAC's band-pass filter, 0.1 Hz, lies where they put it.
REPETITION_TIMES_S = {
    **{"ucla": 3.0, "maxmun": 3.0, "kki": 2.5, "ohsu": 2.5, "sbl": 2.2, "leuven": 1.656},
    **{"olin": 1.5, "pitt": 1.5, "cmu_b": 1.5},
}

# nilearn's `quality_checked=True`: what each rater must have said.
QUALITY_CHECK: Mapping[str, tuple[str, ...]] = {
    "qc_rater_1": ("OK",),
    "qc_anat_rater_2": ("OK", "maybe"),
    "qc_func_rater_2": ("OK", "maybe"),
    "qc_anat_rater_3": ("OK",),
    "qc_func_rater_3": ("OK",),
}
PHENOTYPIC_COLUMNS = (
    *("SUB_ID", "SITE_ID", "FILE_ID", "DX_GROUP", "AGE_AT_SCAN", "SEX"),
    *QUALITY_CHECK,
)
DIAGNOSIS = {"1": "autism", "2": "control"}
SEX = {"1": "M", "2": "F"}


def find_abide(source: Path) -> Path:
    """Find the folder ``ABIDE_pcp`` that nilearn fills: this one, one in it, or one below that."""
    if not source.is_dir():
        raise SourceError(f"--source {source} is not a folder")
    for folder in (source, source / "ABIDE_pcp", *sorted(source.glob("*/ABIDE_pcp"))):
        if (folder / PHENOTYPIC).is_file():
            return folder
    raise SourceError(
        f"--source {source} holds no ABIDE_pcp/{PHENOTYPIC}; name the folder that nilearn's "
        "fetch_abide_pcp was given as data_dir"
    )


def fetch_abide(sites: Sequence[str], data_dir: Path | None = None) -> Path:
    """Download what is missing of ABIDE's ROI time series, through nilearn.

    Parameters
    ----------
    sites : sequence of str
        Names out of `ABIDE_SITES`.
    data_dir : Path, optional
        Where to keep it; by default nilearn's own data folder.

    Returns
    -------
    Path
        The folder ``ABIDE_pcp``.
    """
    from nilearn.datasets import fetch_abide_pcp, get_data_dirs

    try:
        fetch_abide_pcp(
            data_dir=data_dir,
            pipeline="cpac",
            band_pass_filtering=True,
            global_signal_regression=False,
            derivatives=["rois_ho"],
            SITE_ID=[ABIDE_SITES[site] for site in sites],
            verbose=0,
        )
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(
            f"ABIDE could not be downloaded ({reason}); name a local copy with --source"
        ) from None
    roots = [Path(root) for root in get_data_dirs(data_dir)]
    return find_abide(next(root for root in roots if (root / "ABIDE_pcp" / PHENOTYPIC).is_file()))


def repetition_times(join: JoinedSite) -> list[float]:
    """Return the seconds between two volumes of a site's scans, by the names of their files."""

    def of_file(name: str) -> float:
        begins = (begin for begin in REPETITION_TIMES_S if name.lower().startswith(begin))
        return REPETITION_TIMES_S.get(next(begins, ""), 2.0)

    return sorted({of_file(scan.file.name) for _, scan in join.joined})


@dataclass(frozen=True)
class Abide:
    """ABIDE's phenotypic table and scans, from one folder or several.

    Attributes
    ----------
    folders : tuple of Path
        As from `find_abide`.
    """

    folders: tuple[Path, ...]

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """Rows of the tables, each subject once, with the columns that are needed here."""
        rows: dict[str, dict[str, str]] = {}
        for folder in self.folders:
            table = read_table(folder / PHENOTYPIC, "phenotypic table")
            place = {name: table.column(name) for name in PHENOTYPIC_COLUMNS}
            own: dict[str, dict[str, str]] = {}
            for _, fields in table.rows:
                row = {name: fields[i] for name, i in place.items()}
                if row["SUB_ID"] in own:
                    raise SourceError(f"{PHENOTYPIC} has two rows with SUB_ID {row['SUB_ID']}")
                if rows.get(row["SUB_ID"], row) != row:
                    raise SourceError(
                        f"SUB_ID {row['SUB_ID']} has other values in {folder / PHENOTYPIC} than in "
                        "another --source"
                    )
                own[row["SUB_ID"]] = row
            rows |= own
        return list(rows.values())

    @cached_property
    def scans(self) -> dict[str, Path]:
        """File name -> file of every scan."""
        found: dict[str, Path] = {}
        for folder in self.folders:
            for file in sorted((folder / SCANS).glob(f"*{SUFFIX}")):
                other = found.setdefault(file.name, file)
                if other != file and file_checksum(other) != file_checksum(file):
                    raise SourceError(f"{file} is another scan than {other}; remove one of them")
        return found

    def sites(self) -> list[str]:
        """Return the names of the sites that have a scan, in the order of `ABIDE_SITES`."""
        present = {row["SITE_ID"] for row in self.rows if f"{row['FILE_ID']}{SUFFIX}" in self.scans}
        return [site for site, abide_site in ABIDE_SITES.items() if abide_site in present]

    def inputs(self) -> dict[str, str]:
        """Return the checksum of every phenotypic table that differs from the others."""
        sums = dict.fromkeys(file_checksum(folder / PHENOTYPIC) for folder in self.folders)
        return {PHENOTYPIC if not i else f"{PHENOTYPIC} ({i + 1})": s for i, s in enumerate(sums)}

    def join(self, site: str) -> JoinedSite:
        """Match a site's rows with its scans, by file name.

        ``left_out`` are the rows without a released scan, and those that did not pass ABIDE's
        quality check.
        """
        own = [row for row in self.rows if row["SITE_ID"] == ABIDE_SITES[site]]
        # MAX_MUN's files begin with MaxMun_a to MaxMun_d: the table says which are whose.
        begins = {ABIDE_SITES[site].lower(), *(_begin(row["FILE_ID"]) for row in own)}
        scans = {n: f for n, f in self.scans.items() if _begin(n.removesuffix(SUFFIX)) in begins}
        joined, left_out, without_scan = [], [], []
        for row in own:
            who = _participant_id(row)
            scan = scans.pop(f"{row['FILE_ID']}{SUFFIX}", None)
            if row["FILE_ID"] == "no_filename":
                left_out.append((who, "no scan in the release"))
            elif failed := [c for c, allowed in QUALITY_CHECK.items() if row[c] not in allowed]:
                found = ", ".join(f"{c} {row[c] or 'empty'}" for c in failed)
                left_out.append((who, f"failed ABIDE's quality check: {found}"))
            elif scan is None:
                without_scan.append(who)
            else:
                joined.append((_person(row, who), Scan(who, scan)))
        return JoinedSite(
            site=site,
            joined=tuple(sorted(joined, key=lambda pair: pair[1].participant_id)),
            left_out=tuple(sorted(left_out)),
            without_scan=tuple(sorted(without_scan)),
            without_row=tuple(sorted(scans)),
        )

    def source(self, join: JoinedSite) -> SiteSource:
        """Return what the store of a matched site is made of."""
        times = repetition_times(join)
        one = {"repetition_time_s": times[0]} if len(times) == 1 else None
        return SiteSource(
            site=join.site,
            subjects=read_subjects(join),
            n_subjects=len(join.joined),
            inputs={**self.inputs(), **join.inputs()},
            description={
                "source": {
                    "name": "ABIDE I, Preprocessed Connectomes Project",
                    "SITE_ID": ABIDE_SITES[join.site],
                    "derivative": "rois_ho",
                    "layout": "nilearn.datasets.fetch_abide_pcp",
                },
                "preprocessing": ABIDE_PREPROCESSING,
                "synthetic": False,
                **(one or {"repetition_times_s": times}),
                "join": join.describe(),
            },
        )


def _begin(file_id: str) -> str:
    return file_id.rpartition("_")[0].lower()


def _participant_id(row: Mapping[str, str]) -> str:
    """Return the BIDS id; ABIDE writes 50952 in the table and 0050952 in file names."""
    try:
        return f"sub-{int(float(row['SUB_ID'])):07d}"
    except ValueError:
        raise SourceError(f"{PHENOTYPIC} has the SUB_ID {row['SUB_ID']!r}, no number") from None


def _person(row: Mapping[str, str], who: str) -> Person:
    diagnosis = DIAGNOSIS.get(row["DX_GROUP"].removesuffix(".0"))
    if diagnosis is None:
        raise SourceError(
            f"{PHENOTYPIC}: {who} has DX_GROUP {row['DX_GROUP']!r}; allowed are 1 (autism) and 2 "
            "(control)"
        )
    try:
        age = float(row["AGE_AT_SCAN"])
    except ValueError:
        age = math.nan
    return Person(
        participant_id=who,
        diagnosis=diagnosis,
        age=age if 0 < age < 150 else None,  # ABIDE writes -9999 for unknown
        sex=SEX.get(row["SEX"].removesuffix(".0"), "n/a"),
    )
