"""Metrics of regression: an `evaluate` module over scikit-learn and SciPy.

Loads by its path, without a network: `evaluate.load("…/regression.py")`. The file imports nothing of accumft, so that
it can be copied. Each import stands on a line of its own because `evaluate` reads them as text.
"""

from typing import Any

import datasets
import evaluate
import numpy as np
from scipy import stats
from sklearn import metrics

_DESCRIPTION = "Pearson and Spearman correlation, RMSE, MAE and R², the mean over the targets where there are several."

_INPUTS = """
Args:
    predictions: the values predicted, n floats or n lists of num_targets floats.
    references: the true values, in the same form.
Returns:
    rmse, mae: the mean over the targets.
    pearson, spearman: the mean over the targets whose references and predictions both vary. None where there is none.
    r2: the mean over the targets whose references vary. None where there is none.
    undefined: for each figure that is None, the reason.
"""


class Regression(evaluate.Metric):
    """`evaluate` metric: values (n,) or (n, num_targets) against values of the same shape."""

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": number, "references": number}),
                datasets.Features({"predictions": datasets.Sequence(number), "references": datasets.Sequence(number)}),
            ],
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        predicted = np.asarray(predictions, dtype=np.float64).reshape(len(predictions), -1)
        true = np.asarray(references, dtype=np.float64).reshape(len(references), -1)
        targets = list(zip(true.T, predicted.T, strict=True))
        both_vary = [(t, p) for t, p in targets if not _is_constant(t) and not _is_constant(p)]
        pearson = [stats.pearsonr(t, p).statistic for t, p in both_vary]
        spearman = [stats.pearsonr(stats.rankdata(t), stats.rankdata(p)).statistic for t, p in both_vary]
        r2 = [metrics.r2_score(t, p) for t, p in targets if not _is_constant(t)]
        reasons = {
            "pearson": "the references or the predictions are constant",
            "spearman": "the references or the predictions are constant",
            "r2": "the references are constant",
        }
        results: dict[str, Any] = {
            "pearson": float(np.mean(pearson)) if pearson else None,
            "spearman": float(np.mean(spearman)) if spearman else None,
            "rmse": float(metrics.root_mean_squared_error(true, predicted)),
            "mae": float(metrics.mean_absolute_error(true, predicted)),
            "r2": float(np.mean(r2)) if r2 else None,
        }
        results["undefined"] = {name: reason for name, reason in reasons.items() if results[name] is None}
        return results


def _is_constant(values: np.ndarray) -> bool:
    """Whether values (n,) do not vary, or so little that rounding decides: the bound at which SciPy warns."""
    mean = values.mean()
    return bool(np.linalg.norm(values - mean) <= 1e-13 * abs(mean))
