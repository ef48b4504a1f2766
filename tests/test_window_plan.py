"""The micro-batches of every step: each example once, cut by length, on any number of processes."""

import tracemalloc

import numpy as np
import pytest

from accumft.cut import CostModel, Limits
from accumft.evaluation import batches_by_length
from accumft.plan import Plan, resolve_batch_sizes
from accumft.stream import cut_stream
from accumft.synthetic import generate_notes
from accumft.window_plan import WindowPlan


def lengths_like(n: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(3.8, 0.9, n), 4, 512).astype(np.int32)


def plan_of(n: int, effective: int, processes: int = 1, epochs: float = 1, **limits: int) -> Plan:
    batch = resolve_batch_sizes(
        effective, limits.get("rows"), None, processes, limits.get("tokens", None if "rows" in limits else 256)
    )
    return Plan.of(n, batch, seed=5, num_train_epochs=epochs, max_steps=-1)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [{"rows": 1}, {"rows": 3}, {"tokens": 64}, {"tokens": 100_000}])
@pytest.mark.parametrize("examples", [1, 5, 16, 17, 31, 48, 50])
def test_every_example_once_an_epoch_whatever_the_cut(examples: int, limit: dict, processes: int) -> None:
    plan = plan_of(examples, 16, processes, epochs=2, **limit)
    lengths = lengths_like(examples)
    for by_length, packed in ((None, False), (lengths, False), (lengths, True)):
        windows = WindowPlan(plan, by_length, packed=packed)
        for epoch in range(2):
            seen = []
            for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
                shares = [windows.micro_batches(step, rank) for rank in range(processes)]
                together = np.concatenate([piece for share in shares for piece in share])
                assert sorted(together) == sorted(plan.effective_batch(step))
                assert sum(bool(share) for share in shares) == min(processes, len(together))
                chains = [pieces for rank in range(processes) for pieces in windows.rectangles(step, rank)]
                for piece, pieces in zip((piece for share in shares for piece in share), chains, strict=True):
                    tokens = sum(len(p) * (1 if by_length is None else int(lengths[p].max())) for p in pieces)
                    assert len(piece) <= limit.get("rows", 99)
                    assert tokens <= limit.get("tokens", 10**9) or len(piece) == 1
                seen.extend(together)
            assert sorted(seen) == list(range(examples))


def test_any_step_alone_is_what_it_is_in_a_run() -> None:
    """A resume, and each worker of a loader, begins somewhere."""
    plan, lengths = plan_of(1000, 8, 2, epochs=3), lengths_like(1000)
    whole = WindowPlan(plan, lengths)
    run = [[piece.tolist() for piece in whole.micro_batches(step, 1)] for step in range(plan.total_steps)]
    for step in (374, 130, 64, 63, 0, 250, 124, 125):
        assert [piece.tolist() for piece in WindowPlan(plan, lengths).micro_batches(step, 1)] == run[step]


def test_largest_micro_batch_first() -> None:
    plan, lengths = plan_of(512, 128, 2, tokens=512), lengths_like(512)
    windows = WindowPlan(plan, lengths)
    for step in range(4):
        for rank in range(2):
            tokens = [len(piece) * lengths[piece].max() for piece in windows.micro_batches(step, rank)]
            assert len(tokens) > 2
            assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize("examples", [64, 64 + 3, 64 + 13])
def test_equal_counts_for_models_that_communicate_in_every_forward(examples: int) -> None:
    lengths = lengths_like(examples)
    windows = WindowPlan(plan_of(examples, 32, 4, tokens=200), lengths, equal_counts=True)
    for step in range(windows.plan.steps_per_epoch):
        shares = [windows.micro_batches(step, rank) for rank in range(4)]
        assert len({len(share) for share in shares}) == 1
        rows = np.concatenate([piece for share in shares for piece in share])
        assert sorted(rows) == sorted(windows.plan.effective_batch(step))
        for sizes in ([len(piece) for piece in share] for share in shares):
            if 0 in sizes:
                assert set(sizes) <= {0, 1}, "only what cannot be cut further is filled up"
                assert sizes == sorted(sizes, reverse=True)
    if examples == 64 + 3:  # three rows for four processes
        assert sum(len(piece) == 0 for share in shares for piece in share) == 1


def test_shortest_stands_in_for_an_empty_share() -> None:
    plan, lengths = plan_of(50, 16), lengths_like(50)
    for step in range(4):
        assert lengths[WindowPlan(plan, lengths).shortest(step)] == lengths[plan.effective_batch(step)].min()


def test_table_counts_what_the_windows_hold() -> None:
    plan, lengths = plan_of(600, 48, 3, tokens=300), lengths_like(600)
    windows = WindowPlan(plan, lengths, CostModel(20, 0.001), pad_to_multiple_of=8)
    table = windows.table()
    assert len(table.tokens) == plan.steps_per_epoch == 13
    largest = 0
    for step in range(13):
        assert table.tokens[step] == lengths[plan.effective_batch(step)].sum()
        padded = 0
        for rank in range(3):
            pieces = windows.micro_batches(step, rank)
            longest = [-(-int(lengths[piece].max()) // 8) * 8 for piece in pieces]
            sizes = [len(piece) * length for piece, length in zip(pieces, longest, strict=True)]
            padded += sum(sizes)
            largest = max(largest, *sizes)
            assert table.micro_batches[step, rank] == len(pieces)
            costs = [20 + len(p) * (length + 0.001 * length**2) for p, length in zip(pieces, longest, strict=True)]
            assert table.cost[step, rank] == pytest.approx(sum(costs))
        assert table.padded_tokens[step] == padded
    assert table.largest[0] * table.largest[1] == largest
    assert len(windows.table(max_steps=5).tokens) == 5


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("examples", [1, 30, 64, 1000])
def test_a_stream_is_cut_alike(examples: int, processes: int) -> None:
    lengths = lengths_like(examples)
    limits = Limits(max_tokens=300)
    shares = [
        list(cut_stream(zip(range(examples), lengths.tolist(), strict=True), 16, processes, rank, limits, buffer=3))
        for rank in range(processes)
    ]
    steps = -(-examples // 16)
    assert [len(share) for share in shares] == [steps] * processes
    for step in range(steps):
        together = [example for share in shares for piece in share[step] for example in piece]
        assert sorted(together) == list(range(step * 16, min(step * 16 + 16, examples)))
    in_order = Plan.of(examples, resolve_batch_sizes(16, None, None, processes, 300), 0, 1, -1)
    for rank in range(processes):
        known = WindowPlan(in_order, lengths)
        examples_of_first, found = known._cut_order(np.arange(min(16, examples))[None])
        first = [examples_of_first[0, piece].tolist() for (piece,) in found.micro_batches(0, rank)]
        assert sorted(shares[rank][0]) == sorted(first)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 500])
def test_evaluation_cuts_the_whole_set(n: int) -> None:
    lengths = lengths_like(n)
    shares = [batches_by_length(lengths, 2, rank, Limits(max_tokens=512)) for rank in range(2)]
    everything = np.concatenate([piece for share in shares for piece in share])
    assert sorted(everything) == list(range(n))
    if n == 500:
        padded = [sum(len(piece) * int(lengths[piece].max()) for piece in share) for share in shares]
        assert sum(padded) < 1.03 * lengths.sum()
        assert max(padded) < 1.05 * min(padded)


def test_the_plan_of_a_million_records_on_eight_gpus() -> None:
    """1,000,000 Chinese records of up to 512 tokens, effective batch 256, on 8 processes: see docs of the dry run."""
    some = np.array([min(512, len(note["text"]) + 2) for note in generate_notes(4000, language="zh")], np.int32)
    lengths = some[np.random.default_rng(0).integers(0, len(some), 1_000_000)]
    batch = resolve_batch_sizes(256, None, None, 8, 4096)
    plan = Plan.of(len(lengths), batch, seed=42, num_train_epochs=1, max_steps=-1)
    tracemalloc.start()
    table = WindowPlan(plan, lengths, CostModel(256, 1 / 3072), pad_to_multiple_of=8).table()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6
    assert table.tokens.sum() == lengths.sum()
    assert len(table.tokens) == 3907
    plain = np.concatenate([np.split(plan.effective_batch(step), 32) for step in range(100)])
    plain_padding = lengths[plain].max(axis=1).sum() * 8 / lengths[plain].sum()
    assert plain_padding > 2
    assert table.padded_tokens.sum() / table.tokens.sum() < 1.2
    imbalance = table.cost.max(axis=1) / table.cost.mean(axis=1)
    assert imbalance.mean() < 1.1
