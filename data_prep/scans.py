"""Files of scans, found by a pattern, and the participants in their names."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path

from data_prep.errors import SourceError, some_of

__all__ = ["ENTITY", "Scan", "find_files", "one_a_participant", "scan_of"]

#: A key-value pair of a BIDS name.
ENTITY = re.compile(r"([a-zA-Z]+)-([a-zA-Z0-9+]+)")


@dataclass(frozen=True)
class Scan:
    """One scan, or the ROI time series of one.

    Attributes
    ----------
    participant_id : str
        ``sub-`` and the label in the name.
    file : Path
    entities : mapping of str to str
        The key-value pairs of the BIDS name, such as ``{"sub": "01", "task": "rest"}``.
    """

    participant_id: str
    file: Path
    entities: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def key(self) -> str:
        """Name in the store's list of inputs; holds no folder of this machine."""
        name = self.file.name
        return name if self.participant_id[4:] in name else f"{self.participant_id}/{name}"


def find_files(pattern: str, option: str, example: str) -> list[Path]:
    """Find the files that a pattern describes, sorted; at least one.

    Parameters
    ----------
    pattern : str
        With ``*``, ``?`` and ``**``. A folder that is there is meant by its name, whatever
        brackets are in it.
    option, example : str
        That it was given with, and a pattern inside a folder, for messages.
    """
    if Path(pattern).is_dir():
        raise SourceError(
            f"{option} {pattern} is a folder; give a pattern in quotation marks, such as "
            f"'{pattern.rstrip('/')}/{example}'"
        )
    parts = Path(pattern).parts
    plain = next(
        (i for i, p in enumerate(parts) if has_magic(p) and not Path(*parts[: i + 1]).is_dir()),
        len(parts) - 1,
    )
    files = Path(*parts[:plain]).glob("/".join(parts[plain:]))
    found = sorted(file for file in files if not file.is_dir())
    if not found:
        why = "" if has_magic(pattern) else " (it has no * in it)"
        raise SourceError(f"no file fits {option} '{pattern}'{why}")
    return found


def scan_of(file: Path) -> Scan | None:
    """Return a file with the participant in its name, or in that of a folder above; else None."""
    entities = dict(ENTITY.findall(file.name.split(".")[0]))
    for folder in file.parts[-2::-1]:
        if "sub" in entities:
            break
        entities |= {k: v for k, v in ENTITY.findall(folder) if k in ("sub", "ses")}
    return Scan(f"sub-{entities['sub']}", file, entities) if "sub" in entities else None


def one_a_participant(
    scans: Sequence[Scan], option: str, wanted: Mapping[str, str | None] | None = None
) -> list[Scan]:
    """Choose scans by entities, sorted by participant; two of one participant are refused.

    Parameters
    ----------
    scans : sequence of Scan
    option : str
        That finds fewer files, for messages.
    wanted : mapping, optional
        Entity (``ses``, ``run``, ``task``) -> the value that is wanted, or None for any.
    """
    chosen = list(scans)
    for entity, value in (wanted or {}).items():
        if value is None:
            continue
        label = value.removeprefix(f"{entity}-")
        found = sorted({scan.entities[entity] for scan in chosen if entity in scan.entities})
        chosen = [scan for scan in chosen if scan.entities.get(entity) == label]
        if not chosen:
            raise SourceError(
                f"no scan has {entity}-{label}; found are "
                + (", ".join(f"{entity}-{name}" for name in found) or f"none with {entity}-")
            )
    counts = Counter(scan.participant_id for scan in chosen)
    if twice := [who for who, count in counts.items() if count > 1]:
        own = [scan for scan in chosen if scan.participant_id == twice[0]]
        differ = sorted(
            {k for s in own for k in s.entities if len({o.entities.get(k) for o in own}) > 1}
        )
        options = {"ses": "--session", "run": "--run", "task": "--task"} if wanted else {}
        how = [options[k] for k in differ if k in options]
        raise SourceError(
            f"{len(twice)} participant(s) have more than one scan ({some_of(twice)}), such as "
            f"{some_of([scan.file.name for scan in own], 3)}; choose one a participant with "
            f"{' and '.join(how) or f'a narrower {option}'}"
        )
    return sorted(chosen, key=lambda scan: scan.participant_id)
