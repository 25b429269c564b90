"""Who takes part at a site: the table of participants, and its match with what was scanned.

Nothing is guessed: a participant without a scan, a scan without a participant, and a diagnosis in
other words are said, with what to do.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import SourceError, some_of
from data_prep.files import file_checksum
from data_prep.scans import Scan
from data_prep.site_store import DIAGNOSES
from data_prep.tables import read_table

__all__ = [
    "LEAVE_OUT",
    "JoinedSite",
    "Person",
    "Subject",
    "join_participants",
    "parse_diagnosis_words",
    "read_participants",
    "who_is_named",
]

#: What a word of the diagnosis column may stand for, beside the two diagnoses.
LEAVE_OUT = "leave-out"
MISSING_WORDS = ("", "n/a", "na", "nan", "none")
SEX = {"m": "M", "male": "M", "f": "F", "female": "F"}


@dataclass(frozen=True)
class Person:
    """One row of a table of participants.

    Attributes
    ----------
    participant_id : str
        BIDS style, ``sub-0050952``.
    diagnosis : str
        ``"autism"`` or ``"control"``.
    age : float or None
        Years; None where unknown.
    sex : str
        ``"M"``, ``"F"`` or ``"n/a"``.
    """

    participant_id: str
    diagnosis: str
    age: float | None
    sex: str


@dataclass(frozen=True)
class Subject(Person):
    """A participant with ROI time series.

    Attributes
    ----------
    site : str
        Name of the site.
    series : np.ndarray, float64, shape (n_timepoints, n_rois)
        Finite; columns in the order of the ROI list.
    absent_rois : tuple of int
        Columns of ROIs without a voxel in the scan, where that is known; their series is zero.
    """

    site: str
    series: np.ndarray = field(repr=False)
    absent_rois: tuple[int, ...] = ()


# ------------------------------------------------------------------------------------- the table


def parse_diagnosis_words(entries: Sequence[str]) -> dict[str, str]:
    """Read what the words of the diagnosis column stand for.

    Entries are ``WORD=autism``, ``WORD=control`` or ``WORD=leave-out``. Returned is word in lower
    case -> meaning; the two diagnoses themselves are always in it. Another entry is a ValueError.
    """
    words = {name: name for name in DIAGNOSES}
    for entry in entries:
        word, equals, meaning = entry.rpartition("=")
        if not equals or meaning.strip() not in (*DIAGNOSES, LEAVE_OUT):
            raise ValueError(
                f"diagnosis word is {entry!r}; write WORD=autism, WORD=control or WORD={LEAVE_OUT}"
            )
        words[word.strip().lower()] = meaning.strip()
    return words


def read_participants(
    file: Path,
    words: Mapping[str, str],
    *,
    diagnosis_column: str = "diagnosis",
    id_column: str = "participant_id",
) -> tuple[list[Person], list[tuple[str, str]]]:
    """Read a BIDS ``participants.tsv``, or the same as csv.

    Parameters
    ----------
    file : Path
        Columns of ids and diagnoses, and if there are ``age`` and ``sex`` (or ``gender``).
    words : mapping
        As from `parse_diagnosis_words`.

    Returns
    -------
    people : list of Person
        Those with a diagnosis of the two.
    left_out : list of (str, str)
        Participants that `words` leaves out, and why.
    """
    table = read_table(file, "participants table")
    place = {}
    for name, option in ((id_column, "--id-column"), (diagnosis_column, "--diagnosis-column")):
        try:
            place[name] = table.column(name)
        except SourceError as error:
            raise SourceError(f"{error}; name it with {option}") from None
    lower = [name.lower() for name in table.columns]
    age_at = lower.index("age") if "age" in lower else None
    sex_at = next((lower.index(name) for name in ("sex", "gender") if name in lower), None)
    people, left_out, seen = [], [], set()
    unknown: Counter[str] = Counter()
    for number, row in table.rows:
        where = f"{table.title}, line {number}"
        label = row[place[id_column]].removeprefix("sub-")
        if not label:
            raise SourceError(f"{where}: no {id_column}")
        who = f"sub-{label}"
        if who in seen:
            raise SourceError(f"{table.title} has two rows of {who}")
        seen.add(who)
        word = row[place[diagnosis_column]]
        meaning = words.get(word.lower())
        if meaning is None:
            unknown[word or "(empty)"] += 1
        elif meaning == LEAVE_OUT:
            left_out.append((who, f"{diagnosis_column} {word or 'empty'}"))
        else:
            age = None if age_at is None else _age(row[age_at], where)
            sex = "n/a" if sex_at is None else SEX.get(row[sex_at].lower(), "n/a")
            people.append(Person(who, meaning, age, sex))
    if unknown:
        found = [f"{word!r} ({count})" for word, count in unknown.most_common()]
        word = next(iter(unknown)).replace("(empty)", "")
        raise SourceError(
            f"{table.title}: the column {diagnosis_column!r} has the word(s) {some_of(found)}, and "
            "only autism and control are known; say what each means with "
            f"--diagnosis-word '{word}=MEANING', MEANING one of {', '.join(DIAGNOSES)}, {LEAVE_OUT}"
        )
    if not people:
        raise SourceError(f"{table.title} has no row to use")
    return people, left_out


def _age(text: str, where: str) -> float | None:
    if text.lower() in MISSING_WORDS:
        return None
    try:
        age = float(text.removesuffix("+"))  # 89+ is how ages are held back
    except ValueError:
        age = math.nan
    if not 0 <= age < 150:
        raise SourceError(
            f"{where}: age {text!r} is no number of years; write n/a where it is unknown"
        )
    return age


# ------------------------------------------------------------------------------------- the match


@dataclass(frozen=True)
class JoinedSite:
    """What a table of participants and the scans hold for one site.

    Attributes
    ----------
    site : str
        Name of the site.
    joined : tuple of (Person, Scan)
        Sorted by the scan's id.
    left_out : tuple of (str, str)
        Participants whose row leaves them out; with why.
    without_scan : tuple of str
        Participants of whom no scan was found.
    without_row : tuple of str
        Scans that no row describes.
    """

    site: str
    joined: tuple[tuple[Person, Scan], ...]
    left_out: tuple[tuple[str, str], ...] = ()
    without_scan: tuple[str, ...] = ()
    without_row: tuple[str, ...] = ()

    @property
    def expected(self) -> int:
        """Number of participants of whom there should be a scan."""
        return len(self.joined) + len(self.without_scan)

    @property
    def dropped(self) -> list[tuple[str, str, str]]:
        """Who, reason and detail of everyone who did not come as far as the quality rule."""
        return [
            *((who, "left out by diagnosis", why) for who, why in self.left_out),
            *((who, "participant without scan", "dropped") for who in self.without_scan),
            *((name, "scan without participant", "dropped") for name in self.without_row),
        ]

    def describe(self) -> dict[str, Any]:
        """Return what the site store states."""
        return {
            "expected": self.expected,
            "left_out": [list(entry) for entry in self.left_out],
            "without_scan": list(self.without_scan),
            "without_row": list(self.without_row),
        }

    def inputs(self) -> dict[str, object]:
        """Return what decides who is read: every scan's checksum, and who is without one."""
        return {scan.key: file_checksum(scan.file) for _, scan in self.joined} | self.describe()

    def refuse_mismatch(self) -> None:
        """Raise a SourceError if a participant has no scan, or a scan no participant."""
        told = [
            f"{len(who)} {what} ({some_of(who)})"
            for what, who in (
                ("participant(s) without a scan", self.without_scan),
                ("scan(s) without a row in the table", self.without_row),
            )
            if who
        ]
        if told:
            raise SourceError(
                f"site {self.site!r}: {' and '.join(told)}; complete the folder or the table, or "
                "leave them out with --mismatch drop"
            )


def join_participants(
    site: str,
    people: Sequence[Person],
    left_out: Sequence[tuple[str, str]],
    scans: Sequence[Scan],
) -> JoinedSite:
    """Match participants, as from `read_participants`, with at most one scan each.

    An id of digits only, from which a spreadsheet took the zeros in front (``50952`` for
    ``sub-0050952``), is matched by its number if that leaves no choice. If nothing
    matches at all, that is refused.
    """
    remaining = {scan.participant_id: scan for scan in scans}
    ids = [person.participant_id for person in people] + [who for who, _ in left_out]
    same = _matches(ids, list(remaining))
    joined, without_scan = [], []
    for person in people:
        scan = remaining.pop(same.get(person.participant_id, ""), None)
        if scan is None:
            without_scan.append(person.participant_id)
        else:
            joined.append((person, scan))
    for who, _ in left_out:
        remaining.pop(same.get(who, ""), None)
    if not joined:
        raise SourceError(
            f"site {site!r}: no participant of the table has a scan; the table has "
            f"{some_of(ids, 3)}, the scans are of {some_of([s.participant_id for s in scans], 3)}"
        )
    return JoinedSite(
        site=site,
        joined=tuple(sorted(joined, key=lambda pair: pair[1].participant_id)),
        left_out=tuple(sorted(left_out)),
        without_scan=tuple(sorted(without_scan)),
        without_row=tuple(sorted(scan.key for scan in remaining.values())),
    )


def _number(who: str) -> int | None:
    label = who.removeprefix("sub-").removesuffix(".0")
    return int(label) if label.isdecimal() else None


def _matches(table_ids: Sequence[str], scan_ids: Sequence[str]) -> dict[str, str]:
    """Return the scan's id of each id of the table that has one."""
    same = {who: who for who in table_ids if who in set(scan_ids)}

    def by_number(ids: Sequence[str]) -> dict[int, list[str]]:
        groups: dict[int, list[str]] = {}
        for who in ids:
            number = _number(who)
            if who not in same and number is not None:
                groups.setdefault(number, []).append(who)
        return groups

    scans = by_number(scan_ids)
    for number, whos in by_number(table_ids).items():
        if len(whos) == 1 and len(scans.get(number, [])) == 1:
            same[whos[0]] = scans[number][0]
    return same


def who_is_named(file: Path, ids: Iterable[str]) -> str | None:
    """Return the participant whose id is a part of a file's name, as in ``KKI_0050772_rois.1D``.

    Numbers match whatever zeros are in front of them. None if the name holds none of the ids; a
    name that holds two is refused.
    """
    parts = re.findall(r"[A-Za-z0-9]+", file.name)
    numbers = {int(part) for part in parts if part.isdecimal()}
    named = [
        who
        for who in ids
        if _number(who) in numbers
        or re.search(rf"(?<![A-Za-z0-9]){re.escape(who[4:])}(?![A-Za-z0-9])", file.name)
    ]
    if len(named) > 1:
        raise SourceError(
            f"{file.name} may be of {' or '.join(named[:3])}; name it sub-<label>_..., as BIDS does"
        )
    return named[0] if named else None
