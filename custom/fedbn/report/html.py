"""One page that needs nothing but itself: tables as HTML, pictures inlined, no request to anywhere.

The page is plain HTML with its own style sheet and no script. Its content security policy forbids a
browser to load anything, so that a mistake here cannot become a request.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.files import write_files
from fedbn.report.tables import SYNTHETIC

if TYPE_CHECKING:
    from rich.table import Table

PAGE_FILE = "report.html"
SYNTHETIC_LABEL = SYNTHETIC.strip()
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #1b1f24; line-height: 1.5;
  font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header, main, footer { max-width: 1120px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.3rem; margin: 2.4rem 0 .6rem; padding-top: .6rem; border-top: 2px solid #d5dae0; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .4rem; }
p, li { max-width: 76ch; }
p { margin: .5rem 0; }
nav ul { list-style: none; padding: 0; margin: 1rem 0 0; display: flex; flex-wrap: wrap;
  gap: .2rem 1.1rem; }
a { color: #00568a; }
.lead { font-size: 1.08rem; }
.synthetic { display: inline-block; background: #ffe9c7; color: #5d3300; font-weight: 700;
  border: 1px solid #b86e00; border-radius: 4px; padding: .1rem .5rem; }
.absent { border-left: 4px solid #8a939d; padding: .2rem .8rem; color: #48515b; }
.wide { overflow-x: auto; margin: .8rem 0 .2rem; width: fit-content; max-width: 100%;
  background: linear-gradient(to right, #fff 30%, #fff0), linear-gradient(to left, #fff 30%, #fff0),
    linear-gradient(to right, #0004, #0000), linear-gradient(to left, #0004, #0000);
  background-position: left, right, left, right; background-repeat: no-repeat;
  background-size: 40px 100%, 40px 100%, 14px 100%, 14px 100%;
  background-attachment: local, local, scroll, scroll; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
caption { text-align: left; font-weight: 600; padding: .2rem 0 .4rem; max-width: 76ch; }
th, td { padding: .22rem .7rem; text-align: left; vertical-align: top; }
.keep, .right { white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; position: sticky; left: 0; background: #fff; }
th { border-bottom: 2px solid #8a939d; vertical-align: bottom; }
td { border-bottom: 1px solid #e4e8ec; }
tr.end td { border-bottom: 1px solid #8a939d; }
.right { text-align: right; }
.note { font-size: .86rem; color: #48515b; margin-top: .2rem; }
.pictures { display: grid; gap: 18px; margin: 1rem 0; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); }
figure { margin: 0; }
figure img { width: 100%; height: auto; display: block; border: 1px solid #e4e8ec; }
figcaption { font-size: .86rem; color: #48515b; padding-top: .3rem; }
summary { cursor: pointer; color: #00568a; }
footer { border-top: 2px solid #d5dae0; margin-top: 3rem; padding-top: 1rem; padding-bottom: 3rem; }
@media (max-width: 480px) { header, main, footer { padding-left: 12px; padding-right: 12px; }
  h1 { font-size: 1.35rem; } caption { max-width: 86vw; } }
@media print { .pictures { grid-template-columns: 1fr 1fr; } figure { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Picture:
    """A picture of the page, also written beside it.

    Attributes
    ----------
    name
        Of its file, without the ending.
    png
        Its bytes.
    alt
        What it shows, for those who do not see it.
    caption
        Below it; may be empty.
    """

    name: str
    png: bytes
    alt: str
    caption: str = ""


class Page:
    """A page in the making, from top to bottom.

    Parameters
    ----------
    title
        Of the window and the page.
    synthetic
        Whether the subjects are made up; the title, tables and pictures then say so.
    """

    def __init__(self, title: str, *, synthetic: bool):
        self.title = f"{SYNTHETIC_LABEL}: {title}" if synthetic else title
        self.synthetic = synthetic
        self.pictures: dict[str, bytes] = {}
        self._heading = title
        self._sections: list[tuple[str, str]] = []
        self._parts: list[str] = []

    def section(self, title: str) -> None:
        """Begin a section, which the page's list of contents names."""
        anchor = f"s{len(self._sections) + 1}"
        self._sections.append((anchor, title))
        self._parts.append(f'<h2 id="{anchor}">{_escaped(title)}</h2>')

    def heading(self, title: str) -> None:
        """Begin a part of a section."""
        self._parts.append(f"<h3>{_escaped(title)}</h3>")

    def text(self, *sentences: str, lead: bool = False) -> None:
        """Add a paragraph."""
        opening = '<p class="lead">' if lead else "<p>"
        self._parts.append(f"{opening}{_escaped(' '.join(sentences))}</p>")

    def points(self, sentences: Iterable[str]) -> None:
        """Add a list of sentences."""
        items = "".join(f"<li>{_escaped(sentence)}</li>" for sentence in sentences)
        self._parts.append(f"<ul>{items}</ul>")

    def absent(self, sentence: str) -> None:
        """Say what is not on this page, and why."""
        self._parts.append(f'<p class="absent">{_escaped(sentence)}</p>')

    def table(self, table: Table, *, folded: str = "") -> None:
        """Add a table that was made for the terminal; `folded` hides it behind these words."""
        content = table_html(table)
        if folded:
            content = f"<details><summary>{_escaped(folded)}</summary>{content}</details>"
        self._parts.append(content)

    def show(self, pictures: Sequence[Picture]) -> None:
        """Add pictures side by side, as many as there is room for."""
        for picture in pictures:
            if picture.name in self.pictures:
                raise ValueError(f"two pictures are named {picture.name!r}")
            self.pictures[picture.name] = picture.png
        if pictures:
            figures = "\n".join(self._figure(picture) for picture in pictures)
            self._parts.append(f'<div class="pictures">\n{figures}\n</div>')

    def html(self) -> str:
        """Return the page."""
        contents = "".join(
            f'<li><a href="#{anchor}">{_escaped(title)}</a></li>'
            for anchor, title in self._sections
        )
        body = "\n".join(self._parts)
        label = f'<p class="synthetic">{_escaped(SYNTHETIC_LABEL)}</p>' if self.synthetic else ""
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escaped(self.title)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<header>
{label}
<h1>{_escaped(self._heading)}</h1>
<nav aria-label="Contents"><ul>{contents}</ul></nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""

    def write(self, folder: Path) -> Path:
        """Write the page and its pictures into a folder; return the page's path."""
        pictures = {f"{name}.png": png for name, png in self.pictures.items()}
        write_files(folder, pictures | {PAGE_FILE: self.html().encode()})
        return folder / PAGE_FILE

    def _figure(self, picture: Picture) -> str:
        data = base64.b64encode(picture.png).decode()
        width, height = _size(picture.png)
        label = f"{SYNTHETIC_LABEL}. " if self.synthetic else ""
        caption = f"<figcaption>{_escaped(picture.caption)}</figcaption>" if picture.caption else ""
        return (
            f'<figure><img src="data:image/png;base64,{data}" width="{width}" height="{height}" '
            f'alt="{_escaped(label + picture.alt)}">{caption}</figure>'
        )


def table_html(table: Table) -> str:
    """Return a table of :mod:`rich` as HTML, with its title above and its caption below."""
    columns = table.columns
    classes = [
        ' class="right"' if column.justify == "right" else ' class="keep"' if column.no_wrap else ""
        for column in columns
    ]
    head = "".join(
        f'<th scope="col"{css}>{_escaped(str(column.header))}</th>'
        for column, css in zip(columns, classes, strict=True)
    )
    cells = [[str(cell) for cell in column.cells] for column in columns]
    rows = []
    for k, row in enumerate(table.rows):
        content = "".join(
            f"<td{css}>{_escaped(column[k])}</td>"
            for column, css in zip(cells, classes, strict=True)
        )
        opening = '<tr class="end">' if row.end_section else "<tr>"
        rows.append(f"{opening}{content}</tr>")
    title, label = str(table.title or ""), ""
    if title.startswith(SYNTHETIC):
        title, label = title.removeprefix(SYNTHETIC), SYNTHETIC_LABEL
        label = f'<span class="synthetic">{_escaped(label)}</span><br>'
    note = f'<p class="note">{_escaped(str(table.caption))}</p>' if table.caption else ""
    return (
        f'<div class="wide"><table><caption>{label}{_escaped(title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _escaped(text: str) -> str:
    """Return text for HTML, on one line."""
    return html.escape(" ".join(text.split()))


def _size(png: bytes) -> tuple[int, int]:
    """Return the width and height that a PNG states."""
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
