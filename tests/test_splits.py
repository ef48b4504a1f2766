"""All splits of a run: sources, bad rows, labels over splits, what is held out and drawn."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pytest

from accumft.data.draw import draw_rows, hold_out
from accumft.data.files import ROW_COLUMN
from accumft.data.splits import ClassificationData, load_classification_data, read_splits
from accumft.errors import UserError
from accumft.plan import random_order
from accumft.recipe import TableRecipe

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("ACCUMFT_DATA") or ROOT.parent / "shared" / "data")


@dataclass(kw_only=True, slots=True)
class Recipe(TableRecipe):
    text_column: tuple[str, ...] = ("text",)
    label_column: tuple[str, ...] = ("label",)
    label_delimiter: str | None = None
    problem_type: str | None = None


def load(**fields) -> ClassificationData:
    recipe = Recipe(**fields)
    return load_classification_data(read_splits(recipe), recipe)


def load_rows(train: dict, validation: dict | None = None, test: dict | None = None, **fields) -> ClassificationData:
    splits = {"train": train, "validation": validation, "test": test}
    tables = {name: datasets.Dataset.from_dict(rows) for name, rows in splits.items() if rows is not None}
    return load_classification_data(tables, Recipe(**fields))


def error_of(action, *args, **options) -> str:
    with pytest.raises(UserError) as raised:
        action(*args, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def write(path: Path, content: str) -> str:
    path.write_text(content, encoding="utf-8", newline="")
    return str(path)


# Sources


def test_files_of_three_kinds(tmp_path):
    train = write(tmp_path / "train.csv", 'id,label,text\r\n7,b,NA\r\n8,a,"two\r\nlines"\r\n9,b,null\r\n')
    validation = write(tmp_path / "dev.jsonl", '{"text": "x", "label": "a"}\n')
    test = write(tmp_path / "test.tsv", "text\tlabel\ny\tb\nz\ta\n")
    data = load(train_file=train, validation_file=validation, test_file=test)
    assert data.train[:] == {"row": [1, 2, 3], "text": ["NA", "two\r\nlines", "null"], "labels": [1, 0, 1]}
    assert data.validation[:] == {"row": [1], "text": ["x"], "labels": [0]}
    assert data.test[:] == {"row": [1, 2], "text": ["y", "z"], "labels": [1, 0]}
    assert {name: feature.dtype for name, feature in data.train.features.items()} == {
        "row": "int64", "text": "string", "labels": "int64"
    }  # fmt: skip
    assert data.labels.id2label == {0: "a", 1: "b"}
    assert data.notes == []
    assert list(data.splits) == ["train", "validation", "test"]


def test_flags_of_text_files_reach_the_reader(tmp_path):
    path = tmp_path / "train.txt"
    path.write_bytes('发热;"咳嗽\n内科;头痛"\n'.encode("gb18030"))
    splits = read_splits(
        TableRecipe(
            train_file=str(path), encoding="gb18030", delimiter=";", quotechar="", column_names=("label", "text")
        )
    )
    assert splits["train"][:] == {"label": ["发热", "内科"], "text": ['"咳嗽', '头痛"'], ROW_COLUMN: [1, 2]}


def test_pairs_of_texts():
    rows = {"q": ["a", "b"], "p": ["c", "d"], "label": [0, 1]}
    data = load_rows(rows, text_column=("q", "p"), validation_split=0)
    assert data.train[:] == {"row": [1, 2], "text": ["a", "b"], "text_pair": ["c", "d"], "labels": [0, 1]}


def test_folder_of_several_splits(tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["z", "b"])})
    splits = {
        name: datasets.Dataset.from_dict({"text": [name, "x"], "label": [0, 1]}, features=features)
        for name in ("train", "dev", "test", "unsupervised")
    }
    folder = str(tmp_path / "saved")
    datasets.DatasetDict(splits).save_to_disk(folder)
    for source in ({"train_file": folder}, {"dataset_name": folder}):
        data = load(**source)
        assert [split["text"][0] for split in (data.train, data.validation, data.test)] == ["train", "dev", "test"]
        assert data.labels.names == ("b", "z")  # the names of the classes, ordered by name
        assert data.train["labels"][:] == [1, 0]
    own = write(tmp_path / "own.csv", "text,label\nown,b\n")
    assert load(train_file=folder, validation_file=own).validation["text"][:] == ["own"]
    train = write(tmp_path / "train.csv", "text,label\nx,z\ny,b\n")
    assert load(train_file=train, validation_file=folder).validation["text"][:] == ["dev", "x"]
    message = error_of(load, train_file=folder, text_column=("note",))
    assert message.startswith(f"{folder}: has no column 'note'")
    notes = write(tmp_path / "notes.csv", "note,label\nx,z\n")
    message = error_of(load, train_file=folder, validation_file=notes)
    assert message.startswith(f"{notes}: has no column 'text'")


def test_hidden_test_labels_of_the_hub_are_left_out():
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])})
    train = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [0, 1]}, features=features)
    test = datasets.Dataset.from_dict({"text": ["z"], "label": [-1]}, features=features)
    data = load_classification_data({"train": train, "test": test}, Recipe(validation_split=0))
    assert data.test is None
    assert data.notes == ["test: its labels are hidden, so it is not used"]


def test_dataset_name_of_a_folder_of_files_is_read_as_datasets_does(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "train.csv", "text,label\nx,0\ny,1\n")
    write(tmp_path / "d" / "validation.csv", "text,label\nz,1\n")
    data = load(dataset_name=str(tmp_path / "d"))
    assert data.train[:] == {"row": [1, 2], "text": ["x", "y"], "labels": [0, 1]}
    assert data.validation["labels"][:] == [1]


def test_data_set_that_is_not_there(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = error_of(read_splits, TableRecipe(dataset_name="nobody/absent"))
    assert message.startswith("--dataset_name nobody/absent: ") and "--train_file" in message


def test_sources_that_contradict_or_lack():
    assert "--train_file or --dataset_name" in error_of(read_splits, TableRecipe())
    assert "--train_file or --dataset_name" in error_of(read_splits, TableRecipe(validation_file="x.csv"))
    message = error_of(read_splits, TableRecipe(dataset_name="x", train_file="y.csv"))
    assert "--dataset_name and --train_file" in message


# Columns and rows


def test_missing_column_names_file_flag_and_the_nearest_first(tmp_path):
    path = write(tmp_path / "train.csv", "id,Texts,label\n1,x,a\n")
    assert error_of(load, train_file=path).startswith(
        f"{path}: has no column 'text' (--text_column); its columns: 'Texts', "
    )
    assert "'no' (--label_column)" in error_of(load, train_file=path, text_column=("Texts",), label_column=("no",))
    test = write(tmp_path / "test.csv", "Texts\nx\n")
    message = error_of(load, train_file=path, test_file=test, text_column=("Texts",), validation_split=0)
    assert message.startswith(f"{test}: has no column 'label' (--label_column)")


def test_row_column_is_not_one_of_the_files(tmp_path):
    path = write(tmp_path / "train.csv", "text,label,row\nx,a,7\ny,b,8\n")
    assert "row" in error_of(load, train_file=path, text_column=("rows",))
    assert ROW_COLUMN not in error_of(load, train_file=path, text_column=("rows",))
    assert load(train_file=path, validation_split=0).train["row"][:] == [1, 2]


def test_file_without_rows(tmp_path):
    path = write(tmp_path / "train.csv", "text,label\n")
    assert error_of(load, train_file=path) == f"{path}: has columns but no rows"


@pytest.mark.parametrize(
    ("values", "kind"), [([1, 2], "int64"), ([1.5, None], "float64"), ([["a"], []], "list"), ([{"a": 1}] * 2, "dict")]
)
def test_text_columns_hold_texts(values, kind):
    message = error_of(load_rows, {"text": values, "label": ["a", "b"]})
    assert message.startswith(f"train: 'text' (--text_column) holds values of type {kind}")


def test_class_labels_are_no_texts():
    features = datasets.Features({"text": datasets.ClassLabel(names=["a"]), "label": datasets.Value("string")})
    table = datasets.Dataset.from_dict({"text": [0], "label": ["x"]}, features=features)
    assert "(--text_column) holds values" in error_of(load_classification_data, {"train": table}, Recipe())


BAD = {"text": ["a", " ", "c", None, "e", "f"], "label": ["x", "y", "", "x", "y", None]}


def test_bad_rows_are_an_error_with_their_numbers():
    message = error_of(load_rows, BAD)
    assert message == (
        "train: an empty text in 'text': rows 2, 4; no label in 'label': rows 3, 6; fill them in, or --on_bad_row skip"
    )
    message = error_of(load_rows, {"text": [""] * 12 + ["x"], "label": ["a"] * 13})
    assert "rows 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, … (12 rows);" in message


def test_bad_rows_are_skipped_with_a_note():
    data = load_rows(BAD, on_bad_row="skip", validation_split=0)
    assert data.train[:] == {"row": [1, 5], "text": ["a", "e"], "labels": [0, 1]}
    assert data.notes == [
        "train: 4 of 6 rows are skipped (an empty text in 'text': rows 2, 4; no label in 'label': rows 3, 6)"
    ]
    assert "no row has a text and a label" in error_of(load_rows, {"text": [""], "label": ["a"]}, on_bad_row="skip")


def test_a_row_that_is_skipped_gives_no_class():
    data = load_rows({"text": ["a", "b", ""], "label": ["x", "y", "z"]}, on_bad_row="skip", validation_split=0)
    assert data.labels.names == ("x", "y")


def test_bad_rows_of_other_splits_and_of_pairs():
    train = {"text": ["a", "b"], "pair": ["c", "d"], "label": ["x", "y"]}
    bad = {"text": ["a", "b"], "pair": ["c", "  "], "label": ["x", "y"]}
    message = error_of(load_rows, train, bad, text_column=("text", "pair"))
    assert message.startswith("validation: an empty text in 'pair': row 2;")


def test_blank_cells_never_make_integers_a_regression():
    rows = {"text": ["a", "b", "c"], "label": [1.0, None, 0.0]}
    assert "no label in 'label': row 2" in error_of(load_rows, rows)
    assert "--problem_type single_label_classification" in error_of(load_rows, rows, on_bad_row="skip")
    data = load_rows(rows, on_bad_row="skip", validation_split=0, problem_type="single_label_classification")
    assert data.labels.names == ("0", "1")
    assert data.train["labels"][:] == [1, 0]


# Labels


def test_multi_label_by_delimiter_and_by_lists_and_by_columns():
    texts = ["a", "b", "c"]
    by_delimiter = load_rows(
        {"text": texts, "label": ["y|x", "", "x"]}, {"text": ["d"], "label": ["y"]}, label_delimiter="|"
    )
    by_list = load_rows({"text": texts, "label": [["y", "x"], [], ["x"]]}, {"text": ["d"], "label": [["y"]]})
    by_column = load_rows(
        {"text": texts, "x": ["1", "0", "1"], "y": ["1", "0", "0"]},
        {"text": ["d"], "y": ["1"], "x": ["0"]},
        label_column=("x", "y"),
    )
    for data in (by_delimiter, by_list, by_column):
        assert data.labels.problem_type == "multi_label_classification"
        assert data.labels.names == ("x", "y")
        assert data.train["labels"][:] == [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
        assert data.validation["labels"][:] == [[0.0, 1.0]]
        assert data.train.features["labels"].feature.dtype == "float32"
        assert data.notes == ["train: 1 of 3 rows have none of the 2 labels"]


def test_label_column_that_no_training_row_has():
    rows = {"text": ["a", "b"], "x": [1, 0], "y": [0, 0]}
    assert "train: no row has the label 'y'" in load_rows(rows, label_column=("x", "y"), validation_split=0).notes


def test_regression_says_that_it_is_one():
    data = load_rows({"text": ["a", "b"], "label": ["0.1", "2"]}, validation_split=0)
    assert data.labels.problem_type == "regression"
    assert data.train["labels"][:] == [0.1, 2.0]
    assert len(data.notes) == 1 and "this is a regression" in data.notes[0]
    assert load_rows(
        {"text": ["a", "b"], "label": [0.1, 2]}, validation_split=0, problem_type="regression"
    ).notes == []  # fmt: skip


def test_list_of_class_labels():
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.List(datasets.ClassLabel(names=["z", "y"]))}
    )
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [[0], [0, 1]]}, features=features)
    data = load_classification_data({"train": table}, Recipe(validation_split=0))
    assert data.labels.names == ("y", "z")
    assert data.train["labels"][:] == [[0, 1], [1, 1]]


def test_labels_unseen_in_training():
    train = {"text": ["a", "b"], "label": ["x", "y"]}
    other = {"text": ["c", "d"], "label": ["y", "z"]}
    for splits in ((train, other), (train, train, other)):
        assert "labels that the training data lacks: 'z' (row 2)" in error_of(load_rows, *splits)


def test_one_class_and_a_class_for_each_row():
    assert "every row has the label 'x'" in error_of(load_rows, {"text": ["a", "b"], "label": ["x", "x "]})
    many = {"text": [f"t{i}" for i in range(30)], "label": [f"id{i}" for i in range(30)]}
    assert "is --label_column right?" in error_of(load_rows, many)
    assert load_rows(many, problem_type="single_label_classification", validation_split=0).labels.num_labels == 30


def test_repeated_texts_are_noted():
    train = {"text": ["a", "b", " a", "c", "c"], "label": ["x", "y", "y", "x", "x"]}
    validation = {"text": ["a ", "b", "z"], "label": ["x", "y", "y"]}
    notes = load_rows(train, validation).notes
    assert notes == [
        "train: texts that stand there several times with different labels: 1",
        "validation: 2 of 3 rows have a text that is in train too, so its score flatters",
    ]


# Held out and drawn


def test_random_order_is_the_same_everywhere():
    assert random_order(8, seed=42).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert random_order(8, seed=43).tolist() != random_order(8, seed=42).tolist()
    assert random_order(8, seed=42, stream=1).tolist() != random_order(8, seed=42).tolist()
    assert sorted(random_order(1000, seed=-1).tolist()) == list(range(1000))


def test_hold_out_by_largest_remainder():
    classes = np.repeat([0, 1, 2, 3], [57, 26, 16, 1])
    held_out = hold_out([str(i) for i in range(100)], classes, 0.1, seed=0)
    # exact: 5.7, 2.6, 1.6, 0.1; the floors leave two seats, for the remainders 0.7 and 0.6 of the larger class
    assert Counter(classes[held_out].tolist()) == {0: 6, 1: 3, 2: 1}


def test_hold_out_leaves_every_class_in_training():
    for seed in range(20):
        draw = np.random.Generator(np.random.PCG64(seed))
        classes = draw.integers(0, 12, 60)
        texts = draw.integers(0, 30, 60).tolist()
        held_out = hold_out(texts, classes, 0.5, seed)
        assert set(classes[~held_out]) == set(classes)
        assert not {texts[i] for i in np.flatnonzero(held_out)} & {texts[i] for i in np.flatnonzero(~held_out)}
        assert 10 <= held_out.sum() <= 30


def test_hold_out_of_nearly_all_leaves_one_text_of_each_class():
    held_out = hold_out(list("abcdef"), np.array([0, 0, 0, 1, 1, 1]), 0.95, seed=0)
    assert (held_out[:3].sum(), held_out[3:].sum()) == (2, 2)


def test_hold_out_gives_back_a_class_that_stands_only_in_the_texts_of_another():
    # Class 1 has one row, whose text stands for class 0.
    for seed in range(10):
        held_out = hold_out(["a", "a", "b", "c", "d"], np.array([0, 1, 0, 0, 0]), 0.5, seed)
        assert not held_out[:2].any()


def rows_of(n: int, classes: int = 3) -> dict:
    return {"text": [f"t{i}" for i in range(n)], "label": [f"c{i % classes}" for i in range(n)]}


def test_validation_is_a_tenth_by_default_stratified_and_by_seed():
    data = load_rows(rows_of(300))
    assert (len(data.train), len(data.validation)) == (270, 30)
    assert Counter(data.validation["labels"][:]) == {0: 10, 1: 10, 2: 10}
    assert sorted(data.train["row"][:] + data.validation["row"][:]) == list(range(1, 301))
    assert data.train["row"][:] == sorted(data.train["row"][:])
    assert "train: 30 of 300 rows are held out for validation" in data.notes
    assert load_rows(rows_of(300)).validation[:] == data.validation[:]
    assert load_rows(rows_of(300), seed=1).validation["row"][:] != data.validation["row"][:]


def test_validation_split_of_rows_with_the_same_text():
    rows = {"text": [f"t{i % 50}" + " " * (i // 50) for i in range(100)], "label": [f"c{i % 2}" for i in range(100)]}
    data = load_rows(rows, validation_split=0.3)
    assert len(data.validation) == 28  # 15 rows of each class, in pairs
    assert not {text.strip() for text in data.train["text"]} & {text.strip() for text in data.validation["text"]}


def test_validation_split_of_other_problems_is_a_plain_draw():
    data = load_rows(
        {"text": [f"t{i}" for i in range(40)], "label": [i + 0.5 for i in range(40)]}, validation_split=0.2
    )
    assert (len(data.train), len(data.validation)) == (32, 8)
    data = load_rows({"text": [f"t{i}" for i in range(40)], "label": [["a"]] * 40}, validation_split=0.25)
    assert (len(data.train), len(data.validation)) == (30, 10)


def test_no_validation():
    assert load_rows(rows_of(30), validation_split=0).validation is None
    assert load_rows(rows_of(3)).validation is None  # every class has one row
    assert "of the 3 rows of train that is none" in error_of(load_rows, rows_of(3), validation_split=0.1)


def test_draws_by_seed():
    data = load_rows(rows_of(300), rows_of(90), rows_of(60), max_train_samples=50, max_eval_samples=20)
    assert [len(split) for split in data.splits.values()] == [50, 20, 20]
    rows = data.train["row"][:]
    assert rows == sorted(set(rows)) and rows != list(range(1, 51))
    assert data.train["text"][:] == [f"t{row - 1}" for row in rows]
    assert data.validation["row"][:] != data.test["row"][:]
    assert "train: 50 of 300 rows are drawn" in data.notes
    larger = load_rows(rows_of(300), rows_of(90), max_train_samples=100)
    assert set(rows) < set(larger.train["row"][:])
    assert load_rows(rows_of(300), rows_of(90), max_train_samples=50, seed=1).train["row"][:] != rows
    assert len(load_rows(rows_of(9), rows_of(9), max_train_samples=50).train) == 9


def test_labels_are_those_of_all_rows_though_few_are_drawn():
    data = load_rows(rows_of(300, classes=30), max_train_samples=5)
    assert data.labels.num_labels == 30
    assert "train: 25 of 30 classes have no row among those drawn" in data.notes


def test_draw_rows():
    assert draw_rows(5, None, seed=0).tolist() == [0, 1, 2, 3, 4]
    assert draw_rows(5, 9, seed=0).tolist() == [0, 1, 2, 3, 4]
    assert len(draw_rows(5, 2, seed=0)) == 2


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"text_column": ()}, "--text_column: one column or two, not 0"),
        ({"text_column": ("text", "b", "c")}, "--text_column: one column or two, not 3"),
        ({"label_column": ()}, "--label_column"),
        ({"label_column": ("text",)}, "'text' is named more than once"),
        ({"validation_split": 1.0}, "--validation_split 1.0"),
        ({"validation_split": -0.1}, "--validation_split -0.1"),
        ({"max_train_samples": 0}, "--max_train_samples 0"),
        ({"max_eval_samples": -3}, "--max_eval_samples -3"),
    ],
)
def test_fields_that_no_run_can_have(fields, part):
    assert part in error_of(load_rows, rows_of(30), **fields)


def test_validation_split_with_validation_data():
    assert "--validation_split 0.2: there is validation data" in error_of(
        load_rows, rows_of(30), rows_of(30), validation_split=0.2
    )
    assert len(load_rows(rows_of(30), rows_of(30), validation_split=0.0).validation) == 30


# Real data, where they are


def needs(folder: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not (DATA / folder).is_dir(), reason=f"no {folder} in the folder ACCUMFT_DATA")


def files(folder: str, **names: str) -> dict[str, str]:
    return {f"{split}_file": str(DATA / folder / name) for split, name in names.items()}


MTS_DIALOG = {
    "train": "MTS-Dialog-TrainingSet.csv",
    "validation": "MTS-Dialog-ValidationSet.csv",
    "test": "MTS-Dialog-TestSet-1-MEDIQA-Chat-2023.csv",
}


@needs("mts-dialog")
@pytest.mark.parametrize("column", ["dialogue", "section_text"])
def test_mts_dialog(column):
    data = load(**files("mts-dialog", **MTS_DIALOG), text_column=(column,), label_column=("section_header",))
    assert [len(split) for split in data.splits.values()] == [1201, 100, 200]
    assert (data.labels.problem_type, data.labels.num_labels) == ("single_label_classification", 20)
    counts = Counter(data.train["labels"][:])
    assert (max(counts.values()), min(counts.values())) == (351, 2)


@needs("cmedtc")
def test_cmedtc():
    data = load(**files("cmedtc", train="train.txt", validation="dev.txt"), column_names=("label", "text"))
    assert [len(split) for split in data.splits.values()] == [14610, 1550]
    assert (data.labels.problem_type, data.labels.num_labels) == ("single_label_classification", 44)
    counts = Counter(data.train["labels"][:])
    assert (max(counts.values()), min(counts.values())) == (3359, 1)
    assert len(set(data.validation["labels"][:])) == 39
    assert any(note.endswith("different labels: 44") for note in data.notes)
    assert not any("\r" in text for text in data.train["text"][:])


@needs("psytar")
def test_psytar():
    data = load(
        **files("psytar", train="binary_train.csv", validation="binary_dev.csv", test="binary_test.csv"),
        text_column=("sentences",),
        label_column=("ADR", "WD", "EF", "INF", "SSI", "DI"),
    )
    assert [len(split) for split in data.splits.values()] == [4201, 612, 1189]
    assert data.labels.problem_type == "multi_label_classification"
    assert data.labels.names == ("ADR", "WD", "EF", "INF", "SSI", "DI")
    without = sum(not any(row) for row in data.train["labels"][:])
    assert 0.34 < without / 4201 < 0.36


@needs("medical-abstracts")
def test_medical_abstracts():
    fields = {"text_column": ("medical_abstract",), "label_column": ("condition_label",)}
    data = load(**files("medical-abstracts", train="medical_tc_test.csv"), **fields, validation_split=0.2)
    assert len(data.train) + len(data.validation) == 2888
    assert abs(len(data.validation) - 578) <= 5
    assert data.labels.names == ("1", "2", "3", "4", "5")
    assert not set(data.train["text"][:]) & set(data.validation["text"][:])
    assert any(note.endswith("different labels: 113") for note in data.notes)
