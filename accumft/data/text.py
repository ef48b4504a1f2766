"""Texts → token ids with lengths → padded batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accumft.data.windows import Batch

ROWS_WITHOUT_PROGRESS = 10_000


def tokenize(dataset: Any, tokenizer: Any, max_length: int, show_progress: bool = False) -> Any:
    """A `datasets.Dataset` with "text" and perhaps "text_pair" → the same rows as token ids.

    Args:
        max_length: tokens of a row, special tokens included; longer ones are truncated (of a pair, the longer text).
        show_progress: whether a bar is shown, if there are enough rows to wait for.

    Returns:
        The other columns, and "input_ids", what else the tokenizer makes but the attention mask (which is all ones
        before padding), "length" (tokens) and "truncated" (bool).
    """
    texts = [name for name in ("text", "text_pair") if name in dataset.column_names]

    def encode(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encoded = tokenizer(
            *[columns[name] for name in texts], truncation=True, max_length=max_length, return_attention_mask=False
        )
        ids = encoded["input_ids"]
        result = dict(encoded)
        result["length"] = [len(row) for row in ids]
        if encoded.encodings is not None:
            result["truncated"] = [bool(row.overflowing) for row in encoded.encodings]
        else:
            result["truncated"] = [len(row) >= max_length for row in ids]
        return result

    with _progress_bars(show_progress and len(dataset) > ROWS_WITHOUT_PROGRESS):
        return dataset.map(
            encode,
            batched=True,
            remove_columns=texts,
            desc="tokenizing",
            load_from_cache_file=False,
            keep_in_memory=True,
        )


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Whether `datasets` shows its bars."""
    import datasets

    were_shown = not datasets.are_progress_bars_disabled()
    if not shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            datasets.enable_progress_bars()


class TextCollator:
    """Columns of tokenised rows → a batch, padded to its longest row: input_ids, attention_mask, …, labels.

    Tensors are (rows, tokens), int64; labels (rows,) int64 or float32, or (rows, labels) float32.
    """

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, columns: dict[str, list[Any]]) -> Batch:
        inputs = {name: columns[name] for name in self.tokenizer.model_input_names if name in columns}
        batch = dict(
            self.tokenizer.pad(
                inputs, padding=True, pad_to_multiple_of=self.pad_to_multiple_of, return_tensors="pt", verbose=False
            )
        )
        if "labels" in columns:
            labels = torch.tensor(columns["labels"])
            batch["labels"] = labels if labels.dtype == torch.int64 else labels.float()
        return batch
