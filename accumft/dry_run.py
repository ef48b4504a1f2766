"""What a run would do, without doing it: steps, learning rate, cut, balance, memory, for any number of processes."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from accumft.errors import UserError
from accumft.memory import GIB, MemoryEstimate, estimate_memory, fits
from accumft.recipe import TrainingRecipe, refuse_unused
from accumft.report.plots import plot_plan
from accumft.report.terminal import line_plot
from accumft.run import RunResult
from accumft.schedule import Schedule
from accumft.window_plan import StepTable, WindowPlan

# Steps of the first epoch whose plain cut, by chance and not by length, is compared.
_STEPS_COMPARED = 200
_BYTES_OF_A_GRADIENT = 4  # float32, in mixed precision too


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run. `print` shows it, a notebook shows its table, `plot` draws it."""

    recipe: TrainingRecipe
    window_plan: WindowPlan
    steps: StepTable
    """Of the first epoch, or what the run has of it."""
    schedule: Schedule
    parameters: int
    trainable: int
    memory: MemoryEstimate
    """Of one device, at the largest micro-batch."""
    precision: str

    @property
    def padding(self) -> float:
        """Tokens computed for each real one."""
        return float(self.steps.padded_tokens.sum() / self.steps.tokens.sum())

    @cached_property
    def plain_padding(self) -> float:
        """The same for rows in random order, padded to the longest of a micro-batch of the same limits."""
        plan, limits = self.window_plan.plan, self.window_plan.limits
        padded = real = 0
        for step in range(min(plan.steps_per_epoch, _STEPS_COMPARED)):
            lengths = self.window_plan.lengths[plan.effective_batch(step)]
            real += int(lengths.sum())
            rows = longest = 0
            for length in limits.padded(lengths.astype(np.int64)).tolist():
                if rows >= int(limits.rows(np.array([max(longest, length)]))[0]):
                    padded, rows, longest = padded + rows * longest, 0, 0
                rows, longest = rows + 1, max(longest, length)
            padded += rows * longest
        return padded / real

    @property
    def imbalance(self) -> float:
        """How much longer the slowest process of a step takes than the mean one, on average: 1 is none."""
        return float((self.steps.cost.max(axis=1) / self.steps.cost.mean(axis=1)).mean())

    @property
    def fits(self) -> bool | None:
        """Whether it fits `device_memory_gb`; None where that is not given."""
        if self.recipe.device_memory_gb is None:
            return None
        return fits(self.memory, self.recipe.device_memory_gb, self.window_plan.plan.batch.num_processes)

    def rows(self) -> list[tuple[str, str]]:
        """What there is to know, in words and numbers."""
        plan, counts = self.window_plan.plan, self.steps.micro_batches
        processes = plan.batch.num_processes
        rows, tokens = self.steps.largest
        kept = {
            "weights": self.memory.weights,
            "gradients": self.memory.gradients,
            "optimizer": self.memory.optimizer,
            "activations": max(self.memory.activations, self.memory.update),
        }
        found = [
            ("examples", f"{plan.num_examples:,}"),
            ("effective batch", str(plan.batch)),
            (
                "steps",
                f"{plan.total_steps:,} ({plan.steps_per_epoch:,} an epoch), {self.schedule.warmup_steps:,} warm up",
            ),
            ("micro-batches a step and process", f"{counts.min()} min, {counts.mean():.1f} mean, {counts.max()} max"),
            ("largest micro-batch", f"{rows * tokens:,} tokens"),
            (
                "tokens computed for each real one",
                f"{self.padding:.3f} (padded in random order {self.plain_padding:.2f})",
            ),
            ("slowest process against the mean", f"{self.imbalance:.3f}" if processes > 1 else "one process"),
            ("parameters", f"{self.parameters / 1e6:.1f} M, {self.trainable / 1e6:.1f} M of them trained"),
            (
                "reduced between processes a step",
                f"{self.trainable * _BYTES_OF_A_GRADIENT / 1e6:,.0f} MB" if processes > 1 else "nothing",
            ),
            (
                f"memory of a device ({self.precision}), estimated",
                f"{self.memory.total / GIB:.2f} GiB = "
                + " + ".join(f"{name} {size / GIB:.2f}" for name, size in kept.items()),
            ),
        ]
        if self.recipe.device_memory_gb is not None:
            needed = self.memory.needed(processes) / GIB
            verdict = "fits" if self.fits else "does NOT fit: lower max_tokens_per_micro_batch or max_length"
            found.append(
                (f"on {self.recipe.device_memory_gb:g} GB", f"{verdict} ({needed:.2f} GiB with what the driver needs)")
            )
        return found

    def learning_rates(self) -> np.ndarray:
        """(total steps,) learning rate of each update."""
        total = self.window_plan.plan.total_steps
        return np.array([self.recipe.learning_rate * self.schedule(step) for step in range(total)])

    def __str__(self) -> str:
        curve = line_plot(self.learning_rates(), y_format=".3g")
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        lines = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
        return f"{lines}\n\nlearning rate by step\n{curve}"

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self.rows()
        )
        return f"<table>{cells}</table>"

    def plot(self, path: str | Path) -> None:
        """Draws learning rate, padding and balance into a PNG file."""
        plot_plan(
            self.learning_rates(),
            self.steps.padded_tokens / self.steps.tokens,
            self.plain_padding,
            self.steps.cost.max(axis=1) / self.steps.cost.mean(axis=1),
            path,
        )


def make_run_plan(
    recipe: TrainingRecipe, window_plan: WindowPlan, schedule: Schedule, model: Any, device_type: str, precision: str
) -> RunPlan:
    """The plan of a run, before its model is prepared.

    Args:
        model: its weights are not touched.
        device_type: "cuda" or "cpu": whose memory is estimated.
        precision: "no", "fp16" or "bf16".
    """
    steps = window_plan.table(max_steps=window_plan.plan.total_steps)
    memory = estimate_memory(
        model,
        *steps.largest,
        optim=recipe.optim,
        mixed_precision=precision,  # type: ignore[arg-type]
        gradient_checkpointing=recipe.gradient_checkpointing,
        sgd_momentum=recipe.sgd_momentum,
        device="cpu" if device_type == "cpu" else "cuda",
    )
    parameters = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return RunPlan(
        recipe,
        window_plan,
        steps,
        schedule,
        sum(count for count, _ in parameters),
        sum(count for count, trained in parameters if trained),
        memory,
        {"no": "float32"}.get(precision, precision),
    )


def check_dry_run(recipe: TrainingRecipe) -> None:
    """Raises a `UserError` for fields of a dry run without one, and for a measurement of a machine that is not here."""
    if not recipe.dry_run:
        refuse_unused(recipe, ("num_processes_planned", "device_memory_gb"), "no --dry_run")
    elsewhere = recipe.num_processes_planned or recipe.device_memory_gb or recipe.mixed_precision == "fp16"
    if recipe.dry_run and recipe.max_tokens_per_micro_batch == "auto" and elsewhere:
        raise UserError(
            "--max_tokens_per_micro_batch auto: would be measured on this machine and not on the one that is planned "
            "for; give a number"
        )


def planned_device(recipe: TrainingRecipe, accelerator: Accelerator) -> str:
    """The device that a run is planned for: a GPU where a dry run speaks of one, else this launch's."""
    of_gpu = recipe.dry_run and (recipe.device_memory_gb is not None or recipe.mixed_precision == "fp16")
    return "cuda" if of_gpu else accelerator.device.type


def dry_run(
    recipe: TrainingRecipe, window_plan: WindowPlan, schedule: Schedule, model: Any, accelerator: Accelerator
) -> RunResult:
    """Prints and draws the plan of a run: what a recipe returns instead of training."""
    precision = recipe.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    plan = make_run_plan(recipe, window_plan, schedule, model, planned_device(recipe, accelerator), precision)
    if accelerator.is_main_process:
        picture = picture_of(recipe)
        plan.plot(picture)
        print(f"{plan}\n\ndrawn in {picture}; nothing was trained")
    return RunResult(recipe.output_dir, 0, {}, [], plan)


def picture_of(recipe: TrainingRecipe) -> Path:
    """Where the picture of a dry run goes: beside the output folder, since that is the run's own."""
    folder = Path(recipe.output_dir).expanduser()
    return folder.with_name(f"{folder.name}-plan.png")
