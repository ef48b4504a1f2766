"""Micro-batches as lists of rows: what throughput.py gives to its peers, and which rows it measures them on.

Lengths are (rows,) int, tokens. Nothing here knows of torch.
"""

from collections.abc import Sequence

import numpy as np

MicroBatches = list[list[int]]
CANDIDATES = 64


def representative(lengths: np.ndarray, size: int, seed: int) -> list[int]:
    """`size` rows in random order, as like to the data set in their lengths as the best of 64 draws is.

    A single effective batch is a small sample of a skewed data set: a plain draw of it may be a quarter longer or
    shorter than the mean, and what is measured on it is then not what an epoch takes.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    size = min(size, len(lengths))
    wanted = np.quantile(lengths, (np.arange(size) + 0.5) / size)
    draws = [generator.permutation(len(lengths))[:size] for _ in range(CANDIDATES)]
    best = min(draws, key=lambda rows: float(np.abs(np.sort(lengths[rows]) - wanted).sum()))
    return best.tolist()


def of_rows(rows: Sequence[int], size: int) -> MicroBatches:
    """Consecutive rows, `size` in each."""
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def pad_free(lengths: np.ndarray, budget: int) -> MicroBatches:
    """The whole data set in micro-batches of neighbours in length: rows × longest stays within `budget` tokens.

    A row that is longer than the budget is alone.
    """
    order = np.argsort(-lengths, kind="stable")
    batches: MicroBatches = []
    start = 0
    while start < len(order):
        rows = max(1, budget // int(lengths[order[start]]))
        batches.append(order[start : start + rows].tolist())
        start += rows
    return batches


def thinned(batches: MicroBatches, number: int) -> MicroBatches:
    """`number` of the micro-batches, at even distances: the spread of lengths stays as it is in all of them."""
    number = min(number, len(batches))
    return [batches[int((index + 0.5) * len(batches) / number)] for index in range(number)]


def padding(lengths: np.ndarray, batches: MicroBatches) -> float:
    """Padded tokens over real ones."""
    padded = sum(len(rows) * int(lengths[rows].max()) for rows in batches)
    return padded / sum(int(lengths[rows].sum()) for rows in batches)


def into_windows(batches: MicroBatches, steps: int, processes: int, seed: int) -> list[list[MicroBatches]]:
    """For each process and step its micro-batches, shuffled, dealt so that all get equally many where that goes."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(batches))
    shares = []
    for process in range(processes):
        mine = [batches[index] for index in order[process::processes]]
        pieces = np.array_split(np.arange(len(mine)), min(steps, len(mine)))
        shares.append([[mine[index] for index in piece] for piece in pieces])
    return shares
