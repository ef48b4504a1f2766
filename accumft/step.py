"""One optimizer step: window → exact gradient → clip → update. The only code that scales a loss."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache

from accumft.data.windows import Batch, Window
from accumft.embedding import window_embedding
from accumft.errors import NotEnoughMemoryError
from accumft.memory_limit import REMEDIES, Failure, MemoryLimit, is_out_of_memory
from accumft.models import communicates_in_forward
from accumft.reduction import agree, sum_gradients, synchronise_buffers
from accumft.replay import Start
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
    window = window if isinstance(window, Window) else Window(window)
    memory = MemoryLimit() if memory is None else memory
    bare = accelerator.unwrap_model(model)
    parameters = [parameter for parameter in bare.parameters() if parameter.requires_grad]
    model.train()
    # Accelerate's zero_grad and step do nothing while this is False.
    accelerator.sync_gradients = True
    synchronise_buffers(accelerator, bare)
    start = Start(bare, accelerator.device, window.seed)
    failures: list[Failure] = []
    retries = 0
    while True:
        window = memory.cut(window)
        start.restore()
        totals = reduce_counts(accelerator, window, _items(accelerator, window, num_items))
        items = totals[0]
        if items == 0.0:
            raise empty(window, totals[1])
        local_loss, failed = _accumulate(accelerator, model, window, loss_sum, items)
        went_well, loss_total, used = agree(accelerator, parameters, None if failed is not None else local_loss.sum())
        if went_well:
            break
        # Nothing of the attempt stays: gradients, and what the allocator keeps of the activations.
        bare.zero_grad(set_to_none=True)
        clear_device_cache(garbage_collection=True)
        failure = None if failed is None else memory.failure(window, failed, accelerator.process_index)
        memory.learn(accelerator, failure, f"step {window.step + 1}", failures)
        failures += [failure] if failure else []
        retries += 1
    memory.succeeded(window)
    sum_gradients(accelerator, parameters, used)

    return update(
        accelerator,
        model,
        optimizer,
        window,
        losses=local_loss,
        loss=loss_total / items,
        counts=totals,
        max_grad_norm=max_grad_norm,
        oom_retries=retries,
        micro_batch_limit=memory.smallest,
    )


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
        if not is_out_of_memory(error):
            raise
        if communicates_in_forward(bare):
            raise out_of_memory_in_talk(accelerator, window) from error
    # Outside of the except block, which keeps the activations alive.
    return torch.zeros(0), len(losses)


def out_of_memory_in_talk(accelerator: Accelerator, window: Window) -> NotEnoughMemoryError:
    """The error where the other processes are in the middle of the very forward that failed, and cannot be told."""
    alone = NotEnoughMemoryError(
        f"step {window.step + 1}: out of memory, and a model whose processes talk in each forward "
        f"(SyncBatchNorm) cannot try again: lower --max_tokens_per_micro_batch, or {REMEDIES}"
    )
    alone.everywhere = accelerator.num_processes == 1
    return alone


def _items(accelerator: Accelerator, window: Window, num_items: NumItems) -> torch.Tensor:
    """() this process's."""
    items = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(window.micro_batches):
        if number not in window.placeholders:
            items = precise(items) + num_items(batch)
    return items
