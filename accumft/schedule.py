"""The learning rate as a pure function of the completed optimizer steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from accumft.errors import UserError
from accumft.recipe import TrainingRecipe, refuse_unused

DEFAULT_WARMUP_RATIO = 0.1

# Without a warm-up inverse_sqrt has no length of its own; transformers takes the same.
INVERSE_SQRT_TIMESCALE = 10_000

# Share of the peak that the decay has left at `progress` 0 … 1, before min_lr_ratio.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "polynomial": lambda progress: 1.0 - progress,
    "warmup_stable_decay": lambda progress: 1.0 - progress,
}
WITHOUT_DECAY = ("constant", "constant_with_warmup")


@dataclass(frozen=True)
class Schedule:
    """The factor on the peak learning rate: `schedule(s)` is that of the update made after `s` completed steps.

    With total T and warm-up W, update s has (s + 1) / W up to s = W − 1, then the decay at progress
    (s + 1 − W) / (T + 1 − W). Neither the first nor the last update is wasted at zero: progress 1, where
    `min_lr_ratio` would be reached, belongs to the update after the last.
    """

    lr_scheduler_type: str
    total_steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    power: float = 1.0
    """Exponent of `polynomial`."""
    decay_steps: int = 0
    """Last steps in which `warmup_stable_decay` decays, linearly."""

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.lr_scheduler_type in WITHOUT_DECAY:
            return 1.0
        since_warmup = step + 1 - self.warmup_steps
        if self.lr_scheduler_type == "inverse_sqrt":
            timescale = self.warmup_steps or INVERSE_SQRT_TIMESCALE
            return max(self.min_lr_ratio, math.sqrt(timescale / (since_warmup + timescale)))
        if self.lr_scheduler_type == "warmup_stable_decay":
            progress = (step + 1 - (self.total_steps - self.decay_steps)) / (self.decay_steps + 1)
        else:
            progress = since_warmup / (self.total_steps + 1 - self.warmup_steps)
        left = DECAYS[self.lr_scheduler_type](min(1.0, max(0.0, progress))) ** self.power
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left


def build_schedule(recipe: TrainingRecipe, total_steps: int) -> Schedule:
    """The schedule of a recipe over `total_steps` updates; fields that contradict it raise a `UserError`."""
    kind = recipe.lr_scheduler_type
    if recipe.warmup_steps is not None and recipe.warmup_ratio is not None:
        raise UserError("--warmup_steps and --warmup_ratio are both set: leave one of them unset")
    if recipe.warmup_steps is not None:
        warmup, arithmetic = recipe.warmup_steps, f"--warmup_steps {recipe.warmup_steps}"
    elif recipe.warmup_ratio is not None:
        warmup = math.ceil(round(recipe.warmup_ratio * total_steps, 6))
        arithmetic = f"--warmup_ratio {recipe.warmup_ratio} of {total_steps} steps is {warmup}, which"
    else:
        warmup = 0 if kind == "constant" else min(math.ceil(DEFAULT_WARMUP_RATIO * total_steps), total_steps - 1)
        arithmetic = f"the default warm-up of {warmup} steps"
    if warmup and kind == "constant":
        raise UserError(
            f"{arithmetic} has no place in a constant schedule: use --lr_scheduler_type constant_with_warmup"
        )
    if warmup >= total_steps:
        raise UserError(
            f"{arithmetic} leaves nothing of the {total_steps} optimizer steps at the peak learning rate; lower it"
        )
    if recipe.min_lr_ratio and kind in WITHOUT_DECAY:
        raise UserError(f"--min_lr_ratio {recipe.min_lr_ratio}: the {kind} schedule does not decay")
    if kind != "polynomial":
        refuse_unused(recipe, ("lr_power",), f"--lr_scheduler_type {kind}")
    if kind != "warmup_stable_decay":
        refuse_unused(recipe, ("lr_decay_ratio",), f"--lr_scheduler_type {kind}")
    decay = 0
    if kind == "warmup_stable_decay":
        decay = math.ceil(round(recipe.lr_decay_ratio * total_steps, 6))
        if warmup + decay > total_steps:
            raise UserError(f"warm-up {warmup} + decay {decay} steps exceed the {total_steps} optimizer steps")
    return Schedule(kind, total_steps, warmup, recipe.min_lr_ratio, recipe.lr_power, decay)


def build_scheduler(optimizer: Optimizer, schedule: Schedule) -> LambdaLR:
    """A torch scheduler that follows `schedule`: call `step()` once after each update that was made.

    Make it on the bare optimizer and do not give it to `accelerator.prepare`: a prepared scheduler steps once per
    process.
    """
    return LambdaLR(optimizer, schedule)
