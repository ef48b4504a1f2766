"""Losses as sums over items: any cut gives what torch's mean over all examples gives."""

import numpy as np
import pytest
import torch
from torch import nn

from accumft.errors import UserError
from accumft.losses import ClassificationLoss, build_loss

N, CLASSES = 23, 4
WEIGHTS = [0.25, 2.0, 1.0, 0.5]
logits = torch.randn((N, CLASSES), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
classes = torch.randint(CLASSES, (N,), generator=torch.Generator().manual_seed(1))
flags = (torch.rand((N, CLASSES), generator=torch.Generator().manual_seed(2)) < 0.4).double()
targets = torch.randn((N, CLASSES), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
weights = torch.tensor(WEIGHTS, dtype=torch.float64)

SINGLE, MULTI = "single_label_classification", "multi_label_classification"


def focal(gamma: float) -> torch.Tensor:
    """The focal loss as the paper writes it: −(1 − p)^γ log p, a mean over examples."""
    p = logits.softmax(1)[torch.arange(N), classes]
    return (-((1 - p) ** gamma) * p.log()).mean()


def multi_focal(gamma: float) -> torch.Tensor:
    p = torch.where(flags == 1, logits.sigmoid(), 1 - logits.sigmoid())
    return (-((1 - p) ** gamma) * p.log()).mean()


CASES = [
    (ClassificationLoss(SINGLE), classes, nn.CrossEntropyLoss()(logits, classes)),
    (
        ClassificationLoss(SINGLE, class_weights=WEIGHTS),
        classes,
        nn.CrossEntropyLoss(weight=weights)(logits, classes),
    ),
    (
        ClassificationLoss(SINGLE, label_smoothing=0.2),
        classes,
        nn.CrossEntropyLoss(label_smoothing=0.2)(logits, classes),
    ),
    (
        ClassificationLoss(SINGLE, class_weights=WEIGHTS, label_smoothing=0.2),
        classes,
        nn.CrossEntropyLoss(weight=weights, label_smoothing=0.2)(logits, classes),
    ),
    (ClassificationLoss(SINGLE, focal_gamma=2.0), classes, focal(2.0)),
    (ClassificationLoss(SINGLE, focal_gamma=0.0), classes, nn.CrossEntropyLoss()(logits, classes)),
    (ClassificationLoss(MULTI), flags, nn.BCEWithLogitsLoss()(logits, flags)),
    (
        ClassificationLoss(MULTI, pos_weight=WEIGHTS),
        flags,
        nn.BCEWithLogitsLoss(pos_weight=weights)(logits, flags),
    ),
    (ClassificationLoss(MULTI, focal_gamma=1.5), flags, multi_focal(1.5)),
    (ClassificationLoss("regression"), targets, nn.MSELoss()(logits, targets)),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("sizes", [[23], [8, 8, 7], [1] * 23])
def test_sum_over_items_is_the_mean(case: int, sizes: list[int]) -> None:
    criterion, labels, expected = CASES[case]
    pieces = list(zip(logits.split(sizes), labels.split(sizes), strict=True))
    total = sum(criterion(piece, y) for piece, y in pieces)
    items = sum(float(criterion.num_items(y)) for _, y in pieces)
    assert (total / items).item() == pytest.approx(expected.item(), rel=1e-12)


def test_regression_of_one_target_takes_a_column_of_logits() -> None:
    criterion = ClassificationLoss("regression")
    found = criterion(logits[:, :1], targets[:, 0]) / criterion.num_items(targets[:, 0])
    assert found.item() == pytest.approx(nn.MSELoss()(logits[:, 0], targets[:, 0]).item(), rel=1e-12)


@pytest.mark.parametrize("problem", [SINGLE, MULTI])
def test_focal_gradient_is_finite_where_the_model_is_sure(problem: str) -> None:
    sure = torch.tensor([[200.0, -200.0]], requires_grad=True)
    labels = torch.tensor([0]) if problem == SINGLE else torch.tensor([[1.0, 0.0]])
    ClassificationLoss(problem, focal_gamma=0.5)(sure, labels).backward()
    assert torch.isfinite(sure.grad).all()


def test_balanced_weights() -> None:
    labels = np.array([0] * 6 + [1] * 3 + [2])
    criterion = build_loss(SINGLE, ["a", "b", "c"], labels, class_weights=("balanced",))
    assert criterion.weight.tolist() == pytest.approx([10 / 18, 10 / 9, 10 / 3])
    positives = np.array([[1, 0], [1, 0], [0, 1], [1, 0]], dtype=np.float32)
    criterion = build_loss(MULTI, ["a", "b"], positives, pos_weight=("balanced",))
    assert criterion.pos_weight.tolist() == pytest.approx([1 / 3, 3])


@pytest.mark.parametrize(
    ("problem", "fields", "message"),
    [
        (SINGLE, {"class_weights": ("1", "2")}, r"--class_weights: 2 numbers for 3 labels \(a, b, c\)"),
        (SINGLE, {"class_weights": ("heavy", "1", "1")}, 'give "balanced" or one number per label'),
        (SINGLE, {"class_weights": ("-1", "1", "1")}, "not negative"),
        (SINGLE, {"pos_weight": ("balanced",)}, "--pos_weight: has no meaning for single_label"),
        (MULTI, {"class_weights": ("balanced",)}, "--class_weights: has no meaning for multi_label"),
        (MULTI, {"label_smoothing": 0.1}, "--label_smoothing: has no meaning"),
        ("regression", {"loss": "focal"}, "--loss focal: has no meaning for regression"),
        (SINGLE, {"loss": "focal", "label_smoothing": 0.1}, "--label_smoothing: has no meaning"),
        (SINGLE, {"label_smoothing": 1.0}, "below 1"),
        (SINGLE, {"loss": "focal", "focal_gamma": -1.0}, "--focal_gamma -1.0"),
    ],
)
def test_fields_that_do_not_fit(problem: str, fields: dict, message: str) -> None:
    labels = np.array([0, 1, 2]) if problem == SINGLE else np.ones((3, 3), dtype=np.float32)
    with pytest.raises(UserError, match=message):
        build_loss(problem, ["a", "b", "c"], labels, **fields)
