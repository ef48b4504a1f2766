"""Windows: one process's share of an effective batch, collated, on its way to the device."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset

from accumft.plan import Plan

Batch = Mapping[str, torch.Tensor]
Collate = Callable[[dict[str, list[Any]]], Batch]
"""Makes a batch from the columns of some rows, each column a list."""


@dataclass(frozen=True, slots=True)
class Window:
    """The micro-batches of one optimizer step on one process."""

    micro_batches: Sequence[Batch]
    """At least one; of a placeholder exactly one, whose loss counts nothing."""
    rows: Sequence[Sequence[int]] = ()
    """Row numbers of each micro-batch's examples in their source, for messages."""
    step: int = 0
    """Optimizer steps completed before this window."""
    seed: int | None = None
    """Seed of the random generators during the window; None: they run on."""
    placeholder: bool = False
    """Whether this process has no share of a short effective batch, and only takes part in what all must do."""

    counts: tuple[int, int, int] | None = None
    """Examples, tokens, and tokens with padding; None: to be counted from the tensors."""

    def to(self, device: torch.device) -> "Window":
        """The same window with its tensors on `device`."""
        return replace(self, micro_batches=[send_to_device(batch, device) for batch in self.micro_batches])


def count(micro_batches: Sequence[Batch]) -> tuple[int, int, int]:
    """Examples, tokens, and tokens with padding; without attention masks, an example counts as a token."""
    examples = sum(len(next(iter(batch.values()))) for batch in micro_batches)
    masks = [batch["attention_mask"] for batch in micro_batches if "attention_mask" in batch]
    if not masks:
        return examples, examples, examples
    return examples, sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)


class WindowDataset(Dataset[Window]):
    """Window number `step` of one process, for any step, in any order."""

    def __init__(self, dataset: Any, plan: Plan, collate: Collate, process_index: int = 0) -> None:
        """
        Args:
            dataset: a `datasets.Dataset`. Its column "row", where it has one, numbers the rows for messages; "length",
                where it has one, brings rows of like length together.
            process_index: which process's share.
        """
        self.dataset = dataset
        self.lengths = np.asarray(dataset["length"]) if "length" in getattr(dataset, "column_names", ()) else None
        self.plan = plan
        self.collate = collate
        self.process_index = process_index

    def __len__(self) -> int:
        return self.plan.total_steps

    def __getitem__(self, step: int) -> Window:
        indices = self.plan.micro_batches(step, self.process_index, self.lengths)
        placeholder = not indices
        if placeholder:
            indices = [self.plan.effective_batch(step)[:1]]
        columns = [self.dataset[piece.tolist()] for piece in indices]
        rows = [column.pop("row", piece.tolist()) for column, piece in zip(columns, indices, strict=True)]
        batches = [self.collate(column) for column in columns]
        # Largest first: memory runs out early or not at all, and the micro-batch that synchronises is the smallest.
        order = sorted(range(len(batches)), key=lambda i: -max(tensor.numel() for tensor in batches[i].values()))
        return Window(
            micro_batches=[batches[i] for i in order],
            rows=[rows[i] for i in order],
            step=step,
            seed=self.plan.window_seed(step, self.process_index),
            placeholder=placeholder,
            # Here, while the tensors are on the CPU: on a GPU each count would wait for the device.
            counts=(0, 0, 0) if placeholder else count(batches),
        )

    def loader(self, start: int = 0, num_workers: int = 0) -> DataLoader[Window]:
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
        )


def _as_it_is(window: Any) -> Any:
    return window
