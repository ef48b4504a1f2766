"""The fastest token budget of a micro-batch on this machine, by trying a few at the start."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from accelerate.utils.memory import should_reduce_batch_size

from accumft.cut import Limits
from accumft.data.windows import Collate
from accumft.errors import UserError
from accumft.plan import Plan
from accumft.step import LossSum

SMALLEST_BUDGET = 256
# A larger budget is taken when it is faster by more than this share: memory has its price too.
WORTH_IT = 0.03


@dataclass(frozen=True, slots=True)
class Trial:
    """One budget that was tried."""

    max_tokens: int
    tokens_per_second: float
    """Real tokens, padding not counted; 0 where the micro-batch did not fit into memory."""


def try_budgets(
    accelerator: Accelerator,
    model: torch.nn.Module,
    dataset: Any,
    lengths: np.ndarray,
    collate: Collate,
    loss_sum: LossSum,
    *,
    largest: int,
    pad_to_multiple_of: int = 1,
    seconds: float = 8.0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Trial]:
    """Times forward and backward of micro-batches of 256 padded tokens, 512, … until more is no faster.

    Each budget is tried on the longest rows first, which need most memory, and on rows about the middle. Weights,
    buffers and random state stay as they are, and no gradient is left. On several processes all try at the same time,
    since they share a machine, and all take the slowest one's speeds.

    Args:
        model: prepared; its gradients are empty.
        lengths: (rows,) tokens of each row of `dataset`.
        largest: budget above which no step could use more.
        seconds: after which no further budget is tried.

    Raises:
        UserError: the longest row alone does not fit into memory.
    """
    bare = accelerator.unwrap_model(model)
    # Not in training mode: statistics of BatchNorm and dropout's random numbers would not stay as they are.
    was_training = bare.training
    bare.eval()
    order = np.argsort(-lengths, kind="stable")
    trials: list[Trial] = []
    started = clock()
    budget = SMALLEST_BUDGET
    while True:
        limits = Limits(max_tokens=budget, pad_to_multiple_of=pad_to_multiple_of)
        speed = _speed(accelerator, bare, dataset, lengths, order, collate, loss_sum, limits, clock)
        # All decide by the same numbers: the slowest process's, which is none where one has no memory for it.
        speeds, spent = zip(*gather_object([(speed, clock() - started)]), strict=True)
        trials.append(Trial(budget, min(speeds)))
        if budget >= largest or max(spent) > seconds or _is_enough(trials):
            break
        budget *= 2
    bare.zero_grad(set_to_none=True)
    bare.train(was_training)
    if all(trial.tokens_per_second == 0 for trial in trials):
        raise UserError(
            f"the longest row ({int(lengths.max())} tokens) alone does not fit into this device's memory: lower "
            "--max_length, or use --gradient_checkpointing or --mixed_precision"
        )
    return trials


def with_token_budget(
    plan: Plan,
    accelerator: Accelerator,
    model: torch.nn.Module,
    dataset: Any,
    lengths: np.ndarray,
    collate: Collate,
    loss_sum: LossSum,
    pad_to_multiple_of: int = 1,
) -> Plan:
    """The plan with a number where its `max_tokens_per_micro_batch` is "auto", which it prints; else the same plan."""
    if plan.batch.max_tokens_per_micro_batch != "auto":
        return plan
    share = -(-min(plan.batch.effective_batch_size, len(lengths)) // accelerator.num_processes)
    longest = int(Limits(pad_to_multiple_of=pad_to_multiple_of).padded(lengths).max())
    trials = try_budgets(
        accelerator,
        model,
        dataset,
        lengths,
        collate,
        loss_sum,
        largest=share * longest,
        pad_to_multiple_of=pad_to_multiple_of,
    )
    accelerator.print(describe_trials(trials))
    return replace(plan, batch=replace(plan.batch, max_tokens_per_micro_batch=fastest(trials)))


def fastest(trials: list[Trial]) -> int:
    """The smallest budget that no other beats by much."""
    best = max(trial.tokens_per_second for trial in trials)
    return next(trial.max_tokens for trial in trials if trial.tokens_per_second >= best * (1 - WORTH_IT))


def describe_trials(trials: list[Trial]) -> str:
    """A line for the log."""
    tried = ", ".join(
        f"{trial.max_tokens:,}: {f'{trial.tokens_per_second:,.0f}' if trial.tokens_per_second else 'no memory'}"
        for trial in trials
    )
    return (
        f"max_tokens_per_micro_batch auto: {fastest(trials):,}, the smallest within {WORTH_IT:.0%} of the fastest "
        f"(tokens/s by budget: {tried})"
    )


def _is_enough(trials: list[Trial]) -> bool:
    """Whether the last budget did not fit, or the last two were no faster than those before."""
    speeds = [trial.tokens_per_second for trial in trials]
    return speeds[-1] == 0 or (len(speeds) > 2 and max(speeds[-2:]) <= max(speeds[:-2]) * (1 + WORTH_IT))


def _speed(
    accelerator: Accelerator,
    bare: torch.nn.Module,
    dataset: Any,
    lengths: np.ndarray,
    order: np.ndarray,
    collate: Collate,
    loss_sum: LossSum,
    limits: Limits,
    clock: Callable[[], float],
) -> float:
    """Real tokens per second over two micro-batches of this budget; 0 if one does not fit into memory."""
    tokens, spent = 0, 0.0
    for first in (0, len(order) // 2):
        rows = int(limits.rows(limits.padded(lengths[order[first : first + 1]]))[0])
        # The middle rows repeat where the data set is smaller than the micro-batch.
        indices = np.resize(order[first:], rows)
        columns = dataset[indices.tolist()]
        columns.pop("row", None)
        batch = send_to_device(collate(columns), accelerator.device)
        try:
            # The first pass makes the kernels and the gradients ready, the second is timed.
            for _ in range(2):
                started = clock()
                with accelerator.autocast():
                    loss = loss_sum(bare, batch)
                loss.backward()
                _wait(accelerator.device)
                seconds = clock() - started
        except (RuntimeError, torch.OutOfMemoryError) as error:
            if not should_reduce_batch_size(error):
                raise
            bare.zero_grad(set_to_none=True)
            return 0.0
        tokens += int(lengths[indices].sum())
        spent += seconds
    return tokens / max(spent, 1e-9)


def _wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
