"""What is the same for every task around the loop: output folder, log, progress, evaluation when due, best model."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list
from torch.optim.lr_scheduler import LRScheduler

from accumft.compute import is_compiled, num_compilations
from accumft.data.windows import Window, WindowDataset
from accumft.outputs import claim_output_dir, load_weights, save_model, save_recipe, to_json
from accumft.plan import Plan
from accumft.recipe import TrainingRecipe
from accumft.step import StepResult

Evaluate = Callable[[], dict[str, float]]
"""→ metrics by name, without a prefix, on the main process; what it returns elsewhere is not looked at."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to."""

    output_dir: str
    steps: int
    """Optimizer steps made."""
    metrics: dict[str, Any]
    """What all_results.json holds."""
    history: list[dict[str, Any]]
    """The rows of metrics.jsonl; on processes other than the first, empty."""
    plan: Any = None
    """The `accumft.dry_run.RunPlan` of a dry run, which leaves the others empty."""


class Run:
    """The loop's partner: gives it its windows, and does after each step what is due.

    with Run(recipe, accelerator, model, optimizer, scheduler, plan, tokenizer, best) as run:
        for window in run.windows(WindowDataset(dataset, window_plan, collate, accelerator.process_index)):
            result = train_step(accelerator, model, optimizer, window, loss_sum, num_items, recipe.max_grad_norm)
            if result.stepped:
                scheduler.step()
            run.after_step(result, evaluate)
        run.load_best_model()
    """

    def __init__(
        self,
        recipe: TrainingRecipe,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        plan: Plan,
        processor: Any,
        best: tuple[str, bool],
    ) -> None:
        """
        Args:
            model, optimizer: prepared. scheduler: not prepared.
            processor: the tokenizer, saved beside the model.
            best: (metric that picks the best model, whether larger is better).
        """
        self.recipe, self.accelerator, self.plan = recipe, accelerator, plan
        self.model, self.optimizer, self.scheduler, self.processor = model, optimizer, scheduler, processor
        self.best_metric, self.greater_is_better = best
        self.output_dir = Path(recipe.output_dir).expanduser().resolve()
        self.step = 0
        """Completed optimizer steps."""
        self.history: list[dict[str, Any]] = []
        self.best_value: float | None = None
        self.saved_step: int | None = None
        self.evaluations_without_gain = 0
        self.stop_reason: str | None = None
        self._attempts = 0
        self._tokens = 0
        self._examples = 0
        self._training_seconds = 0.0
        self._data_seconds = 0.0
        self._total_data_seconds = 0.0
        self._started = 0.0
        self._log: Any = None
        self._lock: Any = None
        self._bar: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return bool(self.accelerator.is_main_process)

    @property
    def recipe_values(self) -> dict[str, Any]:
        """The recipe by field name with what was resolved filled in, as YAML has it: it repeats the run on any number
        of processes."""
        batch = self.plan.batch
        by_steps = (
            self.recipe.per_device_train_batch_size is None and self.recipe.gradient_accumulation_steps is not None
        )
        resolved = replace(
            self.recipe,
            effective_batch_size=batch.effective_batch_size,
            # What "auto" found; what is unset stays so, and a flag for rows can take its place.
            max_tokens_per_micro_batch=self.recipe.max_tokens_per_micro_batch and batch.max_tokens_per_micro_batch,
            # One of the two follows from the other on whatever number of processes repeats the run.
            per_device_train_batch_size=None if by_steps else batch.per_device_train_batch_size,
            gradient_accumulation_steps=batch.gradient_accumulation_steps if by_steps else None,
            mixed_precision=self.accelerator.mixed_precision,
        )
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(resolved).items()}

    def __enter__(self) -> "Run":
        from tqdm.auto import tqdm

        if self.is_main:
            self._lock = claim_output_dir(self.output_dir)
            save_recipe(self.recipe_values, self.output_dir / "recipe.yaml")
            self._log = open(self.output_dir / "metrics.jsonl", "w", encoding="utf-8", buffering=1)
        self.accelerator.wait_for_everyone()
        if self.recipe.report_to:
            self.accelerator.init_trackers(self.recipe.run_name, config=_flat(self.recipe))
        self._bar = tqdm(total=self.plan.total_steps, unit="step", disable=not self.is_main, dynamic_ncols=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._log is not None:
            self._log.close()
        # Not end_training: it takes the process group with it, which a next run in these processes needs.
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if self._lock is not None:
            self._lock.release()
            Path(self._lock.lock_file).unlink(missing_ok=True)

    def windows(self, dataset: WindowDataset) -> Iterator[Window]:
        """This process's windows on the device, one for each optimizer step, until the run ends.

        A window whose update fp16 skipped comes again: no example of an epoch is lost to an overflow.
        """
        device = self.accelerator.device
        loader = iter(dataset.loader(self.step, self.recipe.dataloader_num_workers, pin_memory=device.type == "cuda"))
        started = time.perf_counter()
        while self.step < self.plan.total_steps and self.stop_reason is None:
            window = next(loader).to(device)
            self._data_seconds = time.perf_counter() - started
            step = self.step
            while self.step == step:
                attempts = self._attempts
                self._started = started
                yield window
                if self._attempts == attempts:
                    raise RuntimeError("call run.after_step(result) once for each window of run.windows(...)")
                started = time.perf_counter()
                self._data_seconds = 0.0
        self._bar.close()

    def after_step(self, result: StepResult, evaluate: Evaluate | None = None) -> None:
        """Logs the step, counts it if it was made, evaluates when due, keeps the best model, decides to stop.

        Args:
            result: what `train_step` returned.
            evaluate: called on every process at each evaluation; None: the run has none.
        """
        self._attempts += 1
        now = time.perf_counter()
        seconds = now - self._started
        self._training_seconds += seconds
        self._total_data_seconds += self._data_seconds
        number = self.step + 1
        if result.stepped:
            self.step = number
            self._tokens += result.tokens
            self._examples += result.examples
            self._bar.update(1)
        self._bar.set_postfix(loss=f"{result.loss:.4f}", lr=f"{result.learning_rate:.2e}", refresh=False)
        is_last = self.step == self.plan.total_steps
        if number % self.recipe.logging_steps == 0 or number == 1 or is_last or not result.stepped:
            epoch = round(number / self.plan.steps_per_epoch, 6)
            times = {"data_seconds": round(self._data_seconds, 6), "seconds": round(seconds, 6)}
            self.log({"step": number, "epoch": epoch, **asdict(result), **times})
        if not result.stepped or evaluate is None:
            return
        every = self.recipe.eval_steps or self.plan.steps_per_epoch
        if self.step % every == 0 or is_last:
            self._evaluate(evaluate)

    def _evaluate(self, evaluate: Evaluate) -> None:
        started = time.perf_counter()
        payload = [evaluate()]
        broadcast_object_list(payload)
        metrics = payload[0]
        seconds = round(time.perf_counter() - started, 6)
        row = {f"eval_{name}": value for name, value in metrics.items()}
        epoch = round(self.step / self.plan.steps_per_epoch, 6)
        self.log({"step": self.step, "epoch": epoch, **row, "eval_seconds": seconds})
        # A metric that these predictions leave undefined (a correlation of constants) is no gain.
        value = metrics.get(self.best_metric)
        better = value is not None and (
            self.best_value is None or (value > self.best_value if self.greater_is_better else value < self.best_value)
        )
        if better:
            self.best_value, self.evaluations_without_gain = value, 0
            if self.recipe.load_best_model_at_end:
                self.save_model()
        else:
            self.evaluations_without_gain += 1
        patience = self.recipe.early_stopping_patience
        if patience is not None and self.evaluations_without_gain >= patience:
            self.stop_reason = f"no better eval_{self.best_metric} in {patience} evaluation(s)"
        shown = "undefined" if value is None else f"{value:.4f}{' (best)' if better else ''}"
        stopping = f"; stopping: {self.stop_reason}" if self.stop_reason else ""
        self.print(
            f"step {self.step} (epoch {epoch:.2f}): eval_loss {metrics.get('loss', math.nan):.4f}, "
            f"eval_{self.best_metric} {shown}{stopping}"
        )

    def log(self, row: dict[str, Any]) -> None:
        """Adds a row to metrics.jsonl, the history and the trackers, at the row's "step"."""
        if self.is_main:
            self.history.append(row)
            self._log.write(to_json(row) + "\n")
        if self.recipe.report_to:
            numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
            self.accelerator.log(numbers, step=row["step"])

    def print(self, text: str) -> None:
        """Prints on the main process, beside the progress bar."""
        if self.is_main:
            self._bar.write(text)

    def load_best_model(self) -> None:
        """Leaves the best evaluated model in `model` and in the output folder; without evaluations, the last."""
        bare = self.accelerator.unwrap_model(self.model)
        if self.saved_step is None or not self.recipe.load_best_model_at_end:
            self.save_model()
        elif self.saved_step != self.step:
            if self.is_main:
                load_weights(bare, self.output_dir)
            # The other processes may be on machines that do not see this folder.
            broadcast(list(bare.state_dict().values()))

    def save_model(self) -> None:
        """Writes the model and its processor into the output folder: each file replaces its forerunner whole."""
        if self.is_main:
            save_model(self.accelerator.unwrap_model(self.model), self.processor, self.output_dir)
        self.saved_step = self.step
        self.accelerator.wait_for_everyone()

    def finish(self, metrics: dict[str, Any]) -> RunResult:
        """Writes all_results.json: `metrics`, and what the training took."""
        seconds = max(self._training_seconds, 1e-9)
        results = {
            **metrics,
            "steps": self.step,
            "epoch": round(self.step / self.plan.steps_per_epoch, 6),
            "saved_step": self.saved_step,
            "stop_reason": self.stop_reason,
            "train_seconds": round(seconds, 3),
            "train_data_seconds": round(self._total_data_seconds, 3),
            "train_examples_per_second": round(self._examples / seconds, 3),
            "train_tokens_per_second": round(self._tokens / seconds, 3),
        }
        if is_compiled(self.accelerator.unwrap_model(self.model)):
            results["compilations"] = num_compilations()
        if self.is_main:
            text = to_json(results, indent=2)
            (self.output_dir / "all_results.json").write_text(text + "\n", encoding="utf-8")
        return RunResult(self.recipe.output_dir, self.step, results, self.history)


def _flat(recipe: TrainingRecipe) -> dict[str, Any]:
    """Fields as trackers take them: numbers, booleans and strings."""
    return {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in asdict(recipe).items()
    }
