"""Losses as sums over items, with what to divide them by."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from accumft.errors import UserError


class ClassificationLoss(nn.Module):
    """The loss of a classifier or regressor, summed over the examples of a batch.

    `loss(logits, labels)` divided by `loss.num_items(labels)`, each summed over any cut of the examples, is what
    torch's loss of the same name gives for all of them with `reduction="mean"`.

    problem_type (labels, logits):
        single_label_classification: (n,) int64, (n, classes): cross entropy. Items are examples; with class weights,
            each counts the weight of its label, as in `torch.nn.CrossEntropyLoss`.
        multi_label_classification: (n, labels) 0/1, (n, labels): binary cross entropy, averaged over labels. Items
            are examples.
        regression: (n,) or (n, targets): squared error, averaged over targets. Items are examples.
    """

    weight: torch.Tensor | None
    pos_weight: torch.Tensor | None

    def __init__(
        self,
        problem_type: str,
        *,
        class_weights: Sequence[float] | None = None,
        pos_weight: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        focal_gamma: float | None = None,
    ) -> None:
        """`focal_gamma`: exponent of the focal loss (Lin et al., 2017); None: plain cross entropy."""
        super().__init__()
        self.problem_type = problem_type
        self.label_smoothing = label_smoothing
        self.focal_gamma = focal_gamma
        self.register_buffer("weight", None if class_weights is None else torch.tensor(class_weights))
        self.register_buffer("pos_weight", None if pos_weight is None else torch.tensor(pos_weight))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the losses, a scalar."""
        if self.problem_type == "regression":
            logits = logits.reshape(labels.shape)
            return F.mse_loss(logits, labels.to(logits.dtype), reduction="sum") / max(1, labels[0].numel())
        if self.problem_type == "multi_label_classification":
            labels = labels.to(logits.dtype)
            pos_weight = None if self.pos_weight is None else self.pos_weight.to(logits)
            loss = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=pos_weight, reduction="none")
            if self.focal_gamma is not None:
                loss = loss * _power(torch.where(labels > 0.5, -logits, logits).sigmoid(), self.focal_gamma)
            return loss.mean(dim=1).sum()
        weight = None if self.weight is None else self.weight.to(logits)
        if self.focal_gamma is None:
            return F.cross_entropy(logits, labels, weight=weight, label_smoothing=self.label_smoothing, reduction="sum")
        log_probabilities = logits.log_softmax(dim=1)
        loss = F.nll_loss(log_probabilities, labels, weight=weight, reduction="none")
        log_of_label = log_probabilities.gather(1, labels[:, None]).squeeze(1)
        return (loss * _power(-torch.expm1(log_of_label), self.focal_gamma)).sum()

    def num_items(self, labels: torch.Tensor) -> torch.Tensor | float:
        """What `forward`'s sum is to be divided by, over all the examples that it is summed over."""
        if self.problem_type == "single_label_classification" and self.weight is not None:
            return self.weight.to(labels.device)[labels].sum()
        return len(labels)


def _power(miss: torch.Tensor, gamma: float) -> torch.Tensor:
    """miss ** gamma with a finite derivative also at a miss of 0, where that of a gamma below 1 is infinite."""
    return miss.clamp_min(torch.finfo(miss.dtype).eps) ** gamma


def build_loss(
    problem_type: str,
    label_names: Sequence[str],
    train_labels: np.ndarray,
    *,
    loss: str = "cross_entropy",
    class_weights: Sequence[str] = (),
    pos_weight: Sequence[str] = (),
    label_smoothing: float = 0.0,
    focal_gamma: float = 2.0,
) -> ClassificationLoss:
    """The loss that a recipe's fields name; fields that do not fit the task raise a `UserError`.

    Args:
        train_labels: (n,) class ids, (n, labels) of 0/1, or regression targets.
        class_weights: ("balanced",): n / (classes × count), as scikit-learn has it; or a weight per class in the
            order of `label_names`; or () for none.
        pos_weight: ("balanced",): negatives / positives of each label; or a number per label; or ().
    """
    single = problem_type == "single_label_classification"
    multi = problem_type == "multi_label_classification"
    if loss not in ("cross_entropy", "focal"):
        raise UserError(f'--loss "{loss}": not one of cross_entropy, focal')
    for flag, given, fits in (
        ("--class_weights", bool(class_weights), single),
        ("--pos_weight", bool(pos_weight), multi),
        ("--label_smoothing", label_smoothing != 0.0, single and loss == "cross_entropy"),
        ("--loss focal", loss == "focal", single or multi),
    ):
        if given and not fits:
            raise UserError(f"{flag}: has no meaning for {problem_type} with --loss {loss}; leave it out")
    if not 0.0 <= label_smoothing < 1.0:
        raise UserError(f"--label_smoothing {label_smoothing}: must be at least 0 and below 1")
    if not 0.0 <= focal_gamma < math.inf:
        raise UserError(f"--focal_gamma {focal_gamma}: must be finite and not negative")
    if single:
        counts = np.bincount(train_labels, minlength=len(label_names))
        balanced = len(train_labels) / (len(label_names) * np.maximum(counts, 1))
    else:
        positives = train_labels.sum(axis=0) if multi else np.ones(1)
        balanced = (len(train_labels) - positives) / np.maximum(positives, 1)
    return ClassificationLoss(
        problem_type,
        class_weights=_weights("--class_weights", class_weights, balanced, label_names),
        pos_weight=_weights("--pos_weight", pos_weight, balanced, label_names),
        label_smoothing=label_smoothing,
        focal_gamma=focal_gamma if loss == "focal" else None,
    )


def _weights(flag: str, given: Sequence[str], balanced: np.ndarray, label_names: Sequence[str]) -> list[float] | None:
    """Weights in the order of the labels, or None where none are given."""
    if not given:
        return None
    if [str(value) for value in given] == ["balanced"]:
        return [float(value) for value in balanced]
    try:
        weights = [float(value) for value in given]
    except ValueError:
        raise UserError(f'{flag} {" ".join(map(str, given))}: give "balanced" or one number per label') from None
    if len(weights) != len(label_names):
        raise UserError(f"{flag}: {len(weights)} numbers for {len(label_names)} labels ({', '.join(label_names)})")
    if not all(0.0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise UserError(f"{flag}: weights must be finite, not negative, and not all zero")
    return weights
