"""Token ids are made once for the same texts, tokenizer and length, and never taken from a file that is not whole."""

import copy
import logging
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import BertTokenizer

from accumft.data import cache, files, text
from accumft.data.files import to_dataset
from accumft.data.text import tokenize

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fever", "rash", "cough", "and", "no"]
TEXTS = ["fever and rash", "no cough", "rash", "no fever and no cough and no rash", "cough and fever"]
IDS = [[2, 5, 8, 6, 3], [2, 9, 7, 3], [2, 6, 3], [2, 9, 5, 8, 9, 3], [2, 7, 8, 5, 3]]  # at most 6 tokens
CALLS: list[int] = []
"""Rows of each call of a tokenizer in this process."""


class CountingTokenizer(BertTokenizer):
    """A tokenizer that counts how often it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(len(args[0]))
        return super().__call__(*args, **kwargs)


def small_tokenizer(pieces: list[str] | None = None, **fields: Any) -> CountingTokenizer:
    return CountingTokenizer(vocab={piece: i for i, piece in enumerate(pieces or PIECES)}, **fields)


def small_dataset(texts: list[str] | None = None, **columns: list[Any]) -> datasets.Dataset:
    texts = texts or TEXTS
    return datasets.Dataset.from_dict(
        {"row": list(range(1, len(texts) + 1)), "text": texts, "labels": [0] * len(texts)} | columns
    )


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the cache, which small data sets use too here."""
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(text, "ROWS_IN_MEMORY", 0)
    CALLS.clear()
    return tmp_path / "cache"


def tables(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.arrow"))


def test_the_second_time_nothing_is_tokenised(folder: Path) -> None:
    first = tokenize(small_dataset(), small_tokenizer(), 6)
    assert CALLS == [5]
    second = tokenize(small_dataset(), small_tokenizer(), 6)
    assert CALLS == [5]
    for tokens in (first, second):
        assert tokens.column_names == ["row", "labels", "input_ids", "token_type_ids", "length", "truncated", "lost"]
        assert tokens["input_ids"][:] == IDS
        assert tokens["length"][:] == [5, 4, 3, 6, 5]
        assert tokens["truncated"][:] == [False, False, False, True, False]
        assert tokens["row"][:] == [1, 2, 3, 4, 5]
    assert [path.suffix for path in sorted(folder.iterdir())] == [".arrow", ".json", ".lock"]


def test_on_disk_it_is_what_it_would_be_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = small_dataset(text_pair=TEXTS[::-1], labels=[[1.0, 0.0]] * 5)
    on_disk = tokenize(dataset, small_tokenizer(), 9)
    monkeypatch.setenv(cache.FOLDER_VARIABLE, "")
    in_memory = tokenize(dataset, small_tokenizer(), 9)
    assert on_disk.cache_files and not in_memory.cache_files
    assert on_disk.features == in_memory.features
    assert on_disk[:] == in_memory[:]
    assert on_disk[3]["truncated"] and sum(on_disk[3]["token_type_ids"]) == 3  # "no cough [SEP]" is the pair


@pytest.mark.parametrize(
    "other",
    [
        lambda: (small_dataset([*TEXTS[:-1], "cough and fever "]), small_tokenizer(), 6),
        lambda: (small_dataset(["fever and", " rashno cough", *TEXTS[2:]]), small_tokenizer(), 6),
        lambda: (small_dataset(TEXTS[:4]), small_tokenizer(), 6),
        lambda: (small_dataset(text_pair=TEXTS), small_tokenizer(), 6),
        lambda: (small_dataset(), small_tokenizer(), 7),
        lambda: (small_dataset(), small_tokenizer([*PIECES[:5], "rash", "fever", *PIECES[7:]]), 6),
        lambda: (small_dataset(), small_tokenizer([*PIECES, "pain"]), 6),
        lambda: (small_dataset(), small_tokenizer(do_lower_case=False), 6),
        lambda: (small_dataset(), small_tokenizer(truncation_side="left"), 6),
        lambda: (small_dataset(), small_tokenizer(model_input_names=["input_ids"]), 6),
        lambda: (small_dataset(), small_tokenizer(additional_special_tokens=["no"]), 6),
        lambda: (small_dataset(), small_tokenizer(unk_token="fever"), 6),
    ],
    ids=lambda _: "",
)
def test_what_changes_the_tokens_is_tokenised_again(
    other: Callable[[], tuple[Any, Any, int]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize(small_dataset(), small_tokenizer(), 6)
    dataset, tokenizer, max_length = other()
    tokens = tokenize(dataset, tokenizer, max_length)
    assert [5, len(dataset)] == CALLS
    assert len(tables(folder)) == 2
    monkeypatch.setenv(cache.FOLDER_VARIABLE, "")
    assert tokens[:] == tokenize(dataset, tokenizer, max_length)[:]


def test_settings_changed_after_loading_count(folder: Path) -> None:
    tokenizer = small_tokenizer()
    right = tokenize(small_dataset(), tokenizer, 4)
    tokenizer.truncation_side = "left"
    left = tokenize(small_dataset(), tokenizer, 4)
    assert (right[0]["input_ids"], left[0]["input_ids"]) == ([2, 5, 8, 3], [2, 8, 6, 3])


def test_use_of_a_tokenizer_does_not_count() -> None:
    tokenizer = small_tokenizer()
    before = cache.digest_of_tokenizer(tokenizer)
    tokenizer(TEXTS, truncation=True, max_length=4, padding=True)
    tokenizer.pad({"input_ids": [[2, 3], [2]]})
    assert cache.digest_of_tokenizer(tokenizer) == before
    assert cache.digest_of_tokenizer(copy.deepcopy(tokenizer)) == before


def test_where_a_tokenizer_lies_does_not_count(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "b"):
        small_tokenizer().save_pretrained(tmp_path / name)
        digests.add(cache.digest_of_tokenizer(BertTokenizer.from_pretrained(tmp_path / name)))
    assert len(digests) == 1


def test_a_class_whose_source_is_not_to_be_had_is_not_cached(folder: Path) -> None:
    scope: dict[str, Any] = {"BertTokenizer": BertTokenizer, "__name__": "__main__"}
    exec("class Mine(BertTokenizer): pass", scope)
    scope["Mine"].__module__ = "nowhere"
    tokenizer = scope["Mine"](vocab={piece: i for i, piece in enumerate(PIECES)})
    assert cache.digest_of_tokenizer(tokenizer) is None
    assert tokenize(small_dataset(), tokenizer, 6)["input_ids"][:] == IDS
    assert not folder.exists()


def test_a_tokenizer_of_python_code() -> None:
    from transformers import ByT5Tokenizer

    assert not ByT5Tokenizer().is_fast
    first, second = tokenize(small_dataset(), ByT5Tokenizer(), 6), tokenize(small_dataset(), ByT5Tokenizer(), 6)
    assert first.cache_files == second.cache_files != []
    assert second[2]["input_ids"] == [byte + 3 for byte in b"rash"] + [1]
    assert second["truncated"][:] == [True, True, False, True, True]
    other = ByT5Tokenizer(extra_ids=7)
    assert cache.digest_of_tokenizer(other) != cache.digest_of_tokenizer(ByT5Tokenizer())


def test_files_are_for_their_owner_alone(folder: Path) -> None:
    """They hold what the texts hold, in whatever folder."""
    folder.mkdir(mode=0o755, exist_ok=True)
    tokenize(small_dataset(), small_tokenizer(), 6)
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in folder.iterdir() if path.suffix != ".lock"}
    assert modes == {".arrow": 0o600, ".json": 0o600}


def test_new_labels_on_old_texts(folder: Path) -> None:
    tokenize(small_dataset(labels=[0, 1, 2, 3, 4]), small_tokenizer(), 6)
    again = tokenize(small_dataset(labels=[9, 8, 7, 6, 5], row=[11, 12, 13, 14, 15]), small_tokenizer(), 6)
    assert CALLS == [5]
    assert again["labels"][:] == [9, 8, 7, 6, 5]
    assert again["row"][:] == [11, 12, 13, 14, 15]
    assert again["input_ids"][:] == IDS


def test_texts_count_and_not_how_they_are_stored(folder: Path) -> None:
    dataset = small_dataset([*TEXTS, *TEXTS])
    tokenize(dataset.select([9, 0, 3, 2]), small_tokenizer(), 6)
    some = dataset.select([9, 0, 3, 2]).with_format("arrow")[:]
    table = to_dataset(some)
    assert table._indices is None
    tokens = tokenize(table, small_tokenizer(), 6)
    assert CALLS == [4]
    assert tokens["row"][:] == [10, 1, 4, 3]
    assert tokens["input_ids"][:] == [IDS[4], IDS[0], IDS[3], IDS[2]]
    large = to_dataset(some.set_column(1, "text", some["text"].cast("large_string")))
    assert cache.digest_of_texts(large, ["text"]) == cache.digest_of_texts(table, ["text"])


def test_texts_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{'rash ' * (i % 7)}{i}" for i in range(25)]
    whole = small_dataset(texts)
    parts = datasets.concatenate_datasets([small_dataset(texts[:4]), small_dataset(texts[4:])])
    monkeypatch.setattr(files, "ROWS_AT_ONCE", 10)
    assert cache.digest_of_texts(whole, ["text"]) == cache.digest_of_texts(parts, ["text"])
    assert cache.digest_of_texts(whole, ["text"]) != cache.digest_of_texts(whole.select(range(24)), ["text"])
    swapped = whole.select([*range(23), 24, 23])
    assert cache.digest_of_texts(whole, ["text"]) != cache.digest_of_texts(swapped, ["text"])


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "no seal", "no table", "seal is no json"])
def test_a_damaged_file_is_replaced(damage: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenize(small_dataset(), small_tokenizer(), 6)
    (table,) = tables(folder)
    whole = table.read_bytes()
    if damage == "truncated":
        table.write_bytes(whole[: len(whole) // 2])
    elif damage == "changed":
        changed = np.frombuffer(whole, np.uint8).copy()
        changed[len(changed) // 2] ^= 1
        table.write_bytes(changed.tobytes())
    elif damage == "empty":
        table.write_bytes(b"")
    elif damage == "no table":
        table.unlink()
    elif damage == "no seal":
        table.with_suffix(".json").unlink()
    else:
        table.with_suffix(".json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert tokenize(small_dataset(), small_tokenizer(), 6)["input_ids"][:] == IDS
    assert CALLS == [5, 5]
    assert [record.getMessage() for record in caplog.records] == [f"{table}: damaged, so it is made anew"]
    assert tokenize(small_dataset(), small_tokenizer(), 6)["input_ids"][:] == IDS
    assert CALLS == [5, 5]


def test_an_interruption_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(BaseException):
        pass

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(CountingTokenizer, "__call__", interrupted)
        tokenize(small_dataset(), small_tokenizer(), 6)
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    assert tokenize(small_dataset(), small_tokenizer(), 6)["input_ids"][:] == IDS


def test_remains_of_a_killed_process_are_cleared_away(folder: Path) -> None:
    tokenize(small_dataset(), small_tokenizer(), 6)
    (table,) = tables(folder)
    table.unlink()
    table.with_suffix(".json").unlink()
    partial = table.with_suffix(".partial")
    partial.mkdir()
    (partial / table.name).write_bytes(b"half")
    assert tokenize(small_dataset(), small_tokenizer(), 6)["input_ids"][:] == IDS
    assert not partial.exists()


def test_without_a_folder_to_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        assert tokenize(small_dataset(), small_tokenizer(), 6)["input_ids"][:] == IDS
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage() and "set ACCUMFT_CACHE to another folder" in record.getMessage()


def test_a_full_disk_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    assert tokenize(small_dataset(), small_tokenizer(), 6)["input_ids"][:] == IDS
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_few_rows_stay_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "ROWS_IN_MEMORY", 5)
    assert tokenize(small_dataset(), small_tokenizer(), 6)["input_ids"][:] == IDS
    assert not folder.exists()


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(cache.FOLDER_VARIABLE)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    assert cache.cache_folder() == tmp_path / "accumft"


def _tokenise_elsewhere(start: Any, results: Any) -> None:
    """What each of the two processes does."""
    text.ROWS_IN_MEMORY = 0
    tokenizer, dataset = small_tokenizer(), small_dataset(TEXTS * 600)
    start.wait(timeout=120)
    tokens = tokenize(dataset, tokenizer, 6)
    results.put((sum(CALLS), tokens["input_ids"][:] == IDS * 600))


def test_two_processes_tokenise_once(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_tokenise_elsewhere, args=(start, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert sorted(found) == [(0, True), (3000, True)]
    assert len(tables(folder)) == 1


def test_the_first_process_has_a_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(cache.time, "sleep", waits.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    tokenize(small_dataset(), small_tokenizer(), 6)
    assert waits == [cache._HEAD_START]
    tokenize(small_dataset(), small_tokenizer(), 6)
    monkeypatch.setenv("LOCAL_RANK", "0")
    tokenize(small_dataset(), small_tokenizer(), 7)
    assert waits == [cache._HEAD_START]


def test_only_the_owner_can_look_into_the_folder(folder: Path) -> None:
    tokenize(small_dataset(), small_tokenizer(), 6)
    assert os.stat(folder).st_mode & 0o077 == 0


def test_many_synthetic_notes_are_on_disk_and_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accumft.synthetic as synthetic

    sizes: dict[str, Any] = {"num_train": 70, "num_validation": 3, "num_test": 4, "language": "zh", "seed": 3}
    monkeypatch.setattr(synthetic, "_NOTES_AT_ONCE", 32)
    in_memory = synthetic.load_synthetic(**sizes)
    monkeypatch.setattr(synthetic, "NOTES_IN_MEMORY", 50)
    on_disk = synthetic.load_synthetic(**sizes)
    assert [bool(split.cache_files) for split in on_disk.values()] == [True, False, False]
    again = synthetic.load_synthetic(**sizes)
    monkeypatch.setenv(cache.FOLDER_VARIABLE, "")
    without_disk = synthetic.load_synthetic(**sizes)
    for made in (on_disk, again, without_disk):
        for name, split in in_memory.items():
            assert made[name].features == split.features
            assert made[name].to_list() == split.to_list()
    assert len(tables(folder)) == 1
