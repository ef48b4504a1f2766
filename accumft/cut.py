"""How an effective batch is cut into micro-batches and shared out among processes, so that its step ends soonest.

Pure functions in NumPy, over many effective batches at once: no tensors, no data read. What is cut is a matrix of
lengths, one row an effective batch, each sorted from the longest example to the shortest.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

# Of the search for the smallest maximum over processes: how near to it the search ends, as a share.
BALANCE_TOLERANCE = 0.02
# Rounding of sums of costs, as a share of one process's whole time.
_ROUNDING = 1e-9
UNLIMITED = 2**62  # rows or tokens


@dataclass(frozen=True, slots=True)
class CostModel:
    """Time of one micro-batch, forward and backward, in units of one token's: overhead + rows · (length + quadratic ·
    length²)."""

    overhead: float = 40.0
    """What a micro-batch costs however small it is: gradients added up, an embedding gradient made, kernels started."""
    quadratic: float = 0.0
    """Attention: its time for a token grows with the length of the token's row."""
    rectangle: float = 3.0
    """What one more rectangle of a packed micro-batch costs, see `accumft.packing`: attention runs on each alone."""

    @classmethod
    def of(cls, config: Any, device_type: str) -> "CostModel":
        """The constants for a model of this `transformers` configuration.

        Defaults, not measurements: the cut of a run must not change with what else the machine does. MiniLM on a CPU
        was measured at an overhead of 45 tokens and a quadratic term of 1 / 1,300 to 1 / 1,500; a GPU computes a token
        sooner, so that the same overhead takes more of them.
        """
        hidden = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
        # A token's products with the weights of a layer are 12 · hidden² multiplications, its attention 2 · length ·
        # hidden: 1 / (6 · hidden), at the lower efficiency of attention.
        quadratic = 1 / (3.5 * hidden) if hidden else 0.0
        if device_type == "cpu":
            return cls(quadratic=quadratic)
        return cls(overhead=256.0, quadratic=quadratic, rectangle=32.0)

    def row(self, lengths: np.ndarray) -> np.ndarray:
        """Cost of one row in a micro-batch padded to these lengths, the overhead left out."""
        lengths = lengths.astype(np.float64)
        return lengths + self.quadratic * lengths**2


@dataclass(frozen=True, slots=True)
class Limits:
    """What one micro-batch may hold; a single row always may."""

    max_rows: int | None = None
    max_tokens: int | None = None
    """Rows × longest row, rounded up to `pad_to_multiple_of`."""
    pad_to_multiple_of: int = 1

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """What rows of these lengths are padded to, alone."""
        multiple = self.pad_to_multiple_of
        return lengths if multiple == 1 else -(-lengths // multiple) * multiple

    def rows(self, padded: np.ndarray) -> np.ndarray:
        """How many rows a micro-batch may have whose longest is padded to this; at least 1."""
        most = np.full(padded.shape, UNLIMITED if self.max_rows is None else min(self.max_rows, UNLIMITED))
        if self.max_tokens is not None:
            tokens = min(self.max_tokens, UNLIMITED)
            most = np.minimum(most, np.maximum(tokens // np.maximum(padded.astype(np.int64), 1), 1))
        return most


@dataclass(frozen=True, slots=True)
class Cut:
    """Cuts of several effective batches of one size, (batches, examples) each."""

    starts: np.ndarray
    """bool: a rectangle of rows padded to its first begins here; it reaches to the next beginning."""
    process: np.ndarray
    """int32: which process runs the example."""
    opens: np.ndarray
    """bool: a micro-batch begins here: at each rectangle, unless they are chained."""

    def micro_batches(self, batch: int, process: int) -> list[list[np.ndarray]]:
        """Positions of the examples of each rectangle of each micro-batch of one process, in one effective batch."""
        mine = np.flatnonzero(self.process[batch] == process)
        if not len(mine):
            return []
        parts = np.split(mine, np.flatnonzero(self.opens[batch, mine])[1:])
        return [np.split(part, np.flatnonzero(self.starts[batch, part])[1:]) for part in parts]


def cut(lengths: np.ndarray, num_processes: int, limits: Limits, cost: CostModel) -> Cut:
    """Cuts effective batches so that the slowest process of each finishes soonest.

    Each micro-batch holds neighbours in the order of length, each process a stretch of micro-batches. On one process
    the cut is the cheapest there is; on several, the largest cost of a process is within 2 % of the smallest possible
    with such stretches.

    Args:
        lengths: (batches, examples) int, tokens, each row descending.
    """
    batches, examples = lengths.shape
    if not lengths.size:
        none = np.zeros(lengths.shape, bool)
        return Cut(none, np.zeros(lengths.shape, np.int32), none)
    padded = limits.padded(lengths)
    weights = cost.row(padded)
    # Where a micro-batch that begins at a position must have ended.
    reach = np.minimum(np.arange(examples) + np.minimum(limits.rows(padded), examples), examples)
    reach = _within_reason(weights, reach, cost.overhead)
    value, begin = _cheapest(weights, reach, cost.overhead, None)
    if num_processes == 1:
        starts = _trace(begin)[0]
        return Cut(starts, np.zeros(lengths.shape, np.int32), starts)

    starts, process = np.zeros(lengths.shape, bool), np.zeros(lengths.shape, np.int32)
    # No process can do with less than its even part of the cheapest cut, nor than the longest example alone.
    floor = np.maximum(value[:, -1] / num_processes, cost.overhead + weights[:, 0])
    low, high = floor.copy(), np.full(batches, np.inf)
    target, growth = floor.copy(), np.full(batches, BALANCE_TOLERANCE)
    open_ = np.arange(batches)
    while len(open_):
        value, begin = _cheapest(weights[open_], reach[open_], cost.overhead, target[open_])
        fits = value[:, -1] <= num_processes + _ROUNDING
        found = open_[fits]
        starts[found], process[found] = _trace(begin[fits], value[fits])
        high[found] = target[found]
        low[open_[~fits]] = target[open_[~fits]]
        # Upwards in doubling strides until one fits, then halfway between the last two.
        growing = np.isinf(high)
        target = np.where(growing, floor * (1 + growth), (low + high) / 2)
        growth = np.where(growing, growth * 2, growth)
        # What fitted at the floor itself cannot be bettered.
        open_ = open_[(high > low * (1 + BALANCE_TOLERANCE))[open_] & (high > floor)[open_]]
    for batch in np.flatnonzero(process.max(axis=1) + 1 < min(num_processes, examples)):
        _employ_all(starts[batch], process[batch], weights[batch], cost.overhead, min(num_processes, examples))
    return Cut(starts, process, starts)


def _within_reason(weights: np.ndarray, reach: np.ndarray, overhead: float) -> np.ndarray:
    """`reach` without the micro-batches that are cheaper in two, whose overhead is less than the padding it saves.

    Tried at a few places only: this makes the search several times faster and changes no result.
    """
    examples = weights.shape[1]
    reach = reach.astype(np.int32)
    ahead = 1
    while ahead < examples:
        # Of a micro-batch that begins `ahead` positions earlier, cut here: each row from here on costs so much less.
        saved = weights[:, :-ahead] - weights[:, ahead:]
        bound = np.arange(ahead, examples) + np.floor(
            np.divide(overhead, saved, out=np.full_like(saved, np.inf), where=saved > 0)
        )
        reach[:, :-ahead] = np.minimum(reach[:, :-ahead], bound)
        ahead *= 2
    return reach


def _cheapest(
    weights: np.ndarray, reach: np.ndarray, overhead: float, target: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The dynamic programme over the ends of micro-batches: (value, begin), each (batches, examples + 1).

    `value[:, end]` is the least cost of the examples before `end`, and `begin[:, end]` where its last micro-batch
    begins. With a `target` (batches,), the cost that a process may have, the value is what fills the fewest processes
    one after the other, and the last of them the least: 2.3 is two whole processes and 0.3 of a third.
    """
    batches, examples = weights.shape
    value = np.zeros((batches, examples + 1))
    begin = np.zeros((batches, examples + 1), np.int32)
    full = np.zeros((batches, examples + 1))  # the value rounded up: where the process that is being filled is full
    if target is not None:
        weights, overhead_ = weights / target[:, None], (overhead / target)[:, None]
    # Longer rows come first, so that the reach grows: whatever reaches `end` is a stretch of positions before it.
    furthest = np.maximum.accumulate(reach.max(axis=0))
    first = np.searchsorted(furthest, np.arange(examples + 1), side="left")
    positions = np.arange(examples)
    for end in range(1, examples + 1):
        some = slice(first[end], end)
        candidates = (end - positions[some]) * weights[:, some]
        if target is None:
            candidates += value[:, some]
        else:
            candidates += overhead_
            candidates[candidates > 1 + _ROUNDING] = np.inf
            within = value[:, some] + candidates
            candidates += full[:, some]
            np.copyto(candidates, within, where=within <= full[:, some] + _ROUNDING)
        candidates[reach[:, some] < end] = np.inf
        best = candidates.argmin(axis=1)
        value[:, end] = np.take_along_axis(candidates, best[:, None], axis=1)[:, 0]
        if target is None:
            value[:, end] += overhead
        else:
            full[:, end] = np.ceil(value[:, end] - _ROUNDING)
        begin[:, end] = best + first[end]
    return value, begin


def _trace(begin: np.ndarray, value: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """From the ends back: where micro-batches begin, bool, and the process of each example, both (batches, examples).

    Args:
        value: filled processes at each end, of a programme with a target; None: all is the first process's.
    """
    batches, examples = begin.shape[0], begin.shape[1] - 1
    starts, process = np.zeros((batches, examples), bool), np.zeros((batches, examples), np.int32)
    each, end = np.arange(batches), np.full(batches, examples)
    while (running := end > 0).any():
        start = begin[each, end]
        starts[each[running], start[running]] = True
        if value is not None:
            process[each[running], start[running]] = np.ceil(value[each, end] - _ROUNDING)[running] - 1
        end = np.where(running, start, 0)
    return starts, np.maximum.accumulate(process, axis=1)


def _employ_all(starts: np.ndarray, process: np.ndarray, weights: np.ndarray, overhead: float, wanted: int) -> None:
    """Gives work to the processes that a batch's cut leaves idle, in place, by halving the costliest shares.

    One long example can hold a step up for so long that the others fit into few processes; spread over all, they are
    over sooner, and no process must run an example of another's for nothing.
    """
    begins = [*np.flatnonzero(starts).tolist(), len(starts)]
    pieces = list(itertools.pairwise(begins))
    shares: dict[int, list[tuple[int, int]]] = {}
    for piece in pieces:
        shares.setdefault(int(process[piece[0]]), []).append(piece)
    parts = list(shares.values())

    def price(part: list[tuple[int, int]]) -> float:
        return float(sum(overhead + (b - a) * weights[a] for a, b in part)) if part[-1][1] - part[0][0] > 1 else -1.0

    while len(parts) < wanted:
        index = max(range(len(parts)), key=lambda i: price(parts[i]))
        part = parts[index]
        if len(part) == 1:
            a, b = part[0]
            part = [(a, (a + b) // 2), ((a + b) // 2, b)]
        middle = len(part) // 2
        parts[index : index + 1] = [part[:middle], part[middle:]]
    for number, part in enumerate(parts):
        for a, b in part:
            starts[a] = True
            process[a:b] = number
