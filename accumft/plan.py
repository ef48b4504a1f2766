"""Which examples make each effective batch, and how each process cuts its share of it.

Everything here is a pure function of (number of examples, effective batch, seed, epoch, processes): nothing depends on
history, so any step's window can be made at any time, and which examples meet in a step does not depend on the cut.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from accumft.errors import UserError

# Of a run that sets none of the three batch fields: small micro-batches of rows of like length pad little.
DEFAULT_EFFECTIVE_BATCH_SIZE, DEFAULT_MICRO_BATCH_SIZE = 8, 2
# Of a run that sets some of them, as transformers has it.
DEFAULT_PER_DEVICE_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How one effective batch is cut: the four numbers, consistent with each other."""

    effective_batch_size: int
    """Examples per optimizer step, over all processes."""
    per_device_train_batch_size: int
    """Examples in one micro-batch, at most."""
    gradient_accumulation_steps: int
    """Micro-batches per step on the process with the largest share."""
    num_processes: int

    def __str__(self) -> str:
        per_process = -(-self.effective_batch_size // self.num_processes)
        processes = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"
        micro = f"{self.gradient_accumulation_steps} micro-batch{'es' * (self.gradient_accumulation_steps > 1)}"
        size = -(-per_process // self.gradient_accumulation_steps)
        return f"{self.effective_batch_size} examples = {processes} x {micro} of up to {size}"


def resolve_batch_sizes(
    effective_batch_size: int | None,
    per_device_train_batch_size: int | None,
    gradient_accumulation_steps: int | None,
    num_processes: int,
) -> BatchSizes:
    """Fills in what is not given of the three batch fields, or raises a `UserError` that shows why they disagree.

    Without `effective_batch_size` it is the product of the others and the processes; with it, the accumulation steps
    follow, rounded up: the micro-batches then differ by at most one example. With none of the three, the effective
    batch is 8 on any number of processes, in micro-batches of 2.
    """
    given = {
        "effective_batch_size": effective_batch_size,
        "per_device_train_batch_size": per_device_train_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
    }
    for name, value in given.items():
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    effective, micro, steps = given.values()

    if effective is None and (micro is not None or steps is not None):
        micro, steps = micro or DEFAULT_PER_DEVICE_BATCH_SIZE, steps or 1
        return BatchSizes(micro * steps * num_processes, micro, steps, num_processes)

    if effective is None:
        effective, micro = DEFAULT_EFFECTIVE_BATCH_SIZE, DEFAULT_MICRO_BATCH_SIZE
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


def split_evenly(indices: np.ndarray, parts: int) -> list[np.ndarray]:
    """`parts` contiguous pieces whose sizes differ by at most one, larger ones first; pieces may be empty."""
    return np.array_split(indices, parts)


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

    def micro_batches(self, step: int, process_index: int, lengths: np.ndarray | None = None) -> list[np.ndarray]:
        """The micro-batches of one process in step `step`; an empty list where a short last batch leaves it none.

        Args:
            lengths: (num_examples,) tokens of every example: rows of like length then share a micro-batch, the longest
                first, so that little is padded. Which examples make the step does not depend on it.
        """
        examples, processes = self.effective_batch(step), self.batch.num_processes
        if lengths is None:
            share = split_evenly(examples, processes)[process_index]
        else:
            # Dealt in turn, so that every process has its part of the long ones.
            share = examples[np.argsort(-lengths[examples], kind="stable")][process_index::processes]
        if len(share) == 0:
            return []
        # A full share is cut into the configured number of pieces, a shorter one into proportionally fewer.
        full = -(-self.batch.effective_batch_size // processes)
        return split_evenly(share, -(-len(share) * self.batch.gradient_accumulation_steps // full))

    def window_seed(self, step: int, process_index: int) -> int:
        """Seed of the random generators for one window, 32 bits: dropout is a function of (seed, step, process)."""
        return int(np.random.SeedSequence([self.seed, step, process_index]).generate_state(1)[0])
