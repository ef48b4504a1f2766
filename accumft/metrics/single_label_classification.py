"""Metrics of single-label classification: an `evaluate` module over scikit-learn.

Loads by its path, without a network: `evaluate.load("…/single_label_classification.py")`. The file imports nothing of
accumft, so that it can be copied. Each import stands on a line of its own because `evaluate` reads them as text.
"""

from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn import metrics

_DESCRIPTION = (
    "Accuracy, balanced accuracy, F1, MCC, AUROC and per-class figures from the probabilities of the classes."
)

_INPUTS = """
Args:
    predictions: the probabilities of the classes, n lists of num_labels floats; the class predicted is the likeliest,
        and of equals the first.
    references: the true class of each, n integers from 0 to num_labels - 1.
Returns:
    accuracy, balanced_accuracy (mean recall of the classes that occur in the references), f1_macro and f1_weighted
        (over the classes that occur in the references or among the classes predicted), f1_micro, mcc.
    auroc: of class 1 where there are two classes; else the mean, over the classes that occur in the references, of each
        against the rest. None where all the references are of one class.
    precision, recall, f1, support: lists with an entry for each of the num_labels classes; 0 where undefined.
    undefined: for each figure that is None, the reason.
"""


class SingleLabelClassification(evaluate.Metric):
    """`evaluate` metric: probabilities (n, num_labels) against classes (n,)."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": datasets.Sequence(datasets.Value("float64")),
                    "references": datasets.Value("int64"),
                }
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        probabilities = np.asarray(predictions, dtype=np.float64)
        true = np.asarray(references, dtype=np.int64)
        num_labels = probabilities.shape[1]
        if true.min() < 0 or true.max() >= num_labels:
            raise ValueError(f"references must be classes 0 to {num_labels - 1}, got {true.min()} to {true.max()}")
        predicted = probabilities.argmax(axis=1)
        present = np.unique(true)

        precision, recall, f1, support = metrics.precision_recall_fscore_support(
            true, predicted, labels=np.arange(num_labels), zero_division=0
        )
        if len(present) == 1:
            auroc = None
        elif num_labels == 2:
            auroc = float(metrics.roc_auc_score(true, probabilities[:, 1]))
        else:
            auroc = float(np.mean([metrics.roc_auc_score(true == c, probabilities[:, c]) for c in present]))
        return {
            "accuracy": float(metrics.accuracy_score(true, predicted)),
            "balanced_accuracy": float(recall[present].mean()),
            "f1_macro": float(metrics.f1_score(true, predicted, average="macro", zero_division=0)),
            "f1_micro": float(metrics.f1_score(true, predicted, average="micro", zero_division=0)),
            "f1_weighted": float(metrics.f1_score(true, predicted, average="weighted", zero_division=0)),
            # scikit-learn gives 0 with a warning where a single class is all there is.
            "mcc": float(metrics.matthews_corrcoef(true, predicted)) if len(np.union1d(true, predicted)) > 1 else 0.0,
            "auroc": auroc,
            "precision": precision.tolist(),
            "recall": recall.tolist(),
            "f1": f1.tolist(),
            "support": support.astype(np.int64).tolist(),
            "undefined": {"auroc": "all the references are of one class"} if auroc is None else {},
        }
