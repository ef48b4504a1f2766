"""Raw text for language models: documents from files and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from accumft.data.draw import draw_rows, hold_out
from accumft.data.examples import Examples, check_columns, read_examples, to_classification_dataset
from accumft.data.files import ROW_COLUMN, check_file, checked_path, read_table, to_dataset
from accumft.data.splits import read_splits
from accumft.data.text_files import lines_of, wrong_encoding
from accumft.errors import UserError

if TYPE_CHECKING:
    import datasets

RAW = ".txt"
"""Suffix of files of nothing but text."""
SPLITS = ("train", "validation", "test")
_DEFAULT_SPLIT = 0.1


@dataclass(frozen=True)
class Corpus:
    """The documents of a run."""

    splits: dict[str, datasets.Dataset]
    """By "train", and "validation" and "test" where there are such: columns "row" (int64, the document's number in its
    source, from 1) and "text"."""
    notes: list[str]
    """Remarks of one line each, to be printed before training."""


def documents_of(lines: Iterable[str], line_by_line: bool) -> Iterator[str]:
    """The documents of a text: what stands between blank lines, or each line that is not blank."""
    document: list[str] = []
    for line in lines:
        text = line.rstrip("\r\n")
        if line_by_line or not text.strip():
            if document:
                yield "\n".join(document)
            document = []
        if text.strip():
            document.append(text)
    if document:
        yield "\n".join(document)


def is_raw(path: str | None) -> bool:
    """Whether a file is read as text and not as a table."""
    return path is not None and path.lower().endswith(RAW)


def read_documents(recipe: Any) -> dict[str, datasets.Dataset]:
    """The documents that a recipe names, by split, as tables: the text in the column `text_column`, and ROW_COLUMN.

    .txt files hold documents parted by blank lines, or one a line (`line_by_line`). All else is read as `read_splits`
    reads it.

    Raises:
        UserError: no training data, or a source that cannot be read.
    """
    files = {split: getattr(recipe, f"{split}_file") for split in SPLITS}
    raw = {split: path for split, path in files.items() if is_raw(path)}
    found = {}
    if "train" not in raw:
        found = read_splits(replace(recipe, **{f"{split}_file": None for split in raw}))
    elif recipe.dataset_name is not None:
        raise UserError("--dataset_name and --train_file are both given: give one of them")
    for split, path in files.items():
        if split in raw:
            found[split] = _read_text(path, recipe)
        elif path is not None and "train" in raw:
            found[split] = read_table(
                path,
                encoding=recipe.encoding,
                delimiter=recipe.delimiter,
                quotechar=recipe.quotechar,
                column_names=recipe.column_names,
            )
    return found


def _read_text(path: str, recipe: Any) -> datasets.Dataset:
    import pyarrow as pa

    name = checked_path(path)
    check_file(name)
    try:
        documents = list(documents_of(lines_of(name, recipe.encoding), recipe.line_by_line))
    except UnicodeError as error:
        raise wrong_encoding(name, recipe.encoding) from error
    if not documents:
        raise UserError(f"{path}: holds nothing but blank lines")
    # Not one array: it may not hold 2 GiB of text.
    chunks = [documents[start : start + 100_000] for start in range(0, len(documents), 100_000)]
    text = pa.chunked_array([pa.array(chunk, pa.string()) for chunk in chunks])
    return to_dataset(pa.table({recipe.text_column: text, ROW_COLUMN: range(1, len(documents) + 1)}))


def load_corpus(recipe: Any) -> Corpus:
    """The documents of a run, those of validation held out where there are none: equal texts stay on one side.

    Raises:
        UserError: a column, a row or a share that no run can be made of.
    """
    columns = SimpleNamespace(text_column=(recipe.text_column,), label_column=(), label_delimiter=None)
    columns.on_bad_row = recipe.on_bad_row
    notes: list[str] = []
    examples: dict[str, Examples] = {}
    for split, table in read_documents(recipe).items():
        file, whole = getattr(recipe, f"{split}_file"), recipe.dataset_name or recipe.train_file
        source = file or f"{whole} ({split})"
        check_columns(table, source, columns)
        examples[split] = read_examples(table, source, columns, notes)
    chosen = {split: np.arange(len(found)) for split, found in examples.items()}
    _hold_out(examples, chosen, recipe, notes)
    splits = {}
    for split in SPLITS:
        if split in chosen:
            size = recipe.max_train_samples if split == "train" else recipe.max_eval_samples
            drawn = chosen[split][draw_rows(len(chosen[split]), size, recipe.seed, SPLITS.index(split) + 1)]
            if len(drawn) < len(chosen[split]):
                notes.append(f"{split}: {len(drawn)} of {len(chosen[split])} documents are drawn")
            splits[split] = _dataset(examples[split], drawn)
    return Corpus(splits, notes)


def _hold_out(examples: dict[str, Examples], chosen: dict[str, np.ndarray], recipe: Any, notes: list[str]) -> None:
    """Takes validation documents out of the training ones, in place, where there are none."""
    fraction = recipe.validation_split
    if "validation" in examples:
        if fraction:
            raise UserError(f"--validation_split {fraction}: there is validation data already; leave out one of them")
        return
    if fraction == 0:
        return
    train = examples["train"]
    held_out = hold_out(
        train.comparable, np.zeros(len(train), np.int64), _DEFAULT_SPLIT if fraction is None else fraction, recipe.seed
    )
    rows, source = int(held_out.sum()), train.cells.source
    notes.append(f"{source}: {rows} of {len(train)} documents are held out for validation")
    if not rows:
        if fraction is not None:
            raise UserError(f"--validation_split {fraction}: of the {len(train)} documents of {source} that is none")
        notes[-1] += ", so there is no evaluation and the last model is kept: too few, or too many of one text"
        if is_raw(source) and not recipe.line_by_line:
            notes[-1] += " (blank lines part documents; --line_by_line if each line is one)"
        return
    examples["validation"] = train
    chosen["train"], chosen["validation"] = np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _dataset(examples: Examples, drawn: np.ndarray) -> datasets.Dataset:
    no_labels = np.zeros(len(examples), np.int64)
    return to_classification_dataset(examples, no_labels, drawn).remove_columns("labels")
