"""The gradient of a sequence-to-sequence step, against one plain forward over the whole effective batch."""

from typing import Any

import pytest
import torch
from seq2seq_cases import (
    CUTS,
    EFFECTIVE,
    FAMILIES,
    SMOOTHING,
    TAIL,
    pairs,
    reference_loss,
    reference_run,
    the_plan,
    tiny,
)
from seq2seq_cases import train as train_on
from tasks import flat, relative_error

from accumft.data.target_tokens import PairCollator
from accumft.data.windows import Window, count, shape_of, split
from accumft.embedding import window_embedding
from accumft.launch import make_accelerator
from accumft.step import train_step
from accumft.tasks.seq2seq import count_targets, target_logits, target_loss_sum

# T5 computes its norms and its softmax in float32 whatever its dtype.
PRECISION = {"t5": 1e-6, "bart": 1e-10}
by_family = pytest.mark.parametrize("family", FAMILIES)


@by_family
@pytest.mark.parametrize(("rows", "tokens"), CUTS)
def test_a_full_and_a_short_step_on_any_cut(family: str, rows: int | None, tokens: int | None) -> None:
    accelerator = make_accelerator(gradient_accumulation_steps=3)
    dataset, plan = pairs(EFFECTIVE + TAIL), the_plan(1, rows, tokens)
    batches = [plan.effective_batch(step) for step in range(2)]
    assert [len(batch) for batch in batches] == [EFFECTIVE, TAIL]
    weights, results = train_on(accelerator, family, rows, tokens, torch.float64)
    start = flat(tiny(family, torch.float64))
    expected = reference_run(family, dataset, batches, torch.float64)
    assert (expected - start).norm() > 1e-2
    assert relative_error(weights - start, expected - start) < PRECISION[family]
    first = reference_loss(tiny(family, torch.float64), dataset, batches[0], SMOOTHING).item()
    assert results[0].loss == pytest.approx(first, rel=PRECISION[family])
    assert [result.items for result in results] == [sum(len(dataset[int(i)]["labels"]) for i in b) for b in batches]
    assert [result.tokens for result in results] == [sum(dataset[int(i)]["length"] for i in b) for b in batches]
    if rows == 3:
        assert results[0].micro_batches == 6


def test_unequal_items_make_a_mean_of_means_wrong() -> None:
    """So that the test above can fail."""
    dataset = pairs(EFFECTIVE)
    model = tiny("bart", torch.float64)
    whole = reference_loss(model, dataset, range(EFFECTIVE), SMOOTHING).item()
    means = [reference_loss(model, dataset, range(i, i + 4), SMOOTHING).item() for i in range(0, EFFECTIVE, 4)]
    assert abs(sum(means) / 4 - whole) > 1e-3


@by_family
def test_logits_are_those_that_the_model_makes_of_labels(family: str) -> None:
    """And padding of either side changes nothing."""
    model, dataset = tiny(family, torch.float64), pairs(5)
    collate = PairCollator(model.config.pad_token_id)
    together = target_logits(model, collate(dataset[:]))
    for i in range(5):
        row = collate(dataset[i : i + 1])
        own = {name: row[name] for name in ("input_ids", "attention_mask", "labels")}
        alone = model(**own).logits[0]
        assert torch.allclose(together[i, : len(alone)], alone, rtol=1e-6, atol=1e-7)


@by_family
def test_loss_is_torchs_with_smoothing(family: str) -> None:
    model, dataset = tiny(family, torch.float64), pairs(7)
    batch = PairCollator(model.config.pad_token_id)(dataset[:])
    for smoothing in (0.0, 0.3):
        found = target_loss_sum(model, batch, smoothing) / count_targets(batch)
        assert found.item() == pytest.approx(reference_loss(model, dataset, range(7), smoothing).item(), rel=1e-6)
    assert count_targets(batch) == sum(len(row) for row in dataset["labels"])


def test_labels_are_kept_when_a_batch_is_divided_whatever_their_width() -> None:
    """A source as long as a target must not take its columns along."""
    columns = {"input_ids": [[5] * 8, [6] * 3, [7] * 2], "labels": [[5] * 2, [6] * 8, [7] * 8]}
    batch = PairCollator(0)(columns)
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 8)
    assert shape_of(batch) == (3, 16, 48)
    assert count([batch]) == (3, 31, 48)
    parts = split(batch, 17)
    assert [(part["input_ids"].shape[1], part["labels"].shape[1]) for part in parts] == [(8, 2), (3, 8), (2, 8)]
    assert [part["decoder_attention_mask"].shape[1] for part in parts] == [2, 8, 8]
    assert sum(int(count_targets(part)) for part in parts) == int(count_targets(batch)) == 18
    again = split(split(batch, 32)[1], 1)
    assert sum(int(count_targets(part)) for part in again) == (8 if len(again) == 1 else 16)


def test_memory_that_runs_out_leaves_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, found = pairs(EFFECTIVE), []
    for limit in (10**9, 60):
        model = tiny("bart", torch.float64)
        batch = PairCollator(model.config.pad_token_id)(dataset[:])

        def short_of_memory(model: Any, batch: Any, limit: int = limit) -> torch.Tensor:
            if shape_of(batch)[2] > limit:
                raise MemoryError("out of memory")
            return target_loss_sum(model, batch, SMOOTHING)

        start = flat(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        result = train_step(make_accelerator(), model, optimizer, Window([batch]), short_of_memory, count_targets)
        found.append((flat(model) - start, result))
    assert relative_error(found[1][0], found[0][0]) < 1e-10
    assert found[1][1].oom_retries > 0 and found[1][1].items == found[0][1].items


@by_family
@pytest.mark.parametrize("own_embedding", [False, True])
def test_embedding_of_both_sides_looked_up_once_a_window(family: str, own_embedding: bool) -> None:
    """Encoder, decoder and the output layer share one matrix; BART may scale it, which leaves it alone.

    With `own_embedding` the encoder reads through the very module that is replaced.
    """
    found = []
    dataset = pairs(EFFECTIVE)
    for replaced in (False, True):
        model = tiny(family, torch.float64, vocabulary=2000)
        if own_embedding and family == "t5":
            model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
        assert model.lm_head.weight is model.get_input_embeddings().weight
        collate = PairCollator(model.config.pad_token_id)
        window = [collate(dataset[i : i + 5]) for i in range(0, EFFECTIVE, 5)]
        with window_embedding(model if replaced else object(), window) as embedding:
            assert (embedding is not None) == (replaced and family == "t5")
            for index, batch in enumerate(window):
                if embedding is not None:
                    embedding.current = index
                target_loss_sum(model, batch).backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert relative_error(found[1][name], gradient) < 1e-10, name
