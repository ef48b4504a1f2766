"""The contrastive step on two gloo processes, against plain PyTorch on the whole effective batch. One launch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from contrastive_cases import (
    LOSSES,
    TWO_PROCESS_CUTS,
    embed,
    make_encoder,
    make_pairs,
    plain_loss,
    reference_step,
)
from launching import launch
from tasks import flat, relative_error


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("contrastive")
    result = launch(Path(__file__).parent / "launched" / "launch_contrastive.py", str(folder), timeout=240)
    assert result.returncode == 0, result.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", TWO_PROCESS_CUTS)
def test_cut(found: list[dict[str, Any]], loss: str, name: str) -> None:
    expected, value = reference_step(make_pairs(), loss)
    start = flat(make_encoder())
    for rank in range(2):
        case = found[rank]["cuts"][f"{loss} {name}"]
        assert relative_error(start - case["weights"], start - expected) < 1e-10
        assert case["loss"] == pytest.approx(value, rel=1e-10)
        assert case["grad_norm"] == pytest.approx((start - expected).norm().item(), rel=1e-10)
        assert case["items"] == {"triplet": 12}.get(loss, 16)


@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_tail(found: list[dict[str, Any]], pairs: int) -> None:
    expected, value = reference_step(make_pairs(pairs), "infonce")
    for rank in range(2):
        case = found[rank]["tails"][str(pairs)]
        assert (case["weights"] - expected).norm() < 1e-10
        assert case["loss"] == pytest.approx(value, rel=1e-10, abs=1e-12)


def test_dropout_is_replayed(found: list[dict[str, Any]]) -> None:
    cases = [found[rank]["dropout"] for rank in range(2)]
    for case in cases:
        assert len(case["first"]) == len(case["second"]) == 2
        assert all(torch.equal(a, b) for a, b in zip(case["first"], case["second"], strict=True))
    # In one graph: each process's draws, then the loss over all.
    model, vectors, labels = make_encoder(dropout=0.3).train(), [], []
    for rank, case in enumerate(cases):
        torch.manual_seed(5 + rank)
        vectors += [embed(model, batch) for batch in case["batches"]]
        labels += [batch["labels"] for batch in case["batches"]]
    loss = plain_loss(torch.cat(vectors)[torch.cat(labels).argsort()], make_pairs(), "infonce")
    loss.backward()
    gradient = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    for case in cases:
        assert relative_error(flat(make_encoder(dropout=0.3)) - case["weights"], gradient) < 1e-10
        assert case["loss"] == pytest.approx(loss.item(), rel=1e-10)


@pytest.mark.parametrize("culprit", range(2))
@pytest.mark.parametrize("call", range(4))
def test_out_of_memory_on_one_process(found: list[dict[str, Any]], culprit: int, call: int) -> None:
    expected, _ = reference_step(make_pairs(), "infonce")
    start = flat(make_encoder())
    for rank in range(2):
        case = found[rank]["failures"][f"{culprit} {call}"]
        assert relative_error(start - case["weights"], start - expected) < 1e-10
        assert case["retries"] == 1


def test_nan_on_one_process_is_an_error_on_both(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        case = found[rank]["failures"]
        assert "step 1: loss nan" in case["nan"] and "it comes from a micro-batch of rows" in case["nan"]
        assert case["untouched"]
