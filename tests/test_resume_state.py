"""What a checkpoint holds, and that all of it is taken up again."""

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_cpu import Fp16CpuAccelerator
from resumed import STEPS, copy_of, finished_run, recipe_of, step_folder
from runs import checkpoints, rows, same_model
from small import rows_of
from test_run import Windows, drive, made_run, result_of
from text_cls import run
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from accumft.agreement import versions
from accumft.data.windows import WindowDataset
from accumft.recipe import TrainingRecipe
from accumft.run import Run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("finished") / "run")


def test_what_a_checkpoint_holds(finished: Path) -> None:
    path = step_folder(finished, 8)
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.pt",
        "recipe.yaml",
        "state.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    model = AutoModelForSequenceClassification.from_pretrained(path)
    assert model.config.id2label[0] == "cardiology"
    assert AutoTokenizer.from_pretrained(path)("chest pain")["input_ids"]
    assert (path / "recipe.yaml").read_text() == (finished / "recipe.yaml").read_text()
    state = json.loads((path / "state.json").read_text())
    lasting = {name: state[name] for name in ("step", "best_metric", "num_processes", "examples", "scaler")}
    assert lasting == {"step": 8, "best_metric": "f1_macro", "num_processes": 1, "examples": 64, "scaler": None}
    assert state["versions"] == versions() and state["versions"]["torch"] == torch.__version__
    assert set(state["fingerprint"]) == {"rows", "labels", "digest", "validation"}
    assert state["pending_evaluation"] is True, "written before the evaluation of that step"
    assert state["tokens"] == sum(row["tokens"] for row in rows_of(finished) if row["step"] <= 8)


def test_no_pickle_is_loaded(finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one file of torch's holds tensors and plain values, and is read as such."""
    path = step_folder(finished, 8)
    tensors = torch.load(path / "optimizer.pt", weights_only=True)
    assert set(tensors) == {"optimizer", "stateful"}
    assert set(tensors["optimizer"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert zipfile.is_zipfile(path / "optimizer.pt"), "torch's format without code"
    asked: list[dict[str, Any]] = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: (asked.append(kwargs), load(*args, **kwargs))[1])
    folder = copy_of(finished, tmp_path / "run")
    run(recipe_of(folder, resume_from_checkpoint="true"))
    assert [kwargs["weights_only"] for kwargs in asked] == [True]


def test_a_restart_reads_only_the_windows_from_its_step_on(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = copy_of(finished, tmp_path / "run"), []
    read = WindowDataset.__getitem__
    monkeypatch.setattr(WindowDataset, "__getitem__", lambda self, step: (asked.append(step), read(self, step))[1])
    run(recipe_of(folder, resume_from_checkpoint=str(step_folder(folder, 8))))
    assert asked == [8, 9, 10, 11]


def test_each_save_has_its_time_in_the_log(finished: Path) -> None:
    saves = rows_of(finished, "save_seconds")
    assert [(row["step"], row["epoch"]) for row in saves] == [(4, 0.666667), (8, 1.333333), (12, 2.0)]
    assert all(set(row) == {"step", "epoch", "save_seconds"} and 0 < row["save_seconds"] < 30 for row in saves)


def test_the_fp16_scaler_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scale, and how long it has been good: a growth in the middle comes at the same step."""

    def accelerator(**arguments: Any) -> Fp16CpuAccelerator:
        return Fp16CpuAccelerator(init_scale=2.0**25, growth_interval=3, **arguments)

    monkeypatch.setattr("accumft.launch.Accelerator", accelerator)
    fields = {"mixed_precision": "fp16", "save_steps": 3}
    whole = finished_run(tmp_path / "whole", **fields)
    state = json.loads((step_folder(whole, 6) / "state.json").read_text())
    assert state["scaler"]["scale"] < 2.0**25
    folder = copy_of(whole, tmp_path / "run")
    run(recipe_of(folder, resume_from_checkpoint=str(step_folder(folder, 6)), **fields))
    assert same_model(step_folder(folder, STEPS), step_folder(whole, STEPS))
    assert rows(folder) == rows(whole), "the overflows too come at the same steps"
    assert any(not row["stepped"] and row["step"] > 6 for row in rows_of(whole)), "there is one to come"
    states = [json.loads((step_folder(path, STEPS) / "state.json").read_text())["scaler"] for path in (folder, whole)]
    assert states[0] == states[1]


def test_the_best_model_outlives_save_total_limit(tmp_path: Path) -> None:
    recipe = TrainingRecipe(output_dir=str(tmp_path / "run"), save_steps=1, save_total_limit=1, eval_steps=1)
    with made_run(recipe) as running:
        drive(running, [0.5, 0.9, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4])
    assert checkpoints(tmp_path / "run") == [2, 8]
    saved = type(running.model).from_pretrained(tmp_path / "run")
    assert next(saved.parameters()).unique().tolist() == [2.0]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    saved = type(running.model).from_pretrained(tmp_path / "run")
    assert next(saved.parameters()).unique().tolist() == [2.0], "a link or a copy of its own"


def stopped_and_resumed(tmp_path: Path, stop: int, scores: list[float], **fields: Any) -> Run:
    """A run that ended after `stop` steps, as if killed, and went on; each step has its evaluation and checkpoint."""
    values = {"output_dir": str(tmp_path / "run"), "eval_steps": 1, "save_steps": 1, **fields}
    with made_run(TrainingRecipe(**{**values, "load_best_model_at_end": False})) as running:
        used = iter(scores)
        running.evaluate = lambda: {"loss": 0.5, "accuracy": next(used)}
        for _ in running.windows(Windows(running.plan.total_steps)):
            running.after_step(result_of())
            if running.step == stop:
                break
    recipe = TrainingRecipe(**values, load_best_model_at_end=False, resume_from_checkpoint="true")
    with made_run(recipe, evaluates=True) as running:
        # The checkpoint of a step is written before its evaluation, which is made again.
        drive(running, scores[stop - 1 :])
    return running


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_early_stopping_counts_across_a_resume(tmp_path: Path, stop: int) -> None:
    scores = [0.5, 0.9, 0.4, 0.4, 0.4, 0.95, 0.95, 0.95]
    running = stopped_and_resumed(tmp_path, stop, scores, early_stopping_patience=3)
    assert (running.step, running.progress.best_step, running.progress.evaluations_without_gain) == (5, 2, 3)
    assert running.progress.stop_reason == "no better eval_accuracy in 3 evaluation(s)"
    assert [row["step"] for row in rows_of(tmp_path / "run", "eval_accuracy")] == [1, 2, 3, 4, 5]


def test_a_run_that_stopped_early_stays_stopped(tmp_path: Path) -> None:
    scores = [0.9, 0.4, 0.4, 0.4]
    running = stopped_and_resumed(tmp_path, 3, scores, early_stopping_patience=2)
    assert running.step == 3
    assert running.progress.stop_reason == "no better eval_accuracy in 2 evaluation(s)"


def test_another_metric_picks_the_best_anew(tmp_path: Path) -> None:
    fields = {"output_dir": str(tmp_path / "run"), "save_steps": 1, "save_total_limit": None}
    with made_run(TrainingRecipe(**fields), epochs=2) as running:
        drive(running, [0.9, 0.8])
        assert running.progress.best_step == 2
    recipe = TrainingRecipe(**fields, resume_from_checkpoint="true")
    with made_run(recipe, best=("f1", True), evaluates=True) as running:
        assert (running.progress.best_metric, running.progress.best_value, running.progress.best_step) == (
            "f1",
            None,
            None,
        )
        drive(running, [0.1, 0.3, 0.2], metric="f1")
        assert (running.progress.best_value, running.progress.best_step, running.saved_step) == (0.3, 6, 6)


def averaged(tmp_path: Path, name: str, stop: int | None, resume: bool) -> Any:
    """A run with an average of its weights; to the end, or to a step: the average."""
    recipe = TrainingRecipe(
        output_dir=str(tmp_path / name), save_steps=2, resume_from_checkpoint="true" if resume else None
    )
    running = made_run(recipe)
    average = AveragedModel(running.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    running.stateful["average"] = average
    with running:
        weights = list(running.model.parameters())
        for _ in running.windows(Windows(running.plan.total_steps)):
            generator = torch.Generator().manual_seed(running.step)
            with torch.no_grad():
                for weight in weights:
                    weight.add_(torch.randn(weight.shape, generator=generator))
            average.update_parameters(running.model)
            running.after_step(result_of())
            if running.step == stop:
                break
    return average


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_an_average_of_the_weights_goes_on_bit_by_bit(tmp_path: Path, stop: int) -> None:
    expected = averaged(tmp_path, "whole", None, False).state_dict()
    averaged(tmp_path, "run", stop, False)
    found = averaged(tmp_path, "run", None, True).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert int(found["n_averaged"]) == 8


def test_a_state_that_is_missing_is_named(tmp_path: Path) -> None:
    from accumft.errors import UserError

    averaged(tmp_path, "run", 3, False)
    recipe = TrainingRecipe(output_dir=str(tmp_path / "run"), resume_from_checkpoint="true")
    with pytest.raises(UserError, match=r"step-00000002: holds the state of \['average'\], not \[\]"), made_run(recipe):
        pass


@pytest.mark.parametrize("lost", [True, False])
def test_a_best_model_that_is_lost_is_said_and_another_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: bool
) -> None:
    """Not an error at the end of the training."""
    fields = {"output_dir": str(tmp_path / "run"), "save_steps": 1, "save_total_limit": None}
    with made_run(TrainingRecipe(**fields), epochs=3) as running:
        drive(running, [0.9, 0.8, 0.8])
    shutil.rmtree(step_folder(tmp_path / "run", 2))
    # Another model than the one that was put there: with it the last trace of the best one is gone.
    if lost:
        (tmp_path / "run" / "model.safetensors").write_bytes(b"")
    recipe = TrainingRecipe(**fields, resume_from_checkpoint="true")
    with made_run(recipe, epochs=4, evaluates=True) as running:
        drive(running, [0.4, 0.5])  # that of step 6 was still to be made
        assert (running.saved_step, running.progress.best_value) == ((8, 0.5) if lost else (2, 0.9))
        assert next(running.model.parameters()).unique().tolist() == [2.0 if lost else 1.0]
    message = "the best model so far (step 2) has no whole checkpoint any more"
    assert (message in capsys.readouterr().out) == lost
