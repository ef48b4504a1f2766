"""Metrics over all the predictions of a split, computed once and without a network.

The figures are those of the `evaluate` modules beside this file, one for each of Hugging Face's problem types; each
also loads by its path with `evaluate.load`.
"""

import difflib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from accumft.errors import UserError

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

METRIC_NAMES: dict[str, tuple[str, ...]] = {
    "single_label_classification": (
        "accuracy",
        "balanced_accuracy",
        "f1_macro",
        "f1_micro",
        "f1_weighted",
        "mcc",
        "auroc",
    ),
    "multi_label_classification": ("f1_micro", "f1_macro", "f1_weighted", "exact_match", "auroc"),
    "regression": ("pearson", "spearman", "rmse", "mae", "r2"),
}
"""The scalars of each problem type, in the order in which they are shown."""

DEFAULT_METRIC: dict[str, str] = {
    "single_label_classification": "f1_macro",
    "multi_label_classification": "f1_micro",
    "regression": "rmse",
}
"""What picks the best model where the recipe does not say. Each is defined on any data."""

GREATER_IS_BETTER: dict[str, bool] = {
    "loss": False,
    **{name: name not in ("rmse", "mae") for names in METRIC_NAMES.values() for name in names},
}
"""Whether more is better, for the loss and for every scalar."""


@dataclass(frozen=True)
class Metrics:
    """The metrics of one split. All values are plain Python numbers and texts, safe for JSON."""

    scalars: dict[str, float]
    """By the names of METRIC_NAMES; a metric that the data leaves undefined is absent."""
    per_class: list[dict[str, Any]] = field(default_factory=list)
    """For each class or label, by id: name, precision, recall, f1, support. Empty for regression."""
    undefined: dict[str, str] = field(default_factory=dict)
    """Why a scalar is absent, by its name."""


def compute_metrics(
    problem_type: str,
    probabilities: np.ndarray,
    references: np.ndarray,
    *,
    label_names: Sequence[str],
    threshold: float = 0.5,
) -> Metrics:
    """Compute the metrics of a split from one prediction for each of its examples.

    Args:
        problem_type: one of METRIC_NAMES.
        probabilities: (n, num_labels) probabilities; for regression the predictions, (n,) or (n, num_targets).
        references: (n,) class ids; (n, num_labels) zeros and ones for multi-label; for regression as probabilities.
        label_names: the num_labels names, by id. Not looked at for regression.
        threshold: a label of a multi-label task is predicted where its probability is this or more.

    Raises:
        ValueError: shapes that do not fit, no examples, or values that are not finite.
    """
    predictions, true = np.asarray(probabilities, dtype=np.float64), np.asarray(references)
    if problem_type == "regression":
        predictions, true = _drop_single_target(predictions), _drop_single_target(true)
    _check(problem_type, predictions, true, len(label_names))
    metric = _metric_class(problem_type)(keep_in_memory=True, experiment_id=uuid.uuid4().hex)
    arguments = {"threshold": threshold} if problem_type == "multi_label_classification" else {}
    results = metric.compute(predictions=predictions, references=true, **arguments)
    per_class = []
    if problem_type != "regression":
        columns = ("precision", "recall", "f1", "support")
        per_class = [
            {"name": name, **{column: results[column][i] for column in columns}} for i, name in enumerate(label_names)
        ]
    scalars = {name: results[name] for name in METRIC_NAMES[problem_type] if results[name] is not None}
    return Metrics(scalars=scalars, per_class=per_class, undefined=results["undefined"])


def predict_labels(problem_type: str, probabilities: np.ndarray, threshold: float = 0.5) -> np.ndarray:
    """What is predicted from probabilities (n, num_labels), by the same rule as the metrics.

    Returns (n,) class ids, of equally likely classes the first; (n, num_labels) zeros and ones for multi-label, one
    where the probability is threshold or more; the values themselves for regression.
    """
    if problem_type == "single_label_classification":
        return np.asarray(probabilities.argmax(axis=1))
    if problem_type == "multi_label_classification":
        return (np.asarray(probabilities, dtype=np.float64) >= threshold).astype(np.int64)
    return probabilities


def resolve_metric(name: str | None, problem_type: str) -> tuple[str, bool]:
    """The metric that picks the best model, and whether more of it is better.

    Args:
        name: a scalar of the problem type or "loss", with or without "eval_"; None: the problem type's default.
        problem_type: one of METRIC_NAMES.

    Raises:
        UserError: there is no such metric.
    """
    if name is None:
        name = DEFAULT_METRIC[problem_type]
    plain = name.removeprefix("eval_")
    known = (*METRIC_NAMES[problem_type], "loss")
    if plain not in known:
        nearest = difflib.get_close_matches(plain, known, n=1, cutoff=0.0)[0]
        raise UserError(
            f'metric_for_best_model: {problem_type} has no metric "{name}"; did you mean "{nearest}"? '
            f"Its metrics are {', '.join(known)}."
        )
    return plain, GREATER_IS_BETTER[plain]


def _drop_single_target(values: np.ndarray) -> np.ndarray:
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values


def _check(problem_type: str, predictions: np.ndarray, references: np.ndarray, num_labels: int) -> None:
    n = len(predictions)
    if problem_type not in METRIC_NAMES:
        raise ValueError(f"problem_type must be one of {', '.join(METRIC_NAMES)}, got {problem_type!r}")
    if n == 0:
        raise ValueError("no examples to compute metrics on")
    if problem_type != "regression" and predictions.shape != (n, num_labels):
        raise ValueError(f"probabilities must be (n, {num_labels}), one column a label name, got {predictions.shape}")
    expected = (n,) if problem_type == "single_label_classification" else predictions.shape
    if references.shape != expected:
        raise ValueError(f"references must be {expected} to fit the predictions, got {references.shape}")
    for what, values in (("predictions", predictions), ("references", references)):
        rows = np.flatnonzero(~np.isfinite(values.reshape(n, -1)).all(axis=1))
        if len(rows):
            raise ValueError(f"{what} are not finite at {len(rows)} of {n} examples, the first at position {rows[0]}")


def _metric_class(problem_type: str) -> Any:
    # Here, and not above: `evaluate` takes seconds to import.
    if problem_type == "single_label_classification":
        from accumft.metrics.single_label_classification import SingleLabelClassification as Metric
    elif problem_type == "multi_label_classification":
        from accumft.metrics.multi_label_classification import MultiLabelClassification as Metric
    else:
        from accumft.metrics.regression import Regression as Metric
    return Metric
