"""One of two processes runs out of memory: both run the window again, and nobody hangs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import launch
from out_of_memory import PLACES
from tasks import relative_error


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("out_of_memory")
    result = launch(Path(__file__).parent / "launched" / "launch_out_of_memory.py", str(folder), timeout=120)
    assert result.returncode == 0, result.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("culprit", range(2))
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", range(2, 4))
def test_the_weights_are_those_of_the_undisturbed_run(
    found: list[dict[str, Any]], culprit: int, place: str, call: int
) -> None:
    cases = [found[rank][f"{culprit} {place} {call}"] for rank in range(2)]
    for rank, case in enumerate(cases):
        assert relative_error(case["weights"], found[rank]["expected"]) < 1e-6
        assert case["retries"] == [0, 1, 0]
        # As much had fitted in the first step: three quarters of it may fit, three rows of 7 tokens.
        assert case["limits"] == [None, 21, 21]
        assert case["micro_batches"] == [4, 8, 8]
    assert torch.equal(cases[0]["weights"], cases[1]["weights"])
    assert cases[0]["limits"] == cases[1]["limits"]
    # The first process's statistics hold for both at the next window.
    assert all(case["statistics"].isfinite().all() for case in cases)


def test_both_hear_that_a_row_cannot_fit(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert "step 1: row 10 (7 tokens) alone does not fit into the memory of process 1" in found[rank]["hopeless"]
