"""Texts longer than the model: several windows of a document, one prediction, one item."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from accumft.data.text import TextCollator, label_tensor
from accumft.data.windows import Batch, Collate
from accumft.errors import UserError
from accumft.recipe import refuse_unused

# Tokens that neighbouring windows share where nothing is said, or half a window.
DEFAULT_OVERLAP = 32

Pooling = Literal["mean", "max"]


@dataclass(frozen=True, slots=True)
class Documents:
    """Which document each row of a batch is a window of."""

    of: torch.Tensor
    """(windows,) int64, ascending from 0."""
    count: int
    pooling: Pooling

    def pool(self, logits: torch.Tensor) -> torch.Tensor:
        """(windows, labels) → (documents, labels): the mean or the largest of each document's."""
        pooled = logits.new_zeros((self.count, logits.shape[1]))
        index = self.of[:, None].expand_as(logits)
        reduce: Any = {"mean": "mean", "max": "amax"}[self.pooling]
        return pooled.scatter_reduce(0, index, logits, reduce=reduce, include_self=False)

    def part(self, start: int, stop: int) -> "tuple[slice, Documents]":
        """The rows of some documents, and which document each of them is of."""
        first, last = torch.searchsorted(self.of, torch.tensor([start, stop], device=self.of.device)).tolist()
        return slice(first, last), Documents(self.of[first:last] - start, stop - start, self.pooling)

    def to(self, device: Any, non_blocking: bool = False) -> "Documents":
        """The same with its tensor on `device`."""
        return replace(self, of=self.of.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Documents":
        """The same with its tensor in pinned memory."""
        return replace(self, of=self.of.pin_memory())


class DocumentCollator:
    """Columns of documents, each a list of windows → a batch of windows, padded, with its "documents"."""

    def __init__(self, tokenizer: Any, pooling: Pooling, pad_to_multiple_of: int | None = None) -> None:
        self.collate = TextCollator(tokenizer, pad_to_multiple_of)
        self.pooling: Pooling = pooling

    def __call__(self, columns: dict[str, list[Any]]) -> Batch:
        windows: Sequence[list[list[int]]] = columns["input_ids"]
        batch = dict(self.collate({"input_ids": [ids for document in windows for ids in document]}))
        of = torch.repeat_interleave(torch.tensor([len(document) for document in windows]))
        batch["documents"] = Documents(of, len(windows), self.pooling)
        if "labels" in columns:
            batch["labels"] = label_tensor(columns["labels"])
        return batch


def overlap_of(recipe: Any, tokenizer: Any, max_length: int, data: Any) -> int | None:
    """Tokens that windows share, of a recipe that wants them; None: texts are truncated.

    Args:
        recipe: with the fields long_text, window_overlap, window_pooling and padding_free.

    Raises:
        UserError: what it asks for does not go together.
    """
    if recipe.long_text == "truncate":
        refuse_unused(recipe, ("window_overlap", "window_pooling"), "--long_text truncate")
        return None
    if recipe.padding_free:
        raise UserError("--padding_free: not possible with --long_text windows; leave one of them out")
    if "text_pair" in data.train.column_names:
        raise UserError("--long_text windows: for single texts, and --text_column names two; leave it out")
    if not tokenizer.is_fast:
        raise UserError(f"--long_text windows: {type(tokenizer).__name__} is slow and gives no windows; leave it out")
    room = max_length - tokenizer.num_special_tokens_to_add()
    if recipe.window_overlap is None:
        return min(DEFAULT_OVERLAP, room // 2)
    if not 0 <= recipe.window_overlap < room:
        raise UserError(
            f"--window_overlap {recipe.window_overlap}: must be below the {room} tokens that a window of "
            f"--max_length {max_length} has besides special ones"
        )
    return int(recipe.window_overlap)


def collator_of(recipe: Any, tokenizer: Any) -> Collate:
    """What makes the padded batches of a text classification."""
    if recipe.long_text == "windows":
        return DocumentCollator(tokenizer, recipe.window_pooling, recipe.pad_to_multiple_of)
    return TextCollator(tokenizer, recipe.pad_to_multiple_of)
