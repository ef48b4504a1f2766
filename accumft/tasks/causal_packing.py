"""Decoders on packed micro-batches: see `accumft.packing`, whose chain of rectangles this reads causally.

Inside a rectangle rows are padded on the right, where no real token looks: attention needs no mask but the causal one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from accumft.adapters import base_of
from accumft.data.chat import IGNORED
from accumft.data.windows import Batch, lengths_of
from accumft.errors import UserError
from accumft.packing import PackedCollator, Packing
from accumft.recipe import TrainingRecipe
from accumft.tasks.causal import decoder_of, inputs_of, shifted

IMPLEMENTATION = "accumft_packed_causal"
# Largest difference of a token's hidden state, packed against padded, as a share of how far the hidden states of
# different tokens lie apart. Rounding stays below a hundredth of it; a row that sees another one is far above.
TOLERANCE = 1e-3


class PaddedTargets:
    """Columns of tokenised rows → a batch, padded on the right: input_ids, attention_mask, targets, (rows, tokens)."""

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.multiple = pad_to_multiple_of or 1

    def __call__(self, columns: dict[str, list[Any]]) -> Batch:
        lengths = np.array([len(row) for row in columns["input_ids"]])
        width = -(-int(lengths.max()) // self.multiple) * self.multiple
        mask = np.arange(width) < lengths[:, None]
        ids = np.full(mask.shape, self.pad_token_id, np.int64)
        labels = np.full(mask.shape, IGNORED, np.int64)
        ids[mask], labels[mask] = np.concatenate(columns["input_ids"]), np.concatenate(columns["labels"])
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
            "targets": shifted(torch.from_numpy(labels)),
        }


class PackedTargets:
    """Columns of tokenised rows → a packed batch: packing, ids, positions, mask and targets of (1, tokens)."""

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None = None) -> None:
        self.inner = PackedCollator(tokenizer, 0, pad_to_multiple_of)

    def __call__(self, columns: dict[str, list[Any]], sizes: Sequence[int]) -> Batch:
        """
        Args:
            sizes: rows of each rectangle.
        """
        batch = dict(self.inner({"input_ids": columns["input_ids"]}, sizes))
        targets = np.full(batch["input_ids"].shape[1], IGNORED, np.int64)
        # Shifted row by row: what follows a row's last token is another row.
        rows = [[*labels[1:], IGNORED] for labels in columns["labels"]]
        targets[batch["packing"].mask.numpy()] = np.concatenate(rows)
        batch["targets"] = torch.from_numpy(targets)[None]
        return batch


def packed_causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function of `transformers`: causal SDPA inside each rectangle; without a packing, as `sdpa` does it.

    Args:
        query, key, value: (1, heads, tokens, head size).

    Returns:
        (1, tokens, heads, head size), None.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("sliding_window") is not None or kwargs.pop("is_causal", None) is False:
        raise ValueError("attention that is not causal over the whole row is not packed")
    chains = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs, start = [], 0
    for rows, length, _ in packing.rectangles:
        stop = start + rows * length
        parts = [chain[start:stop].unflatten(0, (rows, length)).transpose(1, 2) for chain in chains]
        output, _ = sdpa_attention_forward(module, *parts, None, is_causal=True, **kwargs)
        outputs.append(output.flatten(0, 1))
        start = stop
    return torch.cat(outputs)[None], None


def pack_causal(model: Any, tokenizer: Any, dataset: Any, recipe: TrainingRecipe) -> PackedTargets | None:
    """Lets a decoder take packed micro-batches, in place, and returns what makes them; None where it cannot.

    It can where attention goes through the `transformers` interface and everything else treats tokens one by one:
    Llama, Qwen, Mistral without a window, GPT-2, GPT-NeoX and their like. The model itself is tried on some rows.

    Args:
        model: of `transformers`, on the CPU, not prepared yet: the trial wants float32.
        dataset: tokenised rows, on some of which it is tried.
        recipe: its `padding_free` and `pad_to_multiple_of`.

    Raises:
        UserError: the recipe demands what the model cannot.
    """
    collate = None
    if recipe.padding_free is not False and not recipe.torch_compile:
        collate = _pack(base_of(model), tokenizer, dataset, getattr(recipe, "pad_to_multiple_of", None))
    if recipe.padding_free and collate is None:
        because = (
            "together with --torch_compile" if recipe.torch_compile else f"with {type(base_of(model)).__name__} here"
        )
        raise UserError(f"--padding_free: not possible {because}; leave it out")
    return collate


def _pack(causal: Any, tokenizer: Any, dataset: Any, multiple: int | None) -> PackedTargets | None:
    if getattr(causal.config, "_attn_implementation", None) != "sdpa":
        return None
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, packed_causal_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    collate = PackedTargets(tokenizer, multiple)
    try:
        causal.set_attn_implementation(IMPLEMENTATION)
        if difference(causal, tokenizer, collate, dataset) <= TOLERANCE:
            return collate
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        pass  # What a model makes of an input that it was not written for is its own affair.
    causal.set_attn_implementation("sdpa")
    return None


@torch.no_grad()
def difference(causal: Any, tokenizer: Any, collate: PackedTargets, dataset: Any) -> float:
    """How far the hidden states of packed rows are from those of padded ones, as a share of their spread: of the
    longest row, the shortest, and some between."""
    order = np.argsort(-lengths_of(dataset), kind="stable")
    rows = order[np.unique(np.linspace(0, len(order) - 1, 6).round().astype(int))]
    columns = dataset[rows.tolist()]
    sizes = [2] * (len(rows) // 2) + [1] * (len(rows) % 2)
    decoder, was_training = decoder_of(causal), causal.training
    causal.eval()
    try:
        packed = collate(columns, sizes)
        padded = PaddedTargets(tokenizer.pad_token_id)(columns)
        found = decoder(**inputs_of(packed), use_cache=False).last_hidden_state[packed["attention_mask"].bool()]
        expected = decoder(**inputs_of(padded), use_cache=False).last_hidden_state[padded["attention_mask"].bool()]
    finally:
        causal.train(was_training)
    spread = (expected.max(dim=0).values - expected.min(dim=0).values).max()
    return float((found - expected).abs().max() / spread)
