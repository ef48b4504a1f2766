"""Sequence to sequence: the loss over target tokens, and an evaluation that generates each text exactly once."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device

from accumft.cut import Limits
from accumft.data.cache import digest_of_texts, digest_of_tokens
from accumft.data.target_tokens import IGNORED
from accumft.data.targets import TargetData
from accumft.data.windows import Batch, Collate, lengths_of
from accumft.errors import NonFiniteLossError
from accumft.evaluation import batches_by_length, fitting, perplexity
from accumft.metrics.rouge import TYPES, first_line, is_exact, rouge_of


def target_logits(model: Any, batch: Batch) -> torch.Tensor:
    """(rows, target tokens, vocabulary): the logits of each target token, given the source and the tokens before it.

    The decoder's inputs are the labels as the model itself shifts them: it knows its start token.
    """
    # Not of a DDP wrapper, which hides the method.
    shifted = getattr(model, "module", model).prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    return model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=shifted,
        decoder_attention_mask=batch["decoder_attention_mask"],
        use_cache=False,
    ).logits


def target_loss_sum(model: Any, batch: Batch, label_smoothing: float = 0.0) -> torch.Tensor:
    """Sum of the cross entropies of a batch's target tokens, smoothed as `torch.nn.CrossEntropyLoss` does it."""
    logits = target_logits(model, batch)
    return F.cross_entropy(
        logits.flatten(0, 1),
        batch["labels"].flatten(),
        ignore_index=IGNORED,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def count_targets(batch: Batch) -> torch.Tensor:
    """() int64: target tokens, the end-of-text token included and padding not."""
    return (batch["labels"] != IGNORED).sum()


@dataclass(frozen=True, slots=True)
class Generated:
    """What a model makes of the rows of a split, in their order."""

    loss: np.ndarray
    """(rows,) sum of the cross entropies of each row's target tokens, not smoothed."""
    items: np.ndarray
    """(rows,) target tokens of each."""
    texts: list[str]
    """Empty where nothing was generated."""
    tokens: list[int]
    """How many were generated for each, the end-of-text token included."""


@torch.no_grad()
def generate_all(
    accelerator: Accelerator,
    model: Any,
    tokenizer: Any,
    dataset: Any,
    collate: Collate,
    limits: Limits,
    with_texts: bool = True,
) -> Generated:
    """Loss and generated text of every row exactly once, on any number of processes, as the model's generation_config
    says. Every process calls it and gets all.

    Args:
        model: prepared. It is left in evaluation mode.
        dataset: as `accumft.data.target_tokens.tokenize_pairs` makes it.
        limits: of one forward on one process; the results depend on them no more than rounding does. Beams count.
        with_texts: False: the loss alone.

    Raises:
        NonFiniteLossError: a loss is not finite, on every process.
        NotEnoughMemoryError: a single row does not fit.
    """
    bare = accelerator.unwrap_model(model)
    bare.eval()
    beams = (bare.generation_config.num_beams or 1) if with_texts else 1
    limits = Limits(
        None if limits.max_rows is None else max(1, limits.max_rows // beams),
        None if limits.max_tokens is None else max(1, limits.max_tokens // beams),
        limits.pad_to_multiple_of,
    )
    found: list[tuple[int, float, int, str, int]] = []
    shares = batches_by_length(lengths_of(dataset), accelerator.num_processes, accelerator.process_index, limits)
    for indices in shares:
        batch = send_to_device(collate(dataset[indices.tolist()]), accelerator.device)
        parts = fitting(lambda part: _score(accelerator, bare, tokenizer, part, with_texts), batch)
        scores = [scored for part in parts for scored in part]
        found += [(index, *scored) for index, scored in zip(indices.tolist(), scores, strict=True)]
    every = sorted(gather_object(found) if accelerator.num_processes > 1 else found)
    assert [row[0] for row in every] == list(range(len(dataset))), "each row once"
    loss = np.array([row[1] for row in every])
    if bad := np.flatnonzero(~np.isfinite(loss)).tolist():
        raise NonFiniteLossError(
            f"evaluation: the loss is not finite for {len(bad)} of {len(loss)} examples (the first is number "
            f"{bad[0] + 1}): the training has diverged; lower the learning rate"
        )
    texts = [row[3] for row in every] if with_texts else []
    return Generated(loss, np.array([row[2] for row in every]), texts, [row[4] for row in every])


def _score(
    accelerator: Accelerator, bare: Any, tokenizer: Any, batch: Batch, with_texts: bool
) -> list[tuple[float, int, str, int]]:
    """Of each row: sum of losses, target tokens, the generated text and its number of tokens."""
    labels = batch["labels"]
    logits = target_logits(bare, batch).double().transpose(1, 2)
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none").sum(1).tolist()
    items = (labels != IGNORED).sum(1).tolist()
    texts, sizes = [""] * len(items), [0] * len(items)
    if with_texts:
        # The encoder is called past the wrapper that `prepare` puts around forward.
        with accelerator.autocast(), _not_compiled(bare):
            tokens = bare.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=True)
        texts = [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
        sizes = (tokens[:, 1:] != bare.generation_config.pad_token_id).sum(1).tolist()
    return list(zip(losses, items, texts, sizes, strict=True))


@contextmanager
def _not_compiled(model: Any) -> Iterator[None]:
    """Generation has a shape for each token: nothing that it would pay to compile for."""
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled


@dataclass(frozen=True, slots=True)
class Seq2SeqScores:
    """A split's generated texts and what they are worth."""

    scalars: dict[str, float]
    """loss and perplexity a target token; where texts were generated, rouge1, rouge2, rougeL (mean F1 of the rows),
    exact_match and gen_len (mean generated tokens)."""
    texts: list[str]
    rouge: np.ndarray
    """(rows, 3), or (0, 3)."""


def score_texts(found: Generated, targets: Sequence[str]) -> Seq2SeqScores:
    """The scores of what was generated against the whole targets, however far these were truncated for the loss."""
    loss = float(found.loss.sum() / found.items.sum())
    scalars = {"loss": loss, "perplexity": perplexity(loss)}
    rouge = np.zeros((0, len(TYPES)))
    if found.texts:
        rouge = rouge_of(found.texts, targets)
        scalars |= {name: float(value) for name, value in zip(TYPES, rouge.mean(axis=0), strict=True)}
        exact = [is_exact(text, target) for text, target in zip(found.texts, targets, strict=True)]
        scalars |= {"exact_match": float(np.mean(exact)), "gen_len": float(np.mean(found.tokens))}
    return Seq2SeqScores(scalars, found.texts, rouge)


def copying_baseline(sources: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    """What copying the first line of each source would score: rouge1, rouge2, rougeL and exact_match."""
    lines = [first_line(source) for source in sources]
    rouge = rouge_of(lines, targets).mean(axis=0)
    exact = [is_exact(line, target) for line, target in zip(lines, targets, strict=True)]
    return {
        **{name: float(value) for name, value in zip(TYPES, rouge, strict=True)},
        "exact_match": float(np.mean(exact)),
    }


def fingerprint(tokenized: Mapping[str, Any], data: TargetData) -> dict[str, Any]:
    """What training data this is, by name: a run resumes with the same only, and every process must have the same.

    "validation" is of the validation data: where that is another, the best model is picked anew.
    """
    found = {"rows": len(tokenized["train"]), "digest": digest_of_tokens(tokenized["train"])}
    if "validation" in tokenized:
        # ROUGE is of whole targets, however far these were truncated for the loss.
        targets = digest_of_texts(data.splits["validation"], ["target"])
        found["validation"] = digest_of_tokens(tokenized["validation"], targets)
    return found
