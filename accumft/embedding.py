"""The word embeddings of a window: looked up once, and their gradient made once.

An embedding's gradient is a dense matrix of vocabulary × hidden (47 MB for MiniLM, 770 MB for XLM-R), zeroed, filled
and added up anew in each micro-batch, though a window touches a few hundred of its rows. Here the micro-batches read
those rows from a small matrix of their own, and the last one's backward hands the sum of its gradient on to the weight:
the same gradient, and for DDP the same single use of the weight in the backward that it reduces.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accumft.data.windows import Batch


class WindowEmbedding:
    """The rows of an embedding that a window's micro-batches need, in place of the embedding."""

    def __init__(self, embedding: nn.Embedding, micro_batches: Sequence[Batch]) -> None:
        self.embedding = embedding
        self.ids = [batch["input_ids"] for batch in micro_batches]
        unique, inverse = torch.unique(torch.cat([ids.flatten() for ids in self.ids]), return_inverse=True)
        self.unique = unique
        self.positions = [
            part.view_as(ids)
            for part, ids in zip(inverse.split([ids.numel() for ids in self.ids]), self.ids, strict=True)
        ]
        self.rows = embedding.weight.detach()[unique].requires_grad_()
        self.current = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Stands for `embedding.forward`; ids other than the current micro-batch's go the usual way."""
        if input_ids is not self.ids[self.current]:
            embedding = self.embedding
            return F.embedding(input_ids, embedding.weight, embedding.padding_idx)
        rows = self.rows
        if self.current == len(self.ids) - 1:
            rows = F.embedding(self.unique, self.embedding.weight, self.embedding.padding_idx)
            if self.rows.grad is not None:
                rows = _WithEarlierGradient.apply(rows, self.rows.grad)
        return F.embedding(self.positions[self.current], rows)


class _WithEarlierGradient(torch.autograd.Function):
    """The identity, whose gradient is increased by that of earlier uses."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(earlier)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient + ctx.saved_tensors[0], None


@contextmanager
def window_embedding(model: Any, micro_batches: Sequence[Batch]) -> Iterator[WindowEmbedding | None]:
    """Puts a `WindowEmbedding` in the place of the model's input embedding, where that is exact and saves something.

    Args:
        model: unwrapped. Its `get_input_embeddings()`, as transformers has it, names the module.

    Yields:
        What to set `current` on before each micro-batch; None where nothing was replaced.
    """
    embedding = _replaceable(model, micro_batches)
    if embedding is None:
        yield None
        return
    replaced = WindowEmbedding(embedding, micro_batches)
    vars(embedding)["forward"] = replaced.forward
    try:
        yield replaced
    finally:
        del vars(embedding)["forward"]


def _replaceable(model: Any, micro_batches: Sequence[Batch]) -> nn.Embedding | None:
    if len(micro_batches) < 2 or not all("input_ids" in batch for batch in micro_batches):
        return None
    # A compiled model has its embedding in its graph already.
    if not hasattr(model, "get_input_embeddings") or getattr(model, "_compiled_call_impl", None) is not None:
        return None
    embedding = model.get_input_embeddings()
    # Subclasses scale or quantise; a forward of its own belongs to somebody else's hook.
    if type(embedding) is not nn.Embedding or "forward" in vars(embedding) or embedding._forward_hooks:
        return None
    if embedding.sparse or embedding.max_norm is not None or embedding.scale_grad_by_freq:
        return None
    tokens = sum(batch["input_ids"].numel() for batch in micro_batches)
    if not embedding.weight.requires_grad or 2 * tokens > embedding.num_embeddings * len(micro_batches):
        return None
    return embedding
