"""The metrics agree with scikit-learn, SciPy and arithmetic, and hold out on data that leaves them undefined."""

import json
import math
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from accumft import metrics
from accumft.errors import UserError
from accumft.metrics import compute_metrics, predict_labels, resolve_metric

MODULES = sorted(path for path in Path(metrics.__file__).parent.glob("*.py") if path.name != "__init__.py")


def names(n):
    return [f"name {i}" for i in range(n)]


def one_hot(classes, num_labels):
    return np.eye(num_labels)[classes]


@pytest.fixture(scope="module")
def random():
    return np.random.default_rng(0)


def test_single_label_by_hand():
    # true 0 0 0 1 1 2, predicted 0 0 1 1 0 2
    probabilities = one_hot([0, 0, 1, 1, 0, 2], 3)
    result = compute_metrics(
        "single_label_classification", probabilities, np.array([0, 0, 0, 1, 1, 2]), label_names="abc"
    )
    assert result.scalars["accuracy"] == pytest.approx(4 / 6)
    assert result.scalars["balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert result.scalars["f1_macro"] == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert result.scalars["f1_micro"] == pytest.approx(4 / 6)
    assert result.scalars["f1_weighted"] == pytest.approx((3 * 2 / 3 + 2 * 1 / 2 + 1) / 6)
    # The 3 x 3 matrix: covariance (6 * 4 - 3 * 3 - 2 * 2 - 1) over sqrt(36 - 14)^2.
    assert result.scalars["mcc"] == pytest.approx(10 / 22)
    two_thirds = pytest.approx(2 / 3)
    assert result.per_class == [
        {"name": "a", "precision": two_thirds, "recall": two_thirds, "f1": two_thirds, "support": 3},
        {"name": "b", "precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2},
        {"name": "c", "precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1},
    ]
    assert all(type(row["support"]) is int for row in result.per_class)


@pytest.mark.parametrize("num_labels", [2, 3, 7])
def test_single_label_equals_scikit_learn(random, num_labels):
    n = 200
    probabilities = random.dirichlet(np.ones(num_labels), n)
    true = random.integers(0, num_labels, n)
    predicted = probabilities.argmax(1)
    got = compute_metrics("single_label_classification", probabilities, true, label_names=names(num_labels))
    assert got.scalars == {
        "accuracy": sklearn.metrics.accuracy_score(true, predicted),
        "balanced_accuracy": pytest.approx(sklearn.metrics.balanced_accuracy_score(true, predicted), abs=1e-15),
        "f1_macro": sklearn.metrics.f1_score(true, predicted, average="macro"),
        "f1_micro": sklearn.metrics.f1_score(true, predicted, average="micro"),
        "f1_weighted": sklearn.metrics.f1_score(true, predicted, average="weighted"),
        "mcc": sklearn.metrics.matthews_corrcoef(true, predicted),
        "auroc": sklearn.metrics.roc_auc_score(true, probabilities[:, 1])
        if num_labels == 2
        else sklearn.metrics.roc_auc_score(true, probabilities, multi_class="ovr"),
    }
    assert list(got.scalars) == list(metrics.METRIC_NAMES["single_label_classification"])
    assert got.undefined == {}


def test_auroc_ranks_the_probabilities_not_the_decisions():
    # All four are decided for class 0, yet class 1 is ranked perfectly.
    probabilities = np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    result = compute_metrics("single_label_classification", probabilities, np.array([0, 0, 1, 1]), label_names=names(2))
    assert result.scalars["auroc"] == 1.0
    assert result.scalars["accuracy"] == 0.5


def test_absent_classes():
    # Class 2 is only predicted, class 3 occurs nowhere: macro F1 counts 0, 1 and 2, balanced accuracy and AUROC 0, 1.
    probabilities = np.array(
        [[0.9, 0.1, 0.0, 0.0], [0.2, 0.1, 0.7, 0.0], [0.1, 0.9, 0.0, 0.0], [0.3, 0.7, 0.0, 0.0]], dtype=np.float32
    )
    result = compute_metrics("single_label_classification", probabilities, np.array([0, 0, 1, 1]), label_names=names(4))
    assert result.scalars["f1_macro"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert result.scalars["balanced_accuracy"] == pytest.approx(0.75)
    assert result.scalars["auroc"] == pytest.approx((3 / 4 + 1) / 2)
    assert [row["support"] for row in result.per_class] == [2, 2, 0, 0]
    assert result.per_class[3] == {"name": "name 3", "precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}


@pytest.mark.parametrize("rows", [1, 5])
def test_a_single_class_leaves_auroc_undefined(rows):
    result = compute_metrics(
        "single_label_classification", one_hot([0] * rows, 2), np.zeros(rows, int), label_names=names(2)
    )
    assert "auroc" not in result.scalars
    assert result.undefined == {"auroc": "all the references are of one class"}
    assert result.scalars["accuracy"] == result.scalars["f1_macro"] == 1.0
    assert result.scalars["mcc"] == 0.0
    json.dumps([result.scalars, result.per_class], allow_nan=False)


def test_multi_label_by_hand():
    true = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 0]])
    probabilities = np.array([[0.5, 0.1, 0.1], [0.4, 0.9, 0.1], [0.2, 0.8, 0.6], [0.1, 0.2, 0.2]])
    # The threshold itself counts: label 0 has 1 true positive and 1 miss; label 1 is perfect; label 2 one false alarm.
    result = compute_metrics("multi_label_classification", probabilities, true, label_names="abc")
    assert result.scalars == {
        "f1_micro": pytest.approx(2 * 3 / (2 * 3 + 1 + 1)),
        "f1_macro": pytest.approx((2 / 3 + 1 + 0) / 3),
        "f1_weighted": pytest.approx((2 * 2 / 3 + 2 * 1) / 4),
        "exact_match": 0.5,
        "auroc": 1.0,  # of labels 0 and 1: label 2 never applies
    }
    assert [row["support"] for row in result.per_class] == [2, 2, 0]
    low = compute_metrics("multi_label_classification", probabilities, true, label_names="abc", threshold=0.4)
    assert low.per_class[0]["recall"] == 1.0
    assert low.scalars["f1_micro"] == pytest.approx(2 * 4 / (2 * 4 + 1))


@pytest.mark.parametrize("num_labels", [2, 6])
def test_multi_label_equals_scikit_learn(random, num_labels):
    true = (random.random((150, num_labels)) < 0.3).astype(np.float32)
    probabilities = random.random((150, num_labels))
    predicted = probabilities >= 0.7
    got = compute_metrics(
        "multi_label_classification", probabilities, true, label_names=names(num_labels), threshold=0.7
    )
    expected = {
        f"f1_{kind}": sklearn.metrics.f1_score(true, predicted, average=kind) for kind in ("micro", "macro", "weighted")
    }
    expected["exact_match"] = sklearn.metrics.accuracy_score(true, predicted)
    expected["auroc"] = sklearn.metrics.roc_auc_score(true, probabilities, average="macro")
    assert got.scalars == pytest.approx(expected, rel=1e-14)
    table = sklearn.metrics.precision_recall_fscore_support(true, predicted, zero_division=0)
    for column, values in zip(("precision", "recall", "f1", "support"), table, strict=True):
        assert [row[column] for row in got.per_class] == pytest.approx(values.tolist(), rel=1e-14)


def test_multi_label_with_one_label_and_with_none_applying():
    one = compute_metrics("multi_label_classification", np.array([[0.9], [0.2]]), np.array([[1], [0]]), label_names="a")
    assert set(one.scalars.values()) == {1.0}
    none = compute_metrics("multi_label_classification", np.zeros((3, 2)), np.zeros((3, 2)), label_names="ab")
    assert none.scalars == {"f1_micro": 0.0, "f1_macro": 0.0, "f1_weighted": 0.0, "exact_match": 1.0}
    assert none.undefined == {"auroc": "no label applies to some references and not to others"}


def test_regression_by_hand_and_equals_the_libraries(random):
    true, predicted = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 2.0, 4.0, 3.0])
    result = compute_metrics("regression", predicted, true, label_names=["value"])
    assert result.scalars == pytest.approx(
        {"pearson": 0.8, "spearman": 0.8, "rmse": math.sqrt(0.5), "mae": 0.5, "r2": 1 - 2 / 5}
    )
    assert result.per_class == []

    true, predicted = random.normal(size=(60, 2)), random.normal(size=(60, 2)).round(1)
    got = compute_metrics("regression", predicted, true, label_names=names(2)).scalars
    pairs = [(true[:, i], predicted[:, i]) for i in range(2)]
    assert got["pearson"] == np.mean([scipy.stats.pearsonr(t, p).statistic for t, p in pairs])
    assert got["spearman"] == pytest.approx(
        np.mean([scipy.stats.spearmanr(t, p).statistic for t, p in pairs]), rel=1e-13
    )
    assert got["rmse"] == sklearn.metrics.root_mean_squared_error(true, predicted)
    assert got["mae"] == sklearn.metrics.mean_absolute_error(true, predicted)
    assert got["r2"] == pytest.approx(sklearn.metrics.r2_score(true, predicted), rel=1e-14)


def test_regression_of_constants():
    varying, constant = np.array([1.0, 2.0, 4.0]), np.full(3, 0.1)
    nearly = constant + np.array([0.0, 1e-17, 0.0])
    for predicted in (constant, nearly):
        result = compute_metrics("regression", predicted, varying, label_names=["value"])
        assert set(result.scalars) == {"rmse", "mae", "r2"}
        assert set(result.undefined) == {"pearson", "spearman"}
    result = compute_metrics("regression", varying, constant, label_names=["value"])
    assert set(result.scalars) == {"rmse", "mae"}
    assert result.undefined["r2"] == "the references are constant"
    assert set(compute_metrics("regression", varying[:1], varying[:1], label_names=["value"]).scalars) == {
        "rmse",
        "mae",
    }
    # Of two targets the constant one is left out of the correlation, but not of the error.
    two = compute_metrics(
        "regression", np.stack([varying, varying], 1), np.stack([varying, constant], 1), label_names=names(2)
    )
    assert two.scalars["pearson"] == pytest.approx(1.0)
    assert two.scalars["mae"] == pytest.approx(np.abs(varying - 0.1).mean() / 2)


def test_regression_with_one_column_equals_the_flat_form():
    flat = compute_metrics("regression", np.array([1.0, 2.5]), np.array([1.0, 2.0]), label_names=["value"])
    column = compute_metrics("regression", np.array([[1.0], [2.5]]), np.array([1.0, 2.0]), label_names=["value"])
    assert flat == column


@pytest.mark.parametrize(
    ("problem_type", "probabilities", "references", "message"),
    [
        ("token_classification", np.ones((1, 2)), np.zeros(1, int), "problem_type must be one of"),
        ("single_label_classification", np.ones((0, 2)), np.zeros(0, int), "no examples"),
        ("single_label_classification", np.ones((2, 3)), np.zeros(2, int), r"must be \(n, 2\)"),
        ("single_label_classification", np.ones((2, 2)), np.zeros(3, int), r"references must be \(2,\)"),
        ("single_label_classification", np.ones((2, 2)), np.array([0, 2]), "classes 0 to 1, got 0 to 2"),
        ("single_label_classification", np.ones((2, 2)), np.array([0, -100]), "classes 0 to 1, got -100 to 0"),
        ("single_label_classification", np.array([[0.5, 0.5], [np.nan, 1]]), np.zeros(2, int), "1 of 2 examples.* 1$"),
        ("multi_label_classification", np.ones((2, 2)), np.zeros(2, int), r"references must be \(2, 2\)"),
        ("multi_label_classification", np.ones((1, 2)), np.array([[0, 2]]), "must be 0 or 1"),
        ("regression", np.ones((2, 2)), np.ones(2), r"references must be \(2, 2\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(problem_type, probabilities, references, message):
    with pytest.raises(ValueError, match=message):
        compute_metrics(problem_type, probabilities, references, label_names=names(2))


def test_predict_labels_is_the_rule_of_the_metrics():
    assert predict_labels("single_label_classification", np.array([[0.4, 0.4, 0.2], [0, 0.1, 0.9]])).tolist() == [0, 2]
    # 0.7 in float32 is less than 0.7 in float64, in which the metrics compare too.
    single_precision = np.array([[0.7, 0.71]], dtype=np.float32)
    assert predict_labels("multi_label_classification", single_precision, 0.7).tolist() == [[0, 1]]
    result = compute_metrics("multi_label_classification", single_precision, [[0, 1]], label_names="ab", threshold=0.7)
    assert result.scalars["exact_match"] == 1.0
    assert predict_labels("regression", np.array([1.5])).tolist() == [1.5]


def test_three_modules_load_by_path_without_a_network(tmp_path, monkeypatch):
    import evaluate

    def refuse(*arguments):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(evaluate.loading, "init_dynamic_modules", lambda: _modules_folder(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    assert [path.stem for path in MODULES] == sorted([*metrics.METRIC_NAMES, "entities", "retrieval", "rouge"])
    modules = [path for path in MODULES if path.stem in metrics.METRIC_NAMES]
    assert len(modules) == 3
    true = {"regression": [0.5, 1.0, 3.0], "single_label_classification": [0, 1, 1]}
    true["multi_label_classification"] = [[1, 0], [0, 1], [1, 1]]
    probabilities = np.array([[0.7, 0.3], [0.4, 0.6], [0.9, 0.1]])
    for path in modules:
        predictions = probabilities[:, 0] if path.stem == "regression" else probabilities
        module = evaluate.load(str(path), cache_dir=str(tmp_path / "cache"))
        loaded = module.compute(predictions=predictions.tolist(), references=true[path.stem])
        direct = compute_metrics(path.stem, predictions, np.array(true[path.stem]), label_names="ab")
        assert {name: loaded[name] for name in direct.scalars} == direct.scalars
        assert loaded["undefined"] == direct.undefined == {}


def _modules_folder(parent):
    folder = parent / "test_evaluate_modules"
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").touch()
    return str(folder)


def test_nothing_is_left_in_the_cache(tmp_path, monkeypatch):
    import evaluate

    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path))
    compute_metrics("regression", np.array([1.0, 2.0]), np.array([1.0, 3.0]), label_names=["value"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_random_state_is_left_alone():
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()
    compute_metrics("regression", np.array([1.0, 2.0]), np.array([1.0, 3.0]), label_names=["value"])
    assert np.random.get_state()[1].tolist() == before


def test_resolve_metric():
    assert resolve_metric(None, "single_label_classification") == ("f1_macro", True)
    assert resolve_metric(None, "multi_label_classification") == ("f1_micro", True)
    assert resolve_metric(None, "regression") == ("rmse", False)
    assert resolve_metric("eval_mcc", "single_label_classification") == ("mcc", True)
    assert resolve_metric("loss", "regression") == resolve_metric("eval_loss", "regression") == ("loss", False)
    assert resolve_metric("mae", "regression") == ("mae", False)
    assert resolve_metric("r2", "regression") == ("r2", True)
    with pytest.raises(UserError, match=r'no metric "macro_f1"; did you mean "\w*f1_macro".*accuracy, .*, loss\.$'):
        resolve_metric("macro_f1", "single_label_classification")
    with pytest.raises(UserError, match='did you mean "f1_macro"'):
        resolve_metric("eval_f1macro", "multi_label_classification")
    with pytest.raises(UserError, match="no metric"):
        resolve_metric("accuracy", "regression")


def test_every_scalar_has_a_direction():
    every = {name for scalars in metrics.METRIC_NAMES.values() for name in scalars} | {"loss"}
    assert set(metrics.GREATER_IS_BETTER) == every
    assert {name for name, greater in metrics.GREATER_IS_BETTER.items() if not greater} == {"loss", "rmse", "mae"}
    assert all(metrics.DEFAULT_METRIC[kind] in scalars for kind, scalars in metrics.METRIC_NAMES.items())


def test_import_is_light():
    code = "import sys, accumft.metrics, accumft.report; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "accumft.report.plots" in loaded
    assert not {"evaluate", "datasets", "sklearn", "scipy", "matplotlib", "transformers", "pandas"} & set(loaded)
