"""The plan: which examples make each step, and how they are cut."""

import numpy as np
import pytest

from accumft.errors import UserError
from accumft.plan import BatchSizes, Plan, epoch_order, resolve_batch_sizes


@pytest.mark.parametrize(
    ("given", "processes", "expected"),
    [
        # (effective, per device, accumulation), processes → (effective, per device, accumulation)
        ((None, None, None), 1, (8, 2, 4)),
        ((None, None, None), 2, (8, 2, 2)),
        ((None, None, None), 8, (8, 1, 1)),
        ((None, 16, None), 1, (16, 16, 1)),
        ((None, 16, 4), 2, (128, 16, 4)),
        ((None, None, 4), 1, (32, 8, 4)),
        ((16, None, None), 1, (16, 8, 2)),
        ((16, 6, None), 1, (16, 6, 3)),
        ((16, 16, None), 2, (16, 8, 1)),
        ((17, 3, None), 2, (17, 3, 3)),
        ((16, None, 5), 1, (16, 4, 5)),
        ((16, 6, 3), 1, (16, 6, 3)),
        ((3, None, None), 8, (3, 1, 1)),
    ],
)
def test_batch_arithmetic(given: tuple, processes: int, expected: tuple) -> None:
    assert resolve_batch_sizes(*given, processes) == BatchSizes(*expected, processes)


@pytest.mark.parametrize(
    ("given", "processes", "message"),
    [
        ((16, 8, 4), 1, r"2 micro-batch.*gradient_accumulation_steps is 4 \(8 x 4 x 1 = 32, not 16\)"),
        ((16, 8, 1), 1, r"\(8 x 1 x 1 = 8, not 16\)"),
        ((64, 8, 8), 2, r"effective_batch_size 64 over 2 process\(es\) is up to 32.*8 x 8 x 2 = 128, not 64"),
        ((4, None, 5), 1, "too few for --gradient_accumulation_steps 5"),
        ((0, None, None), 1, "--effective_batch_size 0: must be at least 1"),
        ((None, -1, None), 1, "--per_device_train_batch_size -1"),
    ],
)
def test_contradictions_show_the_arithmetic(given: tuple, processes: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_batch_sizes(*given, processes)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("examples", [1, 5, 16, 17, 31, 48, 50])
def test_every_example_once_an_epoch_whatever_the_cut(processes: int, micro: int, examples: int) -> None:
    batch = resolve_batch_sizes(16, micro, None, processes)
    plan = Plan.of(examples, batch, seed=5, num_train_epochs=2, max_steps=-1)
    lengths = np.random.default_rng(0).integers(1, 100, examples)
    for by_length in (None, lengths):
        for epoch in range(2):
            seen = []
            for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
                cut = [plan.micro_batches(step, rank, by_length) for rank in range(processes)]
                together = np.concatenate([piece for share in cut for piece in share])
                assert sorted(together) == sorted(plan.effective_batch(step))
                shares = [sum(map(len, share)) for share in cut]
                assert max(shares) - min(shares) <= 1
                for share in cut:
                    sizes = [len(piece) for piece in share]
                    assert all(0 < size <= batch.per_device_train_batch_size for size in sizes)
                    assert sizes == sorted(sizes, reverse=True), "the remainder comes last"
                seen.extend(together)
            assert sorted(seen) == list(range(examples))


def test_which_examples_meet_depends_on_seed_epoch_and_effective_batch_alone() -> None:
    one = Plan.of(100, resolve_batch_sizes(16, 8, None, 1), seed=1, num_train_epochs=2, max_steps=-1)
    other = Plan.of(100, resolve_batch_sizes(16, 3, None, 4), seed=1, num_train_epochs=5, max_steps=-1)
    for step in range(14):
        assert np.array_equal(one.effective_batch(step), other.effective_batch(step))
    assert not np.array_equal(epoch_order(100, 1, 0), epoch_order(100, 1, 1))
    assert not np.array_equal(epoch_order(100, 1, 0), epoch_order(100, 2, 0))


def test_order_is_pinned() -> None:
    """A release of NumPy, or of this package, that changed the order would break resumes."""
    assert epoch_order(10, 42, 0).tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]


def test_rows_of_like_length_share_a_micro_batch_longest_first() -> None:
    lengths = np.arange(32)
    plan = Plan.of(32, resolve_batch_sizes(32, 4, None, 2), seed=0, num_train_epochs=1, max_steps=-1)
    cut = [plan.micro_batches(0, rank, lengths) for rank in range(2)]
    assert [piece.tolist() for piece in cut[0]] == [[31, 29, 27, 25], [23, 21, 19, 17], [15, 13, 11, 9], [7, 5, 3, 1]]
    assert [piece.tolist() for piece in cut[1]] == [[30, 28, 26, 24], [22, 20, 18, 16], [14, 12, 10, 8], [6, 4, 2, 0]]


@pytest.mark.parametrize(
    ("examples", "epochs", "max_steps", "steps"),
    [(32, 1, -1, 2), (33, 1, -1, 3), (33, 3, -1, 9), (33, 0.5, -1, 2), (160, 0.3, -1, 3), (33, 3, 4, 4), (5, 1, 7, 7)],
)
def test_total_steps(examples: int, epochs: float, max_steps: int, steps: int) -> None:
    assert Plan.of(examples, resolve_batch_sizes(16, None, None, 1), 0, epochs, max_steps).total_steps == steps


@pytest.mark.parametrize(
    ("examples", "epochs", "max_steps", "message"),
    [(0, 1, -1, "no training examples"), (5, 0, -1, "num_train_epochs 0"), (5, 1, 0, "max_steps 0"), (5, 1, -2, "-2")],
)
def test_durations_that_make_no_run(examples: int, epochs: float, max_steps: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Plan.of(examples, resolve_batch_sizes(16, None, None, 1), 0, epochs, max_steps)


def test_window_seeds_differ_by_seed_step_and_process() -> None:
    def seed(run_seed: int, step: int, rank: int) -> int:
        batch = resolve_batch_sizes(16, None, None, 2)
        return Plan.of(64, batch, run_seed, num_train_epochs=9, max_steps=-1).window_seed(step, rank)

    seeds = {seed(s, step, rank) for s in range(3) for step in range(20) for rank in range(2)}
    assert len(seeds) == 120
    assert seed(1, 2, 1) == seed(1, 2, 1)
