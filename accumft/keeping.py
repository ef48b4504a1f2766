"""What a run keeps on disk while it goes on: checkpoints, the best model, and at the end the model itself."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list
from safetensors import SafetensorError

from accumft.checkpoint import FOLDER, damage, name_of, prune, write
from accumft.errors import OutputError
from accumft.outputs import export_model, holds_model_of, load_weights, save_model
from accumft.state import Progress, save_state

# What a full disk, a lost mount or a quota raises: Python, safetensors' writer, torch's.
WRITE_ERRORS = (OSError, SafetensorError, RuntimeError)


class Keeper:
    """Saves on the first process; the others do not wait for it."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        processor: Any,
        output_dir: Path,
        save_total_limit: int | None,
        recipe_values: Callable[[], dict[str, Any]],
        stateful: Mapping[str, Any],
        tell: Callable[[dict[str, Any], str], None],
    ) -> None:
        """
        Args:
            tell: is given a row for metrics.jsonl and a line to print, which may be empty.
        """
        self.accelerator, self.model, self.optimizer, self.processor = accelerator, model, optimizer, processor
        self.output_dir, self.folder = output_dir, output_dir / FOLDER
        self.save_total_limit, self.recipe_values, self.stateful, self.tell = (
            save_total_limit,
            recipe_values,
            stateful,
            tell,
        )
        self.newest: int | None = None
        """Step of the checkpoint that was saved last."""
        self.exported: int | None = None
        """Step of the model in the output folder itself."""

    def save(self, progress: Progress) -> bool:
        """Writes a checkpoint of the present state; False, and a line for the user, where the disk does not let it."""
        if not self.accelerator.is_main_process:
            return True
        started = time.perf_counter()
        try:
            write(
                self.folder,
                progress.step,
                lambda place: save_state(
                    place,
                    self.accelerator,
                    self.model,
                    self.optimizer,
                    self.processor,
                    progress,
                    self.recipe_values(),
                    self.stateful,
                ),
            )
        except WRITE_ERRORS as error:
            text = f"step {progress.step}: the checkpoint could not be saved in {self.folder} ({_short(error)})"
            self.tell({"step": progress.step, "save_error": _short(error)}, f"{text}; the earlier ones are whole")
            return False
        self.newest = progress.step
        seconds = round(time.perf_counter() - started, 6)
        self.tell({"step": progress.step, "save_seconds": seconds}, "")
        prune(self.folder, self.save_total_limit, (progress.best_step,))
        return True

    def keep_best(self, progress: Progress) -> bool:
        """Keeps the present model as the best one, in a checkpoint and in the output folder; False where it cannot."""
        if not self.accelerator.is_main_process:
            return True
        if self.newest != progress.step and not self.save(progress):
            return False
        return self._export(progress.step)

    def finish(self, progress: Progress, load_best: bool) -> int:
        """Leaves the best model, or the last one, in the model on all processes and in the output folder.

        Returns:
            The step that it is of.

        Raises:
            OutputError: it could not be saved or loaded, on every process.
        """
        payload: list[Any] = [progress.step, None]
        if self.accelerator.is_main_process:
            try:
                payload[0] = self._finish(progress, load_best)
            except OutputError as error:
                payload[1] = str(error)
        broadcast_object_list(payload)
        step, problem = payload
        if problem is not None:
            raise OutputError(problem)
        self.exported = step
        if step != progress.step and self.accelerator.num_processes > 1:
            # The other processes may be on machines that do not see this folder.
            broadcast(list(self.accelerator.unwrap_model(self.model).state_dict().values()))
        return int(step)

    def _finish(self, progress: Progress, load_best: bool) -> int:
        bare = self.accelerator.unwrap_model(self.model)
        step = progress.step
        if load_best and progress.best_step is not None:
            step = progress.best_step
        if step != progress.step:
            checkpoint = self.folder / name_of(step)
            problem = damage(checkpoint)
            if problem is None or holds_model_of(self.output_dir, step):
                load_weights(bare, checkpoint if problem is None else self.output_dir)
                if self.exported != step and not holds_model_of(self.output_dir, step) and not self._export(step):
                    raise OutputError(self._unsaved("its disk"))
                self.exported = step
                return step
            self.tell({}, f"the best model is lost ({checkpoint}: {problem}): the last one is kept")
            step = progress.step
        if self.exported != step and not ((self.newest == step or self.save(progress)) and self._export(step)):
            # Room for the optimizer's state there is none; for the model alone there may be.
            try:
                save_model(bare, self.processor, self.output_dir)
            except WRITE_ERRORS as error:
                raise OutputError(self._unsaved(_short(error))) from error
        self.exported = step
        return step

    def _export(self, step: int) -> bool:
        try:
            export_model(self.folder / name_of(step), self.output_dir, step)
        except WRITE_ERRORS as error:
            self.tell({}, f"step {step}: the model could not be put into {self.output_dir} ({_short(error)})")
            return False
        self.exported = step
        return True

    def _unsaved(self, why: str) -> str:
        last = f"; {name_of(self.newest)} in {self.folder} is whole" if self.newest is not None else ""
        return (
            f"the final model could not be saved in {self.output_dir} ({why}){last}: free some space and run again "
            "with --resume_from_checkpoint true"
        )


def _short(error: BaseException) -> str:
    """The first line of what an error says."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
