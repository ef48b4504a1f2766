"""Bad files tried in earnest: each is read as a person expects, or ends in one line that says what to do."""

import os
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import datasets
import pytest
from launching import ROOT, run_command
from nasty import CASES, TWO, Case, Read, Refused, not_utf_8
from text_cls import TextClsRecipe

from accumft.data.examples import INVISIBLE
from accumft.data.files import read_table
from accumft.data.splits import ClassificationData, load_classification_data, read_splits
from accumft.errors import UserError


def load(path: str | Path, **fields: object) -> ClassificationData:
    """As the recipe does it."""
    recipe = TextClsRecipe(**{"train_file": str(path), "validation_split": 0.0, **fields})  # type: ignore[arg-type]
    return load_classification_data(read_splits(recipe), recipe)


def error_of(path: str | Path, **fields: object) -> str:
    with pytest.raises(UserError) as raised:
        load(path, **fields)
    message = str(raised.value)
    assert len(message.splitlines()) == 1 and len(message) < 600, message
    return message


def check(case: Case, path: Path) -> None:
    """Raises an AssertionError unless the file is read, or refused, as the case says."""
    if not isinstance(case.expected, Read):
        message = error_of(path, **case.recipe)
        assert message.startswith(str(path)), message
        for part in case.expected.parts:
            assert part in message, message
        return
    expected, data = case.expected, load(path, **case.recipe)
    assert data.train["text"][:] == list(expected.texts)
    assert data.labels.problem_type == expected.problem_type
    names, labels = data.labels.names, data.train["labels"][:]
    if expected.problem_type == "single_label_classification":
        labels = [names[i] for i in labels]
        assert set(names) == set(labels)
    else:
        labels = [[name for name, on in zip(names, row, strict=True) if on] for row in labels]
    assert labels == list(expected.labels)
    assert len(data.notes) == len(expected.notes), data.notes
    for note, part in zip(data.notes, expected.notes, strict=True):
        assert part in note


def test_the_corpus(tmp_path):
    seen, wrong = Counter(), []
    for number, case in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = case.write(folder)
        try:
            check(case, path)
        except BaseException as error:  # an error of any other kind is what this test looks for
            wrong.append(f"{case.about} ({case.name}): {type(error).__name__}: {str(error)[:500]}")
        seen[path.suffix] += 1
    assert not wrong, "\n".join(wrong)
    assert sum(seen.values()) == 94
    assert min(seen[suffix] for suffix in (".csv", ".tsv", ".txt", ".json", ".jsonl", ".parquet")) >= 5, seen


def test_a_class_seen_once_is_trained_on_and_not_held_out(tmp_path):
    rows = "".join(f"t{i},{'ab'[i % 2]}\n" for i in range(40)) + "t40,c\n"
    (tmp_path / "a.csv").write_text(f"text,label\n{rows}")
    data = load(tmp_path / "a.csv", validation_split=None)
    assert data.labels.names == ("a", "b", "c")
    assert Counter(data.validation["labels"][:]) == {0: 2, 1: 2}
    assert Counter(data.train["labels"][:]) == {0: 18, 1: 18, 2: 1}


def test_labels_of_another_form_in_validation_are_those_of_training(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nx,caf\u00e9\ny,1\nz,True\n")
    (tmp_path / "b.jsonl").write_text('{"text": "p", "label": "cafe\u0301 "}\n{"text": "q", "label": " 1"}\n')
    data = load(tmp_path / "a.csv", validation_file=str(tmp_path / "b.jsonl"), validation_split=None)
    assert [data.labels.names[i] for i in data.validation["labels"]] == ["caf\u00e9", "1"]
    (tmp_path / "b.jsonl").write_text('{"text": "p", "label": "true"}\n')
    message = error_of(tmp_path / "a.csv", validation_file=str(tmp_path / "b.jsonl"), validation_split=None)
    assert message == f"{tmp_path}/b.jsonl: 'label' has labels that the training data lacks: 'true' (row 1)"


@pytest.mark.parametrize("name", ["two\nlines.csv", "nul\0.csv", "esc\x1b[2J.jsonl", "para\u2029graph.csv"])
@pytest.mark.parametrize("flag", ["train_file", "validation_file", "dataset_name"])
def test_names_that_no_message_can_hold(tmp_path, name, flag):
    (tmp_path / "train.csv").write_text("text,label\nx,a\ny,b\n")
    (tmp_path / name.replace("\0", "")).write_text("text,label\nx,a\ny,b\n")
    train = None if flag == "dataset_name" else str(tmp_path / "train.csv")
    with pytest.raises(UserError) as raised:
        read_splits(TextClsRecipe(**{"train_file": train, flag: str(tmp_path / name)}))
    assert str(raised.value).startswith(repr(str(tmp_path / name))) and str(raised.value).endswith("rename the file")


@pytest.mark.parametrize("name", ["", " "])
def test_no_name(name):
    assert error_of(name).startswith(f"--train_file {name!r}: names no file")


def test_a_name_that_is_too_long(tmp_path):
    path = tmp_path / f"{'n' * 300}.csv"
    assert error_of(path).endswith("cannot be read (File name too long)")


def test_a_file_without_permission(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_text("PAR1")
    path.chmod(0)
    root = os.geteuid() == 0  # who may read everything, so for a moment we are somebody else
    if root:
        os.seteuid(65534)
    try:
        message = error_of(path)
    finally:
        if root:
            os.seteuid(0)
    assert message == f"{path}: cannot be read (Permission denied)"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.parquet", b"PAR1 no more PAR1"),
        ("train.jsonl", b'{"text": }'),
        ("train.csv", b"\xff\xfe,\n"),
        ("a", b""),
    ],
)
def test_a_folder_of_files_that_datasets_cannot_read(tmp_path, monkeypatch, name, content):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_bytes(content)
    recipe = TextClsRecipe(dataset_name=str(tmp_path / "d"))
    with pytest.raises(UserError) as raised:
        load_classification_data(read_splits(recipe), recipe)
    assert str(raised.value).startswith(f"--dataset_name {tmp_path}/d: ") and len(str(raised.value).splitlines()) == 1


def test_flags_of_no_use(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nx,a\ny,b\n")
    assert error_of(tmp_path / "a.csv", encoding="a\nb").startswith("--encoding 'a\\nb': ")
    for fields in ({"delimiter": "\r"}, {"delimiter": ",,"}):
        assert error_of(tmp_path / "a.csv", **fields).startswith("--delimiter ")
    assert error_of(tmp_path / "a.csv", delimiter=";", quotechar=";").startswith("--quotechar ';'")


def test_the_quote_is_never_taken_for_the_delimiter(tmp_path):
    (tmp_path / "a.csv").write_text("text\nx,y\n")
    assert read_table(str(tmp_path / "a.csv"), quotechar=",")["text"][:] == ["x,y"]


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_every_encoding_of_python_reads_or_refuses(tmp_path):
    import encodings.aliases

    path = tmp_path / "a.csv"
    names = sorted(set(encodings.aliases.aliases.values()) | {"idna", "punycode", "undefined", "unicode_escape"})
    contents = [b"text,label\nx,a\ny,b\n", b"\xff\xfe\xd8\x00\n,\\ud800,xn--\xe9-\x81\n", bytes(range(1, 256)) * 3]
    outcomes = Counter()
    for content in contents:
        path.write_bytes(content)
        for name in names:
            try:
                outcomes[read_table(str(path), encoding=name).column_names[0] == "text"] += 1
            except UserError as error:
                assert len(str(error).splitlines()) == 1, (name, str(error))
                outcomes["refused"] += 1
    assert sum(outcomes.values()) == len(contents) * len(names) > 300
    assert outcomes[True] > 60 and outcomes["refused"] > 100


def test_what_shows_as_nothing_is_what_unicode_says():
    shown = {c for c in INVISIBLE if not (c.isspace() or unicodedata.category(c) in ("Cc", "Cf", "Cn", "Zl", "Zp"))}
    assert shown == set()
    assert {c for c in map(chr, range(0x10000)) if c.isspace()} <= set(INVISIBLE)


# Through the real command line: 8 s each, so these are the worst.
WORST = [
    ("two\nlines.csv", "text,label\nx,a\ny,b\n", "rename the file"),
    ("a.jsonl", TWO * 2500 + '{"text": "x", "text": "y"}', "line 5001: the key 'text' stands twice"),
    ("a.parquet", not_utf_8(), "row 2: 'text' is damaged"),
    ("a.json", f'[{{"text": "x", "label": {"1" * 5000}}}]', "digits"),
]


@pytest.mark.parametrize(("name", "content", "part"), WORST)
def test_the_command_line_ends_in_one_line_with_exit_code_2(tmp_path, name, content, part):
    path = Case("", name, content, Refused(part)).write(tmp_path)
    command = [sys.executable, str(ROOT / "recipes" / "text_cls.py"), "--train_file", str(path)]
    ended = run_command([*command, "--output_dir", str(tmp_path / "run")])
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and ended.stderr.startswith("error: "), ended.stderr
    assert part in ended.stderr
    assert not (tmp_path / "run").exists()
