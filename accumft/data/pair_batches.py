"""Tokenised pairs, and micro-batches of their texts: each text is a row of a batch, and its label says whose it is."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from accumft.cut import CostModel, Limits, cut
from accumft.data.files import to_dataset
from accumft.data.pairs import PairSplit
from accumft.data.text import TextCollator, tokenize
from accumft.data.windows import Batch, Window, WindowDataset
from accumft.packing import PackedCollator


def tokenize_texts(split: PairSplit, tokenizer: Any, max_length: int, show_progress: bool = False) -> Any:
    """The different texts of a split as token ids: a `datasets.Dataset`, see `accumft.data.text.tokenize`."""
    import pyarrow as pa

    # In pieces: one Arrow array may not hold 2 GiB.
    pieces = [pa.array(split.texts[i : i + 100_000], pa.string()) for i in range(0, len(split.texts), 100_000)]
    return tokenize(to_dataset(pa.table({"text": pa.chunked_array(pieces)})), tokenizer, max_length, show_progress)


def examples_of(split: PairSplit, tokenized: Any, packed: bool) -> Any:
    """A `datasets.Dataset` with a row an example: "example", "row", "length", and the token ids of each of its texts.

    The length is what a micro-batch needs for the example: all its tokens where batches are packed; where they are
    padded, as many as if each of its texts were as long as the longest.
    """
    import pyarrow as pa

    from accumft.data.files import numbers_of

    ids = split.ids
    of_texts = np.where(ids < 0, 0, numbers_of(tokenized, "length")[ids].astype(np.int64))
    lengths = of_texts.sum(axis=1) if packed else of_texts.max(axis=1) * (ids >= 0).sum(axis=1)
    columns = {"example": np.arange(len(split)), "row": split.rows, "length": lengths}
    table = pa.table({name: pa.chunked_array([values]) for name, values in columns.items()})
    tokens = tokenized.with_format("arrow")[:]["input_ids"]
    for position in range(ids.shape[1]):
        where = pa.array(ids[:, position], mask=ids[:, position] < 0)
        table = table.append_column(f"input_ids_{position}", tokens.take(where))
    return to_dataset(table)


def _texts(columns: dict[str, list[Any]]) -> tuple[list[list[int]], np.ndarray]:
    """The token ids of all texts of some examples, example by example, and their labels (texts,) int64."""
    width = sum(name.startswith("input_ids_") for name in columns)
    positions = [columns[f"input_ids_{position}"] for position in range(width)]
    ids, labels = [], []
    for i, example in enumerate(columns["example"]):
        for position in range(width):
            if positions[position][i] is not None:
                ids.append(positions[position][i])
                labels.append(example * width + position)
    return ids, np.array(labels, np.int64)


class PairCollator:
    """Columns of `examples_of` → a padded batch of their texts: input_ids, attention_mask (texts, tokens), and labels
    (texts,) int64, example · texts an example + position."""

    def __init__(self, tokenizer: Any) -> None:
        self.collate = TextCollator(tokenizer)

    def __call__(self, columns: dict[str, list[Any]]) -> Batch:
        ids, labels = _texts(columns)
        return {**self.collate({"input_ids": ids}), "labels": torch.from_numpy(labels)}


class PackedPairCollator:
    """The same without padding: the texts one after the other, in rectangles of like length (`accumft.packing`)."""

    def __init__(self, collate: PackedCollator, cost: CostModel) -> None:
        """
        Args:
            cost: its `rectangle` says when a further rectangle is cheaper than padding.
        """
        self.collate = collate
        self.cost = replace(cost, overhead=cost.rectangle)

    def __call__(self, columns: dict[str, list[Any]], sizes: Any = None) -> Batch:
        """
        Args:
            sizes: not looked at; the texts of a micro-batch make rectangles of their own.
        """
        ids, labels = _texts(columns)
        lengths = np.array([len(text) for text in ids])
        order = np.argsort(-lengths, kind="stable")
        starts = cut(lengths[None, order], 1, Limits(), self.cost).starts[0]
        rows = np.diff(np.append(np.flatnonzero(starts), len(ids))).tolist()
        batch = dict(self.collate({"input_ids": [ids[i] for i in order.tolist()]}, rows))
        batch["labels"] = torch.from_numpy(labels[order])
        return batch


class PairWindows(WindowDataset):
    """Windows whose batches hold texts: a row number for each text, and examples counted as examples."""

    @classmethod
    def of(cls, windows: WindowDataset) -> "PairWindows":
        """The same windows."""
        return cls(windows.dataset, windows.plan, windows.collate, windows.process_index)

    def __getitem__(self, step: int) -> Window:
        window = self._of_texts(super().__getitem__(step))
        assert window.counts is not None
        # A window without a share of its own holds one example all the same, which counts nothing.
        examples = sum(map(len, self.plan.micro_batches(step, self.process_index)))
        return replace(window, counts=(examples, *window.counts[1:]))

    def largest(self) -> Window:
        return self._of_texts(super().largest())

    def longest(self) -> Window:
        return self._of_texts(super().longest())

    def _of_texts(self, window: Window) -> Window:
        width = sum(name.startswith("input_ids_") for name in self.dataset.column_names)
        examples = [(batch["labels"] // width).tolist() for batch in window.micro_batches]
        needed = sorted({example for some in examples for example in some})
        row_of = dict(zip(needed, self.dataset[needed]["row"], strict=True))
        return replace(window, rows=[[row_of[example] for example in some] for some in examples])
