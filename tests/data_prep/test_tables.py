import pytest

from data_prep.errors import SourceError
from data_prep.tables import read_table


def table(tmp_path, text):
    file = tmp_path / "people.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_table(file, "table")


@pytest.mark.parametrize(
    "text",
    [
        "id,note\n1,calm\n2,tired\n",
        "id;note\r\n1;calm\r\n2;tired",
        "\ufeffid\tnote\r1\tcalm\r2\ttired\r\r",
        'id, note\n1, "calm"\n\n2,  tired \n',
    ],
)
def test_the_forms_that_people_have_are_read(tmp_path, text):
    found = table(tmp_path, text)
    assert found.columns == ("id", "note")
    assert [fields for _, fields in found.rows] == [("1", "calm"), ("2", "tired")]


def test_a_field_may_hold_separators_and_marks(tmp_path):
    found = table(tmp_path, 'id,note\n1,"calm, then ""tired"""\n2,said "no"\n')
    assert [fields[1] for _, fields in found.rows] == ['calm, then "tired"', 'said "no"']


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_a_row_ends_at_line_ends_only(tmp_path, mark):
    found = table(tmp_path, f"id,note\n1,calm{mark}then tired\n2,\n")
    assert [number for number, _ in found.rows] == [2, 3]
    assert found.rows[0][1][1] == f"calm{mark}then tired"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("note", ['"calm', '"calm" and tired', '"calm\nthen tired"'])
def test_an_open_quotation_mark_swallows_no_rows(tmp_path, delimiter, note):
    text = f"id,note,group\n1,,a\n2,{note},a\n3,,b\n".replace(",", delimiter)
    with pytest.raises(SourceError, match=r'people.csv, line 3: a quotation mark \("\) is opened'):
        table(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,note\n1\n", r"line 2: 1 field\(s\), the header names 2; a field is missing"),
        ("id,note\n1,calm\n2,a,b\n", r"line 3: 3 field\(s\), the header names 2; a field is miss"),
        ("id,note\n1,2,calm\n2,3,tired\n", r"row.names = FALSE"),
        (b"id,note\n1,caf\xe9\n", "table people.csv is not UTF-8 text"),
        ("id,note\n1,\0\n", "is not UTF-8 text"),
        ("\n \n", "is empty"),
    ],
)
def test_a_table_that_cannot_be_read_is_one_sentence(tmp_path, text, message):
    with pytest.raises(SourceError, match=message):
        table(tmp_path, text)


def test_a_column_is_known_by_its_name(tmp_path):
    found = table(tmp_path, ",id,note,note\n0,1,,\n")
    assert found.column("id") == 1
    with pytest.raises(SourceError, match=r"has no column 'age', only id, note, note"):
        found.column("age")
    with pytest.raises(SourceError, match="has the column 'note' twice"):
        found.column("note")
