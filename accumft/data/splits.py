"""All splits of a run: read, checked, held out, drawn, with their labels as numbers."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from accumft.data.checks import check_training_labels, note_repeated
from accumft.data.draw import draw_rows, hold_out
from accumft.data.examples import (
    ClassificationRecipe,
    Examples,
    check_columns,
    labels_are_hidden,
    read_examples,
    to_classification_dataset,
)
from accumft.data.files import checked_path, is_saved_dataset, read_folder, read_table, with_row_numbers
from accumft.data.labels import LabelSpec, encode_labels, infer_labels
from accumft.data.text_files import one_line
from accumft.errors import UserError
from accumft.recipe import TableRecipe

if TYPE_CHECKING:
    import datasets

_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
_DEFAULT_SPLIT = 0.1


@dataclass(frozen=True)
class ClassificationData:
    """The examples of a run.

    Each split has the columns "row" (int64, the row in its source), "text", "text_pair" where there are two text
    columns, and "labels": int64 ids for single label, lists of float32 0 and 1 for multi-label, float64 (lists of them
    for several targets) for regression.
    """

    train: datasets.Dataset
    validation: datasets.Dataset | None
    test: datasets.Dataset | None
    labels: LabelSpec
    notes: list[str]
    """Remarks of one line each, to be printed before training."""

    @property
    def splits(self) -> dict[str, datasets.Dataset]:
        """Those that there are, by "train", "validation", "test"."""
        every = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in every.items() if split is not None}


def read_splits(recipe: TableRecipe) -> dict[str, datasets.Dataset]:
    """The tables that a recipe names, by "train", and "validation" and "test" where there are such.

    A folder given as train_file that holds several splits provides those for which there is no file. Splits of the hub
    are also found by the names valid, val and dev.

    Raises:
        UserError: No training data, or a source that cannot be read.
    """
    files = {"train": recipe.train_file, "validation": recipe.validation_file, "test": recipe.test_file}
    given = {split: path for split, path in files.items() if path is not None}
    if nameless := [split for split, path in given.items() if not path.strip()]:
        raise UserError(f"--{nameless[0]}_file {given[nameless[0]]!r}: names no file; name one, or leave out the flag")
    if recipe.dataset_name is not None:
        if given:
            raise UserError(f"--dataset_name and --{next(iter(given))}_file are both given: give one of them")
        return _of_hub(recipe.dataset_name, recipe.dataset_config_name)
    if "train" not in given:
        raise UserError("no training data: give --train_file or --dataset_name")
    splits: dict[str, datasets.Dataset] = {}
    for split, path in given.items():
        if is_saved_dataset(os.path.expanduser(path)):
            found = read_folder(path)
            if split == "train":
                splits |= _by_split(found, path)  # the files for validation and test, which come next, win
            else:
                splits[split] = next(iter(found.values())) if len(found) == 1 else _by_split(found, path, split)[split]
        else:
            splits[split] = read_table(
                path,
                encoding=recipe.encoding,
                delimiter=recipe.delimiter,
                quotechar=recipe.quotechar,
                column_names=recipe.column_names,
            )
    return splits


def load_classification_data(
    splits: Mapping[str, datasets.Dataset], recipe: ClassificationRecipe
) -> ClassificationData:
    """The tables of a run → its examples.

    The labels are those of all usable training rows, before any is held out or left undrawn. Without validation data, a
    share of the training rows is held out, as `hold_out` says: stratified for single label; rows whose texts are equal
    but for surrounding white space stay on one side. A test split whose labels are hidden (all -1 of a ClassLabel) is
    left out.

    Args:
        splits: Tables as of `read_splits`; "train" is needed. Row numbers are those of ROW_COLUMN, if it is there.
        recipe: The columns and what to do with them, and the files that messages name.

    Raises:
        UserError: Columns, rows, labels or fields of the recipe that no classifier can be trained with.
    """
    _check_recipe(recipe, splits)
    notes: list[str] = []
    examples: dict[str, Examples] = {}
    for split, table in splits.items():
        source = _source(recipe, split)
        check_columns(table, source, recipe)
        if split == "test" and labels_are_hidden(table, recipe):
            notes.append(f"{source}: its labels are hidden, so it is not used")
        else:
            examples[split] = read_examples(table, source, recipe, notes)
    train, delimiter = examples["train"], recipe.label_delimiter
    labels = infer_labels(train.cells, label_delimiter=delimiter, problem_type=recipe.problem_type)
    encoded = {split: encode_labels(e.cells, labels, label_delimiter=delimiter) for split, e in examples.items()}
    check_training_labels(train, labels, encoded["train"], recipe.problem_type is not None, notes)
    note_repeated(examples, labels, encoded["train"], notes, "text", "rows have a text that is in")

    chosen = {split: np.arange(len(e)) for split, e in examples.items()}
    if "validation" not in examples and recipe.validation_split != 0:
        held_out = _hold_out(train, labels, encoded["train"], recipe)
        notes.append(_about_held_out(train, held_out))
        if held_out.any():
            examples["validation"], encoded["validation"] = train, encoded["train"]
            chosen["train"], chosen["validation"] = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    data = {}
    for split, indices in chosen.items():
        size = recipe.max_train_samples if split == "train" else recipe.max_eval_samples
        drawn = indices[draw_rows(len(indices), size, recipe.seed, stream=list(_SPLITS).index(split) + 1)]
        if len(drawn) < len(indices):
            notes.append(f"{split}: {len(drawn)} of {len(indices)} rows are drawn")
            absent = labels.num_labels - len(np.unique(encoded[split][drawn]))
            if split == "train" and labels.problem_type == "single_label_classification" and absent:
                notes.append(f"{split}: {absent} of {labels.num_labels} classes have no row among those drawn")
        data[split] = to_classification_dataset(examples[split], encoded[split], drawn)
    return ClassificationData(data["train"], data.get("validation"), data.get("test"), labels, notes)


def _check_recipe(recipe: ClassificationRecipe, splits: Collection[str]) -> None:
    if len(recipe.text_column) not in (1, 2):
        raise UserError(f"--text_column: one column or two, not {len(recipe.text_column)}")
    if not recipe.label_column:
        raise UserError("--label_column: at least one column")
    columns = [*recipe.text_column, *recipe.label_column]
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise UserError(f"--text_column and --label_column: {twice[0]!r} is named more than once")
    fraction = recipe.validation_split
    if fraction is not None and not 0 <= fraction < 1:
        raise UserError(f"--validation_split {fraction}: must be at least 0 and less than 1")
    if fraction and "validation" in splits:
        raise UserError(f"--validation_split {fraction}: there is validation data already; leave out one of them")
    for flag in ("max_train_samples", "max_eval_samples"):
        size = getattr(recipe, flag)
        if size is not None and size < 1:
            raise UserError(f"--{flag} {size}: must be at least 1")


def _source(recipe: ClassificationRecipe, split: str) -> str:
    """How messages name the source of a split: its file, or the folder or data set with the split."""
    file: str | None = getattr(recipe, f"{split}_file")
    whole = recipe.dataset_name or recipe.train_file
    return file or (f"{whole} ({split})" if whole else split)


def _hold_out(train: Examples, labels: LabelSpec, encoded: np.ndarray, recipe: ClassificationRecipe) -> np.ndarray:
    """Which training rows are for validation: bool (rows,)."""
    single = labels.problem_type == "single_label_classification"
    classes = encoded if single else np.zeros(len(train), np.int64)
    fraction = _DEFAULT_SPLIT if recipe.validation_split is None else recipe.validation_split
    held_out = hold_out(train.comparable, classes, fraction, recipe.seed)
    if recipe.validation_split is not None and not held_out.any():
        raise UserError(
            f"--validation_split {fraction}: of the {len(held_out)} rows of {train.cells.source} that is none"
        )
    return held_out


def _about_held_out(train: Examples, held_out: np.ndarray) -> str:
    """How many rows are held out, and what is the matter if that says little."""
    rows, wanted = int(held_out.sum()), round(_DEFAULT_SPLIT * len(held_out))
    texts = len({key for key, out in zip(train.comparable, held_out, strict=True) if out})
    note = f"{train.cells.source}: {rows} of {len(held_out)} rows are held out for validation"
    if rows == 0:
        return f"{note}, so there is no evaluation and the last model is kept: too few rows, or too many of one text"
    if texts < rows / 2 or rows < wanted / 2:
        return (
            f"{note}, with only {texts} different texts, since rows of one text stay together; give --validation_file"
        )
    return note


def _of_hub(name: str, config: str | None) -> dict[str, datasets.Dataset]:
    import datasets

    path = checked_path(name)
    if is_saved_dataset(path):
        return _by_split(read_folder(path), name)
    try:
        found = datasets.load_dataset(path if os.path.exists(path) else name, config)
    except Exception as error:  # its readers of files raise whatever comes
        remedy = "; without a network, give files (--train_file)" if isinstance(error, ConnectionError) else ""
        raise UserError(f"--dataset_name {name}: {one_line(error)}{remedy}") from error
    return _by_split({split: with_row_numbers(table) for split, table in found.items()}, name)


def _by_split(found: Mapping[str, datasets.Dataset], source: str, needed: str = "train") -> dict[str, datasets.Dataset]:
    """The splits by our names for them. Those that a run has no use for are left out."""
    splits: dict[str, datasets.Dataset] = {}
    for split, names in _SPLITS.items():
        for name in names:
            if name in found:
                splits.setdefault(split, found[name])
    if needed not in splits:
        raise UserError(f"{source}: has no split {needed!r}; its splits: {', '.join(found)}")
    return splits
