"""A split of examples → a table of tokens and labels, cut at a length; what is cut off or left out is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accumft.data.chat import IGNORED, ChatEncoder
from accumft.data.conversations import Example, row_list
from accumft.errors import UserError

if TYPE_CHECKING:
    import datasets

_ROWS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Truncation:
    """What `max_length` left out of a split."""

    rows: int
    """That were longer."""
    tokens: int
    targets: int
    """Tokens to be learnt among those left out."""
    skipped: list[int]
    """Rows without any token to be learnt before `max_length`."""


def encode_split(
    examples: Sequence[Example], encode: ChatEncoder, max_length: int, source: str, skip: bool, notes: list[str]
) -> tuple[datasets.Dataset, list[Example], Truncation]:
    """A split as a table of tokens.

    Args:
        max_length: tokens of a row; longer ones lose their end.
        skip: leave out rows without a token to be learnt before `max_length`; else they are an error.
        notes: gets a line on what is left out.

    Returns:
        Columns "row", "input_ids", "labels" (aligned with them), "length"; the examples in it; what was left out.
    """
    import datasets
    import pyarrow as pa

    blocks, kept, skipped = [], [], []
    longer = tokens = targets = 0
    for first in range(0, len(examples), _ROWS_AT_ONCE):
        columns: dict[str, list[Any]] = {"row": [], "input_ids": [], "labels": [], "length": []}
        for example in examples[first : first + _ROWS_AT_ONCE]:
            found = encode(example, source)
            labels = found.labels[:max_length]
            if len(found.labels) > max_length:
                longer += 1
                tokens += len(found.labels) - max_length
                targets += sum(label != IGNORED for label in found.labels[max_length:])
            if all(label == IGNORED for label in labels):
                skipped.append(example.row)
                continue
            kept.append(example)
            for name, value in zip(
                columns, (example.row, found.input_ids[:max_length], labels, len(labels)), strict=True
            ):
                columns[name].append(value)
        blocks.append(pa.table(columns, schema=_schema()))
    if skipped:
        what = f"{source}: no token to be learnt within {max_length} tokens: {row_list(skipped)}"
        if not skip or not kept:
            raise UserError(f"{what}; raise --max_length, or --on_bad_row skip")
        notes.append(f"{what}; skipped")
    table = datasets.Dataset(pa.concat_tables(blocks), fingerprint=datasets.fingerprint.generate_random_fingerprint())
    return table, kept, Truncation(longer, tokens, targets, skipped)


def _schema() -> Any:
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    return pa.schema([("row", pa.int64()), ("input_ids", ids), ("labels", ids), ("length", pa.int32())])
