"""One optimizer step: window → exact gradient → clip → update. The only code that scales a loss."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from accumft.data.windows import Batch, Window, count
from accumft.embedding import window_embedding
from accumft.errors import EmptyWindowError, NonFiniteLossError

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


def train_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Window | Sequence[Batch],
    loss_sum: LossSum,
    num_items: NumItems,
    max_grad_norm: float | None = None,
) -> StepResult:
    """Makes one optimizer step with the gradient of Σ loss_sum / Σ num_items over every process and micro-batch.

    That is what one process would compute on the whole effective batch in one forward, however it is cut.

    Args:
        accelerator: its `gradient_accumulation_steps` may be any number; the window decides.
        model: prepared.
        optimizer: prepared.
        window: this process's micro-batches on the device. Every process calls with one, of any length ≥ 1.
        loss_sum: see `LossSum`.
        num_items: see `NumItems`.
        max_grad_norm: L2 norm to clip the whole gradient to, once; None: not clipped.

    Raises:
        EmptyWindowError: the effective batch has no items, on any process.
        NonFiniteLossError: the loss or the gradient is not finite and no fp16 scaler is there to skip the update, or
            fp16 overflows at every scale. The weights are untouched, and every process raises.
    """
    window = window if isinstance(window, Window) else Window(window)
    if window.seed is not None:
        set_seed(window.seed)
    model.train()
    totals = _reduce_counts(accelerator, window, num_items)
    items = totals[0]
    if items == 0.0:
        raise EmptyWindowError(
            f"step {window.step + 1}: its effective batch of {round(totals[1])} examples has no items to average the "
            f"loss over; rows {_rows(window.rows)}"
        )

    # DDP averages over processes and `backward` divides by the configured accumulation steps: this undoes both.
    factor = accelerator.num_processes * accelerator.gradient_accumulation_steps / items
    losses = []
    try:
        with window_embedding(accelerator.unwrap_model(model), window.micro_batches) as embedding:
            for index, batch in enumerate(window.micro_batches):
                # The last micro-batch carries the only reduction of the gradient; forward and backward both count.
                synchronise = index == len(window.micro_batches) - 1
                accelerator.sync_gradients = synchronise
                if embedding is not None:
                    embedding.current = index
                with nullcontext() if synchronise else accelerator.no_sync(model):
                    loss = loss_sum(model, batch)
                    if index in window.placeholders:
                        loss = loss * 0.0
                    accelerator.backward(loss * factor)
                losses.append(loss.detach())
    finally:
        # Accelerate's zero_grad and step do nothing while this is False.
        accelerator.sync_gradients = True

    local_loss = torch.stack(losses)
    loss_total = accelerator.reduce(_precise(local_loss.sum()), reduction="sum")
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), math.inf if max_grad_norm is None else max_grad_norm)
    loss_value = loss_total.item() / items
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
    )


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
