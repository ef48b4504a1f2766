"""What every kind of step shares: the counts before its backwards; and after them clip, check, update, result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from accumft.data.windows import Window, count
from accumft.errors import EmptyWindowError, NonFiniteLossError, NotEnoughMemoryError
from accumft.memory_limit import REMEDIES, is_out_of_memory

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


def reduce_counts(accelerator: Accelerator, window: Window, items: torch.Tensor) -> list[float]:
    """[items, examples, tokens, padded tokens, micro-batches] over all processes, in one all-reduce.

    Args:
        items: () this process's.
    """
    counted = [batch for number, batch in enumerate(window.micro_batches) if number not in window.placeholders]
    counts = [*(window.counts or count(counted)), len(window.micro_batches)]
    local = torch.cat([precise(items).reshape(1), precise(torch.tensor(counts, device=accelerator.device))])
    totals: list[float] = accelerator.reduce(local, reduction="sum").tolist()
    return totals


def empty(window: Window, examples: float) -> EmptyWindowError:
    """The error of an effective batch without items."""
    return EmptyWindowError(
        f"step {window.step + 1}: its effective batch of {round(examples)} examples has no items to average "
        f"the loss over; rows {row_list(window.rows)}"
    )


def update(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Window,
    *,
    losses: torch.Tensor,
    loss: float,
    counts: Sequence[float],
    max_grad_norm: float | None,
    oom_retries: int,
    micro_batch_limit: int | None,
) -> StepResult:
    """The second half of a step, when each parameter has its whole gradient: clip, check, update.

    Args:
        model, optimizer: prepared.
        losses: (micro-batches,) of this process: where one is not finite, its rows are named.
        loss: of the whole effective batch, a mean over its items.
        counts: [items, examples, tokens, padded tokens, micro-batches] over all processes.
        max_grad_norm: L2 norm to clip the whole gradient to; None: not clipped.

    Raises:
        NonFiniteLossError: see `train_step`.
    """
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), math.inf if max_grad_norm is None else max_grad_norm)
    norm_value = float(grad_norm)
    scaler = accelerator.scaler
    if scaler is None and not (math.isfinite(loss) and math.isfinite(norm_value)):
        optimizer.zero_grad()
        raise _not_finite(window, losses, loss, norm_value)

    learning_rate = optimizer.param_groups[0]["lr"]
    # The scale falls when, and only when, the update was skipped. `step_was_skipped` misses fused optimizers.
    before = 0.0 if scaler is None else scaler.get_scale()
    try:
        optimizer.step()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        halfway = NotEnoughMemoryError(
            f"step {window.step + 1}: out of memory in the optimizer's update, which may be half made; go on from the "
            f"last checkpoint with --resume_from_checkpoint true, and --optim adafactor or sgd, or {REMEDIES}"
        )
        halfway.everywhere = False  # nor are the weights to be saved
        raise halfway from error
    stepped = scaler is None or scaler.get_scale() >= before
    optimizer.zero_grad()
    if scaler is not None and not stepped and scaler.get_scale() < MIN_LOSS_SCALE:
        raise _not_finite(window, losses, loss, norm_value, f" at an fp16 loss scale of {scaler.get_scale()}")
    examples, tokens, padded_tokens, micro_batches = map(round, counts[1:])
    return StepResult(
        loss=loss,
        grad_norm=norm_value,
        learning_rate=learning_rate,
        items=counts[0],
        examples=examples,
        tokens=tokens,
        padded_tokens=padded_tokens,
        micro_batches=micro_batches,
        stepped=stepped,
        oom_retries=oom_retries,
        micro_batch_limit=micro_batch_limit,
    )


def precise(value: torch.Tensor) -> torch.Tensor:
    """float64, where the device has it."""
    return value.float() if value.device.type == "mps" else value.double()


def _not_finite(
    window: Window, local_loss: torch.Tensor, loss: float, grad_norm: float, where: str = ""
) -> NonFiniteLossError:
    """The error of a step whose loss or gradient is not finite; every process must call it together."""
    finite = torch.isfinite(local_loss).tolist()
    local = [row for rows, good in zip(window.rows, finite, strict=False) if not good for row in rows]
    rows = gather_object([local] if local else [])
    every_row = gather_object([list(row) for row in window.rows])
    among = f"; it comes from a micro-batch of rows {row_list(rows)}" if rows else f"; rows {row_list(every_row)}"
    if not every_row:
        among = ""
    return NonFiniteLossError(
        f"step {window.step + 1}: loss {loss}, gradient norm {grad_norm}{where}{among}. The weights are those before "
        "the step. Look at these rows, lower the learning rate, or train in float32 (--mixed_precision no)."
    )


def row_list(rows: Sequence[Sequence[int]]) -> str:
    """Twenty row numbers at most, and how many more there are."""
    flat = sorted(row for part in rows for row in part)
    more = f" and {len(flat) - 20} more" if len(flat) > 20 else ""
    return ", ".join(map(str, flat[:20])) + more
