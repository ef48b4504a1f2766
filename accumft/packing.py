"""A micro-batch without padding: its rows one after the other in a single sequence, attention kept inside each row.

What a layer does to each token alone (most of the work) does not need rows of equal length; attention does. So a packed
micro-batch is a chain of rectangles, each a few rows of nearly equal length, padded to their longest: all layers run on
the chain, and attention takes each rectangle out of it as a view. Positions start anew in every row. The logits are
those of the padded rows, which `pack` checks on the model itself before it is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from accumft.data.text import TextCollator, label_tensor
from accumft.data.windows import Batch, lengths_of
from accumft.errors import UserError
from accumft.evaluation import inputs_of
from accumft.models import first_position, position_embedding
from accumft.recipe import TrainingRecipe

IMPLEMENTATION = "accumft_packed"
# Largest difference of a logit, packed against padded, as a share of how far the logits of different rows lie apart.
# Rounding stays below a tenth of it, even in a new model, all of whose logits are nearly alike; tokens that see those
# of another row move a logit by about as much as another row does.
TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the rows of a packed micro-batch lie in its sequence of tokens."""

    rectangles: tuple[tuple[int, int, bool], ...]
    """(rows, tokens a row, whether some of them are padding) of each, in their order."""
    first: torch.Tensor
    """(rows,) int64: place of each row's first token."""
    mask: torch.Tensor
    """(tokens,) bool: whether a token is real."""

    def to(self, device: Any, non_blocking: bool = False) -> "Packing":
        """The same with its tensors on `device`."""
        first, mask = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.first, self.mask))
        return replace(self, first=first, mask=mask)

    def pin_memory(self) -> "Packing":
        """The same with its tensors in pinned memory."""
        return replace(self, first=self.first.pin_memory(), mask=self.mask.pin_memory())


class PackedCollator:
    """Columns of tokenised rows → a packed batch: its packing, labels, and ids, positions and mask of (1, tokens)."""

    def __init__(self, tokenizer: Any, first_position: int = 0, pad_to_multiple_of: int | None = None) -> None:
        """
        Args:
            first_position: position id of a row's first token: 0, or in RoBERTa's kind padding_idx + 1.
        """
        self.tokenizer = tokenizer
        self.first_position = first_position
        self.multiple = pad_to_multiple_of or 1

    def __call__(self, columns: dict[str, list[Any]], sizes: Sequence[int]) -> Batch:
        """
        Args:
            sizes: rows of each rectangle.
        """
        lengths = np.array([len(row) for row in columns["input_ids"]])
        parts = np.split(lengths, np.cumsum(sizes)[:-1])
        widths = [-(-int(part.max()) // self.multiple) * self.multiple for part in parts]
        width = np.repeat(widths, sizes)
        first = np.concatenate([[0], np.cumsum(width)[:-1]])
        # Of each token: its place in its row.
        place = np.arange(int(width.sum())) - np.repeat(first, width)
        mask = place < np.repeat(lengths, width)
        batch: dict[str, Any] = {}
        for name, padding in (
            ("input_ids", self.tokenizer.pad_token_id),
            ("token_type_ids", self.tokenizer.pad_token_type_id),
        ):
            if name in columns:
                values = np.full(len(mask), padding, np.int64)
                values[mask] = np.concatenate(columns[name])
                batch[name] = torch.from_numpy(values)[None]
        batch["position_ids"] = torch.from_numpy(np.where(mask, place + self.first_position, 0))[None]
        batch["attention_mask"] = torch.from_numpy(mask.astype(np.int64))[None]
        rectangles = tuple(
            (len(part), wide, bool((part < wide).any())) for part, wide in zip(parts, widths, strict=True)
        )
        batch["packing"] = Packing(rectangles, torch.from_numpy(first), torch.from_numpy(mask))
        if "labels" in columns:
            batch["labels"] = label_tensor(columns["labels"])
        return batch


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function of `transformers`: SDPA inside each rectangle; without a packing, as `sdpa` does it.

    Args:
        query, key, value: (1, heads, tokens, head size).

    Returns:
        (1, tokens, heads, head size), None.
    """
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    # (tokens, heads, head size): in this order a stretch of tokens is one piece of memory.
    chains = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs, start = [], 0
    for rows, length, padded in packing.rectangles:
        stop = start + rows * length
        q, k, v = (chain[start:stop].unflatten(0, (rows, length)).transpose(1, 2) for chain in chains)
        mask = packing.mask[start:stop].view(rows, 1, 1, length) if padded else None
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(outputs)[None], None


def pack(model: Any, tokenizer: Any, dataset: Any, recipe: TrainingRecipe) -> PackedCollator | None:
    """Lets a classifier take packed micro-batches, in place, and returns what makes them; None where it cannot.

    It can where attention goes through the `transformers` interface, everything else treats tokens one by one, and the
    head reads a row's first token: BERT, RoBERTa, XLM-R, DistilBERT, ELECTRA and their like. The model itself is tried
    on some rows, packed and padded; a logit that differs leaves everything as it was.

    Args:
        model: of `transformers`, on the CPU, not prepared yet: the trial wants float32.
        dataset: tokenised rows, on some of which it is tried.
        recipe: its `padding_free` and `pad_to_multiple_of`.

    Raises:
        UserError: the recipe demands what the model cannot.
    """
    collate = None
    if recipe.padding_free is not False and not recipe.torch_compile:
        collate = _pack(model, tokenizer, dataset, getattr(recipe, "pad_to_multiple_of", None))
    if recipe.padding_free and collate is None:
        because = "together with --torch_compile" if recipe.torch_compile else f"with {type(model).__name__} here"
        raise UserError(f"--padding_free: not possible {because}; leave it out")
    return collate


def _pack(model: Any, tokenizer: Any, dataset: Any, pad_to_multiple_of: int | None) -> PackedCollator | None:
    inner = _encoder_of(model)
    names = set(tokenizer.model_input_names) - {"input_ids", "attention_mask", "token_type_ids"}
    if inner is None or names or getattr(model.config, "_attn_implementation", None) != "sdpa":
        return None
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    collate = PackedCollator(tokenizer, first_position(position_embedding(model)), pad_to_multiple_of)
    hook = inner.register_forward_hook(_only_first_tokens, with_kwargs=True)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        same = _is_the_same(model, tokenizer, collate, dataset)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        # What a model makes of an input that it was not written for is its own affair.
        same = False
    if same:
        return collate
    hook.remove()
    model.set_attn_implementation("sdpa")
    return None


def _encoder_of(model: Any) -> torch.nn.Module | None:
    """The module whose output the pooler or the head reads."""
    base = getattr(model, "base_model", None)
    if base is None or base is model:
        return None
    for name in ("encoder", "transformer"):
        inner = getattr(base, name, None)
        if isinstance(inner, torch.nn.Module):
            return inner
    return None


def _only_first_tokens(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook: of a packed sequence each row's first token, as (rows, 1, hidden)."""
    packing = kwargs.get("packing")
    if packing is None:
        return None
    output.last_hidden_state = output.last_hidden_state[0, packing.first][:, None]
    return output


@torch.no_grad()
def _is_the_same(model: Any, tokenizer: Any, collate: PackedCollator, dataset: Any) -> bool:
    """Whether packed and padded rows have the same logits: the longest, the shortest, and some between."""
    order = np.argsort(-lengths_of(dataset), kind="stable")
    rows = order[np.unique(np.linspace(0, len(order) - 1, 6).round().astype(int))]
    columns = dataset[rows.tolist()]
    sizes = [2] * (len(rows) // 2) + [1] * (len(rows) % 2)
    was_training = model.training
    model.eval()
    try:
        packed = model(**inputs_of(collate(columns, sizes))).logits
        padded = model(**inputs_of(TextCollator(tokenizer)(columns))).logits
    finally:
        model.train(was_training)
    if packed.shape != padded.shape:
        return False
    spread = (padded.max(dim=0).values - padded.min(dim=0).values).max()
    return bool((packed - padded).abs().max() <= TOLERANCE * spread)
