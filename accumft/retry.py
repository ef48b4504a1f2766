"""A window runs again, cut smaller, until its micro-batches fit into memory on every process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache

from accumft.data.windows import Batch, Window
from accumft.errors import NotEnoughMemoryError
from accumft.memory_limit import REMEDIES, Failure, MemoryLimit, is_out_of_memory
from accumft.models import communicates_in_forward
from accumft.reduction import synchronise_buffers
from accumft.replay import Start

FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True)
class Attempt(Generic[FoundT]):
    """One go at the forwards and backwards of a window, over all processes."""

    found: FoundT | None
    """What they found, on every process; None: somewhere a micro-batch ran out of memory."""
    failed: int | None = None
    """Which micro-batch of this process did."""


@dataclass(frozen=True, slots=True)
class Fitted(Generic[FoundT]):
    """A window that has run: the gradients are there, not yet added up over the processes."""

    found: FoundT
    window: Window
    """As it was cut at last."""
    retries: int


def until_it_fits(
    accelerator: Accelerator,
    model: torch.nn.Module,
    window: Window | Sequence[Batch],
    memory: MemoryLimit,
    attempt: Callable[[Window, Start], Attempt[FoundT]],
) -> Fitted[FoundT]:
    """Attempts a window until it fits; nothing stays of what did not.

    Args:
        model: prepared; it is put into training mode.
        attempt: given the window and its start, which is restored before each attempt. What is on the way in it must
            be gone when it returns: memory is short.

    Raises:
        NotEnoughMemoryError: a single row does not fit, or what runs out is a model whose processes talk in a forward.
    """
    window = window if isinstance(window, Window) else Window(window)
    bare = accelerator.unwrap_model(model)
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
        result = attempt(window, start)
        if result.found is not None:
            memory.succeeded(window)
            return Fitted(result.found, window, retries)
        # Nothing of the attempt stays: gradients, and what the allocator keeps of the activations.
        bare.zero_grad(set_to_none=True)
        clear_device_cache(garbage_collection=True)
        failure = None if result.failed is None else memory.failure(window, result.failed, accelerator.process_index)
        memory.learn(accelerator, failure, f"step {window.step + 1}", failures)
        failures += [failure] if failure else []
        retries += 1


def raise_unless_out_of_memory(accelerator: Accelerator, bare: Any, window: Window, error: Exception) -> None:
    """Raises what no smaller micro-batch mends.

    Args:
        bare: the unwrapped model.
        error: of a forward or backward.
    """
    if not is_out_of_memory(error):
        raise error
    if communicates_in_forward(bare):
        # The other processes are in the middle of the very forward that failed, and cannot be told.
        alone = NotEnoughMemoryError(
            f"step {window.step + 1}: out of memory, and a model whose processes talk in each forward "
            f"(SyncBatchNorm) cannot try again: lower --max_tokens_per_micro_batch, or {REMEDIES}"
        )
        alone.everywhere = accelerator.num_processes == 1
        raise alone from error
