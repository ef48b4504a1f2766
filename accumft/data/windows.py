"""Windows: one process's share of an effective batch, collated, on its way to the device."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset

from accumft.data.files import numbers_of
from accumft.window_plan import WindowPlan

Batch = Mapping[str, Any]
"""Tensors by name; of a packed batch also its "packing"."""
Collate = Callable[..., Batch]
"""Makes a batch from the columns of some rows, each a list; of a packed one, also from the rows of each rectangle.

One that makes something else of a row in each epoch (masks, augmentations) has a method `in_epoch(epoch)`, which gives
the one of that epoch, from 0: what a window holds is then a pure function of its step.
"""

MASKS = ("attention_mask", "decoder_attention_mask")
"""A batch of an encoder-decoder has both, (rows, tokens) each; its labels are of the second's tokens."""


@dataclass(frozen=True, slots=True)
class Window:
    """The micro-batches of one optimizer step on one process."""

    micro_batches: Sequence[Batch]
    """At least one; the largest first."""
    rows: Sequence[Sequence[int]] = ()
    """Row numbers of each micro-batch's examples in their source, for messages."""
    step: int = 0
    """Optimizer steps completed before this window."""
    seed: int | None = None
    """Seed of the random generators during the window; None: they run on."""
    placeholders: frozenset[int] = frozenset()
    """Numbers of the micro-batches whose loss counts nothing: with them a process without a share of its own takes part
    in what all must do."""

    counts: tuple[int, int, int] | None = None
    """Examples, tokens, and tokens with padding; None: to be counted from the tensors."""

    def to(self, device: torch.device) -> "Window":
        """The same window with its tensors on `device`; pinned ones are copied while the host goes on."""
        pinned = device.type == "cuda"
        batches = [send_to_device(batch, device, non_blocking=pinned) for batch in self.micro_batches]
        return replace(self, micro_batches=batches)

    def pin_memory(self) -> "Window":
        """The same window in pinned memory, as `DataLoader` asks for it."""
        batches = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in self.micro_batches]
        return replace(self, micro_batches=batches)


def count(micro_batches: Sequence[Batch]) -> tuple[int, int, int]:
    """Examples, tokens, and tokens with padding; without attention masks, an example counts as a token."""
    examples = sum(shape_of(batch)[0] for batch in micro_batches)
    masks = [batch[name] for batch in micro_batches for name in MASKS if name in batch]
    if not masks:
        return examples, examples, examples
    return examples, sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)


def shape_of(batch: Batch) -> tuple[int, int, int]:
    """(rows, tokens of the longest row with its padding, tokens of all with their padding)."""
    if "packing" in batch:
        packing = batch["packing"]
        return len(packing.first), max(length for _, length, _ in packing.rectangles), packing.mask.numel()
    rows = len(next(iter(batch.values())))
    length = sum(batch[name].shape[1] for name in MASKS if name in batch) or 1
    return batch["documents"].count if "documents" in batch else rows, length, rows * length


def split(batch: Batch, max_tokens: int) -> list[Batch]:
    """The same rows in order in several batches of at most so many padded tokens, or of a single row.

    Tensors are views. Columns on the right that are padding in all rows of a part are left out.
    """
    if "packing" in batch:
        return _split_packed(batch, max_tokens)
    rows, _, tokens = shape_of(batch)
    parts = -(-rows // max(1, max_tokens * rows // tokens))
    bounds = [rows * part // parts for part in range(parts + 1)]
    return [_trimmed(batch, start, stop) for start, stop in pairwise(bounds)]


def _trimmed(batch: Batch, start: int, stop: int) -> Batch:
    if "documents" in batch:
        windows, documents = batch["documents"].part(start, stop)
        part = {name: value[windows] for name, value in batch.items() if name not in ("documents", "labels")}
        part["documents"] = documents
        if "labels" in batch:
            part["labels"] = batch["labels"][start:stop]
    else:
        part = {name: value[start:stop] for name, value in batch.items()}
    for mask_name in MASKS:
        mask = part.get(mask_name)
        if mask is None:
            continue
        used = mask.any(dim=0).nonzero()
        width = int(used.max()) + 1 if len(used) else mask.shape[1]
        of_tokens = [
            name
            for name, value in part.items()
            if name != "documents"
            and _is_of_tokens(name, value, mask.shape[1])
            and ("decoder_attention_mask" not in part or _is_of_decoder(name) == _is_of_decoder(mask_name))
        ]
        part = {**part, **{name: part[name][:, :width] for name in of_tokens}}
    return part


def _is_of_decoder(name: str) -> bool:
    """Whether a tensor of a batch that has both sides belongs to the decoder's: the other may happen to be as long."""
    return name == "labels" or name.startswith("decoder_")


def _is_of_tokens(name: str, value: torch.Tensor, length: int) -> bool:
    """Whether a tensor has a column for each token. Labels of rows may happen to be as many, but are no integers."""
    return value.ndim > 1 and value.shape[1] == length and not (name == "labels" and value.is_floating_point())


def _split_packed(batch: Batch, max_tokens: int) -> list[Batch]:
    packing = batch["packing"]
    widths = [length for rows, length, _ in packing.rectangles for _ in range(rows)]
    owner = [number for number, (rows, _, _) in enumerate(packing.rectangles) for _ in range(rows)]
    bounds, tokens = [0], 0
    for row, width in enumerate(widths):
        if tokens + width > max_tokens and row > bounds[-1]:
            bounds.append(row)
            tokens = 0
        tokens += width
    ends = [0, *np.cumsum(widths).tolist()]
    parts: list[Batch] = []
    for start, stop in pairwise([*bounds, len(widths)]):
        chain = slice(ends[start], ends[stop])
        rectangles = tuple(
            (len(list(same)), *packing.rectangles[number][1:]) for number, same in groupby(owner[start:stop])
        )
        part = {name: value[:, chain] for name, value in batch.items() if name not in ("packing", "labels")}
        first = packing.first[start:stop] - ends[start]
        part["packing"] = replace(packing, rectangles=rectangles, first=first, mask=packing.mask[chain])
        if "labels" in batch:
            part["labels"] = batch["labels"][start:stop]
        parts.append(part)
    return parts


def lengths_of(dataset: Any) -> np.ndarray:
    """(rows,) tokens of each row, from the column "length"; without it all count alike."""
    if "length" not in dataset.column_names:
        return np.ones(len(dataset), np.int32)
    return numbers_of(dataset, "length").astype(np.int32)


class WindowDataset(Dataset[Window]):
    """Window number `step` of one process, for any step, in any order."""

    def __init__(self, dataset: Any, plan: WindowPlan, collate: Collate, process_index: int = 0) -> None:
        """
        Args:
            dataset: a `datasets.Dataset`. Its column "row", where it has one, numbers the rows for messages.
            process_index: which process's share.
        """
        self.dataset = dataset
        self.plan = plan
        self.collate = collate
        self.process_index = process_index

    def __len__(self) -> int:
        return self.plan.plan.total_steps

    def __getitem__(self, step: int) -> Window:
        micro_batches = self.plan.rectangles(step, self.process_index) or [[np.zeros(0, np.int64)]]
        placeholders = frozenset(number for number, pieces in enumerate(micro_batches) if not len(pieces[0]))
        batches, rows = [], []
        epoch = step // self.plan.plan.steps_per_epoch
        for number, pieces in enumerate(micro_batches):
            batch, numbers = self._collated([self.plan.shortest(step)] if number in placeholders else pieces, epoch)
            batches.append(batch)
            rows.append(numbers)
        return Window(
            micro_batches=batches,
            rows=rows,
            step=step,
            seed=self.plan.plan.window_seed(step, self.process_index),
            placeholders=placeholders,
            # Here, while the tensors are on the CPU: on a GPU each count would wait for the device.
            counts=count([batch for number, batch in enumerate(batches) if number not in placeholders]),
        )

    def largest(self) -> Window:
        """A window of one micro-batch, that with most tokens of all steps."""
        return self._alone(self.plan.largest())

    def longest(self) -> Window:
        """A window of one micro-batch with the longest examples."""
        return self._alone(self.plan.longest())

    def _alone(self, pieces: list[np.ndarray]) -> Window:
        batch, rows = self._collated(pieces)
        return Window([batch], [rows], seed=self.plan.plan.seed)

    def _collated(self, pieces: list[np.ndarray], epoch: int = 0) -> tuple[Batch, list[int]]:
        """A micro-batch of these rectangles, and the row numbers of its examples."""
        examples = np.concatenate(pieces).tolist()
        columns = self.dataset[examples]
        rows = columns.pop("row", examples)
        sizes = [list(map(len, pieces))] if self.plan.packed else []
        collate = self.collate.in_epoch(epoch) if hasattr(self.collate, "in_epoch") else self.collate
        return collate(columns, *sizes), rows

    def loader(self, start: int = 0, num_workers: int = 0, pin_memory: bool = False) -> DataLoader[Window]:
        """The windows from step `start` on, in order. Not for `accelerator.prepare`: the plan has sharded them."""
        if num_workers > 0:
            # Its threads do not survive the fork into the workers, and it says so at length unless this is set.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return DataLoader(
            self,
            sampler=range(start, len(self)),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=_leave_signals_to_the_run,
        )


def _leave_signals_to_the_run(worker: int) -> None:
    """A launcher signals a whole process group; the workers must live until the run has saved its checkpoint."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _as_it_is(window: Any) -> Any:
    return window
