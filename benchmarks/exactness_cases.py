"""What exactness.py compares on: effective batches, how they are cut, a small model, and the full-batch reference.

Plain PyTorch and transformers; nothing of accumft.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

CLASSES, VOCABULARY, LONGEST = 4, 60, 24
CLASS_WEIGHTS = (0.25, 4.0, 1.0, 0.5)


@dataclass(frozen=True)
class Case:
    """One effective batch and how it is cut."""

    name: str
    examples: int
    """Of the data set; the last effective batch of its one epoch is measured."""
    micro_batch: int
    """Examples in a micro-batch, at most."""
    accumulation: int
    """Micro-batches of a full effective batch on one process."""
    processes: int = 1
    class_weights: bool = False

    @property
    def effective_batch(self) -> int:
        """Examples of a full step over all processes. A ragged cut does not fill its last micro-batch."""
        return min(self.micro_batch * self.accumulation * self.processes, self.examples)

    @property
    def measured(self) -> range:
        """The rows of the last effective batch."""
        return range((self.examples - 1) // self.effective_batch * self.effective_batch, self.examples)


CASES = (
    Case("even cut", 16, 4, 4),
    Case("ragged cut", 16, 6, 3),
    Case("short tail", 22, 4, 4),
    Case("class weights", 16, 4, 4, class_weights=True),
    Case("two processes", 16, 4, 2, processes=2),
    Case("two processes, short tail", 22, 4, 2, processes=2),
    Case("two processes, class weights", 16, 4, 2, processes=2, class_weights=True),
)


class Recorder(torch.optim.SGD):
    """SGD that keeps each gradient it is given, flat, and changes nothing: its learning rate is 0."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.gradients.append(torch.cat([p.grad.detach().flatten() for p in parameters]).clone())
        return super().step(closure)


def make_rows(n: int) -> list[dict[str, Any]]:
    """n rows of 3 to LONGEST random tokens; the classes are unequal and differ from window to window."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for index in range(n):
        length = int(torch.randint(3, LONGEST + 1, (1,), generator=generator))
        tokens = torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()
        label = int(torch.multinomial(torch.tensor([4.0, 1.0, 2.0, 1.0 + index % 3]), 1, generator=generator))
        rows.append({"input_ids": tokens, "labels": label, "length": length})
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows → input_ids and attention_mask (rows, longest), labels (rows,)."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def make_model() -> Any:
    """A BERT of 2 layers of 32 with random weights, the same at each call, float64."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LONGEST,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
        problem_type="single_label_classification",
        # Larger than BERT's, so that examples differ and a wrong weighting of them shows.
        initializer_range=0.2,
    )
    return BertForSequenceClassification(config).double()


def mean_loss(case: Case, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """torch's mean cross entropy of a batch, as the peers compute it of a micro-batch."""
    weight = torch.tensor(CLASS_WEIGHTS, dtype=logits.dtype) if case.class_weights else None
    return nn.functional.cross_entropy(logits, labels, weight=weight)


def reference(case: Case) -> torch.Tensor:
    """The gradient of the mean loss over the whole effective batch in one forward, flat."""
    model, rows = make_model().train(), make_rows(case.examples)
    batch = collate([rows[index] for index in case.measured])
    labels = batch.pop("labels")
    mean_loss(case, model(**batch).logits, labels).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
