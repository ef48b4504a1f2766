"""The micro-batches of every optimizer step on every process: the plan's effective batches, cut by length."""

from dataclasses import dataclass, replace

import numpy as np

from accumft.cut import UNLIMITED, CostModel, Cut, Limits, cut
from accumft.plan import Plan, epoch_order

# Effective batches that are cut together: NumPy wants many at a time, one window only its own.
_BLOCK = 64
_LARGE_BLOCK = 512
# Examples up to which the largest micro-batch is looked for in every epoch: a second or two.
_EXAMPLES_LOOKED_AT = 500_000


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
    """(rows, tokens a row) of the micro-batch with most padded tokens; of a packed one, a shape of as many tokens."""
    largest_at: tuple[int, int, int]
    """(its padded tokens, step of the run, process)."""


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
        packed: bool = False,
    ) -> None:
        """
        Args:
            lengths: (plan.num_examples,) tokens of every example; None: all alike.
            cost: default: that of a small model on a CPU.
            equal_counts: every process of a step gets the same number of micro-batches, empty ones if need be. For
                models that communicate in every forward (FSDP, SyncBatchNorm).
            packed: the cut makes the rectangles of packed micro-batches (`accumft.packing`), and a micro-batch is as
                many of them as keep the limits.
        """
        self.plan = plan
        self.lengths = np.ones(plan.num_examples, np.int64) if lengths is None else np.asarray(lengths)
        self.cost = cost or CostModel()
        self.limits = plan.batch.limits(pad_to_multiple_of)
        self.equal_counts = equal_counts
        self.packed = packed
        # Of a packed micro-batch, the cut makes the rectangles.
        self._cut_cost = replace(self.cost, overhead=self.cost.rectangle) if packed else self.cost
        self._block: tuple[tuple[int, int], np.ndarray, Cut] | None = None

    def largest(self) -> list[np.ndarray]:
        """The rectangles of the largest micro-batch of all steps: what needs most memory."""
        steps = self.plan.steps_per_epoch
        epochs = range(-(-self.plan.total_steps // steps))
        if len(epochs) * len(self.lengths) > _EXAMPLES_LOOKED_AT:
            epochs = epochs[:1]  # the others are like it, and `longest` bounds them
        tables = (self.table(epoch, self.plan.total_steps - epoch * steps) for epoch in epochs)
        _, step, process = max((table.largest_at for table in tables), key=lambda at: at[0])
        return self.rectangles(step, process)[0]

    def longest(self) -> list[np.ndarray]:
        """The rectangles of a micro-batch with the longest example, beside the next longest ones: attention may need
        more memory for it than for more tokens in shorter ones."""
        longest = np.argsort(-self.lengths.astype(np.int64), kind="stable")[: self.plan.batch.effective_batch_size]
        examples, found = self._cut_order(longest[None])
        groups = [
            [examples[0, piece] for piece in pieces]
            for process in range(self.plan.batch.num_processes)
            for pieces in found.micro_batches(0, process)
        ]
        return next(pieces for pieces in groups if examples[0, 0] in pieces[0])

    def micro_batches(self, step: int, process_index: int) -> list[np.ndarray]:
        """Examples of each micro-batch of one process in step `step` (from 0), the one with most tokens first.

        An empty list where a short effective batch leaves a process none; with `equal_counts`, empty arrays at the end.
        """
        return [np.concatenate(pieces) for pieces in self.rectangles(step, process_index)]

    def rectangles(self, step: int, process_index: int) -> list[list[np.ndarray]]:
        """The same as `micro_batches`, each as the rectangles that are padded alone: one, unless they are packed."""
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
            self._largest_first(
                [[examples[row, piece] for piece in pieces] for pieces in found.micro_batches(row, share)]
            )
            for share in shares
        ]
        if not self.equal_counts:
            return windows[0]
        return _split_into(windows[process_index], max(map(len, windows)))

    def shortest(self, step: int) -> np.ndarray:
        """(1,) the shortest example of a step: what a process without a share runs, for nothing."""
        examples = self.plan.effective_batch(step)
        return examples[[self.lengths[examples].argmin()]]

    def table(self, epoch: int = 0, max_steps: int | None = None) -> StepTable:
        """The numbers of every step of an epoch, or of its first `max_steps`; of `equal_counts`, before they are."""
        steps, processes = self.plan.steps_per_epoch, self.plan.batch.num_processes
        stop = steps if max_steps is None else min(steps, max_steps)
        parts, largest, largest_at = [], (0, 0), (0, 0, 0)
        for first in range(0, stop, _LARGE_BLOCK):
            blocks = [(first, *self._cut(epoch, first, min(first + _LARGE_BLOCK, stop)))]
            if first <= steps - 1 < min(first + _LARGE_BLOCK, stop) and self._tail:
                blocks.append((steps - 1, *self._cut_tail(epoch)))
            for start, examples, found in blocks:
                if not len(examples):
                    continue
                lengths = self.lengths[examples]
                batch, begin = np.nonzero(found.starts)
                last = np.append(batch[1:] != batch[:-1], True)
                rows = np.where(last, examples.shape[1], np.append(begin[1:], 0)) - begin
                padded = self.limits.padded(lengths[batch, begin])
                counts = np.zeros((len(examples), processes), np.int64)
                costs = np.zeros((len(examples), processes))
                owner = found.process[batch, begin]
                opens = found.opens[batch, begin]
                np.add.at(counts, (batch, owner), opens)
                weights = self._cut_cost.overhead + rows * self.cost.row(padded)
                np.add.at(costs, (batch, owner), weights + self.cost.overhead * opens * self.packed)
                parts.append((counts, costs, np.bincount(batch, rows * padded).astype(np.int64), lengths.sum(axis=1)))
                tokens = np.add.reduceat(rows * padded, np.flatnonzero(opens))
                top = int(tokens.argmax())
                # Of a packed micro-batch: its tokens in as few rows as are no longer than its longest.
                few = -(-int(tokens[top]) // max(1, int(padded[opens][top])))
                shape = (few, int(tokens[top]) // max(1, few))
                largest = max(largest, shape, key=lambda shape: shape[0] * shape[1])
                step = epoch * steps + start + int(batch[opens][top])
                largest_at = max(largest_at, (int(tokens[top]), step, int(owner[opens][top])), key=lambda at: at[0])
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return StepTable(columns[0], columns[1], columns[2], columns[3], largest, largest_at)

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
        lengths = self.lengths[examples]
        found = cut(lengths, self.plan.batch.num_processes, self.limits, self._cut_cost)
        return examples, chain(found, lengths, self.limits) if self.packed else found

    def _tokens(self, piece: np.ndarray) -> int:
        return len(piece) * int(self.limits.padded(self.lengths[piece].max()))

    def _largest_first(self, groups: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        return sorted(groups, key=lambda pieces: -sum(map(self._tokens, pieces)))


def chain(found: Cut, lengths: np.ndarray, limits: Limits) -> Cut:
    """The same cuts with as many rectangles in a micro-batch as keep the limits; one that does not fit is divided.

    Args:
        lengths: those that were cut.
    """
    if not lengths.size:
        return found
    padded = limits.padded(lengths.astype(np.int64))
    most_rows = UNLIMITED if limits.max_rows is None else limits.max_rows
    most_tokens = UNLIMITED if limits.max_tokens is None else limits.max_tokens
    starts, opens = found.starts.copy(), np.zeros_like(found.starts)
    batch, begin = np.nonzero(found.starts)
    last = np.append(batch[1:] != batch[:-1], True)
    stop = np.where(last, lengths.shape[1], np.append(begin[1:], 0))
    owner = list(zip(batch.tolist(), found.process[batch, begin].tolist(), strict=True))
    rows = tokens = 0
    for number, (at, end) in enumerate(zip(begin.tolist(), stop.tolist(), strict=True)):
        if number == 0 or owner[number] != owner[number - 1]:
            rows = tokens = 0
        place = owner[number][0]
        while at < end:
            width = int(padded[place, at])
            fits = min(end - at, most_rows - rows, (most_tokens - tokens) // max(1, width))
            if fits < 1 and rows:
                rows = tokens = 0
                continue
            fits = max(fits, 1)
            starts[place, at] = True
            opens[place, at] = rows == 0
            rows, tokens, at = rows + fits, tokens + fits * width, at + fits
    return Cut(starts, found.process, opens)


def _split_into(groups: list[list[np.ndarray]], count: int) -> list[list[np.ndarray]]:
    """`count` micro-batches: those with most rows are halved; where all are single rows, empty ones are added."""
    groups = list(groups)
    while len(groups) < count:
        index = max(range(len(groups)), key=lambda i: sum(map(len, groups[i])), default=None)
        if index is None or sum(map(len, groups[index])) < 2:
            return groups + [[np.zeros(0, np.int64)]] * (count - len(groups))
        pieces = groups[index]
        if len(pieces) == 1:
            pieces = np.array_split(pieces[0], 2)
        middle = len(pieces) // 2
        groups[index : index + 1] = [pieces[:middle], pieces[middle:]]
    return groups
