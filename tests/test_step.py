"""The step on one process, against plain PyTorch on the whole effective batch."""

import math

import pytest
import torch
from step_cases import EFFECTIVE, ONE_PROCESS_CUTS, losses_of, prepared, tail_plan, train_on_cut, train_on_tail
from tasks import TASKS, Task, flat, inputs, make_data, make_model, reference_run, relative_error, rows, task_named

from accumft.data.windows import Window
from accumft.errors import EmptyWindowError, NonFiniteLossError
from accumft.launch import make_accelerator
from accumft.step import train_step

by_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
by_cut = pytest.mark.parametrize("name", ONE_PROCESS_CUTS)


@by_task
@by_cut
def test_five_steps_end_at_the_full_batch_weights(task: Task, name: str) -> None:
    cut = ONE_PROCESS_CUTS[name]
    accelerator = make_accelerator(gradient_accumulation_steps=len(cut[0]))
    weights, results = train_on_cut(accelerator, task, cut, steps=5, lr=0.1, dtype=torch.float32)
    batches = [range(step * EFFECTIVE, (step + 1) * EFFECTIVE) for step in range(5)]
    expected, losses = reference_run(task, make_data(task, 80), batches, 0.1, torch.float32)
    start = flat(make_model(task))
    assert relative_error(weights, expected) < 1e-5
    assert relative_error(start, expected) > 1e-3, "the steps moved the weights"
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-5)


@by_task
@by_cut
def test_gradient_in_float64(task: Task, name: str) -> None:
    cut = ONE_PROCESS_CUTS[name]
    # Not the window's own number: what is configured must not matter.
    accelerator = make_accelerator(gradient_accumulation_steps=3)
    weights, (result,) = train_on_cut(accelerator, task, cut, steps=1, lr=1.0, dtype=torch.float64)
    expected, _ = reference_run(task, make_data(task, 16), [range(16)], 1.0, torch.float64)
    start = flat(make_model(task, torch.float64))
    gradient, expected_gradient = start - weights, start - expected
    assert relative_error(gradient, expected_gradient) < 1e-10
    assert result.grad_norm == pytest.approx(expected_gradient.norm().item(), rel=1e-10)


@by_task
@pytest.mark.parametrize("tail", range(1, 16))
def test_short_last_window(task: Task, tail: int) -> None:
    accelerator = make_accelerator(gradient_accumulation_steps=4)
    weights, results = train_on_tail(accelerator, task, tail, 4, 1.0, torch.float64)
    plan = tail_plan(tail, 4, 1)
    batches = [plan.effective_batch(0), plan.effective_batch(1)]
    assert sorted([*batches[0], *batches[1]]) == list(range(EFFECTIVE + tail))
    expected, losses = reference_run(task, make_data(task, EFFECTIVE + tail), batches, 1.0, torch.float64)
    assert relative_error(weights, expected) < 1e-10
    assert [result.examples for result in results] == [EFFECTIVE, tail]
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-10)


def test_clipping_is_of_the_whole_gradient_once() -> None:
    task, cut, limit = task_named("single_label"), [[4] * 4], 0.05
    accelerator = make_accelerator(gradient_accumulation_steps=4)
    weights, (result,) = train_on_cut(accelerator, task, cut, 1, 1.0, torch.float64, max_grad_norm=limit)
    data, start = make_data(task, 16), flat(make_model(task, torch.float64))
    expected, _ = reference_run(task, data, [range(16)], 1.0, torch.float64, max_grad_norm=limit)
    assert relative_error(start - weights, start - expected) < 1e-10
    assert (start - weights).norm().item() == pytest.approx(limit, rel=1e-4)
    assert result.grad_norm > 2 * limit, "the norm before clipping is reported"

    # What a clip after each micro-batch's backward comes to: another direction, so the assertion above can fail.
    model = make_model(task, torch.float64)
    for piece in torch.arange(16).split(4):
        batch = rows(data, piece)
        (task.mean(model(**inputs(batch)), batch["labels"]) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    wrong = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    assert torch.nn.functional.cosine_similarity(wrong, start - expected, dim=0) < 0.9999


def test_result_counts_the_window() -> None:
    task = task_named("class_weights")
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator, task, 0.1, torch.float32)
    data = make_data(task, 16)
    window = [rows(data, piece) for piece in torch.arange(16).split(5)]
    result = train_step(accelerator, model, optimizer, window, *losses_of(task))
    weights = torch.tensor([0.25, 2.0, 1.0, 0.5])
    assert result.items == pytest.approx(weights[data["labels"]].sum().item())
    assert (result.examples, result.micro_batches) == (16, 4)
    assert (result.tokens, result.padded_tokens) == (int(data["attention_mask"].sum()), 16 * 7)
    assert (result.learning_rate, result.stepped) == (0.1, True)


def test_no_gradient_is_left_for_the_next_step() -> None:
    task = task_named("single_label")
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator, task, 0.1, torch.float32)
    train_step(accelerator, model, optimizer, [make_data(task, 4)], *losses_of(task))
    assert all(parameter.grad is None for parameter in model.parameters())


class Poisoned(torch.nn.Module):
    """A model whose logits of the examples that begin with token 5 are NaN."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        bad = (input_ids[:, 0] == 5)[:, None]
        return self.inner(input_ids, attention_mask).masked_fill(bad, math.nan)


def test_nan_loss_names_the_step_and_the_rows_and_leaves_the_weights() -> None:
    task = task_named("single_label")
    data = make_data(task, 12)
    data["input_ids"][:, 0] = 1
    data["input_ids"][6, 0] = 5
    model = Poisoned(make_model(task))
    accelerator = make_accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = flat(model)
    window = Window(
        [rows(data, piece) for piece in torch.arange(12).split(4)],
        rows=[[101, 102, 103, 104], [105, 106, 107, 108], [109, 110, 111, 112]],
        step=7,
    )
    with pytest.raises(NonFiniteLossError, match=r"step 8: loss nan.*rows 105, 106, 107, 108\."):
        train_step(accelerator, model, optimizer, window, *losses_of(task))
    assert torch.equal(flat(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    # The run can go on with other data.
    assert train_step(accelerator, model, optimizer, [rows(data, range(4))], *losses_of(task)).stepped


def test_gradient_that_is_not_finite_is_an_error_though_the_loss_is() -> None:
    task = task_named("single_label")
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator, task, 0.1, torch.float32)
    before = flat(model)
    model.head.weight.register_hook(lambda gradient: gradient * math.inf)
    window = Window([make_data(task, 4)], rows=[[1, 2, 3, 4]])
    with pytest.raises(NonFiniteLossError, match=r"step 1: loss \d.*gradient norm (nan|inf).*1, 2, 3, 4"):
        train_step(accelerator, model, optimizer, window, *losses_of(task))
    assert torch.equal(flat(model), before)


def test_effective_batch_without_items_is_an_error() -> None:
    task = task_named("token_items")
    accelerator = make_accelerator()
    model, optimizer = prepared(accelerator, task, 0.1, torch.float32)
    before = flat(model)
    batch = make_data(task, 3) | {"labels": torch.full((3, 7), -100)}
    with pytest.raises(EmptyWindowError, match=r"step 1: its effective batch of 3 examples has no items.*rows 4, 5, 6"):
        train_step(accelerator, model, optimizer, Window([batch], rows=[[4, 5, 6]]), *losses_of(task))
    assert torch.equal(flat(model), before)


def test_window_seed_decides_dropout() -> None:
    task = task_named("single_label")
    data = make_data(task, 8)

    def weights_after(seed: int, noise: int) -> torch.Tensor:
        accelerator = make_accelerator()
        model = make_model(task)
        model.norm = torch.nn.Sequential(model.norm, torch.nn.Dropout(0.5))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        torch.manual_seed(noise)
        train_step(accelerator, model, optimizer, Window([data], seed=seed), *losses_of(task))
        return flat(model)

    assert torch.equal(weights_after(1, noise=10), weights_after(1, noise=20)), "history does not matter"
    assert not torch.equal(weights_after(1, noise=10), weights_after(2, noise=10))
