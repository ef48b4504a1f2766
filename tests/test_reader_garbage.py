"""Whatever stands in a file ends in rows, or in one line that names the file or a flag: by hypothesis."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CELL, some
from text_cls import TextClsRecipe

from accumft.data.splits import load_classification_data, read_splits
from accumft.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples: each overwrites the files of the one before."""
    return tmp_path_factory.mktemp("properties")


def outcome(path: Path, **fields: object) -> str:
    """ "read" or "refused"; raises for anything but data, or a UserError of one line that names the file or a flag."""
    recipe = TextClsRecipe(**{"train_file": str(path), "validation_split": 0.0, **fields})  # type: ignore[arg-type]
    try:
        data = load_classification_data(read_splits(recipe), recipe)
    except UserError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        assert str(path) in message or message.startswith("--"), message
        return "refused"
    assert len(data.train) >= 1
    assert all(text.strip() for text in data.train["text"])
    assert all(len(note.splitlines()) == 1 for note in data.notes)
    return "read"


PIECES = [b"text", b"label", b",", b";", b"\t", b'"', b"\n", b"\r", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xe8\x83\xb8"]
PIECES += [b"text,label\n", b"a", b"b", b"0", b"1.5", b"\xd0\xd8", b"\xed\xa0\x80", b"\xff\xfe", b"x,a\ny,b\n", b" "]
PIECES += [
    b'{"text": "x", "label": ',
    b'"a"}',
    b"1}",
    b"[",
    b"]",
    b"{",
    b"}",
    b":",
    b"null",
    b"NaN",
    b"1e999",
    b"\\ud800",
]
PIECES += [b'{"data": ', b"PAR1", b"PK\x03\x04", b"[[[[", b'["a"]}', b'{"a": 1}}', b"9" * 30, b"__row__", b"true"]
BYTES = st.binary(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=14).map(b"".join)
CELLS = st.sampled_from(
    [b"x", b"a", b"b", b"0", b"1", b"1.5", b"true", b"", b" ", b'"q"', b"a|b", b"\xe8\x83\xb8", b"\xe9", b'"']
)
ROWS = st.lists(st.tuples(CELLS, CELLS).map(b",".join), max_size=5).map(b"\n".join)
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gb18030", "latin-1", "utf-7", "cp1252"]
OPTIONS = st.just({}) | st.fixed_dictionaries(
    {},
    optional={
        "delimiter": st.sampled_from([",", ";", "tab", " ", '"', "a"]),
        "quotechar": st.sampled_from(["", '"', "'", ",", "x"]),
        "encoding": st.sampled_from(ENCODINGS),
        "on_bad_row": st.sampled_from(["error", "skip"]),
        "label_delimiter": st.sampled_from(["|", ",", ""]),
        "problem_type": st.sampled_from(["single_label_classification", "multi_label_classification", "regression"]),
        "column_names": st.just(("text", "label")),
    },
)


def test_any_bytes_as_delimited_text(folder):
    seen = Counter()

    @some(400)
    @given(
        st.sampled_from([b"", b"text,label\nx,a\n", b"text,label\n"]),
        BYTES | ROWS | ROWS,
        st.sampled_from([".csv", ".tsv", ".txt"]),
        OPTIONS,
    )
    def look(start, content, suffix, options):
        path = folder / f"c{suffix}"
        path.write_bytes(start + content)
        seen[outcome(path, **options)] += 1

    look()
    assert seen["read"] > 20 and seen["refused"] > 100, seen


def test_any_bytes_as_json(folder):
    seen = Counter()
    lines = st.lists(
        st.sampled_from(["a", "b", 1, 0.5, None, ["a"]]).map(lambda v: {"text": "x", "label": v}), min_size=1
    )

    @some(300)
    @given(
        BYTES | lines.map(json.dumps).map(str.encode), st.sampled_from([".json", ".jsonl"]), st.sampled_from(ENCODINGS)
    )
    def look(content, suffix, encoding):
        path = folder / f"c{suffix}"
        path.write_bytes(content)
        seen[outcome(path, encoding=encoding)] += 1

    look()
    assert seen["read"] > 5 and seen["refused"] > 100, seen


LEAVES = {
    "null": st.none(),
    "booleans": st.booleans(),
    "integers": st.integers(-5, 5) | st.integers(),
    "numbers": st.floats() | st.integers(),
    "texts": CELL | st.text(max_size=4),
}
ANY = st.one_of(*LEAVES.values())
NESTED = st.recursive(
    ANY, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CELL, inner, max_size=3), max_leaves=6
)
# Mostly of one kind, as else they are refused before anything else can happen.
KINDS = [*LEAVES.values(), *(st.lists(leaf, max_size=3) for leaf in LEAVES.values()), NESTED]


def test_any_json_as_texts_and_labels(folder):
    seen = Counter()

    @some(400)
    @given(st.data(), st.sampled_from(KINDS), st.sampled_from([CELL, CELL, NESTED]), st.sampled_from(["error", "skip"]))
    def look(data, labels, texts, on_bad_row):
        row = st.fixed_dictionaries(
            {"text": texts, "label": labels}, optional={"more": NESTED if texts is NESTED else ANY}
        )
        rows = data.draw(st.lists(row, min_size=1, max_size=5))
        path = folder / "d.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        seen[outcome(path, on_bad_row=on_bad_row)] += 1

    look()
    assert seen["read"] > 20 and seen["refused"] > 100, seen


@some(60)
@given(st.integers(0, 1000), st.binary(max_size=30))
def test_a_parquet_file_that_ends_too_soon(folder, length, more):
    pq.write_table(pa.table({"text": ["x", "y"], "label": ["a", "b"]}), folder / "whole.parquet")
    content = (folder / "whole.parquet").read_bytes()
    (folder / "e.parquet").write_bytes(content[: length % len(content)] + more)
    assert outcome(folder / "e.parquet") == "refused"
