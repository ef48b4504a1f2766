"""Random choices of rows that a seed alone decides, on every machine and with every number of processes."""

from collections.abc import Hashable, Sequence

import numpy as np

from accumft.plan import random_order


def draw_rows(n: int, size: int | None, seed: int, stream: int = 0) -> np.ndarray:
    """`size` of the numbers 0 to n - 1, ascending; or all where there are no more; a larger draw holds a smaller."""
    return np.sort(random_order(n, seed, stream)[:size])


def hold_out(texts: Sequence[Hashable], classes: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Which rows to hold out: bool (rows,), about `fraction` of each class.

    The seats of validation, `fraction` of the rows, go to the classes by largest remainder. Rows of the same text stay
    together, counted for the class of the first of them; a class whose texts would all be held out keeps one, so a
    class with a single row is never held out.

    Args:
        texts: What must be equal for rows to stay together.
        classes: Class ids, int (rows,); all the same for a plain draw.
        fraction: Share to hold out, 0 to 1.
        seed: Decides which rows.
    """
    number: dict[Hashable, int] = {}
    group = np.array([number.setdefault(text, len(number)) for text in texts], np.int64)  # (rows,)
    group_size = np.bincount(group)
    group_class = np.empty(len(number), np.int64)
    group_class[group[::-1]] = classes[::-1]  # the first row's class is written last
    rows_of_class = np.bincount(group_class, weights=group_size).astype(np.int64)
    groups_of_class = np.bincount(group_class)

    seats = _largest_remainder(rows_of_class, fraction, may_grow=groups_of_class > 1)
    held_out = np.zeros(len(number), bool)
    for g in random_order(len(number), seed):
        c = group_class[g]
        if group_size[g] <= seats[c] and groups_of_class[c] > 1:
            held_out[g] = True
            seats[c] -= group_size[g]
            groups_of_class[c] -= 1

    # A class may stand only in texts that were counted for another class: give those back.
    lost = np.setdiff1d(classes, classes[~held_out[group]])
    held_out[group[np.isin(classes, lost)]] = False
    return held_out[group]


def _largest_remainder(rows: np.ndarray, fraction: float, may_grow: np.ndarray) -> np.ndarray:
    """`fraction` of the rows of each class, int64, rounded so that they add up to `fraction` of all rows."""
    exact = rows * fraction
    seats = np.floor(exact).astype(np.int64)
    missing = int(np.floor(exact.sum() + 0.5)) - int(seats.sum())
    by_remainder = np.lexsort((-rows, seats - exact))  # largest remainder first, then the larger class
    seats[by_remainder[may_grow[by_remainder]][:missing]] += 1
    return seats
