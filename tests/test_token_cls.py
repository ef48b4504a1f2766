"""The recipe of entity recognition from end to end."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, launch
from safetensors.torch import load_file
from small import rows_of
from token_cases import LABELS, random_sentences, sentence, small_recipe, tiny_tokenizer
from token_cls import TokenClsRecipe, run

from accumft.cli import load_recipe, main
from accumft.data.tags import to_iob2
from accumft.data.token_splits import TokenData
from accumft.data.token_text import text_of
from accumft.data.tokens import IGNORED, tokenize_sentences
from accumft.errors import UserError
from accumft.synthetic.entities import load_synthetic_entities
from accumft.tasks.token_classification import best_metric, score

STEPS = 13  # of an epoch: 48 sentences in about 200 windows, 16 a step
RECIPE = ROOT / "recipes" / "token_cls.py"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run over an epoch with dropout, with a checkpoint and an evaluation at each fifth step."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(small_recipe(folder, eval_steps=5, save_steps=5, save_total_limit=None, dropout=0.1))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps without dropout, each of one micro-batch."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(small_recipe(folder, max_steps=3))
    return folder


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows_of(folder)]


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for _, tensor in sorted(load_file(folder / "model.safetensors").items())])


def predictions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text("utf-8").splitlines()]


def write_tsv(path: Path, rows: int = 40, kind: str = "Sign") -> str:
    """Sentences like "patient 3 has acute pain today", in which "[acute] pain today" is an entity."""
    text = ""
    for i in range(rows):
        text += f"patient\tO\n{i}\tO\nhas\tO\n"
        text += f"acute\tB-{kind}\npain\tI-{kind}\n" if i % 2 else f"pain\tB-{kind}\n"
        text += f"today\tI-{kind}\n\n"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_outputs(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "recipe.yaml", "metrics.jsonl", "README.md"}
    assert sorted(path.name for path in (finished / "plots").iterdir()) == [
        "test_entities.png",
        "training.png",
        "validation_entities.png",
    ]
    assert [row["step"] for row in rows_of(finished)] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows_of(finished, "eval_loss")] == [5, 10, STEPS]
    results = json.loads((finished / "all_results.json").read_text())
    assert {"test_f1", "test_precision", "test_recall", "test_f1_macro", "test_accuracy", "test_loss"} <= set(results)
    assert results["test_dictionary_f1"] == 0.0, "no entity of the test sentences is in the training data"
    assert "pipeline_tag: token-classification" in (finished / "README.md").read_text("utf-8")


def test_items_of_an_epoch_are_its_words_each_once(finished: Path) -> None:
    sentences = load_synthetic_entities(num_train=48, num_validation=0, num_test=0)["train"]
    rows = rows_of(finished)
    assert sum(row["items"] for row in rows) == sum(len(one.words) for one in sentences)
    assert sum(row["examples"] for row in rows) > 1.5 * 48, "windows, which share words"


def test_predictions_are_spans_of_the_text(finished: Path) -> None:
    rows = predictions(finished)
    sentences = load_synthetic_entities(num_train=0, num_validation=12, num_test=12)
    assert [(row["split"], row["row"]) for row in rows] == [
        *(("validation", i + 1) for i in range(12)),
        *(("test", i + 1) for i in range(12)),
    ]
    for row, one in zip(rows, [*sentences["validation"], *sentences["test"]], strict=True):
        text, _ = text_of(one.words)
        found = [text[entity["start"] : entity["end"]] for entity in row["entities"]]
        assert found == [text_of(words)[0] for words in _entities(one)]


def _entities(one: Any) -> list[list[str]]:
    """The words of each entity, by another way than the package's."""
    found: list[list[str]] = []
    for word, tag in zip(one.words, one.tags, strict=True):
        if tag.startswith("B-"):
            found.append([])
        if tag != "O":
            found[-1].append(word)
    return found


def test_pipeline_finds_what_the_predictions_say(tmp_path: Path) -> None:
    from transformers import pipeline

    file = write_tsv(tmp_path / "a.tsv")
    fields = {"train_file": file, "validation_file": file, "effective_batch_size": 8, "num_train_epochs": 12.0}
    result = run(small_recipe(tmp_path / "run", **fields, learning_rate=5e-3))
    assert result.metrics["eval_f1"] == 1.0
    assert result.metrics["eval_dictionary_f1"] == 1.0
    find = pipeline("token-classification", model=str(tmp_path / "run"), aggregation_strategy="first", device="cpu")
    texts = ["patient 0 has pain today", "patient 1 has acute pain today"]
    for row, text in zip(predictions(tmp_path / "run")[:2], texts, strict=True):
        found = find(text)
        assert [(e["start"], e["end"], e["entity_group"]) for e in found] == [
            (e["start"], e["end"], e["label"]) for e in row["prediction"]
        ]
        assert text[found[0]["start"] : found[0]["end"]] in ("pain today", "acute pain today")
        assert found[0]["score"] == pytest.approx(row["prediction"][0]["score"], abs=1e-4)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["id2label"] == {
        "0": "O",
        "1": "B-Sign",
        "2": "I-Sign",
    }


@pytest.mark.parametrize(
    "fields", [{"max_tokens_per_micro_batch": 64}, {"per_device_train_batch_size": 5, "padding_free": False}]
)
def test_the_cut_does_not_matter(whole: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    run(small_recipe(tmp_path / "cut", max_steps=3, per_device_eval_batch_size=3, **fields))
    for kind, name in (("loss", "loss"), ("loss", "items"), ("eval_loss", "eval_loss"), ("eval_loss", "eval_accuracy")):
        expected = [row[name] for row in rows_of(whole, kind)]
        assert [row[name] for row in rows_of(tmp_path / "cut", kind)] == pytest.approx(expected, rel=1e-5)
    assert all(row["micro_batches"] >= 4 for row in rows_of(tmp_path / "cut"))
    assert all(row["micro_batches"] == 1 for row in rows_of(whole)), "without padding"


def test_resumed_run_is_the_undisturbed_one_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    removed = [path for path in sorted((folder / "checkpoints").iterdir()) if path.name > "step-00000005"]
    assert len(removed) == 2
    for path in removed:
        shutil.rmtree(path)
    rows = [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if row["step"] <= 5]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = load_recipe(TokenClsRecipe, str(finished / "recipe.yaml"))
    recipe.output_dir, recipe.resume_from_checkpoint = str(folder), "true"
    result = run(recipe)
    assert result.steps == STEPS
    assert losses(folder) == losses(finished)
    last = Path("checkpoints") / f"step-{STEPS:08d}" / "model.safetensors"
    one, other = load_file(folder / last), load_file(finished / last)
    assert len(one) > 50 and all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(weights(folder), weights(finished))
    assert predictions(folder) == predictions(finished)


def test_two_processes_give_the_losses_and_scores_of_one(whole: Path, tmp_path: Path) -> None:
    ended = launch(
        RECIPE,
        *("--config", str(whole / "recipe.yaml"), "--output_dir", str(tmp_path / "two")),
        *("--max_tokens_per_micro_batch", "72"),
        config=ROOT / "accelerate_configs" / "cpu_2_processes.yaml",
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(whole), rel=1e-5)
    one, two = (json.loads((folder / "all_results.json").read_text()) for folder in (whole, tmp_path / "two"))
    for name in ("eval_loss", "test_loss", "test_f1", "test_accuracy"):
        assert two[name] == pytest.approx(one[name], rel=1e-4)
    assert len(predictions(tmp_path / "two")) == 24
    scored = [[e["label"] for e in row["prediction"]] for row in predictions(tmp_path / "two")]
    assert scored == [[e["label"] for e in row["prediction"]] for row in predictions(whole)]


def test_chinese_with_labels_on_all_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(small_recipe(tmp_path / "run", synthetic_language="zh", label_all_tokens=True, max_steps=1))
    rows = [row for row in result.history if "loss" in row]
    sentences = load_synthetic_entities(num_train=48, num_validation=0, num_test=0, language="zh")["train"]
    assert 0 < rows[0]["items"] < sum(len(s.words) for s in sentences)
    assert "each word counts once" in capsys.readouterr().out
    assert '"患者否认胸痛。"' in (tmp_path / "run" / "README.md").read_text("utf-8")


MISTAKES = [
    (["--train_file", "absent.tsv"], "absent.tsv: no such file"),
    (["--train_file", "bad.tsv"], "bad.tsv, line 3: 'I-Sign' after 'O' is malformed IOB2"),
    (["--train_file", "a.tsv", "--test_file", "other.tsv"], "other.tsv, line 4: 'Thing' is no entity type"),
    (["--train_file", "a.tsv", "--quotechar", "'"], "--quotechar"),
    (["--train_file", "a.tsv", "--synthetic_size", "90"], "--synthetic_size"),
    (["--train_file", "a.tsv", "--label_column", "ner"], "--column_names"),
    (["--on_bad_tags", "repair"], "--on_bad_tags repair: has no effect with the synthetic sentences"),
    (["--stride", "-1"], "--stride"),
    (["--metric_for_best_model", "f2"], "f1, precision, recall"),
    (["--train_file", "a.tsv", "--validation_split", "0", "--eval_steps", "3"], "no validation data"),
    (["--from_scratch", "--model_name_or_path", "x"], "--model_name_or_path"),
    (
        ["--train_file", "a.tsv", "--validation_file", "none.tsv", "--from_scratch", "--metric_for_best_model", "f1"],
        "no entity",
    ),
]


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_mistakes_end_in_one_line_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mistake: int
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tsv(tmp_path / "a.tsv")
    write_tsv(tmp_path / "other.tsv", kind="Thing")
    (tmp_path / "bad.tsv").write_text("x\tB-Sign\ny\tO\nz\tI-Sign\n\nx\tB-Sign\n", encoding="utf-8")
    (tmp_path / "none.tsv").write_text("x\tO\ny\tO\n", encoding="utf-8")
    args, expected = MISTAKES[mistake]
    with pytest.raises(SystemExit) as end:
        main(run, TokenClsRecipe, args)
    assert end.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and expected in message
    assert not (tmp_path / "outputs").exists(), "nothing was written"


def test_a_best_metric_that_the_data_leaves_undefined_is_refused() -> None:
    data = TokenData({"train": [], "validation": [sentence("a", "O")]}, ["x"], "iob2", [])
    assert best_metric("eval_loss", None, data) == ("loss", False)
    with pytest.raises(UserError, match=r"--metric_for_best_model f1: undefined on x\.tsv: no entity"):
        best_metric(None, None, data)


@pytest.mark.parametrize("max_length", [6, 12, 64])
@pytest.mark.parametrize("label_all_tokens", [False, True])
def test_scores_are_over_whole_sentences(max_length: int, label_all_tokens: bool) -> None:
    """However a sentence is split: logits that say the right tag for every first piece have an F1 of 1."""
    sentences, _ = to_iob2(random_sentences(40), "iob2", "repair")
    data = TokenData({"train": sentences, "test": sentences}, ["a", "b"], "iob2", [])
    tokens = tokenize_sentences(sentences, tiny_tokenizer(), LABELS, max_length, 4, label_all_tokens)
    assert data.labels == LABELS
    labels = torch.tensor([label for row in tokens.windows["labels"] for label in row if label != IGNORED])
    found = score(20.0 * torch.nn.functional.one_hot(labels, len(LABELS)), tokens, sentences, data)
    assert found.tags == [list(one.tags) for one in sentences]
    assert found.metrics.scalars["f1"] == found.metrics.scalars["accuracy"] == 1.0
    assert found.loss == pytest.approx(0, abs=1e-6)
    wrong = torch.zeros(len(labels), len(LABELS))
    wrong[:, 0] = 20.0
    found = score(wrong, tokens, sentences, data)
    assert found.metrics.scalars["recall"] == 0.0 and found.tags == [["O"] * len(one.words) for one in sentences]
    share = float((labels != 0).float().mean())
    assert found.loss == pytest.approx(20.0 * share, rel=1e-6)
    assert [len(sure) for sure in found.probabilities] == [len(one.words) for one in sentences]
