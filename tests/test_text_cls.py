"""The recipe from end to end: what it leaves, that the cut and the processes do not matter, and how mistakes end."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launching import ROOT, launch
from safetensors.torch import load_file
from small import rows_of, small_recipe
from text_cls import TextClsRecipe, run

from accumft.cli import load_recipe, main
from accumft.errors import UserError
from accumft.schedule import build_schedule

RECIPE = ROOT / "recipes" / "text_cls.py"
ROW = {
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "grad_norm",
    "examples",
    "items",
    "tokens",
    "padded_tokens",
    "micro_batches",
    "stepped",
    "oom_retries",
    "micro_batch_limit",
    "data_seconds",
    "seconds",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run on one process, 16 examples a step at once."""
    folder = tmp_path_factory.mktemp("one") / "run"
    run(small_recipe(folder, per_device_train_batch_size=16))
    return folder


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for _, tensor in sorted(load_file(folder / "model.safetensors").items())])


def write_csv(path: Path, header: list[str], rows: list[list[Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def numbered(n: int, label: Any) -> list[list[Any]]:
    words = ["pain", "fever", "cough", "rash"]
    return [[f"patient {i} has {words[i % 4]} since {i} days", label(i)] for i in range(n)]


def test_outputs(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "recipe.yaml",
        "metrics.jsonl",
        "all_results.json",
        "predictions.jsonl",
        "README.md",
        "plots",
    }
    assert sorted(path.name for path in (finished / "plots").iterdir()) == [
        "test_confusion_matrix.png",
        "training.png",
        "validation_confusion_matrix.png",
    ]
    assert len({path.stat().st_mode for path in finished.iterdir() if path.is_file()}) == 1
    rows = rows_of(finished)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(set(row) == ROW for row in rows)
    assert [row["step"] for row in rows_of(finished, "eval_loss")] == [3, 6]
    results = json.loads((finished / "all_results.json").read_text())
    assert results["eval_f1_macro"] == max(row["eval_f1_macro"] for row in rows_of(finished, "eval_loss"))


def test_predictions_cover_every_row_in_order(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "predictions.jsonl").read_text("utf-8").splitlines()]
    assert [(row["split"], row["row"]) for row in rows] == [
        *(("validation", i + 1) for i in range(12)),
        *(("test", i + 1) for i in range(12)),
    ]
    labels = json.loads((finished / "config.json").read_text())["id2label"].values()
    for row in rows:
        assert set(row["probabilities"]) == set(labels)
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert row["prediction"] == max(row["probabilities"], key=row["probabilities"].get)
    results = json.loads((finished / "all_results.json").read_text())
    test = [row["label"] == row["prediction"] for row in rows if row["split"] == "test"]
    assert results["test_accuracy"] == pytest.approx(sum(test) / 12)


def test_pipeline_loads_the_model_with_its_label_names(finished: Path) -> None:
    from transformers import pipeline

    (answer,) = pipeline("text-classification", model=str(finished), device="cpu")(["Chest pain."])
    labels = json.loads((finished / "config.json").read_text())["id2label"]
    assert answer["label"] in labels.values() and not answer["label"].startswith("LABEL_")
    assert list(labels.values()) == sorted(labels.values())


def test_saved_recipe_repeats_the_run_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    recipe = load_recipe(TextClsRecipe, str(finished / "recipe.yaml"))
    recipe.output_dir = str(tmp_path / "again")
    result = run(recipe)
    losses = [row["loss"] for row in rows_of(finished)]
    assert [row["loss"] for row in result.history if "loss" in row] == losses
    assert torch.equal(weights(tmp_path / "again"), weights(finished))
    saved = yaml.safe_load((finished / "recipe.yaml").read_text())
    assert (saved["effective_batch_size"], saved["gradient_accumulation_steps"]) == (16, None)


def test_saved_recipe_holds_the_budget_that_was_found(finished: Path, tmp_path: Path) -> None:
    result = run(small_recipe(tmp_path / "run", max_tokens_per_micro_batch="auto"))
    saved = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert saved["max_tokens_per_micro_batch"] in (256, 512)  # 16 rows of 24 tokens need no more
    assert yaml.safe_load((finished / "recipe.yaml").read_text())["max_tokens_per_micro_batch"] is None
    losses = [row["loss"] for row in result.history if "loss" in row]
    assert losses == pytest.approx([row["loss"] for row in rows_of(finished)], rel=1e-5)


@pytest.mark.parametrize("micro", [8, 5, 1])
def test_the_cut_does_not_matter(finished: Path, tmp_path: Path, micro: int) -> None:
    result = run(small_recipe(tmp_path / "run", per_device_train_batch_size=micro))
    rows = [row for row in result.history if "loss" in row]
    whole = rows_of(finished)
    assert [row["micro_batches"] for row in rows] == [-(-16 // micro)] * 6
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole], rel=1e-5)
    assert [row["learning_rate"] for row in rows] == [row["learning_rate"] for row in whole]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in whole]


def test_loader_workers_change_nothing(finished: Path, tmp_path: Path) -> None:
    result = run(small_recipe(tmp_path / "run", per_device_train_batch_size=16, dataloader_num_workers=1))
    losses = [row["loss"] for row in result.history if "loss" in row]
    assert losses == [row["loss"] for row in rows_of(finished)]


def test_two_processes_give_the_losses_of_one(finished: Path, tmp_path: Path) -> None:
    """The command of the README, with the configuration that it names."""
    recipe = yaml.safe_load((finished / "recipe.yaml").read_text())
    recipe["per_device_train_batch_size"] = 3
    recipe["output_dir"] = str(tmp_path / "two")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(recipe))
    config = ROOT / "accelerate_configs" / "cpu_2_processes.yaml"
    ended = launch(RECIPE, "--config", str(tmp_path / "run.yaml"), config=config, timeout=240)
    assert ended.returncode == 0, ended.stderr
    one, two = rows_of(finished), rows_of(tmp_path / "two")
    assert [row["micro_batches"] for row in two] == [6] * 6, "each process cuts its 8 into 3 + 3 + 2"
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-5)
    for name in ("step", "epoch", "learning_rate", "examples", "items", "tokens"):
        assert [row[name] for row in two] == [row[name] for row in one]
    for found, expected in zip(rows_of(tmp_path / "two", "eval_loss"), rows_of(finished, "eval_loss"), strict=True):
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
        assert found["eval_f1_macro"] == pytest.approx(expected["eval_f1_macro"], abs=1e-9)
    batch = "effective batch: 16 examples over 2 processes, in micro-batches of up to 3 examples"
    assert ended.stdout.count(batch) == 1
    assert (finished / "predictions.jsonl").read_text("utf-8").count("\n") == 24


@pytest.mark.parametrize("accumulation", [1, 4])
def test_learning_rate_is_the_closed_form(tmp_path: Path, accumulation: int) -> None:
    recipe = small_recipe(
        tmp_path / "run",
        synthetic_size=40,  # three steps an epoch, the last of 8
        gradient_accumulation_steps=accumulation,
        warmup_ratio=None,
        warmup_steps=2,
        min_lr_ratio=0.1,
        num_train_epochs=2.5,
    )
    result = run(recipe)
    rows = [row for row in result.history if "loss" in row]
    schedule = build_schedule(recipe, 8)
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-3 * schedule(step) for step in range(8)])
    assert [row["examples"] for row in rows] == [16, 16, 8, 16, 16, 8, 16, 16]


def test_max_steps(tmp_path: Path) -> None:
    result = run(small_recipe(tmp_path / "run", max_steps=4))
    rows = [row for row in result.history if "loss" in row]
    assert (result.steps, len(rows)) == (4, 4)
    assert rows[-1]["learning_rate"] == pytest.approx(1e-3 * build_schedule(TextClsRecipe(), 4)(3))


def test_multi_label_from_columns(tmp_path: Path) -> None:
    rows = [[text, int(i % 2 == 0), int(i % 3 == 0)] for i, (text, _) in enumerate(numbered(40, str))]
    file = write_csv(tmp_path / "notes.csv", ["note", "even", "third"], rows)
    recipe = small_recipe(
        tmp_path / "run",
        train_file=file,
        text_column=("note",),
        label_column=("even", "third"),
        pos_weight=("balanced",),
        max_steps=2,
    )
    result = run(recipe)
    assert result.metrics["eval_f1_micro"] >= 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["problem_type"], config["id2label"]) == ("multi_label_classification", {"0": "even", "1": "third"})
    row = json.loads((tmp_path / "run" / "predictions.jsonl").read_text().splitlines()[0])
    assert isinstance(row["label"], list) and set(row["probabilities"]) == {"even", "third"}


def test_regression_on_pairs_of_texts(tmp_path: Path) -> None:
    rows = [[text, "a note", i / 7] for i, (text, _) in enumerate(numbered(40, str))]
    file = write_csv(tmp_path / "scores.csv", ["first", "second", "score"], rows)
    recipe = small_recipe(
        tmp_path / "run",
        train_file=file,
        text_column=("first", "second"),
        label_column=("score",),
        max_steps=2,
        effective_batch_size=None,
        gradient_accumulation_steps=3,
        per_device_train_batch_size=4,
    )
    result = run(recipe)
    assert {"eval_rmse", "eval_loss"} <= result.metrics.keys()
    assert result.metrics["eval_loss"] == pytest.approx(result.metrics["eval_rmse"] ** 2, rel=1e-5)
    assert rows_of(tmp_path / "run")[0]["examples"] == 12


def test_without_validation_data_the_last_model_is_saved(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "notes.csv", ["text", "label"], numbered(32, lambda i: "ab"[i % 2]))
    result = run(small_recipe(tmp_path / "run", train_file=file, validation_split=0.0, max_steps=2))
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert not any(name.startswith("eval_") for name in result.metrics)


def test_truncation_is_reported_and_max_length_stays_within_the_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [[("fever " * 600 if i < 8 else "cough"), "ab"[i % 2]] for i in range(32)]
    file = write_csv(tmp_path / "notes.csv", ["text", "label"], rows)
    run(small_recipe(tmp_path / "run", train_file=file, validation_split=0.0, max_length=4096, max_steps=2))
    assert "train: 32 rows, tokens 130 mean / 3 median / 512 max, 25.0% truncated at 512" in capsys.readouterr().out


MISTAKES = [
    (["--train_file", "absent.csv"], "absent.csv"),
    (["--train_file", "notes.csv", "--label_column", "labels"], "--label_column"),
    (["--train_file", "notes.csv", "--text_column", "txt"], "--text_column"),
    (["--train_file", "notes.csv", "--validation_file", "unseen.csv"], "'c'"),
    (["--train_file", "blank.csv"], "row 2"),
    (["--validation_file", "notes.csv"], "--train_file"),
    (
        ["--effective_batch_size", "16", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "4"],
        "32",
    ),
    (["--mixed_precision", "fp16"], "bf16"),
    (["--warmup_steps", "3", "--warmup_ratio", "0.1"], "--warmup_ratio"),
    (["--warmup_steps", "1000", "--synthetic_size", "32"], "leaves nothing"),
    (["--output_dir", "notes.csv"], "a file; name a folder"),
    (["--output_dir", "."], "name"),
    (["--threshold", "0.4", "--synthetic_size", "32"], "--threshold"),
    (["--train_file", "notes.csv", "--synthetic_size", "90"], "--synthetic_size"),
    (["--from_scratch", "--model_name_or_path", "x"], "--model_name_or_path"),
    (["--train_file", "notes.csv", "--validation_split", "0", "--early_stopping_patience", "2"], "no validation data"),
    (["--focal_gamma", "1"], "--focal_gamma"),
    (["--adam_beta1", "1"], "below 1"),
    (["--metric_for_best_model", "f1_makro"], "f1_macro"),
    (["--report_to", "tensorbord"], "tensorbord"),
    (["--class_weights", "1", "2", "--synthetic_size", "32"], "8 labels"),
    (["--model_name_or_path", "nobody/nothing", "--synthetic_size", "32"], "--from_scratch"),
    (["--optim", "sgd", "--adam_beta1", "0.5"], "--adam_beta1"),
]


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_mistakes_end_in_one_line_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mistake: int
) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "notes.csv", ["text", "label"], numbered(30, lambda i: "ab"[i % 2]))
    write_csv(tmp_path / "unseen.csv", ["text", "label"], numbered(10, lambda i: "abc"[i % 3]))
    write_csv(tmp_path / "blank.csv", ["text", "label"], [["fever", "a"], ["", "b"], ["cough", "b"]])
    args, expected = MISTAKES[mistake]
    with pytest.raises(SystemExit) as end:
        main(run, TextClsRecipe, args)
    assert end.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and expected in message
    assert not (tmp_path / "outputs").exists(), "nothing was written"


@pytest.mark.parametrize("mistaken", [False, True])
def test_no_state_is_left_behind(finished: Path, tmp_path: Path, mistaken: bool) -> None:
    from accelerate.state import AcceleratorState

    recipe = small_recipe(tmp_path / "run", max_steps=1, train_file="absent.csv" if mistaken else None)
    if mistaken:
        with pytest.raises(UserError, match="absent"):
            run(recipe)
    else:
        run(recipe)
    assert AcceleratorState._shared_state == {}, "notebook_launcher refuses to start otherwise"


def test_divergence_seen_in_evaluation_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = "--from_scratch --synthetic_size 32 --max_length 16 --max_steps 3 --eval_steps 1 --optim sgd"
    args += f" --learning_rate 1e30 --max_grad_norm None --output_dir {tmp_path / 'run'}"
    with pytest.raises(SystemExit) as end:
        main(run, TextClsRecipe, args.split())
    assert end.value.code == 1
    assert "not finite" in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(("multiple", "length"), [(None, 24), (16, 24), (7, 24)])
def test_padding_to_a_multiple_changes_no_loss(finished: Path, tmp_path: Path, multiple: int, length: int) -> None:
    recipe = small_recipe(tmp_path / "run", per_device_train_batch_size=16, pad_to_multiple_of=multiple)
    rows = [row for row in run(recipe).history if "loss" in row]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in rows_of(finished)], rel=1e-5)
    assert all(row["padded_tokens"] == 16 * -(-length // (multiple or 1)) * (multiple or 1) for row in rows)


def test_edits_in_a_notebook_are_checked_before_anything_slow() -> None:
    recipe = TextClsRecipe()
    recipe.optim = "adam"  # type: ignore[assignment]
    with pytest.raises(UserError, match="did you mean"):
        run(recipe)
