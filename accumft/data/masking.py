"""Masked language modelling (Devlin et al., arXiv 1810.04805): which tokens of a row are masked, and what they become.

Whole words (BERT's release of May 2019), and in scripts without blanks characters, as BERT's tokenizer has Chinese. The
masks of a row are a pure function of (seed, epoch, row): new ones in each epoch, and the same ones after a resume, on
any number of processes and in any cut.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from accumft.data.windows import Batch, Collate

IGNORED = -100
"""Label of a token that is not masked, as `torch.nn.CrossEntropyLoss` has it."""
NO_UNIT = -1
"""Unit of a token that is never masked: [CLS], [SEP]."""
MASKED, RANDOM = 0.8, 0.1
"""Shares of the chosen tokens that become the mask token, and any token; the others stay as they are."""

# Apart from the streams of the order of examples and of dropout.
_STREAM = 0x6D61736B
# Thai to Burmese, Khmer, kana, and Chinese: words that no blanks part.
_WITHOUT_BLANKS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


def units_of(encoding: Any, text: str, whole_words: bool = True) -> list[int]:
    """What is masked together: a number for each token of a text, ascending, NO_UNIT for special tokens.

    A word is what the pre-tokenizer of a fast tokenizer takes for one; of a word in a script without blanks, each
    token is a unit of its own, but the pieces of one character stay together.

    Args:
        encoding: of `tokenizers`, of the text.
        whole_words: False: each token is a unit.
    """
    words = [NO_UNIT if word is None else word for word in encoding.word_ids]
    if not whole_words:
        return [NO_UNIT if word == NO_UNIT else number for number, word in enumerate(words)]
    if not _WITHOUT_BLANKS.search(text):
        return words
    units, unit, before = [], -1, (NO_UNIT, -1)
    for word, (start, stop) in zip(words, encoding.offsets, strict=True):
        if word == NO_UNIT:
            units.append(NO_UNIT)
            continue
        alone = _WITHOUT_BLANKS.search(text, start, stop) is not None
        here = (word, start if alone else -1)
        unit += here != before
        before = here
        units.append(unit)
    return units


@dataclass(frozen=True, slots=True)
class Masking:
    """How rows are masked."""

    mask_token_id: int
    replacements: np.ndarray
    """(ids,) int64: what a random token may be."""
    probability: float
    """Share of a row's tokens that are predicted."""
    seed: int

    @classmethod
    def of(cls, tokenizer: Any, probability: float, seed: int) -> "Masking":
        """That of a tokenizer; random tokens are any but special ones."""
        special = np.array(sorted(tokenizer.all_special_ids))
        replacements = np.setdiff1d(np.arange(len(tokenizer)), special)
        return cls(tokenizer.mask_token_id, replacements, probability, seed)

    def apply(self, ids: np.ndarray, units: np.ndarray, epoch: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a row with masks, and its labels: the true id where it is to be predicted, else IGNORED.

        Units are taken in random order while they fit into `probability` of the row's tokens, rounded, and at least
        one; where none fits, the first is taken. Of the tokens taken, 8 in 10 become the mask token and 1 in 10 any.

        Args:
            ids, units: (tokens,) int64.
        """
        labels = np.full_like(ids, IGNORED)
        places = np.flatnonzero(units != NO_UNIT)
        if not len(places):
            return ids, labels
        _, unit, size = np.unique(units[places], return_inverse=True, return_counts=True)
        wanted = max(1, int(self.probability * len(places) + 0.5))
        # NumPy guarantees the raw stream of a bit generator between versions, not what `Generator` makes of it.
        raw = np.random.PCG64([self.seed % 2**64, _STREAM, epoch, row]).random_raw(len(size) + 2 * len(places))
        order = np.argsort(raw[: len(size)], kind="stable")
        taken, tokens = np.zeros(len(size), bool), 0
        for number in order.tolist():
            if tokens + size[number] <= wanted:
                taken[number] = True
                tokens += int(size[number])
                if tokens == wanted:
                    break
        if not tokens:
            taken[order[0]] = True
        chosen = taken[unit]
        labels[places[chosen]] = ids[places[chosen]]
        share = (raw[len(size) : len(size) + len(places)][chosen] >> np.uint64(11)) * 2.0**-53
        draws = raw[len(size) + len(places) :][chosen] % np.uint64(len(self.replacements))
        new = np.where(share < MASKED + RANDOM, self.replacements[draws.astype(np.int64)], ids[places[chosen]])
        masked = ids.copy()
        masked[places[chosen]] = np.where(share < MASKED, self.mask_token_id, new)
        return masked, labels


@dataclass(frozen=True, slots=True)
class MaskingCollator:
    """Columns of blocks (`accumft.data.raw_text.to_blocks`) → a batch with masks, and "targets" of each token.

    Targets are (rows, tokens), or (1, tokens) of packed rows, int64. A batch whose blocks hold several documents that
    must not see each other has also "segments", the number of each token's document in its row, and "position_ids".
    """

    collate: Collate
    """Makes the batch of masked ids, padded (`TextCollator`) or packed (`PackedCollator`)."""
    masking: Masking
    token_types: bool = False
    """Whether the model takes "token_type_ids", which are all 0."""
    first_position: int = 0
    """Position id of a document's first token."""
    epoch: int = 0

    def in_epoch(self, epoch: int) -> "MaskingCollator":
        """The one of another epoch; `WindowDataset` asks for it."""
        return replace(self, epoch=epoch)

    def __call__(self, columns: dict[str, list[Any]], *sizes: Sequence[int]) -> Batch:
        """
        Args:
            sizes: of a packed batch, the rows of each rectangle.
        """
        rows = [
            self.masking.apply(np.asarray(ids), np.asarray(units), self.epoch, block)
            for ids, units, block in zip(columns["input_ids"], columns["units"], columns["block"], strict=True)
        ]
        inputs: dict[str, list[Any]] = {"input_ids": [ids.tolist() for ids, _ in rows]}
        if self.token_types:
            inputs["token_type_ids"] = [[0] * len(ids) for ids, _ in rows]
        batch = dict(self.collate(inputs, *sizes))
        real = batch["attention_mask"].bool()
        targets = torch.full(real.shape, IGNORED)
        targets[real] = torch.from_numpy(np.concatenate([labels for _, labels in rows]))
        batch["targets"] = targets
        if "segments" in columns:
            segments, positions = torch.full(real.shape, -1), torch.zeros(real.shape, dtype=torch.int64)
            segments[real] = torch.tensor([segment for row in columns["segments"] for segment in row])
            places = [places_in_segments(row) + self.first_position for row in columns["segments"]]
            positions[real] = torch.from_numpy(np.concatenate(places))
            batch["segments"], batch["position_ids"] = segments, positions
        return batch


def places_in_segments(segments: Sequence[int]) -> np.ndarray:
    """(tokens,) int64: the place of each token in its segment, from 0; segments are ascending numbers."""
    values = np.asarray(segments)
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return np.arange(len(values)) - np.repeat(starts, np.diff(starts, append=len(values)))
