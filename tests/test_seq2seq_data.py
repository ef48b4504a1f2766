"""Pairs of texts: read, refused, held out, tokenised with what is lost in numbers; and the synthetic conversations."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from seq2seq import Seq2SeqRecipe

from accumft.data.splits import read_splits
from accumft.data.target_tokens import PairCollator, tokenize_pairs
from accumft.data.targets import TargetData, load_targets
from accumft.errors import UserError
from accumft.synthetic.dialogues import generate_dialogues, is_held_out, load_dialogues, write_dialogue
from accumft.tasks.seq2seq_models import build_small_t5, side_limits, train_pieces

DATA = Path(__file__).resolve().parents[2] / "shared/data/mts-dialog"


def recipe_of(path: Path, rows: list[list[str]], **fields: Any) -> Seq2SeqRecipe:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["said", "note"], *rows])
    return Seq2SeqRecipe(train_file=str(path), source_column="said", target_column="note", **fields)


def load(recipe: Seq2SeqRecipe) -> TargetData:
    return load_targets(read_splits(recipe), recipe)


def numbered(n: int) -> list[list[str]]:
    return [[f"patient {i} has a cough", f"Cough in {i}."] for i in range(n)]


def test_rows_and_their_numbers(tmp_path: Path) -> None:
    rows = [["one\ntwo", "a"], ["", "b"], ["three", "  "], ["四", "丁"]]
    recipe = recipe_of(tmp_path / "a.csv", rows, on_bad_row="skip", validation_split=0.0)
    data = load(recipe)
    assert data.splits["train"][:] == {"row": [1, 4], "source": ["one\ntwo", "四"], "target": ["a", "丁"]}
    (note,) = data.notes
    assert "2 of 4 rows are skipped" in note and "'said' (--source_column): row 2" in note and "row 3" in note
    with pytest.raises(UserError, match=r"a\.csv: an empty text in 'said' .* row 2; .* row 3; .*--on_bad_row skip"):
        load(replace(recipe, on_bad_row="error"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source_column": "sayd"}, r"no column 'sayd' \(--source_column\); its columns: 'said', 'note'"),
        ({"target_column": "said"}, "--target_column said: is the --source_column too"),
        ({"target_column": "n"}, r"holds values of type int64, not texts"),
        ({"validation_split": 0.01}, "of the 20 rows of .* that is none"),
    ],
)
def test_mistakes_name_the_flag(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    recipe = recipe_of(tmp_path / "a.csv", numbered(20))
    lines = [f'{{"said": "{a}", "note": "{b}", "n": {i}}}' for i, (a, b) in enumerate(numbered(20))]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=message):
        load(replace(recipe, train_file=str(tmp_path / "a.jsonl"), **fields))


def test_rows_of_one_source_are_held_out_together(tmp_path: Path) -> None:
    rows = [[f"patient {i // 2}" + " " * (i % 2), f"note {i}"] for i in range(80)]
    data = load(recipe_of(tmp_path / "a.csv", rows, validation_split=0.25, max_eval_samples=10))
    train, held_out = ([text.strip() for text in data.splits[name]["source"]] for name in ("train", "validation"))
    assert (len(train), len(held_out)) == (60, 10)
    assert not set(train) & set(held_out)
    assert any("20 of 80 rows are held out" in note for note in data.notes)
    assert any("validation: 10 of 20 rows are drawn" in note for note in data.notes)


def test_truncation_of_each_side_is_counted(tmp_path: Path) -> None:
    texts = [["a b c d e f", "x y"], ["a b", "x y z x y z"]]
    data = load(recipe_of(tmp_path / "a.csv", texts, validation_split=0.0))
    _, tokenizer = build_small_t5(train_pieces(text for row in texts * 2 for text in row))
    tokens = tokenize_pairs(data.splits["train"], tokenizer, "b ", 5, 4)
    end = tokenizer.eos_token_id
    assert [len(row) for row in tokens["input_ids"]] == [5, 4]
    assert [len(row) for row in tokens["labels"]] == [3, 4]
    assert tokens["length"] == [8, 8]
    assert (tokens["source_lost"], tokens["target_lost"]) == ([3, 0], [0, 3])
    assert all(row[-1] == end and row.count(end) == 1 for side in ("input_ids", "labels") for row in tokens[side])
    assert tokenizer.decode(tokens["input_ids"][1], skip_special_tokens=True).strip() == "b a b"
    batch = PairCollator(tokenizer.pad_token_id, 4)(tokens[:])
    assert batch["input_ids"].shape == (2, 8) and batch["labels"].shape == (2, 4)
    assert batch["labels"][0].tolist() == [*tokens["labels"][0], -100]
    assert batch["attention_mask"].sum(1).tolist() == [5, 4] and batch["decoder_attention_mask"].sum(1).tolist() == [
        3,
        4,
    ]


def test_pieces_spell_what_they_do_not_know_and_give_texts_back() -> None:
    texts = [row[side] for row in generate_dialogues(40) for side in ("dialogue", "note")]
    texts += [row["note"] for row in generate_dialogues(40, language="zh")]
    pieces = train_pieces(texts)
    assert pieces == train_pieces(texts) and len(dict(pieces)) == len(pieces)
    assert len(train_pieces(texts, 150)) == 150
    _, tokenizer = build_small_t5(pieces)
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True).split() == text.split()
    assert tokenizer.tokenize("patient xyz-Q") == ["▁patient", "▁", "x", "y", "z", "-", "Q"]
    assert tokenizer("Ω")["input_ids"].count(tokenizer.unk_token_id) == 1


def test_model_and_tokenizer_load_by_their_auto_classes(tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, tokenizer = build_small_t5(
        train_pieces(["no pain", "no fever, no pain"]), d_model=8, num_layers=1, dropout=0.0
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("no pain, fever")["input_ids"] == tokenizer("no pain, fever")["input_ids"]
    assert len(loaded) == len(tokenizer) == model.config.vocab_size
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert again.config.dropout_rate == 0.0
    assert (again.lm_head.weight == again.encoder.embed_tokens.weight).all()
    assert side_limits(model.config) == (None, None)


def test_combinations_of_the_test_set_are_never_in_training() -> None:
    for language in ("en", "zh"):
        combinations = {}
        for split in ("train", "test"):
            made = [write_dialogue(language, f"x {split} {i}", held_out=split == "test") for i in range(300)]
            combinations[split] = {combination for _, _, combination in made}
            assert all(is_held_out(*combination) == (split == "test") for combination in combinations[split])
            for dialogue, note, (complaint, other) in made:
                assert complaint in dialogue.splitlines()[0] and complaint in note and other in note
        assert len(combinations["train"]) > 200 and not combinations["train"] & combinations["test"]


def test_conversations_are_a_function_of_their_number() -> None:
    assert list(generate_dialogues(5)) == list(generate_dialogues(9))[:5]
    splits = load_dialogues(num_train=6, num_held_out=4, language="zh")
    assert {name: len(split) for name, split in splits.items()} == {"train": 6, "validation": 4, "test": 4}
    assert splits["validation"][:] != splits["test"][:]
    row = splits["train"][0]
    assert row["dialogue"].startswith("患者：") and row["note"].startswith("患者") and "\n" not in row["note"]
    with pytest.raises(UserError, match='"en" or "zh"'):
        list(generate_dialogues(1, language="fr"))  # type: ignore[arg-type]


@pytest.mark.skipif(not DATA.exists(), reason="the real data is not here")
def test_mts_dialog_is_read_as_it_is() -> None:
    files = sorted(DATA.glob("*.csv"))
    assert len(files) == 3
    by_name = {path.name.split("-")[2][:4]: str(path) for path in files}
    recipe = Seq2SeqRecipe(
        train_file=by_name["Trai"],
        validation_file=by_name["Vali"],
        test_file=by_name["Test"],
        source_column="dialogue",
        target_column="section_text",
    )
    data = load(recipe)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 1201, "validation": 100, "test": 200}
    assert data.splits["train"]["row"][-1] == 1201
