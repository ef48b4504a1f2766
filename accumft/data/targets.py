"""Pairs of a source and a target text, for sequence-to-sequence models: read, checked, held out, drawn."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from accumft.data.draw import draw_rows, hold_out
from accumft.data.files import ROW_COLUMN, cells_of, first_invalid
from accumft.data.text import progress_bars
from accumft.data.text_files import one_line
from accumft.errors import UserError

if TYPE_CHECKING:
    import datasets

SPLITS = ("train", "validation", "test")
_DEFAULT_SPLIT = 0.1


class TargetRecipe(Protocol):
    """The fields of a recipe that say which pairs a model is trained on. See TableRecipe for the others."""

    source_column: str
    target_column: str
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
class TargetData:
    """The pairs of a run. Each split has the columns "row" (int64, in its source file), "source" and "target"."""

    splits: dict[str, datasets.Dataset]
    """By "train", and "validation" and "test" where there are such."""
    notes: list[str] = field(default_factory=list)
    """Remarks of one line each, to be printed before training."""


def load_targets(tables: Mapping[str, datasets.Dataset], recipe: TargetRecipe) -> TargetData:
    """The tables of a run (`accumft.data.splits.read_splits`) → its pairs.

    Without validation data a share of the training rows is held out; rows of one source text stay on one side.

    Raises:
        UserError: a column, a row or a field of the recipe that nothing can be trained on.
    """
    notes: list[str] = []
    names = {split: _name(recipe, split) for split in tables}
    found = {split: _read(tables[split], names[split], recipe, notes) for split in SPLITS if split in tables}
    fraction = recipe.validation_split
    if "validation" in found and fraction:
        raise UserError(f"--validation_split {fraction}: there is validation data already; leave out one of them")
    if "validation" not in found and fraction != 0:
        found = _hold_out(found, names["train"], fraction, recipe.seed, notes)
    for split, pairs in found.items():
        size = recipe.max_train_samples if split == "train" else recipe.max_eval_samples
        drawn = draw_rows(len(pairs), size, recipe.seed, stream=SPLITS.index(split) + 1)
        if len(drawn) < len(pairs):
            notes.append(f"{split}: {len(drawn)} of {len(pairs)} rows are drawn")
            found[split] = _rows(pairs, drawn)
    known = set(_digests(found["train"]))
    for split in ("validation", "test"):
        again = sum(digest in known for digest in _digests(found[split])) if split in found else 0
        if again:
            notes.append(f"{split}: {again} of {len(found[split])} rows have a source that is in the training data too")
    return TargetData({split: found[split] for split in SPLITS if split in found}, notes)


def _read(table: datasets.Dataset, name: str, recipe: TargetRecipe, notes: list[str]) -> datasets.Dataset:
    import datasets

    columns = {"source_column": recipe.source_column, "target_column": recipe.target_column}
    _check_columns(table, name, columns)
    n = len(table)
    rows: Sequence[int] = list(cells_of(table, ROW_COLUMN)) if ROW_COLUMN in table.column_names else range(1, n + 1)
    sides = {flag: list(cells_of(table, column)) for flag, column in columns.items()}
    empty = {
        flag: [row for row, text in zip(rows, side, strict=True) if not (text and text.strip())]
        for flag, side in sides.items()
    }
    bad = sorted({row for some in empty.values() for row in some})
    if bad:
        shown = "; ".join(
            f"an empty text in {columns[flag]!r} (--{flag}): row{'s' * (len(some) > 1)} "
            + ", ".join(map(str, some[:10]))
            + (f", … ({len(some)} rows)" if len(some) > 10 else "")
            for flag, some in empty.items()
            if some
        )
        if recipe.on_bad_row == "error":
            raise UserError(f"{name}: {shown}; fill them in, or --on_bad_row skip")
        notes.append(f"{name}: {len(bad)} of {n} rows are skipped ({shown})")
    unusable = set(bad)
    kept = [i for i, row in enumerate(rows) if row not in unusable]
    if not kept:
        raise UserError(f"{name}: no row has both texts; are --source_column and --target_column right?")
    return datasets.Dataset.from_dict(
        {
            "row": [rows[i] for i in kept],
            "source": [sides["source_column"][i] for i in kept],
            "target": [sides["target_column"][i] for i in kept],
        }
    )


def _check_columns(table: datasets.Dataset, name: str, columns: Mapping[str, str]) -> None:
    import pyarrow as pa

    if columns["source_column"] == columns["target_column"]:
        raise UserError(f"--target_column {columns['target_column']}: is the --source_column too; name another")
    there = [column for column in table.column_names if column != ROW_COLUMN]
    for flag, column in columns.items():
        if column not in there:
            near = sorted(there, key=lambda c: -difflib.SequenceMatcher(None, column.casefold(), c.casefold()).ratio())
            listed = ", ".join(f"{c[:40]!r}" for c in near[:20]) + (", …" if len(near) > 20 else "")
            raise UserError(
                f"{name}: has no column {column!r} (--{flag}); its columns: {listed or 'none'} "
                "(for a file without a header line: --column_names)"
            )
        kind = getattr(table.features[column], "dtype", type(table.features[column]).__name__.lower())
        if kind not in ("string", "large_string", "string_view", "null") or hasattr(table.features[column], "names"):
            raise UserError(f"{name}: {column!r} (--{flag}) holds values of type {kind}, not texts")
        try:
            table.data.column(column).validate(full=True)  # Arrow takes any bytes for UTF-8 until they are looked at
        except pa.ArrowException as error:
            row = first_invalid(table.data.column(column)) + 1
            raise UserError(f"{name}, row {row}: {column!r} is damaged ({one_line(error)}): write it anew") from error
    if not len(table):
        raise UserError(f"{name}: has columns but no rows")


def _hold_out(
    found: dict[str, datasets.Dataset], name: str, fraction: float | None, seed: int, notes: list[str]
) -> dict[str, datasets.Dataset]:
    train = found["train"]
    share = _DEFAULT_SPLIT if fraction is None else fraction
    held_out = hold_out(_digests(train), np.zeros(len(train), np.int64), share, seed)
    if not held_out.any():
        if fraction is not None:
            raise UserError(f"--validation_split {fraction}: of the {len(train)} rows of {name} that is none")
        notes.append(f"{name}: too few rows to hold some out, so there is no evaluation and the last model is kept")
        return found
    notes.append(f"{name}: {int(held_out.sum())} of {len(train)} rows are held out for validation")
    parts = {"train": ~held_out, "validation": held_out}
    return found | {split: _rows(train, np.flatnonzero(part)) for split, part in parts.items()}


def _rows(pairs: datasets.Dataset, numbers: np.ndarray) -> datasets.Dataset:
    with progress_bars(False):
        return pairs.select(numbers).flatten_indices()


def _digests(pairs: datasets.Dataset) -> list[bytes]:
    """What is equal for rows whose sources are, but for white space."""
    texts = cells_of(pairs, "source")
    return [hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest() for text in texts]


def _name(recipe: TargetRecipe, split: str) -> str:
    """How messages name the source of a split: its file, or the folder or data set with the split."""
    file: str | None = getattr(recipe, f"{split}_file")
    whole = recipe.dataset_name or recipe.train_file
    return file or (f"{whole} ({split})" if whole else split)
