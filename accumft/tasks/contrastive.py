"""Losses on the embeddings of an effective batch: InfoNCE with in-batch and hard negatives, cosine, triplet.

An example is a row of texts: the anchor, its positive, and perhaps hard negatives. Each text has a label, its place:
example · texts an example + position, so that a batch of texts in any order, from any process, says by one number each
which texts belong together. Texts that are equal have equal keys, which tells false negatives.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

LossName = Literal["infonce", "cosine", "triplet"]


@dataclass(frozen=True, slots=True)
class Contrast:
    """A loss on the embeddings of an effective batch, and what it has to know of the training data."""

    name: LossName
    keys: torch.Tensor
    """(examples, texts an example) int64: equal for equal texts, -1 where an example has no such text."""
    scores: torch.Tensor | None = None
    """(examples,) what the cosine of a pair is to be, for "cosine"."""
    temperature: float = 0.05
    """Of "infonce"."""
    symmetric: bool = True
    """Whether "infonce" also asks each positive for its anchor."""
    margin: float = 0.2
    """Of "triplet": how much nearer the positive is to be than the negative, as a difference of cosines."""

    def to(self, device: torch.device) -> "Contrast":
        """The same with its tensors on `device`."""
        scores = None if self.scores is None else self.scores.to(device)
        return replace(self, keys=self.keys.to(device), scores=scores)

    def loss_sum(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the losses, a scalar.

        Args:
            embeddings: (texts, dimensions), of any norm: only their cosines count.
            labels: (texts,) their places, ascending.
        """
        parts = self._parts(labels)
        unit = F.normalize(embeddings, dim=1)
        anchors, positives, negatives = unit[parts.anchors], unit[parts.positives], unit[parts.negatives]
        if self.name == "cosine":
            assert self.scores is not None
            return cosine_loss(anchors, positives, self.scores[parts.examples])
        if self.name == "triplet":
            owners = parts.owners
            return triplet_loss(anchors[owners], positives[owners], negatives, self.margin)
        masks = false_negatives(parts.anchor_keys, parts.positive_keys, parts.negative_keys)
        return info_nce(anchors, positives, negatives, *masks, self.temperature, self.symmetric)

    def num_items(self, labels: torch.Tensor) -> int:
        """What that sum is to be divided by: pairs; for "triplet" anchors with each of their negatives."""
        parts = self._parts(labels)
        return len(parts.negatives if self.name == "triplet" else parts.anchors)

    def _parts(self, labels: torch.Tensor) -> "_Parts":
        width = self.keys.shape[1]
        example, position = labels // width, labels % width
        anchors = (position == 0).nonzero().flatten()
        examples = example[anchors]
        negatives = (position > 1).nonzero().flatten()
        owners = torch.searchsorted(examples, example[negatives])
        negative_keys = self.keys[example[negatives], position[negatives]]
        if self.name == "triplet":
            # A negative that is the positive, or the anchor itself, is none.
            own = self.keys[example[negatives]]
            right = (negative_keys != own[:, 0]) & (negative_keys != own[:, 1])
            negatives, owners, negative_keys = negatives[right], owners[right], negative_keys[right]
        return _Parts(
            examples,
            anchors,
            (position == 1).nonzero().flatten(),
            negatives,
            owners,
            self.keys[examples, 0],
            self.keys[examples, 1],
            negative_keys,
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Where in a batch what is; all (…,) int64."""

    examples: torch.Tensor
    anchors: torch.Tensor
    positives: torch.Tensor
    negatives: torch.Tensor
    owners: torch.Tensor
    """Which anchor each negative belongs to."""
    anchor_keys: torch.Tensor
    positive_keys: torch.Tensor
    negative_keys: torch.Tensor


def false_negatives(
    anchor_keys: torch.Tensor, positive_keys: torch.Tensor, negative_keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which candidates are no negatives of an anchor, as they are right answers too, or the anchor's own text.

    Another pair's positive is none where the two pairs share their anchor or their positive, or where it is the
    anchor's text; a hard negative is none where it is the anchor's text or its positive's.

    Args:
        anchor_keys, positive_keys: (pairs,) int64, equal for equal texts. negative_keys: (negatives,).

    Returns:
        (pairs, pairs) bool, False on the diagonal; (pairs, negatives) bool.
    """
    same = anchor_keys[:, None] == anchor_keys[None]
    same |= positive_keys[:, None] == positive_keys[None]
    same |= anchor_keys[:, None] == positive_keys[None]
    same.fill_diagonal_(False)
    hard = (anchor_keys[:, None] == negative_keys[None]) | (positive_keys[:, None] == negative_keys[None])
    return same, hard


def info_nce(
    anchors: torch.Tensor,
    positives: torch.Tensor,
    negatives: torch.Tensor,
    false_pairs: torch.Tensor,
    false_hard: torch.Tensor,
    temperature: float,
    symmetric: bool,
) -> torch.Tensor:
    """Sum over pairs of the cross-entropy of each anchor's positive among all positives and negatives of the batch
    (van den Oord et al. 2018; SimCSE's form). Symmetric: the mean of it and of each positive's anchor among all
    anchors, as in CLIP.

    Args:
        anchors, positives: (pairs, dimensions) unit vectors. negatives: (negatives, dimensions), perhaps none.
        false_pairs, false_hard: see `false_negatives`.
    """
    targets = torch.arange(len(anchors), device=anchors.device)
    similarity = anchors @ positives.T / temperature
    among = similarity.masked_fill(false_pairs, float("-inf"))
    if len(negatives):
        hard = (anchors @ negatives.T / temperature).masked_fill(false_hard, float("-inf"))
        among = torch.cat([among, hard], dim=1)
    loss = F.cross_entropy(among, targets, reduction="sum")
    if not symmetric:
        return loss
    back = similarity.masked_fill(false_pairs, float("-inf")).T
    return (loss + F.cross_entropy(back, targets, reduction="sum")) / 2


def cosine_loss(anchors: torch.Tensor, positives: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Sum over pairs of the squared difference of their cosine and their score (Reimers & Gurevych 2019).

    Args:
        anchors, positives: (pairs, dimensions) unit vectors. scores: (pairs,), -1 to 1.
    """
    return ((anchors * positives).sum(dim=1) - scores.to(anchors)).square().sum()


def triplet_loss(
    anchors: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor, margin: float
) -> torch.Tensor:
    """Sum over triplets of max(0, cos(anchor, negative) − cos(anchor, positive) + margin) (Schroff et al. 2015).

    Args:
        anchors, positives, negatives: (triplets, dimensions) unit vectors.
    """
    return F.relu((anchors * negatives).sum(dim=1) - (anchors * positives).sum(dim=1) + margin).sum()
