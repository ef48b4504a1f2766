"""Small tasks and their full-batch references in plain PyTorch, which share no code with the package."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

VOCABULARY, HIDDEN, CLASSES, TOKENS = 997, 6, 4, 7
USED = 23  # of the vocabulary, so that words come again in other micro-batches


class TinyModel(nn.Module):
    """Token ids (n, t) and a mask → logits: (n, out) from masked mean pooling, or (n, t, out) for token tasks."""

    def __init__(self, outputs: int, per_token: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.hidden = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, outputs)
        self.per_token = per_token

    def block(self, states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.hidden(states))

    def get_input_embeddings(self) -> nn.Embedding:
        """As transformers' models have it."""
        return self.embedding

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.embedding(input_ids)
        if self.checkpointed:
            states = torch.utils.checkpoint.checkpoint(self.block, states, use_reentrant=False)
        else:
            states = self.block(states)
        if self.per_token:
            return self.head(self.norm(states))
        mask = attention_mask[..., None].to(states.dtype)
        return self.head(self.norm((states * mask).sum(1) / mask.sum(1)))


@dataclass(frozen=True)
class Task:
    """One kind of items. `mean` is torch's own mean loss over a whole batch: the reference."""

    name: str
    outputs: int
    labels: Callable[[int, torch.Generator], torch.Tensor]
    mean: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    per_token: bool = False
    checkpointed: bool = False


WEIGHTS = torch.tensor([0.25, 2.0, 1.0, 0.5])


def _classes(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(CLASSES, (n,), generator=generator)


def _tags(n: int, generator: torch.Generator) -> torch.Tensor:
    """Tags of which most are ignored, in numbers that differ from row to row."""
    tags = torch.randint(CLASSES, (n, TOKENS), generator=generator)
    kept = torch.rand((n, TOKENS), generator=generator) < torch.rand((n, 1), generator=generator)
    kept[:, 0] = True
    return torch.where(kept, tags, -100)


def _token_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss(ignore_index=-100)(logits.flatten(0, 1), labels.flatten())


TASKS = [
    Task("single_label", CLASSES, _classes, lambda logits, y: nn.CrossEntropyLoss()(logits, y)),
    Task(
        "class_weights",
        CLASSES,
        _classes,
        lambda logits, y: nn.CrossEntropyLoss(weight=WEIGHTS.to(logits))(logits, y),
    ),
    Task(
        "label_smoothing",
        CLASSES,
        _classes,
        lambda logits, y: nn.CrossEntropyLoss(weight=WEIGHTS.to(logits), label_smoothing=0.1)(logits, y),
    ),
    Task(
        "multi_label",
        CLASSES,
        lambda n, g: (torch.rand((n, CLASSES), generator=g) < 0.3).float(),
        lambda logits, y: nn.BCEWithLogitsLoss(pos_weight=WEIGHTS.to(logits))(logits, y.to(logits)),
    ),
    Task(
        "regression",
        1,
        lambda n, g: torch.randn((n,), generator=g),
        lambda logits, y: nn.MSELoss()(logits.squeeze(-1), y.to(logits)),
    ),
    Task(
        "gradient_checkpointing",
        CLASSES,
        _classes,
        lambda logits, y: nn.CrossEntropyLoss()(logits, y),
        checkpointed=True,
    ),
    Task("token_items", CLASSES, _tags, _token_mean, per_token=True),
]


def task_named(name: str) -> Task:
    return next(task for task in TASKS if task.name == name)


def make_data(task: Task, n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """n rows of random tokens of random lengths, padded to the longest, with labels."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, TOKENS + 1, (n, 1), generator=generator)
    return {
        "input_ids": torch.randint(USED, (n, TOKENS), generator=generator),
        "attention_mask": (torch.arange(TOKENS)[None] < lengths).long(),
        "labels": task.labels(n, generator),
    }


def make_model(task: Task, dtype: torch.dtype = torch.float32, seed: int = 0) -> TinyModel:
    torch.manual_seed(seed)
    return TinyModel(task.outputs, task.per_token, task.checkpointed).to(dtype)


def rows(data: dict[str, torch.Tensor], indices: Any) -> dict[str, torch.Tensor]:
    return {name: tensor[torch.tensor(list(indices))] for name, tensor in data.items()}


def inputs(batch: Any) -> dict[str, torch.Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def flat(model: nn.Module) -> torch.Tensor:
    """All weights in one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def reference_run(
    task: Task,
    data: dict[str, torch.Tensor],
    effective_batches: list[Any],
    lr: float,
    dtype: torch.dtype,
    max_grad_norm: float | None = None,
) -> tuple[torch.Tensor, list[float]]:
    """Full-batch SGD in plain PyTorch over the given examples: (final weights, loss of each step)."""
    model = make_model(task, dtype)
    model.checkpointed = False
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for indices in effective_batches:
        batch = rows(data, indices)
        loss = task.mean(model(**inputs(batch)), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return flat(model), losses


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()
