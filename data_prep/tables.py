"""Tables of text as people have them: csv, tsv or semicolons, below a header.

A row ends at a line end and nowhere else, so that an open quotation mark or a strange character in
a note cannot swallow the rows below it. A column is known by its name in the header, and a row
with a gap is refused: what follows the gap would be read into another column.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import SourceError

__all__ = ["Table", "delimiter_of", "read_table", "split_line", "text_lines"]

LINE_END = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True)
class Table:
    """A table with a header.

    Attributes
    ----------
    title : str
        What it is and its file, for messages.
    columns : tuple of str
        Names in the header; empty for a column without one.
    rows : tuple of (int, tuple of str)
        Line number in the file, and one field a column, without blanks around it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[int, tuple[str, ...]], ...]

    def column(self, name: str) -> int:
        """Return where a column is."""
        if self.columns.count(name) == 1:
            return self.columns.index(name)
        what = (
            f"has the column {name!r} twice" if name in self.columns else f"has no column {name!r}"
        )
        hint = "; separate its columns by tabs" if len(self.columns) == 1 else ""
        raise SourceError(
            f"{self.title} {what}, only {', '.join(filter(None, self.columns))}{hint}"
        )


def text_lines(file: Path, what: str, *, content: bytes | None = None) -> list[str]:
    """Return the lines of a text file, without line ends and without empty lines at the end.

    Parameters
    ----------
    file : Path
        UTF-8, with any of the three line ends.
    what : str
        What it is, for messages; may be empty.
    content : bytes, optional
        What it holds, if it was read already.
    """
    title = f"{what} {file.name}".strip()
    if content is None and not file.is_file():
        raise SourceError(f"{what} {file} is not a file".strip())
    data = file.read_bytes() if content is None else content
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise SourceError(f"{title} is not UTF-8 text; save it as comma- or tab-separated")
    if not text.strip():
        raise SourceError(f"{title} is empty; get the file again")
    lines = LINE_END.split(text)
    while not lines[-1].strip():
        lines.pop()
    return lines


def delimiter_of(line: str) -> str | None:
    """Return what separates the fields of a header: tab, semicolon, comma, or None for blanks."""
    return next((mark for mark in "\t;," if mark in line), None)


def split_line(line: str, delimiter: str | None, where: str) -> list[str]:
    """Split one line into its fields; a `delimiter` None is blanks, `where` is for messages."""
    if delimiter is None:
        return line.split()
    try:
        fields = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True, strict=True))
    except csv.Error:
        raise SourceError(
            f'{where}: a quotation mark (") is opened and not closed in its field; take it out'
        ) from None
    return [field.strip() for field in fields]


def read_table(file: Path, what: str, *, content: bytes | None = None) -> Table:
    """Read a table with a header.

    It is separated by the first of tab, semicolon and comma that its header has; empty lines are
    passed over. `what` is for messages, `content` what the file holds, if it was read already.
    """
    title = f"{what} {file.name}"
    header, *lines = text_lines(file, what, content=content)
    delimiter = delimiter_of(header) or "\t"
    columns = split_line(header, delimiter, f"{title}, line 1")
    rows = [
        (number, tuple(split_line(line, delimiter, f"{title}, line {number}")))
        for number, line in enumerate(lines, start=2)
        if line.strip()
    ]
    _refuse_gaps(title, columns, rows)
    return Table(title, tuple(columns), tuple(rows))


def _refuse_gaps(
    title: str, columns: Sequence[str], rows: Sequence[tuple[int, tuple[str, ...]]]
) -> None:
    n_columns = len(columns)
    for number, fields in rows:
        if len(fields) != n_columns:
            hint = "a field is missing or holds a separator without quotation marks"
            if all(len(others) == n_columns + 1 for _, others in rows):
                hint = "the rows have names and their column has none (in R: row.names = FALSE)"
            raise SourceError(
                f"{title}, line {number}: {len(fields)} field(s), the header names {n_columns}; "
                + hint
            )
