"""The loss of a causal language model: a sum over target tokens, whose logits never exist all at once."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

from accumft.adapters import base_of
from accumft.cut import Limits
from accumft.data.chat import IGNORED
from accumft.data.windows import Batch, Collate
from accumft.errors import UserError
from accumft.evaluation import perplexity, predict

DEFAULT_CHUNK = 1024
# Largest difference of a logit, the model's own against head(hidden states), as a share of the largest logit.
_ROUNDING = 1e-5


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels as of `transformers` → targets: what is to be predicted at each place, -100 where nothing is.

    Args:
        labels: (rows, tokens) int64; the first token of a row is nobody's target.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def num_targets(batch: Batch) -> torch.Tensor:
    """() int64, the items of a micro-batch: its target tokens, counted from the targets alone."""
    return (batch["targets"] != IGNORED).sum()


def inputs_of(batch: Batch) -> dict[str, Any]:
    """What of a batch the model takes. A packed one has a mask of four dimensions, which `transformers` passes on as it
    is instead of making one of (tokens, tokens): `accumft.tasks.causal_packing` keeps the rows apart."""
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    if "packing" in batch:
        inputs["attention_mask"] = batch["input_ids"].new_ones((1, 1, 1, 1))
    return inputs


def token_losses(
    head: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, targets: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Cross entropy of each token, with at most `chunk` tokens' logits in memory at a time, forward and backward.

    A chunk's logits are dropped and made again in its backward: one more product with the head's weight in exchange
    for tokens x vocabulary numbers and their gradient (after arXiv 2411.09009, without its kernels).

    Args:
        head: hidden states (tokens, hidden) → logits (tokens, vocabulary); a tied weight gets both its gradients.
        states: (tokens, hidden).
        targets: (tokens,) int64, none of them ignored.

    Returns:
        (tokens,) float32, or float64 where the logits are.
    """
    if len(targets) <= chunk:
        return _losses(head, states, targets)
    parts = zip(states.split(chunk), targets.split(chunk), strict=True)
    return torch.cat([checkpoint(_losses, head, *part, use_reentrant=False) for part in parts])


def _losses(head: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = head(states)
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(precise, targets, reduction="none")


@dataclass(frozen=True, slots=True)
class CausalLoss:
    """Σ cross entropy over target tokens. Never a model's own loss: that shifts, and divides by what it sees alone."""

    autocast: Callable[[], AbstractContextManager[Any]]
    """Of the accelerator. It wraps the model's `forward`, which is not what runs here, but its inside and its head."""
    chunk: int | None
    """Tokens whose logits are in memory at a time; None: the model's own logits, all of them."""

    def __call__(self, model: Any, batch: Batch) -> torch.Tensor:
        """() the sum over a micro-batch."""
        losses, _ = self.of_tokens(model, batch)
        return losses.sum()

    def of_tokens(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses of the target tokens (targets,), and where they stand: bool (rows, tokens)."""
        learnt = batch["targets"] != IGNORED
        targets = batch["targets"][learnt]
        with self.autocast():
            if self.chunk is None:
                logits = model(**inputs_of(batch), use_cache=False).logits
                return _losses(lambda states: states, logits[learnt], targets), learnt
            causal = base_of(model)
            states = decoder_of(causal)(**inputs_of(batch), use_cache=False).last_hidden_state
            # Nothing is computed for tokens that are not learnt.
            return token_losses(causal.get_output_embeddings(), states[learnt], targets, self.chunk), learnt


def decoder_of(model: Any) -> Any:
    """The model without its head."""
    return getattr(model, model.base_model_prefix)


def choose_chunk(model: Any, chunk: int | None, compiled: bool) -> int | None:
    """Tokens whose logits are in memory at a time for this model; None: only its own logits will do.

    Args:
        model: of `transformers` or `peft`, on the CPU.
        chunk: what the recipe asks for; None: DEFAULT_CHUNK where it can be done.
        compiled: the whole forward is one graph.

    Raises:
        UserError: the recipe asks for what cannot be done.
    """
    causal = base_of(model)
    if compiled:
        because = "is not possible together with --torch_compile"
    elif not _head_is_all(causal):
        because = f"is not possible: {type(causal).__name__} does more to its logits than one product (softcapping, …)"
    else:
        return chunk or DEFAULT_CHUNK
    if chunk is not None:
        raise UserError(f"--logits_chunk_size {chunk}: {because}; leave it out")
    return None


@torch.no_grad()
def _head_is_all(causal: Any) -> bool:
    """Whether the logits are the head's product with the decoder's hidden states: tried on a few tokens, with states so
    large that a cap would bend their logits."""
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Module) or getattr(causal, causal.base_model_prefix, causal) is causal:
        return False
    was_training = causal.training
    causal.eval()
    enlarged = head.register_forward_pre_hook(lambda module, args: (1e3 * args[0],))
    try:
        ids = torch.arange(8)[None] % causal.get_input_embeddings().num_embeddings
        expected = causal(input_ids=ids, use_cache=False).logits
        found = head(decoder_of(causal)(input_ids=ids, use_cache=False).last_hidden_state)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        return False
    finally:
        enlarged.remove()
        causal.train(was_training)
    return bool((found - expected).abs().max() <= _ROUNDING * expected.abs().max())


class _RowSums(nn.Module):
    """Stands for the model in `predict`: its output for a row is (sum of losses, target tokens)."""

    def __init__(self, model: Any, criterion: CausalLoss) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, **batch: Any) -> SimpleNamespace:
        losses, learnt = self.criterion.of_tokens(self.model, batch)
        sums = torch.zeros(learnt.shape, dtype=losses.dtype, device=losses.device)
        sums[learnt] = losses
        return SimpleNamespace(logits=torch.stack([sums.sum(dim=1), learnt.sum(dim=1).to(losses.dtype)], dim=1))


def row_sums(
    accelerator: Accelerator, model: Any, criterion: CausalLoss, dataset: Any, collate: Collate, limits: Limits
) -> torch.Tensor:
    """(rows, 2) float32: the sum of the losses of each row, and its number of target tokens; see `predict`."""
    wrapped = _RowSums(accelerator.unwrap_model(model), criterion)
    return predict(accelerator, wrapped, dataset, collate, limits)


def scores_of(sums: torch.Tensor) -> dict[str, float]:
    """Loss and perplexity over every target token of a split, each counted once.

    Args:
        sums: of `row_sums`.
    """
    losses, items = sums.double().sum(dim=0).tolist()
    loss = losses / items
    return {"loss": loss, "perplexity": perplexity(loss)}
