"""Which tokens are masked: whole words, characters of Chinese, the shares, and nothing but seed, epoch and row."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_cases import blocks_of, collator, tiny_bert

from accumft.data.masking import IGNORED, NO_UNIT, Masking, places_in_segments, units_of
from accumft.packing import PackedCollator

REPLACEMENTS = np.arange(10, 100)


def masking(probability: float = 0.15, seed: int = 42) -> Masking:
    return Masking(4, REPLACEMENTS, probability, seed)


def row_of(words: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(ids, units) of [CLS], words of so many pieces, [SEP]."""
    units = [NO_UNIT, *np.repeat(np.arange(len(words)), words).tolist(), NO_UNIT]
    return np.array([2, *(10 + i % 90 for i in range(sum(words))), 3]), np.array(units)


def test_the_masks_of_a_row_are_these_on_every_machine() -> None:
    ids, units = row_of([1, 2, 1, 3, 1, 1, 2, 1])
    masked, targets = masking(0.4).apply(ids, units, epoch=1, row=7)
    assert np.flatnonzero(targets != IGNORED).tolist() == [1, 4, 9, 10, 11]
    assert masked.tolist() == [2, 4, 11, 12, 13, 14, 15, 16, 17, 18, 4, 4, 21, 3]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=40),
    st.floats(0.01, 0.99),
    st.integers(0, 2**40),
    st.integers(0, 50),
    st.integers(0, 10**7),
)
def test_every_row(words: list[int], probability: float, seed: int, epoch: int, row: int) -> None:
    ids, units = row_of(words)
    masked, targets = masking(probability, seed).apply(ids, units, epoch, row)
    again = masking(probability, seed).apply(ids.copy(), units, epoch, row)
    assert np.array_equal(masked, again[0]) and np.array_equal(targets, again[1])
    chosen = targets != IGNORED
    assert np.array_equal(targets[chosen], ids[chosen]), "the true ids"
    assert np.array_equal(masked[~chosen], ids[~chosen]), "the others stay"
    assert not chosen[units == NO_UNIT].any()
    for unit in range(len(words)):
        assert len(set(chosen[units == unit])) == 1, "a word is masked whole"
    wanted = max(1, int(probability * sum(words) + 0.5))
    assert 1 <= chosen.sum() <= max(wanted, max(words))
    # Nothing that would still fit is left out.
    left = [size for unit, size in enumerate(words) if not chosen[units == unit].any()]
    assert not left or chosen.sum() >= wanted or min(left) > wanted - chosen.sum()


def test_shares_and_that_all_differs_from_row_to_row_and_epoch_to_epoch() -> None:
    ids, units = row_of([1] * 100)
    rows = [masking().apply(ids, units, epoch, row) for epoch in range(4) for row in range(200)]
    chosen = np.array([targets != IGNORED for _, targets in rows])
    assert (chosen.sum(axis=1) == 15).all()
    assert len({tuple(row) for row in chosen}) == 800
    assert np.abs(chosen[:, 1:-1].mean(axis=0) - 0.15).max() < 0.06, "each place alike"
    ids_then = np.array([masked for masked, _ in rows])[chosen]
    ids_before = np.tile(ids, (800, 1))[chosen]
    is_mask, same = ids_then == 4, ids_then == ids_before
    other = ids_then[~is_mask & ~same]
    assert is_mask.mean() == pytest.approx(0.8, abs=0.012)
    assert same.mean() == pytest.approx(0.1 + 0.1 / 90, abs=0.01)
    assert set(other.tolist()) == set(REPLACEMENTS.tolist())


def test_a_row_without_words_has_nothing_to_predict() -> None:
    ids = np.array([2, 3])
    masked, targets = masking().apply(ids, np.array([NO_UNIT, NO_UNIT]), 0, 0)
    assert masked.tolist() == [2, 3] and targets.tolist() == [IGNORED] * 2


def encode(tokenizer: Any, text: str) -> tuple[list[str], Any]:
    encoding = tokenizer(text, add_special_tokens=True).encodings[0]
    return encoding.tokens, encoding


def test_units_of_bert() -> None:
    _, tokenizer = tiny_bert()
    tokens, encoding = encode(tokenizer, "severe fever, 发热三天")
    units = units_of(encoding, "severe fever, 发热三天")
    grouped = [[token for token, of in zip(tokens, units, strict=True) if of == unit] for unit in range(max(units) + 1)]
    assert grouped == [["s", "##e", "##v", "##e", "##r", "##e"], ["fever"], ["[UNK]"], ["发"], ["热"], ["三"], ["天"]]
    assert [units[0], units[-1]] == [NO_UNIT, NO_UNIT]
    assert units_of(encoding, "severe fever, 发热三天", whole_words=False)[1:-1] == list(range(1, len(units) - 1))


def test_units_of_sentence_pieces_in_chinese_are_tokens() -> None:
    """Metaspace takes a Chinese sentence for one word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁fe", -3.0), ("ver", -3.0), ("发热", -3.0), ("三", -4.0), ("天", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    text = "fever 发热三天"
    encoding = tokenizer.encode(text)
    assert encoding.tokens == ["▁fe", "ver", "▁", "发热", "三", "天"]
    assert encoding.word_ids == [0, 0, 1, 1, 1, 1]
    units = units_of(encoding, text)
    assert units[0] == units[1] and len(set(units[3:])) == 3 and units == sorted(units)


def test_units_of_bytes_keep_the_bytes_of_a_character_together() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding = tokenizer.encode("ab 发热")
    assert len(encoding.tokens) == 9
    assert units_of(encoding, "ab 发热") == [0, 0, 1, 2, 2, 2, 3, 3, 3]


def test_collator_puts_targets_where_the_tokens_are() -> None:
    _, tokenizer = tiny_bert()
    blocks = blocks_of(tokenizer, 5)
    collate = collator(tokenizer)
    padded = collate(blocks[:])
    packed = type(collate)(PackedCollator(tokenizer), collate.masking, token_types=True)(blocks[:], [2, 3])
    assert packed["targets"].shape == packed["input_ids"].shape == packed["token_type_ids"].shape
    assert set(padded) == {"input_ids", "token_type_ids", "attention_mask", "targets"}
    for batch in (padded, packed):
        real = batch["attention_mask"].bool()
        assert int(real.sum()) == sum(blocks["length"])
        true = torch.where(batch["targets"] == IGNORED, batch["input_ids"], batch["targets"])[real]
        assert true.tolist() == [token for row in blocks["input_ids"] for token in row]
        assert (batch["targets"][~real] == IGNORED).all()
    assert padded["targets"][padded["targets"] != IGNORED].equal(packed["targets"][packed["targets"] != IGNORED])
    later = collate.in_epoch(1)(blocks[:])
    assert not later["targets"].equal(padded["targets"])
    assert collate(blocks[3:4])["targets"][0].tolist() == padded["targets"][3][: blocks["length"][3]].tolist()


def test_places_in_segments() -> None:
    assert places_in_segments([0, 0, 0, 1, 2, 2]).tolist() == [0, 1, 2, 0, 0, 1]
    assert places_in_segments([0]).tolist() == [0]
