"""One table → the rows that a text classifier can use: their texts and their label cells."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from accumft.data.files import ROW_COLUMN, to_dataset
from accumft.data.labels import LabelCells, ProblemType, is_missing
from accumft.errors import UserError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_CHUNK = 100_000  # rows of an Arrow array: one may not hold 2 GiB of text


class ClassificationRecipe(Protocol):
    """The fields of a recipe that say which examples a classifier is trained on. See TableRecipe for the others."""

    text_column: tuple[str, ...]
    """One column of texts, or two for pairs."""
    label_column: tuple[str, ...]
    """One column of labels, or several: of 0 and 1, or of numbers."""
    label_delimiter: str | None
    """What separates several labels in a cell; a blank cell then means none."""
    problem_type: ProblemType | None
    """None: seen from the training labels, see `infer_labels`."""
    train_file: str | None
    validation_file: str | None
    test_file: str | None
    dataset_name: str | None
    on_bad_row: Literal["error", "skip"]
    validation_split: float | None
    max_train_samples: int | None
    max_eval_samples: int | None
    seed: int


@dataclass(frozen=True)
class Examples:
    """The rows of one split: their texts (one or two each) and their label cells."""

    texts: list[tuple[str, ...]]
    cells: LabelCells

    def comparable(self) -> list[tuple[str, ...]]:
        """What is equal for rows of the same text."""
        return [tuple(text.strip() for text in texts) for texts in self.texts]


def read_examples(table: datasets.Dataset, source: str, recipe: ClassificationRecipe, notes: list[str]) -> Examples:
    """The rows of a table that have texts and labels; the others are an error, or skipped with a note."""
    n = len(table)
    rows = _values(table, ROW_COLUMN) if ROW_COLUMN in table.column_names else list(range(1, n + 1))
    texts = {name: [text or "" for text in _values(table, name)] for name in recipe.text_column}
    labels = {name: _values(table, name) for name in recipe.label_column}
    bad: dict[str, list[int]] = {}
    for name, column in texts.items():
        bad[f"an empty text in {name!r}"] = [i for i, text in enumerate(column) if not text or text.isspace()]
    for name, column in labels.items():
        bad[f"no label in {name!r}"] = [i for i, cell in enumerate(column) if is_missing(cell, recipe.label_delimiter)]
    found = "; ".join(f"{what}: {_row_list([rows[i] for i in where])}" for what, where in bad.items() if where)
    good: Sequence[int] = range(n)
    if found and recipe.on_bad_row == "error":
        raise UserError(f"{source}: {found}; fill them in, or --on_bad_row skip")
    if found:
        unusable = set().union(*bad.values())
        good = [i for i in range(n) if i not in unusable]
        notes.append(f"{source}: {len(unusable)} of {n} rows are skipped ({found})")
        if not good:
            raise UserError(f"{source}: no row has a text and a label; are --text_column and --label_column right?")
    cells = {name: [column[i] for i in good] for name, column in labels.items()}
    columns = list(texts.values())
    return Examples(
        [tuple(column[i] for column in columns) for i in good], LabelCells(cells, [rows[i] for i in good], source)
    )


def check_columns(table: datasets.Dataset, source: str, recipe: ClassificationRecipe) -> None:
    """Raises unless the table has rows, the columns that the recipe names, and texts where texts must be."""
    there = [name for name in table.column_names if name != ROW_COLUMN]
    for flag, wanted in (("text_column", recipe.text_column), ("label_column", recipe.label_column)):
        for name in wanted:
            if name not in there:
                nearness = {c: difflib.SequenceMatcher(None, name.casefold(), c.casefold()[:40]).ratio() for c in there}
                nearest = sorted(there, key=lambda column: -nearness[column])
                listed = ", ".join(f"{column[:40]!r}" for column in nearest[:20]) + (", …" if len(there) > 20 else "")
                raise UserError(
                    f"{source}: has no column {name!r} (--{flag}); its columns: {listed} "
                    "(for a file without a header line: --column_names)"
                )
    if not len(table):
        raise UserError(f"{source}: has columns but no rows")
    for name in recipe.text_column:
        kind = getattr(table.features[name], "dtype", type(table.features[name]).__name__.lower())
        if kind not in ("string", "large_string", "string_view", "null") or hasattr(table.features[name], "names"):
            raise UserError(f"{source}: {name!r} (--text_column) holds values of type {kind}, not texts")


def labels_are_hidden(table: datasets.Dataset, recipe: ClassificationRecipe) -> bool:
    """Whether every label is -1, as in the test splits of contests on the hub."""
    import datasets

    return all(
        isinstance(table.features[name], datasets.ClassLabel) and set(_values(table, name)) == {None}
        for name in recipe.label_column
    )


def _values(table: datasets.Dataset, name: str) -> list[Any]:
    """The cells of a column; classes by their names, None where there is none (-1)."""
    import datasets

    values: list[Any] = table.select_columns([name])[:][name]
    feature = table.features[name]
    if isinstance(feature, datasets.ClassLabel):
        return [None if value is None or value < 0 else feature.names[value] for value in values]
    inner = getattr(feature, "feature", None)
    if isinstance(inner, datasets.ClassLabel):
        return [None if value is None else [inner.names[i] for i in value] for value in values]
    return values


def _row_list(rows: Sequence[int]) -> str:
    """Ten row numbers at most, and how many there are."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    if len(rows) <= 10:
        return f"rows {', '.join(map(str, rows))}"
    return f"rows {', '.join(map(str, rows[:10]))}, … ({len(rows)} rows)"


def to_classification_dataset(examples: Examples, encoded: np.ndarray, indices: np.ndarray) -> datasets.Dataset:
    """Some rows as the data set that `ClassificationData` describes."""
    import pyarrow as pa

    def column(values: Any, kind: pa.DataType) -> pa.ChunkedArray:
        return pa.chunked_array([pa.array(values[i : i + _CHUNK], kind) for i in range(0, len(values), _CHUNK)], kind)

    texts = [examples.texts[i] for i in indices]
    columns = {"row": column([examples.cells.rows[i] for i in indices], pa.int64())}
    for name, parts in zip(("text", "text_pair"), zip(*texts, strict=True), strict=False):
        columns[name] = column(list(parts), pa.string())
    number = pa.from_numpy_dtype(encoded.dtype)
    labels = encoded[indices]
    columns["labels"] = column(labels, number) if labels.ndim == 1 else column(list(labels), pa.list_(number))
    return to_dataset(pa.table(columns))
