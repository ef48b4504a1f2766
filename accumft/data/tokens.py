"""Sentences with tags → windows of word pieces with labels → padded batches, and tags of whole sentences again.

A sentence that fits into the model is one window. A longer one becomes several, which share pieces at their ends; each
word is labelled in one of them alone, the one that shows more of its surroundings, and is context in the others. So
every word counts once, in training as in evaluation, and the tags of a sentence are those of its windows put together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from accumft.data.files import to_dataset
from accumft.data.tags import OUTSIDE, Sentence
from accumft.data.text import TextCollator
from accumft.data.windows import Batch
from accumft.errors import UserError

IGNORED = -100
"""Label of a piece that counts nothing."""

_SENTENCE_END, _PART_END = frozenset(".!?;。！？；"), frozenset(",:，、：")
_AT_ONCE = 1_000


class Part(NamedTuple):
    """A window of a sentence, in words."""

    start: int
    stop: int
    """Behind its last word."""
    own: int
    """The first word that is labelled here; those before it are of the window before."""
    own_stop: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """The windows of a split."""

    windows: Any
    """A `datasets.Dataset`: input_ids and what else the tokenizer makes, labels (IGNORED where a piece does not count),
    word (of a word's first piece its number in the split, where it is labelled; else -1), length, row."""
    words: int
    """Words of the split."""
    split_sentences: int
    """Sentences that make more than one window."""
    cut_words: int
    """Words of more pieces than the model has room for, whose ends are left out."""
    lost_words: int
    """Words of which the tokenizer makes nothing, such as a control character: they are predicted as O."""


def parts_of(words: Sequence[str], pieces: Sequence[int], room: int, stride: int) -> list[Part]:
    """Where to split a sentence.

    Neighbouring windows share up to `stride` pieces, at least a word where two fit in. In the middle half of what they
    share, the words change hands at the end of a sentence if there is one, else of a part, else as near to the middle
    as can be.

    Args:
        pieces: of each word.
        room: pieces of a window. A word that is longer has a window of its own.
        stride: at most half of `room` counts.
    """
    ends = np.concatenate([[0], np.cumsum(pieces)])  # pieces before each word
    if ends[-1] <= room:
        return [Part(0, len(words), 0, len(words))]
    stride = min(stride, room // 2)
    bounds, start, stop = [], 0, 0
    while stop < len(words):
        stop = max(start + 1, int(np.searchsorted(ends, ends[start] + room, side="right")) - 1)
        bounds.append((start, stop))
        if stop < len(words):
            # What is shared must leave room for the next word.
            least = max(ends[stop] - stride, ends[stop + 1] - room)
            start = max(start + 1, min(int(np.searchsorted(ends, least, side="left")), stop))
    own = [0]
    for (_, stop), (start, _) in pairwise(bounds):
        own.append(max(own[-1], _handover(words, ends, start, stop)))
    return [Part(*bound, a, b) for bound, a, b in zip(bounds, own, [*own[1:], len(words)], strict=True)]


def _handover(words: Sequence[str], ends: np.ndarray, start: int, stop: int) -> int:
    """The first word of the later window, among the shared words `start` to `stop`."""
    middle, quarter = (ends[start] + ends[stop]) / 2, (ends[stop] - ends[start]) / 4
    distance = {word: abs(float(ends[word] - middle)) for word in range(start, stop + 1)}
    near = [word for word in distance if distance[word] <= quarter] or [min(distance, key=lambda word: distance[word])]

    def unsafe(word: int) -> int:
        last = words[word - 1][-1:]
        return 0 if last in _SENTENCE_END else 1 if last in _PART_END else 2

    return min(near, key=lambda word: (unsafe(word), distance[word], word))


def tokenize_sentences(
    sentences: Sequence[Sentence],
    tokenizer: Any,
    labels: Sequence[str],
    max_length: int,
    stride: int,
    label_all_tokens: bool = False,
) -> Tokens:
    """The windows of a split.

    Args:
        tokenizer: a fast one, see `check_tokenizer`.
        labels: the tags by id.
        max_length: pieces of a window, special tokens included.
        stride: pieces that neighbouring windows share; at most half of a window counts.
        label_all_tokens: every piece of a word is labelled (after the first of B-X with I-X); else the first alone.
    """
    ids = {name: index for index, name in enumerate(labels)}
    special = tokenizer.num_special_tokens_to_add()
    columns: dict[str, list[Any]] = {name: [] for name in ("labels", "word", "length", "row")}
    first_word = split_sentences = cut_words = lost_words = 0
    for begin in range(0, len(sentences), _AT_ONCE):
        some = sentences[begin : begin + _AT_ONCE]
        counts = [_pieces(encoding, len(s.words)) for s, encoding in zip(some, _encode(tokenizer, some), strict=True)]
        places, texts = [], []
        for sentence, pieces in zip(some, counts, strict=True):
            parts = parts_of(sentence.words, pieces, max_length - special, stride)
            split_sentences += len(parts) > 1
            cut_words += sum(number > max_length - special for number in pieces)
            lost_words += sum(number == 0 for number in pieces)
            places += [(sentence, part, first_word) for part in parts]
            texts += [sentence.words[part.start : part.stop] for part in parts]
            first_word += len(sentence.words)
        encoded = tokenizer(
            [list(words) for words in texts],
            is_split_into_words=True,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            verbose=False,
        )
        for name, values in encoded.items():
            columns.setdefault(name, []).extend(values)
        for (sentence, part, offset), encoding in zip(places, encoded.encodings, strict=True):
            own_labels, word = _align(sentence.tags, part, encoding.word_ids, ids, offset, label_all_tokens)
            columns["labels"].append(own_labels)
            columns["word"].append(word)
            columns["length"].append(len(encoding.ids))
            columns["row"].append(sentence.row)
    # A window in which nothing counts, such as one of signs that the tokenizer does not know, teaches nothing, and
    # alone it would make an effective batch without items.
    labelled = [number for number, own in enumerate(columns["labels"]) if any(label != IGNORED for label in own)]
    if 0 < len(labelled) < len(columns["labels"]):
        columns = {name: [values[number] for number in labelled] for name, values in columns.items()}
    return Tokens(_table(columns), first_word, split_sentences, cut_words, lost_words)


def _encode(tokenizer: Any, sentences: Sequence[Sentence]) -> Any:
    words = [list(sentence.words) for sentence in sentences]
    return tokenizer(words, is_split_into_words=True, add_special_tokens=False, verbose=False).encodings


def _pieces(encoding: Any, words: int) -> list[int]:
    numbers = np.array([number for number in encoding.word_ids if number is not None], np.int64)
    return np.bincount(numbers, minlength=words).tolist()


def _align(
    tags: Sequence[str],
    part: Part,
    word_ids: Sequence[int | None],
    ids: dict[str, int],
    offset: int,
    label_all_tokens: bool,
) -> tuple[list[int], list[int]]:
    """Of each piece of a window: its label, and the number of the word that it begins."""
    labels, words, before = [], [], None
    for number in word_ids:
        label, word = IGNORED, -1
        if number is not None and part.own <= (place := part.start + number) < part.own_stop:
            tag = tags[place]
            if number != before:
                label, word = ids[tag], offset + place
            elif label_all_tokens:
                label = ids[tag if tag == OUTSIDE else f"I-{tag[2:]}"]
        labels.append(label)
        words.append(word)
        before = number
    return labels, words


def _table(columns: dict[str, list[Any]]) -> Any:
    import pyarrow as pa

    return to_dataset(pa.table(columns))


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Raises a `UserError` unless the tokenizer says which piece comes from which word."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"--model_name_or_path {name}: {type(tokenizer).__name__} is a slow tokenizer, which does not say from "
            "which word a piece comes; give a model with a tokenizer.json"
        )


class TokenCollator:
    """Columns of windows → a batch padded to its longest: (rows, tokens) int64 each, labels with IGNORED."""

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None = None) -> None:
        self.inputs = TextCollator(tokenizer, pad_to_multiple_of)

    def __call__(self, columns: dict[str, list[Any]]) -> Batch:
        batch = dict(self.inputs({name: values for name, values in columns.items() if name != "labels"}))
        if "labels" in columns:
            batch["labels"] = padded_labels(columns["labels"], batch["input_ids"].shape[1])
        return batch


def padded_labels(labels: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """(rows, width) int64, with IGNORED on the right."""
    padded = np.full((len(labels), width), IGNORED, np.int64)
    for row, own in zip(padded, labels, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(padded)


def sentences_again(tags: Sequence[str], sentences: Sequence[Sentence]) -> list[list[str]]:
    """The tags of all words of a split, sentence by sentence."""
    ends = np.cumsum([len(sentence.words) for sentence in sentences]).tolist()
    return [list(tags[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]
