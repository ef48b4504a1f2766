"""Masked language models: loss over the masked tokens alone, evaluation over a fixed mask."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import pad_across_processes, send_to_device

from accumft.cut import Limits
from accumft.data.blocks import token_arrays
from accumft.data.masking import IGNORED
from accumft.data.windows import Batch, Collate, lengths_of
from accumft.errors import NonFiniteLossError
from accumft.evaluation import batches_by_length, fitting, perplexity
from accumft.packing import TOLERANCE


def num_masked(batch: Batch) -> torch.Tensor:
    """() int64, the items of a micro-batch: the tokens to be predicted."""
    return (batch["targets"] != IGNORED).sum()


def model_inputs(batch: Batch) -> dict[str, Any]:
    """What of a batch the model takes; of several documents in a row, a mask (rows, 1, tokens, tokens), bool, that
    keeps them apart. A packed one has its mask in its packing."""
    left_out = ("targets", "segments", "attention_mask") if "packing" in batch else ("targets", "segments")
    inputs = {name: value for name, value in batch.items() if name not in left_out}
    if "segments" in batch:
        segments = batch["segments"]
        # Padding, -1, sees padding: a row without any key would be NaN.
        inputs["attention_mask"] = (segments[:, :, None] == segments[:, None, :])[:, None]
    return inputs


class MaskedLoss:
    """Cross entropy of the masked tokens, summed. The head and its vocabulary see these alone where the model allows.

    A forward hook on the model without its head hands on the hidden states of the masked tokens, as a single row. It is
    tried on some rows against the logits of all tokens; a model of which they differ computes all.
    """

    def __init__(self, model: Any, batch: Batch | None = None) -> None:
        """
        Args:
            model: of `transformers`, on the CPU, not prepared yet.
            batch: rows to try it on; None: all logits are computed.
        """
        self._selected: torch.Tensor | None = None
        self.selects = False
        base = getattr(model, "base_model", None)
        if batch is None or base is None or base is model:
            return
        hook = base.register_forward_hook(self._select)
        self.selects = True
        if not self._is_the_same(model, batch):
            hook.remove()
            self.selects = False

    def _select(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if self._selected is None:
            return None
        output.last_hidden_state = output.last_hidden_state[self._selected][None]
        return output

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        """(masked tokens, vocabulary), in float32 at least, row by row from left to right."""
        masked = batch["targets"] != IGNORED
        self._selected = masked if self.selects else None
        try:
            logits = model(**model_inputs(batch)).logits
        finally:
            self._selected = None
        logits = logits[0] if self.selects else logits[masked]
        precise: torch.Tensor = logits if logits.dtype == torch.float64 else logits.float()
        return precise

    def __call__(self, model: Any, batch: Batch) -> torch.Tensor:
        """() the sum over a micro-batch."""
        targets = batch["targets"][batch["targets"] != IGNORED]
        return F.cross_entropy(self.logits(model, batch), targets, reduction="sum")

    @torch.no_grad()
    def _is_the_same(self, model: Any, batch: Batch) -> bool:
        was_training = model.training
        model.eval()
        try:
            found = self.logits(model, batch)
            self.selects = False
            expected = self.logits(model, batch)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
            # What a model makes of a hidden state that it was not written for is its own affair.
            return False
        finally:
            self.selects = True
            model.train(was_training)
        return found.shape == expected.shape and difference(found, expected) <= TOLERANCE


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of two sets of logits (tokens, vocabulary), as a share of how far those of other tokens lie apart."""
    spread = (expected.max(dim=0).values - expected.min(dim=0).values).max()
    return float((found - expected).abs().max() / spread)


@torch.no_grad()
def evaluate_masked(
    accelerator: Accelerator,
    model: torch.nn.Module,
    dataset: Any,
    collate: Collate,
    limits: Limits,
    loss: MaskedLoss,
) -> dict[str, float]:
    """Metrics over the masked tokens of a split, on every process: each block once, on any number of processes.

    Args:
        model: prepared. It is left in evaluation mode.
        dataset: blocks, with a column "length".
        collate: makes padded batches, with the fixed mask.
        limits: of one forward on one process; the result does not depend on them, but for rounding.

    Returns:
        loss (mean over the masked tokens, in nats), perplexity (its exponential), accuracy (share whose likeliest
        token is the right one), masked_tokens.

    Raises:
        NonFiniteLossError: a loss is not finite, on every process.
    """
    # Not the DDP wrapper: its forward communicates, and processes may have different numbers of batches.
    bare = accelerator.unwrap_model(model)
    bare.eval()
    device = accelerator.device
    # Of each block: number, loss, masked tokens, right ones. A number of -1, dropped below, gives the gather its shape.
    parts = [torch.tensor([[-1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)]
    lengths = lengths_of(dataset)
    for rows in batches_by_length(lengths, accelerator.num_processes, accelerator.process_index, limits):
        batch = send_to_device(collate(dataset[rows.tolist()]), device)
        sums = torch.cat(fitting(lambda part: _sums_of_rows(loss, bare, part), batch))
        parts.append(torch.cat([torch.from_numpy(rows).double()[:, None], sums], dim=1))
    table = torch.cat(parts)
    if accelerator.num_processes > 1:
        numbers = table[:, 0].long().to(device)
        numbers = accelerator.gather(pad_across_processes(numbers, pad_index=-1)).cpu()
        sums = accelerator.gather(pad_across_processes(table[:, 1:].to(device))).cpu()
        table = torch.cat([numbers.double()[:, None], sums], dim=1)
    table = table[table[:, 0] >= 0]
    total, count, right = table[table[:, 0].argsort(), 1:].sum(dim=0).tolist()
    if not math.isfinite(total):
        bad = int((~torch.isfinite(table[:, 1])).sum())
        raise NonFiniteLossError(
            f"evaluation: the loss is not finite for {bad} of {len(table)} blocks: the training has diverged; lower "
            "the learning rate"
        )
    mean = total / count
    return {"loss": mean, "perplexity": perplexity(mean), "accuracy": right / count, "masked_tokens": int(count)}


def _sums_of_rows(loss: MaskedLoss, bare: Any, batch: Batch) -> torch.Tensor:
    """(rows, 3) float64 on the CPU: loss, masked tokens, right ones."""
    masked = batch["targets"] != IGNORED
    logits, targets = loss.logits(bare, batch), batch["targets"][masked]
    losses = F.cross_entropy(logits, targets, reduction="none")
    right = (logits.argmax(dim=1) == targets).to(losses.dtype)
    of_token = torch.stack([losses, torch.ones_like(losses), right], dim=1)
    # On the CPU, where there is float64 whatever the device, and sums have one order.
    sums = torch.zeros(len(masked), 3, dtype=torch.float64)
    return sums.index_add(0, masked.nonzero()[:, 0].cpu(), of_token.double().cpu())


# Times that a token is taken to have been seen more often than it was.
_ADDED = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)


def unigram_perplexity(train: Any, scored: Any, collate: Any) -> float:
    """What predicting every masked token by its frequency in the training blocks alone would reach.

    What is added to each frequency, for tokens that training lacks, is what suits the scored tokens best.

    Args:
        collate: as of `evaluate_masked`, a `MaskingCollator`.
    """
    size = int(collate.masking.replacements.max()) + 1
    counts = np.zeros(size)
    for ids in token_arrays(train):
        kept = ids[np.isin(ids, collate.masking.replacements)]
        counts += np.bincount(kept, minlength=size)
    wanted = np.zeros(size)
    for start in range(0, len(scored), 64):
        targets = collate(scored[start : start + 64])["targets"]
        found = np.minimum(targets[targets != IGNORED].numpy(), size - 1)
        wanted += np.bincount(found, minlength=size)
    shares = [(counts + added) / (counts + added).sum() for added in _ADDED]
    return perplexity(min(-float(wanted @ np.log(share)) / wanted.sum() for share in shares))
