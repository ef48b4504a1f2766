"""Where a run goes on from: the newest whole checkpoint, a path, another run, or the beginning."""

import json
import logging
from pathlib import Path

import pytest
import torch
from resumed import CHECKPOINTS, STEPS, break_checkpoint, copy_of, finished_run, recipe_of, step_folder
from runs import checkpoints, rows, same_model
from safetensors.torch import load_file
from small import rows_of
from text_cls import TextClsRecipe, run

from accumft import cli
from accumft.checkpoint import damage
from accumft.errors import UserError
from accumft.resume import wants_to_resume


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("finished") / "run")


def printed_by(recipe: TextClsRecipe, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    run(recipe)
    return capsys.readouterr().out


def assert_same(found: Path, expected: Path) -> None:
    assert same_model(found, expected), "the best model"
    assert same_model(step_folder(found, STEPS), step_folder(expected, STEPS)), "the last model"
    assert rows(found) == rows(expected), "each step and evaluation once, with the same numbers"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(None, False), (False, False), ("false", False), (True, True), ("true", True), ("True", True), ("/a", Path("/a"))],
)
def test_what_is_wanted(value: bool | str | None, wanted: bool | Path) -> None:
    assert wants_to_resume(value) == wanted


def test_damaged_ones_are_named_and_passed_over(
    finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    newest = break_checkpoint(folder, 12)
    (step_folder(folder, 8) / "optimizer.pt").unlink()
    with caplog.at_level(logging.WARNING):
        run(recipe_of(folder, resume_from_checkpoint=True))
    assert f"checkpoint {newest} is damaged and passed over: model.safetensors has another content" in caplog.text
    assert f"checkpoint {step_folder(folder, 8)} is damaged and passed over: optimizer.pt is missing" in caplog.text
    assert_same(folder, finished)
    assert checkpoints(folder) == CHECKPOINTS and all(damage(step_folder(folder, s)) is None for s in CHECKPOINTS)


def test_none_whole_is_an_error_with_exit_code_2(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    for step in CHECKPOINTS:
        break_checkpoint(folder, step)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(cli, "parse", lambda recipe_class, args: recipe_of(folder, resume_from_checkpoint="true"))
    with pytest.raises(SystemExit) as ended:
        cli.main(run, TextClsRecipe)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: --resume_from_checkpoint true: none of the 3 checkpoints in {folder / 'checkpoints'} is whole; leave "
        "the flag out to begin anew"
    )
    assert sorted(path for path in tmp_path.rglob("*") if path.name != ".lock") == before, "nothing was touched"


def test_true_without_a_checkpoint_begins_at_the_beginning(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    printed = printed_by(recipe_of(folder, resume_from_checkpoint="true"), capsys)
    assert f"--resume_from_checkpoint true: no checkpoint in {folder} yet: from the beginning" in printed
    assert_same(folder, finished)
    assert not (tmp_path / "run-1").exists()


@pytest.mark.parametrize("step", [4, 8])
def test_a_checkpoint_by_its_path(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    """In the run's own folder: what comes later goes aside, and is made anew."""
    folder = copy_of(finished, tmp_path / "run")
    path = step_folder(folder, step)
    assert f"goes on from {path} (step {step} of 12)" in printed_by(
        recipe_of(folder, resume_from_checkpoint=str(path)), capsys
    )
    assert_same(folder, finished)
    aside = sorted(path.name for path in (folder / "checkpoints").glob("aside-*"))
    assert aside == [f"aside-1-step-{later:08d}" for later in CHECKPOINTS if later > step]
    assert [path.name for path in folder.rglob(".*")] == [".exported.json"], "nothing half-made is left"


def test_a_path_to_a_damaged_checkpoint_takes_the_one_before(
    finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    path = break_checkpoint(folder, 8)
    with caplog.at_level(logging.WARNING):
        printed = printed_by(recipe_of(folder, resume_from_checkpoint=str(path)), capsys)
    assert f"checkpoint {path} is damaged" in caplog.text
    assert f"goes on from {step_folder(folder, 4)} (step 4 of 12)" in printed, "not from the later one, 12"
    assert_same(folder, finished)


def test_a_runs_folder_by_its_path(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of(finished, tmp_path / "run")
    break_checkpoint(folder, 12)
    printed = printed_by(recipe_of(folder, resume_from_checkpoint=str(folder)), capsys)
    assert f"goes on from {step_folder(folder, 8)} (step 8 of 12)" in printed
    assert_same(folder, finished)


def test_another_runs_checkpoint(finished: Path, tmp_path: Path) -> None:
    """Its rows and its best model come along, in files of their own; the other run is not touched."""
    other, folder = copy_of(finished, tmp_path / "other"), tmp_path / "new"
    state = json.loads((step_folder(other, 8) / "state.json").read_text())
    assert state["best_step"] == 4, "the best evaluation so far is that of step 4"
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    run(recipe_of(folder, resume_from_checkpoint=str(step_folder(other, 8))))
    assert_same(folder, finished)
    assert checkpoints(folder) == [4, 8, 12], "the best one was taken over"
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    # The evaluation of step 8, made first of all, has the accuracy of step 4 and a lower loss: the best is saved here.
    assert {row["step"] for row in rows_of(folder, "save_seconds")} == {8, 12} | {
        row["step"] for row in rows_of(other, "save_seconds") if row["step"] < 8
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("absent", "--resume_from_checkpoint {}: no such folder; name a checkpoint or a run's output_dir"),
        ("file", "--resume_from_checkpoint {}: no such folder; name a checkpoint or a run's output_dir"),
        ("some", "--resume_from_checkpoint {}: not a checkpoint of accumft (a folder step-00000120 of a run's check"),
        ("empty", "--resume_from_checkpoint {}: {}/checkpoints holds none; leave the flag out to begin anew"),
        ("step-00000001", "--resume_from_checkpoint {}: none of the 1 checkpoints in {parent} is whole; leave the"),
    ],
)
def test_paths_to_nonsense(tmp_path: Path, value: str, message: str) -> None:
    (tmp_path / "file").touch()
    for name in ("some/thing", "empty/checkpoints", "step-00000001"):
        (tmp_path / name).mkdir(parents=True)
    path = tmp_path / value
    with pytest.raises(UserError) as error:
        run(recipe_of(tmp_path / "run", resume_from_checkpoint=str(path)))
    assert str(error.value).startswith(message.format(path, path, parent=tmp_path))
    assert not list((tmp_path / "run").glob("*.jsonl")), "nothing was begun"


def test_more_epochs_go_on(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of(finished, tmp_path / "run")
    printed = printed_by(recipe_of(folder, resume_from_checkpoint="true", num_train_epochs=3.0), capsys)
    assert "(step 12 of 18)" in printed
    assert "num_train_epochs: 2.0 before, 3.0 from here on" in printed
    found = rows_of(folder)
    assert [row["step"] for row in found] == list(range(1, 19)), "numbers go on"
    assert found[:12] == rows_of(finished)
    assert {4, 8, 12, 16, 18} == set(checkpoints(folder))


def test_fewer_epochs_than_were_made_are_an_error(finished: Path, tmp_path: Path) -> None:
    folder = copy_of(finished, tmp_path / "run")
    with pytest.raises(UserError) as error:
        run(recipe_of(folder, resume_from_checkpoint="true", num_train_epochs=1.0))
    assert str(error.value) == (
        f"{step_folder(folder, 12)} is of step 12, and this run has 6: raise --num_train_epochs or --max_steps"
    )


def test_a_finished_run_is_not_trained_again(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(finished, tmp_path / "run")
    for name in ("all_results.json", "model.safetensors", "README.md"):
        (folder / name).unlink()
    steps: list[int] = []
    monkeypatch.setattr("text_cls.train_step", lambda *args: steps.append(1))
    assert "(step 12 of 12)" in printed_by(recipe_of(folder, resume_from_checkpoint="true"), capsys)
    assert steps == []
    assert_same(folder, finished)
    results = [json.loads((path / "all_results.json").read_text()) for path in (folder, finished)]
    assert results[0] == results[1], "the times too: what the training took is remembered"
    assert all(torch.isfinite(value).all() for value in load_file(folder / "model.safetensors").values())
    assert (folder / "README.md").exists() and [path.name for path in folder.glob(".*")] == [".exported.json"]
