"""Predictions of a tiny model, on one process or several."""

from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from tasks import make_data, make_model, rows, task_named
from torch import nn

from accumft.cut import Limits
from accumft.evaluation import predict

SIZES = (1, 2, 3, 7, 29)
BATCH_SIZES = (1, 4, 64)


class WithLogits(nn.Module):
    """A model whose output has `.logits`, as transformers' have."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.inner(**inputs))


def dataset_of(n: int) -> tuple[Dataset, dict[str, torch.Tensor]]:
    data = rows(make_data(task_named("single_label"), max(SIZES)), range(n))
    columns = {name: tensor.tolist() for name, tensor in data.items()}
    return Dataset.from_dict({**columns, "length": data["attention_mask"].sum(1).tolist()}), data


def collate(columns: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
    """Cut to the longest row of the batch, as padding does."""
    longest = max(columns["length"])
    tensors = {name: torch.tensor(values) for name, values in columns.items() if name != "length"}
    return {name: tensor if name == "labels" else tensor[:, :longest] for name, tensor in tensors.items()}


def predictions(accelerator: Accelerator, n: int, batch_size: int) -> torch.Tensor:
    model = WithLogits(make_model(task_named("single_label")))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return predict(accelerator, model, dataset_of(n)[0], collate, Limits(max_rows=batch_size))
