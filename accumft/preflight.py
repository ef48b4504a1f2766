"""The largest micro-batch, tried once before the first step: memory that is short runs out now and not in the night."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache

from accumft.data.windows import Window, WindowDataset, shape_of
from accumft.errors import NotEnoughMemoryError, UserError
from accumft.memory_limit import REMEDIES, Failure, MemoryLimit, is_out_of_memory
from accumft.models import communicates_in_forward
from accumft.step import LossSum


def preflight(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: WindowDataset,
    loss_sum: LossSum,
    memory: MemoryLimit,
) -> None:
    """Runs forward and backward of the largest planned micro-batch with gradients and optimizer state in their place.

    Where it does not fit, `memory` gets a limit that does. Weights, buffers, gradients, optimizer state and random
    state are left as they were. Every process must call it.

    Args:
        model, optimizer: prepared.

    Raises:
        UserError: not even a single row fits, or not even the optimizer's state; on every process.
    """
    bare = accelerator.unwrap_model(model)
    was_training = bare.training
    bare.train()
    buffers = [(buffer, buffer.clone()) for buffer in bare.buffers()]
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _optimizer_state(accelerator, bare, optimizer):
        for window in (windows.largest(), windows.longest()):
            _fit(accelerator, bare, window.to(accelerator.device), loss_sum, memory)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    bare.train(was_training)


def _fit(accelerator: Accelerator, bare: Any, window: Window, loss_sum: LossSum, memory: MemoryLimit) -> None:
    failures: list[Failure] = []
    before = memory.smallest
    planned = shape_of(window.micro_batches[0])[2]
    while True:
        window = memory.cut(window)
        first = replace(window, micro_batches=window.micro_batches[:1], rows=window.rows[:1], counts=None)
        fits = _fits(accelerator, bare, first.micro_batches[0], loss_sum)
        bare.zero_grad(set_to_none=True)
        if all(gather_object([fits])):
            break
        clear_device_cache(garbage_collection=True)
        failure = None if fits else memory.failure(first, 0, accelerator.process_index)
        try:
            memory.learn(accelerator, failure, "before the first step", failures)
        except NotEnoughMemoryError as error:
            raise UserError(str(error)) from error
        failures += [failure] if failure else []
    memory.retries = 0
    if memory.smallest != before:
        accelerator.print(
            f"a micro-batch of {planned:,} tokens does not fit into memory: they are cut to {memory.smallest:,} at most"
        )


def _fits(accelerator: Accelerator, bare: Any, batch: Any, loss_sum: LossSum) -> bool:
    try:
        for parameter in bare.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        with accelerator.autocast():
            loss = loss_sum(bare, batch)
        (loss * 0.0).backward()
        # What ran out on a device is known when the device is done.
        if accelerator.device.type != "cpu":
            torch.accelerator.synchronize(accelerator.device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or (accelerator.num_processes > 1 and communicates_in_forward(bare)):
            raise
        return False
    return True


@contextmanager
def _optimizer_state(accelerator: Accelerator, bare: Any, optimizer: Any) -> Iterator[None]:
    """The optimizer's state as it will be after the first update, for a while; one that is there already stays."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner.state:
        yield
        return
    try:
        made = _make_state(bare, inner)
        if not all(gather_object([made])):
            raise UserError(f"weights, gradients and optimizer state alone do not fit into memory: {REMEDIES}")
        yield
    finally:
        inner.state.clear()
        bare.zero_grad(set_to_none=True)


def _make_state(bare: Any, optimizer: Any) -> bool:
    """By an update of zero gradients at a learning rate of zero, which leaves every weight as it is."""
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    return True
