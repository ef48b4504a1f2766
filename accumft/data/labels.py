"""What the labels of a classification or regression are: the problem type, the names, the numbers.

A label's name is its text, stripped of surrounding white space and in Unicode's NFC form, so that labels that only look
the same are the same. An integer's name is its decimal form (also where a table made 1.0 of it), a boolean's "True" or
"False". Names are ordered as numbers if all are integers, else by code point: the ids depend on the set of names alone,
not on the order of rows. The names of several label columns are the columns', in the order in which they were given.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Literal, cast, get_args

import numpy as np

from accumft.errors import UserError

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

_WHOLE = "(?:0|[1-9][0-9]{0,17})"  # "007" and what no int64 holds are names, not numbers
_INTEGER = re.compile(f"[+-]?{_WHOLE}")
_INTEGRAL = re.compile(rf"([+-]?{_WHOLE})(?:\.0*)?")
_NUMBER = re.compile(rf"[+-]?(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_FALSE, _TRUE = ("0", "0.0", "False", "false", "FALSE"), ("1", "1.0", "True", "true", "TRUE")
_BINARY = dict.fromkeys(_FALSE, 0.0) | dict.fromkeys(_TRUE, 1.0)


@dataclass(frozen=True)
class LabelSpec:
    """The labels that a model is trained on, in Hugging Face's terms; `names[i]` is the label of id i."""

    problem_type: ProblemType
    names: tuple[str, ...]

    @property
    def num_labels(self) -> int:
        """Outputs of the model: classes, labels or regression targets."""
        return len(self.names)

    @property
    def id2label(self) -> dict[int, str]:
        """As in a model's config."""
        return dict(enumerate(self.names))

    @property
    def label2id(self) -> dict[str, int]:
        """As in a model's config."""
        return {name: i for i, name in enumerate(self.names)}


@dataclass(frozen=True)
class LabelCells:
    """The cells of the label columns of one split, and how messages name them."""

    columns: Mapping[str, Sequence[object]]
    """Name of a label column → its cells: str, int, float, bool, list of str or int, or None."""
    rows: Sequence[int]
    """Row number of each cell."""
    source: str
    """The file, for messages."""

    def error(self, i: int, column: str, what: str) -> UserError:
        """What is wrong with cell i of a column."""
        return UserError(f"{self.source}, row {self.rows[i]}: {column!r} {what}")


def is_missing(cell: object, label_delimiter: str | None = None) -> bool:
    """Whether a cell holds no label: None, NaN or a blank text; with a delimiter, that says "none of the labels"."""
    if label_delimiter is not None:
        return False
    return cell is None or (isinstance(cell, str) and not cell.strip()) or (isinstance(cell, float) and cell != cell)


def infer_labels(
    cells: LabelCells, *, label_delimiter: str | None = None, problem_type: str | None = None
) -> LabelSpec:
    """The problem type and the names, from the label cells of the training data, none of them missing.

    - one column of texts, integers or booleans: single label;
    - one column of lists, or of texts that `label_delimiter` separates, or several columns of 0 and 1: multi-label;
    - one column or several of numbers with fractions: regression, with a target per column.

    Args:
        cells: One cell a row and column.
        label_delimiter: What separates the labels in a cell.
        problem_type: One of ProblemType; None: as above.

    Raises:
        UserError: The cells fit no problem type, or not the one asked for, or several.
    """
    if problem_type is not None and problem_type not in get_args(ProblemType):
        raise UserError(f"--problem_type {problem_type}: must be one of {', '.join(get_args(ProblemType))}")
    _check_kinds(cells)
    problem = cast(ProblemType, problem_type) or _infer_problem_type(cells, label_delimiter)
    _check_cells(cells, problem, label_delimiter)
    if problem == "regression" or len(cells.columns) > 1:
        return LabelSpec(problem, tuple(cells.columns))
    ((column, values),) = cells.columns.items()
    if problem == "multi_label_classification":
        names = set().union(*_label_sets(cells, column, label_delimiter))
        if not names:
            raise UserError(f"{cells.source}: no row has any label in {column!r}")
    else:
        names = {_text(value) for value in set(values)}
    if all(map(_INTEGRAL.fullmatch, names)):
        return LabelSpec(problem, tuple(sorted({_as_integer(name) for name in names}, key=int)))
    return LabelSpec(problem, tuple(sorted(names)))


def encode_labels(cells: LabelCells, spec: LabelSpec, *, label_delimiter: str | None = None) -> np.ndarray:
    """The labels as numbers.

    Returns:
        Single label: ids, int64 (rows,). Multi-label: 0 and 1, float32 (rows, labels). Regression: float64 (rows,), or
        (rows, targets) where there are several.

    Raises:
        UserError: A label that `spec` does not have, or a cell that does not fit its problem type.
    """
    _check_kinds(cells)
    _check_cells(cells, spec.problem_type, label_delimiter)
    if spec.problem_type == "regression" or len(cells.columns) > 1:
        dtype = np.float64 if spec.problem_type == "regression" else np.float32
        columns = [_to_numbers(cells, column, spec.problem_type) for column in cells.columns]
        return np.array(columns[0] if len(columns) == 1 else columns, dtype).T
    ids = spec.label2id
    unseen: dict[str, int] = {}  # label → the first row that has it

    def id_of(name: str, i: int) -> int:
        found = ids.get(name, ids.get(_as_integer(name)))
        if found is None:
            unseen.setdefault(name, cells.rows[i])
            return 0
        return found

    ((column, values),) = cells.columns.items()
    if spec.problem_type == "multi_label_classification":
        encoded = np.zeros((len(values), spec.num_labels), np.float32)
        for i, names in enumerate(_label_sets(cells, column, label_delimiter)):
            for name in names:
                encoded[i, id_of(name, i)] = 1.0
    else:
        encoded = np.array([id_of(_text(value), i) for i, value in enumerate(values)], np.int64)
    if unseen:
        named = ", ".join(f"{name!r} (row {row})" for name, row in list(unseen.items())[:10])
        more = f", … ({len(unseen)} in all)" if len(unseen) > 10 else ""
        raise UserError(f"{cells.source}: {column!r} has labels that the training data lacks: {named}{more}")
    return encoded


def _infer_problem_type(cells: LabelCells, label_delimiter: str | None) -> ProblemType:
    if label_delimiter is not None or any(isinstance(v[0], list) for v in cells.columns.values() if v):
        return "multi_label_classification"
    if len(cells.columns) > 1:
        return _infer_from_columns(cells)
    ((column, values),) = cells.columns.items()
    names = {_text(value) for value in set(values)}
    if all(map(_INTEGER.fullmatch, names)):
        return "single_label_classification"
    numbers = [name for name in names if _NUMBER.fullmatch(name)]
    fractions = [name for name in numbers if not _INTEGRAL.fullmatch(name)]
    if fractions and len(numbers) == len(names):
        return "regression"
    if (numbers and len(numbers) == len(names)) or 2 * len(fractions) > len(names):
        # A column of integers that a table program turned into 1.0 for its blank cells; numbers with "n/a" among them.
        some = ", ".join(sorted(names)[:3])
        raise UserError(
            f"{cells.source}: {column!r} may hold classes or numbers ({some}, …): say which by "
            "--problem_type single_label_classification or --problem_type regression"
        )
    return "single_label_classification"


def _infer_from_columns(cells: LabelCells) -> ProblemType:
    texts = {column: {_text(value) for value in set(values)} for column, values in cells.columns.items()}
    if all(names <= _BINARY.keys() for names in texts.values()):
        return "multi_label_classification"
    if all(all(map(_NUMBER.fullmatch, names)) and not all(map(_INTEGRAL.fullmatch, names)) for names in texts.values()):
        return "regression"
    column = next(column for column, names in texts.items() if not names <= _BINARY.keys())
    i, text = next((i, _text(v)) for i, v in enumerate(cells.columns[column]) if _text(v) not in _BINARY)
    raise cells.error(
        i, column, f"is {text!r}, but several label columns hold 0 and 1 each, or numbers (--problem_type regression)"
    )


def _check_cells(cells: LabelCells, problem: ProblemType, label_delimiter: str | None) -> None:
    """Raises unless the kind of the cells and the number of the columns fit the problem type."""
    flag = f"{cells.source}: --problem_type {problem}"
    if label_delimiter is not None and (problem != "multi_label_classification" or len(cells.columns) > 1):
        raise UserError("--label_delimiter is for one label column whose cells hold several labels each")
    if label_delimiter == "":
        raise UserError("--label_delimiter must not be empty")
    if problem == "single_label_classification" and len(cells.columns) > 1:
        raise UserError(f"{flag} takes one label column, not {len(cells.columns)}")
    lists = problem == "multi_label_classification" and len(cells.columns) == 1 and label_delimiter is None
    for column, values in cells.columns.items():
        if lists and set(map(type, values)) - {list}:
            raise UserError(
                f"{flag} takes lists, --label_delimiter or several label columns, and {column!r} alone is none of them"
            )
        if not lists and list in set(map(type, values)):
            raise UserError(
                f"{flag}: {column!r} holds lists, which are for multi-label, alone, without --label_delimiter"
            )


def _check_kinds(cells: LabelCells) -> None:
    """Raises for a cell that is no label in any problem: an object, a date, bytes."""
    for column, values in cells.columns.items():
        for kind in set(map(type, values)) - {str, int, float, bool, list, NoneType}:
            i = next(i for i, value in enumerate(values) if type(value) is kind)
            raise cells.error(i, column, f"is of type {kind.__name__}, but a label is a text, a number or a list")


def _label_sets(cells: LabelCells, column: str, label_delimiter: str | None) -> list[set[str]]:
    """The names of the labels of each row."""
    if label_delimiter is not None:
        return [
            set() if is_missing(cell) else {part for t in _text(cell).split(label_delimiter) if (part := t.strip())}
            for cell in cells.columns[column]
        ]
    sets = []
    for i, cell in enumerate(cells.columns[column]):
        assert isinstance(cell, list)
        if any(type(label) not in (str, int) for label in cell):
            raise cells.error(i, column, f"is {cell!r:.80}: a list of labels holds texts or integers")
        names = {name for label in cell if (name := _text(label))}
        if len(names) < len(cell) and int in map(type, cell):
            raise cells.error(
                i, column, f"is {cell!r:.80}: a list names the labels of its row; give 0/1 vectors as several columns"
            )
        sets.append(names)
    return sets


def _to_numbers(cells: LabelCells, column: str, problem: ProblemType) -> list[float]:
    numbers = []
    for i, cell in enumerate(cells.columns[column]):
        text = _text(cell)
        number = float(text) if _NUMBER.fullmatch(text) else _BINARY.get(text, math.nan)
        if not math.isfinite(number):
            raise cells.error(i, column, f"is {text!r}, not a finite number")
        if problem == "multi_label_classification" and number not in (0.0, 1.0):
            raise cells.error(i, column, f"is {text!r}, but each of several label columns holds 0 and 1")
        numbers.append(number)
    return numbers


def _text(value: object) -> str:
    return unicodedata.normalize("NFC", value.strip()) if isinstance(value, str) else str(value)


def _as_integer(name: str) -> str:
    """The decimal form of a name that is an integer or has nothing but zeros behind the point; others as they are."""
    match = _INTEGRAL.fullmatch(name)
    return str(int(match[1])) if match else name
