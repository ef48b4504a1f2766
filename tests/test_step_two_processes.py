"""The step on two gloo processes, against plain PyTorch on the whole effective batch. One launch serves all tests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import launch
from step_cases import COMMUNICATION_CUTS, EFFECTIVE, TWO_PROCESS_CUTS, tail_plan
from tasks import TASKS, Task, flat, make_data, make_model, reference_run, relative_error, task_named

by_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("step")
    result = launch(Path(__file__).parent / "launched" / "launch_step.py", str(folder), timeout=240)
    assert result.returncode == 0, result.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@by_task
@pytest.mark.parametrize("name", TWO_PROCESS_CUTS)
def test_cut(found: list[dict[str, Any]], task: Task, name: str) -> None:
    batches = [range(step * EFFECTIVE, (step + 1) * EFFECTIVE) for step in range(5)]
    expected, losses = reference_run(task, make_data(task, 80), batches, 0.1, torch.float32)
    exact, _ = reference_run(task, make_data(task, 16), [range(16)], 1.0, torch.float64)
    start = flat(make_model(task, torch.float64))
    for rank in range(2):
        case = found[rank]["cuts"][f"{task.name} {name}"]
        assert relative_error(case["weights"], expected) < 1e-5
        assert case["losses"] == pytest.approx(losses, rel=1e-5)
        assert relative_error(start - case["exact"], start - exact) < 1e-10
        assert case["grad_norm"] == pytest.approx((start - exact).norm().item(), rel=1e-10)
        assert case["examples"] == EFFECTIVE


@by_task
@pytest.mark.parametrize("tail", range(1, 16))
def test_tail(found: list[dict[str, Any]], task: Task, tail: int) -> None:
    plan = tail_plan(tail, 3, 2)
    batches = [plan.effective_batch(0), plan.effective_batch(1)]
    expected, losses = reference_run(task, make_data(task, EFFECTIVE + tail), batches, 1.0, torch.float64)
    for rank in range(2):
        case = found[rank]["tails"][f"{task.name} {tail}"]
        assert relative_error(case["weights"], expected) < 1e-10
        assert case["losses"] == pytest.approx(losses, rel=1e-10)
        assert case["examples"] == [EFFECTIVE, tail]


def test_clipping(found: list[dict[str, Any]]) -> None:
    task = task_named("single_label")
    expected, _ = reference_run(task, make_data(task, 16), [range(16)], 1.0, torch.float64, max_grad_norm=0.05)
    start = flat(make_model(task, torch.float64))
    for rank in range(2):
        case = found[rank]["clipped"]
        assert relative_error(start - case["weights"], start - expected) < 1e-10
        assert case["grad_norm"] > 0.1


@pytest.mark.parametrize("name", COMMUNICATION_CUTS)
def test_each_gradient_is_reduced_once_a_step(found: list[dict[str, Any]], name: str) -> None:
    parameters = [parameter.numel() for parameter in make_model(task_named("single_label")).parameters()]
    for rank in range(2):
        case = found[rank]["communication"][name]
        # The denominator with the counts for the log before the first backward; after the last how it went: the loss,
        # whether it failed, and who has a gradient; then the gradients, small enough to travel together.
        assert case["all_reduces"] == [5, 2 + len(parameters), sum(parameters)]
        assert case["by_ddp"] == []


def test_failures_are_agreed_on(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        case = found[rank]["failures"]
        assert "step 1: loss nan" in case["nan"] and "micro-batch of rows 105, 106." in case["nan"]
        assert "its effective batch of 20 examples has no items" in case["empty"]
        assert case["untouched"]
        assert case["goes_on"] > 0
    assert found[0]["failures"]["goes_on"] == found[1]["failures"]["goes_on"]


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_fp16_overflow_on_one_process_skips_on_both(found: list[dict[str, Any]], kind: str) -> None:
    for rank in range(2):
        case = found[rank]["fp16"][kind]
        assert case["skipped"] and case["kept"]
        assert case["scale"] == 2.0**9
        assert case["stepped"] and case["moved"]
    assert torch.equal(found[0]["fp16"][kind]["weights"], found[1]["fp16"][kind]["weights"])
    assert found[0]["fp16"][kind]["loss"] == found[1]["fp16"][kind]["loss"]
