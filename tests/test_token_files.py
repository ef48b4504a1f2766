"""Readers of sentences with tags: every form, and mistakes that name their line."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from token_cases import sentence
from token_cls import TokenClsRecipe

from accumft.data.tags import Sentence
from accumft.data.token_files import read_sentences
from accumft.data.token_splits import load_token_data, read_token_splits
from accumft.data.token_text import text_of, words_of
from accumft.errors import UserError
from accumft.metrics.entities import entities

NCBI = Path(__file__).resolve().parents[2] / "shared/data/ncbi-disease"


def read(path: Path, notes: list[str] | None = None, **fields: Any) -> list[Sentence]:
    return read_sentences(str(path), TokenClsRecipe(**fields), [] if notes is None else notes)


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def plain(sentences: list[Sentence]) -> list[tuple[list[str], list[str]]]:
    return [(list(s.words), list(s.tags)) for s in sentences]


EXPECTED = [(["EU", "calls", "Bonn"], ["B-ORG", "O", "B-LOC"]), (["Rain", "."], ["O", "O"])]
COLUMNS = {
    "tabs": "EU\tB-ORG\ncalls\tO\nBonn\tB-LOC\n\nRain\tO\n.\tO\n",
    "blanks": "EU B-ORG\ncalls  O\nBonn   B-LOC\n\n\n  \nRain O\n. O",
    "crlf": "EU\tB-ORG\r\ncalls\tO\r\nBonn\tB-LOC\r\n\r\nRain\tO\r\n.\tO\r\n",
    "bom": "\ufeffEU\tB-ORG\ncalls\tO\nBonn\tB-LOC\n\nRain\tO\n.\tO\n",
    "docstart": "-DOCSTART- -X- -X- O\n\nEU NNP B B-ORG\ncalls VBZ B O\nBonn NNP B B-LOC\n\nRain NN B O\n. . O O\n",
    "docstart alone": "-DOCSTART-\nEU B-ORG\ncalls O\nBonn B-LOC\n-DOCSTART-\nRain O\n. O\n",
    "comments": "# id = 1\nEU\t_\tB-ORG\ncalls\t_\tO\nBonn\t_\tB-LOC\n\n# id = 2\nRain\t_\tO\n.\t_\tO\n",
}


@pytest.mark.parametrize("form", COLUMNS)
@pytest.mark.parametrize("suffix", [".conll", ".tsv", ".txt", ""])
def test_columns(tmp_path: Path, form: str, suffix: str) -> None:
    found = read(written(tmp_path / f"file{suffix}", COLUMNS[form]))
    assert plain(found) == EXPECTED
    assert [s.row for s in found] == [1, 2]


def test_lines_of_words_are_known(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", COLUMNS["docstart"])
    first, second = read(path)
    assert (first.lines, second.lines) == ([3, 4, 5], [7, 8])
    assert second.place(1) == f"{path}, line 8"


def test_columns_by_name_and_delimiter(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "B-X,1,pain\nO,2,now\n")
    fields = {"delimiter": ",", "column_names": ("tag", "number", "word"), "text_column": "word", "label_column": "tag"}
    assert plain(read(path, **fields)) == [(["pain", "now"], ["B-X", "O"])]


def test_chinese_characters_in_gb18030(tmp_path: Path) -> None:
    path = written(tmp_path / "zh.txt", "胸 B-症状\n痛 I-症状\n3 O\n天 O\n。 O\n", "gb18030")
    with pytest.raises(UserError, match=r"zh.txt, line 1: not in the encoding utf-8.*--encoding gb18030"):
        read(path)
    (one,) = read(path, encoding="gb18030")
    assert plain([one]) == [(["胸", "痛", "3", "天", "。"], ["B-症状", "I-症状", "O", "O", "O"])]
    assert text_of(one.words) == ("胸痛 3 天。", [0, 1, 3, 5, 6])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EU\tB-X\ncalls\n", r"line 2: 1 columns where 2 are expected"),
        ("EU\n", r"line 1: a token without a tag"),
        ("EU B-X\nBonn a O\n", r"line 2: 3 columns where 2 are expected"),
        ("EU\tB-X\n\u3000\tO\n", r"line 2: an empty token; fill it in, or --on_bad_row skip"),
        ("EU\tB-X\nBonn\t \n", r"line 2: an empty tag; fill it in"),
        ("\n\n", r"holds no sentence"),
        ("EU\tB-X\n\0\tO\n", r"line 2: holds a NUL byte"),
    ],
)
def test_mistakes_in_columns_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path / "a.tsv", text)
    with pytest.raises(UserError, match=rf"^{path}[,:] {message}"):
        read(path)


def test_bad_lines_are_skipped_with_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    path = written(tmp_path / "a.tsv", "EU\tB-X\n\u3000\tO\nBonn\tO\n")
    (found,) = read(path, notes, on_bad_row="skip")
    assert (found.words, found.lines) == (["EU", "Bonn"], [1, 3])
    assert notes == [f"{path}: 1 lines with an empty token or tag are skipped"]


@pytest.mark.parametrize(("tokens", "tags"), [("tokens", "tags"), ("words", "ner_tags")])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json(tmp_path: Path, tokens: str, tags: str, suffix: str) -> None:
    rows = [{"id": i, tokens: words, tags: own} for i, (words, own) in enumerate(EXPECTED)]
    text = json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows))
    assert plain(read(written(tmp_path / f"a{suffix}", text))) == EXPECTED


def test_classes_of_datasets_by_their_names(tmp_path: Path) -> None:
    names = ["O", "B-X", "I-X"]
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(datasets.ClassLabel(names=names))}
    )
    table = datasets.Dataset.from_dict({"tokens": [["a", "b"], ["c"]], "ner_tags": [[1, 2], [0]]}, features=features)
    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": table, "dev": table}).save_to_disk(str(folder))
    found = read_token_splits(TokenClsRecipe(train_file=str(folder)), [])
    assert {name: plain(split) for name, split in found.items()} == {
        name: [(["a", "b"], ["B-X", "I-X"]), (["c"], ["O"])] for name in ("train", "validation")
    }
    table.to_parquet(str(tmp_path / "a.parquet"))
    assert plain(read(tmp_path / "a.parquet"))[0] == (["a", "b"], ["B-X", "I-X"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"tokens": ["a", "b"], "tags": ["O"]},
            r"row 2: 2 tokens in 'tokens' but 1 tags in 'tags'; correct it, or --on",
        ),
        ({"tokens": [], "tags": []}, r"row 2: no tokens in 'tokens'"),
        ({"tokens": ["a", " "], "tags": ["O", "O"]}, r"row 2: token 2 in 'tokens' is ' ', no text"),
        ({"tokens": ["a"], "tags": [None]}, r"row 2: tag 1 in 'tags' is None, not a name"),
    ],
)
def test_mistakes_in_json_name_the_row(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [{"tokens": ["x"], "tags": ["B-a"]}, row]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=message):
        read(path)
    assert len(read(path, on_bad_row="skip")) == 1


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", json.dumps({"text": "x", "tags": ["O"]}))
    with pytest.raises(UserError, match=r"no column 'tokens' or 'words' \(--text_column\); its columns: text, tags"):
        read(path)
    with pytest.raises(UserError, match=r"'text' \(--text_column\) holds no lists"):
        read(path, text_column="text")
    with pytest.raises(UserError, match=r"--column_names .*has no effect"):
        read(path, column_names=("a", "b"))


TEXT = "Chest pain since May.\nNo fever, 胸痛两天。\n"
ANN = "T1\tSymptom 0 10\tChest pain\nR1\tof Arg1:T1 Arg2:T2\nT2\tAbsent 25 30\tfever\n"
ANN += "#1\tNote T1\tx\nT3\tSymptom 32 34\t胸痛\n"


def test_brat(tmp_path: Path) -> None:
    written(tmp_path / "note.txt", TEXT)
    written(tmp_path / "note.ann", ANN)
    for path in (tmp_path, tmp_path / "note.txt", tmp_path / "note.ann"):
        first, second = read(path)
        assert plain([first]) == [(["Chest", "pain", "since", "May", "."], ["B-Symptom", "I-Symptom", "O", "O", "O"])]
        assert second.words == ["No", "fever", ",", "胸", "痛", "两", "天", "。"]
        assert second.tags == ["O", "B-Absent", "O", "B-Symptom", "I-Symptom", "O", "O", "O"]
        assert second.starts == [22, 25, 30, 32, 33, 34, 35, 36]
        assert [TEXT[start : start + len(word)] for start, word in zip(second.starts, second.words, strict=True)] == (
            second.words
        )


def test_brat_over_a_line_end_and_inside_a_word(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", "chest\npain of sarcoma\nEnd")
    written(tmp_path / "a.ann", "T1\tX 0 10\tchest pain\nT2\tX 14 18\tsarc\n")
    notes: list[str] = []
    first, second = read(tmp_path, notes)
    assert plain([first]) == [(["chest", "pain", "of", "sarcoma"], ["B-X", "I-X", "O", "B-X"])]
    assert second.words == ["End"]
    assert len(notes) == 1 and notes[0].startswith("1 entities begin or end inside a word") and "X 14 18" in notes[0]


def test_an_entity_that_begins_inside_a_line_end_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a fever\r\ncough b")
    written(tmp_path / "a.ann", "T1\tX 8 14\tcough\n")
    (only,) = read(tmp_path)
    assert plain([only]) == [(["a", "fever", "cough", "b"], ["O", "O", "B-X", "O"])]


@pytest.mark.parametrize(
    ("annotation", "message", "kept"),
    [
        ("T1\tX 0 5;11 16\tChest since\n", "line 1: a discontinuous entity", []),
        ("T1\tX 0 10\tChest pain\nT2\tY 6 10\tpain\n", "line 2: Y 6 10 overlaps X 0 10 of line 1", [(0, 2, "X")]),
        ("T1\tX 0 2\tCh\nT2\tY 2 5\test\n", "Y 2 5 begins inside the word in which another ends", [(0, 1, "X")]),
    ],
)
def test_what_tags_cannot_hold(tmp_path: Path, annotation: str, message: str, kept: list[Any]) -> None:
    written(tmp_path / "a.txt", "Chest pain since May")
    written(tmp_path / "a.ann", annotation)
    with pytest.raises(UserError, match=message):
        read(tmp_path)
    notes: list[str] = []
    (found,) = read(tmp_path, notes, on_bad_row="skip")
    assert entities(found.tags) == kept
    assert any("left out" in note for note in notes)


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ("T1\tX 0 5\tpain!\n", r"a.ann, line 1: X 0 5 is 'pain!', where the text has 'Chest'"),
        ("T1\tX 90 95\tpain\n", r"a.ann, line 1: X 90 95 is 'pain', outside of the text"),
        ("T1 X 0 5\n", r"a.ann, line 1: no entity like"),
        ("hello\n", r"a.ann, line 1: no line of brat's"),
    ],
)
def test_mistakes_in_brat_name_the_line(tmp_path: Path, annotation: str, message: str) -> None:
    written(tmp_path / "a.txt", "Chest pain since May")
    written(tmp_path / "a.ann", annotation)
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_a_document_without_annotations_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", "Chest pain")
    with pytest.raises(UserError, match=r"a.ann: no such file; each text wants its .ann"):
        read(tmp_path)
    written(tmp_path / "a.ann", "")
    assert read(tmp_path)[0].tags == ["O", "O"]


def test_words_of_text() -> None:
    text = "IL-2, 胸痛3天 naïve_x"
    assert [text[a:b] for a, b in words_of(text)] == ["IL", "-", "2", ",", "胸", "痛", "3", "天", "naïve_x"]


def splits(**sentences: list[Sentence]) -> dict[str, list[Sentence]]:
    return sentences


def test_labels_notes_and_held_out_sentences() -> None:
    train = [sentence(f"pain {i // 2}", "B-b O" if i % 4 else "B-a I-a", row=i) for i in range(40)]
    data = load_token_data(splits(train=train), TokenClsRecipe(), [])
    assert data.labels == ["O", "B-a", "I-a", "B-b", "I-b"]
    assert (len(data.splits["train"]), len(data.splits["validation"])) == (36, 4)
    texts = [{tuple(s.words) for s in data.splits[name]} for name in ("train", "validation")]
    assert not texts[0] & texts[1], "equal sentences stay on one side"
    assert data.notes == ["tags: IOB2", "x.tsv: 4 of 40 sentences are held out for validation"]
    less = load_token_data(splits(train=train), TokenClsRecipe(max_train_samples=5, max_eval_samples=2), [])
    assert [len(less.splits[name]) for name in ("train", "validation")] == [5, 2]


def test_types_and_repetitions_across_splits() -> None:
    train, test = [sentence("a b", "B-x O")], [sentence("a b", "B-x O"), sentence("c d", "O B-y", lines=[7, 8])]
    with pytest.raises(UserError, match=r"^x.tsv, line 8: 'y' is no entity type of the training data \(x\)"):
        load_token_data(splits(train=train, test=test), TokenClsRecipe(), [])
    data = load_token_data(splits(train=train, validation=train, test=test[:1]), TokenClsRecipe(), [])
    assert "test: 1 of 1 sentences are also in the training data" in data.notes
    with pytest.raises(UserError, match="has no entity, every tag is O"):
        load_token_data(splits(train=[sentence("a b", "O O")]), TokenClsRecipe(), [])


@pytest.mark.skipif(not NCBI.exists(), reason="the real data is not here")
def test_ncbi_disease() -> None:
    train, devel, test = (str(NCBI / f"{name}.tsv") for name in ("train", "devel", "test"))
    recipe = TokenClsRecipe(train_file=train, validation_file=devel, test_file=test)
    data = load_token_data(read_token_splits(recipe, []), recipe, [])
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 5432, "validation": 923, "test": 940}
    counts = {name: sum(len(entities(s.tags)) for s in split) for name, split in data.splits.items()}
    assert counts == {"train": 5145, "validation": 787, "test": 960}
    assert (data.types, data.scheme) == (["Disease"], "iob2")
