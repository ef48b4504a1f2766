"""The step of a loss over the whole effective batch, against plain PyTorch in one forward."""

from typing import Any

import pytest
import torch
from contrastive_cases import (
    LOSSES,
    ONE_PROCESS_CUTS,
    PAIRS,
    cached_on_cut,
    contrast_of,
    embed,
    make_encoder,
    make_pairs,
    nan_in,
    out_of_memory_at,
    plain_loss,
    reference_step,
    texts_of,
    window_of,
)
from fp16_cpu import Fp16CpuAccelerator
from tasks import flat, relative_error

from accumft.cached_step import cached_step
from accumft.data.windows import Window
from accumft.errors import EmptyWindowError, NonFiniteLossError, NotEnoughMemoryError
from accumft.launch import make_accelerator, reset_accelerate_state
from accumft.memory_limit import MemoryLimit

by_loss = pytest.mark.parametrize("loss", LOSSES)


def prepared(accelerator: Any, **fields: Any) -> tuple[Any, Any]:
    model = make_encoder(**fields)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def step(
    accelerator: Any, model: Any, optimizer: Any, window: Any, embed: Any, loss: str, data: Any, **rest: Any
) -> Any:
    contrast = contrast_of(data, loss)
    arguments = (embed, contrast.loss_sum, contrast.num_items)
    return cached_step(accelerator, model, optimizer, window, *arguments, **rest)


@by_loss
@pytest.mark.parametrize("name", ONE_PROCESS_CUTS)
def test_gradient_in_float64(loss: str, name: str) -> None:
    data = make_pairs()
    # Not the window's own number: what is configured must not matter.
    accelerator = make_accelerator(gradient_accumulation_steps=3)
    weights, result = cached_on_cut(accelerator, data, loss, ONE_PROCESS_CUTS[name])
    expected, value = reference_step(data, loss)
    start = flat(make_encoder())
    assert relative_error(start - weights, start - expected) < 1e-10
    assert result.loss == pytest.approx(value, rel=1e-10)
    assert result.grad_norm == pytest.approx((start - expected).norm().item(), rel=1e-10)
    assert result.items == {"triplet": 12}.get(loss, PAIRS)
    assert result.micro_batches == len(ONE_PROCESS_CUTS[name][0])
    assert result.padded_tokens == len(data["labels"]) * 7


@by_loss
@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_short_last_window(loss: str, pairs: int) -> None:
    data = make_pairs(pairs)
    weights, result = cached_on_cut(make_accelerator(), data, loss, [[1] * pairs])
    expected, value = reference_step(data, loss)
    start = flat(make_encoder())
    assert (start - weights - (start - expected)).norm() < 1e-10
    assert result.loss == pytest.approx(value, rel=1e-10, abs=1e-12)


def test_micro_batches_alone_have_another_gradient() -> None:
    """What accumulation without a cache comes to: the assertions above can fail."""
    data, model = make_pairs(), make_encoder()
    contrast = contrast_of(data, "infonce")
    for batch in window_of(data, [4] * 4).micro_batches:
        order = batch["labels"].argsort()
        (contrast.loss_sum(embed(model, batch)[order], batch["labels"][order]) / 16).backward()
    wrong = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    expected, _ = reference_step(data, "infonce")
    assert relative_error(wrong, flat(make_encoder()) - expected) > 0.05


def test_five_steps() -> None:
    data = make_pairs()
    accelerator = make_accelerator()
    ends = []
    for sizes in ([16], [5, 5, 6]):
        model, optimizer = prepared(accelerator)
        for _ in range(5):
            step(accelerator, model, optimizer, window_of(data, sizes), embed, "infonce", data, max_grad_norm=0.5)
        ends.append(flat(model))
    assert relative_error(ends[1], ends[0]) < 1e-10
    assert relative_error(ends[0], flat(make_encoder())) > 1e-2


@pytest.mark.parametrize("seed", [11, None])
def test_dropout_is_replayed(seed: int | None) -> None:
    """Each text has the same vector in both passes, to the last bit, and the gradient is that of those vectors."""
    data, accelerator = make_pairs(), make_accelerator()
    model, optimizer = prepared(accelerator, dropout=0.3)
    window = window_of(data, [5, 5, 6], seed=seed)
    seen: list[tuple[bool, torch.Tensor]] = []

    def watched(model: Any, batch: Any) -> torch.Tensor:
        found = embed(model, batch)
        seen.append((torch.is_grad_enabled(), found.detach().clone()))
        return found

    torch.manual_seed(3)
    result = step(accelerator, model, optimizer, window, watched, "infonce", data)
    first, second = [[part for grad, part in seen if grad == which] for which in (False, True)]
    assert len(first) == len(second) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert relative_error(torch.cat(first), torch.cat([embed(model.eval(), b) for b in window.micro_batches])) > 0.05

    # One graph over all micro-batches, which draw the same numbers.
    whole = make_encoder(dropout=0.3).train()
    torch.manual_seed(3 if seed is None else seed)
    together = torch.cat([embed(whole, batch) for batch in window.micro_batches])
    assert torch.equal(together, torch.cat(first))
    order = torch.cat([batch["labels"] for batch in window.micro_batches]).argsort()
    loss = plain_loss(together[order], data, "infonce")
    loss.backward()
    gradient = torch.cat([parameter.grad.reshape(-1) for parameter in whole.parameters()])
    assert relative_error(flat(make_encoder(dropout=0.3)) - flat(model), gradient) < 1e-10
    assert result.loss == pytest.approx(loss.item(), rel=1e-10)


@pytest.mark.parametrize("call", range(6))  # three micro-batches in the first pass, then three in the second
def test_out_of_memory_costs_a_retry(call: int) -> None:
    data, accelerator, memory = make_pairs(), make_accelerator(), MemoryLimit()
    model, optimizer = prepared(accelerator)
    window = window_of(data, [5, 5, 6], seed=4)
    result = step(accelerator, model, optimizer, window, out_of_memory_at(call), "infonce", data, memory=memory)
    expected, value = reference_step(data, "infonce")
    start = flat(make_encoder())
    assert relative_error(start - flat(model), start - expected) < 1e-10
    assert (result.oom_retries, memory.retries) == (1, 1)
    assert result.micro_batches > 3 and result.micro_batch_limit is not None
    assert result.loss == pytest.approx(value, rel=1e-10)
    assert result.items == PAIRS
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_text_that_cannot_fit_is_named() -> None:
    data, accelerator = make_pairs(4), make_accelerator()
    model, optimizer = prepared(accelerator)
    before = flat(model)

    def never(model: Any, batch: Any) -> torch.Tensor:
        if bool((batch["labels"] == 7).any()):
            raise MemoryError
        return embed(model, batch)

    with pytest.raises(NotEnoughMemoryError, match=r"^step 6: row 2 \(\d tokens\) alone does not fit"):
        step(accelerator, model, optimizer, window_of(data, [4], step=5), never, "infonce", data)
    assert torch.equal(flat(model), before)


def test_other_errors_pass() -> None:
    data, accelerator = make_pairs(4), make_accelerator()
    model, optimizer = prepared(accelerator)

    def wrong(model: Any, batch: Any) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(accelerator, model, optimizer, window_of(data, [4]), wrong, "infonce", data)


class WithStatistics(torch.nn.Module):
    """The tiny encoder, with statistics that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_encoder()
        self.statistics = torch.nn.BatchNorm1d(6, affine=False).double()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        vectors = self.inner(input_ids, attention_mask)
        self.statistics(vectors.detach())
        return vectors


def test_statistics_see_each_micro_batch_once() -> None:
    data, accelerator = make_pairs(), make_accelerator()
    model = WithStatistics()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    window = window_of(data, [5, 5, 6])
    step(accelerator, model, optimizer, window, embed, "infonce", data)
    plain = WithStatistics()
    for batch in window.micro_batches:
        embed(plain, batch)
    assert int(model.statistics.num_batches_tracked) == 3
    assert torch.equal(model.statistics.running_mean, plain.statistics.running_mean)


def test_placeholders_count_nothing() -> None:
    data, accelerator = make_pairs(), make_accelerator()
    model, optimizer = prepared(accelerator)
    window = window_of(data, [16])
    extra = Window([*window.micro_batches, texts_of(data, [3])], placeholders=frozenset({1}))
    result = step(accelerator, model, optimizer, extra, embed, "infonce", data)
    expected, value = reference_step(data, "infonce")
    start = flat(make_encoder())
    assert relative_error(start - flat(model), start - expected) < 1e-10
    assert result.loss == pytest.approx(value, rel=1e-10)
    assert result.examples == len(window.micro_batches[0]["labels"])


def test_nan_names_the_step_and_the_rows_and_leaves_the_weights() -> None:
    data, accelerator = make_pairs(6), make_accelerator()
    model, optimizer = prepared(accelerator)
    before = flat(model)
    batches = [texts_of(data, [0, 1]), texts_of(data, [2, 3]), texts_of(data, [4])]
    rows = [[int(label) // 3 + 101 for label in batch["labels"]] for batch in batches]
    window = Window(batches, rows=rows, step=7)
    with pytest.raises(NonFiniteLossError, match=r"step 8: loss nan.*rows 103, 103, 103, 104, 104, 104\."):
        step(accelerator, model, optimizer, window, nan_in(7), "infonce", data)
    assert torch.equal(flat(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert step(accelerator, model, optimizer, window, embed, "infonce", data).stepped


def test_effective_batch_without_items_is_an_error() -> None:
    data, accelerator = make_pairs(16), make_accelerator()
    model, optimizer = prepared(accelerator)
    window = Window([texts_of(data, [1, 5])], rows=[[1, 1, 5, 5]])  # none of these has a negative
    with pytest.raises(EmptyWindowError, match=r"step 1: its effective batch of 4 examples has no items.*rows 1, 1, 5"):
        step(accelerator, model, optimizer, window, embed, "triplet", data)


def test_fp16_overflow_skips_and_the_scaled_gradient_is_the_same() -> None:
    reset_accelerate_state()
    data = make_pairs()
    accelerator = Fp16CpuAccelerator(cpu=True, mixed_precision="fp16", init_scale=2.0**10)
    model = make_encoder(torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = flat(model)

    def overflowing(model: Any, batch: Any) -> torch.Tensor:
        # Finite itself, with a gradient that is not.
        return embed(model, batch) + (model.head.weight * 0.0).sum().sqrt()

    window = window_of(data, [5, 5, 6])
    skipped = step(accelerator, model, optimizer, window, overflowing, "infonce", data)
    assert not skipped.stepped and torch.equal(flat(model), before)
    stepped = step(accelerator, model, optimizer, window, embed, "infonce", data)
    expected, value = reference_step(data, "infonce")
    assert stepped.stepped and stepped.loss == pytest.approx(value, rel=2e-2)
    cosine = torch.nn.functional.cosine_similarity(before - flat(model), flat(make_encoder()) - expected, dim=0)
    assert cosine > 0.99
    reset_accelerate_state()
