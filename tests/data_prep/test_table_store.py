"""A site's table: what is read, and every way in which it cannot be, with row and column."""

from __future__ import annotations

import json
import os
import stat

import numpy as np
import pytest

from data_prep.errors import StoreError
from data_prep.table_store import TABLE, plain, read_table_store, write_table_store

CLASSES = {"well": ["0"], "ill": ["1", "2"]}
TEXT = "age,participant_id,stage,outcome\n61, anna ,1.0,0\n?,bert,2,2.0\n55,anna, NA,0\n"


@pytest.fixture
def read(tmp_path):
    def read(text, classes=CLASSES, target="outcome", encoding="utf-8"):
        (tmp_path / TABLE).write_bytes(text.encode(encoding))
        return read_table_store(tmp_path, "North", target, classes)

    return read


def test_cells_participants_and_classes(read, tmp_path):
    store = read(TEXT)
    assert (store.site, store.place, store.synthetic) == ("North", tmp_path / TABLE, False)
    assert list(store.cells) == ["age", "stage", "outcome"]
    assert store.column("age") == ["61", None, "55"]
    assert store.column("stage") == ["1.0", "2", None]
    assert store.column("height") == [None, None, None], "a column that the site has not at all"
    assert store.owners.tolist() == [0, 1, 0]
    assert store.labels.tolist() == [0, 1, 0]
    assert [tuple(unit) for unit in store.units] == [
        ("anna", "well", 2, None),
        ("bert", "ill", 1, None),
    ]
    assert store.private_names() == ["anna", "bert"]
    assert store.held_out_fold is None


def test_rows_without_a_participant_are_participants_of_their_own(read):
    store = read("outcome\n0\n1\n")
    assert [unit.id for unit in store.units] == ["row-2", "row-3"]
    store = read("participant_id,outcome\nanna,0\n,1\n?,2\n")
    assert [unit.id for unit in store.units] == ["anna", "row-3", "row-4"]


def test_what_spreadsheets_write_is_read(read):
    text = '\ufeffage,outcome\r\n"61",0\r\n55,1\r\n,\r\n\r\n'
    assert read(text).column("age") == ["61", "55"]
    store = read("\tage\toutcome\n0\t61\t0\n1\t55\t1\n")
    assert list(store.cells) == ["age", "outcome"], "a column without a name is nobody's"
    store = read('age;outcome\n"6;1";0\n\n55;1\n')
    assert store.column("age") == ["6;1", "55"]
    assert [unit.id for unit in store.units] == ["row-2", "row-4"]


@pytest.mark.parametrize("word", ["", "?", "NA", "n/a", "NaN", "  "])
def test_words_for_a_missing_cell(read, word):
    assert read(f"age,outcome\n{word},0\n1,1\n").column("age") == [None, "1"]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [("1", "1"), ("1.0", "1"), ("-0.0", "0"), ("1e1", "10"), ("2.5", "2.5"), ("yes", "yes"),
     ("01", "1"), ("1_0", "1_0"), ("inf", "inf"), ("nan", "nan"), ("", "")],
)  # fmt: skip
def test_a_category_in_its_plainest_form(cell, expected):
    assert plain(cell) == expected


def test_a_subset_keeps_whole_participants(read):
    store = read(TEXT).subset(np.array([0]))
    assert store.column("age") == ["61", "55"]
    assert store.owners.tolist() == [0, 0]
    assert [unit.id for unit in store.units] == ["anna"]
    assert "is '55' in row 4 of" in str(store.cell_error(1, "age", "")), "rows of the file"
    assert store.labels.tolist() == [0, 0]


def test_content_alone_decides_the_fingerprint(read, tmp_path):
    store = read(TEXT)
    os.utime(tmp_path / TABLE, (1, 1))
    assert read(TEXT).fingerprint() == store.fingerprint() == store.stamp()
    assert read(TEXT.replace("61", "62")).fingerprint() != store.fingerprint()


def test_a_made_up_table_says_so(read, tmp_path):
    (tmp_path / "dataset_description.json").write_text(json.dumps({"synthetic": True}))
    store = read(TEXT)
    assert store.synthetic
    assert store.signature() == {"table": "outcome", "classes": ["well", "ill"], "synthetic": True}
    (tmp_path / "dataset_description.json").write_text("{}")
    with pytest.raises(StoreError, match=r"site 'North': .*description.json does not say"):
        read(TEXT)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "table table.csv is empty"),
        ("age,outcome\n\n,\n", "holds no row below its header"),
        ("age,age,outcome\n1,2,0\n", "has the column 'age' twice"),
        ("age,outcome\n1,0\n2\n", r"table.csv, line 3: 1 field\(s\), the header names 2"),
        ("age,outcome\n1,0\n\n2,1,7\n1,1\n", r"table.csv, line 4: 3 field\(s\), the header names"),
        ("age,outcome\n1,7\n", "'outcome' is '7' in row 2 of .*; give one of 0, 1, 2"),
        ("age;outcome\n1;0\n\n61,5;9\n", "'outcome' is '9' in row 4 of .*; give one of 0, 1, 2"),
        ('age,outcome\n"1,0\n', "table.csv, line 2: a quotation mark"),
        (
            "participant_id,outcome\nanna,0\nbert,1\nanna,1\n",
            "'outcome' is '1' in row 4 of .*; an earlier row of this participant is of another",
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(read, text, sentence):
    with pytest.raises(StoreError, match=f"^site 'North': .*{sentence}") as caught:
        read(text)
    assert "\n" not in str(caught.value)


def test_a_text_of_another_kind_is_refused(read, tmp_path):
    with pytest.raises(StoreError, match=r"site 'North': table table.csv is not UTF-8 text"):
        read("größe,outcome\n1,0\n", encoding="latin-1")
    (tmp_path / TABLE).unlink()
    with pytest.raises(StoreError, match=r"site 'North': cannot read the table .*No such file"):
        read_table_store(tmp_path, "North", "outcome", CLASSES)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("age,result\n1,0\n", "no column 'outcome', which is to be learned; it has age, result"),
        ("age,outcome\n1,0\n2,\n", "'outcome' is missing in row 3 of .*; give one of 0, 1, 2"),
    ],
)
def test_classes_may_be_unknown_until_somebody_trains_on_them(read, text, sentence):
    store = read(text)
    assert store.labels[-1] == -1
    assert store.units[-1].stratum is None
    with pytest.raises(StoreError, match=f"^site 'North': .*{sentence}"):
        store.require_classes()
    store = read(text.replace("result", "outcome").replace("2,\n", "2,1\n"))
    store.require_classes()


@pytest.mark.parametrize("cells", [("0", "secret-7"), ("0", "")])
def test_what_leaves_the_site_names_the_column_and_no_patient(read, cells):
    rows = "".join(f"p{k},{cell}\n" for k, cell in enumerate(cells))
    with pytest.raises(StoreError) as caught:
        read(f"participant_id,outcome\n{rows}").require_classes()
    assert "row 3" in str(caught.value)
    assert "'outcome' has a cell that cannot be used" in caught.value.public
    for private in ("secret", "row 3", "p1", str(TABLE)):
        assert private not in caught.value.public


def test_any_other_sentence_may_leave_as_it_is():
    assert StoreError("one sentence").public == "one sentence"


def test_a_table_is_written_whole_and_for_its_owner_alone(tmp_path):
    def broken():
        yield ["1", "0"]
        raise RuntimeError("the source ended")

    file = write_table_store(tmp_path / "North", ("age", "outcome"), [[1, 0], ["a,b", ""]])
    assert file.read_text() == 'age,outcome\n1,0\n"a,b",\n'
    assert not stat.S_IMODE(file.stat().st_mode) & 0o077
    with pytest.raises(RuntimeError, match="ended"):
        write_table_store(tmp_path / "North", ("age", "outcome"), broken())
    assert file.read_text() == 'age,outcome\n1,0\n"a,b",\n'
    assert [path.name for path in (tmp_path / "North").iterdir()] == [TABLE]
