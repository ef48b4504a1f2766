"""The word embeddings of a window: looked up once, and their gradient made once.

An embedding's gradient is a dense matrix of vocabulary × hidden (47 MB for MiniLM, 770 MB for XLM-R), zeroed, filled
and added up anew in each micro-batch, though a window touches a few hundred of its rows. Here all but the last
micro-batch read those rows from a small matrix of their own, whose gradient the last one's backward adds to that of the
weight: the same gradient, and for DDP the same single use of the weight in the backward that it reduces.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accumft.data.windows import Batch


class WindowEmbedding:
    """Stands for an embedding during a window."""

    def __init__(self, embedding: nn.Embedding, micro_batches: Sequence[Batch]) -> None:
        self.embedding = embedding
        # The last micro-batch has the weight itself.
        self.ids = [batch["input_ids"] for batch in micro_batches[:-1]]
        self.unique, inverse = torch.unique(torch.cat([ids.flatten() for ids in self.ids]), return_inverse=True)
        sizes = [ids.numel() for ids in self.ids]
        self.positions = [part.view_as(ids) for part, ids in zip(inverse.split(sizes), self.ids, strict=True)]
        self.rows = embedding.weight.detach()[self.unique].requires_grad_()
        self.current = 0
        self._weight: torch.Tensor | None = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Stands for `embedding.forward`; ids other than the current micro-batch's go the usual way."""
        embedding = self.embedding
        if not torch.is_grad_enabled():
            return F.embedding(input_ids, embedding.weight, embedding.padding_idx)
        if self.current == len(self.ids):
            if self._weight is None:  # once, however often the last micro-batch runs the model
                self._weight = _WithEarlierGradient.apply(embedding.weight, self)
            return F.embedding(input_ids, self._weight, embedding.padding_idx)
        if input_ids is not self.ids[self.current]:
            return F.embedding(input_ids, embedding.weight, embedding.padding_idx)
        return F.embedding(self.positions[self.current], self.rows)

    def take_gradient(self) -> torch.Tensor | None:
        """(rows, hidden) the gradient of `rows` over the micro-batches so far, once; None where there is none."""
        gradient, self.rows.grad = self.rows.grad, None
        if gradient is not None and self.embedding.padding_idx is not None:
            gradient[self.unique == self.embedding.padding_idx] = 0
        return gradient


class _WithEarlierGradient(torch.autograd.Function):
    """The weight, whose gradient is increased by that of the rows that earlier micro-batches used."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, window: WindowEmbedding) -> torch.Tensor:
        ctx.window = window
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        earlier = ctx.window.take_gradient()
        if earlier is not None:
            gradient = gradient.index_add(0, ctx.window.unique, earlier)
        return gradient, None


@contextmanager
def window_embedding(model: Any, micro_batches: Sequence[Batch]) -> Iterator[WindowEmbedding | None]:
    """Puts a `WindowEmbedding` in the place of the model's input embedding, where that is exact and saves something.

    Args:
        model: unwrapped. Its `get_input_embeddings()`, as transformers has it, names the module.

    Yields:
        What to set `current` on before each micro-batch; None where nothing was replaced.

    Raises:
        RuntimeError: the last micro-batch did not use the embedding, though earlier ones did.
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
    if replaced.take_gradient() is not None:
        raise RuntimeError(
            "loss_sum runs the input embedding in some micro-batches and not in the last: their gradient would be lost"
        )


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
