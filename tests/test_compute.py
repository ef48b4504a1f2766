"""Gradient checkpointing and torch.compile: the same numbers as without."""

from typing import Any

import pytest
import torch
from small import small_recipe
from text_cls import run

from accumft.compute import configure_compute, is_compiled, num_compilations, warm_up
from accumft.errors import UserError
from accumft.launch import make_accelerator
from accumft.models import build_small_bert, communicates_in_forward
from accumft.step import train_step

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
SHAPES = [(4, 16), (3, 11), (2, 9), (5, 7), (1, 5)]


def small_bert(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    labels = {0: "x", 1: "y"}
    return build_small_bert(vocabulary, id2label=labels, problem_type="single_label_classification", dropout=dropout)[0]


def micro_batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(len(WORDS), (rows, tokens), generator=generator),
            "attention_mask": (torch.arange(tokens) < tokens - torch.arange(rows)[:, None]).long(),
            "labels": torch.randint(2, (rows,), generator=generator),
        }
        for rows, tokens in SHAPES
    ]


def loss_sum(model: Any, batch: Any) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="sum")


def change_of_a_step(model: Any, window: list[Any] | None = None) -> torch.Tensor:
    """The gradient of one step, by what SGD with a learning rate of 1 does."""
    accelerator = make_accelerator()
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train_step(accelerator, model, optimizer, window or micro_batches(), loss_sum, lambda batch: len(batch["labels"]))
    return before - torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_gradient_checkpointing_has_the_same_gradient_with_dropout(tmp_path: Any) -> None:
    usual, checkpointed = small_bert(0.1), small_bert(0.1)
    configure_compute(checkpointed, small_recipe(tmp_path, gradient_checkpointing=True))
    calls = []
    checkpointed.bert.encoder.layer[0].intermediate.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(5)
    expected = change_of_a_step(usual)
    torch.manual_seed(5)
    found = change_of_a_step(checkpointed)
    assert len(calls) == 2 * len(SHAPES), "each layer is computed again in the backward"
    assert expected.norm() > 0.1
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_gradient_checkpointing_where_there_is_none(tmp_path: Any) -> None:
    with pytest.raises(UserError, match="--gradient_checkpointing: Linear does not support it"):
        configure_compute(torch.nn.Linear(2, 2), small_recipe(tmp_path, gradient_checkpointing=True))


def test_compiled_model_has_the_same_gradient_and_few_graphs(tmp_path: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = small_bert()
    configure_compute(model, small_recipe(tmp_path, torch_compile=True, torch_compile_backend="aot_eager"))
    assert is_compiled(model)
    assert not is_compiled(small_bert())
    window = micro_batches()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    warm_up(make_accelerator(), model, [window[0], window[-1]], loss_sum)
    made = num_compilations()
    assert 1 <= made <= 3
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    found = change_of_a_step(model)
    assert num_compilations() == made, "five shapes, none of which is compiled anew"
    assert torch.allclose(found, change_of_a_step(small_bert()), rtol=1e-4, atol=1e-6)


def test_a_compiled_run_has_the_losses_of_an_eager_one_and_says_how_often_it_compiled(tmp_path: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fields = {"max_length": 60, "synthetic_size": 40, "num_train_epochs": 1.0, "padding_free": False}
    eager = run(small_recipe(tmp_path / "eager", **fields))
    fields |= {"torch_compile": True, "torch_compile_backend": "eager", "padding_free": None}
    compiled = run(small_recipe(tmp_path / "compiled", **fields))
    losses = [[row["loss"] for row in result.history if "loss" in row] for result in (eager, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert "compilations" not in eager.metrics
    assert 1 <= compiled.metrics["compilations"] <= 6  # training and evaluation, of one row and of several


def test_synchronised_statistics_need_equal_counts() -> None:
    assert not communicates_in_forward(small_bert())
    assert not communicates_in_forward(torch.nn.BatchNorm1d(3))
    assert communicates_in_forward(torch.nn.Sequential(torch.nn.SyncBatchNorm(3)))


def test_unknown_backend_and_backend_without_compile(tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"--torch_compile_backend indctor: not one of .*inductor"):
        configure_compute(small_bert(), small_recipe(tmp_path, torch_compile=True, torch_compile_backend="indctor"))
    with pytest.raises(UserError, match="--torch_compile_backend eager: has no effect with no --torch_compile"):
        configure_compute(small_bert(), small_recipe(tmp_path, torch_compile_backend="eager"))
