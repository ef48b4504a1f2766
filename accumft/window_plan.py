"""The micro-batches of every optimizer step on every process: the plan's effective batches, cut by length."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from accumft.cut import CostModel, Cut, Limits, cut
from accumft.plan import Plan, epoch_order

ExampleT = TypeVar("ExampleT")

# Effective batches that are cut together: NumPy wants many at a time, one window only its own.
_BLOCK = 64
_LARGE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class StepTable:
    """Numbers of consecutive steps, one an entry: what a dry run prints."""

    micro_batches: np.ndarray
    """(steps, processes) int."""
    cost: np.ndarray
    """(steps, processes) float, in tokens: what the cost model says a process takes."""
    padded_tokens: np.ndarray
    """(steps,) int, over all processes."""
    tokens: np.ndarray
    """(steps,) int, without padding."""
    largest: tuple[int, int]
    """(rows, tokens a row) of the micro-batch with most padded tokens."""


class WindowPlan:
    """Which examples each micro-batch of each process holds, for any step, in any order.

    Inside an effective batch the examples are sorted by length and cut as `accumft.cut` says. A pure function of the
    plan, the lengths, the limits and the cost model.
    """

    def __init__(
        self,
        plan: Plan,
        lengths: np.ndarray | None = None,
        cost: CostModel | None = None,
        pad_to_multiple_of: int = 1,
        equal_counts: bool = False,
    ) -> None:
        """
        Args:
            lengths: (plan.num_examples,) tokens of every example; None: all alike.
            cost: default: that of a small model on a CPU.
            equal_counts: every process of a step gets the same number of micro-batches, empty ones if need be. For
                models that communicate in every forward (FSDP, SyncBatchNorm).
        """
        self.plan = plan
        self.lengths = np.ones(plan.num_examples, np.int64) if lengths is None else np.asarray(lengths)
        self.cost = cost or CostModel()
        self.limits = plan.batch.limits(pad_to_multiple_of)
        self.equal_counts = equal_counts
        self._block: tuple[tuple[int, int], np.ndarray, Cut] | None = None

    def micro_batches(self, step: int, process_index: int) -> list[np.ndarray]:
        """Examples of each micro-batch of one process in step `step` (from 0), the one with most tokens first.

        An empty list where a short effective batch leaves a process none; with `equal_counts`, empty arrays at the end.
        """
        epoch, position = divmod(step, self.plan.steps_per_epoch)
        block, row = divmod(position, _BLOCK)
        if self._block is None or self._block[0] != (epoch, block):
            first = block * _BLOCK
            self._block = ((epoch, block), *self._cut(epoch, first, min(first + _BLOCK, self.plan.steps_per_epoch)))
        _, examples, found = self._block
        if row == len(examples):
            (examples, found), row = self._cut_tail(epoch), 0
        shares = [process_index] if not self.equal_counts else range(self.plan.batch.num_processes)
        windows = [
            self._largest_first([examples[row, piece] for piece in found.micro_batches(row, share)]) for share in shares
        ]
        if not self.equal_counts:
            return windows[0]
        return _split_into(windows[process_index], max(map(len, windows)))

    def shortest(self, step: int) -> np.ndarray:
        """(1,) the shortest example of a step: what a process without a share runs, for nothing."""
        examples = self.plan.effective_batch(step)
        return examples[[self.lengths[examples].argmin()]]

    def table(self, epoch: int = 0, max_steps: int | None = None) -> StepTable:
        """The numbers of every step of an epoch, or of its first `max_steps`."""
        steps, processes = self.plan.steps_per_epoch, self.plan.batch.num_processes
        stop = steps if max_steps is None else min(steps, max_steps)
        parts, largest = [], (0, 0)
        for first in range(0, stop, _LARGE_BLOCK):
            blocks = [self._cut(epoch, first, min(first + _LARGE_BLOCK, stop))]
            if first <= steps - 1 < min(first + _LARGE_BLOCK, stop) and self._tail:
                blocks.append(self._cut_tail(epoch))
            for examples, found in blocks:
                if not len(examples):
                    continue
                lengths = self.lengths[examples]
                batch, begin = np.nonzero(found.starts)
                last = np.append(batch[1:] != batch[:-1], True)
                rows = np.where(last, examples.shape[1], np.append(begin[1:], 0)) - begin
                padded = self.limits.padded(lengths[batch, begin])
                counts = np.zeros((len(examples), processes), np.int64)
                costs = np.zeros((len(examples), processes))
                np.add.at(counts, (batch, found.process[batch, begin]), 1)
                weights = self.cost.overhead + rows * self.cost.row(padded)
                np.add.at(costs, (batch, found.process[batch, begin]), weights)
                parts.append((counts, costs, np.bincount(batch, rows * padded).astype(np.int64), lengths.sum(axis=1)))
                top = int((rows * padded).argmax())
                largest = max(largest, (int(rows[top]), int(padded[top])), key=lambda shape: shape[0] * shape[1])
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return StepTable(columns[0], columns[1], columns[2], columns[3], largest)

    @property
    def _tail(self) -> int:
        return self.plan.num_examples % self.plan.batch.effective_batch_size

    def _cut(self, epoch: int, first: int, stop: int) -> tuple[np.ndarray, Cut]:
        """The whole effective batches among steps `first` to `stop` of an epoch, cut."""
        size = self.plan.batch.effective_batch_size
        stop = min(stop, self.plan.num_examples // size)
        order = epoch_order(self.plan.num_examples, self.plan.seed, epoch)
        return self._cut_order(order[first * size : stop * size].reshape(-1, size))

    def _cut_tail(self, epoch: int) -> tuple[np.ndarray, Cut]:
        """The short last effective batch of an epoch."""
        order = epoch_order(self.plan.num_examples, self.plan.seed, epoch)
        return self._cut_order(order[None, len(order) - self._tail :])

    def _cut_order(self, examples: np.ndarray) -> tuple[np.ndarray, Cut]:
        """(batches, examples) → the same sorted by length, longest first, and their cuts."""
        by_length = np.argsort(-self.lengths[examples].astype(np.int64), axis=1, kind="stable")
        examples = np.take_along_axis(examples, by_length, axis=1)
        return examples, cut(self.lengths[examples], self.plan.batch.num_processes, self.limits, self.cost)

    def _largest_first(self, pieces: list[np.ndarray]) -> list[np.ndarray]:
        return sorted(pieces, key=lambda piece: -len(piece) * int(self.limits.padded(self.lengths[piece].max())))


def _split_into(pieces: list[np.ndarray], count: int) -> list[np.ndarray]:
    """`count` pieces: those with most rows are halved, and where all are single rows, empty ones are added."""
    pieces = list(pieces)
    while len(pieces) < count:
        index = max(range(len(pieces)), key=lambda i: len(pieces[i]), default=None)
        if index is None or len(pieces[index]) < 2:
            return pieces + [np.zeros(0, np.int64)] * (count - len(pieces))
        piece = pieces[index]
        pieces[index : index + 1] = np.array_split(piece, 2)
    return pieces


def cut_stream(
    examples: Iterable[tuple[ExampleT, int]],
    effective_batch_size: int,
    num_processes: int,
    process_index: int,
    limits: Limits,
    cost: CostModel | None = None,
    buffer: int = _BLOCK,
) -> Iterator[list[list[ExampleT]]]:
    """The windows of one process over a stream whose length is not known ahead.

    Consecutive examples make an effective batch; `buffer` of those are read at a time and cut as `WindowPlan` cuts.

    Args:
        examples: (example, its length in tokens) each; every process reads the same ones.

    Yields:
        The micro-batches of one step, the largest first; an empty list where a short last batch leaves this process
        none.
    """
    stream, cost = iter(examples), cost or CostModel()
    while some := list(islice(stream, buffer * effective_batch_size)):
        whole = len(some) // effective_batch_size * effective_batch_size
        for part in (some[:whole], some[whole:]):
            if not part:
                continue
            lengths = np.array([length for _, length in part]).reshape(-(-len(part) // effective_batch_size), -1)
            order = np.argsort(-lengths, axis=1, kind="stable")
            lengths = np.take_along_axis(lengths, order, axis=1)
            found = cut(lengths, num_processes, limits, cost)
            for batch in range(len(lengths)):
                offset = batch * effective_batch_size
                pieces = found.micro_batches(batch, process_index)
                pieces.sort(key=lambda piece: -len(piece) * int(limits.padded(lengths[batch, piece[0]])))
                yield [[part[offset + i][0] for i in order[batch, piece].tolist()] for piece in pieces]


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
