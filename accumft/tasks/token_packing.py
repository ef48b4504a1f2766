"""Packed micro-batches of a token task, see `accumft.packing`: every token is scored, none is left out of the chain."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from accumft.data.tokens import IGNORED, TokenCollator, padded_labels
from accumft.data.windows import Batch, lengths_of
from accumft.errors import UserError
from accumft.evaluation import inputs_of
from accumft.models import first_position, position_embedding
from accumft.packing import IMPLEMENTATION, TOLERANCE, PackedCollator, packed_attention
from accumft.recipe import TrainingRecipe


class PackedTokenCollator:
    """Columns of windows → a packed batch; its labels stay a row for each window, (rows, tokens of the longest)."""

    def __init__(self, inputs: PackedCollator) -> None:
        self.inputs = inputs

    def __call__(self, columns: dict[str, list[Any]], sizes: Sequence[int]) -> Batch:
        """
        Args:
            sizes: rows of each rectangle.
        """
        batch = dict(self.inputs({name: values for name, values in columns.items() if name != "labels"}, sizes))
        if "labels" in columns:
            batch["labels"] = padded_labels(columns["labels"], max(map(len, columns["labels"])))
        return batch


def labelled(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, labels) of a batch's labelled tokens, packed or padded: row by row, from left to right.

    Args:
        logits: (rows, tokens, tags), or (1, tokens, tags) of a packed batch.

    Returns:
        (labelled tokens, tags) and (labelled tokens,).
    """
    labels = batch["labels"]
    counts = labels != IGNORED
    if "packing" not in batch:
        return logits[counts], labels[counts]
    place = batch["packing"].first[:, None] + torch.arange(labels.shape[1], device=labels.device)
    return logits[0, place[counts]], labels[counts]


def pack_tokens(model: Any, tokenizer: Any, dataset: Any, recipe: TrainingRecipe) -> PackedTokenCollator | None:
    """Lets a model that labels tokens take packed micro-batches, in place; None where it cannot, as `packing.pack`.

    Args:
        model: of `transformers`, on the CPU, not prepared yet: the trial wants float32.
        dataset: windows, on some of which it is tried.
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


def _pack(model: Any, tokenizer: Any, dataset: Any, pad_to_multiple_of: int | None) -> PackedTokenCollator | None:
    names = set(tokenizer.model_input_names) - {"input_ids", "attention_mask", "token_type_ids"}
    if names or getattr(model.config, "_attn_implementation", None) != "sdpa":
        return None
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    start = first_position(position_embedding(model))
    collate = PackedTokenCollator(PackedCollator(tokenizer, start, pad_to_multiple_of))
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        same = _is_the_same(model, collate, TokenCollator(tokenizer), dataset)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        # What a model makes of an input that it was not written for is its own affair.
        same = False
    if same:
        return collate
    model.set_attn_implementation("sdpa")
    return None


@torch.no_grad()
def _is_the_same(model: Any, packed: PackedTokenCollator, padded: TokenCollator, dataset: Any) -> bool:
    """Whether packed and padded windows have the same logits: the longest, the shortest, and some between."""
    order = np.argsort(-lengths_of(dataset), kind="stable")
    rows = order[np.unique(np.linspace(0, len(order) - 1, 6).round().astype(int))]
    columns = dataset[rows.tolist()]
    was_training = model.training
    model.eval()
    try:
        found = [
            labelled(model(**inputs_of(batch)).logits, batch)[0]
            for batch in (packed(columns, [2] * (len(rows) // 2) + [1] * (len(rows) % 2)), padded(columns))
        ]
    finally:
        model.train(was_training)
    spread = (found[1].max(dim=0).values - found[1].min(dim=0).values).max()
    return found[0].shape == found[1].shape and bool((found[0] - found[1]).abs().max() <= TOLERANCE * spread)
