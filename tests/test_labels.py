"""What labels are taken for, their order, and their numbers."""

import datetime
import math
import random

import numpy as np
import pytest

from accumft.data.labels import LabelCells, LabelSpec, encode_labels, infer_labels, is_missing
from accumft.errors import UserError

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"


def cells(*columns: list, source: str = "train.csv") -> LabelCells:
    """Columns a, b, …; their rows are numbered from 11."""
    named = {"abcdefgh"[i]: column for i, column in enumerate(columns)}
    return LabelCells(named, range(11, 11 + len(columns[0])), source)


def error_of(action, *args, **options) -> str:
    with pytest.raises(UserError) as raised:
        action(*args, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_label_spec_is_as_hugging_face_has_it():
    spec = LabelSpec(SINGLE, ("no", "yes"))
    assert (spec.num_labels, spec.id2label, spec.label2id) == (2, {0: "no", 1: "yes"}, {"no": 0, "yes": 1})


@pytest.mark.parametrize(
    ("values", "problem", "names"),
    [
        (["b", "a", "b"], SINGLE, ("a", "b")),
        (["10", "9", "-1", "9"], SINGLE, ("-1", "9", "10")),
        ([10, 9, 9, -1], SINGLE, ("-1", "9", "10")),
        ([True, False], SINGLE, ("False", "True")),
        (["2", "10", "x"], SINGLE, ("10", "2", "x")),
        (["NA", "null", "nan", "None"], SINGLE, ("NA", "None", "nan", "null")),
        (["007", "7", "042"], SINGLE, ("007", "042", "7")),
        (["250.00", "038.9", "401.9"], SINGLE, ("038.9", "250.00", "401.9")),  # codes: a number has no leading zero
        (["2024-01-01", "2024-01-02"], SINGLE, ("2024-01-01", "2024-01-02")),
        (["1" * 30, "2"], SINGLE, ("1" * 30, "2")),
        (["0.5", "1", "2.25"], REGRESSION, ("a",)),
        (["1e-3", "-.5", "+2."], REGRESSION, ("a",)),
        ([0.5, 1.0], REGRESSION, ("a",)),
        ([["b", "a"], [], ["c"]], MULTI, ("a", "b", "c")),
        ([[10, 2], []], MULTI, ("2", "10")),
    ],
)
def test_one_column(values, problem, names):
    spec = infer_labels(cells(values))
    assert spec == LabelSpec(problem, names)


def test_order_is_by_name_and_does_not_depend_on_the_rows():
    values = [f"label {i}" for i in range(50)] * 2
    draw = random.Random(0)
    orders = set()
    for _ in range(5):
        draw.shuffle(values)
        orders.add(infer_labels(cells(list(values))).names)
    assert orders == {tuple(sorted(set(values)))}


def test_labels_that_look_the_same_are_the_same():
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    data = cells([composed, decomposed + " ", "\ttea", "tea\u3000"])
    spec = infer_labels(data)
    assert spec.names == (composed, "tea")
    assert encode_labels(data, spec).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("values", [[1.0, 0.0], ["1.0", "0.0"], ["1.0", "0"], [2.0]])
def test_integers_that_became_decimal_are_never_guessed(values):
    message = error_of(infer_labels, cells(values))
    assert message.startswith("train.csv: 'a' may hold classes or numbers")
    assert f"--problem_type {SINGLE} or --problem_type {REGRESSION}" in message
    spec = infer_labels(cells(values), problem_type=SINGLE)
    assert set(spec.names) <= {"0", "1", "2"}
    assert encode_labels(cells(values), spec).tolist() == [spec.names.index(str(int(float(v)))) for v in values]
    spec = infer_labels(cells(values), problem_type=REGRESSION)
    assert encode_labels(cells(values), spec).tolist() == [float(v) for v in values]


def test_the_same_class_as_integer_text_and_decimal():
    spec = infer_labels(cells(["0", "1", "1"]))
    for values in ([1, 0], ["1.0", "0.0"], [1.0, 0.0], [" 1 ", "0"]):
        assert encode_labels(cells(values), spec).tolist() == [1, 0]


def test_numbers_with_words_among_them_are_never_guessed():
    assert "--problem_type" in error_of(infer_labels, cells(["0.5", "1.25", "n/a", "0.75"]))
    assert infer_labels(cells(["1.5", "stage I", "stage II"])).problem_type == SINGLE


def test_missing():
    assert [is_missing(cell) for cell in (None, "", " \t", math.nan)] == [True] * 4
    assert [is_missing(cell) for cell in ("nan", "0", 0, 0.0, False, [])] == [False] * 6
    assert not is_missing("", label_delimiter=";")


def test_delimited_labels_and_blank_cells():
    data = cells(["fever; cough", "", "cough;;fever;cough", None, "rash "])
    spec = infer_labels(data, label_delimiter=";")
    assert spec == LabelSpec(MULTI, ("cough", "fever", "rash"))
    encoded = encode_labels(data, spec, label_delimiter=";")
    assert encoded.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert encoded.dtype == np.float32


def test_lists():
    data = cells([["b", "a "], [], ["b", "b"]])
    spec = infer_labels(data)
    assert encode_labels(data, spec).tolist() == [[1, 1], [0, 0], [0, 1]]
    assert "no row has any label" in error_of(infer_labels, cells([[], []]))


@pytest.mark.parametrize("values", [[[1, 0, 1, 0]], [[0.0, 1.0]], [[True]], [["a", None]], [[["a"]]]])
def test_lists_that_name_no_labels(values):
    assert error_of(infer_labels, cells(values)).startswith("train.csv, row 11: 'a' is [")


@pytest.mark.parametrize(
    "columns",
    [(["0", "1"], ["1", "1"]), ([0, 1], [1, 1]), ([False, True], ["True", "1"]), ([0.0, 1.0], ["1.0", "TRUE"])],
)
def test_several_columns_of_0_and_1(columns):
    spec = infer_labels(cells(*columns))
    assert spec == LabelSpec(MULTI, ("a", "b"))
    encoded = encode_labels(cells(*columns), spec)
    assert encoded.tolist() == [[0, 1], [1, 1]]
    assert encoded.dtype == np.float32


def test_names_of_several_columns_are_in_the_order_given():
    spec = infer_labels(LabelCells({"z": ["0"], "a": ["1"]}, [1], "f"))
    assert spec.names == ("z", "a")
    assert encode_labels(LabelCells({"z": ["0"], "a": ["1"]}, [1], "f"), spec).tolist() == [[0, 1]]


def test_several_columns_of_numbers():
    data = cells(["0.5", "1"], [2.0, 0.25])
    spec = infer_labels(data)
    assert spec == LabelSpec(REGRESSION, ("a", "b"))
    assert encode_labels(data, spec).tolist() == [[0.5, 2.0], [1.0, 0.25]]
    assert encode_labels(data, spec).dtype == np.float64


def test_several_columns_of_something_else():
    message = error_of(infer_labels, cells(["0", "1"], ["1", "2"]))
    assert message.startswith("train.csv, row 12: 'b' is '2'")
    data = cells(["0", "1"], ["1", "2"])
    assert "row 12: 'b' is '2'" in error_of(encode_labels, data, LabelSpec(MULTI, ("a", "b")))
    assert encode_labels(data, infer_labels(data, problem_type=REGRESSION)).tolist() == [[0, 1], [1, 2]]


def test_regression_of_what_is_no_finite_number():
    spec = infer_labels(cells(["1", "2"]), problem_type=REGRESSION)
    assert spec == LabelSpec(REGRESSION, ("a",))
    for value in ("high", "inf", math.inf, "1,5", "1_000", "1e999", "nan"):
        assert "row 12: 'a' is" in error_of(encode_labels, cells(["1", value]), spec)


def test_problem_type_overrides():
    assert infer_labels(cells(["0.5", "1.5"]), problem_type=SINGLE).names == ("0.5", "1.5")
    assert infer_labels(cells([3, 4]), problem_type=REGRESSION).names == ("a",)
    assert infer_labels(cells(["a|b"]), problem_type=MULTI, label_delimiter="|").names == ("a", "b")


@pytest.mark.parametrize(
    ("columns", "options", "part"),
    [
        ((["a"],), {"problem_type": "classification"}, "must be one of single_label_classification, "),
        ((["a"],), {"problem_type": MULTI}, "takes lists, --label_delimiter or several label columns"),
        ((["0"], ["1"]), {"problem_type": SINGLE}, "takes one label column, not 2"),
        (([["a"]],), {"problem_type": SINGLE}, "'a' holds lists"),
        (([["a"]],), {"problem_type": REGRESSION}, "'a' holds lists"),
        (([["a"]], [["b"]]), {}, "'a' holds lists"),
        (([["a"]],), {"label_delimiter": ";"}, "'a' holds lists"),
        ((["a;b"],), {"label_delimiter": ";", "problem_type": SINGLE}, "--label_delimiter is for one label column"),
        ((["0"], ["1"]), {"label_delimiter": ";"}, "--label_delimiter is for one label column"),
        ((["a"],), {"label_delimiter": ""}, "--label_delimiter must not be empty"),
        (([{"a": 1}],), {}, "row 11: 'a' is of type dict"),
        (([datetime.date(2024, 1, 1)],), {}, "row 11: 'a' is of type date"),
    ],
)
def test_what_does_not_fit_the_problem_type(columns, options, part):
    assert part in error_of(infer_labels, cells(*columns), **options)


def test_labels_unseen_in_training_are_listed():
    spec = infer_labels(cells(["a", "b"]))
    message = error_of(encode_labels, cells(["a", "x", "y", "x"], source="dev.csv"), spec)
    assert message == "dev.csv: 'a' has labels that the training data lacks: 'x' (row 12), 'y' (row 13)"
    message = error_of(encode_labels, cells([f"c{i}" for i in range(30)]), spec)
    assert message.endswith("'c9' (row 20), … (30 in all)")
    spec = infer_labels(cells([["a"], ["b"]]))
    assert "'c' (row 12)" in error_of(encode_labels, cells([["a"], ["a", "c"]]), spec)


def test_another_kind_of_label_than_in_training():
    assert "'a' holds lists" in error_of(encode_labels, cells([["a"]]), LabelSpec(SINGLE, ("a", "b")))
    assert "takes lists" in error_of(encode_labels, cells(["a"]), LabelSpec(MULTI, ("a", "b")))


def test_ten_thousand_labels():
    values = [f"{i}" for i in range(10_000)] * 2
    spec = infer_labels(cells(values))
    assert spec.num_labels == 10_000
    assert encode_labels(cells(values), spec).tolist() == list(range(10_000)) * 2
