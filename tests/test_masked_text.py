"""Documents from files, and their blocks: nothing is lost, nothing comes twice."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_cases import WORDS, blocks_of, tiny_bert
from masked_lm import MaskedLmRecipe

from accumft.data.blocks import affixes_of, cut_after, digest_of_blocks, to_blocks, token_arrays
from accumft.data.masking import NO_UNIT
from accumft.data.raw_text import documents_of, load_corpus
from accumft.errors import UserError


@pytest.mark.parametrize(
    ("text", "line_by_line", "expected"),
    [
        ("a\nb\n\nc\n", False, ["a\nb", "c"]),
        ("\n \na\r\nb\r\n\t\r\n\r\nc", False, ["a\nb", "c"]),
        ("a\nb\n\nc\n", True, ["a", "b", "c"]),
        ("  a  b\n", True, ["  a  b"]),
        ("", False, []),
    ],
)
def test_documents(text: str, line_by_line: bool, expected: list[str]) -> None:
    assert list(documents_of(text.splitlines(keepends=True), line_by_line)) == expected


def recipe(**fields: Any) -> MaskedLmRecipe:
    return MaskedLmRecipe(**fields)


def test_text_and_tables_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes("\ufeffone, two\r\nthree\r\n\r\nfour\r\n".encode())
    (tmp_path / "dev.csv").write_text('note,x\n"five\nsix",1\nseven,2\n')
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"note": text}) + "\n" for text in ("eight", "nine")))
    files = {
        f"{split}_file": str(tmp_path / name)
        for split, name in (("train", "train.txt"), ("validation", "dev.csv"), ("test", "test.jsonl"))
    }
    corpus = load_corpus(recipe(text_column="note", **files))
    assert {split: found["text"][:] for split, found in corpus.splits.items()} == {
        "train": ["one, two\nthree", "four"],
        "validation": ["five\nsix", "seven"],
        "test": ["eight", "nine"],
    }
    assert corpus.splits["validation"]["row"][:] == [1, 2]
    turned = {"train_file": files["validation_file"], "validation_file": files["train_file"]}
    corpus = load_corpus(recipe(text_column="note", **turned))
    assert corpus.splits["validation"]["text"][:] == ["one, two\nthree", "four"]


def test_held_out_and_drawn(tmp_path: Path) -> None:
    texts = [f"note {i // 2}" for i in range(60)]  # each twice
    (tmp_path / "notes.txt").write_text("\n".join(texts))
    fields = {"train_file": str(tmp_path / "notes.txt"), "line_by_line": True}
    corpus = load_corpus(recipe(**fields))
    train, held_out = (set(corpus.splits[split]["text"]) for split in ("train", "validation"))
    assert (len(train), len(held_out), train & held_out) == (27, 3, set())
    assert any("6 of 60 documents are held out" in note for note in corpus.notes)
    some = load_corpus(recipe(**fields, max_train_samples=10, validation_split=0.0))
    assert [len(split) for split in some.splits.values()] == [10]
    for row, text in zip(some.splits["train"]["row"], some.splits["train"]["text"], strict=True):
        assert text == texts[row - 1]
    one = load_corpus(recipe(train_file=fields["train_file"]))
    assert [len(split) for split in one.splits.values()] == [1]
    assert "--line_by_line if each line is one" in one.notes[0]


MISTAKES = [
    ({"train_file": "absent.txt"}, "no such file"),
    ({"train_file": "blank.txt"}, "nothing but blank lines"),
    ({"train_file": "gb.txt"}, r"gb.txt, line 2: not in the encoding utf-8 .*gb18030"),
    ({"train_file": "table.csv"}, r"no column 'text' \(--text_column\).*'note'"),
    ({"train_file": "table.csv", "text_column": "note"}, r"an empty text in 'note': row 2; .*--on_bad_row skip"),
    ({"train_file": "good.txt", "validation_file": "good.txt", "validation_split": 0.1}, "validation data already"),
    ({"train_file": "good.txt", "validation_split": 0.1}, "of the 2 documents of .* that is none"),
    ({"train_file": "good.txt", "dataset_name": "x"}, "both given"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("blank.txt").write_text("\n \n")
    Path("gb.txt").write_bytes("note\n发热三天,咳嗽".encode("gb18030"))
    Path("table.csv").write_text("note,x\na,1\n,2\nb,3\n")
    Path("good.txt").write_text("one\n\ntwo\n")
    with pytest.raises(UserError, match=message):
        load_corpus(recipe(**fields))
    skipped = load_corpus(recipe(train_file="table.csv", text_column="note", on_bad_row="skip", validation_split=0.0))
    assert skipped.splits["train"]["row"][:] == [1, 3]


BERT = tiny_bert()[1]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=30), min_size=1, max_size=12),
    st.integers(3, 40),
    st.sampled_from([(False, True), (True, True), (True, False)]),
)
def test_every_token_is_in_exactly_one_block(
    documents: list[list[str]], max_length: int, mode: tuple[bool, bool]
) -> None:
    from datasets import Dataset

    packing, separate = mode
    texts = [" ".join(words) for words in documents]
    dataset = Dataset.from_dict({"row": list(range(1, len(texts) + 1)), "text": texts})
    if not any(texts):
        return
    blocks = to_blocks(dataset, BERT, max_length, packing=packing, separate=separate)
    expected = [i for text in texts for i in BERT(text, add_special_tokens=False)["input_ids"]]
    found = [i for row in blocks["input_ids"] for i in row]
    assert [i for i in found if i not in (BERT.cls_token_id, BERT.sep_token_id)] == expected
    assert blocks["block"][:] == list(range(len(blocks)))
    assert blocks["length"][:] == [len(row) for row in blocks["input_ids"]] == [len(row) for row in blocks["units"]]
    assert max(blocks["length"]) <= max_length
    assert ("segments" in blocks.column_names) == (packing and separate)
    for ids, units in zip(blocks["input_ids"], blocks["units"], strict=True):
        special = [i in (BERT.cls_token_id, BERT.sep_token_id) for i in ids]
        assert special == [unit == NO_UNIT for unit in units]
        assert ids[0] == BERT.cls_token_id and ids[-1] == BERT.sep_token_id
    if packing:  # full but for the last: less than what a piece needs is left
        assert all(length > max_length - 3 for length in blocks["length"][:-1])
    for row in blocks["segments"] if packing and separate else []:
        assert sorted(set(row)) == list(range(max(row) + 1)) and row == sorted(row)


def test_documents_are_cut_between_words() -> None:
    assert [cut_after([0, 0, 1, 1, 1, 2], start, 4) for start in (0, 2, 5)] == [2, 6, 6]
    assert cut_after([0, 0, 0, 0, 0], 0, 3) == 3, "a word longer than a block"
    assert cut_after([0, 0, 1, 1, 1], 0, 4, anywhere=True) == 4
    blocks = blocks_of(BERT, 30, 14)
    assert len(blocks) > 30
    by_row: dict[int, list[list[int]]] = {}
    for row, units in zip(blocks["row"], blocks["units"], strict=True):
        by_row.setdefault(row, []).append([unit for unit in units if unit != NO_UNIT])
    for pieces in by_row.values():
        assert all(before[-1] < after[0] for before, after in pairwise(pieces))


def test_no_room_beside_the_special_tokens() -> None:
    with pytest.raises(UserError, match="--max_length 2: no room beside 2 special tokens"):
        blocks_of(BERT, 3, 2)


def test_affixes_arrays_and_digest() -> None:
    assert affixes_of(BERT) == ([BERT.cls_token_id], [BERT.sep_token_id])
    blocks = blocks_of(BERT, 9)
    assert np.concatenate(list(token_arrays(blocks))).tolist() == [i for row in blocks["input_ids"] for i in row]
    assert digest_of_blocks(blocks) == digest_of_blocks(blocks_of(BERT, 9)) != digest_of_blocks(blocks_of(BERT, 8))
    assert digest_of_blocks(blocks_of(BERT, 9, 14)) != digest_of_blocks(blocks_of(BERT, 9, 20))


def test_blocks_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accumft.data.blocks as module

    in_memory = blocks_of(BERT, 12)
    monkeypatch.setenv("ACCUMFT_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "ROWS_IN_MEMORY", 10)
    first, again = blocks_of(BERT, 12), blocks_of(BERT, 12)
    assert len(list(tmp_path.glob("blocks-*.arrow"))) == 1
    assert first[:] == again[:] == in_memory[:]
    blocks_of(BERT, 12, 20)
    assert len(list(tmp_path.glob("blocks-*.arrow"))) == 2
