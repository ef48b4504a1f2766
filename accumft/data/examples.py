"""One table → the rows that a text classifier can use: their texts and their label cells."""

from __future__ import annotations

import difflib
import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from accumft.data.files import ROW_COLUMN, ROWS_AT_ONCE, cells_of, first_invalid, to_dataset, unmapped
from accumft.data.labels import LabelCells, ProblemType, is_missing
from accumft.data.text_files import one_line
from accumft.errors import UserError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_CHUNK = 100_000  # rows of an Arrow array: one may not hold 2 GiB of text
ROWS_COPIED = 100_000  # a few 10 MB of text
# White space, and what shows as nothing: control characters, zero-width spaces, direction marks, the byte order mark.
_BLANKS = [(0x00, 0x20), (0x7F, 0xA0), (0xAD,), (0x61C,), (0x1680,), (0x180E,), (0x2000, 0x200F), (0x2028, 0x202F)]
_BLANKS += [(0x205F, 0x206F), (0x3000,), (0xFEFF,)]
INVISIBLE = "".join(chr(code) for block in _BLANKS for code in range(block[0], block[-1] + 1))


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
    """The rows of one split that can be used: their texts (one or two each) and their label cells.

    The texts stay where the table has them, in memory or mapped from disk.
    """

    texts: datasets.Dataset
    """The text columns of the whole table, without a mapping of its rows."""
    usable: np.ndarray
    """Where in it the rows are: int64 (rows,), ascending."""
    cells: LabelCells

    def __len__(self) -> int:
        return len(self.usable)

    @cached_property
    def comparable(self) -> list[bytes]:
        """What is equal for rows whose texts are, but for surrounding white space: digests, as texts are large."""
        used = self.texts if len(self.usable) == len(self.texts) else self.texts.select(self.usable)
        return [
            b"".join(hashlib.blake2b(text.strip().encode(), digest_size=16).digest() for text in texts)
            for block in used.iter(ROWS_AT_ONCE)
            for texts in zip(*block.values(), strict=True)
        ]


def read_examples(table: datasets.Dataset, source: str, recipe: ClassificationRecipe, notes: list[str]) -> Examples:
    """The rows of a table that have texts and labels; the others are an error, or skipped with a note."""
    n = len(table)
    rows: Sequence[int] = list(cells_of(table, ROW_COLUMN)) if ROW_COLUMN in table.column_names else range(1, n + 1)
    labels = {name: label_cells(table, name, rows, source) for name in recipe.label_column}
    bad: dict[str, list[int]] = {}
    for name in recipe.text_column:
        blank = [i for i, text in enumerate(cells_of(table, name)) if not text or not text.strip(INVISIBLE)]
        bad[f"an empty text in {name!r}"] = blank
    for name, column in labels.items():
        bad[f"no label in {name!r}"] = [i for i, cell in enumerate(column) if is_missing(cell, recipe.label_delimiter)]
    found = "; ".join(f"{what}: {row_list([rows[i] for i in where])}" for what, where in bad.items() if where)
    usable = np.arange(n)
    if found and recipe.on_bad_row == "error":
        raise UserError(f"{source}: {found}; fill them in, or --on_bad_row skip")
    if found:
        unusable = set().union(*bad.values())
        usable = np.delete(usable, list(unusable))
        notes.append(f"{source}: {len(unusable)} of {n} rows are skipped ({found})")
        if not len(usable):
            raise UserError(f"{source}: no row has a text and a label; are --text_column and --label_column right?")
        good = usable.tolist()
        rows = [rows[i] for i in good]
        labels = {name: [column[i] for i in good] for name, column in labels.items()}
    texts = unmapped(table.select_columns(list(recipe.text_column)))
    return Examples(texts, usable, LabelCells(labels, rows, source))


def check_columns(table: datasets.Dataset, source: str, recipe: ClassificationRecipe) -> None:
    """Raises unless the table has rows, the columns that the recipe names, and what can be read in them."""
    import datasets
    import pyarrow as pa

    there = [name for name in table.column_names if name != ROW_COLUMN]
    for flag, wanted in (("text_column", recipe.text_column), ("label_column", recipe.label_column)):
        for name in wanted:
            if name not in there:
                nearness = {c: difflib.SequenceMatcher(None, name.casefold(), c.casefold()[:40]).ratio() for c in there}
                nearest = sorted(there, key=lambda column: -nearness[column])
                listed = ", ".join(f"{column[:40]!r}" for column in nearest[:20]) + (", …" if len(there) > 20 else "")
                if same := [c for c in there if unicodedata.normalize("NFC", c) == unicodedata.normalize("NFC", name)]:
                    listed = f"{same[0]!a}, the same letters in another Unicode form: give it in that form"
                raise UserError(
                    f"{source}: has no column {name!r} (--{flag}); its columns: {listed or 'none, it has no columns'} "
                    "(for a file without a header line: --column_names)"
                )
    if not len(table):
        raise UserError(f"{source}: has columns but no rows")
    for name in recipe.text_column:
        kind = getattr(table.features[name], "dtype", type(table.features[name]).__name__.lower())
        if kind not in ("string", "large_string", "string_view", "null") or hasattr(table.features[name], "names"):
            raise UserError(f"{source}: {name!r} (--text_column) holds values of type {kind}, not texts")
    for name in recipe.label_column:
        # A picture would be opened, from wherever the file says that it lies.
        if datasets.features.features.require_decoding(table.features[name]):
            kind = type(table.features[name]).__name__.lower()
            raise UserError(f"{source}: {name!r} (--label_column) holds values of type {kind}, not labels")
    own = table.data.column(ROW_COLUMN) if ROW_COLUMN in table.column_names else None
    if own is not None and (own.type != pa.int64() or own.null_count):
        raise UserError(f"{source}: {ROW_COLUMN!r} is the name of accumft's own column of row numbers: rename it")
    for name in (*recipe.text_column, *recipe.label_column):
        try:
            table.data.column(name).validate(full=True)  # Arrow takes any bytes for UTF-8 until they are looked at
        except pa.ArrowException as error:
            row = first_invalid(table.data.column(name)) + 1
            raise UserError(
                f"{source}, row {row}: {name!r} is damaged ({one_line(error)}): write the file anew"
            ) from error


def labels_are_hidden(table: datasets.Dataset, recipe: ClassificationRecipe) -> bool:
    """Whether every label is -1, as in the test splits of contests on the hub."""
    import datasets

    return all(
        isinstance(table.features[name], datasets.ClassLabel)
        and all(cell is None or cell < 0 for cell in cells_of(table, name))
        for name in recipe.label_column
    )


def label_cells(table: datasets.Dataset, name: str, rows: Sequence[int], source: str) -> list[Any]:
    """The cells of a label column; classes by their names, None where there is none (-1)."""
    import datasets

    def named(i: int, number: int | None, names: Sequence[str], none: int | None) -> str | None:
        if number is None or number == none:
            return None
        if not 0 <= number < len(names):
            raise UserError(
                f"{source}, row {rows[i]}: {name!r} is class {number}, but the file names {len(names)}: correct it"
            )
        return names[number]

    known: dict[str, str] = {}  # a label's text is kept once, not once a row
    values: list[Any] = [
        known.setdefault(cell, cell) if isinstance(cell, str) else cell for cell in cells_of(table, name)
    ]
    feature = table.features[name]
    if isinstance(feature, datasets.ClassLabel):
        return [named(i, value, feature.names, none=-1) for i, value in enumerate(values)]
    inner = getattr(feature, "feature", None)
    if isinstance(inner, datasets.ClassLabel):
        return [cell and [named(i, number, inner.names, none=None) for number in cell] for i, cell in enumerate(values)]
    return values


def row_list(rows: Sequence[int]) -> str:
    """Ten row numbers at most, and how many there are."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    if len(rows) <= 10:
        return f"rows {', '.join(map(str, rows))}"
    return f"rows {', '.join(map(str, rows[:10]))}, … ({len(rows)} rows)"


def to_classification_dataset(examples: Examples, encoded: np.ndarray, indices: np.ndarray) -> datasets.Dataset:
    """Some rows as the data set that `ClassificationData` describes. Of more than ROWS_COPIED rows, no text is copied.

    Args:
        examples: The rows of a split.
        encoded: Their labels, (rows,) or (rows, labels).
        indices: Which of the rows.
    """
    import pyarrow as pa

    size = len(examples.texts)
    row, labels = np.zeros(size, np.int64), np.zeros((size, *encoded.shape[1:]), encoded.dtype)
    row[examples.usable], labels[examples.usable] = examples.cells.rows, encoded
    columns = {"row": pa.chunked_array([row])}
    for name, column in zip(("text", "text_pair"), examples.texts.column_names, strict=False):
        columns[name] = _as_strings(examples.texts.data.column(column))
    columns["labels"] = pa.chunked_array([labels]) if labels.ndim == 1 else _as_lists(labels)
    whole = to_dataset(pa.table(columns))
    if len(indices) == size:
        return whole
    # Many are a mapping of row numbers, which takes 8 bytes each; few are copied, since such a mapping is slow to read.
    some = whole.select(examples.usable[indices])
    return unmapped(some) if len(some) <= ROWS_COPIED else some


def _as_strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of texts of any of Arrow's types as the one that everybody knows."""
    import pyarrow as pa

    if column.type == pa.string():
        return column
    pieces = [chunk.slice(i, _CHUNK).cast(pa.string()) for chunk in column.chunks for i in range(0, len(chunk), _CHUNK)]
    return pa.chunked_array(pieces, pa.string())


def _as_lists(matrix: np.ndarray) -> pa.ChunkedArray:
    """(rows, columns) → a column of lists."""
    import pyarrow as pa

    pieces = [matrix[i : i + _CHUNK] for i in range(0, len(matrix), _CHUNK)]
    ends = [np.arange(0, piece.size + 1, matrix.shape[1], dtype=np.int32) for piece in pieces]
    lists = [pa.ListArray.from_arrays(end, piece.reshape(-1)) for end, piece in zip(ends, pieces, strict=True)]
    return pa.chunked_array(lists)
