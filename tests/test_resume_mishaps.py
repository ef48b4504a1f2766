"""What people do to a run's folder while nobody looks, and how a resume takes it."""

import json
import shutil
from pathlib import Path

import pytest
from resumed import CHECKPOINTS, copy_of, finished_run, recipe_of, step_folder
from runs import rows, same_model
from text_cls import run
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from accumft.checkpoint import damage
from accumft.errors import UserError
from accumft.outputs import MetricsLog, check_output_dir, read_metrics
from accumft.state import Progress, read_progress


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("mishaps") / "run")


def test_saving_into_the_output_folder_leaves_the_checkpoints_whole(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.id2label[0] = "another name"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    assert [damage(step_folder(folder, step)) for step in CHECKPOINTS] == [None] * 3


def test_a_refused_resume_changes_nothing(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")

    def files() -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = files()
    # The model's size is seen only when the checkpoint is loaded.
    (step_folder(folder, 4) / "recipe.yaml").write_text("{}")
    manifest = json.loads((step_folder(folder, 4) / "manifest.json").read_text())
    manifest["files"].pop("recipe.yaml")
    (step_folder(folder, 4) / "manifest.json").write_text(json.dumps(manifest))
    changed = files()
    recipe = recipe_of(folder, resume_from_checkpoint=str(step_folder(folder, 4)), synthetic_language="zh")
    with pytest.raises(UserError, match="step-00000004"):
        run(recipe)
    assert files() == changed and before.keys() == changed.keys()


def test_a_best_model_without_its_checkpoint_is_found_in_the_output_folder(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    best = read_progress(step_folder(folder, 12)).best_step
    assert best is not None and best < 12, "the last one would not have to be found"
    shutil.rmtree(step_folder(folder, best))
    run(recipe_of(folder, resume_from_checkpoint="true"))
    assert same_model(folder, finished)


@pytest.mark.parametrize("left", [[".lock"], [".lock", "checkpoints/step-00000004/x"], ["recipe.yaml"]])
def test_a_folder_that_a_killed_run_left_is_its_own(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).touch()
    assert check_output_dir(str(tmp_path / "run"), ()) == tmp_path / "run"


def test_killed_between_two_renames(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    for step in (4, 8):
        shutil.rmtree(step_folder(folder, step))
    step_folder(folder, 12).rename(folder / "checkpoints" / ".replaced-step-00000012")
    (folder / "checkpoints" / "step-00000002").mkdir()
    run(recipe_of(folder, resume_from_checkpoint="true"))
    assert rows(folder) == rows(finished)


def test_validation_data_that_is_gone_or_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{'abc'[i % 3]} word {i},{'abc'[i % 3]}" for i in range(48)]
    for name, some in (("train", lines), ("one", lines[:9]), ("other", lines[9:21])):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "\n".join(some) + "\n")
    fields = {"train_file": str(tmp_path / "train.csv"), "num_train_epochs": 1.0, "eval_steps": 2, "save_steps": 2}
    folder = finished_run(tmp_path / "run", validation_file=str(tmp_path / "one.csv"), **fields)
    assert read_progress(step_folder(folder, 4)).pending_evaluation
    path = str(step_folder(folder, 4))
    run(recipe_of(folder, validation_file=str(tmp_path / "other.csv"), resume_from_checkpoint=path, **fields))
    assert "other validation data: the best model is picked among the evaluations from here on" in (
        capsys.readouterr().out
    )
    path = str(step_folder(folder, 4))
    fields.pop("eval_steps")
    run(recipe_of(folder, validation_split=0.0, eval_steps=None, resume_from_checkpoint=path, **fields))
    assert read_progress(step_folder(folder, 6)).best_step is None


def test_a_log_that_is_deleted_comes_back_whole(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", [{"step": 1}])
    log.write({"step": 2})
    (tmp_path / "metrics.jsonl").unlink()
    log.write({"step": 3})
    log.write({"step": 4})
    log.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_rows_that_are_none_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n7\n[]\n{"step"')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_an_infinite_metric_is_no_best_model() -> None:
    progress = Progress(step=3, best_metric="perplexity")
    assert not progress.take(float("inf"), 1.0, False, None)
    assert (progress.best_value, progress.best_step) == (None, None)


def test_of_equal_metrics_the_lower_loss_is_the_best_and_no_gain() -> None:
    progress = Progress(best_metric="f1")
    found = []
    for step, value, loss in [
        (1, 0.9, 0.5),
        (2, 1.0, 0.4),
        (3, 1.0, 0.6),
        (4, 1.0, 0.1),
        (5, 0.9, 0.01),
        (6, 1.0, None),
    ]:
        progress.step = step
        found.append(progress.take(value, loss, True, None))
    assert found == [True, True, False, True, False, False]
    assert (progress.best_value, progress.best_step, progress.best_loss) == (1.0, 4, 0.1)
    assert progress.evaluations_without_gain == 4, "as for early stopping"


def test_another_patience_is_honoured() -> None:
    progress = Progress(step=3, evaluations_without_gain=2, stop_reason="no better eval_accuracy in 1 evaluation(s)")
    progress.go_on_as(Progress(), 9, True)
    assert progress.stop_reason is None
    progress.go_on_as(Progress(), 2, True)
    assert progress.stop_reason == "no better eval_ in 2 evaluation(s)"


def test_changes_are_recorded(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    path = str(step_folder(folder, 8))
    result = run(recipe_of(folder, resume_from_checkpoint=path, learning_rate=5e-4))
    line = "learning_rate: 0.001 before, 0.0005 from here on"
    assert [row["resumed_with"] for row in read_metrics(folder / "metrics.jsonl") if "resumed_with" in row] == [[line]]
    assert result.metrics["changed_on_resume"] == [f"from step 8 on: {line}"]
    assert "from step 8 on: learning" in (folder / "README.md").read_text()
