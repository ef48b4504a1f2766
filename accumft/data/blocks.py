"""Documents as blocks of tokens for a language model, of which none is lost."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from accumft.data.cache import digest_of_texts, digest_of_tokenizer, made_once
from accumft.data.files import blocks_of
from accumft.data.masking import NO_UNIT, units_of
from accumft.data.text import ROWS_IN_MEMORY, ROWS_WITHOUT_PROGRESS, progress_bars
from accumft.errors import UserError

FORMAT = 1
"""Version of what `to_blocks` makes: to be raised when it makes something else of the same texts."""
# Documents that `packing` joins: of each so many, the last block is shorter.
_PACKED_TOGETHER = 2_000


def to_blocks(
    dataset: Any,
    tokenizer: Any,
    max_length: int,
    *,
    packing: bool = False,
    separate: bool = True,
    whole_words: bool = True,
    show_progress: bool = False,
) -> Any:
    """Documents → blocks of at most `max_length` tokens, special ones included; every token is in exactly one block.

    A document longer than a block makes several, cut between words where it can be. A document that makes no token
    (nothing but control characters, say) has no block.

    Args:
        dataset: columns "row" and "text".
        tokenizer: a fast one.
        packing: documents are joined until a block is full; each piece of one has its own special tokens. (Of every
            2,000 documents the last block is shorter.)
        separate: with `packing`, a column "segments" tells the documents of a block apart.
        whole_words: see `units_of`.

    Returns:
        Columns "row" (the document's, of several the first's), "input_ids", "units", "length", "block" (the block's
        number, from 0), and "segments" (ascending from 0) where they are wanted.
    """
    prefix, suffix = affixes_of(tokenizer)
    room = max_length - len(prefix) - len(suffix)
    if room < 1:
        raise UserError(
            f"--max_length {max_length}: no room beside {len(prefix) + len(suffix)} special tokens; raise it"
        )

    def encode(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encoded = tokenizer(columns["text"], add_special_tokens=False, truncation=False, verbose=False)
        made: dict[str, list[Any]] = {name: [] for name in ("row", "input_ids", "units", "length")}
        segments: list[list[int]] = []
        for row, text, ids, encoding in zip(
            columns["row"], columns["text"], encoded["input_ids"], encoded.encodings, strict=True
        ):
            units, start = units_of(encoding, text, whole_words), 0
            while start < len(ids):
                used = made["length"][-1] if made["length"] else max_length
                free = max_length - used - len(prefix) - len(suffix)
                joins = packing and free > 0
                stop = cut_after(units, start, free if joins else room, anywhere=packing)
                piece = [*prefix, *ids[start:stop], *suffix]
                of_piece = [*[NO_UNIT] * len(prefix), *units[start:stop], *[NO_UNIT] * len(suffix)]
                if joins:
                    shift = max(made["units"][-1]) + 1
                    made["input_ids"][-1] += piece
                    made["units"][-1] += [unit + shift if unit != NO_UNIT else NO_UNIT for unit in of_piece]
                    segments[-1] += [segments[-1][-1] + 1] * len(piece)
                    made["length"][-1] += len(piece)
                else:
                    for name, value in zip(made, (row, piece, of_piece, len(piece)), strict=True):
                        made[name].append(value)
                    segments.append([0] * len(piece))
                start = stop
        return {**made, "segments": segments} if packing and separate else made

    def encode_all(path: str | None = None) -> Any:
        import datasets

        with progress_bars(show_progress and len(dataset) > ROWS_WITHOUT_PROGRESS):
            return dataset.map(
                encode,
                batched=True,
                batch_size=_PACKED_TOGETHER,
                remove_columns=dataset.column_names,
                desc="tokenizing",
                load_from_cache_file=False,
                keep_in_memory=path is None,
                cache_file_name=path,
                new_fingerprint=datasets.fingerprint.generate_random_fingerprint(),
            )

    blocks = None
    identity = digest_of_tokenizer(tokenizer) if len(dataset) > ROWS_IN_MEMORY else None
    if identity is not None:
        rows = np.asarray(dataset["row"], np.int64).tobytes()
        made_from = [FORMAT, identity, max_length, packing, separate, whole_words, digest_of_texts(dataset, ["text"])]
        blocks = made_once("blocks", [*made_from, hashlib.sha256(rows).hexdigest()], encode_all)
    if blocks is None:
        blocks = encode_all()
    return blocks.add_column("block", list(range(len(blocks))))


def cut_after(units: Sequence[int], start: int, room: int, anywhere: bool = False) -> int:
    """Where the piece of a document that begins at `start` ends: at most `room` tokens on.

    Not inside of a unit, unless it is longer than the room, or `anywhere` is as good.
    """
    stop = min(start + room, len(units))
    if anywhere or stop == len(units):
        return stop
    at = stop
    while at > start and units[at - 1] == units[at]:
        at -= 1
    return at if at > start else stop


def affixes_of(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    ids = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    first = next(i for i in range(len(ids)) if ids[i : i + len(bare)] == bare)
    return ids[:first], ids[first + len(bare) :]


def token_arrays(blocks: Any) -> Iterator[np.ndarray]:
    """The ids of all blocks, in order, some thousand blocks at a time, without becoming Python objects."""
    for table in blocks_of(blocks.select_columns(["input_ids"])):
        for chunk in table.column("input_ids").chunks:
            yield chunk.flatten().to_numpy()


def digest_of_blocks(blocks: Any) -> str:
    """Of the tokens and of where blocks end."""
    digest = hashlib.sha256(np.asarray(blocks["length"], np.int64).tobytes())
    for ids in token_arrays(blocks):
        digest.update(ids.astype(np.int64).tobytes())
    return digest.hexdigest()[:16]
