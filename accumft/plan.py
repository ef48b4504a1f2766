"""Which examples make each effective batch, and how each process cuts its share of it.

Everything here is a pure function of (number of examples, effective batch, seed, epoch, and for the cut alone lengths,
limits and processes): nothing depends on history, so any step's window can be made at any time, and which examples meet
in a step does not depend on the cut.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from accumft.cut import Limits
from accumft.errors import UserError
from accumft.recipe import TrainingRecipe

DEFAULT_EFFECTIVE_BATCH_SIZE = 8
# Padded tokens of a micro-batch where nothing is said of micro-batches: enough for the matrix products of a CPU, and
# little enough for any device.
DEFAULT_TOKENS = 1024
# Examples of a micro-batch where only the accumulation steps are given, as transformers has it.
DEFAULT_PER_DEVICE_BATCH_SIZE = 8

MAXIMUM = 2**31 - 1  # of examples or tokens

TokenBudget = int | Literal["auto"]


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How one effective batch is cut: numbers that are consistent with each other."""

    effective_batch_size: int
    """Examples per optimizer step, over all processes."""
    per_device_train_batch_size: int | None
    """Examples in one micro-batch, at most; None: the tokens are the limit."""
    gradient_accumulation_steps: int
    """What the Accelerator is made with: with a limit of examples, the micro-batches that the largest share needs; with
    a limit of tokens 1, since their number changes from step to step."""
    num_processes: int
    max_tokens_per_micro_batch: TokenBudget | None = None
    """Padded tokens in one micro-batch, at most; "auto": to be measured; None: the examples are the limit."""

    def __str__(self) -> str:
        processes = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"
        if self.max_tokens_per_micro_batch == "auto":
            limit = "as many tokens as is fastest"
        elif self.max_tokens_per_micro_batch is not None:
            limit = f"{self.max_tokens_per_micro_batch:,} tokens"
        else:
            limit = f"{self.per_device_train_batch_size} examples"
        return f"{self.effective_batch_size} examples over {processes}, in micro-batches of up to {limit}"

    def limits(self, pad_to_multiple_of: int = 1) -> Limits:
        """What the planner keeps to."""
        if self.max_tokens_per_micro_batch == "auto":
            raise ValueError("the token budget is still to be measured")
        return Limits(self.per_device_train_batch_size, self.max_tokens_per_micro_batch, pad_to_multiple_of)


def resolve_batch_sizes(
    effective_batch_size: int | None,
    per_device_train_batch_size: int | None,
    gradient_accumulation_steps: int | None,
    num_processes: int,
    max_tokens_per_micro_batch: TokenBudget | None = None,
) -> BatchSizes:
    """Fills in what is not given of the batch fields, or raises a `UserError` that shows why they disagree.

    Micro-batches are limited by tokens (`max_tokens_per_micro_batch`; 1,024 where nothing is said), or by examples
    where one of the two other fields is given. Without `effective_batch_size` it is the product of those two and the
    processes; with it, the accumulation steps follow, rounded up. With none of them it is 8 on any number of processes.
    """
    given = {
        "effective_batch_size": effective_batch_size,
        "per_device_train_batch_size": per_device_train_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
    }
    for name, value in [*given.items(), ("max_tokens_per_micro_batch", max_tokens_per_micro_batch)]:
        if value is not None and value != "auto" and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
        if value is not None and value != "auto" and value > MAXIMUM:
            raise UserError(f"--{name} {value}: must be at most {MAXIMUM:,}")
    effective, micro, steps = given.values()

    if micro is None and steps is None:
        tokens = DEFAULT_TOKENS if max_tokens_per_micro_batch is None else max_tokens_per_micro_batch
        return BatchSizes(effective or DEFAULT_EFFECTIVE_BATCH_SIZE, None, 1, num_processes, tokens)
    if max_tokens_per_micro_batch is not None:
        other = "per_device_train_batch_size" if micro is not None else "gradient_accumulation_steps"
        raise UserError(
            f"--max_tokens_per_micro_batch {max_tokens_per_micro_batch} and --{other} {given[other]}: two ways to "
            "limit a micro-batch; leave one of them unset"
        )
    if effective is None:
        micro, steps = micro or DEFAULT_PER_DEVICE_BATCH_SIZE, steps or 1
        return BatchSizes(micro * steps * num_processes, micro, steps, num_processes)

    share = -(-effective // num_processes)
    where = f"effective_batch_size {effective} over {num_processes} process(es) is up to {share} example(s) each"
    if micro is None and steps is not None:
        if steps > share:
            raise UserError(f"{where}: too few for --gradient_accumulation_steps {steps}; leave it unset")
        return BatchSizes(effective, -(-share // steps), steps, num_processes)
    micro = min(micro or DEFAULT_PER_DEVICE_BATCH_SIZE, share)
    needed = -(-share // micro)
    if steps is not None and steps != needed:
        asked = given["per_device_train_batch_size"]
        raise UserError(
            f"{where}: {needed} micro-batch(es) at --per_device_train_batch_size {asked}, but "
            f"--gradient_accumulation_steps is {steps} ({asked} x {steps} x {num_processes} = "
            f"{(asked or 0) * steps * num_processes}, not {effective}); leave one of the three unset"
        )
    return BatchSizes(effective, micro, needed, num_processes)


def batch_sizes_of(recipe: TrainingRecipe, num_processes: int) -> BatchSizes:
    """`resolve_batch_sizes` of a recipe's fields."""
    return resolve_batch_sizes(
        recipe.effective_batch_size,
        recipe.per_device_train_batch_size,
        recipe.gradient_accumulation_steps,
        num_processes,
        recipe.max_tokens_per_micro_batch,
    )


def resolved_values(recipe: TrainingRecipe, batch: BatchSizes, mixed_precision: Any) -> dict[str, Any]:
    """The recipe by field name with what was resolved filled in, as YAML has it: it repeats the run on any number of
    processes."""
    by_steps = recipe.per_device_train_batch_size is None and recipe.gradient_accumulation_steps is not None
    resolved = replace(
        recipe,
        effective_batch_size=batch.effective_batch_size,
        # What "auto" found; what is unset stays so, and a flag for rows can take its place.
        max_tokens_per_micro_batch=recipe.max_tokens_per_micro_batch and batch.max_tokens_per_micro_batch,
        # One of the two follows from the other on whatever number of processes repeats the run.
        per_device_train_batch_size=None if by_steps else batch.per_device_train_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps if by_steps else None,
        mixed_precision=mixed_precision,
        resume_from_checkpoint=None,
    )
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(resolved).items()}


def random_order(n: int, seed: int, stream: int = 0) -> np.ndarray:
    """The numbers 0 to n − 1, int64, in an order that depends on n, the seed and the stream alone.

    Sorts raw 64-bit draws: NumPy guarantees a bit generator's raw stream between versions, but not what
    `Generator.permutation` makes of it.
    """
    return np.argsort(np.random.PCG64([seed % 2**64, stream]).random_raw(n), kind="stable")


@lru_cache(maxsize=2)
def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: a permutation of 0 … num_examples − 1, int64, read-only."""
    order = random_order(num_examples, seed, epoch)
    order.flags.writeable = False
    return order


@dataclass(frozen=True, slots=True)
class Plan:
    """The examples of every optimizer step of a run."""

    num_examples: int
    batch: BatchSizes
    seed: int
    total_steps: int
    """Optimizer steps of the whole run."""

    @classmethod
    def of(cls, num_examples: int, batch: BatchSizes, seed: int, num_train_epochs: float, max_steps: int) -> "Plan":
        """The plan of a run of `max_steps` steps if positive, else of `num_train_epochs` passes over the data."""
        if num_examples < 1:
            raise UserError("there are no training examples")
        if max_steps == 0 or max_steps < -1:
            raise UserError(f"--max_steps {max_steps}: must be at least 1, or -1 for --num_train_epochs to decide")
        if max_steps < 0 and not (0 < num_train_epochs < math.inf):
            raise UserError(f"--num_train_epochs {num_train_epochs}: must be positive and finite")
        steps_per_epoch = -(-num_examples // batch.effective_batch_size)
        # Rounded first: 0.3 epochs of 10 steps are 3 steps although 0.3 * 10 may come out above 3.
        steps = max_steps if max_steps > 0 else math.ceil(round(num_train_epochs * steps_per_epoch, 6))
        return cls(num_examples, batch, seed, steps)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data, the short last one included."""
        return -(-self.num_examples // self.batch.effective_batch_size)

    def effective_batch(self, step: int) -> np.ndarray:
        """Examples of optimizer step `step` (from 0), over all processes; at an epoch's end it may be short."""
        epoch, position = divmod(step, self.steps_per_epoch)
        size = self.batch.effective_batch_size
        return epoch_order(self.num_examples, self.seed, epoch)[position * size : (position + 1) * size]

    def window_seed(self, step: int, process_index: int) -> int:
        """Seed of the random generators for one window, 32 bits: dropout is a function of (seed, step, process)."""
        return int(np.random.SeedSequence([self.seed, step, process_index]).generate_state(1)[0])
