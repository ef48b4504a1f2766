"""Sentences → windows of pieces: every word counts once, at the right piece, and is there again afterwards."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_cases import LABELS, random_sentences, sentence, tiny_tokenizer

from accumft.data.tokens import (
    IGNORED,
    Part,
    TokenCollator,
    check_tokenizer,
    parts_of,
    sentences_again,
    tokenize_sentences,
)
from accumft.errors import UserError


@given(
    st.lists(st.tuples(st.integers(0, 15), st.sampled_from(["a", "b.", "c,"])), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(0, 30),
)
def test_parts_own_every_word_once(words: list[tuple[int, str]], room: int, stride: int) -> None:
    pieces, texts = [number for number, _ in words], [text for _, text in words]
    parts = parts_of(texts, pieces, room, stride)
    assert parts[0].own == 0 and parts[-1].own_stop == len(words)
    for part in parts:
        assert part.start <= part.own <= part.own_stop <= part.stop
        assert sum(pieces[part.start : part.stop]) <= room or part.stop - part.start == 1
    for before, after in pairwise(parts):
        assert before.own_stop == after.own
        assert before.start < after.start <= before.stop < after.stop
        assert sum(pieces[after.start : before.stop]) <= min(stride, room // 2)


def test_a_sentence_that_fits_is_one_window() -> None:
    assert parts_of(["a"] * 9, [1] * 9, 9, 4) == [Part(0, 9, 0, 9)]
    assert parts_of(["a"] * 10, [1] * 10, 9, 4) == [Part(0, 9, 0, 7), Part(5, 10, 7, 10)]


def test_words_change_hands_at_a_safe_place() -> None:
    # The windows share words 12 to 19; the middle half of them is 14 to 18.
    words = ["a"] * 30
    assert parts_of(words, [1] * 30, 20, 8)[1] == Part(12, 30, 16, 30)
    words[16] = ","
    assert parts_of(words, [1] * 30, 20, 8)[1].own == 17
    words[13] = "。"
    assert parts_of(words, [1] * 30, 20, 8)[1].own == 14
    words[12] = "."  # too near the edge: the word after it would see one word before it
    words[13] = "a"
    assert parts_of(words, [1] * 30, 20, 8)[1].own == 17


def test_only_the_first_piece_counts() -> None:
    one = sentence(["abc", "d", "ef"], ["B-a", "I-a", "O"])
    tokens = tokenize_sentences([one], tiny_tokenizer(), LABELS, 16, 4)
    (row,) = tokens.windows
    x = IGNORED
    assert row["labels"] == [x, 1, x, x, 2, 0, x, x]
    assert row["word"] == [-1, 0, -1, -1, 1, 2, -1, -1]
    assert (row["length"], row["row"], tokens.words) == (8, 1, 3)
    (row,) = tokenize_sentences([one], tiny_tokenizer(), LABELS, 16, 4, label_all_tokens=True).windows
    assert row["labels"] == [x, 1, 2, 2, 2, 0, 0, x], "after the first piece of B-X comes I-X"
    assert row["word"] == [-1, 0, -1, -1, 1, 2, -1, -1]


@pytest.mark.parametrize("max_length", [6, 8, 12, 64])
@pytest.mark.parametrize("stride", [0, 3, 64])
def test_windows_put_together_are_the_sentences(max_length: int, stride: int) -> None:
    sentences = random_sentences(60)
    tokens = tokenize_sentences(sentences, tiny_tokenizer(), LABELS, max_length, stride)
    assert tokens.words == sum(len(s.words) for s in sentences)
    found: dict[int, str] = {}
    for row in tokens.windows:
        assert row["length"] == len(row["input_ids"]) <= max_length
        for label, word in zip(row["labels"], row["word"], strict=True):
            assert (label == IGNORED) == (word == -1)
            if word >= 0:
                assert word not in found, "labelled in one window alone"
                found[word] = LABELS[label]
    assert sorted(found) == list(range(tokens.words))
    again = sentences_again([found[word] for word in range(tokens.words)], sentences)
    assert again == [list(s.tags) for s in sentences]
    assert (tokens.split_sentences > 0) == (max_length < 40)


def test_neighbouring_windows_share_their_words() -> None:
    one = sentence(["a"] * 20, ["O"] * 20)
    tokens = tokenize_sentences([one], tiny_tokenizer(), LABELS, 12, 4)
    assert [row["length"] for row in tokens.windows] == [12, 12, 10]
    assert [sum(word >= 0 for word in row["word"]) for row in tokens.windows] == [8, 6, 6]


def test_words_that_are_too_long_or_nothing_are_counted() -> None:
    sentences = [sentence(["abcdefghijk", "\u0007", "b"], ["B-a", "I-a", "O"]), sentence(["\u0007"], ["O"])]
    tokens = tokenize_sentences(sentences, tiny_tokenizer(), LABELS, 8, 4)
    assert (tokens.words, tokens.cut_words, tokens.lost_words) == (4, 1, 2)
    words = [word for row in tokens.windows for word in row["word"] if word >= 0]
    assert words == [0, 2]


def test_windows_in_which_nothing_counts_are_left_out() -> None:
    unknown = sentence(["\u200d"], ["O"])
    known = sentence(["abc"], ["B-a"])
    tokens = tokenize_sentences([unknown, known, unknown], tiny_tokenizer(), LABELS, 16, 4)
    assert (len(tokens.windows), tokens.words, tokens.lost_words) == (1, 3, 2)
    assert [word for word in tokens.windows["word"][0] if word >= 0] == [1], "words are counted on"


def test_collator_pads_labels_with_what_counts_nothing() -> None:
    tokens = tokenize_sentences([sentence("ab c", "B-a O"), sentence("d", "B-b")], tiny_tokenizer(), LABELS, 16, 4)
    batch = TokenCollator(tiny_tokenizer(), 4)(tokens.windows[:])
    x = IGNORED
    assert batch["labels"].tolist() == [[x, 1, x, 0, x, x, x, x], [x, 3, x, x, x, x, x, x]]
    assert batch["attention_mask"].sum(dim=1).tolist() == [5, 3]
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}


def test_a_slow_tokenizer_is_refused_in_one_line() -> None:
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(UserError, match=r"^--model_name_or_path x: SlowTokenizer is a slow .*tokenizer\.json$"):
        check_tokenizer(SlowTokenizer(), "x")
    check_tokenizer(tiny_tokenizer(), "x")
