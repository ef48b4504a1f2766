"""Micro-batches that run out of memory where a test says so, and what a step makes of it."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from step_cases import losses_of
from tasks import flat, inputs, make_data, make_model, rows, task_named
from torch import nn

from accumft.data.windows import Window
from accumft.memory_limit import MemoryLimit
from accumft.step import StepResult, train_step

PLACES = ("forward", "loss", "backward")
TASK = task_named("class_weights")


def failing(place: str, fails: Callable[[], bool]) -> Callable[[Any, Any], torch.Tensor]:
    """The task's loss_sum, which runs out of memory in the named place when `fails` says so, asked at each call."""
    loss_sum, _ = losses_of(TASK)

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def with_failures(model: Any, batch: Any) -> torch.Tensor:
        fail = fails()
        if fail and place == "forward":
            run_out()
        loss = loss_sum(model, batch)
        if fail and place == "loss":
            run_out()
        if fail:
            loss = loss * 1.0
            # Half of the backward has been through by then.
            bare = model.module if hasattr(model, "module") else model
            hook = bare.hidden.weight.register_hook(run_out)
            loss.register_hook(lambda _: None)
            handles.append(hook)
        return loss

    handles: list[Any] = []

    def and_clean(model: Any, batch: Any) -> torch.Tensor:
        while handles:
            handles.pop().remove()
        return with_failures(model, batch)

    return and_clean


class WithBatchNorm(nn.Module):
    """The tiny model, with statistics that a forward changes and a dropout that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(TASK, torch.float64)
        self.statistics = nn.BatchNorm1d(4, affine=False).double()

    @property
    def hidden(self) -> nn.Module:
        return self.inner.hidden

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits = self.inner(input_ids, attention_mask)
        if len(logits) > 1:  # statistics of one row there are none
            self.statistics(logits.detach())
        return logits


def three_steps(
    accelerator: Accelerator,
    cut: list[list[int]],
    loss_sum: Callable[[Any, Any], torch.Tensor],
    memory: MemoryLimit | None = None,
) -> tuple[torch.Tensor, list[StepResult], Any]:
    """Three SGD steps on consecutive 16s, each cut over the processes as `cut` says."""
    data = make_data(TASK, 48)
    model = WithBatchNorm()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    sizes = cut[accelerator.process_index]
    offset = sum(sum(share) for share in cut[: accelerator.process_index])
    results = []
    for step in range(3):
        start = 16 * step + offset
        pieces = [piece.tolist() for piece in torch.arange(start, start + sum(sizes)).split(sizes)]
        window = Window([rows(data, piece) for piece in pieces], rows=pieces, step=step, seed=step)
        results.append(train_step(accelerator, model, optimizer, window, loss_sum, losses_of(TASK)[1], None, memory))
    bare = accelerator.unwrap_model(model)
    assert all(parameter.grad is None for parameter in bare.parameters())
    return flat(bare), results, bare


__all__ = ["PLACES", "TASK", "WithBatchNorm", "failing", "inputs", "three_steps"]
