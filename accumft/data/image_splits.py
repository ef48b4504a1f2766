"""All splits of a run on images: every image opened once, labels as numbers, validation held out, rows drawn."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import distributed

from accumft.data.checks import check_training_labels, note_repeated
from accumft.data.draw import draw_rows, hold_out
from accumft.data.examples import check_columns, label_cells, labels_are_hidden, row_list
from accumft.data.files import ROW_COLUMN, to_dataset
from accumft.data.image_decoding import Images
from accumft.data.image_files import ImageTable
from accumft.data.labels import LabelCells, LabelSpec, encode_labels, infer_labels, is_missing
from accumft.data.splits import ClassificationData
from accumft.errors import UserError

if TYPE_CHECKING:
    import datasets

_DEFAULT_SPLIT = 0.1
_STREAMS = ("train", "validation", "test")


@dataclass(frozen=True)
class ImageData(ClassificationData):
    """The examples of a run.

    Each split has the columns "row" (int64, the row in its source), "image" (int64, the image's number among `images`
    of the split) and "labels", as `ClassificationData` has them.
    """

    images: dict[str, Images]
    """By split."""
    digests: dict[str, list[bytes]]
    """Of the pixels of each image of a split, by its number."""


@dataclass(frozen=True)
class _Examples:
    """The rows of one split that can be used."""

    images: Images
    digests: list[bytes]
    """Of all images; empty where there is none."""
    usable: np.ndarray
    """Which of the images: int64 (rows,), ascending."""
    cells: LabelCells

    def __len__(self) -> int:
        return len(self.usable)

    @property
    def comparable(self) -> list[bytes]:
        """What is equal for rows of the same picture."""
        return [self.digests[i] for i in self.usable]


def look_at(images: Images) -> list[bytes | str]:
    """Opens every image once: a digest of its pixels, or what is wrong with it. The processes share the work.

    Images that are damaged would otherwise end a run in the middle, where it comes to them.
    """
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    rank = distributed.get_rank() if world > 1 else 0
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = list(pool.map(partial(_digest, images), range(rank, len(images), world)))
    if world == 1:
        return found
    shares: list[list[bytes | str]] = [[] for _ in range(world)]
    distributed.all_gather_object(shares, found)
    return [shares[i % world][i // world] for i in range(len(images))]


def _digest(images: Images, index: int) -> bytes | str:
    try:
        image = images.load(index)
    except UserError as error:
        return str(error)
    return hashlib.blake2b(image.tobytes(), digest_size=16, person=b"%dx%d" % image.size).digest()


def load_image_data(splits: Mapping[str, ImageTable], recipe: Any) -> ImageData:
    """The images of a run → its examples.

    The labels are those of all usable training rows. Without validation data, a share of the training rows is held
    out: stratified for single label; rows of the same picture stay on one side.

    Args:
        splits: as of `read_image_splits`; "train" is needed.
        recipe: with the fields of a TableRecipe, label_delimiter and problem_type.

    Raises:
        UserError: images that cannot be opened, columns, rows or labels that no classifier can be trained with.
    """
    fraction = recipe.validation_split
    if fraction and "validation" in splits:
        raise UserError(f"--validation_split {fraction}: there is validation data already; leave out one of them")
    notes = [note for table in splits.values() for note in table.notes]
    examples: dict[str, _Examples] = {}
    for split, table in splits.items():
        columns: Any = SimpleNamespace(text_column=(), label_column=table.label_columns)
        check_columns(table.table, table.source, columns)
        if split == "test" and labels_are_hidden(table.table, columns):
            notes.append(f"{table.source}: its labels are hidden, so it is not used")
        else:
            examples[split] = _usable(table, recipe, notes)
    train, delimiter = examples["train"], recipe.label_delimiter
    labels = infer_labels(train.cells, label_delimiter=delimiter, problem_type=recipe.problem_type)
    encoded = {split: encode_labels(e.cells, labels, label_delimiter=delimiter) for split, e in examples.items()}
    as_examples: Any = train
    is_known = recipe.problem_type is not None or (recipe.train_file is None and recipe.dataset_name is None)
    check_training_labels(as_examples, labels, encoded["train"], is_known, notes)
    note_repeated(examples, labels, encoded["train"], notes, "image", "images are in")

    chosen = {split: np.arange(len(e)) for split, e in examples.items()}
    if "validation" not in examples and fraction != 0:
        held_out = _hold_out(train, labels, encoded["train"], recipe, notes)
        if held_out.any():
            examples["validation"], encoded["validation"] = train, encoded["train"]
            chosen["train"], chosen["validation"] = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    data = {}
    for split, indices in chosen.items():
        size = recipe.max_train_samples if split == "train" else recipe.max_eval_samples
        drawn = indices[draw_rows(len(indices), size, recipe.seed, stream=_STREAMS.index(split) + 1)]
        if len(drawn) < len(indices):
            notes.append(f"{split}: {len(drawn)} of {len(indices)} rows are drawn")
        data[split] = _dataset(examples[split], encoded[split], drawn)
    return ImageData(
        data["train"],
        data.get("validation"),
        data.get("test"),
        labels,
        notes,
        {split: examples[split].images for split in data},
        {split: examples[split].digests for split in data},
    )


def _usable(table: ImageTable, recipe: Any, notes: list[str]) -> _Examples:
    """The rows that have an image and labels; the others are an error, or skipped with a note."""
    source, number = table.source, len(table.table)
    rows: Sequence[int] = list(table.table[ROW_COLUMN])
    cells = {name: label_cells(table.table, name, rows, source) for name in table.label_columns}
    seen = look_at(table.images)
    broken = [i for i, found in enumerate(seen) if isinstance(found, str)]
    if broken and recipe.on_bad_row == "error":
        others = [rows[i] for i in broken[1:]]
        more = f" (and {len(others)} more images: {row_list(others)})" if others else ""
        raise UserError(f"{seen[broken[0]]!s}{more}; mend it, or --on_bad_row skip")
    bad = {
        f"no label in {n!r}": [i for i, c in enumerate(v) if is_missing(c, recipe.label_delimiter)]
        for n, v in cells.items()
    }
    unlabelled = "; ".join(f"{what}: {row_list([rows[i] for i in where])}" for what, where in bad.items() if where)
    if unlabelled and recipe.on_bad_row == "error":
        raise UserError(f"{source}: {unlabelled}; fill them in, or --on_bad_row skip")
    unusable = set(broken).union(*bad.values())
    usable = np.array([i for i in range(number) if i not in unusable], np.int64)
    if unusable:
        why = [f"no whole image: {row_list([rows[i] for i in broken])}"] if broken else []
        why += [unlabelled] if unlabelled else []
        notes.append(f"{source}: {len(unusable)} of {number} rows are skipped ({'; '.join(why)})")
        if not len(usable):
            raise UserError(f"{source}: no row has an image and a label; the first: {seen[0]!s}"[:500])
        rows = [rows[i] for i in usable]
        cells = {name: [column[i] for i in usable] for name, column in cells.items()}
    digests = [found if isinstance(found, bytes) else b"" for found in seen]
    return _Examples(table.images, digests, usable, LabelCells(cells, rows, source))


def _hold_out(train: _Examples, labels: LabelSpec, encoded: np.ndarray, recipe: Any, notes: list[str]) -> np.ndarray:
    """Which training rows are for validation: bool (rows,)."""
    single = labels.problem_type == "single_label_classification"
    classes = encoded if single else np.zeros(len(train), np.int64)
    fraction = _DEFAULT_SPLIT if recipe.validation_split is None else recipe.validation_split
    held_out = hold_out(train.comparable, classes, fraction, recipe.seed)
    source, rows = train.cells.source, int(held_out.sum())
    if recipe.validation_split is not None and not rows:
        raise UserError(f"--validation_split {fraction}: of the {len(held_out)} rows of {source} that is none")
    nothing = "" if rows else ", so there is no evaluation and the last model is kept: too few rows, or too many alike"
    notes.append(f"{source}: {rows} of {len(held_out)} rows are held out for validation{nothing}")
    return held_out


def _dataset(examples: _Examples, encoded: np.ndarray, indices: np.ndarray) -> datasets.Dataset:
    import pyarrow as pa

    chosen, rows = encoded[indices], np.asarray(examples.cells.rows, np.int64)[indices]
    labels = pa.array(chosen) if chosen.ndim == 1 else pa.array(list(chosen))
    return to_dataset(pa.table({"row": rows, "image": examples.usable[indices], "labels": labels}))
