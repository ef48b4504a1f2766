"""Windows of a stream, whose length is not known ahead."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import numpy as np

from accumft.cut import CostModel, Limits, cut

ExampleT = TypeVar("ExampleT")

_BUFFER = 64  # effective batches


def cut_stream(
    examples: Iterable[tuple[ExampleT, int]],
    effective_batch_size: int,
    num_processes: int,
    process_index: int,
    limits: Limits,
    cost: CostModel | None = None,
    buffer: int = _BUFFER,
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
                pieces = [piece for (piece,) in found.micro_batches(batch, process_index)]
                pieces.sort(key=lambda piece: -len(piece) * int(limits.padded(lengths[batch, piece[0]])))
                yield [[part[offset + i][0] for i in order[batch, piece].tolist()] for piece in pieces]
