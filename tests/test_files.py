"""Reading one source into a table: what the cells are, and what is said about files that cannot be read."""

import csv
import gzip
import json
import os
import random
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accumft.data.encodings import likely_encodings
from accumft.data.files import ROW_COLUMN, read_table
from accumft.errors import UserError

CHINESE = "患者男性，六十五岁，因反复胸痛三天入院，既往有高血压病史。"


def write(path: Path, content: str | bytes, encoding: str = "utf-8") -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
    return str(path)


def error_of(path: str, **options) -> str:
    with pytest.raises(UserError) as raised:
        read_table(path, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


# Cells


def test_cells_of_text_files_are_texts_exactly_as_written(tmp_path):
    words = ["null", "NA", "None", "nan", "", " two  spaces ", "007", "1.0", "true", "-", "N/A", "#N/A", "inf"]
    path = write(tmp_path / "a.csv", "text,label\n" + "".join(f"{word},{word}\n" for word in words))
    table = read_table(path)
    assert table["text"][:] == table["label"][:] == words
    assert table.features["text"].dtype == "string"
    assert table[ROW_COLUMN][:] == list(range(1, 14))
    assert table.features[ROW_COLUMN].dtype == "int64"


def test_quotes_newlines_crlf_and_byte_order_mark(tmp_path):
    content = '\ufefftext,label\r\n"one, ""two""\r\nthree",a\r\n\r\nplain "5\'3" tall,b\r\n"",c\r\n'
    table = read_table(write(tmp_path / "a.csv", content))
    assert table.column_names == ["text", "label", ROW_COLUMN]
    assert table["text"][:] == ['one, "two"\r\nthree', 'plain "5\'3" tall', ""]
    assert table["label"][:] == ["a", "b", "c"]
    assert table[ROW_COLUMN][:] == [1, 2, 3]  # the blank line is no row


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_of_any_kind(tmp_path, end):
    assert read_table(write(tmp_path / "a.csv", f"a,b{end}1,2{end}3,4"))["b"][:] == ["2", "4"]


def test_mixed_line_ends(tmp_path):
    assert read_table(write(tmp_path / "a.csv", "a,b\r\n1,2\n3,4\r5,6\n"))["a"][:] == ["1", "3", "5"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "UTF8", "gb18030", "gbk", "utf-16"])
def test_encodings(tmp_path, encoding):
    path = write(tmp_path / "a.csv", f"文本,类别\n{CHINESE},内科\n", encoding)
    table = read_table(path, encoding=encoding)
    assert table.column_names == ["文本", "类别", ROW_COLUMN]
    assert table[0] == {"文本": CHINESE, "类别": "内科", ROW_COLUMN: 1}


@pytest.mark.parametrize("encoding", ["utf-8", "gb18030", "utf-16"])
@pytest.mark.parametrize("delimiter", list(",;\t|"))
def test_whatever_is_written_is_read(tmp_path, delimiter, encoding):
    draw = random.Random(0)
    pieces = [*",;\t|\"\r\n '\\\x0b\x1c\x85\u2028\ufeff", "\r\n", '""', "a", "é", "胸痛", "😷", "NA", "0"]
    for _ in range(40):
        rows = [
            ["".join(draw.choices(pieces, k=draw.randrange(6))) for _ in range(2)] for _ in range(draw.randrange(9))
        ]
        with open(tmp_path / "a.csv", "w", encoding=encoding, newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([["first", "second"], *rows])
        table = read_table(str(tmp_path / "a.csv"), encoding=encoding)
        assert [[row["first"], row["second"]] for row in table] == rows


def test_a_cell_of_a_million_characters_and_the_limit_of_the_csv_module_stays(tmp_path):
    before = csv.field_size_limit(1_000)
    table = read_table(write(tmp_path / "a.csv", f"text,label\n{'x' * 10**6},a\n"))
    assert len(table["text"][0]) == 10**6
    assert csv.field_size_limit(before) == 1_000


def test_more_rows_than_one_chunk_stay_in_order(tmp_path):
    table = read_table(write(tmp_path / "a.csv", "text,label\n" + "".join(f"t{i},{i % 7}\n" for i in range(12_345))))
    assert len(table) == 12_345
    assert table["text"][:] == [f"t{i}" for i in range(12_345)]
    assert table[ROW_COLUMN][-1] == 12_345


def test_header_only_has_columns_and_no_rows(tmp_path):
    table = read_table(write(tmp_path / "a.csv", "text,label\n"))
    assert len(table) == 0
    assert table.column_names == ["text", "label", ROW_COLUMN]
    assert table.features["text"].dtype == "string"


def test_names_are_stripped_and_unnamed_columns_get_a_name(tmp_path):  # pandas' index has no name
    assert read_table(write(tmp_path / "a.csv", ", text ,label\n0,x,y\n")).column_names[:3] == [
        "column 1",
        "text",
        "label",
    ]


def test_blank_lines_are_no_rows_but_blank_cells_are(tmp_path):
    assert read_table(write(tmp_path / "a.txt", 'text\na\n  \n\n""\nb\n'))["text"][:] == ["a", "  ", "", "b"]
    assert read_table(write(tmp_path / "b.csv", "text,label\na,x\n  \n,\nb,y\n"))["text"][:] == ["a", "", "b"]


# Dialects


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text,label\na,b\n"),
        ("a.csv", "text\tlabel\na\tb\n"),
        ("a.csv", "text;label\na;b\n"),
        ("a.CSV", "text|label\na|b\n"),
        ("a.tsv", "text\tlabel\na\tb\n"),
        ("a.txt", "text\tlabel\na\tb\n"),
        ("a.tsv", "text,label\na,b\n"),
        ("a.txt", "\n\ntext;label\na;b\n"),
    ],
)
def test_delimiter_is_seen_from_the_header(tmp_path, name, content):
    table = read_table(write(tmp_path / name, content))
    assert table[:] == {"text": ["a"], "label": ["b"], ROW_COLUMN: [1]}


def test_delimiter_in_the_data_or_in_a_quoted_name_does_not_count(tmp_path):
    table = read_table(write(tmp_path / "a.csv", '"text, long"\tlabel\none, two; three\tb\n'))
    assert table[0] == {"text, long": "one, two; three", "label": "b", ROW_COLUMN: 1}


@pytest.mark.parametrize("delimiter", ["\t", r"\t", "tab"])
def test_delimiter_as_it_is_typed(tmp_path, delimiter):
    assert read_table(write(tmp_path / "a.csv", "a,b\tc\n1,2\t3\n"), delimiter=delimiter)["a,b"][:] == ["1,2"]


def test_file_without_a_header(tmp_path):
    path = write(tmp_path / "a.txt", " Age\t 年龄, 18岁\r\nSign\t头痛\r\n")
    table = read_table(path, column_names=("label", "text"))
    assert table[:] == {"label": [" Age", "Sign"], "text": [" 年龄, 18岁", "头痛"], ROW_COLUMN: [1, 2]}


def test_without_a_header_the_delimiter_is_the_one_that_gives_as_many_cells(tmp_path):
    path = write(tmp_path / "a.csv", "Age\tolder than 18, or 17, 16\n")
    assert read_table(path, column_names=("label", "text"))["text"][:] == ["older than 18, or 17, 16"]


def test_quotes_as_ordinary_characters(tmp_path):
    path = write(tmp_path / "a.tsv", 'text\tlabel\n"open\ta\n"x" y\tb\n')
    assert read_table(path, quotechar="")["text"][:] == ['"open', '"x" y']
    assert read_table(write(tmp_path / "b.csv", "text,label\n'a,b',c\n"), quotechar="'")["text"][:] == ["a,b"]


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"delimiter": "||"}, "--delimiter"),
        ({"delimiter": ""}, "--delimiter"),
        ({"delimiter": "\n"}, "--delimiter"),
        ({"quotechar": "''"}, "--quotechar"),
        ({"delimiter": '"'}, "--quotechar"),
        ({"encoding": "utf-9"}, "--encoding"),
        ({"encoding": "hex"}, "--encoding"),
    ],
)
def test_flags_that_no_file_can_have(tmp_path, options, flag):
    assert flag in error_of(write(tmp_path / "a.csv", "a,b\n1,2\n"), **options)


# Malformed text files


def test_quote_that_is_never_closed_names_the_row_where_it_opens(tmp_path):
    path = write(tmp_path / "a.csv", 'text,label\n"two\nlines",a\n"open,b\nx,c\ny,d\n')
    message = error_of(path)
    assert message.startswith(f"{path}, row 2 (line 4): ")
    assert '--quotechar ""' in message


def test_text_behind_a_closing_quote(tmp_path):
    message = error_of(write(tmp_path / "a.csv", 'text,label\nx,a\n"Normal" exam,b\n'))
    assert "row 2 (line 3)" in message and '--quotechar ""' in message


@pytest.mark.parametrize(("row", "cells"), [("x", 1), ("x,y,z", 3)])
def test_too_few_and_too_many_cells(tmp_path, row, cells):
    message = error_of(write(tmp_path / "a.csv", f'text,label\n"a\nb",a\n{row}\nx,b\n'))
    assert f"row 2 (line 4): has {cells} cells instead of 2 (delimiter ',')" in message
    assert "--delimiter" in message


def test_wrong_number_of_column_names(tmp_path):
    message = error_of(write(tmp_path / "a.txt", "a\tb\tc\n"), column_names=("label", "text"))
    assert "row 1 (line 1): has 3 cells instead of 2" in message and "--column_names" in message


def test_columns_of_the_same_name(tmp_path):
    assert "'text'" in error_of(write(tmp_path / "a.csv", "text,label,text\na,b,c\n"))
    assert "'a'" in error_of(write(tmp_path / "b.csv", "1,2\n"), column_names=("a", "a"))


def test_nul_byte(tmp_path):
    message = error_of(write(tmp_path / "a.csv", b"text,label\na,b\nx\0y,b\n"))
    assert ", line 3: holds a NUL byte" in message


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_two_bytes_a_character_without_a_mark(tmp_path, encoding):
    path = write(tmp_path / "a.csv", "text,label\nfever,a\n", encoding)
    assert f"--encoding {encoding}" in error_of(path)
    assert read_table(path, encoding=encoding)["text"][:] == ["fever"]


# Encodings


def test_wrong_encoding_names_file_row_line_and_likely_encodings(tmp_path):
    content = b'text,label\n"two\nlines",a\n' + f"{CHINESE},b\n".encode("gb18030")
    path = write(tmp_path / "a.csv", content)
    message = error_of(path)
    assert message.startswith(f"{path}, row 2 (line 4): not in the encoding utf-8 (byte 0xbb)")
    assert "likely: gb18030" in message and message.endswith("try --encoding gb18030")
    assert read_table(path, encoding="gb18030")["text"][1] == CHINESE


def test_wrong_encoding_far_into_the_file_and_in_the_header(tmp_path):
    rows = "".join(f"row {i},a\n" for i in range(1, 3000))
    path = write(tmp_path / "a.csv", f"text,label\n{rows}".encode() + f"{CHINESE},b\n".encode("gb18030"))
    assert ", row 3000 (line 3001): " in error_of(path)
    path = write(tmp_path / "b.csv", "文本内容,类别\na,b\n", "gb18030")
    assert ", line 1 (the header): " in error_of(path)
    path = write(tmp_path / "c.txt", f"标签\t{CHINESE}\n", "gb18030")
    assert ", row 1 (line 1): " in error_of(path, column_names=("label", "text"))


def test_damaged_utf_8_is_not_taken_for_something_else(tmp_path):
    content = f"text,label\n{CHINESE},a\n{CHINESE},b\n".encode()
    message = error_of(write(tmp_path / "a.csv", content.replace("胸".encode(), "胸".encode()[:2], 1)))
    assert ", row 1 (line 2): not in the encoding utf-8" in message
    assert "repair this place" in message and "--encoding" not in message


def test_utf_8_read_as_another_encoding_is_refused_though_it_decodes(tmp_path):
    path = write(tmp_path / "a.csv", f"text,label\n{CHINESE},b\n")
    for encoding in ("latin-1", "gb18030", "ascii"):
        assert f"is UTF-8, not {encoding}: leave out --encoding" in error_of(path, encoding=encoding)


def test_a_word_that_is_utf_8_by_chance_is_read_as_stated(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\n联通,b\n", "gb18030")
    assert read_table(path, encoding="gb18030")["text"][:] == ["联通"]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (CHINESE, "gb18030"),
        ("主诉：咳嗽3天。T 38.5℃，WBC 12.3", "gb18030"),
        ("患者男性，六十五歲，因反覆胸痛三天入院，既往有高血壓病史。", "big5"),
        ("患者は六十五歳の男性で、三日前から胸の痛みがあるため入院した。", "shift_jis"),
        ("Le patient a été hospitalisé à cause d’une fièvre élevée.", "cp1252"),
        ("Größe 1,80 m, Blutdruck erhöht, Übelkeit", "cp1252"),
        (CHINESE, "utf-8"),
        (CHINESE, "utf-16"),
        ("plain\n", "utf-16-le"),
    ],
)
def test_likely_encodings_begin_with_the_right_one(text, encoding):
    assert likely_encodings(f"label,text\n1,{text}\n".encode(encoding))[0] == encoding


def test_unlikely_encodings_are_not_named():
    for text, encoding in ((CHINESE, "gb18030"), ("Le patient a été hospitalisé, fièvre élevée.", "cp1252")):
        assert likely_encodings(text.encode(encoding)) == [encoding]


def test_bytes_of_no_known_encoding_are_read_as_latin_1():
    assert likely_encodings(b"a\x81\xff\x8d \x9d\xff") == ["latin-1"]


# JSON


def test_json_forms_and_types(tmp_path):
    rows = [{"text": "NA", "n": 1, "x": 0.5, "b": True, "l": ["a", "b"]}, {"n": None, "text": "b", "l": []}]
    expected = {
        "text": ["NA", "b"], "n": [1, None], "x": [0.5, None], "b": [True, None], "l": [["a", "b"], []],
        ROW_COLUMN: [1, 2],
    }  # fmt: skip
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    contents = {
        "a.json": json.dumps(rows, indent=1),
        "b.json": json.dumps({"version": 1, "data": rows}),
        "c.json": lines,
        "d.jsonl": lines.replace("\n", "\r\n\r\n"),
        "e.ndjson": "\ufeff" + lines,
    }
    for name, content in contents.items():
        assert read_table(write(tmp_path / name, content))[:] == expected, name


def test_json_of_one_object_is_one_row(tmp_path):
    assert read_table(write(tmp_path / "a.json", '{"text": "a", "label": 1}\n'))["label"][:] == [1]


def test_json_in_another_encoding(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps({"text": CHINESE}, ensure_ascii=False), "gb18030")
    assert ", line 1: not in the encoding utf-8" in error_of(path)
    assert read_table(path, encoding="gb18030")["text"][:] == [CHINESE]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": }\n', ", line 3: not valid JSON"),
        ("a.jsonl", '{"a": 1}\n[1]\n', ", line 2: a list, not an object"),
        ("a.jsonl", "[" * 100_000, ", line 1: nested too deep"),
        ("a.json", '[{"a": 1},\n {"a": 1', ", line 2: not valid JSON"),
        ("a.json", '[{"a": 1}, "b"]', ", row 2: a text, not an object"),
        ("a.json", '{"a": {"text": 1},\n "b": 2}', "array of objects"),
        ("a.jsonl", '{"a": 1}\n\n{"a": "x"}\n', ", line 3: 'a' is a text, but a number in line 1"),
        ("a.json", '[{"a": null}, {"a": true}, {"a": 2}]', ", row 3: 'a' is a number, but a boolean in row 2"),
        ("a.jsonl", '{"a": [1]}\n{"a": ["x"]}\n', ", line 2: 'a' does not fit"),
        ("a.jsonl", '{"a": 1}\n{"a": 100000000000000000000}\n', ", line 2: 'a' does not fit"),
        ("a.jsonl", '{"a": "x"}\n{"a": "\\ud800"}\n', ", line 2: 'a' does not fit"),
    ],
)
def test_malformed_json(tmp_path, name, content, part):
    assert part in error_of(write(tmp_path / name, content))


def test_another_schema_in_line_5000(tmp_path):
    rows = [json.dumps({"text": f"t{i}", "label": i % 2}) for i in range(1, 6001)]
    rows[4999] = json.dumps({"text": "t", "label": "fever"})
    assert ", line 5000: 'label' is a text, but a number in line 1" in error_of(
        write(tmp_path / "a.jsonl", "\n".join(rows))
    )
    rows[4999] = json.dumps({"note": "t", "category": 3})  # other keys: the values are not there
    table = read_table(write(tmp_path / "b.jsonl", "\n".join(rows)))
    assert table[4999] == {"text": None, "label": None, "note": "t", "category": 3, ROW_COLUMN: 5000}


# Parquet and folders


def test_parquet_is_typed(tmp_path):
    folder = tmp_path / "year=2024"  # not a partition
    folder.mkdir()
    frame = pd.DataFrame({"text": ["NA", None], "label": [2, 3], "kind": pd.Categorical(["x", "y"]), "l": [["a"], []]})
    frame.to_parquet(folder / "a.parquet")
    table = read_table(str(folder / "a.parquet"))
    assert table[:] == {
        "text": ["NA", None], "label": [2, 3], "kind": ["x", "y"], "l": [["a"], []], ROW_COLUMN: [1, 2]
    }  # fmt: skip


def test_parquet_of_datasets_keeps_class_labels(tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    table = datasets.Dataset.from_dict({"text": ["a"], "label": [1]}, features=features).data.table
    pq.write_table(table.replace_schema_metadata(features.arrow_schema.metadata), tmp_path / "a.parquet")
    assert read_table(str(tmp_path / "a.parquet")).features["label"].names == ["no", "yes"]


def test_damaged_parquet(tmp_path):
    assert "not a readable Parquet file" in error_of(write(tmp_path / "a.parquet", b"text,label\n"))


def test_parquet_with_columns_of_the_same_name(tmp_path):
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    assert "'text'" in error_of(str(tmp_path / "a.parquet"))


def test_folder_of_datasets(tmp_path):
    table = datasets.Dataset.from_dict({"text": ["b", "a"]})
    table.with_format("numpy").save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "two")
    assert read_table(str(tmp_path / "one"))[:] == {"text": ["b", "a"], ROW_COLUMN: [1, 2]}
    assert read_table(str(tmp_path / "two" / "test"))["text"][:] == ["b", "a"]
    assert "train, test" in error_of(str(tmp_path / "two"))
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_bytes(b"damaged")
    assert "cannot be read" in error_of(str(tmp_path / "one"))


# Files that are none


def test_files_that_cannot_be_read(tmp_path):
    assert error_of(str(tmp_path / "no.csv")).endswith("no.csv: no such file")
    assert "a folder, but not one written by" in error_of(str(tmp_path))
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    assert "loop.csv: cannot be read (Too many levels of symbolic links)" in error_of(str(tmp_path / "loop.csv"))
    assert "a.xml: unknown kind of file; known are .csv, .tsv" in error_of(write(tmp_path / "a.xml", "<a/>"))
    for name in ("a.csv", "a.jsonl", "a.json", "a.parquet"):
        assert error_of(write(tmp_path / name, "")).endswith(f"{name}: is empty")
    for content in ("\n\n", " \r\n", "\ufeff"):
        assert "is empty" in error_of(write(tmp_path / "a.csv", content))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path):
    path = write(tmp_path / "a.csv", "a,b\n")
    os.chmod(path, 0)
    assert "cannot be read (Permission denied)" in error_of(path)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (gzip.compress(b"text,label\na,b\n"), "is compressed with gzip: decompress it first"),
        (b"PK\x03\x04....", "an Excel workbook"),
        (b"\xd0\xcf\x11\xe0....", "an Excel workbook"),
        (b"PAR1....", "name it .parquet"),
    ],
)
def test_content_that_the_name_does_not_say(tmp_path, content, part):
    assert part in error_of(write(tmp_path / "a.csv", content))
    assert part in error_of(write(tmp_path / "a.csv.gz", content))
