"""Whatever is written is read back: by hypothesis."""

import csv
import json
import re
import unicodedata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CELL, TEXT, some
from text_cls import TextClsRecipe

from accumft.data.files import ROW_COLUMN, read_table
from accumft.data.splits import load_classification_data, read_splits
from accumft.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples: each overwrites the files of the one before."""
    return tmp_path_factory.mktemp("properties")


NAMES = st.lists(CELL.map(str.strip).filter(bool), min_size=2, max_size=4, unique=True)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    """(names, rows)."""
    names = draw(NAMES)
    return names, draw(st.lists(st.lists(CELL, min_size=len(names), max_size=len(names)), max_size=5))


@some(150)
@given(
    tables(), st.sampled_from(",;\t|:"), st.sampled_from("\"'"), st.sampled_from(["\r\n", "\n", "\r"]), st.booleans()
)
def test_delimited_text_comes_back_cell_for_cell(folder, content, delimiter, quotechar, end, mark):
    names, rows = content
    encoding = "utf-8-sig" if mark else "utf-8"
    with open(folder / "a.csv", "w", encoding=encoding, newline="") as file:
        # All is quoted: before Python 3.13, csv writes a lone line end of another kind without quotes.
        csv.writer(file, delimiter=delimiter, quotechar=quotechar, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(
            [names, *rows]
        )
    read = read_table(str(folder / "a.csv"), delimiter=delimiter, quotechar=quotechar)
    assert read.column_names == [*names, ROW_COLUMN]
    assert [[row[name] for name in names] for row in read] == rows
    assert read[ROW_COLUMN][:] == list(range(1, len(rows) + 1))


@some(100)
@given(
    st.lists(st.tuples(CELL, CELL), max_size=5), st.sampled_from([",csv", ";csv", "\tcsv", "|csv", "\ttsv", "\ttxt"])
)
def test_the_delimiter_of_a_plain_header_is_seen(folder, rows, kind):
    delimiter, suffix = kind[0], kind[1:]
    with open(folder / f"b.{suffix}", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([("text", "label"), *rows])
    read = read_table(str(folder / f"b.{suffix}"))
    assert [(row["text"], row["label"]) for row in read] == rows


VALUES = {
    "texts": st.text(max_size=8),  # lone surrogates too
    "integers": st.integers(-(2**63), 2**63 - 1),
    "booleans": st.booleans(),
    "lists": st.lists(TEXT, max_size=3),
}


@st.composite
def objects(draw: st.DrawFn) -> list[dict[str, object]]:
    """Rows whose keys have one kind each; some of them lack a key, or have null for a value."""
    keys = draw(st.dictionaries(st.text(max_size=4), st.sampled_from(list(VALUES)), min_size=1, max_size=3))
    keys = {key: kind for key, kind in keys.items() if key != ROW_COLUMN and "\0" not in key}
    row = st.fixed_dictionaries({}, optional={key: st.none() | VALUES[kind] for key, kind in keys.items()})
    return draw(st.lists(row, min_size=1, max_size=5))


def has_half_a_character(values: object) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in json.dumps(values, ensure_ascii=False))


@some(150)
@given(objects(), st.sampled_from(["jsonl", "json"]), st.sampled_from(["\n", "\r\n", "\r", "\n\n"]), st.booleans())
def test_json_comes_back_value_for_value_or_names_the_row(folder, rows, suffix, end, ascii_only):
    path = folder / f"a.{suffix}"
    ascii_only = ascii_only or has_half_a_character(rows)
    written = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    content = "[" + ("," + end).join(written) + "]" if suffix == "json" else end.join(written)
    path.write_text(content, encoding="utf-8", newline="")
    if has_half_a_character(rows):
        bad = {i for i, row in enumerate(rows, start=1) if has_half_a_character(row)}
        step = 2 if end == "\n\n" else 1
        places = [f"row {i}:" if suffix == "json" else f"line {1 + (i - 1) * step}:" for i in bad]
        with pytest.raises(UserError, match="half a character") as raised:
            read_table(str(path))
        assert any(str(raised.value).startswith(f"{path}, {place}") for place in places)
        return
    read = read_table(str(path))
    names = list(dict.fromkeys(name for row in rows for name in row))
    assert read.column_names == [*names, ROW_COLUMN]
    if names:
        assert [[row[name] for name in names] for row in read] == [[row.get(name) for name in names] for row in rows]


@some(60)
@given(
    st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=6),
    st.sampled_from([pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]),
)
def test_parquet_comes_back_cell_for_cell(folder, texts, kind):
    column = pa.array(texts, pa.string()).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(texts, kind)
    pq.write_table(pa.table({"text": column}), folder / "a.parquet")
    assert read_table(str(folder / "a.parquet"))["text"][:] == texts


LABEL = CELL.filter(lambda text: text.strip() and not re.fullmatch(r"[+-]?[0-9.]+", text.strip()))  # "1.0" is 1


@some(100)
@given(st.lists(LABEL, min_size=2, max_size=6), st.sampled_from([".jsonl", ".csv", ".parquet"]))
def test_labels_come_back_by_their_names_in_every_format(folder, labels, suffix):
    path, texts = folder / f"f{suffix}", [f"t{i}" for i in range(len(labels))]
    if suffix == ".jsonl":
        rows = [json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=True)]
        path.write_text("\n".join(rows))
    elif suffix == ".csv":
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("text", "label"), *zip(texts, labels, strict=True)])
    else:
        pq.write_table(pa.table({"text": texts, "label": labels}), path)
    expected = [unicodedata.normalize("NFC", label.strip()) for label in labels]
    problem_type = "single_label_classification"
    recipe = TextClsRecipe(train_file=str(path), validation_split=0.0, problem_type=problem_type)
    if len(set(expected)) == 1:
        with pytest.raises(UserError, match="every row has the label"):
            load_classification_data(read_splits(recipe), recipe)
        return
    data = load_classification_data(read_splits(recipe), recipe)
    assert [data.labels.names[i] for i in data.train["labels"]] == expected
    assert data.train["text"][:] == texts
