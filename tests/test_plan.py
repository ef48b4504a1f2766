"""The plan: which examples make each step, and how they are cut."""

import numpy as np
import pytest

from accumft.errors import UserError
from accumft.plan import BatchSizes, Plan, epoch_order, resolve_batch_sizes


@pytest.mark.parametrize(
    ("given", "processes", "expected"),
    [
        # (effective, per device, accumulation, tokens), processes → (effective, per device, accumulation, tokens)
        ((None, None, None, None), 1, (8, None, 1, 1024)),
        ((None, None, None, None), 8, (8, None, 1, 1024)),
        ((16, None, None, None), 2, (16, None, 1, 1024)),
        ((16, None, None, 300), 1, (16, None, 1, 300)),
        ((None, None, None, "auto"), 2, (8, None, 1, "auto")),
        ((None, 16, None, None), 1, (16, 16, 1, None)),
        ((None, 16, 4, None), 2, (128, 16, 4, None)),
        ((None, None, 4, None), 1, (32, 8, 4, None)),
        ((16, 6, None, None), 1, (16, 6, 3, None)),
        ((16, 16, None, None), 2, (16, 8, 1, None)),
        ((17, 3, None, None), 2, (17, 3, 3, None)),
        ((16, None, 5, None), 1, (16, 4, 5, None)),
        ((16, 6, 3, None), 1, (16, 6, 3, None)),
        ((3, 1, None, None), 8, (3, 1, 1, None)),
    ],
)
def test_batch_arithmetic(given: tuple, processes: int, expected: tuple) -> None:
    effective, micro, steps, tokens = expected
    assert resolve_batch_sizes(*given[:3], processes, given[3]) == BatchSizes(
        effective, micro, steps, processes, tokens
    )


@pytest.mark.parametrize(
    ("given", "processes", "message"),
    [
        ((16, 8, 4), 1, r"2 micro-batch.*gradient_accumulation_steps is 4 \(8 x 4 x 1 = 32, not 16\)"),
        ((16, 8, 1), 1, r"\(8 x 1 x 1 = 8, not 16\)"),
        ((64, 8, 8), 2, r"effective_batch_size 64 over 2 process\(es\) is up to 32.*8 x 8 x 2 = 128, not 64"),
        ((4, None, 5), 1, "too few for --gradient_accumulation_steps 5"),
        ((0, None, None), 1, "--effective_batch_size 0: must be at least 1"),
        ((None, -1, None), 1, "--per_device_train_batch_size -1"),
        ((16, 8, None, 512), 1, "max_tokens_per_micro_batch 512 and --per_device_train_batch_size 8: two ways"),
        ((16, None, 2, "auto"), 1, "max_tokens_per_micro_batch auto and --gradient_accumulation_steps 2: two ways"),
        ((10**30, None, None), 1, "--effective_batch_size 1000000000000000000000000000000: must be at most 2,147"),
        ((16, None, None, 2**31), 1, "--max_tokens_per_micro_batch 2147483648: must be at most 2,147,483,647"),
        ((16, None, None, 0), 1, "--max_tokens_per_micro_batch 0: must be at least 1"),
    ],
)
def test_contradictions_show_the_arithmetic(given: tuple, processes: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_batch_sizes(*given[:3], processes, *given[3:])


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
