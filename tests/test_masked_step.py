"""The step of a masked language model against plain PyTorch and transformers' own loss on the whole effective batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import launch
from masked_cases import Flags, blocks_of, collator, plan_of, reference, restored, tiny_bert, train
from tasks import flat, relative_error

from accumft.cut import Limits
from accumft.data.masking import IGNORED
from accumft.data.windows import WindowDataset, lengths_of, shape_of, split
from accumft.errors import NotEnoughMemoryError
from accumft.launch import make_accelerator
from accumft.tasks.masked import MaskedLoss, evaluate_masked, model_inputs, unigram_perplexity
from accumft.tasks.masked_models import check_separation, pack_masked, sample_of
from accumft.window_plan import WindowPlan

CUTS: list[dict[str, int]] = [{"rows": 16}, {"rows": 5}, {"rows": 1}, {"tokens": 40}, {"tokens": 100}]


@pytest.fixture(scope="module")
def references() -> dict[int, tuple[torch.Tensor, list[float]]]:
    return {rows: reference(rows) for rows in (17, 21, 31)}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("limits", CUTS, ids=str)
def test_two_epochs_on_any_cut_end_at_the_full_batch_weights(
    references: dict[int, Any], limits: dict[str, int], packed: bool
) -> None:
    weights, results = train(make_accelerator(), 21, limits, packed=packed, selects=True)
    expected, losses = references[21]
    start = flat(tiny_bert()[0])
    assert relative_error(weights - start, expected - start) < 1e-10
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-10)
    assert [result.examples for result in results] == [16, 5, 16, 5]


@pytest.mark.parametrize("rows", [17, 31])
def test_short_tails_and_all_logits(references: dict[int, Any], rows: int) -> None:
    weights, results = train(make_accelerator(), rows, {"rows": 4}, packed=False, selects=False)
    assert relative_error(weights, references[rows][0]) < 1e-10
    assert [result.loss for result in results] == pytest.approx(references[rows][1], rel=1e-10)


def test_documents_of_a_row_kept_apart() -> None:
    weights, _ = train(make_accelerator(), 40, {"rows": 3}, packed=False, selects=True, separate=True)
    assert relative_error(weights, reference(40, separate=True)[0]) < 1e-10


def test_items_are_the_masked_tokens() -> None:
    _, results = train(make_accelerator(), 21, {"rows": 4}, packed=True, selects=True)
    _, tokenizer = tiny_bert()
    blocks, plan = blocks_of(tokenizer, 21), plan_of(21, 1, rows=4)
    for step, result in enumerate(results):
        batch = collator(tokenizer).in_epoch(step // 2)(blocks[plan.effective_batch(step).tolist()])
        assert result.items == int((batch["targets"] != IGNORED).sum())


def masks_of(blocks: Any, tokenizer: Any, processes: int, limits: dict[str, int]) -> dict[tuple[int, int], list[int]]:
    """The masked ids by (step, row of the source), as windows bring them."""
    plan = plan_of(len(blocks), processes, **limits)
    found = {}
    for process in range(processes):
        windows = WindowDataset(blocks, WindowPlan(plan, lengths_of(blocks)), collator(tokenizer), process)
        for step in reversed(range(plan.total_steps)):  # in any order
            window = windows[step]
            for number, (batch, rows) in enumerate(zip(window.micro_batches, window.rows, strict=True)):
                if number not in window.placeholders:
                    for row, ids, mask in zip(rows, batch["input_ids"], batch["attention_mask"], strict=True):
                        found[step, row] = ids[mask.bool()].tolist()
    return found


def test_masks_depend_on_seed_epoch_and_row_alone() -> None:
    _, tokenizer = tiny_bert()
    blocks = blocks_of(tokenizer, 21)
    one = masks_of(blocks, tokenizer, 1, {"rows": 16})
    assert len(one) == 42
    # Two processes that cut otherwise have other examples in a window, and the same masks.
    assert masks_of(blocks, tokenizer, 2, {"tokens": 40}) == one
    by_epoch = [{row: ids for (step, row), ids in one.items() if step // 2 == epoch} for epoch in (0, 1)]
    assert by_epoch[0].keys() == by_epoch[1].keys() == set(range(1, 22))
    assert sum(by_epoch[0][row] == by_epoch[1][row] for row in by_epoch[0]) <= 3


def test_head_sees_the_masked_tokens_alone() -> None:
    model, tokenizer = tiny_bert()
    collate = collator(tokenizer)
    blocks = blocks_of(tokenizer, 21)
    loss, seen = MaskedLoss(model, collate(sample_of(blocks))), []
    model.cls.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
    batch = collate(blocks[:8])
    masked = batch["targets"] != IGNORED
    assert torch.allclose(loss.logits(model, batch), MaskedLoss(model).logits(model, batch), atol=1e-12)
    assert seen == [int(masked.sum()), masked.numel()]
    # Who calls the model as usual has all logits.
    assert model(**model_inputs(batch)).logits.shape[:2] == masked.shape


def test_a_head_that_mixes_tokens_gets_all_of_them() -> None:
    model, tokenizer = tiny_bert()
    head = model.cls.forward
    model.cls.forward = lambda states: head(states - states.mean(dim=1, keepdim=True))
    assert not MaskedLoss(model, collator(tokenizer)(sample_of(blocks_of(tokenizer, 21)))).selects
    assert not model.base_model._forward_hooks


def test_documents_see_each_other_only_where_asked() -> None:
    model, tokenizer = tiny_bert()
    blocks = blocks_of(tokenizer, 40, packing=True)
    check_separation(model, collator(tokenizer), blocks)
    batch = collator(tokenizer)(blocks[:1])
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    last = batch["segments"] == batch["segments"].max()
    changed["input_ids"][last] = tokenizer.unk_token_id
    logits = [model(**model_inputs(one)).logits[~last] for one in (batch, changed)]
    assert torch.equal(*logits)
    crossing = [{name: one[name] for name in ("input_ids", "attention_mask")} for one in (batch, changed)]
    logits = [model(**one).logits[~last] for one in crossing]
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    with pytest.raises(Exception, match="--cross_document_attention"):
        model.bert.forward = lambda attention_mask=None, forward=model.bert.forward, **inputs: forward(**inputs)
        check_separation(model, collator(tokenizer), blocks)


@pytest.mark.parametrize("kind", ["padded", "packed", "segments"])
def test_parts_of_a_batch_that_memory_cuts_have_its_loss(kind: str) -> None:
    model, tokenizer = tiny_bert()
    blocks, collate = blocks_of(tokenizer, 40, packing=kind == "segments"), collator(tokenizer)
    columns, sizes = blocks[:6], []
    if kind == "packed":
        model.float()
        packed = pack_masked(model, tokenizer, collate, blocks, Flags())
        assert packed is not None
        model, collate, sizes = restored(model), packed, [[4, 2]]
    batch, loss = collate(columns, *sizes), MaskedLoss(model, collator(tokenizer)(sample_of(blocks)))
    parts = split(batch, shape_of(batch)[2] // 3)
    assert len(parts) >= 3
    assert sum(loss(model, part) for part in parts).item() == pytest.approx(loss(model, batch).item(), rel=1e-12)


def test_evaluation_that_runs_out_of_memory_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_bert()
    blocks, fixed, loss = blocks_of(tokenizer, 21), collator(tokenizer), MaskedLoss(model)
    whole = evaluate_masked(make_accelerator(), model, blocks, fixed, Limits(max_rows=64), loss)
    logits, sizes = loss.logits, []

    def short_of_memory(model: Any, batch: Any) -> torch.Tensor:
        sizes.append(len(batch["targets"]))
        if sizes[-1] > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return logits(model, batch)

    monkeypatch.setattr(loss, "logits", short_of_memory)
    found = evaluate_masked(make_accelerator(), model, blocks, fixed, Limits(max_rows=64), loss)
    assert found == pytest.approx(whole, rel=1e-12) and max(sizes) == 11
    monkeypatch.setattr(loss, "logits", lambda model, batch: short_of_memory(model, {"targets": torch.zeros(9, 1)}))
    with pytest.raises(NotEnoughMemoryError, match=r"evaluation: a row of \d+ tokens"):
        evaluate_masked(make_accelerator(), model, blocks, fixed, Limits(max_rows=1), loss)


@pytest.mark.parametrize("rows", [1, 21])
def test_evaluation_sees_each_block_once(rows: int) -> None:
    model, tokenizer = tiny_bert()
    blocks, fixed = blocks_of(tokenizer, rows), collator(tokenizer)
    batch = fixed(blocks[:])
    logits, masked = model(**model_inputs(batch)).logits, batch["targets"] != IGNORED
    expected = torch.nn.CrossEntropyLoss()(logits[masked], batch["targets"][masked])
    loss = MaskedLoss(model, fixed(sample_of(blocks)))
    for limits in (Limits(max_rows=1), Limits(max_tokens=60), Limits(max_rows=64)):
        found = evaluate_masked(make_accelerator(), model, blocks, fixed, limits, loss)
        assert found["loss"] == pytest.approx(expected.item(), rel=1e-12)
        assert found["perplexity"] == pytest.approx(expected.exp().item(), rel=1e-12)
        assert found["masked_tokens"] == int(masked.sum())
        right = (logits[masked].argmax(dim=1) == batch["targets"][masked]).double().mean()
        assert found["accuracy"] == pytest.approx(right.item())


def test_unigram_perplexity_by_hand() -> None:
    _, tokenizer = tiny_bert()
    blocks, fixed = blocks_of(tokenizer, 21), collator(tokenizer)
    ids = [token for row in blocks["input_ids"] for token in row if token not in tokenizer.all_special_ids]
    size = len(tokenizer)
    targets = fixed(blocks[:])["targets"]

    def added_to_each(number: float) -> float:
        shares = torch.tensor([number + ids.count(token) for token in range(size)], dtype=torch.float64)
        return float((-(shares / shares.sum()).log()[targets[targets != IGNORED]].mean()).exp())

    found = unigram_perplexity(blocks, blocks, fixed)
    assert found == pytest.approx(min(map(added_to_each, (1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001))), rel=1e-12)
    assert found < added_to_each(1)


def test_two_processes(tmp_path: Path, references: dict[int, Any]) -> None:
    script = Path(__file__).parent / "launched" / "launch_masked.py"
    done = launch(script, str(tmp_path), timeout=240)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert len(found) == 8
        for packed in (False, True):
            for rows, (weights, losses) in references.items():
                case = found[f"{packed} {rows}"]
                assert relative_error(case["weights"], weights) < 1e-10
                assert case["losses"] == pytest.approx(losses, rel=1e-10)
        for rows in (1, 21):
            model, tokenizer = tiny_bert()
            blocks, loss = blocks_of(tokenizer, rows), MaskedLoss(model)
            expected = evaluate_masked(
                make_accelerator(), model, blocks, collator(tokenizer), Limits(max_rows=64), loss
            )
            assert found[f"scores {rows}"] == pytest.approx(expected, rel=1e-12)
