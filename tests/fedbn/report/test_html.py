"""A page that needs nothing but itself."""

from __future__ import annotations

import pytest
from rich.table import Table

from fedbn.report.figures import Drawing
from fedbn.report.html import Page, Picture
from fedbn.report.tables import LOOK, SYNTHETIC


@pytest.fixture(scope="module")
def png():
    return Drawing(1, synthetic=False).png()


def small_table(title="scores"):
    table = Table(**LOOK, title=title, caption="what\nthey mean")
    table.add_column("method", no_wrap=True)
    table.add_column("AUC\nalone", justify="right")
    table.add_row("a & b", "0.7")
    table.add_section()
    table.add_row("<c>", "-")
    return table


def test_a_table_keeps_its_title_cells_sections_and_caption(as_html):
    reader = as_html(small_table())
    text = [part for part in reader.text if part.strip()]
    assert text == ["scores", "method", "AUC alone", "a & b", "0.7", "<c>", "-", "what they mean"]
    assert [attributes.get("class") for attributes in reader.all("td")[:2]] == ["keep", "right"]
    assert [attributes.get("class") for attributes in reader.all("tr")] == [None, "end", None]


def test_a_label_in_a_title_is_set_apart(as_html):
    reader = as_html(small_table(f"{SYNTHETIC}scores"))
    assert {"class": "synthetic"} in reader.all("span")
    assert reader.captions == ["SYNTHETIC COHORT, no patient's datascores"]


def test_a_page_names_its_sections_and_inlines_its_pictures(tmp_path, png, read_page):
    page = Page("A & B", synthetic=False)
    page.section("First")
    page.text("One sentence.", "Another <one>.")
    page.table(small_table(), folded="more")
    page.show([Picture("a", png, 'what "it" shows', "below")])
    page.section("Second")
    reader = read_page(page.write(tmp_path / "out"))
    targets = [attributes["href"] for attributes in reader.all("a")]
    assert targets == [f"#{attributes['id']}" for attributes in reader.all("h2")]
    (image,) = reader.all("img")
    assert image["src"].startswith("data:image/png;base64,")
    assert image["alt"] == 'what "it" shows'
    assert (tmp_path / "out" / "a.png").read_bytes() == png
    assert "One sentence. Another <one>." in reader.text


def test_two_pictures_cannot_have_one_name(png):
    page = Page("A", synthetic=False)
    page.show([Picture("a", png, "")])
    with pytest.raises(ValueError, match="two pictures are named 'a'"):
        page.show([Picture("a", png, "")])


def test_a_page_of_made_up_subjects_says_so_everywhere(tmp_path, png, read_page):
    page = Page("A", synthetic=True)
    page.show([Picture("a", png, "a curve")])
    reader = read_page(page.write(tmp_path))
    assert page.title.startswith("SYNTHETIC COHORT")
    assert reader.all("img")[0]["alt"].startswith("SYNTHETIC COHORT")
    assert {"class": "synthetic"} in reader.all("p")


def test_the_same_figure_has_the_same_bytes(png):
    assert Drawing(1, synthetic=False).png() == png
    assert Drawing(1, synthetic=True).png() != png
    assert Drawing(1, synthetic=True).figure.get_suptitle() == SYNTHETIC.strip()
