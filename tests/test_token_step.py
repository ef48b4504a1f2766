"""The step of entity recognition, against plain PyTorch on the whole effective batch, on one process and on two."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import launch
from tasks import relative_error
from token_cases import (
    LABELS,
    random_sentences,
    reference,
    tiny_model,
    tiny_tokenizer,
    train_on,
    weights_of,
    windows_of,
)
from token_cls import TokenClsRecipe, loss_sum, num_items

from accumft.cut import Limits
from accumft.data.tokens import IGNORED, TokenCollator
from accumft.data.windows import split
from accumft.errors import UserError
from accumft.launch import make_accelerator
from accumft.step import train_step
from accumft.tasks.token_evaluation import predict_tokens
from accumft.tasks.token_packing import pack_tokens

TAILS = [1, 2, 5, 15]


@pytest.mark.parametrize("sizes", [[16], [8, 8], [5, 5, 6], [1] * 16])
def test_gradient_of_any_cut_is_that_of_the_whole_batch(sizes: list[int]) -> None:
    accelerator = make_accelerator(gradient_accumulation_steps=3)  # what is configured must not matter
    dataset, collate = windows_of().windows, TokenCollator(tiny_tokenizer())
    model = tiny_model()
    start = weights_of(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    window = [collate(dataset[piece.tolist()]) for piece in torch.arange(16).split(sizes)]
    result = train_step(accelerator, model, optimizer, window, loss_sum, num_items)
    expected, losses = reference(dataset, [range(16)], 1.0)
    gradient, expected_gradient = start - weights_of(model), start - expected
    assert relative_error(gradient, expected_gradient) < 1e-10
    assert result.loss == pytest.approx(losses[0], rel=1e-10)
    assert result.items == sum(label != IGNORED for row in dataset[:16]["labels"] for label in row) > 30

    # The mean of the micro-batches' means is something else, so the assertion above can fail.
    if sizes == [5, 5, 6]:
        wrong = tiny_model()
        sum(loss_sum(wrong, batch) / num_items(batch) / 3 for batch in window).backward()
        means = torch.cat([parameter.grad.reshape(-1) for parameter in wrong.parameters()])
        assert relative_error(means, expected_gradient) > 1e-3


@pytest.mark.parametrize("max_tokens", [1000, 40])
def test_packed_windows_step_like_the_whole_batch(max_tokens: int) -> None:
    """Without padding, and cut as where memory runs out: the same gradient."""
    from accumft.packing import IMPLEMENTATION

    accelerator, dataset = make_accelerator(), windows_of().windows
    model = tiny_model()
    model.set_attn_implementation("sdpa")
    start = weights_of(model)
    collate = pack_tokens(model, tiny_tokenizer(), dataset, TokenClsRecipe(padding_free=True))
    assert collate is not None and model.config._attn_implementation == IMPLEMENTATION
    order = sorted(range(16), key=lambda row: -dataset[row]["length"])
    batch = collate(dataset[order], [3, 1, 5, 7])
    assert "packing" in batch and batch["input_ids"].shape[0] == 1
    window = split(batch, max_tokens)
    assert len(window) == (1 if max_tokens == 1000 else 5)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    result = train_step(accelerator, model, optimizer, window, loss_sum, num_items)
    expected, losses = reference(dataset, [range(16)], 1.0)
    assert relative_error(start - weights_of(model), start - expected) < 1e-10
    assert result.loss == pytest.approx(losses[0], rel=1e-10)
    assert result.examples == 16


def test_what_cannot_be_packed_is_padded_or_refused() -> None:
    model, dataset = tiny_model(), windows_of().windows  # its attention is eager
    assert pack_tokens(model, tiny_tokenizer(), dataset, TokenClsRecipe()) is None
    assert model.config._attn_implementation == "eager"
    with pytest.raises(UserError, match="--padding_free: not possible with BertForTokenClassification"):
        pack_tokens(model, tiny_tokenizer(), dataset, TokenClsRecipe(padding_free=True))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("micro", [16, 3])
def test_short_last_window(tail: int, micro: int) -> None:
    weights, results, plan = train_on(make_accelerator(), 16 + tail, {"micro_batch_size": micro}, 1.0)
    batches = [plan.effective_batch(0), plan.effective_batch(1)]
    assert sorted([*batches[0], *batches[1]]) == list(range(16 + tail))
    expected, losses = reference(windows_of().windows, batches, 1.0)
    assert relative_error(weights, expected) < 1e-10
    assert [result.examples for result in results] == [16, tail]
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-10)


def test_evaluation_has_every_labelled_token_once_in_order() -> None:
    accelerator, tokens = make_accelerator(), windows_of(20)
    model, collate = tiny_model(torch.float32), TokenCollator(tiny_tokenizer())
    expected = []
    model.eval()
    for row in tokens.windows:
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"]])).logits[0]
        expected.append(logits[torch.tensor(row["labels"]) != IGNORED])
    for limits in (Limits(1), Limits(7), Limits(None, 64)):
        found = predict_tokens(accelerator, model, tokens.windows, collate, limits)
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-6)
    assert len(found) == sum(len(sentence.words) for sentence in random_sentences(20))


def test_evaluation_that_runs_out_of_memory_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, tokens, model = make_accelerator(), windows_of(20), tiny_model(torch.float32)
    collate = TokenCollator(tiny_tokenizer())
    whole = predict_tokens(accelerator, model, tokens.windows, collate, Limits(20))
    forward, sizes = model.forward, []

    def short_of_memory(**inputs: Any) -> Any:
        sizes.append(inputs["input_ids"].numel())
        if sizes[-1] > 60:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(**inputs)

    monkeypatch.setattr(model, "forward", short_of_memory)
    found = predict_tokens(accelerator, model, tokens.windows, collate, Limits(20))
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    assert max(sizes) > 120 and sum(size <= 60 for size in sizes) > 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("token_step")
    result = launch(Path(__file__).parent / "launched" / "launch_token_step.py", str(folder), timeout=240)
    assert result.returncode == 0, result.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("tail", TAILS)
def test_two_processes_step_like_one(found: list[dict[str, Any]], tail: int) -> None:
    for rank in range(2):
        case = found[rank]["tails"][tail]
        expected, losses = reference(windows_of().windows, case["batches"], 1.0)
        assert relative_error(case["weights"], expected) < 1e-10
        assert case["examples"] == [16, tail]
        assert case["losses"] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("number", [1, 2, 20])
def test_two_processes_evaluate_like_one(found: list[dict[str, Any]], number: int) -> None:
    model, collate = tiny_model(torch.float32), TokenCollator(tiny_tokenizer())
    one = predict_tokens(make_accelerator(), model, windows_of(number).windows, collate, Limits(4))
    assert one.shape == (sum(len(sentence.words) for sentence in random_sentences(number)), len(LABELS))
    for rank in range(2):
        np.testing.assert_allclose(found[rank]["logits"][number], one, rtol=1e-5, atol=1e-6)
