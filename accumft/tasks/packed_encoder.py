"""Whether an encoder takes packed micro-batches, see `accumft.packing`: tried on the model itself."""

from functools import partial
from typing import Any

import numpy as np
import torch

from accumft.cut import CostModel
from accumft.data.pair_batches import PackedPairCollator, PairCollator
from accumft.data.windows import lengths_of
from accumft.errors import UserError
from accumft.models import first_position, position_embedding
from accumft.packing import IMPLEMENTATION, TOLERANCE, PackedCollator, packed_attention
from accumft.recipe import TrainingRecipe
from accumft.tasks.embeddings import Pooling, embed


def pack_encoder(
    model: Any, tokenizer: Any, examples: Any, recipe: TrainingRecipe, pooling: Pooling, device_type: str
) -> PackedPairCollator | None:
    """Lets an encoder take packed micro-batches, in place, and returns what makes them; None where it cannot.

    Args:
        model: of `transformers`, on the CPU, not prepared yet: the trial wants float32.
        examples: of `accumft.data.pair_batches.examples_of`, on some of which it is tried.
        recipe: its `padding_free`.
        device_type: for which rectangles are cut.

    Raises:
        UserError: the recipe demands what the model cannot.
    """
    collate = None
    if recipe.padding_free is not False and not recipe.torch_compile:
        collate = _pack(model, tokenizer, examples, pooling, CostModel.of(model.config, device_type))
    if recipe.padding_free and collate is None:
        because = "together with --torch_compile" if recipe.torch_compile else f"with {type(model).__name__} here"
        raise UserError(f"--padding_free: not possible {because}; leave it out")
    return collate


def _pack(model: Any, tokenizer: Any, examples: Any, pooling: Pooling, cost: CostModel) -> PackedPairCollator | None:
    names = set(tokenizer.model_input_names) - {"input_ids", "attention_mask", "token_type_ids"}
    if names or getattr(model.config, "_attn_implementation", None) != "sdpa":
        return None
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    collate = PackedPairCollator(PackedCollator(tokenizer, first_position(position_embedding(model))), cost)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        same = _is_the_same(partial(embed, pooling, model), collate, PairCollator(tokenizer), model, examples)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        # What a model makes of an input that it was not written for is its own affair.
        same = False
    if same:
        return collate
    model.set_attn_implementation("sdpa")
    return None


@torch.no_grad()
def _is_the_same(embedded: Any, packed: Any, padded: Any, model: Any, examples: Any) -> bool:
    """Whether packed and padded texts have the same embeddings: those of the longest examples, the shortest, and some
    between."""
    order = np.argsort(-lengths_of(examples), kind="stable")
    rows = order[np.unique(np.linspace(0, len(order) - 1, 6).round().astype(int))]
    columns = examples[rows.tolist()]
    was_training = model.training
    model.eval()
    try:
        found, expected = packed(columns), padded(columns)
        one = embedded(found)[torch.argsort(found["labels"])]
        other = embedded(expected)[torch.argsort(expected["labels"])]
    finally:
        model.train(was_training)
    if one.shape != other.shape:
        return False
    spread = (other.max(dim=0).values - other.min(dim=0).values).max()
    return bool((one - other).abs().max() <= TOLERANCE * spread)
