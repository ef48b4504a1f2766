"""Evaluation: every example exactly once, one prediction each, in data set order, on any number of processes."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import pad_across_processes, send_to_device
from accelerate.utils.memory import clear_device_cache

from accumft.cut import CostModel, Limits, cut
from accumft.data.windows import Batch, Collate, lengths_of, shape_of, split
from accumft.errors import NonFiniteLossError, NotEnoughMemoryError
from accumft.memory_limit import REMEDIES, is_out_of_memory
from accumft.plan import BatchSizes

# Rows of one forward where neither rows nor tokens are given.
FoundT = TypeVar("FoundT")

DEFAULT_ROWS = 32
# Rows that are cut together: NumPy wants many blocks at a time, the cut few rows a block.
_BLOCK = 64


def inputs_of(batch: Batch) -> dict[str, torch.Tensor]:
    """A batch without its labels: what the model takes. A packed one has its mask in its packing."""
    left_out = ("labels", "attention_mask") if "packing" in batch else ("labels", "documents")
    return {name: tensor for name, tensor in batch.items() if name not in left_out}


def logits_of(model: Any, batch: Batch) -> torch.Tensor:
    """A model's logits for each example; of documents in several windows (`accumft.data.long_text`) pooled."""
    logits: torch.Tensor = model(**inputs_of(batch)).logits
    return batch["documents"].pool(logits) if "documents" in batch else logits


@torch.no_grad()
def predict(
    accelerator: Accelerator, model: torch.nn.Module, dataset: Any, collate: Collate, limits: Limits
) -> torch.Tensor:
    """The model's logits for every row of `dataset`, on every process.

    Args:
        model: prepared. It is left in evaluation mode.
        dataset: a tokenised `datasets.Dataset`; a column "length" groups rows of like length.
        limits: of one forward on one process; the result does not depend on them.

    Returns:
        (rows, …) float32 on the CPU, row i for row i of the data set.

    Raises:
        NonFiniteLossError: an output is not finite, on every process.
        NotEnoughMemoryError: a single row does not fit.
    """
    # Not the DDP wrapper: its forward communicates, and processes may have different numbers of batches.
    bare = accelerator.unwrap_model(model)
    bare.eval()
    if not len(dataset):
        return torch.empty(0)
    lengths = lengths_of(dataset)
    rows, outputs = [], []
    for indices in batches_by_length(lengths, accelerator.num_processes, accelerator.process_index, limits):
        batch = send_to_device(collate(dataset[indices.tolist()]), accelerator.device)
        outputs += fitting(lambda part: logits_of(bare, part).float(), batch)
        rows.append(torch.from_numpy(indices).to(accelerator.device))
    if accelerator.num_processes == 1:
        return _finite(_in_order(torch.cat(rows), torch.cat(outputs)))
    if not outputs:
        # Fewer batches than processes: one row, dropped below, gives the gather its shape.
        batch = send_to_device(collate(dataset[[int(lengths.argmin())]]), accelerator.device)
        outputs.append(logits_of(bare, batch).float())
        rows.append(torch.full((1,), -1, device=accelerator.device))
    # Shares differ in size: they are padded with row number -1, gathered, and the padding dropped by that number.
    all_rows = accelerator.gather(pad_across_processes(torch.cat(rows), pad_index=-1))
    all_outputs = accelerator.gather(pad_across_processes(torch.cat(outputs)))
    return _finite(_in_order(all_rows, all_outputs))


def fitting(score: Callable[[Batch], FoundT], batch: Batch) -> list[FoundT]:
    """What `score` finds for a batch: of its parts, in order, where the whole runs out of memory.

    Raises:
        NotEnoughMemoryError: a single row does not fit.
    """
    try:
        return [score(batch)]
    except (RuntimeError, MemoryError) as error:
        rows, length, tokens = shape_of(batch)
        if not is_out_of_memory(error):
            raise
        if rows == 1:
            raise NotEnoughMemoryError(
                f"evaluation: a row of {length:,} tokens does not fit into memory: {REMEDIES}"
            ) from error
    # Outside of the except block, which keeps the activations alive.
    clear_device_cache(garbage_collection=True)
    return [found for part in split(batch, tokens // 2) for found in fitting(score, part)]


def perplexity(loss: float) -> float:
    """The exponential of a mean loss in nats; infinite where it is beyond floating point."""
    return math.exp(loss) if loss < 700 else math.inf


def batches_by_length(
    lengths: np.ndarray, num_processes: int, process_index: int, limits: Limits, cost: CostModel | None = None
) -> list[np.ndarray]:
    """All examples, cut by length over the whole set, of which one process evaluates these batches, longest first.

    Args:
        lengths: (examples,) tokens.
    """
    order = np.argsort(-lengths, kind="stable")
    whole = len(order) // _BLOCK * _BLOCK
    batches = []
    cost = cost or CostModel()
    for part in (order[:whole].reshape(-1, _BLOCK), order[None, whole:]):
        if part.size:
            starts = cut(lengths[part], 1, limits, cost).starts
            batches += np.split(part.ravel(), np.flatnonzero(starts.ravel())[1:])
    # The costliest first, each to the process that has least: their numbers of batches may differ.
    prices = [cost.overhead + len(b) * float(cost.row(limits.padded(lengths[b[:1]]))[0]) for b in batches]
    loads, mine = np.zeros(num_processes), []
    for index in sorted(range(len(batches)), key=lambda i: -prices[i]):
        process = int(loads.argmin())
        loads[process] += prices[index]
        if process == process_index:
            mine.append(batches[index])
    return mine


def evaluation_limits(per_device_eval_batch_size: int | None, batch: BatchSizes, pad_to_multiple_of: int = 1) -> Limits:
    """Limits of one forward: the given number of rows; else twice the tokens of a training micro-batch, as nothing is
    kept for a backward; else 32 rows."""
    tokens = batch.limits().max_tokens
    if per_device_eval_batch_size is not None or tokens is None:
        return Limits(per_device_eval_batch_size or DEFAULT_ROWS, None, pad_to_multiple_of)
    return Limits(None, 2 * tokens, pad_to_multiple_of)


def _finite(outputs: torch.Tensor) -> torch.Tensor:
    bad = (~torch.isfinite(outputs.flatten(1)).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        raise NonFiniteLossError(
            f"evaluation: the model's output is not finite for {len(bad)} of {len(outputs)} examples (the first is "
            f"number {bad[0] + 1}): the training has diverged; lower the learning rate"
        )
    return outputs


def _in_order(rows: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    kept = rows >= 0
    rows, outputs = rows[kept].cpu(), outputs[kept].cpu()
    return outputs[torch.argsort(rows)]
