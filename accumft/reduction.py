"""The gradients of all processes added up, once an optimizer step, outside of any backward.

DistributedDataParallel does it inside a backward, and is lost if that one runs out of memory. Here the processes first
tell each other how their backwards went, and only if all went well they add up. It was measured to be as fast: the
backward that could hide the reduction is that of one micro-batch, the smallest.
"""

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from torch import distributed

# Gradients smaller than this travel together, as in DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20


def synchronise_buffers(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Gives every process the first one's buffers, such as BatchNorm's statistics, as DistributedDataParallel does.

    Args:
        model: unwrapped.
    """
    if accelerator.num_processes == 1:
        return
    # Those of normalisation layers: what else there is (position numbers, masks) is constant.
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase):
            for buffer in module.buffers(recurse=False):
                distributed.broadcast(buffer, 0)


def agree(
    accelerator: Accelerator, parameters: Sequence[torch.nn.Parameter], loss: torch.Tensor | None
) -> tuple[bool, float, list[bool]]:
    """How a window went on all processes, in one all-reduce.

    Args:
        loss: () this process's sum of losses; None: it failed.

    Returns:
        (whether it went well everywhere, the sum of losses, for each parameter whether any process has a gradient).
    """
    dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=dtype)
    numbers = torch.cat([torch.tensor([float(loss is None)], dtype=dtype), has_gradient]).to(accelerator.device)
    total = torch.zeros(1, dtype=dtype, device=accelerator.device) if loss is None else loss.to(dtype).reshape(1)
    numbers = torch.cat([total, numbers])
    if accelerator.num_processes > 1:
        distributed.all_reduce(numbers)
    loss_sum, failures, *users = numbers.tolist()
    return failures == 0, loss_sum, [count > 0 for count in users]


def sum_gradients(accelerator: Accelerator, parameters: Sequence[torch.nn.Parameter], used: Sequence[bool]) -> None:
    """Replaces the gradient of each parameter by its sum over all processes; every process must call it.

    Args:
        used: for each parameter whether any process has a gradient; those of none stay None.
    """
    if accelerator.num_processes == 1:
        return
    gradients = []
    for parameter, is_used in zip(parameters, used, strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    # While one bucket is on its way the next is made ready; no more, for the memory's sake.
    before: Callable[[], None] = _nothing
    for bucket in _buckets(gradients):
        finish = _start(bucket)
        before()
        before = finish
    before()


def _start(bucket: list[torch.Tensor]) -> Callable[[], None]:
    """Sends a bucket on its way; what is returned waits for it and puts the sums in their places."""
    alone = len(bucket) == 1 and bucket[0].is_contiguous()
    flat = bucket[0] if alone else torch.cat([gradient.reshape(-1) for gradient in bucket])
    work = distributed.all_reduce(flat, async_op=True)

    def finish() -> None:
        work.wait()
        if not alone:
            for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    return finish


def _nothing() -> None:
    pass


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Neighbours of one type and device, together up to BUCKET_BYTES."""
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for gradient in gradients:
        last = buckets[-1][-1] if buckets else None
        fits = size + gradient.nbytes <= BUCKET_BYTES
        if last is None or not fits or (last.dtype, last.device) != (gradient.dtype, gradient.device):
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.nbytes
    return buckets
