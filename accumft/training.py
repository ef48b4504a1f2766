"""What every recipe does in the same order before its loop: the accelerator, and all that the first step needs."""

from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

from accumft.agreement import check_agreement, versions
from accumft.compute import warm_up
from accumft.cut import CostModel, Limits
from accumft.data.windows import Collate, WindowDataset, lengths_of
from accumft.dry_run import check_dry_run, dry_run, planned_device
from accumft.evaluation import evaluation_limits
from accumft.launch import make_accelerator, num_processes, prepare
from accumft.models import communicates_in_forward
from accumft.optim import build_optimizer
from accumft.plan import BatchSizes, Plan, batch_sizes_of
from accumft.probe import with_token_budget
from accumft.recipe import TrainingRecipe
from accumft.report.overview import describe_run
from accumft.run import RunResult
from accumft.schedule import Schedule, build_scheduler
from accumft.step import LossSum
from accumft.window_plan import WindowPlan


def begin(recipe: TrainingRecipe) -> tuple[Accelerator, BatchSizes]:
    """The accelerator and the batch of a checked recipe, once it is sure that every process has the same recipe."""
    batch = batch_sizes_of(recipe, recipe.num_processes_planned or num_processes())
    accelerator = make_accelerator(
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        # A dry run may speak of a precision that this machine does not have.
        mixed_precision="no" if recipe.dry_run else recipe.mixed_precision,
        report_to=recipe.report_to,
        output_dir=recipe.output_dir,
    )
    check_agreement(accelerator, {f"--{name}": value for name, value in asdict(recipe).items()} | versions())
    check_dry_run(recipe)
    return accelerator, batch


class Training(NamedTuple):
    """What stands ready for the first step."""

    model: Any
    """Prepared."""
    optimizer: Any
    """Prepared."""
    scheduler: LambdaLR
    plan: Plan
    windows: WindowDataset
    eval_limits: Limits
    """Of one forward of an evaluation."""


def set_up(
    recipe: TrainingRecipe,
    accelerator: Accelerator,
    model: torch.nn.Module,
    plan: Plan,
    schedule: Schedule,
    dataset: Any,
    collate: Collate,
    loss_sum: LossSum,
    packed: Collate | None = None,
) -> Training | RunResult:
    """Optimizer, windows, token budget; a dry run ends here, and its result is returned.

    Args:
        model: not prepared yet.
        dataset: to train on, with a column "length".
        collate: makes padded batches, for whatever is tried out.
        packed: makes packed micro-batches, which the windows are then made of.
    """
    lengths, multiple = lengths_of(dataset), getattr(recipe, "pad_to_multiple_of", None) or 1
    optimizer = build_optimizer(model, recipe)
    scheduler = build_scheduler(optimizer, schedule)
    prepared, optimizer = prepare(accelerator, model, optimizer)
    plan = with_token_budget(plan, accelerator, prepared, dataset, lengths, collate, loss_sum, multiple)
    cost = CostModel.of(getattr(model, "config", None), planned_device(recipe, accelerator))
    window_plan = WindowPlan(plan, lengths, cost, multiple, communicates_in_forward(model), packed is not None)
    if recipe.dry_run:
        return dry_run(recipe, window_plan, schedule, model, accelerator)
    eval_limits = evaluation_limits(recipe.per_device_eval_batch_size, plan.batch, multiple)
    accelerator.print(describe_run(recipe, window_plan, schedule, accelerator, model))
    windows = WindowDataset(dataset, window_plan, packed or collate, accelerator.process_index)
    if recipe.torch_compile:
        warm_up(accelerator, prepared, windows[0].micro_batches, loss_sum)
    return Training(prepared, optimizer, scheduler, plan, windows, eval_limits)
