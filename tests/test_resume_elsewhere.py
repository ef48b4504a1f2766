"""A run that goes on with other processes, another cut, in another folder, or under the eyes of a tracker."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import STEPS, Runs, checkpoints, rows, runs_of, until
from safetensors.torch import load_file
from tasks import relative_error

ALL = {"save_total_limit": None, "dropout": 0.0}
OF_THE_BATCH = ("step", "epoch", "learning_rate", "examples", "items", "tokens")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield from runs_of(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="module")
def wholes(runs: Runs) -> dict[int, Path]:
    """By processes, runs that nothing disturbed."""
    found = {}
    for processes in (1, 2):
        name = f"whole-{processes}"
        assert runs.finish(name, processes, **ALL) == [0] * processes, runs.log(name)
        found[processes] = runs.folder / name
    return found


def last_weights(folder: Path) -> torch.Tensor:
    tensors = load_file(folder / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors")
    return torch.cat([tensor.flatten() for _, tensor in sorted(tensors.items())])


@pytest.mark.parametrize(
    ("before", "processes", "fields"),
    [
        (1, 2, {}),
        (1, 3, {}),
        (1, 1, {"max_tokens_per_micro_batch": 50}),
        (1, 1, {"gradient_accumulation_steps": 4}),
        (1, 1, {"padding_free": False}),
        (2, 1, {}),
        (2, 2, {"per_device_train_batch_size": 2}),
    ],
    ids=str,
)
def test_the_same_effective_batches_follow(
    runs: Runs, wholes: dict[int, Path], before: int, processes: int, fields: dict[str, Any]
) -> None:
    whole = wholes[before]
    name = f"{whole.name}-to-{processes}-{'-'.join(map(str, fields.values()))}"
    path = whole / "checkpoints" / "step-00000006"
    codes = runs.finish(name, processes, **ALL, **fields, resume_from_checkpoint=str(path))
    assert codes == [0] * processes, runs.log(name)
    assert "other than when" not in runs.log(name), "the cut is nothing to speak of"
    found, expected = rows(runs.folder / name), rows(whole)
    assert len(found) == len(expected) == STEPS + STEPS // 3
    for one, other in zip(found, expected, strict=True):
        assert [one.get(key) for key in OF_THE_BATCH] == [other.get(key) for key in OF_THE_BATCH]
        for key in ("loss", "grad_norm", "eval_loss"):
            assert one.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-5)
    assert relative_error(last_weights(runs.folder / name), last_weights(whole)) < 1e-5


def scalars(folder: Path) -> Counter[tuple[str, int]]:
    """How often a tracker's folder has each (tag, step) of a metric, over all its files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: Counter[tuple[str, int]] = Counter()
    for path in folder.rglob("events.out.tfevents.*"):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                # Each row has a step and an epoch; at step 0 are the recipe's values.
                if event.step and value.tag not in ("step", "epoch"):
                    found[value.tag, event.step] += 1
    return found


def test_a_tracker_is_told_each_step_once(runs: Runs) -> None:
    """Ended twice, the second time before it was where it had been the first time."""
    # No checkpoint but each fourth step's: none of a best model between.
    fields = {"report_to": ["tensorboard"], "save_steps": 4, "load_best_model_at_end": False}
    for step, times in ((8, 1), (7, 2)):  # in the middle of that step; the one before is told
        ids = runs.start("told", resume_from_checkpoint="true", pauses={str(step): 60}, **fields)
        assert until(lambda step=step, times=times: runs.log("told").count(f"step {step} runs") == times)
        runs.kill(ids)
        runs.wait(ids)
        assert checkpoints(runs.folder / "told")[-1] == 4
    assert runs.finish("told", resume_from_checkpoint="true", **fields) == [0], runs.log("told")
    found = scalars(runs.folder / "told")
    assert max(found.values()) == 1
    assert [step for tag, step in sorted(found) if tag == "loss"] == list(range(1, STEPS + 1))
    assert [step for tag, step in sorted(found) if tag == "eval_loss"] == [3, 6, 9, 12]


def test_a_tracker_of_a_new_folder_is_told_all_from_its_step_on(runs: Runs) -> None:
    assert runs.finish("first", save_total_limit=None) == [0], runs.log("first")
    path = runs.folder / "first" / "checkpoints" / "step-00000006"
    assert runs.finish("second", report_to=["tensorboard"], resume_from_checkpoint=str(path)) == [0], runs.log("second")
    found = scalars(runs.folder / "second")
    assert [step for tag, step in sorted(found) if tag == "loss"] == list(range(7, STEPS + 1))
    # The evaluation of step 6 was still to be made when the checkpoint was written.
    assert [step for tag, step in sorted(found) if tag == "eval_loss"] == [6, 9, 12]
