"""The cuts of an effective batch of 16 that the step is tested on, and the package's side of the comparison."""

from typing import Any

import torch
from accelerate import Accelerator
from tasks import WEIGHTS, Task, flat, inputs, make_data, make_model, rows

from accumft.losses import ClassificationLoss
from accumft.plan import BatchSizes, Plan
from accumft.step import StepResult, train_step

EFFECTIVE = 16

ONE_PROCESS_CUTS: dict[str, list[list[int]]] = {
    "16x1": [[16]],
    "8x2": [[8, 8]],
    "4x4": [[4] * 4],
    "2x8": [[2] * 8],
    "5+5+6": [[5, 5, 6]],
}
TWO_PROCESS_CUTS: dict[str, list[list[int]]] = {
    "2 x (8x1)": [[8], [8]],
    "2 x (4x2)": [[4, 4], [4, 4]],
    "2 x (2x4)": [[2] * 4, [2] * 4],
    "3+5 / 5+3": [[3, 5], [5, 3]],
    "3 / 5+5+3": [[3], [5, 5, 3]],
}
COMMUNICATION_CUTS = {**TWO_PROCESS_CUTS, "1 / 15": [[1], [1] * 15]}
WEIGHTED = {"class_weights": {"class_weights": WEIGHTS.tolist()}, "multi_label": {"pos_weight": WEIGHTS.tolist()}}
WEIGHTED["label_smoothing"] = {"class_weights": WEIGHTS.tolist(), "label_smoothing": 0.1}
PROBLEM = {"multi_label": "multi_label_classification", "regression": "regression"}


def losses_of(task: Task) -> tuple[Any, Any]:
    """The package's (loss_sum, num_items) for a task."""
    if task.per_token:

        def token_sum(model: Any, batch: Any) -> torch.Tensor:
            logits = model(**inputs(batch))
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
            )

        return token_sum, lambda batch: (batch["labels"] != -100).sum()
    criterion = ClassificationLoss(PROBLEM.get(task.name, "single_label_classification"), **WEIGHTED.get(task.name, {}))
    return (
        lambda model, batch: criterion(model(**inputs(batch)), batch["labels"]),
        lambda batch: criterion.num_items(batch["labels"]),
    )


def prepared(accelerator: Accelerator, task: Task, lr: float, dtype: torch.dtype) -> tuple[Any, Any]:
    model = make_model(task, dtype)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


def train_on_cut(
    accelerator: Accelerator,
    task: Task,
    cut: list[list[int]],
    steps: int,
    lr: float,
    dtype: torch.dtype,
    max_grad_norm: float | None = None,
) -> tuple[torch.Tensor, list[StepResult]]:
    """`steps` updates on consecutive 16s of the task's data, each cut as `cut` says: (weights, results)."""
    data = make_data(task, EFFECTIVE * steps)
    model, optimizer = prepared(accelerator, task, lr, dtype)
    sizes = cut[accelerator.process_index]
    offset = sum(sum(share) for share in cut[: accelerator.process_index])
    results = []
    for step in range(steps):
        pieces = torch.arange(step * EFFECTIVE + offset, step * EFFECTIVE + offset + sum(sizes)).split(sizes)
        window = [rows(data, piece) for piece in pieces]
        results.append(train_step(accelerator, model, optimizer, window, *losses_of(task), max_grad_norm))
    return flat(accelerator.unwrap_model(model)), results


def tail_plan(tail: int, micro_batch_size: int, processes: int) -> Plan:
    """One epoch of a full effective batch of 16 and a last one of `tail` examples."""
    share = EFFECTIVE // processes
    batch = BatchSizes(EFFECTIVE, micro_batch_size, -(-share // micro_batch_size), processes)
    return Plan.of(EFFECTIVE + tail, batch, seed=3, num_train_epochs=1, max_steps=-1)


class Rows:
    """Stands for a `datasets.Dataset` over make_data's tensors, as WindowDataset reads it."""

    def __init__(self, data: dict[str, torch.Tensor]) -> None:
        self.data = data

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        return {**rows(self.data, indices), "row": [index + 1 for index in indices]}


def train_on_tail(
    accelerator: Accelerator, task: Task, tail: int, micro_batch_size: int, lr: float, dtype: torch.dtype
) -> tuple[torch.Tensor, list[StepResult]]:
    """One epoch of 16 + tail examples through the package's own plan and windows: (weights, results)."""
    from accumft.data.windows import WindowDataset
    from accumft.window_plan import WindowPlan

    plan = tail_plan(tail, micro_batch_size, accelerator.num_processes)
    data = make_data(task, EFFECTIVE + tail)
    model, optimizer = prepared(accelerator, task, lr, dtype)
    windows = WindowDataset(Rows(data), WindowPlan(plan), lambda columns: columns, accelerator.process_index)
    results = [train_step(accelerator, model, optimizer, window, *losses_of(task)) for window in windows.loader()]
    return flat(accelerator.unwrap_model(model)), results
