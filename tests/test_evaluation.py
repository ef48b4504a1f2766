"""Evaluation: n examples in, n predictions out, in data set order, on one process and on two."""

from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_cases import BATCH_SIZES, SIZES, WithLogits, collate, dataset_of, predictions
from launching import launch
from tasks import inputs, make_model, task_named

from accumft.cut import Limits
from accumft.errors import NotEnoughMemoryError
from accumft.evaluation import predict
from accumft.launch import make_accelerator
from accumft.losses import ClassificationLoss
from accumft.tasks.classification import score

NAMES = ["a", "b", "c", "d"]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[int, int], torch.Tensor]]:
    folder = tmp_path_factory.mktemp("evaluation")
    result = launch(Path(__file__).parent / "launched" / "launch_evaluation.py", str(folder))
    assert result.returncode == 0, result.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_one_prediction_each_in_order(
    two_processes: list[dict[tuple[int, int], torch.Tensor]], n: int, batch_size: int
) -> None:
    data = dataset_of(n)[1]
    model = make_model(task_named("single_label")).eval()
    with torch.no_grad():
        expected = model(**inputs(data))
    found = [predictions(make_accelerator(), n, batch_size), *(rank[n, batch_size] for rank in two_processes)]
    assert len(found) == 3
    for logits in found:
        assert logits.shape == (n, 4)
        assert torch.allclose(logits, expected, atol=1e-6, rtol=0)


def test_loss_and_f1_do_not_depend_on_batches_or_processes(
    two_processes: list[dict[tuple[int, int], torch.Tensor]],
) -> None:
    data = dataset_of(29)[1]
    references = data["labels"].numpy()
    criterion = ClassificationLoss("single_label_classification", class_weights=[0.5, 1.0, 2.0, 1.0])
    every = [predictions(make_accelerator(), 29, size) for size in BATCH_SIZES]
    every += [rank[29, size] for rank in two_processes for size in BATCH_SIZES]
    scores = [score(logits, references, criterion, NAMES) for logits in every]
    model = make_model(task_named("single_label")).double().eval()
    with torch.no_grad():
        logits = model(**inputs(data))
    loss = torch.nn.functional.cross_entropy(
        logits, data["labels"], weight=torch.tensor([0.5, 1, 2, 1], dtype=torch.float64)
    )
    for found in scores:
        assert found.loss == pytest.approx(loss.item(), abs=1e-6)
        assert found.scalars["f1_macro"] == pytest.approx(scores[0].scalars["f1_macro"], abs=1e-12)
    assert scores[0].scalars["accuracy"] == pytest.approx(np.mean(logits.argmax(1).numpy() == references))


def test_dropout_is_off_and_gradients_are_not_kept() -> None:
    first, second = (predictions(make_accelerator(), 7, 4) for _ in range(2))
    assert torch.equal(first, second)
    assert not first.requires_grad


class Small(WithLogits):
    """Holds so many rows and no more."""

    def __init__(self, rows: int) -> None:
        super().__init__(make_model(task_named("single_label")))
        self.rows, self.forwards = rows, 0

    def forward(self, **inputs: torch.Tensor) -> object:
        self.forwards += 1
        if len(inputs["input_ids"]) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(**inputs)


def test_batches_that_run_out_of_memory_are_divided() -> None:
    model = Small(2)
    found = predict(make_accelerator(), model, dataset_of(7)[0], collate, Limits(max_rows=7))
    assert torch.allclose(found, predictions(make_accelerator(), 7, 7), atol=1e-6, rtol=0)
    assert model.forwards > 4
    with pytest.raises(NotEnoughMemoryError, match=r"evaluation: a row of \d tokens does not fit into memory"):
        predict(make_accelerator(), Small(0), dataset_of(7)[0], collate, Limits(max_rows=7))
