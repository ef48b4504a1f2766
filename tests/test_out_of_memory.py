"""A window that runs out of memory runs again, cut smaller, as if nothing had happened."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import run_command
from out_of_memory import PLACES, TASK, WithBatchNorm, failing, three_steps
from step_cases import losses_of
from tasks import make_data, relative_error, rows

from accumft.data.windows import Window
from accumft.errors import NotEnoughMemoryError
from accumft.launch import make_accelerator
from accumft.memory_limit import MemoryLimit, is_out_of_memory
from accumft.step import train_step

CUT = [[4, 4, 4, 4]]


def at_call(number: int) -> Any:
    """True at the call of that number, from 0."""
    calls = iter(range(10**6))
    return lambda: next(calls) == number


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", range(4, 8))  # each micro-batch of the second step
def test_the_weights_are_those_of_the_undisturbed_run(place: str, call: int) -> None:
    expected, _, _ = three_steps(make_accelerator(), CUT, losses_of(TASK)[0])
    found, results, model = three_steps(make_accelerator(), CUT, failing(place, at_call(call)))
    assert relative_error(found, expected) < 1e-12
    assert [result.oom_retries for result in results] == [0, 1, 0]
    # Each micro-batch of 4 rows of 7 tokens is halved, in this step; without a `memory` nothing is remembered.
    assert [result.micro_batches for result in results] == [4, 8, 4]
    assert [result.micro_batch_limit for result in results] == [None, 14, None]
    assert [result.examples for result in results] == [16, 16, 16]
    # The statistics saw the micro-batches of the attempt that counts, and no others.
    assert int(model.statistics.num_batches_tracked) == 4 + 8 + 4


def test_what_was_learnt_holds_for_the_next_steps() -> None:
    expected, _, _ = three_steps(make_accelerator(), CUT, losses_of(TASK)[0])
    memory = MemoryLimit()
    found, results, _ = three_steps(make_accelerator(), CUT, failing("backward", at_call(1)), memory)
    assert relative_error(found, expected) < 1e-12
    assert [result.oom_retries for result in results] == [1, 0, 0]
    assert [result.micro_batches for result in results] == [8, 8, 8]
    assert memory.retries == 1


def test_it_is_cut_until_it_fits() -> None:
    """A memory that holds two rows and no more."""
    tokens: list[int] = []
    loss_sum, _ = losses_of(TASK)

    def small(model: Any, batch: Any) -> torch.Tensor:
        tokens.append(len(batch["labels"]))
        if len(batch["labels"]) > 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return loss_sum(model, batch)

    expected, _, _ = three_steps(make_accelerator(), [[16]], loss_sum)
    found, results, _ = three_steps(make_accelerator(), [[16]], small, MemoryLimit())
    assert relative_error(found, expected) < 1e-12
    assert [result.oom_retries for result in results] == [3, 0, 0]
    assert tokens == [16, 8, 4, *[2] * 24]


@pytest.mark.parametrize("seed", [7, None])
def test_random_numbers_begin_again(seed: int | None) -> None:
    drawn: list[float] = []
    fails = at_call(2)
    loss_sum = failing("loss", fails)

    def drawing(model: Any, batch: Any) -> torch.Tensor:
        drawn.append(float(torch.rand(())))
        return loss_sum(model, batch)

    accelerator = make_accelerator()
    model = WithBatchNorm()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(3)
    data = make_data(TASK, 12)
    window = Window([rows(data, range(start, start + 4)) for start in (0, 4, 8)], seed=seed)
    train_step(accelerator, model, optimizer, window, drawing, losses_of(TASK)[1])
    assert len(drawn) == 3 + 6
    assert drawn[:3] == drawn[3:6] and len(set(drawn)) == 6


def test_a_row_that_cannot_fit_is_named() -> None:
    memory, loss_sum = MemoryLimit(), losses_of(TASK)[0]

    def never_two(model: Any, batch: Any) -> torch.Tensor:
        if bool((batch["input_ids"][:, 0] == 900).any()):
            raise MemoryError
        return loss_sum(model, batch)

    accelerator = make_accelerator()
    model = WithBatchNorm()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [parameter.clone() for parameter in model.parameters()]
    data = make_data(TASK, 4)
    data["input_ids"][2, 0] = 900
    data["attention_mask"][2] = 1
    window = Window([data], rows=[[11, 12, 13, 14]], step=5)
    with pytest.raises(
        NotEnoughMemoryError,
        match=r"^step 6: row 13 \(7 tokens\) alone does not fit into the memory of process 0: .*max_l",
    ):
        train_step(accelerator, model, optimizer, window, never_two, losses_of(TASK)[1], None, memory)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_other_errors_pass() -> None:
    def wrong(model: Any, batch: Any) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        three_steps(make_accelerator(), CUT, wrong)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), True),
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("expected scalar type"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_is_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_a_limit_holds_for_longer_rows_and_grows_back() -> None:
    memory = MemoryLimit(grow_after=3)
    data = make_data(TASK, 8)  # 7 tokens a row: lengths of 4 to 7 are one class
    window = Window([data])
    accelerator = make_accelerator()
    memory.learn(accelerator, memory.failure(window, 0, 0), "step 1", [])
    assert [memory.allowed(length) for length in (3, 4, 7, 100)] == [None, 28, 28, 28]
    limits = []
    for _ in range(12):
        memory.succeeded(Window([rows(data, range(2))]))
        limits.append(memory.allowed(7))
    # A quarter more each time, until it is no limit for what failed, 56 tokens.
    assert limits == [28, 28, 36, 36, 36, 46, 46, 46, None, None, None, None]
    memory.learn(accelerator, memory.failure(window, 0, 0), "step 14", [])
    assert (memory.grow_after, memory.allowed(7)) == (6, 28), "one that came back too early comes back later"


def test_a_limit_stays_near_what_has_fitted() -> None:
    memory = MemoryLimit()
    data = make_data(TASK, 8)
    memory.succeeded(Window([rows(data, range(5))]))
    memory.learn(make_accelerator(), memory.failure(Window([data]), 0, 0), "step 2", [])
    assert memory.allowed(7) == 35, "five rows of 7 tokens, more than half of eight"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of an address space is Linux's")
def test_under_a_true_limit_of_the_address_space() -> None:
    script = Path(__file__).parent / "launched" / "address_space.py"
    done = run_command([sys.executable, str(script)], env={"MALLOC_ARENA_MAX": "2"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["without"] == [0, 0, 0]
    assert found["retries"][0] >= 1 and found["retries"][1:] == [0, 0], "once learnt, it holds"
    assert found["limits"][0] < 16_000
    assert found["error"] < 1e-6
