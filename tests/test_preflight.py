"""The largest micro-batch, tried before the first step: nothing of it stays but what it has learnt of memory."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_cls
import torch
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from out_of_memory import WithBatchNorm
from resumed import recipe_of
from runs import rows
from small import rows_of, small_recipe
from tasks import TOKENS, USED, inputs, relative_error
from test_text_cls import weights

from accumft.data.windows import WindowDataset, shape_of
from accumft.errors import UserError
from accumft.launch import make_accelerator
from accumft.memory_limit import MemoryLimit
from accumft.optim import build_optimizer
from accumft.plan import BatchSizes, Plan
from accumft.preflight import preflight
from accumft.recipe import TrainingRecipe
from accumft.window_plan import WindowPlan

OPTIMIZERS = ["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"]


def collate(columns: dict[str, list[Any]], *_: Any) -> dict[str, torch.Tensor]:
    lengths = torch.tensor(columns["length"])
    width = int(lengths.max())
    return {
        "input_ids": torch.arange(len(lengths))[:, None].expand(-1, width) % USED,
        "attention_mask": (torch.arange(width)[None] < lengths[:, None]).long(),
        "labels": lengths % 4,
    }


def windows_of(
    lengths: list[int], effective: int, max_tokens: int, packed: bool = False, multiple: int = 1, processes: int = 1
) -> Any:
    batch = BatchSizes(effective, None, 1, processes, max_tokens_per_micro_batch=max_tokens)
    plan = Plan.of(len(lengths), batch, seed=3, num_train_epochs=3, max_steps=-1)
    window_plan = WindowPlan(plan, np.array(lengths), None, multiple, packed=packed)
    return WindowDataset(
        Dataset.from_dict({"length": lengths, "row": range(1, len(lengths) + 1)}), window_plan, collate
    )


def loss_sum(model: Any, batch: Any) -> torch.Tensor:
    """With a random number, so that a draw would be seen."""
    dropped = torch.nn.functional.dropout(model(**inputs(batch)), 0.5)
    return torch.nn.functional.cross_entropy(dropped, batch["labels"], reduction="sum")


def everything(model: Any, optimizer: Any) -> list[Any]:
    """All that must be as before, as plain values."""
    inner = optimizer.optimizer
    return [
        {name: value.tolist() for name, value in model.state_dict().items()},
        [parameter.grad is None for parameter in model.parameters()],
        model.training,
        [[(name, str(value)) for name, value in state.items()] for state in inner.state.values()],
        [{name: value for name, value in group.items() if name != "params"} for group in inner.param_groups],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    ]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stepped", [False, True], ids=["a new optimizer", "one that has stepped"])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_all_is_as_before(optim: str, stepped: bool, training: bool) -> None:
    accelerator = make_accelerator()
    model = WithBatchNorm()
    recipe = TrainingRecipe(optim=optim, learning_rate=0.1, weight_decay=0.5)  # type: ignore[arg-type]
    model, optimizer = accelerator.prepare(model, build_optimizer(model, recipe))
    windows = windows_of([5, 7, 3, 7], 4, 100)
    if stepped:
        loss_sum(model, windows[0].micro_batches[0]).backward()
        accelerator.sync_gradients = True
        optimizer.step()
        optimizer.zero_grad()
    model.train(training)
    before = everything(model, optimizer)
    memory, seen = MemoryLimit(), []

    def seeing(model: Any, batch: Any) -> torch.Tensor:
        # What memory holds in a step: gradients, and the optimizer's state, but for sgd's, which has none.
        seen.append((model.training, all(p.grad is not None for p in model.parameters())))
        assert bool(optimizer.optimizer.state) or optim == "sgd"
        return loss_sum(model, batch)

    preflight(accelerator, model, optimizer, windows, seeing, memory)
    assert set(seen) == {(True, True)}
    assert everything(model, optimizer) == before
    assert (memory.smallest, memory.retries) == (None, 0)


def test_the_longest_rows_are_tried_too() -> None:
    """Ten rows of 10 tokens are more than one of 60, and less for attention."""
    windows = windows_of([10] * 10 + [60], 10, 100)
    tried: list[tuple[int, int]] = []

    def seeing(model: Any, batch: Any) -> torch.Tensor:
        tried.append(shape_of(batch)[:2])
        return loss_sum(model, batch)

    accelerator = make_accelerator()
    model = WithBatchNorm()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    preflight(accelerator, model, optimizer, windows, seeing, MemoryLimit())
    assert len(tried) == 2 and tried[1] == (1, 60)


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 16), st.integers(8, 200), st.booleans(), st.sampled_from([1, 8]), st.integers(1, 3))
@example([1, 1, 1, 1, 1, 2], 5, 8, False, 1, 1)  # the longest of all are not what makes the largest micro-batch
def test_it_is_the_largest_micro_batch_of_all_steps(
    lengths: list[int], effective: int, max_tokens: int, packed: bool, multiple: int, processes: int
) -> None:
    windows = windows_of(lengths, effective, max_tokens, packed, multiple, processes)
    plan, limits = windows.plan, windows.plan.limits

    def tokens(rectangles: list[np.ndarray]) -> int:
        return sum(len(piece) * int(limits.padded(plan.lengths[piece].max())) for piece in rectangles)

    shares = [plan.rectangles(step, process) for step in range(len(windows)) for process in range(processes)]
    assert tokens(plan.largest()) == max(tokens(batch) for share in shares for batch in share)
    batch = windows.largest().micro_batches
    assert len(batch) == 1 and len(batch[0]["labels"]) == sum(map(len, plan.largest()))


def holding(tokens: int, tried: list[int] | None = None) -> Callable[..., torch.Tensor]:
    """The recipe's loss_sum in a memory that holds so many tokens of a micro-batch."""
    original = text_cls.loss_sum

    def limited(criterion: Any, model: Any, batch: Any) -> torch.Tensor:
        if tried is not None:
            tried.append(shape_of(batch)[2])
        if shape_of(batch)[2] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(criterion, model, batch)

    return limited


@pytest.mark.parametrize("padding_free", [True, False], ids=["packed", "padded"])
def test_what_does_not_fit_is_seen_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], padding_free: bool
) -> None:
    """And the training is that of the run that had memory enough."""
    fields = {"padding_free": padding_free, "dropout": 0.0, "save_steps": 100}
    text_cls.run(recipe_of(tmp_path / "free", **fields))
    capsys.readouterr()
    tried: list[int] = []
    monkeypatch.setattr(text_cls, "loss_sum", holding(100, tried))
    text_cls.run(recipe_of(tmp_path / "limited", **fields))
    assert "a micro-batch of 192 tokens does not fit into memory: they are cut to 96 at most" in capsys.readouterr().out
    assert tried[0] == 192 and max(tried[1:]) <= 96, "the first one only"
    found, expected = rows_of(tmp_path / "limited"), rows_of(tmp_path / "free")
    assert [row["oom_retries"] for row in found] == [0] * 12, "no step ran out of memory"
    assert [row["micro_batches"] for row in expected] == [1] * 12
    assert [row["micro_batches"] for row in found] == [2] * 12
    assert [row["micro_batch_limit"] for row in found] == [96] * 12
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-6)
    assert relative_error(weights(tmp_path / "limited"), weights(tmp_path / "free")) < 1e-6


def test_preflight_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, whose random numbers would show it: bit for bit."""
    text_cls.run(recipe_of(tmp_path / "with"))
    monkeypatch.setattr(text_cls, "preflight", lambda *args: None)
    text_cls.run(recipe_of(tmp_path / "without"))
    assert rows(tmp_path / "with") == rows(tmp_path / "without")
    assert torch.equal(weights(tmp_path / "with"), weights(tmp_path / "without"))


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_each_optimizer_of_the_recipe_finds_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    monkeypatch.setattr(text_cls, "loss_sum", holding(50))
    text_cls.run(small_recipe(tmp_path / "run", optim=optim, max_steps=1, effective_batch_size=8))
    (row,) = rows_of(tmp_path / "run")
    assert (row["oom_retries"], row["micro_batch_limit"], row["micro_batches"]) == (0, 48, 4)


def test_a_row_that_never_fits_is_named_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_cls, "loss_sum", holding(20))
    monkeypatch.setattr(text_cls, "train_step", lambda *args: pytest.fail("no step is made"))
    with pytest.raises(UserError) as error:
        text_cls.run(small_recipe(tmp_path / "run"))
    error.match(
        r"^before the first step: row \d+ \(24 tokens\) alone does not fit into the memory of process 0: lower "
        r"--max_length \(seq2seq: --max_source_length and --max_target_length; images: --image_size\), or use "
        r"--gradient_checkpointing or --mixed_precision bf16 or fp16$"
    )


def test_an_optimizer_state_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = make_accelerator()
    model = WithBatchNorm()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    before = everything(model, optimizer)

    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.optim.AdamW, "step", no_room)
    with pytest.raises(UserError, match="weights, gradients and optimizer state alone do not fit into memory: lower"):
        preflight(accelerator, model, optimizer, windows_of([TOKENS] * 4, 4, 100), loss_sum, MemoryLimit())
    assert everything(model, optimizer) == before
