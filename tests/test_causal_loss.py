"""The loss over shifted targets, in chunks, packed and padded: the gradient of the whole effective batch at once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from causal_cases import EXAMPLES, MODELS, SIZES, VOCABULARY, encoder, model_of, reference_loss, rows_of_tokens
from causal_lm import loss_sum, num_items
from launching import launch
from torch.overrides import TorchFunctionMode

from accumft.cut import Limits
from accumft.data.windows import WindowDataset, split
from accumft.errors import NotEnoughMemoryError, UserError
from accumft.launch import make_accelerator
from accumft.plan import Plan, resolve_batch_sizes
from accumft.step import train_step
from accumft.tasks.causal import CausalLoss, choose_chunk, row_sums, scores_of, shifted, token_losses
from accumft.tasks.causal_generation import generate
from accumft.tasks.causal_model import build_small_llama
from accumft.tasks.causal_packing import (
    IMPLEMENTATION,
    TOLERANCE,
    PackedTargets,
    PaddedTargets,
    difference,
    pack_causal,
)
from accumft.window_plan import WindowPlan

FIELDS = {"padding_free": None, "torch_compile": False, "pad_to_multiple_of": None}


def criterion_of(chunk: int | None = 5) -> CausalLoss:
    return CausalLoss(make_accelerator().autocast, chunk)


def flat(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def windows_of(data: Any, tokens: int, batch: int, packed: PackedTargets | None, multiple: int = 1) -> WindowDataset:
    plan = Plan.of(len(data), resolve_batch_sizes(batch, None, None, 1, tokens), 0, 1, -1)
    window_plan = WindowPlan(plan, np.array(data["length"][:]), packed=packed is not None, pad_to_multiple_of=multiple)
    return WindowDataset(data, window_plan, packed or PaddedTargets(0, multiple))


def step_gradient(model: Any, window: Any, chunk: int | None = 5) -> tuple[torch.Tensor, Any]:
    """The gradient of one step: that of SGD with a learning rate of 1."""
    before = flat(model)
    criterion = criterion_of(chunk)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = train_step(
        make_accelerator(), model, optimizer, window, lambda m, batch: loss_sum(criterion, m, batch), num_items
    )
    return before - flat(model), result


def reference_gradient(model: Any, columns: Any) -> tuple[torch.Tensor, float]:
    loss = reference_loss(model, columns)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.reshape(-1) for gradient in gradients]), loss.item()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["Llama tied", "GPT2"])
def test_any_cut_has_the_gradient_of_the_whole_effective_batch(name: str, packed: bool) -> None:
    """Cuts by tokens, a short last batch, chunks of 5 targets; in float64, to 1e-10."""
    data, cuts = rows_of_tokens(22), {}
    for step, rows in enumerate((16, 6)):  # the last effective batch is short
        expected: Any = None
        for tokens in (20, 60, 4000):
            model = model_of(name, torch.float64)
            collate = pack_in_float64(model) if packed else None
            window = windows_of(data, tokens, 16, collate)[step]
            cuts[tokens, step] = len(window.micro_batches)
            columns = data[sorted(row - 1 for part in window.rows for row in part)]
            if expected is None:
                expected, loss = reference_gradient(model_of(name, torch.float64), columns)
            found, result = step_gradient(model, window)
            assert relative_error(found, expected) < 1e-10
            assert result.loss == pytest.approx(loss, rel=1e-10)
            targets = sum(label != -100 for labels in columns["labels"] for label in labels[1:])
            assert (result.items, result.examples) == (targets, rows)
    assert cuts[20, 0] > cuts[60, 0] > cuts[4000, 0]


def pack_in_float64(model: Any) -> PackedTargets:
    collate = pack_causal(model, tiny_tokenizer_with_zero(), rows_of_tokens(), SimpleNamespace(**FIELDS))
    assert collate is not None
    return collate


def tiny_tokenizer_with_zero() -> Any:
    """What a collator asks of a tokenizer."""
    return SimpleNamespace(pad_token_id=0, pad_token_type_id=0)


@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_do_not_see_each_other(name: str, multiple: int | None) -> None:
    data, model = rows_of_tokens(), model_of(name)
    fields = FIELDS | {"pad_to_multiple_of": multiple}
    collate = pack_causal(model, tiny_tokenizer_with_zero(), data, SimpleNamespace(**fields))
    assert collate is not None and model.config._attn_implementation == IMPLEMENTATION
    window = windows_of(data, 96, 24, collate, multiple or 1)[0]
    longest = max(batch["input_ids"].shape[1] for batch in window.micro_batches)
    assert longest > model.config.max_position_embeddings, "more tokens than positions: they begin anew in each row"
    found, packed = step_gradient(model, window)
    usual = windows_of(data, 96, 24, None, multiple or 1)[0]
    expected, padded = step_gradient(model_of(name), usual)
    assert relative_error(found, expected) < 1e-5
    assert packed.loss == pytest.approx(padded.loss, rel=1e-6) and packed.items == padded.items
    assert packed.tokens == padded.tokens and (multiple or packed.padded_tokens < padded.padded_tokens)


def test_gradient_checkpointing_has_the_same_gradient() -> None:
    data, found = rows_of_tokens(), []
    for checkpointed in (False, True):
        model = model_of("Llama", torch.float64)
        collate = pack_in_float64(model)
        if checkpointed:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        found.append(step_gradient(model, windows_of(data, 96, 24, collate)[0])[0])
    assert relative_error(*found) < 1e-12 and found[0].norm() > 0.1


def test_the_trial_sees_a_row_that_sees_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over the whole chain instead of inside each row is far beyond the tolerance, rounding far below."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    data, tokenizer = rows_of_tokens(), tiny_tokenizer_with_zero()
    for name in MODELS:
        model = model_of(name, initializer_range=0.02)
        collate = pack_causal(model, tokenizer, data, SimpleNamespace(**FIELDS))
        assert collate is not None
        assert difference(model, tokenizer, collate, data) < TOLERANCE / 100

        def leaking(module: Any, q: Any, k: Any, v: Any, mask: Any, packing: Any = None, **kwargs: Any) -> Any:
            return sdpa_attention_forward(module, q, k, v, None if packing else mask, **kwargs)

        transformers.AttentionInterface.register(IMPLEMENTATION, leaking)
        assert difference(model, tokenizer, collate, data) > TOLERANCE


def test_what_cannot_be_packed_stays_as_it_was() -> None:
    data, tokenizer = rows_of_tokens(), tiny_tokenizer_with_zero()
    model = model_of("Llama").eval()
    windowed = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=4)).eval()
    for kept, demanded in ((windowed, "MistralForCausalLM here"), (model, "together with --torch_compile")):
        fields = SimpleNamespace(**FIELDS | {"torch_compile": kept is model})
        assert pack_causal(kept, tokenizer, data, fields) is None
        assert kept.config._attn_implementation == "sdpa"
        fields.padding_free = True
        with pytest.raises(UserError, match=f"--padding_free: not possible (with )?{demanded}"):
            pack_causal(kept, tokenizer, data, fields)


def test_a_packed_batch_by_hand() -> None:
    collate = PackedTargets(tiny_tokenizer_with_zero())
    columns = {"input_ids": [[5, 6, 7], [8, 9], [4, 3]], "labels": [[-100, 6, 7], [-100, 9], [-100, -100]]}
    batch = collate(columns, [2, 1])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0, 4, 3]]
    assert batch["targets"].tolist() == [[6, 7, -100, 9, -100, -100, -100, -100]], "nothing is learnt across rows"
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert int(num_items(batch)) == 3
    # What memory cannot hold is cut between rows.
    parts = split(batch, 3)
    assert [part["targets"].tolist() for part in parts] == [[[6, 7, -100]], [[9, -100, -100]], [[-100, -100]]]
    padded = PaddedTargets(0)(columns)
    assert padded["targets"].tolist() == [[6, 7, -100], [9, -100, -100], [-100, -100, -100]]
    assert shifted(torch.tensor([[-100, 6, 7]])).tolist() == [[6, 7, -100]]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunks_have_the_loss_and_gradients_of_the_whole(chunk: int, tied: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    embedding = torch.nn.Embedding(50, 16)
    head = torch.nn.Linear(16, 50, bias=not tied)
    with torch.no_grad():
        embedding.weight.normal_(generator=draw)
        head.weight.normal_(generator=draw)
    if tied:
        head.weight = embedding.weight
    ids, targets = (torch.randint(50, (200,), generator=draw) for _ in range(2))
    parameters = [embedding.weight] if tied else [embedding.weight, head.weight, head.bias]

    def run(chunk: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        losses = token_losses(head, torch.tanh(embedding(ids)), targets, chunk)
        return losses.detach(), list(torch.autograd.grad(losses.sum(), parameters))

    logits = head(torch.tanh(embedding(ids)))
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    gradients = torch.autograd.grad(expected.sum(), parameters)
    losses, found = run(chunk)
    assert torch.allclose(losses, expected, rtol=1e-6, atol=1e-6)
    for own, other in zip(found, gradients, strict=True):
        assert relative_error(own, other) < 1e-6


class _Largest(TorchFunctionMode):
    """The largest number of logits that the head has made at once."""

    tokens = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and result.shape[-1] == VOCABULARY:
            self.tokens = max(self.tokens, result[..., 0].numel())
        return result


def test_the_logits_of_a_batch_never_exist_at_once() -> None:
    data, model = rows_of_tokens(), model_of("Llama")
    batch = PaddedTargets(0)(data[:24])
    targets = int(num_items(batch))
    assert targets > 60
    found = {}
    for chunk in (5, None):
        with _Largest() as seen:
            criterion_of(chunk)(model, batch).backward()
        found[chunk] = seen.tokens
    assert found == {5: 5, None: batch["input_ids"].numel()}


def test_logits_that_are_more_than_a_product() -> None:
    gemma = transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=30.0, attn_implementation="eager")
    scaled = transformers.CohereConfig(**SIZES, logit_scale=0.25)
    for model in (transformers.Gemma2ForCausalLM(gemma), transformers.CohereForCausalLM(scaled)):
        assert choose_chunk(model, None, False) is None
        with pytest.raises(
            UserError, match=rf"--logits_chunk_size 64: is not possible: {type(model).__name__} does more"
        ):
            choose_chunk(model, 64, False)
    for name in MODELS:
        assert choose_chunk(model_of(name), None, False) == 1024
        assert choose_chunk(model_of(name), 7, False) == 7
    with pytest.raises(UserError, match="--logits_chunk_size 7: is not possible together with --torch_compile"):
        choose_chunk(model_of("Llama"), 7, True)


@pytest.mark.parametrize("chunk", [5, None])
def test_an_evaluation_is_over_every_target_token(chunk: int | None) -> None:
    data, model = rows_of_tokens(), model_of("GPT2")
    expected = reference_loss(model.eval(), data[:24]).item()
    for rows in (1, 5, 24):
        sums = row_sums(make_accelerator(), model, criterion_of(chunk), data, PaddedTargets(0), Limits(rows, None))
        assert sums[:, 1].tolist() == [sum(label != -100 for label in labels) for labels in data["labels"]]
        found = scores_of(sums)
        assert found["loss"] == pytest.approx(expected, rel=1e-5)
        assert found["perplexity"] == pytest.approx(np.exp(expected), rel=1e-5)
    by_row = [reference_loss(model, data[[row]]).item() for row in range(24)]
    assert (sums[:, 0] / sums[:, 1]).tolist() == pytest.approx(by_row, rel=1e-4), "in the order of the rows"


def test_generation_that_runs_out_of_memory_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = encoder()
    torch.manual_seed(0)
    model = build_small_llama(encode.tokenizer)
    examples = (EXAMPLES * 4)[:7]
    whole = generate(make_accelerator(), model, encode, examples, 4, 64)
    generated, sizes = model.generate, []

    def short_of_memory(most: int) -> Any:
        def limited(**batch: Any) -> torch.Tensor:
            sizes.append(len(batch["input_ids"]))
            if sizes[-1] > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return generated(**batch)

        return limited

    monkeypatch.setattr(model, "generate", short_of_memory(2))
    assert generate(make_accelerator(), model, encode, examples, 4, 64) == whole
    assert sizes[0] == 7 and sum(size for size in sizes if size <= 2) == 7
    monkeypatch.setattr(model, "generate", short_of_memory(0))
    with pytest.raises(NotEnoughMemoryError, match=r"evaluation: a row of \d+ tokens"):
        generate(make_accelerator(), model, encode, examples, 4, 64)


def test_two_processes(tmp_path: Path) -> None:
    result = launch(Path(__file__).parent / "launched" / "launch_causal_step.py", str(tmp_path), timeout=120)
    assert result.returncode == 0, result.stderr
    data, model = rows_of_tokens(21), model_of("Llama tied", torch.float64)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    losses = []
    for step in range(2):  # of 16 rows, and of 5
        columns = data[[row - 1 for rank in ranks for row in rank["rows"][step]]]
        assert len(columns["row"]) == [16, 5][step]
        gradient, loss = reference_gradient(model, columns)
        losses.append(loss)
        with torch.no_grad():
            for parameter, own in zip(
                model.parameters(), gradient.split([p.numel() for p in model.parameters()]), strict=True
            ):
                parameter -= 0.5 * own.view_as(parameter)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, rel=1e-10)
        assert relative_error(rank["weights"], flat(model)) < 1e-10
        assert rank["sums"].shape == (21, 2)
        assert scores_of(rank["sums"])["loss"] == pytest.approx(reference_loss(model, data[:21]).item(), rel=1e-5)
        assert rank["answers"] == ranks[0]["answers"] and len(rank["answers"]) == 5
