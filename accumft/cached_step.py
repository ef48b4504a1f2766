"""One optimizer step of a loss that compares the examples of the whole effective batch with each other: GradCache.

A contrastive loss over micro-batches is another loss: each anchor meets the negatives of its micro-batch alone. Here
the effective batch stays whole (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited
Setup"): its embeddings are made without gradients, the loss and its gradient with respect to them are computed at once
over all processes, and each micro-batch runs a second time, with the same random numbers, to carry its part of that
gradient on into the weights. It is the full-batch gradient exactly, at the memory of one micro-batch and one more
forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import pad_across_processes

from accumft.data.windows import Batch, Window, count
from accumft.embedding import window_embedding
from accumft.memory_limit import MemoryLimit
from accumft.reduction import agree, sum_gradients
from accumft.replay import RandomState, Start
from accumft.retry import Attempt, raise_unless_out_of_memory, until_it_fits
from accumft.update import StepResult, empty, reduce_counts, update

Embed = Callable[[Any, Batch], torch.Tensor]
"""(model, batch) → (rows, dimensions) the embeddings of the rows of a micro-batch."""
LossOfEmbeddings = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(embeddings (rows, dimensions), labels (rows,)) of a whole effective batch → the sum of its losses, a scalar."""
NumItemsOfLabels = Callable[[torch.Tensor], torch.Tensor | float]
"""labels (rows,) of a whole effective batch → what the sum is to be divided by."""


def cached_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Window | Sequence[Batch],
    embed: Embed,
    loss_of_embeddings: LossOfEmbeddings,
    num_items: NumItemsOfLabels,
    max_grad_norm: float | None = None,
    memory: MemoryLimit | None = None,
) -> StepResult:
    """Makes one optimizer step with the gradient of loss_of_embeddings / num_items over the whole effective batch.

    That is what one process would compute on it in one forward, however it is cut, dropout apart, whose draws depend
    on the cut. Where a micro-batch runs out of memory, in either pass, on any process, nothing of the attempt stays
    and the window runs again, cut smaller. Every process computes the whole loss, on the embeddings of all.

    Args:
        accelerator: its `gradient_accumulation_steps` may be any number; the window decides.
        model: prepared.
        optimizer: prepared.
        window: this process's micro-batches on the device. "labels" of each, (rows,) int64 and not negative, number
            its rows: no two of an effective batch have the same. The loss gets the rows ascending by them.
        embed: see `Embed`; the sizes of a row's embedding are the same in every call.
        loss_of_embeddings: see `LossOfEmbeddings`.
        num_items: see `NumItemsOfLabels`.
        max_grad_norm: L2 norm to clip the whole gradient to, once; None: not clipped.
        memory: what is known of the limits of memory, kept from step to step; None: nothing.

    Raises:
        EmptyWindowError, NonFiniteLossError, NotEnoughMemoryError: as `accumft.step.train_step`.
    """
    memory = MemoryLimit() if memory is None else memory
    window = window if isinstance(window, Window) else Window(window)
    bare = accelerator.unwrap_model(model)
    parameters = [parameter for parameter in bare.parameters() if parameter.requires_grad]
    # A window that is cut smaller is counted anew, by rows; the caller may count as one example what is several rows.
    counted = [batch for number, batch in enumerate(window.micro_batches) if number not in window.placeholders]
    examples = torch.tensor(float((window.counts or count(counted))[0]), device=accelerator.device)

    def attempt(window: Window, start: Start) -> Attempt[_Sums]:
        embeddings, states, failed = _embed_all(accelerator, bare, window, embed)
        went_well, _, _ = agree(accelerator, (), None if failed is not None else torch.zeros(()))
        if not went_well:
            return Attempt(None, failed)
        gradients, loss, items = _loss(accelerator, window, embeddings, loss_of_embeddings, num_items)
        counts = reduce_counts(accelerator, window, examples)
        if items == 0.0:
            raise empty(window, counts[0])
        # The second pass changes them in the same way again.
        start.restore_buffers()
        failed = _backward(accelerator, bare, window, embed, gradients, states)
        went_well, _, used = agree(accelerator, parameters, None if failed is not None else torch.zeros(()))
        if not went_well:
            return Attempt(None, failed)
        return Attempt(_Sums(embeddings, loss, [items, counts[0], *counts[2:]], used))

    fitted = until_it_fits(accelerator, model, window, memory, attempt)
    sums = fitted.found
    sum_gradients(accelerator, parameters, sums.used)
    return update(
        accelerator,
        model,
        optimizer,
        fitted.window,
        losses=torch.stack([part.sum() for part in sums.embeddings]),
        loss=sums.loss,
        counts=sums.counts,
        max_grad_norm=max_grad_norm,
        oom_retries=fitted.retries,
        micro_batch_limit=memory.smallest,
    )


@dataclass(frozen=True, slots=True)
class _Sums:
    """What both passes of a window found."""

    embeddings: list[torch.Tensor]
    """(rows, dimensions) of each micro-batch of this process."""
    loss: float
    """Of the whole effective batch, a mean over its items."""
    counts: list[float]
    """[items, examples, tokens, padded tokens, micro-batches] over all processes."""
    used: list[bool]
    """For each parameter whether any process has a gradient."""


def trial_loss(embed: Embed, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """What stands for a micro-batch's loss where its memory or its speed is tried: a scalar of its embeddings."""
    return embed(model, batch).float().square().sum()


@torch.no_grad()
def _embed_all(
    accelerator: Accelerator, bare: Any, window: Window, embed: Embed
) -> tuple[list[torch.Tensor], list[RandomState], int | None]:
    """The first pass: embeddings of each micro-batch, the random state before each, and which ran out of memory."""
    embeddings: list[torch.Tensor] = []
    states: list[RandomState] = []
    try:
        for batch in window.micro_batches:
            states.append(RandomState(accelerator.device))
            found = embed(bare, batch)
            # Half precision would be too coarse for the loss.
            embeddings.append(found.float() if found.dtype in (torch.float16, torch.bfloat16) else found)
        return embeddings, states, None
    except (RuntimeError, MemoryError) as error:
        raise_unless_out_of_memory(accelerator, bare, window, error)
    return [], states, len(embeddings)


def _loss(
    accelerator: Accelerator,
    window: Window,
    embeddings: Sequence[torch.Tensor],
    loss_of_embeddings: LossOfEmbeddings,
    num_items: NumItemsOfLabels,
) -> tuple[list[torch.Tensor], float, float]:
    """(the gradient with respect to the embeddings of each micro-batch of this process, the loss, its items)."""
    local = torch.cat(list(embeddings))
    labels = torch.cat(
        [
            torch.full_like(batch["labels"], -1) if number in window.placeholders else batch["labels"]
            for number, batch in enumerate(window.micro_batches)
        ]
    )
    every, every_label = local, labels
    if accelerator.num_processes > 1:
        # Shares differ in size: they are padded with label -1, which also marks what counts nothing.
        every_label = accelerator.gather(pad_across_processes(labels, pad_index=-1))
        every = accelerator.gather(pad_across_processes(local))
    # In an order that does not depend on the cut, and so in the same order of rounding.
    order = torch.argsort(every_label)
    order = order[(every_label < 0).sum() :]
    rows, ordered = every[order].requires_grad_(), every_label[order]
    items = float(num_items(ordered))
    if items == 0.0:
        return [], 0.0, items
    loss = loss_of_embeddings(rows, ordered) / items
    (of_rows,) = torch.autograd.grad(loss, [rows])
    gradient = torch.zeros_like(every)
    gradient[order] = of_rows
    first = accelerator.process_index * (len(every) // accelerator.num_processes)
    mine = gradient[first : first + len(local)]
    return list(mine.split([len(part) for part in embeddings])), float(loss.detach()), items


def _backward(
    accelerator: Accelerator,
    bare: Any,
    window: Window,
    embed: Embed,
    gradients: Sequence[torch.Tensor],
    states: Sequence[RandomState],
) -> int | None:
    """The second pass: forward and backward of each micro-batch; which one ran out of memory, if one did."""
    # `backward` divides by the configured accumulation steps: this undoes it.
    factor = accelerator.gradient_accumulation_steps
    index = 0
    try:
        with window_embedding(bare, window.micro_batches) as embedding:
            for index, batch in enumerate(window.micro_batches):
                if embedding is not None:
                    embedding.current = index
                states[index].restore()
                found = embed(bare, batch)
                # Its gradient with respect to the embeddings is that of the loss. A placeholder's is zero.
                accelerator.backward((found.to(gradients[index].dtype) * gradients[index]).sum() * factor)
        return None
    except (RuntimeError, MemoryError) as error:
        raise_unless_out_of_memory(accelerator, bare, window, error)
    # Outside of the except block, which keeps the activations alive.
    return index
