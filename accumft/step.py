"""One optimizer step: window → exact gradient → clip → update. The only code that scales a loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from accumft.data.windows import Batch, Window
from accumft.embedding import window_embedding
from accumft.memory_limit import MemoryLimit
from accumft.reduction import agree, sum_gradients
from accumft.replay import Start
from accumft.retry import Attempt, raise_unless_out_of_memory, until_it_fits
from accumft.update import StepResult, empty, precise, reduce_counts, update

LossSum = Callable[[Any, Batch], torch.Tensor]
"""(model, batch) → the sum of the batch's losses over its items, a scalar."""
NumItems = Callable[[Batch], torch.Tensor | float]
"""batch → what the sum is to be divided by, from the labels alone: a count, or a sum of weights."""


def train_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Window | Sequence[Batch],
    loss_sum: LossSum,
    num_items: NumItems,
    max_grad_norm: float | None = None,
    memory: MemoryLimit | None = None,
) -> StepResult:
    """Makes one optimizer step with the gradient of Σ loss_sum / Σ num_items over every process and micro-batch.

    That is what one process would compute on the whole effective batch in one forward, however it is cut. Where a
    micro-batch runs out of memory, on any process, nothing of the attempt stays and the window runs again, cut smaller.

    Args:
        accelerator: its `gradient_accumulation_steps` may be any number; the window decides.
        model: prepared (`accumft.launch.prepare`, or `accelerator.prepare`).
        optimizer: prepared.
        window: this process's micro-batches on the device. Every process calls with one, of any length ≥ 1.
        loss_sum: see `LossSum`.
        num_items: see `NumItems`.
        max_grad_norm: L2 norm to clip the whole gradient to, once; None: not clipped.
        memory: what is known of the limits of memory, kept from step to step; None: nothing.

    Raises:
        EmptyWindowError: the effective batch has no items, on any process.
        NonFiniteLossError: the loss or the gradient is not finite and no fp16 scaler is there to skip the update, or
            fp16 overflows at every scale. The weights are untouched, and every process raises.
        NotEnoughMemoryError: a single row does not fit. The weights are untouched, and every process raises.
    """
    memory = MemoryLimit() if memory is None else memory
    parameters = [parameter for parameter in accelerator.unwrap_model(model).parameters() if parameter.requires_grad]

    def attempt(window: Window, _: Start) -> Attempt[_Sums]:
        totals = reduce_counts(accelerator, window, _items(accelerator, window, num_items))
        if totals[0] == 0.0:
            raise empty(window, totals[1])
        losses, failed = _accumulate(accelerator, model, window, loss_sum, totals[0])
        went_well, loss, used = agree(accelerator, parameters, None if failed is not None else losses.sum())
        return Attempt(_Sums(totals, losses, loss, used) if went_well else None, failed)

    fitted = until_it_fits(accelerator, model, window, memory, attempt)
    sums = fitted.found
    sum_gradients(accelerator, parameters, sums.used)
    return update(
        accelerator,
        model,
        optimizer,
        fitted.window,
        losses=sums.losses,
        loss=sums.loss / sums.totals[0],
        counts=sums.totals,
        max_grad_norm=max_grad_norm,
        oom_retries=fitted.retries,
        micro_batch_limit=memory.smallest,
    )


@dataclass(frozen=True, slots=True)
class _Sums:
    """What the forwards and backwards of a window found."""

    totals: list[float]
    """See `reduce_counts`."""
    losses: torch.Tensor
    """(micro-batches,) sums of losses, of this process."""
    loss: float
    """Sum of the losses of all processes."""
    used: list[bool]
    """For each parameter whether any process has a gradient."""


def _accumulate(
    accelerator: Accelerator, model: torch.nn.Module, window: Window, loss_sum: LossSum, items: float
) -> tuple[torch.Tensor, int | None]:
    """Forward and backward of a window's micro-batches on the unwrapped model: nothing is reduced.

    Returns:
        (micro-batches,) sums of losses, and which micro-batch ran out of memory, if one did.
    """
    bare = accelerator.unwrap_model(model)
    # `backward` divides by the configured accumulation steps: this undoes it.
    factor = accelerator.gradient_accumulation_steps / items
    losses: list[torch.Tensor] = []
    try:
        with window_embedding(bare, window.micro_batches) as embedding:
            for index, batch in enumerate(window.micro_batches):
                if embedding is not None:
                    embedding.current = index
                loss = loss_sum(bare, batch)
                if index in window.placeholders:
                    loss = loss * 0.0
                accelerator.backward(loss * factor)
                losses.append(precise(loss.detach()))
        return torch.stack(losses), None
    except (RuntimeError, MemoryError) as error:
        raise_unless_out_of_memory(accelerator, bare, window, error)
    # Outside of the except block, which keeps the activations alive.
    return torch.zeros(0), len(losses)


def _items(accelerator: Accelerator, window: Window, num_items: NumItems) -> torch.Tensor:
    """() this process's."""
    items = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(window.micro_batches):
        if number not in window.placeholders:
            items = precise(items) + num_items(batch)
    return items
