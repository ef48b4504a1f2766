"""Rows of texts that belong together: pairs, scored pairs, pairs with hard negatives; read, checked, held out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from accumft.data.draw import draw_rows, hold_out
from accumft.data.examples import INVISIBLE, check_columns, row_list
from accumft.data.files import ROW_COLUMN, cells_of, read_table
from accumft.data.rqe import read_rqe
from accumft.data.splits import read_splits
from accumft.errors import UserError
from accumft.recipe import TableRecipe, refuse_unused

if TYPE_CHECKING:
    import datasets

SPLITS = ("train", "validation", "test")
DEFAULT_SPLIT = 0.1


@dataclass(frozen=True)
class PairSplit:
    """The examples of one split. Each is some texts: the anchor, its positive, and hard negatives where it has them."""

    rows: np.ndarray
    """(examples,) int64, their rows in the source."""
    texts: list[str]
    """The different texts, in the order in which they first come."""
    ids: np.ndarray
    """(examples, texts an example) int64, which text; -1 where an example has no such negative."""
    keys: np.ndarray
    """(examples, texts an example) int64: equal for texts that are equal but for case and white space; else as ids."""
    scores: np.ndarray | None = None
    """(examples,) float64, -1 to 1, of scored pairs."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, examples: np.ndarray) -> PairSplit:
        """Some of the examples, with the texts that they have."""
        ids = self.ids[examples]
        used = np.unique(ids[ids >= 0])
        number = np.full(len(self.texts) + 1, -1, np.int64)
        number[used] = np.arange(len(used))
        scores = None if self.scores is None else self.scores[examples]
        texts = [self.texts[i] for i in used.tolist()]
        return PairSplit(self.rows[examples], texts, number[ids], self.keys[examples], scores)


@dataclass(frozen=True)
class PairData:
    """The examples of a run."""

    splits: dict[str, PairSplit]
    """ "train", and "validation" and "test" where there are such."""
    notes: list[str]
    """Remarks of one line each, to be printed before training."""


def read_pair_tables(recipe: TableRecipe, notes: list[str]) -> dict[str, datasets.Dataset]:
    """The tables that a recipe names, as `accumft.data.splits.read_splits`; files that end in .xml are those of RQE."""
    files = {split: getattr(recipe, f"{split}_file") for split in SPLITS}
    if not any(str(path).lower().endswith(".xml") for path in files.values() if path):
        return read_splits(recipe)
    if recipe.train_file is None or recipe.dataset_name is not None:
        raise UserError("files of RQE (.xml) are given by --train_file, --validation_file and --test_file")
    if all(str(path).lower().endswith(".xml") for path in files.values() if path):
        refuse_unused(recipe, ("encoding", "delimiter", "quotechar", "column_names"), "files of RQE (.xml)")
    reading: dict[str, Any] = {name: getattr(recipe, name) for name in ("encoding", "delimiter", "quotechar")}
    return {
        split: read_rqe(path, notes)
        if path.lower().endswith(".xml")
        else read_table(path, **reading, column_names=recipe.column_names)
        for split, path in files.items()
        if path
    }


def load_pair_data(tables: Mapping[str, datasets.Dataset], recipe: Any, notes: list[str]) -> PairData:
    """The tables of a run → its examples.

    Pairs of two equal texts are dropped, as nothing is learnt from them and they flatter a retrieval. What is held out
    of the training rows shares no anchor and no positive with what stays.

    Args:
        recipe: with the fields of recipes/contrastive.py.

    Raises:
        UserError: columns, rows or fields of which no encoder can be trained.
    """
    numbers: dict[str, int] = {}
    splits = {}
    for split in SPLITS:
        if split in tables:
            source = getattr(recipe, f"{split}_file") or f"{recipe.dataset_name or recipe.train_file} ({split})"
            splits[split] = _read(tables[split], source, recipe, numbers, notes)
    for split, flag in (("test", "test_split"), ("validation", "validation_split")):
        fraction = getattr(recipe, flag)
        if split in splits:
            if fraction:
                raise UserError(f"--{flag} {fraction}: there is {split} data already; leave out one of them")
            continue
        fraction = (DEFAULT_SPLIT if split == "validation" else 0.0) if fraction is None else fraction
        train = splits["train"]
        held_out = hold_out(groups(train), np.zeros(len(train), np.int64), fraction, recipe.seed)
        if held_out.any():
            notes.append(f"{split}: {int(held_out.sum())} of {len(train)} pairs are held out, sharing no text")
            splits["train"], splits[split] = train.take(np.flatnonzero(~held_out)), train.take(np.flatnonzero(held_out))
        elif fraction:
            notes.append(f"{split}: of {len(train)} pairs none could be held out: too few, or all of them share texts")
            if getattr(recipe, flag) is not None:
                raise UserError(f"--{flag} {fraction}: of the {len(train)} pairs that is none; give --{split}_file")
    for stream, split in enumerate(SPLITS, start=1):
        if split in splits:
            limit = recipe.max_train_samples if split == "train" else recipe.max_eval_samples
            drawn = draw_rows(len(splits[split]), limit, recipe.seed, stream=stream)
            if len(drawn) < len(splits[split]):
                notes.append(f"{split}: {len(drawn)} of {len(splits[split])} pairs are drawn")
                splits[split] = splits[split].take(drawn)
    if recipe.loss == "triplet":
        splits["train"] = _with_negatives(splits["train"], notes)
    known = set(splits["train"].keys[:, :2].ravel().tolist())
    for split in SPLITS[1:]:
        if split in splits:
            shared = int(np.isin(splits[split].keys[:, :2], list(known)).any(axis=1).sum())
            if shared:
                notes.append(f"{split}: {shared} of {len(splits[split])} pairs have a text of the training data too")
    return PairData({split: splits[split] for split in SPLITS if split in splits}, notes)


def groups(split: PairSplit) -> list[int]:
    """For each example a number that it shares with those that it is joined to by an anchor or a positive."""
    parent: dict[int, int] = {}

    def root(key: int) -> int:
        while (above := parent.setdefault(key, key)) != key:
            parent[key] = parent[above]
            key = above
        return key

    pairs = split.keys[:, :2].tolist()
    for anchor, positive in pairs:
        parent[root(anchor)] = root(positive)
    return [root(anchor) for anchor, _ in pairs]


def key_of(text: str) -> str:
    """What is equal for texts that are, but for case and white space."""
    return " ".join(text.casefold().split())


def _read(table: datasets.Dataset, source: str, recipe: Any, numbers: dict[str, int], notes: list[str]) -> PairSplit:
    """The usable rows of one table; `numbers` are those of the texts' keys, over all tables."""
    columns = [*recipe.text_column, *recipe.negative_column]
    score_column = () if recipe.score_column is None else (recipe.score_column,)
    try:
        check_columns(table, source, SimpleNamespace(text_column=columns, label_column=score_column))
    except UserError as error:
        missing = [name for name in recipe.negative_column if f"no column {name!r}" in str(error)]
        flag = "negative_column" if missing else "text_column"
        raise UserError(str(error).replace("text_column", flag).replace("label_column", "score_column")) from error
    n = len(table)
    rows = list(cells_of(table, ROW_COLUMN)) if ROW_COLUMN in table.column_names else list(range(1, n + 1))
    cells = [["" if text is None else text.strip(INVISIBLE) for text in cells_of(table, name)] for name in columns]
    usable = np.ones(n, bool)
    for name, texts in zip(recipe.text_column, cells, strict=False):
        blank = [i for i, text in enumerate(texts) if not text]
        if blank and recipe.on_bad_row == "error":
            found = row_list([rows[i] for i in blank])
            raise UserError(f"{source}: an empty text in {name!r}: {found}; fill them in, or --on_bad_row skip")
        usable[blank] = False
    if not usable.all():
        notes.append(f"{source}: {int((~usable).sum())} of {n} rows are skipped (an empty text)")
    scores = None
    if recipe.score_column is not None:
        scores = _scores(list(cells_of(table, recipe.score_column)), rows, usable, source, recipe)
    keys = np.full((n, len(columns)), -1, np.int64)
    ids = np.full((n, len(columns)), -1, np.int64)
    texts_of: dict[str, int] = {}
    for i, row in enumerate(zip(*cells, strict=True)):
        for column, text in enumerate(row):
            if text:
                keys[i, column] = numbers.setdefault(key_of(text), len(numbers))
                ids[i, column] = texts_of.setdefault(text, len(texts_of))
    same = usable & (keys[:, 0] == keys[:, 1])
    if same.any() and scores is None:
        notes.append(f"{source}: {int(same.sum())} pairs of two equal texts are dropped")
        usable &= ~same
    if not usable.any():
        raise UserError(f"{source}: no pair of two different texts; are --text_column {' '.join(columns[:2])} right?")
    return PairSplit(np.array(rows, np.int64), list(texts_of), ids, keys, scores).take(np.flatnonzero(usable))


def _with_negatives(train: PairSplit, notes: list[str]) -> PairSplit:
    """The pairs of which a triplet can be made; of the others an effective batch might have nothing to learn."""
    anchors, positives, negatives = train.keys[:, :1], train.keys[:, 1:2], train.keys[:, 2:]
    usable = ((negatives >= 0) & (negatives != anchors) & (negatives != positives)).any(axis=1)
    if usable.all() or not usable.any():
        return train
    left_out = int((~usable).sum())
    notes.append(f"train: {left_out} of {len(train)} pairs have no hard negative and are left out (triplet)")
    return train.take(np.flatnonzero(usable))


def _scores(cells: Sequence[Any], rows: Sequence[int], usable: np.ndarray, source: str, recipe: Any) -> np.ndarray:
    """(rows,) the numbers of the column of scores; rows without one are an error, or become unusable in place."""
    scores = np.zeros(len(cells))
    name = recipe.score_column
    for i, cell in enumerate(cells):
        try:
            value = float(cell)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            if recipe.on_bad_row == "error":
                raise UserError(
                    f"{source}, row {rows[i]}: no number in {name!r} (--score_column); or --on_bad_row skip"
                )
            usable[i] = False
        elif not -1 <= value <= 1:
            raise UserError(f"{source}, row {rows[i]}: {name!r} is {value:g}; a cosine is -1 to 1: divide the scores")
        else:
            scores[i] = value
    return scores
