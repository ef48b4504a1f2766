"""The search for the fastest token budget, against a clock that the test's own model moves."""

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn

from accumft.errors import UserError
from accumft.launch import make_accelerator
from accumft.plan import Plan, resolve_batch_sizes
from accumft.probe import Trial, describe_trials, fastest, try_budgets, with_token_budget

LENGTHS = np.repeat([64, 20], 500)


class Machine(nn.Module):
    """Takes `overhead` seconds a micro-batch and one a token, has memory for so many tokens, and trains one weight."""

    def __init__(self, overhead: float, memory: int = 10**9, slower_from: int = 10**9) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.norm = nn.BatchNorm1d(1)
        self.overhead, self.memory, self.slower_from = overhead, memory, slower_from
        self.now, self.shapes = 0.0, []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        tokens = input_ids.numel()
        self.shapes.append(tuple(input_ids.shape))
        if tokens > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.now += self.overhead + tokens * (2 if tokens >= self.slower_from else 1)
        return self.norm(self.weight * input_ids.float().mean(dim=1, keepdim=True)).sum()


def collate(columns: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
    longest = max(columns["length"])
    return {"input_ids": torch.ones(len(columns["length"]), longest)}


def trials_of(machine: Machine, **options: Any) -> list[Trial]:
    dataset = Dataset.from_dict({"length": LENGTHS.tolist(), "row": list(range(1000))})
    accelerator = make_accelerator()

    def loss_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["input_ids"])

    settings = {"largest": 10**6, "seconds": 1e9, "clock": lambda: machine.now, **options}
    return try_budgets(accelerator, machine, dataset, LENGTHS, collate, loss_sum, **settings)


def test_stops_when_more_is_no_faster() -> None:
    trials = trials_of(Machine(overhead=100, slower_from=2048))
    assert [trial.max_tokens for trial in trials] == [256, 512, 1024, 2048, 4096]
    assert [round(trial.tokens_per_second, 3) for trial in trials] == [0.713, 0.835, 0.911, 0.645, 0.494]
    assert fastest(trials) == 1024


def test_budgets_count_padding_to_a_multiple() -> None:
    machine = Machine(overhead=100)
    trials_of(machine, largest=256, pad_to_multiple_of=32)
    assert machine.shapes[2:] == [(8, 20)] * 2, "20 tokens are padded to 32 where the collator does so"


def test_longest_rows_are_tried_first() -> None:
    machine = Machine(overhead=100)
    trials_of(machine, largest=256)
    assert machine.shapes == [(4, 64), (4, 64), (12, 20), (12, 20)]


def test_a_cheap_overhead_takes_the_smallest_budget() -> None:
    assert fastest(trials_of(Machine(overhead=0.001))) == 256


@pytest.mark.parametrize(("limit", "budgets"), [({"largest": 700}, [256, 512, 1024]), ({"seconds": 1.0}, [256])])
def test_ends_where_no_step_needs_more_or_time_is_over(limit: dict[str, float], budgets: list[int]) -> None:
    assert [trial.max_tokens for trial in trials_of(Machine(overhead=1000), **limit)] == budgets


def test_a_budget_without_memory_is_not_taken() -> None:
    trials = trials_of(Machine(overhead=1000, memory=1000))
    assert [trial.max_tokens for trial in trials] == [256, 512, 1024]
    assert trials[-1].tokens_per_second == 0
    assert fastest(trials) == 512
    assert "1,024: no memory" in describe_trials(trials)


def test_a_row_that_does_not_fit_alone_is_an_error() -> None:
    with pytest.raises(UserError, match=r"longest row \(64 tokens\).*--max_length"):
        trials_of(Machine(overhead=1000, memory=50))


def test_leaves_weights_buffers_gradients_and_random_state() -> None:
    machine = Machine(overhead=100).train()
    torch.manual_seed(3)
    before = {name: tensor.clone() for name, tensor in machine.state_dict().items()}
    state = torch.get_rng_state()
    trials_of(machine)
    assert all(torch.equal(before[name], tensor) for name, tensor in machine.state_dict().items())
    assert all(parameter.grad is None for parameter in machine.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert machine.training


def test_only_auto_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(overhead=100)
    dataset = Dataset.from_dict({"length": LENGTHS.tolist()})

    def plan_with(tokens: Any) -> Plan:
        plan = Plan.of(1000, resolve_batch_sizes(4, None, None, 1, tokens), 0, 1, -1)
        return with_token_budget(
            plan, make_accelerator(), machine, dataset, LENGTHS, collate, lambda model, batch: model(batch["input_ids"])
        )

    assert plan_with(300).batch.max_tokens_per_micro_batch == 300
    assert machine.shapes == []
    assert plan_with("auto").batch.max_tokens_per_micro_batch == 256  # four rows of at most 64 tokens
    said = capsys.readouterr().out
    assert "max_tokens_per_micro_batch auto: 256, the smallest within 3% of the fastest (tokens/s" in said
