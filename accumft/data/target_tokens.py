"""Pairs of a source and a target text → token ids with their length → padded batches.

The length of a row, which the planner cuts by, is the tokens of its source plus those of its target: the encoder sees
the ones and the decoder the others, at about the same cost a token. Each side of a micro-batch is padded to its own
longest row, so one whose long sources have short targets takes more than rows × longest: less than twice that.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from accumft.data.cache import digest_of_texts, digest_of_tokenizer, made_once
from accumft.data.files import numbers_of
from accumft.data.text import ROWS_IN_MEMORY, progress_bars
from accumft.data.windows import Batch

IGNORED = -100
"""The label of padding."""
FORMAT = 1
"""Version of what `tokenize_pairs` makes: to be raised when it makes something else of the same texts."""


def tokenize_pairs(pairs: Any, tokenizer: Any, prefix: str, max_source_length: int, max_target_length: int) -> Any:
    """A data set of `TargetData` → "row", "input_ids", "labels", "length" and "source_lost" and "target_lost".

    Longer texts are truncated, each side by its own maximum, special tokens included and kept; the lost columns count
    what that leaves out. Of more than ROWS_IN_MEMORY rows the result is kept on disk, see `accumft.data.cache`.

    Args:
        prefix: stands before each source, as T5's tasks have it.
    """

    import datasets

    def side(key: str, texts: list[str], limit: int) -> tuple[list[list[int]], list[int]]:
        def ids_of(some: list[str], **more: Any) -> list[list[int]]:
            return list(tokenizer(**{key: some}, return_attention_mask=False, verbose=False, **more)["input_ids"])

        ids = ids_of(texts)
        lost = [0] * len(ids)
        for i, row in enumerate(ids):
            if len(row) > limit:
                (ids[i],) = ids_of([texts[i]], truncation=True, max_length=limit)
                lost[i] = len(row) - len(ids[i])
        return ids, lost

    def encode(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        sources, source_lost = side("text", [prefix + text for text in columns["source"]], max_source_length)
        targets, target_lost = side("text_target", columns["target"], max_target_length)
        return {
            "input_ids": sources,
            "labels": targets,
            "length": [len(a) + len(b) for a, b in zip(sources, targets, strict=True)],
            "source_lost": source_lost,
            "target_lost": target_lost,
        }

    def encode_all(path: str | None = None) -> Any:
        return pairs.map(
            encode,
            batched=True,
            remove_columns=["source", "target"],
            load_from_cache_file=False,
            keep_in_memory=path is None,
            cache_file_name=path,
            new_fingerprint=datasets.fingerprint.generate_random_fingerprint(),  # the default hashes the tokenizer
        )

    with progress_bars(False):
        identity = digest_of_tokenizer(tokenizer) if len(pairs) > ROWS_IN_MEMORY else None
        found = None
        if identity is not None:
            texts = digest_of_texts(pairs, ["source", "target"])
            rows = hashlib.sha256(numbers_of(pairs, "row").tobytes()).hexdigest()
            made_from = [FORMAT, identity, prefix, max_source_length, max_target_length, texts, rows]
            found = made_once("pairs", made_from, encode_all)
        return encode_all() if found is None else found


class PairCollator:
    """Columns of tokenised pairs → a batch: input_ids and attention_mask, (rows, source tokens); labels and
    decoder_attention_mask, (rows, target tokens); int64, padded on the right to the longest of each side."""

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.multiple = pad_to_multiple_of or 1

    def __call__(self, columns: dict[str, list[Any]]) -> Batch:
        input_ids, attention_mask = self._padded(columns["input_ids"], self.pad_token_id)
        labels, decoder_attention_mask = self._padded(columns["labels"], IGNORED)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "decoder_attention_mask": decoder_attention_mask,
        }

    def _padded(self, rows: Sequence[Sequence[int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = np.array([len(row) for row in rows])
        width = -(-int(lengths.max()) // self.multiple) * self.multiple
        mask = np.arange(width) < lengths[:, None]
        values = np.full(mask.shape, padding, np.int64)
        values[mask] = np.concatenate([np.asarray(row, np.int64) for row in rows])
        return torch.from_numpy(values), torch.from_numpy(mask.astype(np.int64))
