"""Packed micro-batches: the logits and gradients of padded rows, for every model that takes them."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from small import rows_of, small_recipe
from text_cls import run

from accumft.data.text import TextCollator
from accumft.data.windows import WindowDataset, count
from accumft.errors import UserError
from accumft.evaluation import inputs_of
from accumft.launch import make_accelerator
from accumft.packing import IMPLEMENTATION, PackedCollator, pack
from accumft.plan import Plan, resolve_batch_sizes
from accumft.step import train_step
from accumft.window_plan import WindowPlan

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "num_labels": 3,
}
DISTILBERT = {"vocab_size": 40, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40}
TAKEN = {
    "Bert": SIZES,
    "Roberta": {**SIZES, "pad_token_id": 1},
    "XLMRoberta": {**SIZES, "pad_token_id": 1},
    "Electra": {**SIZES, "embedding_size": 16},
    "DistilBert": {**DISTILBERT, "num_labels": 3},
}
LEFT_ALONE = {
    "GPT2": {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "num_labels": 3},
    "Llama": SIZES,
    "DebertaV2": SIZES,
    "MPNet": SIZES,
    # Its embedding looks at the words beside a word, also over the border of a row.
    "MobileBert": {**SIZES, "embedding_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 2},
}


def model_of(name: str, settings: dict[str, Any], dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    for field, value in config.to_dict().items():
        if "dropout" in field and isinstance(value, float):
            setattr(config, field, dropout)
    if config.pad_token_id is None:
        config.pad_token_id = 0
    return getattr(transformers, f"{name}ForSequenceClassification")(config)


def tokenizer_of(model: Any, token_types: bool = False) -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(5, 40))]
    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    tokenizer.pad_token = words[model.config.pad_token_id]
    tokenizer.model_input_names = ["input_ids", *["token_type_ids"] * token_types, "attention_mask"]
    return tokenizer


def rows(n: int = 24, token_types: bool = False) -> Dataset:
    """Rows of 2 to 20 tokens, together more than a model has positions."""
    draw = np.random.default_rng(0)
    ids = [draw.integers(2, 40, length).tolist() for length in draw.integers(2, 21, n)]
    types = {"token_type_ids": [[0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2) for row in ids]}
    return Dataset.from_dict(
        {
            "input_ids": ids,
            **(types if token_types else {}),
            "length": [len(row) for row in ids],
            "labels": draw.integers(0, 3, n).tolist(),
        }
    )


def loss_sum(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(**inputs_of(batch)).logits, batch["labels"], reduction="sum")


def gradient_of_a_step(model: Any, window: Any) -> torch.Tensor:
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train_step(make_accelerator(), model, optimizer, window, loss_sum, lambda batch: len(batch["labels"]))
    return before - torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("name", TAKEN)
def test_same_gradient_as_padded(name: str, multiple: int | None) -> None:
    token_types, data = name == "Bert", rows(24, name == "Bert")
    padded, packed = model_of(name, TAKEN[name]), model_of(name, TAKEN[name])
    tokenizer = tokenizer_of(padded, token_types)
    recipe = small_recipe("unused", pad_to_multiple_of=multiple)  # type: ignore[arg-type]
    collate = pack(packed, tokenizer, data, recipe)
    assert isinstance(collate, PackedCollator)
    assert packed.config._attn_implementation == IMPLEMENTATION
    plan = Plan.of(24, resolve_batch_sizes(24, None, None, 1, 96), 0, 1, -1)
    lengths = np.array(data["length"][:])
    window = WindowDataset(data, WindowPlan(plan, lengths, packed=True, pad_to_multiple_of=multiple or 1), collate)[0]
    usual = WindowDataset(data, WindowPlan(plan, lengths), TextCollator(tokenizer))[0]
    assert sorted(row for part in window.rows for row in part) == list(range(24))
    assert window.counts[:2] == usual.counts[:2] == (24, lengths.sum())
    assert len(window.micro_batches) > 2
    assert all(batch["input_ids"].shape[1] <= 96 for batch in window.micro_batches)
    assert max(batch["input_ids"].shape[1] for batch in window.micro_batches) > packed.config.max_position_embeddings
    if multiple is None:
        assert window.counts[2] < usual.counts[2]
    found, expected = gradient_of_a_step(packed, window), gradient_of_a_step(padded, usual)
    assert expected.norm() > 0.01
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    # What is not packed goes the usual way.
    batch = TextCollator(tokenizer)(data[:5])
    padded.eval(), packed.eval()
    padded.load_state_dict(packed.state_dict())
    assert torch.equal(packed(**inputs_of(batch)).logits, padded(**inputs_of(batch)).logits)


def test_gradient_checkpointing_and_dropout_take_packed_rows() -> None:
    data = rows()
    found = []
    for checkpointed in (False, True):
        model = model_of("Bert", SIZES, dropout=0.2)
        tokenizer = tokenizer_of(model)
        collate = pack(model, tokenizer, data, small_recipe("unused"))  # type: ignore[arg-type]
        if checkpointed:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        plan = Plan.of(24, resolve_batch_sizes(24, None, None, 1, 96), 0, 1, -1)
        windows = WindowDataset(data, WindowPlan(plan, np.array(data["length"][:]), packed=True), collate)
        found.append(gradient_of_a_step(model, windows[0]))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)
    assert found[0].norm() > 0.01


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_models_that_it_does_not_fit_stay_as_they_were(name: str) -> None:
    model = model_of(name, LEFT_ALONE[name]).eval()
    tokenizer, data = tokenizer_of(model), rows()
    batch = inputs_of(TextCollator(tokenizer)(data[:5]))
    before, implementation = model(**batch).logits, model.config._attn_implementation
    assert pack(model, tokenizer, data, small_recipe("unused")) is None  # type: ignore[arg-type]
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model(**batch).logits, before)
    with pytest.raises(UserError, match=f"--padding_free: not possible with {name}For"):
        pack(model, tokenizer, data, small_recipe("unused", padding_free=True))  # type: ignore[arg-type]


def test_a_packed_batch_by_hand() -> None:
    model = model_of("Roberta", TAKEN["Roberta"])
    collate = PackedCollator(tokenizer_of(model), first_position=2)
    batch = collate({"input_ids": [[5, 6, 7], [8, 9], [4]], "labels": [0, 1, 2]}, [2, 1])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 1, 4]]
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3, 0, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 1]]
    assert batch["packing"].rectangles == ((2, 3, True), (1, 1, False))
    assert batch["packing"].first.tolist() == [0, 3, 6]
    assert batch["labels"].tolist() == [0, 1, 2]
    assert count([batch]) == (3, 6, 7)
    assert set(inputs_of(batch)) == {"input_ids", "position_ids", "packing"}


@pytest.mark.parametrize("rows_of_a_micro_batch", [1, 3, 8])
def test_a_limit_of_rows_makes_as_many_micro_batches_as_it_must(rows_of_a_micro_batch: int) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(3.8, 0.9, 64), 4, 512).astype(np.int32)
    plan = Plan.of(64, resolve_batch_sizes(32, rows_of_a_micro_batch, None, 1), 0, 1, -1)
    for step in range(2):
        sizes = [len(piece) for piece in WindowPlan(plan, lengths, packed=True).micro_batches(step, 0)]
        assert len(sizes) == -(-32 // rows_of_a_micro_batch)
        assert max(sizes) <= rows_of_a_micro_batch


@pytest.mark.parametrize("processes", [1, 3])
def test_table_counts_what_the_packed_windows_hold(processes: int) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(3.8, 0.9, 600), 4, 512).astype(np.int32)
    plan = Plan.of(600, resolve_batch_sizes(48, None, None, processes, 600), 0, 1, -1)
    windows = WindowPlan(plan, lengths, pad_to_multiple_of=8, packed=True)
    table = windows.table()
    assert len(table.tokens) == 13
    for step in range(13):
        padded = 0
        for rank in range(processes):
            groups = windows.rectangles(step, rank)
            assert table.micro_batches[step, rank] == len(groups)
            tokens = [sum(len(p) * -(-int(lengths[p].max()) // 8) * 8 for p in pieces) for pieces in groups]
            assert all(size <= 600 for size in tokens)
            assert tokens == sorted(tokens, reverse=True)
            padded += sum(tokens)
        assert table.padded_tokens[step] == padded
    assert table.padded_tokens.sum() < 1.1 * table.tokens.sum()
    plain = WindowPlan(plan, lengths, pad_to_multiple_of=8).table()
    assert table.micro_batches.mean() < 0.8 * plain.micro_batches.mean()


def test_a_run_without_padding_has_the_losses_of_one_with(tmp_path: Any) -> None:
    for name, padding_free in (("packed", True), ("padded", False)):
        run(small_recipe(tmp_path / name, max_length=200, synthetic_size=40, padding_free=padding_free))
    packed, padded = rows_of(tmp_path / "packed"), rows_of(tmp_path / "padded")
    assert [row["loss"] for row in packed] == pytest.approx([row["loss"] for row in padded], rel=1e-5)
    assert sum(row["padded_tokens"] for row in packed) < sum(row["padded_tokens"] for row in padded)
    assert sum(row["micro_batches"] for row in packed) < sum(row["micro_batches"] for row in padded)
    config = (tmp_path / "packed" / "config.json").read_text()
    assert IMPLEMENTATION not in config


def test_not_together_with_compile(tmp_path: Any) -> None:
    with pytest.raises(UserError, match="--padding_free: not possible together with --torch_compile"):
        run(small_recipe(tmp_path / "run", padding_free=True, torch_compile=True, torch_compile_backend="eager"))
