"""Tables of many rows are not copied, and say the same as copies."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from text_cls import TextClsRecipe

from accumft.data import examples, files
from accumft.data.files import ROW_COLUMN, cells_of, numbers_of, to_dataset, unmapped
from accumft.data.splits import ClassificationData, load_classification_data


def table(rows: int = 60, **columns: Any) -> datasets.Dataset:
    """Texts of which each third stands there twice, and labels; the row numbers begin at 101."""
    texts = [f"note {i - 1 if i % 3 == 1 else i} " + "x" * (i % 5) * (i % 3 == 2) for i in range(rows)]
    return datasets.Dataset.from_dict(
        {"text": texts, "label": ["ab"[i % 2] for i in range(rows)], ROW_COLUMN: list(range(101, 101 + rows))} | columns
    )


def loaded(monkeypatch: pytest.MonkeyPatch, copied: int, source: datasets.Dataset, **fields: Any) -> ClassificationData:
    monkeypatch.setattr(examples, "ROWS_COPIED", copied)
    return load_classification_data({"train": source}, TextClsRecipe(validation_split=0.3, **fields))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one label": ({}, {}),
    "skipped rows": ({"text": ["note", *[f"{i}" for i in range(58)], " "]}, {"on_bad_row": "skip"}),
    "pairs": ({"other": [f"answer {i}" for i in range(60)]}, {"text_column": ("other", "text")}),
    "several labels": ({"label": [["a"] * (i % 2) + ["b"] * (i % 3 > 0) for i in range(60)]}, {}),
    "a number": ({"label": [i / 3 for i in range(60)]}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mapping_says_what_a_copy_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, fields = CASES[case]
    copied = loaded(monkeypatch, 10**9, table(**columns), **fields)
    mapped = loaded(monkeypatch, 0, table(**columns), **fields)
    assert copied.notes == mapped.notes
    assert list(copied.splits) == list(mapped.splits) == ["train", "validation"]
    for name, split in copied.splits.items():
        other = mapped.splits[name]
        assert split._indices is None and other._indices is not None
        assert split.features == other.features
        assert split[:] == other[:]
    source = table(**columns)
    of_row = dict(zip(source[ROW_COLUMN], source["text"], strict=True))
    text = "text_pair" if case == "pairs" else "text"
    for split in mapped.splits.values():
        assert [of_row[row] for row in split["row"]] == split[text][:]


def test_no_text_is_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table(6000).save_to_disk(str(tmp_path / "saved"))
    saved = files.read_folder(str(tmp_path / "saved"))["train"]
    monkeypatch.setattr(examples, "ROWS_COPIED", 0)
    before = pa.total_allocated_bytes()
    data = load_classification_data({"train": saved}, TextClsRecipe(on_bad_row="skip"))
    grown = pa.total_allocated_bytes() - before
    # Row, label and row number, 8 bytes each, of all and of the drawn rows: far from the texts' own size.
    assert len(data.train) == 5400
    assert data.train["text"][:3] == saved["text"][:3]
    assert data.train.data.column("text").chunk(0).buffers()[2].address == (
        saved.data.column("text").chunk(0).buffers()[2].address
    )
    assert grown < 6000 * 60


@pytest.mark.parametrize("kind", ["large_string", "string_view"])
def test_texts_of_other_types(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "_CHUNK", 7)
    source = table()
    arrow = source.with_format("arrow")[:]
    other = to_dataset(arrow.set_column(0, "text", arrow["text"].cast(kind)).replace_schema_metadata(None))
    expected = loaded(monkeypatch, 10**9, source)
    found = loaded(monkeypatch, 10**9, other)
    for name, split in expected.splits.items():
        assert found.splits[name].features == split.features
        assert found.splits[name][:] == split[:]


def test_a_table_that_is_a_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    order = np.random.default_rng(0).permutation(60)
    selected = table().select(order)
    copy = datasets.Dataset.from_dict(selected[:])
    found, expected = loaded(monkeypatch, 0, selected), loaded(monkeypatch, 0, copy)
    for name, split in expected.splits.items():
        assert found.splits[name][:] == split[:]


@pytest.mark.parametrize("rows", [[58, 1, 2, 2, 5, 0], [0, 1, 3, 4, 6, 59]])
@pytest.mark.parametrize(("at_once", "sizes"), [(1, [1] * 6), (2, [2, 2, 2]), (4, [4, 2]), (100, [6])])
def test_columns_of_a_selection(
    rows: list[int], at_once: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ROWS_AT_ONCE", at_once)
    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["a", "b"]),
            "one": datasets.Value("float64"),
            "two": datasets.List(datasets.Value("float32")),
        }
    )
    columns = {"label": [0, 1, 1] * 20, "one": [i / 3 for i in range(60)], "two": [[i, i + 0.5] for i in range(60)]}
    some = datasets.Dataset.from_dict(columns, features=features).select(rows)
    assert list(cells_of(some, "one")) == list(some["one"])
    for name, kind, shape in (("label", np.int64, (6,)), ("one", np.float64, (6,)), ("two", np.float64, (6, 2))):
        found = numbers_of(some, name)
        assert (found.dtype, found.shape) == (kind, shape)
        assert (found == np.asarray(some[name][:])).all()
    plain = unmapped(some)
    assert plain._indices is None and plain.features == some.features
    assert plain[:] == some[:]
    assert [block.num_rows for block in files.blocks_of(some)] == sizes
    assert unmapped(plain) is plain
    assert unmapped(some.select([])).features == some.features
    assert numbers_of(plain.select([]), "one").shape == (0,)
