"""The cut of an effective batch: against every cut there is, for batches small enough to try them all."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from accumft.cut import BALANCE_TOLERANCE, CostModel, Cut, Limits, cut

COSTS = (CostModel(overhead=30, quadratic=0.0), CostModel(overhead=5, quadratic=0.02))
LIMITS = (Limits(), Limits(max_rows=3), Limits(max_tokens=150, pad_to_multiple_of=8), Limits(4, 200))


def batch_of(seed: int, examples: int) -> np.ndarray:
    """(1, examples) skewed lengths, the longest first."""
    lengths = np.clip(np.random.default_rng(seed).lognormal(3.5, 0.9, examples), 1, 400).astype(np.int64)
    return -np.sort(-lengths)[None]


def fits(piece: np.ndarray, limits: Limits) -> bool:
    padded = -(-int(piece[0]) // limits.pad_to_multiple_of) * limits.pad_to_multiple_of
    rows = len(piece)
    return rows == 1 or (
        (limits.max_rows is None or rows <= limits.max_rows)
        and (limits.max_tokens is None or rows * padded <= limits.max_tokens)
    )


def price(piece: np.ndarray, limits: Limits, cost: CostModel) -> float:
    padded = -(-int(piece[0]) // limits.pad_to_multiple_of) * limits.pad_to_multiple_of
    return cost.overhead + len(piece) * (padded + cost.quadratic * padded**2)


def every_cut(lengths: np.ndarray, limits: Limits) -> Iterator[list[np.ndarray]]:
    """All cuts of a sorted batch into neighbours that keep the limits."""
    for inner in itertools.product((False, True), repeat=len(lengths) - 1):
        pieces = np.split(lengths, [i + 1 for i, here in enumerate(inner) if here])
        if all(fits(piece, limits) for piece in pieces):
            yield pieces


def pieces_of(found: Cut, lengths: np.ndarray, processes: int) -> list[list[np.ndarray]]:
    return [[lengths[0, piece] for (piece,) in found.micro_batches(0, process)] for process in range(processes)]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("seed", range(6))
def test_one_process_gets_the_cheapest_cut_there_is(seed: int, cost: CostModel, limits: Limits) -> None:
    lengths = batch_of(seed, 11)
    mine = pieces_of(cut(lengths, 1, limits, cost), lengths, 1)[0]
    assert np.concatenate(mine).tolist() == lengths[0].tolist()
    assert all(fits(piece, limits) for piece in mine)
    best = min(sum(price(piece, limits, cost) for piece in pieces) for pieces in every_cut(lengths[0], limits))
    assert sum(price(piece, limits, cost) for piece in mine) == pytest.approx(best)


@pytest.mark.parametrize("processes", [2, 3, 5])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("seed", range(4))
def test_several_processes_end_as_soon_as_they_can(seed: int, limits: Limits, processes: int) -> None:
    cost, lengths = COSTS[0], batch_of(seed + 50, 10)
    mine = pieces_of(cut(lengths, processes, limits, cost), lengths, processes)
    rows = [int(row) for share in mine for piece in share for row in piece]
    assert sorted(rows) == sorted(lengths[0].tolist())
    assert all(share for share in mine), "ten examples leave no process idle"
    best = np.inf
    for pieces in every_cut(lengths[0], limits):
        prices = [price(piece, limits, cost) for piece in pieces]
        for ends in itertools.combinations_with_replacement(range(len(prices) + 1), processes - 1):
            edges = (0, *ends, len(prices))
            best = min(best, max(sum(prices[a:b]) for a, b in itertools.pairwise(edges)))
    worst = max(sum(price(piece, limits, cost) for piece in share) for share in mine)
    assert best - 1e-6 <= worst <= best * (1 + BALANCE_TOLERANCE) + 1e-6


def test_many_batches_at_once_are_cut_as_each_alone() -> None:
    lengths = np.concatenate([batch_of(seed, 32) for seed in range(20)])
    for processes in (1, 4):
        together = cut(lengths, processes, LIMITS[3], COSTS[0])
        for number in range(20):
            alone = cut(lengths[number : number + 1], processes, LIMITS[3], COSTS[0])
            assert np.array_equal(alone.starts[0], together.starts[number])
            assert np.array_equal(alone.process[0], together.process[number])


def test_a_row_longer_than_the_budget_runs_alone() -> None:
    lengths = np.array([[500, 60, 50, 40]])
    pieces = pieces_of(cut(lengths, 1, Limits(max_tokens=200), COSTS[0]), lengths, 1)[0]
    assert [piece.tolist() for piece in pieces] == [[500], [60, 50, 40]]


def test_one_long_row_leaves_no_process_idle() -> None:
    """The others fit beside it into one more process; all eight take part all the same."""
    lengths = np.array([[500, 20, 20, 20, 20, 20, 20, 20]])
    pieces = pieces_of(cut(lengths, 8, Limits(), COSTS[0]), lengths, 8)
    assert [[piece.tolist() for piece in share] for share in pieces] == [[[500]], *[[[20]]] * 7]


@pytest.mark.parametrize("limit", [2**31, 10**30])
def test_a_budget_that_is_no_limit(limit: int) -> None:
    lengths = np.array([[9, 5, 5]], np.int32)
    for limits in (Limits(max_tokens=limit), Limits(max_rows=limit)):
        assert [len(piece) for piece in pieces_of(cut(lengths, 1, limits, COSTS[0]), lengths, 1)[0]] == [3]


def test_no_overhead_and_no_examples() -> None:
    free = CostModel(overhead=0.0)
    pieces = pieces_of(cut(np.array([[7, 7, 5, 5]]), 1, Limits(), free), np.array([[7, 7, 5, 5]]), 1)[0]
    assert all(len(set(piece.tolist())) == 1 for piece in pieces), "nothing is padded"
    assert cut(np.zeros((3, 0), np.int64), 2, Limits(), free).starts.shape == (3, 0)


def test_fewer_examples_than_processes() -> None:
    lengths = np.array([[9, 5]])
    pieces = pieces_of(cut(lengths, 4, Limits(), COSTS[0]), lengths, 4)
    assert sorted(map(len, pieces)) == [0, 0, 1, 1]


def test_cost_of_a_model_grows_with_length_and_device() -> None:
    class Config:
        hidden_size = 384

    cost = CostModel.of(Config(), "cpu")
    assert cost.row(np.array([384]))[0] == pytest.approx(384 * (1 + 1 / 3.5))
    assert CostModel.of(Config(), "cuda").overhead > cost.overhead
    assert CostModel.of(object(), "cpu").quadratic == 0
