"""Models that predict masked tokens: pretrained ones, and a new small BERT; without padding, and with several documents
in a row."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from accumft.data.masking import IGNORED, MaskingCollator
from accumft.data.windows import lengths_of
from accumft.errors import UserError
from accumft.models import small_bert
from accumft.packing import IMPLEMENTATION, TOLERANCE, PackedCollator, packed_attention
from accumft.pretrained import Pretrained, choose_padding, set_dropout
from accumft.tasks.masked import difference, model_inputs


def load_masked_lm(
    model_name_or_path: str, *, dropout: float | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """(model, tokenizer) for `AutoModelForMaskedLM`, in float32 whatever the dtype on disk.

    An encoder that was saved without such a head gets a new one, over its own word embeddings. A BERT keeps its pooler,
    which a masked language model has no use for, but a classifier that starts from it.

    Args:
        dropout: every dropout probability of the configuration, 0 to 1; None: as the model has them.

    Raises:
        UserError: not to be loaded, no mask token, or a tokenizer that does not say where words are.
    """
    from transformers import AutoModelForMaskedLM, BertForMaskedLM

    source, what = Pretrained(model_name_or_path, trust_remote_code), f'--model_name_or_path "{model_name_or_path}"'
    config, tokenizer = source.config(), source.tokenizer()
    if tokenizer.mask_token is None:
        raise UserError(f"{what}: its tokenizer has no mask token; give a model of BERT's or RoBERTa's kind")
    if not tokenizer.is_fast:
        raise UserError(
            f"{what}: {type(tokenizer).__name__} is slow and does not say where words are; give another model"
        )
    set_dropout(config, dropout)
    choose_padding(tokenizer, config)
    model, found = source.model_and_keys(AutoModelForMaskedLM, config)
    if type(model) is BertForMaskedLM and any("pooler.dense" in name for name in found["unexpected_keys"]):
        model, found = source.model_and_keys(with_pooler(), config)
        model.bert.pooler.requires_grad_(False)
    source.note_new(found)
    return model, tokenizer


@cache
def with_pooler() -> Any:
    """`transformers.BertForMaskedLM` with the pooler of the encoder, whose output nothing reads."""
    import transformers
    from transformers.models.bert.modeling_bert import BertPooler

    class BertForMaskedLM(transformers.BertForMaskedLM):  # its name goes into config.json
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.bert.pooler = BertPooler(config)

    return BertForMaskedLM


def build_small_masked_bert(vocabulary: dict[str, int], *, dropout: float | None = None) -> tuple[Any, Any]:
    """(model, tokenizer): a `small_bert` that predicts masked tokens."""
    from transformers import BertForMaskedLM

    config, tokenizer = small_bert(vocabulary, dropout)
    return BertForMaskedLM(config), tokenizer


def sample_of(blocks: Any, count: int = 6) -> dict[str, list[Any]]:
    """Columns of the longest block, the shortest, and some between, to try a model on."""
    order = np.argsort(-lengths_of(blocks), kind="stable")
    rows = order[np.unique(np.linspace(0, len(order) - 1, count).round().astype(int))]
    columns: dict[str, list[Any]] = blocks[rows.tolist()]
    return columns


def pack_masked(
    model: Any, tokenizer: Any, collate: MaskingCollator, blocks: Any, recipe: Any
) -> MaskingCollator | None:
    """Lets a masked language model take packed micro-batches (`accumft.packing`), in place, and returns what makes
    them; None where it cannot.

    It can where attention goes through the `transformers` interface and everything else treats tokens one by one. The
    model itself is tried on some blocks, packed and padded; logits that differ leave everything as it was.

    Args:
        model: on the CPU, not prepared yet: the trial wants float32.
        collate: makes padded batches.
        recipe: its `padding_free`, `packing` and `pad_to_multiple_of`.

    Raises:
        UserError: the recipe demands what the model cannot.
    """
    if recipe.packing:
        if recipe.padding_free:
            raise UserError("--padding_free: --packing fills the rows already; leave one of them out")
        return None
    packed = None
    if recipe.padding_free is not False and not recipe.torch_compile:
        packed = _pack(model, tokenizer, collate, sample_of(blocks), recipe.pad_to_multiple_of)
    if recipe.padding_free and packed is None:
        because = "together with --torch_compile" if recipe.torch_compile else f"with {type(model).__name__} here"
        raise UserError(f"--padding_free: not possible {because}; leave it out")
    return packed


def _pack(
    model: Any, tokenizer: Any, collate: MaskingCollator, columns: dict[str, list[Any]], multiple: int | None
) -> MaskingCollator | None:
    names = set(tokenizer.model_input_names) - {"input_ids", "attention_mask", "token_type_ids"}
    if names or getattr(model.config, "_attn_implementation", None) != "sdpa":
        return None
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    packed = replace(collate, collate=PackedCollator(tokenizer, collate.first_position, multiple))
    rows = len(columns["input_ids"])
    sizes = [2] * (rows // 2) + [1] * (rows % 2)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        if difference(_logits(model, packed(columns, sizes)), _logits(model, collate(columns))) <= TOLERANCE:
            return packed
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        pass  # What a model makes of an input that it was not written for is its own affair.
    model.set_attn_implementation("sdpa")
    return None


@torch.no_grad()
def _logits(model: Any, batch: Any) -> torch.Tensor:
    """(masked tokens, vocabulary), without dropout."""
    was_training = model.training
    model.eval()
    try:
        logits: torch.Tensor = model(**model_inputs(batch)).logits[batch["targets"] != IGNORED]
    finally:
        model.train(was_training)
    return logits


def check_separation(model: Any, collate: MaskingCollator, blocks: Any) -> None:
    """Makes sure that the documents of a row do not see each other: each alone has the same logits.

    Args:
        blocks: with a column "segments".

    Raises:
        UserError: they do, or the model cannot be told.
    """
    columns = {name: values[:1] for name, values in sample_of(blocks).items()}
    batch = collate(columns)
    segments = batch["segments"]
    alone: list[torch.Tensor] = []
    try:
        together = _logits(model, batch)
        for number in range(int(segments.max()) + 1):
            part = {name: value[:, segments[0] == number] for name, value in batch.items() if name != "segments"}
            alone.append(_logits(model, part))
        same = difference(together, torch.cat(alone)) <= TOLERANCE
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        same = False
    if not same:
        raise UserError(
            f"--packing: {type(model).__name__} cannot keep the documents of a row apart; add "
            "--cross_document_attention, or leave out --packing"
        )
