"""Metrics of multi-label classification: an `evaluate` module over scikit-learn.

Loads by its path, without a network: `evaluate.load("…/multi_label_classification.py")`. The file imports nothing of
accumft, so that it can be copied. Each import stands on a line of its own because `evaluate` reads them as text.
"""

from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn import metrics

_DESCRIPTION = "F1, exact match, AUROC and per-label figures from the probability of each label."

_INPUTS = """
Args:
    predictions: the probability of each label, n lists of num_labels floats.
    references: 1 for each label that applies and 0 for the others, n lists of num_labels floats.
    threshold: a label is predicted where its probability is this or more. Default: 0.5.
Returns:
    f1_micro, f1_macro and f1_weighted: over all num_labels labels, those that never occur included, which count 0.
    exact_match: the share of examples whose labels are all right.
    auroc: the mean over the labels that apply to some references and not to others. None where there is no such label.
    precision, recall, f1, support: lists with an entry for each of the num_labels labels; 0 where undefined.
    undefined: for each figure that is None, the reason.
"""


class MultiLabelClassification(evaluate.Metric):
    """`evaluate` metric: probabilities (n, num_labels) against zeros and ones (n, num_labels)."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": datasets.Sequence(datasets.Value("float64")),
                    "references": datasets.Sequence(datasets.Value("float64")),
                }
            ),
        )

    def _compute(self, predictions: Any, references: Any, threshold: float = 0.5) -> dict[str, Any]:
        probabilities = np.asarray(predictions, dtype=np.float64)
        given = np.asarray(references, dtype=np.float64)
        if not np.isin(given, (0.0, 1.0)).all():
            raise ValueError("references must be 0 or 1 for each label")
        true, predicted = given.astype(np.int64), (probabilities >= threshold).astype(np.int64)
        num_labels = true.shape[1]

        # Label by label, since scikit-learn takes a single column for a binary task, with other averages.
        columns = [(true[:, i], predicted[:, i]) for i in range(num_labels)]
        precision, recall, f1 = (
            np.array([score(t, p, zero_division=0) for t, p in columns])
            for score in (metrics.precision_score, metrics.recall_score, metrics.f1_score)
        )
        support = true.sum(axis=0)
        mixed = [i for i in range(num_labels) if 0 < support[i] < len(true)]
        auroc = [metrics.roc_auc_score(true[:, i], probabilities[:, i]) for i in mixed]
        return {
            "f1_micro": float(metrics.f1_score(true.ravel(), predicted.ravel(), zero_division=0)),
            "f1_macro": float(f1.mean()),
            "f1_weighted": float(np.average(f1, weights=support)) if support.any() else 0.0,
            "exact_match": float((true == predicted).all(axis=1).mean()),
            "auroc": float(np.mean(auroc)) if auroc else None,
            "precision": precision.tolist(),
            "recall": recall.tolist(),
            "f1": f1.tolist(),
            "support": support.tolist(),
            "undefined": {} if auroc else {"auroc": "no label applies to some references and not to others"},
        }
