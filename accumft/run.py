"""What is the same for every task around the loop: output folder, log, progress, evaluation when due, best model."""

import math
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import distributed
from torch.optim.lr_scheduler import LambdaLR

from accumft.agreement import check_agreement, versions
from accumft.compute import is_compiled, num_compilations
from accumft.data.windows import Window, WindowDataset
from accumft.errors import EmptyWindowError, NonFiniteLossError, NotEnoughMemoryError, OutputError
from accumft.keeping import Keeper
from accumft.memory_limit import MemoryLimit
from accumft.outputs import to_json
from accumft.plan import Plan, resolved_values
from accumft.ranks import RankWatch
from accumft.recipe import TrainingRecipe
from accumft.run_folder import RunFolder
from accumft.signals import Interrupted, StopSignals
from accumft.state import Progress, load_state, on_main
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

    with Run(recipe, accelerator, model, optimizer, scheduler, plan, tokenizer, best, evaluate) as run:
        for window in run.windows(WindowDataset(dataset, window_plan, collate, accelerator.process_index)):
            result = train_step(
                accelerator, model, optimizer, window, loss_sum, num_items, recipe.max_grad_norm, run.memory
            )
            if result.stepped:
                scheduler.step()
            run.after_step(result)
        run.load_best_model()
    """

    def __init__(
        self,
        recipe: TrainingRecipe,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        plan: Plan,
        processor: Any,
        best: tuple[str, bool],
        evaluate: Evaluate | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        stateful: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            model, optimizer: prepared. scheduler: not prepared.
            processor: the tokenizer, saved beside the model.
            best: (metric that picks the best model, whether larger is better).
            evaluate: called on every process at each evaluation; None: the run has none.
            fingerprint: of the data, by name: a run resumes with the same one only.
            stateful: further objects with `state_dict` and `load_state_dict`, by name, that belong to the state of the
                run (an average of the weights, say).
        """
        self.recipe, self.accelerator, self.plan = recipe, accelerator, plan
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.best_metric, self.greater_is_better = best
        self.evaluate = evaluate
        self.stateful = dict(stateful or {})
        self.output_dir = Path(recipe.output_dir).expanduser().resolve()
        self.progress = Progress(
            best_metric=self.best_metric,
            greater_is_better=self.greater_is_better,
            fingerprint=dict(fingerprint or {}),
            num_processes=accelerator.num_processes,
            versions=versions(),
        )
        self.keeper = Keeper(
            accelerator,
            model,
            optimizer,
            processor,
            self.output_dir,
            recipe.save_total_limit,
            lambda: self.recipe_values,
            self.stateful,
            self._tell,
        )
        self.memory = MemoryLimit()
        """What the run knows of its devices' memory, for `train_step`."""
        self._attempts = 0
        self._data_seconds = 0.0
        self._started = 0.0
        self._deadline = math.inf
        self._folder = RunFolder(self.output_dir)
        self._bar: Any = None
        self._open = ExitStack()
        self._signals = StopSignals()

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return bool(self.accelerator.is_main_process)

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.progress.step

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; on processes other than the first, empty."""
        return self._folder.history

    @property
    def saved_step(self) -> int | None:
        """Step of the model in the output folder, as far as this process knows."""
        return self.keeper.exported

    @property
    def recipe_values(self) -> dict[str, Any]:
        """The resolved recipe by field name, as recipe.yaml has it."""
        return resolved_values(self.recipe, self.plan.batch, self.accelerator.mixed_precision)

    def __enter__(self) -> "Run":
        from tqdm.auto import tqdm

        # Its processes must be of one mind before any of them writes.
        check_agreement(self.accelerator, {f"data: {name}": v for name, v in self.progress.fingerprint.items()})
        with ExitStack() as stack:
            stack.enter_context(RankWatch(self.accelerator))
            stack.enter_context(self._signals)
            stack.callback(self._close)
            self._start()
            if self.recipe.report_to:
                arguments = {"wandb": {"id": self.progress.run_id, "resume": "allow"}}
                self.accelerator.init_trackers(self.recipe.run_name, _flat(self.recipe), arguments)
            self._bar = tqdm(
                total=self.plan.total_steps,
                initial=self.step,
                unit="step",
                disable=not self.is_main,
                dynamic_ncols=True,
            )
            self._deadline = time.monotonic() + 60 * (self.recipe.max_runtime or math.inf)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lossless = isinstance(error, (NonFiniteLossError, EmptyWindowError, NotEnoughMemoryError))
        if lossless and getattr(error, "everywhere", True) and self.step:
            # The weights are those before the step: what was learnt so far is not lost.
            self._save_and_wait()
        self._open.__exit__(kind, error, traceback)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        # Not end_training: it takes the process group with it, which a next run in these processes needs.
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self._folder.close()

    def _start(self) -> None:
        """Claims the output folder, and takes the state over from a checkpoint if the recipe wants it."""
        fresh, total, values = self.progress, self.plan.total_steps, self.recipe_values
        checkpoint = on_main(self.accelerator, lambda: self._folder.open(self.recipe, values, fresh.fingerprint, total))
        if checkpoint is not None:
            things = (self.accelerator, self.model, self.optimizer, self.scheduler, self.stateful)
            self.progress = load_state(checkpoint, *things)
        # Only now, when the state is known to fit, is anything in the folder changed.
        found = on_main(self.accelerator, lambda: self._folder.begin(checkpoint, values, total))
        fresh.run_id = on_main(self.accelerator, lambda: uuid.uuid4().hex)
        if found is None:
            return
        if found.changes:
            changed = f"from step {self.step} on: {'; '.join(found.changes)}"
            self.progress.changes = [*self.progress.changes, changed]
            self._folder.write({"step": self.step, **self._epoch(self.step), "resumed_with": found.changes})
            before = [row["learning_rate"] for row in self.history if "learning_rate" in row][-1:]
            if before and not math.isclose(before[0], now := self.scheduler.get_last_lr()[0], rel_tol=0.2):
                self.accelerator.print(f"learning rate: {before[0]:.3g} before, {now:.3g} from here on")
        for line in self.progress.go_on_as(fresh, self.recipe.early_stopping_patience, self.evaluate is not None):
            self.accelerator.print(line)
        if found.best_is_lost and self.recipe.load_best_model_at_end and self.progress.best_step is not None:
            self.accelerator.print(
                f"the best model so far (step {self.progress.best_step}) has no whole checkpoint any more: the best "
                "one is picked among the evaluations from here on"
            )
            self.progress.best_value = self.progress.best_step = self.progress.best_loss = None
        if found.in_place:
            self.keeper.newest = self.step
        else:  # another run, which the trackers see as such
            self.progress.run_id = fresh.run_id

    def windows(self, dataset: WindowDataset) -> Iterator[Window]:
        """This process's windows on the device, one for each optimizer step, until the run ends.

        A window whose update fp16 skipped comes again: no example of an epoch is lost to an overflow.
        """
        if self.step == self.plan.total_steps:
            self.print(f"all {self.step} steps were made before: nothing is left but the report")
        if self.progress.pending_evaluation:
            self._evaluate()
        device = self.accelerator.device
        loader = iter(dataset.loader(self.step, self.recipe.dataloader_num_workers, pin_memory=device.type == "cuda"))
        started = time.perf_counter()
        while self.step < self.plan.total_steps and self.progress.stop_reason is None:
            window = self._next(loader).to(device)
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
        if signum := self._asked_to_stop():  # in the last evaluation
            self._end_early(signum)
        # What is still to be done, a killed run does again from its last checkpoint.
        self._signals.close()

    def _next(self, loader: Iterator[Window]) -> Window:
        try:
            return next(loader)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            self.keeper.save(self.progress)
            raise OutputError(
                f"step {self.step + 1}: {str(error).splitlines()[0]}; a checkpoint of step {self.step} is saved: run "
                "again with --resume_from_checkpoint true"
            ) from error

    def after_step(self, result: StepResult) -> None:
        """Logs the step, counts it if it was made, and does what is due: checkpoint, evaluation, the end.

        Args:
            result: what `train_step` returned.

        Raises:
            Interrupted: a signal or `max_runtime` asked the run to end, on whatever process; a checkpoint is saved.
        """
        self._attempts += 1
        progress = self.progress
        seconds = time.perf_counter() - self._started
        progress.training_seconds += seconds
        progress.data_seconds += self._data_seconds
        number = self.step + 1
        if result.stepped:
            progress.step = number
            progress.tokens += result.tokens
            progress.examples += result.examples
            self._bar.update(1)
        self._bar.set_postfix(loss=f"{result.loss:.4f}", lr=f"{result.learning_rate:.2e}", refresh=False)
        is_last = self.step == self.plan.total_steps
        if number % self.recipe.logging_steps == 0 or number == 1 or is_last or not result.stepped:
            times = {"data_seconds": round(self._data_seconds, 6), "seconds": round(seconds, 6)}
            self.log({"step": number, **self._epoch(number), **asdict(result), **times})
        every = self.plan.steps_per_epoch
        evaluation_due = self.evaluate is not None and (is_last or self.step % (self.recipe.eval_steps or every) == 0)
        save_due = is_last or self.step % (self.recipe.save_steps or every) == 0
        # Before the evaluation, which may take long: what is killed in it makes it again.
        progress.pending_evaluation = result.stepped and evaluation_due
        signum = self._asked_to_stop()
        if signum:
            self._end_early(signum)
        if result.stepped and save_due:
            self.keeper.save(progress)
        if progress.pending_evaluation:
            self._evaluate()

    def _end_early(self, signum: int) -> NoReturn:
        self._save_and_wait()
        why = signal.Signals(signum).name if self._signals.signum else f"--max_runtime {self.recipe.max_runtime}"
        saved = f"a checkpoint of step {self.step} is saved" if self.keeper.newest == self.step else "nothing was saved"
        self.print(f"{why}: {saved}; the same command with --resume_from_checkpoint true goes on")
        raise Interrupted(signum)

    def _save_and_wait(self) -> None:
        """Before every process ends: one that is gone must not end the one that still writes."""
        self.keeper.save(self.progress)
        self.accelerator.wait_for_everyone()

    def _epoch(self, step: int) -> dict[str, float]:
        return {"epoch": round(step / self.plan.steps_per_epoch, 6)}

    def _asked_to_stop(self) -> int:
        """The signal to end with, the same on all processes; 0: none."""
        signum = self._signals.signum
        if time.monotonic() >= self._deadline:
            signum = signum or signal.SIGTERM
        if self.accelerator.num_processes == 1:
            return signum
        largest = torch.tensor(signum, device=self.accelerator.device)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return int(largest)

    def _evaluate(self) -> None:
        assert self.evaluate is not None
        progress = self.progress
        started = time.perf_counter()
        # Whether a best model could be kept, only the first process knows: what it knows holds for all.
        payload: list[Any] = [self.evaluate(), progress.best_value, progress.best_step, progress.best_loss]
        broadcast_object_list(payload)
        metrics, progress.best_value, progress.best_step, progress.best_loss = payload
        seconds = round(time.perf_counter() - started, 6)
        row = {f"eval_{name}": value for name, value in metrics.items()}
        self.log({"step": self.step, **self._epoch(self.step), **row, "eval_seconds": seconds})
        progress.pending_evaluation = False
        before = (progress.best_value, progress.best_step, progress.best_loss)
        value, patience = metrics.get(self.best_metric), self.recipe.early_stopping_patience
        better = progress.take(value, metrics.get("loss"), self.greater_is_better, patience)
        if better and self.recipe.load_best_model_at_end and not self.keeper.keep_best(progress):
            progress.best_value, progress.best_step, progress.best_loss = before
        shown = "undefined" if value is None else f"{value:.4f}{' (best)' if better else ''}"
        loss = "" if self.best_metric == "loss" else f"eval_loss {metrics.get('loss', math.nan):.4f}, "
        stopping = f"; stopping: {progress.stop_reason}" if progress.stop_reason else ""
        epoch = self._epoch(self.step)["epoch"]
        self.print(f"step {self.step} (epoch {epoch:.2f}): {loss}eval_{self.best_metric} {shown}{stopping}")

    def log(self, row: dict[str, Any]) -> None:
        """Adds a row to metrics.jsonl, the history and the trackers, at the row's "step"."""
        wanted = self._folder.write(row)
        if self.recipe.report_to and wanted:
            numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
            self.accelerator.log(numbers, step=row["step"])

    def print(self, text: str) -> None:
        """Prints on the main process, beside the progress bar."""
        if self.is_main:
            self._bar.write(text)

    def _tell(self, row: dict[str, Any], text: str) -> None:
        """What the keeper, on the first process, has to say."""
        if row:
            self._folder.write({**row, **self._epoch(row["step"])})
        if text:
            self.print(text)

    def load_best_model(self) -> None:
        """Leaves the best evaluated model in `model` and in the output folder; without evaluations, the last."""
        self.keeper.finish(self.progress, self.recipe.load_best_model_at_end)

    def finish(self, metrics: dict[str, Any]) -> RunResult:
        """Writes all_results.json: `metrics`, and what the training took."""
        seconds = max(self.progress.training_seconds, 1e-9)
        results = {
            **metrics,
            "steps": self.step,
            "epoch": round(self.step / self.plan.steps_per_epoch, 6),
            "saved_step": self.saved_step,
            "stop_reason": self.progress.stop_reason,
            "train_seconds": round(seconds, 3),
            "train_data_seconds": round(self.progress.data_seconds, 3),
            "train_examples_per_second": round(self.progress.examples / seconds, 3),
            "train_tokens_per_second": round(self.progress.tokens / seconds, 3),
        }
        if self.progress.changes:
            results["changed_on_resume"] = self.progress.changes
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
