"""One optimizer step: window → exact gradient → clip → update. The only code that scales a loss."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from accelerate.utils.memory import clear_device_cache

from accumft.data.windows import Batch, Window, count
from accumft.embedding import window_embedding
from accumft.errors import EmptyWindowError, NonFiniteLossError, NotEnoughMemoryError
from accumft.memory_limit import REMEDIES, Failure, MemoryLimit, is_out_of_memory
from accumft.models import communicates_in_forward
from accumft.reduction import agree, sum_gradients, synchronise_buffers

LossSum = Callable[[Any, Batch], torch.Tensor]
"""(model, batch) → the sum of the batch's losses over its items, a scalar."""
NumItems = Callable[[Batch], torch.Tensor | float]
"""batch → what the sum is to be divided by, from the labels alone: a count, or a sum of weights."""

# fp16 gradients that overflow even at this scale come from the forward pass, which no scale mends. The scaler starts
# at 65,536 and halves, so that about thirty attempts at one window come before it.
MIN_LOSS_SCALE = 1e-4


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, over all processes."""

    loss: float
    """Σ loss_sum / Σ num_items over the effective batch."""
    grad_norm: float
    """L2 norm of the whole gradient, before clipping."""
    learning_rate: float
    """Learning rate of the first parameter group in this update."""
    items: float
    examples: int
    tokens: int
    padded_tokens: int
    micro_batches: int
    stepped: bool
    """False when fp16 overflowed and every process skipped the update; the same window is to be tried again."""
    oom_retries: int = 0
    """Times that the window was run again because a micro-batch ran out of memory on some process."""
    micro_batch_limit: int | None = None
    """Padded tokens of a micro-batch that memory allows, as far as is known; None: no limit was met."""


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
    start = _Start(bare, accelerator.device, window.seed)
    failures: list[Failure] = []
    retries = 0
    while True:
        window = memory.cut(window)
        start.restore()
        totals = _reduce_counts(accelerator, window, num_items)
        items = totals[0]
        if items == 0.0:
            raise EmptyWindowError(
                f"step {window.step + 1}: its effective batch of {round(totals[1])} examples has no items to average "
                f"the loss over; rows {_rows(window.rows)}"
            )
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

    grad_norm = accelerator.clip_grad_norm_(model.parameters(), math.inf if max_grad_norm is None else max_grad_norm)
    loss_value = loss_total / items
    norm_value = float(grad_norm)
    scaler = accelerator.scaler
    if scaler is None and not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        optimizer.zero_grad()
        raise _not_finite(window, local_loss, loss_value, norm_value)

    learning_rate = optimizer.param_groups[0]["lr"]
    stepped = True
    if scaler is None:
        optimizer.step()
    else:
        # The scale falls when, and only when, the update was skipped. `step_was_skipped` misses fused optimizers.
        before = scaler.get_scale()
        optimizer.step()
        stepped = scaler.get_scale() >= before
    optimizer.zero_grad()
    if scaler is not None and not stepped and scaler.get_scale() < MIN_LOSS_SCALE:
        raise _not_finite(window, local_loss, loss_value, norm_value, f" at an fp16 loss scale of {scaler.get_scale()}")
    examples, tokens, padded_tokens, micro_batches = map(round, totals[1:])
    return StepResult(
        loss=loss_value,
        grad_norm=norm_value,
        learning_rate=learning_rate,
        items=items,
        examples=examples,
        tokens=tokens,
        padded_tokens=padded_tokens,
        micro_batches=micro_batches,
        stepped=stepped,
        oom_retries=retries,
        micro_batch_limit=memory.smallest,
    )


class _Start:
    """The state of buffers and random generators before a window, to begin it again from."""

    def __init__(self, model: torch.nn.Module, device: torch.device, seed: int | None) -> None:
        self.seed = seed
        self.buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self.attempts = 0
        self.random = None
        if seed is None:
            of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
            self.device, self.random = (
                device,
                (random.getstate(), np.random.get_state(), torch.get_rng_state(), of_device),
            )

    @torch.no_grad()
    def restore(self) -> None:
        """Before each attempt, the first one too."""
        if self.seed is not None:
            set_seed(self.seed)
        self.attempts += 1
        if self.attempts == 1:
            return
        for buffer, value in self.buffers:
            buffer.copy_(value)
        if self.random is not None:
            python, numpy, cpu, of_device = self.random
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(cpu)
            if of_device is not None:
                torch.get_device_module(self.device).set_rng_state(of_device)


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
                losses.append(_precise(loss.detach()))
        return torch.stack(losses), None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if communicates_in_forward(bare):
            # The others are in the middle of this very forward and cannot be told.
            alone = NotEnoughMemoryError(
                f"step {window.step + 1}: out of memory, and a model whose processes talk in each forward "
                f"(SyncBatchNorm) cannot try again: lower --max_tokens_per_micro_batch, or {REMEDIES}"
            )
            alone.everywhere = accelerator.num_processes == 1
            raise alone from error
    # Outside of the except block, which keeps the activations alive.
    return torch.zeros(0), len(losses)


def _precise(value: torch.Tensor) -> torch.Tensor:
    """float64, where the device has it."""
    return value.float() if value.device.type == "mps" else value.double()


def _reduce_counts(accelerator: Accelerator, window: Window, num_items: NumItems) -> list[float]:
    """[items, examples, tokens, padded tokens, micro-batches] over all processes, in one all-reduce."""
    items = torch.zeros((), device=accelerator.device)
    counted = [batch for number, batch in enumerate(window.micro_batches) if number not in window.placeholders]
    for batch in counted:
        items = _precise(items) + num_items(batch)
    counts = [*(window.counts or count(counted)), len(window.micro_batches)]
    local = torch.cat([_precise(items).reshape(1), _precise(torch.tensor(counts, device=accelerator.device))])
    totals: list[float] = accelerator.reduce(local, reduction="sum").tolist()
    return totals


def _not_finite(
    window: Window, local_loss: torch.Tensor, loss: float, grad_norm: float, where: str = ""
) -> NonFiniteLossError:
    """The error of a step whose loss or gradient is not finite; every process must call it together."""
    finite = torch.isfinite(local_loss).tolist()
    local = [row for rows, good in zip(window.rows, finite, strict=False) if not good for row in rows]
    rows = gather_object([local] if local else [])
    every_row = gather_object([list(row) for row in window.rows])
    among = f"; it comes from a micro-batch of rows {_rows(rows)}" if rows else f"; rows {_rows(every_row)}"
    if not every_row:
        among = ""
    return NonFiniteLossError(
        f"step {window.step + 1}: loss {loss}, gradient norm {grad_norm}{where}{among}. The weights are those before "
        "the step. Look at these rows, lower the learning rate, or train in float32 (--mixed_precision no)."
    )


def _rows(rows: Sequence[Sequence[int]]) -> str:
    flat = sorted(row for part in rows for row in part)
    more = f" and {len(flat) - 20} more" if len(flat) > 20 else ""
    return ", ".join(map(str, flat[:20])) + more
