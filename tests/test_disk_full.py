"""A disk that is full, for real: a small file system of memory, filled up by the test while a run goes on."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import STEPS, Runs, checkpoints, runs_of, until
from transformers import AutoModelForSequenceClassification

from accumft.checkpoint import damage, name_of, newest_whole

SIZE = 100 * 2**20  # nine checkpoints of 11 MiB
FIELDS: dict[str, Any] = {"save_steps": 2, "eval_steps": 12, "save_total_limit": None, "dropout": 0.0, "pause": 0.08}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Runs whose logs are not on the disk that will be full."""
    yield from runs_of(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system."""
    folder = tmp_path_factory.mktemp("disk")
    if sys.platform != "linux" or shutil.which("mount") is None:
        pytest.skip("mounts a file system, as Linux does")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "accumft-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"may not mount a file system of its own: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


class Filler:
    """A file that takes what room there is."""

    def __init__(self, disk: Path) -> None:
        self.path = disk / "filler"

    def fill(self, but: int = 0) -> None:
        """Leaves only so many bytes free."""
        with self.path.open("ab", buffering=0) as file:
            while (free := self.free() - but) > 0:
                try:
                    file.write(bytes(min(free, 2**20)))
                except OSError:
                    break

    def free(self) -> int:
        found = os.statvfs(self.path.parent)
        return found.f_bavail * found.f_frsize

    def give_back(self) -> None:
        self.path.unlink(missing_ok=True)


@pytest.fixture
def filler(disk: Path) -> Iterator[Filler]:
    """On a disk without the folders of earlier tests."""
    for path in disk.iterdir():
        shutil.rmtree(path)
    filler = Filler(disk)
    yield filler
    filler.give_back()


def start(runs: Runs, folder: Path, **fields: Any) -> list[int]:
    """Begins a run whose output is on the disk."""
    return runs.start(folder.name, per_rank=[{"output_dir": str(folder)}], **{**FIELDS, **fields})


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, of whole lines only."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def saved(folder: Path, step: int) -> bool:
    """Waits for a checkpoint."""
    return until((folder / "checkpoints" / name_of(step)).exists)


def test_the_run_goes_on_and_saves_again_when_there_is_room(runs: Runs, disk: Path, filler: Filler) -> None:
    folder = disk / "again"
    ids = start(runs, folder)
    assert saved(folder, 4)
    filler.fill()
    runs.wait_for("again", "step 6: the checkpoint could not be saved in")
    assert newest_whole(folder / "checkpoints") == (folder / "checkpoints" / name_of(4), {})
    assert not list((folder / "checkpoints").glob(".*")), "what was half-written takes no room"
    filler.give_back()
    assert runs.wait(ids) == [0], runs.log("again")
    found = lines(folder)
    errors = [row for row in found if "save_error" in row]
    assert errors[0]["step"] == 6 and "o space left" in errors[0]["save_error"]
    assert [row["step"] for row in found if "loss" in row] == list(range(1, STEPS + 1)), "no row is lost"
    kept = checkpoints(folder)
    assert {2, 4, 12} <= set(kept) and 6 not in kept
    assert set(kept) == {row["step"] for row in found if "save_seconds" in row}
    assert all(damage(folder / "checkpoints" / name_of(step)) is None for step in kept)
    printed = runs.log("again")
    place = folder / "checkpoints"
    assert f"step 6: the checkpoint could not be saved in {place} (No space left on device); the earlier" in printed
    assert "Traceback" not in printed
    AutoModelForSequenceClassification.from_pretrained(folder)


def test_full_to_the_end_is_an_error_that_says_what_is_left(runs: Runs, disk: Path, filler: Filler) -> None:
    folder = disk / "full"
    ids = start(runs, folder)
    assert saved(folder, 4)
    filler.fill()
    assert runs.wait(ids) == [1]
    printed = runs.log("full")
    assert "Traceback" not in printed
    assert [line for line in printed.splitlines() if line.startswith("error: ")] == [
        f"error: the final model could not be saved in {folder} (No space left on device); {name_of(4)} in "
        f"{folder / 'checkpoints'} is whole: free some space and run again with --resume_from_checkpoint true"
    ]
    assert checkpoints(folder) == [2, 4]
    assert newest_whole(folder / "checkpoints")[0] == folder / "checkpoints" / name_of(4)
    found = lines(folder)  # as many rows as there was room for
    assert [row["step"] for row in found if "loss" in row][:4] == [1, 2, 3, 4]
    assert not list(folder.glob(".s*")) and not list((folder / "checkpoints").glob(".*"))
    # And what it says helps.
    filler.give_back()
    assert runs.wait(start(runs, folder, pause=0.0, resume_from_checkpoint="true")) == [0], runs.log("full")
    assert [row["step"] for row in lines(folder) if "loss" in row] == list(range(1, STEPS + 1))
    AutoModelForSequenceClassification.from_pretrained(folder)


def test_room_for_the_model_but_not_for_the_optimizer(runs: Runs, disk: Path, filler: Filler) -> None:
    folder = disk / "model"
    ids = start(runs, folder)
    assert saved(folder, 4)
    filler.fill(but=6 * 2**20)  # a model takes 3.6 MiB, the optimizer's state twice that
    assert runs.wait(ids) == [0], runs.log("model")
    printed = runs.log("model")
    assert "step 12: the checkpoint could not be saved in" in printed and "Traceback" not in printed
    assert checkpoints(folder) == [2, 4]
    results = json.loads((folder / "all_results.json").read_text())
    assert (results["steps"], results["saved_step"]) == (STEPS, STEPS)
    AutoModelForSequenceClassification.from_pretrained(folder)


def test_a_report_that_finds_no_room_ends_in_a_line(runs: Runs, disk: Path, filler: Filler) -> None:
    """The model is there; what comes after it is not."""
    folder = disk / "report"
    ids = start(runs, folder)
    assert saved(folder, 10)
    filler.fill(but=23 * 2**19)  # the last checkpoint takes 10.8 MiB
    assert saved(folder, 12)
    filler.fill()
    assert runs.wait(ids) == [1], runs.log("report")
    printed = runs.log("report")
    assert "Traceback" not in printed
    (error,) = (line for line in printed.splitlines() if line.startswith("error: "))
    assert str(folder) in error and "No space left on device" in error
    AutoModelForSequenceClassification.from_pretrained(folder)


def test_a_start_that_finds_no_room_ends_in_a_line(runs: Runs, disk: Path, filler: Filler) -> None:
    filler.fill()
    assert runs.wait(start(runs, disk / "start")) == [2], runs.log("start")
    assert "Traceback" not in runs.log("start")
    assert "not writable (No space left on device)" in runs.log("start")
