"""The word embeddings of a window, looked up once: the same gradient, made once."""

from typing import Any

import pytest
import torch
from tasks import TASKS, Task, TinyModel, inputs, make_data, make_model, rows, task_named
from torch import nn

from accumft.embedding import window_embedding
from accumft.launch import make_accelerator
from accumft.step import train_step

CUTS = ([8, 8], [4, 4, 4, 4], [7, 5, 3, 1])


def micro_batches(task: Task, cut: list[int]) -> list[dict[str, torch.Tensor]]:
    data = make_data(task, 16)
    return [rows(data, piece.tolist()) for piece in torch.arange(16).split(cut)]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def backward(model: TinyModel, task: Task, window: list[dict[str, torch.Tensor]], replace: bool) -> int:
    """Backward of each micro-batch; how often the embedding's weight got a gradient."""
    made = []
    model.embedding.weight.register_hook(lambda gradient: made.append(gradient))
    with window_embedding(model if replace else object(), window) as embedding:
        assert (embedding is not None) == replace
        for index, batch in enumerate(window):
            if embedding is not None:
                embedding.current = index
            task.mean(model(**inputs(batch)), batch["labels"]).backward()
    return len(made)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_same_gradient_made_once(task: Task, cut: list[int], padding_idx: int | None) -> None:
    window = micro_batches(task, cut)
    usual, replaced = (make_model(task, torch.float64) for _ in range(2))
    usual.embedding.padding_idx = replaced.embedding.padding_idx = padding_idx
    assert backward(usual, task, window, replace=False) == len(cut)
    assert backward(replaced, task, window, replace=True) == 1
    for name, gradient in gradients(usual).items():
        assert torch.allclose(gradients(replaced)[name], gradient, rtol=1e-12, atol=1e-14), name
    if padding_idx is not None:
        assert (replaced.embedding.weight.grad[padding_idx] == 0).all()
    assert "forward" not in vars(replaced.embedding)


def test_other_uses_of_the_weight_and_other_ids_count_too() -> None:
    """A tied output layer, and ids that a model makes itself, as decoders do."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(997, 5, dtype=torch.float64)

        def get_input_embeddings(self) -> nn.Embedding:
            return self.embedding

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            states = self.embedding(input_ids) + self.embedding(input_ids.roll(1, dims=1))
            return (torch.tanh(states) @ self.embedding.weight.T).logsumexp(-1).sum()

    window = micro_batches(task_named("single_label"), [5, 5, 6])
    found = []
    for model, replace in ((Tied(), False), (Tied(), True)):
        with window_embedding(model if replace else object(), window) as embedding:
            for index, batch in enumerate(window):
                if embedding is not None:
                    embedding.current = index
                model(batch["input_ids"]).backward()
        found.append(model.embedding.weight.grad)
    assert torch.allclose(*found, rtol=1e-12, atol=1e-14)
    assert found[0].norm() > 1


def _twice(model: Any, batch: Any) -> torch.Tensor:
    """As a loss of consistency between two passes does it."""
    return sum(model(**inputs(batch)).logsumexp(-1).sum() * factor for factor in (1.0, 2.0))


def _after_a_look(model: Any, batch: Any) -> torch.Tensor:
    """As a teacher's pass does it."""
    with torch.no_grad():
        scale = model(**inputs(batch)).mean() * 0 + 1
    return model(**inputs(batch)).logsumexp(-1).sum() * scale


def _on_copies(model: Any, batch: Any) -> torch.Tensor:
    copies = {name: tensor.clone() for name, tensor in inputs(batch).items()}
    return model(**copies).logsumexp(-1).sum()


def _on_a_copy_at_times(model: Any, batch: Any) -> torch.Tensor:
    """The last micro-batch of two rows is a copy, the first are not."""
    return _on_copies(model, batch) if len(batch["labels"]) == 2 else model(**inputs(batch)).logsumexp(-1).sum()


@pytest.mark.parametrize("loss_sum", [_twice, _after_a_look, _on_copies, _on_a_copy_at_times])
@pytest.mark.parametrize("cut", [[6, 8, 2], [2, 6, 8]])
def test_any_loss_has_the_gradient_of_the_whole_batch(loss_sum: Any, cut: list[int]) -> None:
    task, found = task_named("single_label"), []
    for sizes in ([16], cut):
        model = make_model(task, torch.float64)
        before = model.embedding.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        window = micro_batches(task, sizes)
        train_step(make_accelerator(), model, optimizer, window, loss_sum, lambda batch: len(batch["labels"]))
        found.append(before - model.embedding.weight.detach())
    assert found[0].norm() > 1e-3
    assert torch.allclose(found[1], found[0], rtol=1e-10, atol=1e-14)


def test_a_gradient_that_would_be_lost_is_an_error() -> None:
    task = task_named("single_label")
    model = make_model(task)

    def without_embedding_at_times(model: Any, batch: Any) -> torch.Tensor:
        if len(batch["labels"]) == 2:
            return model.head(model.norm(model.hidden.weight.sum().expand(1, 6))).sum()
        return model(**inputs(batch)).logsumexp(-1).sum()

    with pytest.raises(RuntimeError, match="in some micro-batches and not in the last"):
        train_step(
            make_accelerator(),
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            micro_batches(task, [8, 6, 2]),
            without_embedding_at_times,
            lambda batch: len(batch["labels"]),
        )


def _frozen(model: TinyModel) -> None:
    model.embedding.weight.requires_grad_(False)


def _normed(model: TinyModel) -> None:
    model.embedding.max_norm = 1.0


def _sparse(model: TinyModel) -> None:
    model.embedding.sparse = True


def _by_frequency(model: TinyModel) -> None:
    model.embedding.scale_grad_by_freq = True


def _hooked(model: TinyModel) -> None:
    model.embedding.register_forward_hook(lambda module, args, output: output)


@pytest.mark.parametrize("change", [_frozen, _normed, _sparse, _by_frequency, _hooked])
def test_left_alone_where_it_would_not_be_the_same(change: Any) -> None:
    model = make_model(task_named("single_label"))
    change(model)
    with window_embedding(model, micro_batches(task_named("single_label"), [8, 8])) as embedding:
        assert embedding is None


def test_left_alone_where_it_saves_nothing() -> None:
    model, window = make_model(task_named("single_label")), micro_batches(task_named("single_label"), [8, 8])
    model.embedding = nn.Embedding(30, 6)
    for some in (window, window[:1]):
        with window_embedding(model, some) as embedding:
            assert embedding is None


def test_an_error_in_a_window_leaves_the_model_as_it_was() -> None:
    task = task_named("single_label")
    model = make_model(task)
    accelerator = make_accelerator()

    def fails(model: Any, batch: Any) -> torch.Tensor:
        model(**inputs(batch))
        raise RuntimeError("out of something")

    with pytest.raises(RuntimeError, match="out of something"):
        train_step(
            accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0), micro_batches(task, [8, 8]), fails, len
        )
    assert "forward" not in vars(model.embedding)
    assert model.embedding(torch.tensor([1])).requires_grad
