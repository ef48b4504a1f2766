"""Files that are wrong, or look so, in every way that we could think of, each with what a person expects of it."""

import datetime
import gzip
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

MILLION = "x" * 10**6
COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


@dataclass(frozen=True)
class Read:
    """The file is read: its texts and labels in order. `notes`: what each of the remarks holds, in order."""

    texts: Sequence[str]
    labels: Sequence[Any]
    """The name of each row's label; a list of names, or a number."""
    problem_type: str = "single_label_classification"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A UserError of one line that begins with the file, and holds these parts."""

    parts: tuple[str, ...]

    def __init__(self, *parts: str) -> None:
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True)
class Case:
    about: str
    name: str
    """Of the file; its suffix decides how it is read."""
    content: bytes | str | pa.Table | Callable[[Path], object]
    """Bytes; a text, written as UTF-8; a table, written as Parquet; or what makes the file itself."""
    expected: Read | Refused
    recipe: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        if isinstance(self.content, bytes | str):
            path.write_bytes(self.content if isinstance(self.content, bytes) else self.content.encode())
        elif isinstance(self.content, pa.Table):
            pq.write_table(self.content, path)
        else:
            self.content(path)
        return path


def lines(*rows: dict[str, Any]) -> str:
    """JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(text: Any = ("x", "y"), label: Any = ("a", "b"), **more: Any) -> pa.Table:
    """Two rows, unless other columns are given."""
    return pa.table({"text": pa.array(text), "label": pa.array(label), **more})


def with_features(columns: pa.Table, features: datasets.Features) -> pa.Table:
    """A table whose metadata are those that `datasets` writes, whether they fit or not."""
    return columns.replace_schema_metadata(features.arrow_schema.metadata)


def not_utf_8() -> pa.Table:
    """The second text is bytes that no encoder writes; Arrow does not look at them."""
    offsets, characters = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"x\xff")
    return table(pa.Array.from_buffers(pa.string(), 2, [None, offsets, characters]))


def folder(*files: tuple[str, str]) -> Callable[[Path], None]:
    """A directory that holds these files."""

    def make(path: Path) -> None:
        path.mkdir()
        for name, content in files:
            (path / name).write_text(content)

    return make


def loop(path: Path) -> None:
    path.symlink_to(path)


TWO = lines({"text": "x", "label": "a"}, {"text": "y", "label": "b"})
XY = Read(("x", "y"), ("a", "b"))
MULTI, REGRESSION = "multi_label_classification", "regression"
SEEN_ONCE = "text\tlabel\n" + "".join(f"t{i}\t{'ab'[i % 2]}\n" for i in range(20)) + "t20\tc\n"
TEN_THOUSAND = [f"class {i:04}" for i in range(10_000)]
DATE = datetime.date(2024, 2, 29)
IMAGE = datasets.Features({"text": datasets.Value("string"), "label": datasets.Image()})
TWO_CLASSES = datasets.ClassLabel(names=["no", "yes"])
CLASSES = datasets.Features({"text": datasets.Value("string"), "label": TWO_CLASSES})
CLASS_LISTS = datasets.Features({"text": datasets.Value("string"), "label": datasets.List(TWO_CLASSES)})
LINES_5000 = [json.dumps({"text": f"t{i}", "label": "ab"[i % 2]}) for i in range(1, 6001)]


def other_schema(row: dict[str, Any]) -> str:
    """6,000 JSON lines, of which line 5,000 is another."""
    return "\n".join([*LINES_5000[:4999], json.dumps(row), *LINES_5000[5000:]])


CASES = [
    # Nothing, or hardly anything
    *(Case("empty file", f"a{suffix}", b"", Refused("is empty")) for suffix in (".tsv", ".txt", ".ndjson")),
    Case("nothing but white space", "a.jsonl", " \n\r\n\t\n", Refused("holds no rows")),
    Case("nothing but white space", "a.json", " \n", Refused("line 2: not valid JSON")),
    Case("an empty array", "a.json", "[]", Refused("holds no rows")),
    Case("an empty array as data", "a.json", '{"data": []}', Refused("holds no rows")),
    Case("objects without a key", "a.jsonl", "{}\n{}\n", Refused("no column 'text'", "it has no columns")),
    *(Case("header only", f"a{s}", "text\tlabel\r\n", Refused("has columns but no rows")) for s in (".tsv", ".txt")),
    Case("header only", "a.parquet", table().slice(0, 0), Refused("has columns but no rows")),
    Case("no columns", "a.parquet", pa.table({}), Refused("no column 'text'", "--text_column", "it has no columns")),
    Case("one row", "a.csv", "text,label\nx,a", Refused("every row has the label 'a'", "nothing to learn")),
    Case("one row", "a.jsonl", lines({"text": "x", "label": 1}), Refused("every row has the label '1'")),
    Case("one number", "a.parquet", table(["x"], [0.5]), Refused("every row has the same number in 'label'")),
    Case("one row of several labels", "a.json", '{"text": "x", "label": ["b", "a"]}', Read("x", [["a", "b"]], MULTI)),
    Case("one class", "a.parquet", table(label=["a", "a "]), Refused("every row has the label 'a'")),
    Case("one class", "a.txt", "text\tlabel\nx\ta\ny\ta\n", Refused("every row has the label 'a'")),
    Case("one class", "a.jsonl", TWO.replace('"b"', '"a"'), Refused("every row has the label 'a'")),
    Case("a class seen once", "a.tsv", SEEN_ONCE, Read([f"t{i}" for i in range(21)], [*"ab" * 10, "c"])),
    Case("an empty text", "a.jsonl", lines({"text": "x", "label": "a"}, {"label": "b"}), Refused("'text': row 2")),
    Case("a text that shows as nothing", "a.csv", "text,label\nx,a\n\u200b\ufeff\u00a0\u2060,b\n",
         Refused("an empty text in 'text': row 2", "--on_bad_row skip")),
    # Long, and many
    *(
        Case("a text of a million characters", name, content, Read((MILLION, "y"), ("a", "b")))
        for name, content in [
            ("a.txt", f"text\tlabel\n{MILLION}\ta\ny\tb\n"),
            ("a.json", f'[{{"text": "{MILLION}", "label": "a"}}, {{"text": "y", "label": "b"}}]'),
            ("a.parquet", table([MILLION, "y"])),
        ]
    ),
    Case("10,000 labels", "a.csv", "text,label\n" + "".join(f"t,{label}\n" for label in TEN_THOUSAND * 2),
         Read(["t"] * 20_000, TEN_THOUSAND * 2, notes=("with different labels: 1",))),
    Case("10,000 labels, each once", "a.parquet", table(TEN_THOUSAND, TEN_THOUSAND),
         Refused("no two of its 10000 rows have the same label", "--label_column")),
    # Characters
    Case("a NUL byte", "a.txt", b"text\tlabel\nx\ta\ny\0\tb\n", Refused("line 3: holds a NUL byte", "remove it")),
    Case("a NUL byte", "a.jsonl", TWO.replace("y", "\0"), Refused("line 2: holds a NUL byte")),
    Case("an escaped NUL", "a.jsonl", TWO.replace("y", "y\\u0000"), Read(("x", "y\0"), ("a", "b"))),
    Case("a NUL", "a.parquet", table(["x", "y\0"]), Read(("x", "y\0"), ("a", "b"))),
    Case("a lone surrogate", "a.jsonl", TWO.replace("y", "\\ud83d"), Refused("line 2: 'text'", "half a character")),
    Case("one in a label", "a.json", '[{"label": "\\udc00"}]', Refused("row 1: 'label'", "half a character")),
    Case("one in a list", "a.jsonl", '{"label": ["\\udc00"]}', Refused("line 1: 'label'", "half a character")),
    Case("one in a key", "a.jsonl", TWO + '{"\\ud83d": 1}', Refused("line 3: the key '\\ud83d'", "half a character")),
    Case("the bytes of one", "a.csv", b"text,label\nx,a\n\xed\xa0\x80,b\n", Refused("row 2 (line 3)", "0xed")),
    Case("no UTF-8", "a.parquet", not_utf_8(), Refused("row 2: 'text' is damaged", "write the file anew")),
    Case("mixed line ends", "a.jsonl", TWO.replace("\n", "\r", 1) + "\r\n\n", XY),
    Case("mixed line ends", "a.txt", "text\tlabel\rx\ta\r\ny\tb\n\r", XY),
    Case("quotes without an end", "a.tsv", 'text\tlabel\nx\ta\n"y\tb\n', Refused("row 2 (line 3)", '--quotechar ""')),
    Case("quotes without an end", "a.txt", 'text\t"label\nx\ta\n', Refused("line 1 (the header)", '--quotechar ""')),
    Case("quotes without an end", "a.jsonl", TWO.replace('"b"', '"b'), Refused("line 2: not valid JSON")),
    Case("quotes without an end", "a.json", '[{"text": "x}]', Refused("line 1: not valid JSON")),
    Case("commas as quotes", "a.csv", ",text,;label\nx;a\ny;b\n", XY, {"quotechar": ","}),
    # Columns
    Case("a column twice", "a.tsv", "text\tlabel\t text\nx\ta\ty\n", Refused("several columns are named 'text'")),
    Case("a key twice", "a.jsonl", TWO + '{"text": "x", "text": "y"}', Refused("line 3: the key 'text' stands twice")),
    Case("a key twice", "a.json", '[{"label": 1, "label": 1}]', Refused("row 1: the key 'label' stands twice")),
    Case("a key twice, deep down", "a.jsonl", TWO.replace('"b"', '"b", "more": {"k": 1, "k": 2}'), XY),
    Case("a name in another Unicode form", "a.csv", f"{DECOMPOSED},label\nx,a\n",
         Refused(f"no column '{COMPOSED}'", "another Unicode form", "'cafe\\u0301'"), {"text_column": (COMPOSED,)}),
    Case("a NUL in a name", "a.jsonl", TWO.replace("text", "te\\u0000xt"), Refused("'te\\x00xt' holds a NUL")),
    Case("a NUL in a name", "a.parquet", table(**{"a\0b": [1, 2]}), Refused("'a\\x00b' holds a NUL", "rename it")),
    Case("a name of ours", "a.csv", "text,label,__row__\nx,a,7\ny,b,z\n", Refused("'__row__'", "rename it")),
    Case("a type of another program", "a.parquet", table(more=pa.array([b"0123456789abcdef"] * 2, pa.uuid())),
         Refused("'more' is of the type extension<arrow.uuid>", "leave this column out")),
    Case("metadata that do not fit", "a.parquet", table().replace_schema_metadata({"huggingface": "{"}),
         Refused("its metadata do not fit", "write it anew")),
    # Labels
    Case("integers as texts", "a.csv", "text,label\nx,10\ny,9\nz, 9\n", Read("xyz", ("10", "9", "9"))),
    Case("integers as texts", "a.jsonl", TWO.replace('"b"', '"01"'), Read("xy", ("a", "01"))),
    Case("integers", "a.parquet", table(label=pa.array([10, 9], pa.uint8())), Read("xy", ("10", "9"))),
    Case("booleans", "a.csv", "text,label\nx,True\ny,False\n", Read("xy", ("True", "False"))),
    Case("booleans", "a.json", '[{"text": "x", "label": true}, {"text": "y", "label": false}]',
         Read("xy", ("True", "False"))),
    Case("booleans", "a.parquet", table(label=[True, False]), Read("xy", ("True", "False"))),
    Case("booleans in two spellings", "a.tsv", "text\tlabel\nx\tTrue\ny\ttrue\n",
         Read("xy", ("True", "true"), notes=("'True' and 'true'",))),
    Case("dates", "a.csv", "text,label\nx,2024-02-29\ny,2024-03-01\n", Read("xy", ("2024-02-29", "2024-03-01"))),
    Case("dates", "a.parquet", table(label=[DATE, DATE]), Refused("row 1: 'label' is of type date")),
    Case("times", "a.parquet", table(label=[datetime.datetime(2024, 1, 1)] * 2), Refused("of type datetime")),
    Case("nested JSON as label", "a.jsonl", TWO.replace('"a"', "null").replace('"b"', '{"c": {"d": [1]}}'),
         Refused("row 2: 'label' is of type dict"), {"on_bad_row": "skip"}),
    Case("nested JSON as text", "a.json", '[{"text": {"t": "x"}, "label": 1}]', Refused("--text_column", "type dict")),
    Case("lists of lists", "a.jsonl", '{"text": "x", "label": [["a"]]}', Refused("row 1: 'label' is [['a']]")),
    Case("another schema in line 5,000", "a.jsonl", other_schema({"note": "t", "kind": 3}),
         Refused("an empty text in 'text': row 5000; no label in 'label': row 5000")),
    Case("another kind in line 5,000", "a.json", other_schema({"text": 7, "label": "a"}),
         Refused("line 5000: 'text' is a number, but a text in line 1")),
    Case("a number beyond all", "a.jsonl", TWO.replace('"b"', "1" * 5000), Refused("line 2", "digits")),
    Case("a number beyond 64 bits", "a.json", f'[{{"label": {2**70}}}]', Refused("row 1: 'label' does not fit")),
    Case("no finite number", "a.jsonl", '{"text": "x", "label": 0.5}\n{"text": "y", "label": Infinity}\n',
         Refused("row 2: 'label' is 'inf', not a finite number"), {"problem_type": REGRESSION}),
    *(Case("labels that only look different", f"a{s}", content, Read("xyz", (COMPOSED, COMPOSED, "b")))
      for s, content in [
          (".csv", f"text,label\nx,{COMPOSED}\ny,{DECOMPOSED} \nz,b\n"),
          (".jsonl", lines(*({"text": t, "label": v} for t, v in zip("xyz", (COMPOSED, f"\t{DECOMPOSED}", "b"))))),
          (".parquet", table([*"xyz"], [f"{COMPOSED}\u3000", DECOMPOSED, "b"])),
      ]),
    Case("labels that hardly differ", "a.txt", "text\tlabel\nx\tFever\ny\tfever\nz\tfe\u200bver\n",
         Read("xyz", ("Fever", "fever", "fe\u200bver"),
              notes=("'Fever' and 'fever', 'Fever' and 'fe\\u200bver'",))),
    Case("a class without a name", "a.parquet", with_features(table(label=[1, 2]), CLASSES),
         Refused("row 2: 'label' is class 2, but the file names 2")),
    *(Case("one in a list", "a.parquet", with_features(table(label=[[1], [n]]), CLASS_LISTS), Refused("row 2", part))
      for n, part in [(-1, "'label' is class -1"), (None, "a list of labels holds texts or integers")]),
    Case("a picture, to be opened", "a.parquet",
         with_features(table(label=pa.array([{"path": "/etc/passwd"}] * 2, datasets.Image.pa_type)), IMAGE),
         Refused("--label_column", "type image")),
    # No file
    *(Case("a directory", f"a{s}", folder(), Refused("a folder, but not one")) for s in (".csv", ".parquet")),
    Case("no data set", "a", folder(("state.json", "[]"), ("dataset_info.json", "{}")), Refused("cannot be read")),
    Case("no data set", "a", folder(("state.json", "{}"), ("dataset_info.json", "{}")), Refused("cannot be read")),
    Case("no splits", "a", folder(("dataset_dict.json", '{"splits": []}')), Refused("holds no splits")),
    *(Case("a loop of links", f"a{s}", loop, Refused("Too many levels of symbolic")) for s in (".jsonl", ".parquet")),
    Case("a link to nothing", "a.tsv", lambda path: path.symlink_to("absent"), Refused("no such file")),
    Case("a pipe", "a.csv", os.mkfifo, Refused("a pipe or a device", "save its content as a file")),
    *(Case("gzip by another name", f"a{s}", gzip.compress(TWO.encode()), Refused("compressed with gzip"))
      for s in (".txt", ".jsonl", ".json")),
    Case("gzip by another name", "a.parquet", gzip.compress(TWO.encode()), Refused("not a readable Parquet file")),
    Case("a name of no encoding", os.fsdecode(b"\xff.jsonl"), TWO, XY),
]  # fmt: skip
