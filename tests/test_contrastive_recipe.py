"""The recipe of embeddings from end to end: what it leaves, that the cut does not matter, resumes, mistakes."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from contrastive import ContrastiveRecipe, plan, run
from launching import ROOT, launch
from safetensors.torch import load_file
from small import rows_of

from accumft.cli import main

RECIPE = ROOT / "recipes" / "contrastive.py"


def small(output_dir: Path, **fields: Any) -> ContrastiveRecipe:
    """48 pairs with hard negatives, 3 steps of 16 an epoch, 6 in all."""
    defaults: dict[str, Any] = {
        "from_scratch": True,
        "synthetic_size": 48,
        "max_length": 24,
        "effective_batch_size": 16,
        "learning_rate": 1e-3,
        "num_train_epochs": 2.0,
        "output_dir": str(output_dir),
    }
    if fields.get("train_file") is not None:
        del defaults["synthetic_size"]
    return ContrastiveRecipe(**{**defaults, **fields})


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for _, tensor in sorted(load_file(folder / "model.safetensors").items())])


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows_of(folder)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run of padded micro-batches as large as may be."""
    folder = tmp_path_factory.mktemp("one") / "run"
    run(small(folder, per_device_train_batch_size=16, padding_free=False))
    return folder


def test_outputs(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "recipe.yaml", "metrics.jsonl", "README.md"}
    assert names >= {"all_results.json", "predictions.jsonl", "modules.json", "1_Pooling", "2_Normalize", "plots"}
    rows = rows_of(finished)
    assert [row["examples"] for row in rows] == [16] * 6
    assert [row["items"] for row in rows] == [16.0] * 6
    assert max(row["micro_batches"] for row in rows) <= 3, "cut by length alone"
    evaluations = rows_of(finished, "eval_loss")
    assert [row["step"] for row in evaluations] == [3, 6]
    results = json.loads((finished / "all_results.json").read_text())
    assert results["eval_mrr"] == max(row["eval_mrr"] for row in evaluations)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert results["test_loss"] < results["untouched_test_loss"] - 0.3
    card = (finished / "README.md").read_text()
    assert "library_name: sentence-transformers" in card and "pipeline_tag: sentence-similarity" in card
    assert "untouched\\_test\\_mrr" in card


def test_predictions_give_the_metrics(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "predictions.jsonl").read_text("utf-8").splitlines()]
    ranks = [row["rank"] for row in rows if row["split"] == "test"]
    results = json.loads((finished / "all_results.json").read_text())
    assert len(ranks) == 12
    assert results["test_mrr"] == pytest.approx(sum(1 / rank for rank in ranks) / 12)
    assert results["test_recall@5"] == pytest.approx(sum(rank <= 5 for rank in ranks) / 12)


def test_sentence_transformers_loads_it(finished: Path) -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    from accumft.synthetic.pairs import generate_pairs

    model = SentenceTransformer(str(finished), device="cpu")
    pairs = list(generate_pairs(12, split="test"))
    documents = list(dict.fromkeys(pair[name] for pair in pairs for name in ("positive", "negative")))
    queries = [pair["anchor"] for pair in pairs]
    similarity = model.similarity(model.encode(queries), model.encode(documents))
    first = [documents[i] == pair["positive"] for i, pair in zip(similarity.argmax(dim=1).tolist(), pairs, strict=True)]
    results = json.loads((finished / "all_results.json").read_text())
    assert results["test_recall@1"] == pytest.approx(sum(first) / 12)
    assert model.max_seq_length == 24


@pytest.mark.parametrize(
    "fields",
    [
        {"per_device_train_batch_size": 5, "padding_free": False},
        {"per_device_train_batch_size": 1},
        {"max_tokens_per_micro_batch": 128, "gradient_checkpointing": True, "dataloader_num_workers": 1},
    ],
)
def test_the_cut_does_not_matter(finished: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    run(small(tmp_path / "run", **fields))
    assert min(row["micro_batches"] for row in rows_of(tmp_path / "run")) > 3
    assert losses(tmp_path / "run") == pytest.approx(losses(finished), rel=1e-4)
    for found, expected in zip(rows_of(tmp_path / "run", "eval_loss"), rows_of(finished, "eval_loss"), strict=True):
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    assert [row["tokens"] for row in rows_of(tmp_path / "run")] == [row["tokens"] for row in rows_of(finished)]


def test_two_processes_give_the_losses_of_one(finished: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((finished / "recipe.yaml").read_text())
    recipe |= {"per_device_train_batch_size": 3, "output_dir": str(tmp_path / "two")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(recipe))
    config = ROOT / "accelerate_configs" / "cpu_2_processes.yaml"
    ended = launch(RECIPE, "--config", str(tmp_path / "run.yaml"), config=config, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(finished), rel=1e-5)
    for name in ("step", "learning_rate", "examples", "items", "tokens"):
        assert [row[name] for row in rows_of(tmp_path / "two")] == [row[name] for row in rows_of(finished)]
    for found, expected in zip(rows_of(tmp_path / "two", "eval_loss"), rows_of(finished, "eval_loss"), strict=True):
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
        assert found["eval_mrr"] == pytest.approx(expected["eval_mrr"], abs=1e-9)


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"dropout": 0.1, "save_steps": 2, "save_total_limit": None, "eval_steps": 2}
    run(small(tmp_path / "whole", max_tokens_per_micro_batch=256, **fields))
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "killed" / "checkpoints" / f"step-{step:08d}")
    run(small(tmp_path / "killed", max_tokens_per_micro_batch=256, resume_from_checkpoint="true", **fields))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert torch.equal(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    last = Path("checkpoints") / "step-00000006"
    assert torch.equal(weights(tmp_path / "killed" / last), weights(tmp_path / "whole" / last))
    results = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("killed", "whole")]
    assert results[0]["untouched_test_mrr"] == results[1]["untouched_test_mrr"]
    assert results[0]["test_mrr"] == results[1]["test_mrr"]


def write_csv(path: Path, header: list[str], rows: list[list[Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


WORDS = ("pain", "fever", "cough", "rash", "thirst", "cramp")


def pairs(n: int) -> list[list[Any]]:
    return [
        [f"what helps {WORDS[i % 6]} number {i}?", f"{WORDS[i % 6]} therapy {i}", f"causes of {WORDS[i % 6]}", i / n]
        for i in range(n)
    ]


def test_scored_pairs(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "p.csv", ["anchor", "positive", "negative", "score"], pairs(60))
    result = run(small(tmp_path / "run", train_file=file, loss="cosine", score_column="score", validation_split=0.3))
    assert result.metrics["eval_spearman"] > result.metrics["untouched_eval_spearman"] - 1
    assert result.metrics["eval_loss"] < result.metrics["untouched_eval_loss"]
    lines = (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 18 and set(json.loads(lines[0])) == {"split", "row", "text_sha256", "score", "cosine"}


def test_triplets(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "p.csv", ["anchor", "positive", "negative", "score"], pairs(40))
    fields: dict[str, Any] = {"negative_column": ("negative",), "pooling": "cls", "max_steps": 4, "normalize": False}
    result = run(small(tmp_path / "run", train_file=file, loss="triplet", validation_split=0.0, **fields))
    rows = [row for row in result.history if "loss" in row]
    assert [row["items"] for row in rows] == [16, 16, 8, 16]
    assert rows[-1]["loss"] < rows[0]["loss"]
    config = json.loads((tmp_path / "run" / "1_Pooling" / "config.json").read_text())
    assert config["pooling_mode_cls_token"] and not config["pooling_mode_mean_tokens"]
    assert not (tmp_path / "run" / "2_Normalize").exists()
    assert not any(name.startswith("eval_") for name in result.metrics)


def test_dry_run(tmp_path: Path) -> None:
    planned = plan(small(tmp_path / "run", max_tokens_per_micro_batch=128))
    assert planned.window_plan.plan.total_steps == 6
    assert planned.steps.micro_batches.min() > 2
    assert not (tmp_path / "run").exists()


def test_dry_run_of_examples_longer_than_the_models_positions(tmp_path: Path) -> None:
    rows = [["fever " * 300, "cough " * 300], ["rash " * 300, "pain " * 300]]
    file = write_csv(tmp_path / "p.csv", ["anchor", "positive"], rows)
    planned = plan(small(tmp_path / "run", train_file=file, validation_split=0.0, max_length=400, max_steps=2))
    assert planned.steps.largest[1] == 604
    assert planned.memory.activations > 0


MISTAKES = [
    (["--train_file", "absent.xml"], "absent.xml: no such file"),
    (["--train_file", "p.csv", "--text_column", "q", "positive"], "--text_column"),
    (["--train_file", "p.csv", "--text_column", "anchor"], "--text_column: two columns"),
    (["--train_file", "p.csv", "--loss", "cosine"], "--score_column"),
    (["--train_file", "p.csv", "--loss", "triplet"], "--negative_column"),
    (["--train_file", "p.csv", "--score_column", "score"], "--loss cosine"),
    (["--train_file", "p.csv", "--score_column", "anchor", "--loss", "cosine"], "named more than once"),
    (["--train_file", "p.csv", "--loss", "cosine", "--score_column", "score", "--temperature", "1"], "--temperature"),
    (["--margin", "0.4"], "--margin"),
    (["--temperature", "0"], "--temperature 0.0: must be above 0"),
    (["--test_split", "0.1"], "--test_split 0.1: has no effect with the synthetic pairs"),
    (["--train_file", "p.csv", "--test_split", "1.5"], "--test_split 1.5"),
    (["--train_file", "p.csv", "--synthetic_size", "90"], "--synthetic_size"),
    (["--metric_for_best_model", "accuracy", "--synthetic_size", "32"], "recall@1, recall@5"),
    (["--from_scratch", "--model_name_or_path", "x"], "--model_name_or_path"),
    (["--model_name_or_path", "nobody/nothing", "--synthetic_size", "32"], "nobody/nothing"),
    (["--train_file", "p.csv", "--validation_split", "0", "--eval_steps", "2"], "no validation data"),
    (["--train_file", "one.csv", "--validation_split", "0", "--validation_file", "absent.csv"], "absent.csv"),
    (["--output_dir", "p.csv"], "a file; name a folder"),
]


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_mistakes_end_in_one_line_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mistake: int
) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "p.csv", ["anchor", "positive", "negative", "score"], pairs(30))
    write_csv(tmp_path / "one.csv", ["anchor", "positive"], [["a", "b"]])
    args, expected = MISTAKES[mistake]
    with pytest.raises(SystemExit) as end:
        main(run, ContrastiveRecipe, args)
    assert end.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and expected in message
    assert not (tmp_path / "outputs").exists(), "nothing was written"
