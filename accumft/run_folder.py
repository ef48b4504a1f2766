"""A run's output folder while the run goes on: claimed, made ready to go on from a checkpoint, its log written."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from accumft.checkpoint import FOLDER, steps_in, tidy
from accumft.errors import UserError
from accumft.outputs import MetricsLog, claim_output_dir, save_recipe
from accumft.recipe import TrainingRecipe
from accumft.resume import Resumed, check_recipe, find_checkpoint, is_in, kind_of, resume, wants_to_resume
from accumft.state import read_progress


class RunFolder:
    """Only the first process opens it; on the others it holds nothing, and what is written to it goes nowhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history: list[dict[str, Any]] = []
        """The rows of metrics.jsonl."""
        self._logged: frozenset[tuple[int, str]] = frozenset()
        self._log: MetricsLog | None = None
        self._lock: Any = None
        self._changes: list[str] = []

    def open(
        self, recipe: TrainingRecipe, values: Mapping[str, Any], fingerprint: Mapping[str, Any], total_steps: int
    ) -> Path | None:
        """Claims the folder; the checkpoint that the run goes on from, if the recipe wants it. No file is written yet.

        Args:
            values: the resolved recipe.
            fingerprint: of the data.

        Raises:
            UserError: the folder cannot be had, or the run not go on.
        """
        wanted = recipe.resume_from_checkpoint
        if wants_to_resume(wanted) and steps_in(self.path / FOLDER):
            # What a killed run was in the middle of is put in order first, if no other is at work there.
            lock = claim_output_dir(self.path, goes_on=True)
            tidy(self.path / FOLDER)
            _give_up(lock)
        checkpoint = find_checkpoint(wanted, self.path)
        if checkpoint is not None:
            # Before an earlier run is moved aside, and anything is written.
            self._check(checkpoint, values, fingerprint, total_steps)
        elif wants_to_resume(wanted):
            print(f"--resume_from_checkpoint {wanted}: no checkpoint in {self.path} yet: from the beginning")
        self._lock = claim_output_dir(self.path, checkpoint is not None and is_in(checkpoint, self.path))
        return checkpoint

    def begin(self, checkpoint: Path | None, values: Mapping[str, Any], total_steps: int) -> Resumed | None:
        """Begins the run's files, once it is sure that the run can go on from the checkpoint."""
        try:
            return self._begin(checkpoint, values, total_steps)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"--output_dir {self.path}: not writable ({reason}); name another folder") from error

    def _begin(self, checkpoint: Path | None, values: Mapping[str, Any], total_steps: int) -> Resumed | None:
        found = None if checkpoint is None else resume(checkpoint, self.path)
        if found:
            found = replace(found, changes=tuple(self._changes))
            print(f"goes on from {found.checkpoint} (step {read_progress(found.checkpoint).step} of {total_steps})")
            self.history, self._logged = found.history, found.logged
        save_recipe(values, self.path / "recipe.yaml")
        self._log = MetricsLog(self.path / "metrics.jsonl", self.history)
        return found

    def _check(
        self, checkpoint: Path, values: Mapping[str, Any], fingerprint: Mapping[str, Any], total_steps: int
    ) -> None:
        lines = check_recipe(checkpoint, values, fingerprint)
        step = read_progress(checkpoint).step
        if step > total_steps:
            raise UserError(
                f"{checkpoint} is of step {step}, and this run has {total_steps}: raise --num_train_epochs or "
                "--max_steps"
            )
        self._changes = lines
        for line in lines:
            print(f"other than when the checkpoint was saved: {line}")

    def write(self, row: dict[str, Any]) -> bool:
        """Adds a row to metrics.jsonl. Returns whether trackers want it: what a killed run has told them of the steps
        that are made again, they are not told twice."""
        if self._log is not None:
            self.history.append(row)
            self._log.write(row)
        return (row["step"], kind_of(row)) not in self._logged

    def close(self) -> None:
        """Gives the folder free."""
        if self._log is not None:
            self._log.close()
        if self._lock is not None:
            _give_up(self._lock)


def _give_up(lock: FileLock) -> None:
    # Its file while it is held: another that takes the name then makes a file of its own.
    Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()
