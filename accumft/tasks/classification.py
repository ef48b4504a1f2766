"""What the recipes that classify share: the scores of a split, and the report of a run."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accumft.data.cache import digest_of_texts
from accumft.data.files import numbers_of
from accumft.data.splits import ClassificationData
from accumft.errors import UserError
from accumft.finishing import leave_report, without_folders
from accumft.losses import ClassificationLoss, build_loss
from accumft.metrics import Metrics, compute_metrics, predict_labels, resolve_metric
from accumft.outputs import check_output_dir
from accumft.recipe import refuse_unused
from accumft.report.card import classification_task
from accumft.run import Run, RunResult

SPLIT_PREFIX = {"validation": "eval", "test": "test"}
"""What a split's metrics are called in the results."""


PICTURE = {
    "single_label_classification": "confusion_matrix",
    "multi_label_classification": "labels",
    "regression": "scatter",
}


@dataclass(frozen=True, slots=True)
class Scores:
    """A split's predictions and what they are worth."""

    loss: float
    """Mean loss over the split, weighted as in training."""
    metrics: Metrics
    probabilities: np.ndarray
    """(rows, labels); for regression the predictions, (rows,) or (rows, targets)."""
    references: np.ndarray
    """(rows,) or (rows, labels)."""

    @property
    def scalars(self) -> dict[str, float]:
        """The loss and the metrics by name."""
        return {"loss": self.loss, **self.metrics.scalars}


def check_fields(recipe: Any) -> None:
    """Raises a `UserError` where the fields of a text classification do not fit each other: none is silently ignored.

    Args:
        recipe: a checked recipe with the fields of recipes/text_cls.py.
    """
    if recipe.train_file is None and recipe.dataset_name is None:
        if recipe.validation_file or recipe.test_file:
            raise UserError("--validation_file and --test_file need --train_file or --dataset_name")
        names = ("encoding", "delimiter", "quotechar", "column_names", "dataset_config_name", "validation_split")
        refuse_unused(recipe, names, "the synthetic notes")
    else:
        refuse_unused(recipe, ("synthetic_language", "synthetic_size"), "data of your own")
    if recipe.from_scratch:
        refuse_unused(recipe, ("model_name_or_path", "trust_remote_code"), "--from_scratch")
    if recipe.loss != "focal":
        refuse_unused(recipe, ("focal_gamma",), f"--loss {recipe.loss}")
    if not recipe.report_to:
        refuse_unused(recipe, ("run_name",), "no tracker (--report_to)")
    elif Path(recipe.run_name).is_absolute() or ".." in Path(recipe.run_name).parts:
        # Trackers that keep files join it to the output folder.
        raise UserError(f"--run_name {recipe.run_name!r}: names a folder outside --output_dir; leave out the path")
    check_output_dir(
        recipe.output_dir, (recipe.train_file, recipe.validation_file, recipe.test_file, recipe.model_name_or_path)
    )


def score(
    logits: torch.Tensor,
    references: np.ndarray,
    criterion: ClassificationLoss,
    label_names: Sequence[str],
    threshold: float = 0.5,
) -> Scores:
    """Scores of `logits`, (rows, labels) on the CPU, against `references`, in one computation over all rows."""
    labels = torch.from_numpy(references)
    logits = logits.double()
    items = float(criterion.num_items(labels))
    # Class weights of zero may leave nothing to average over.
    loss = float(criterion(logits, labels)) / items if items else math.nan
    if criterion.problem_type == "single_label_classification":
        probabilities = logits.softmax(dim=1).numpy()
    elif criterion.problem_type == "multi_label_classification":
        probabilities = logits.sigmoid().numpy()
    else:
        probabilities = logits.reshape(labels.shape).numpy()
    metrics = compute_metrics(
        criterion.problem_type, probabilities, references, label_names=label_names, threshold=threshold
    )
    return Scores(loss, metrics, probabilities, references)


def best_metric(
    name: str | None, greater_is_better: bool | None, data: ClassificationData, source: str
) -> tuple[str, bool]:
    """(metric that picks the best model, whether larger is better), once it is sure that the data defines it.

    Args:
        name, greater_is_better: the recipe's fields; None: the task's own metric, which any data defines.
        source: what the data is, for the message.
    """
    problem_type = data.labels.problem_type
    metric, greater = resolve_metric(name, problem_type)
    if data.validation is not None and name is not None and metric != "loss":
        references = numbers_of(data.validation, "labels")
        # Any predictions will do: what they leave undefined here is so by the labels alone.
        shape = (len(references), len(data.labels.names)) if problem_type != "regression" else references.shape
        guesses = np.random.default_rng(0).random(shape)
        found = compute_metrics(problem_type, guesses, references, label_names=data.labels.names)
        if metric not in found.scalars:
            raise UserError(
                f"--metric_for_best_model {metric}: undefined on {source}: {found.undefined.get(metric, 'no value')}"
            )
    return metric, greater if greater_is_better is None else greater_is_better


def loss_of(recipe: Any, data: ClassificationData) -> ClassificationLoss:
    """The loss that the fields of a classification recipe name."""
    return build_loss(
        data.labels.problem_type,
        data.labels.names,
        numbers_of(data.train, "labels"),
        loss=recipe.loss,
        class_weights=recipe.class_weights,
        pos_weight=recipe.pos_weight,
        label_smoothing=recipe.label_smoothing,
        focal_gamma=recipe.focal_gamma,
    )


def fingerprint(data: ClassificationData) -> dict[str, Any]:
    """What training data this is, by name: a run resumes with the same only, and every process must have the same."""
    texts = [name for name in ("text", "text_pair") if name in data.train.column_names]

    def digest_of(split: Any) -> str:
        digest = hashlib.sha256(digest_of_texts(split, texts).encode())
        digest.update(numbers_of(split, "labels").astype(np.float64).tobytes())
        return digest.hexdigest()[:16]

    found = {"rows": len(data.train), "labels": ", ".join(data.labels.names), "digest": digest_of(data.train)}
    return found | ({} if data.validation is None else {"validation": digest_of(data.validation)})


def report(
    run: Run, data: ClassificationData, scores: Mapping[str, Scores], source: str, base: str | None
) -> RunResult:
    """Prints the metrics and writes all_results.json, predictions.jsonl, the plots and the model card.

    Args:
        scores: by split, "validation" and "test"; empty on processes other than the main one.
        source: what the data is, in a line.
        base: hub id or path that the weights came from; None: from scratch.
    """
    results = {
        f"{SPLIT_PREFIX[split]}_{name}": value
        for split, found in scores.items()
        for name, value in found.scalars.items()
    }
    names, problem_type = data.labels.names, data.labels.problem_type

    def texts_of(split: str) -> Iterable[Any]:
        dataset = data.splits[split]
        columns = [dataset[column] for column in ("text", "text_pair") if column in dataset.column_names]
        return columns[0] if len(columns) == 1 else zip(*columns, strict=True)

    def draw(folder: Path) -> list[str]:
        return show_and_draw(run, data, scores, texts_of, folder)

    shown = scores.get("test") or scores.get("validation")
    task = classification_task(problem_type, run.recipe_values, shown.metrics.per_class if shown else [], names)
    return leave_report(run, task, results, _about_data(data, source), base, draw)


def show_and_draw(
    run: Run, data: Any, scores: Mapping[str, Scores], inputs_of: Callable[[str], Iterable[Any]], folder: Path
) -> list[str]:
    """Prints the metrics, writes predictions.jsonl, and draws: paths of the pictures in the folder.

    Args:
        data: with `splits` and `labels`.
        inputs_of: what the predictions of a split are of, as `write_predictions` takes it.
    """
    from accumft.report import metrics_table, write_predictions

    threshold = getattr(run.recipe, "threshold", 0.5)
    names, problem_type = data.labels.names, data.labels.problem_type
    plots = []
    (folder / "predictions.jsonl").unlink(missing_ok=True)
    for split, found in scores.items():
        dataset = data.splits[split]
        print(f"\n{split} ({len(dataset)} rows)\n{metrics_table(found.metrics)}")
        note_single_prediction(found, names, problem_type, split)
        write_predictions(
            folder / "predictions.jsonl",
            split=split,
            rows=dataset["row"],
            texts=inputs_of(split),
            references=found.references,
            probabilities=found.probabilities,
            label_names=names,
            problem_type=problem_type,
            threshold=threshold,
            append=True,
        )
        plots.append(f"plots/{split}_{PICTURE[problem_type]}.png")
        plot_scores(found, names, problem_type, threshold, folder / plots[-1])
    return plots


def _about_data(data: ClassificationData, source: str) -> list[str]:
    """Lines for the model card."""
    rows = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    return [without_folders("train_file", source), f"{rows} rows", f"labels: {', '.join(data.labels.names[:50])}"]


def note_single_prediction(found: Scores, names: Sequence[str], problem_type: str, split: str) -> None:
    """Says so where a classifier predicts nothing but one class."""
    from accumft.report.text import printable

    if problem_type == "single_label_classification":
        predictions = predict_labels(problem_type, found.probabilities)
        if len(np.unique(predictions)) == 1 and len(np.unique(found.references)) > 1:
            name = printable(names[int(predictions[0])])
            print(f'note: every row of {split} is predicted as "{name}": try more steps or another --learning_rate')


def plot_scores(found: Scores, names: Sequence[str], problem_type: str, threshold: float, path: Any) -> None:
    """The picture that suits the task."""
    from accumft.report import plot_confusion_matrix, plot_per_label, plot_regression

    if problem_type == "single_label_classification":
        predictions = predict_labels(problem_type, found.probabilities, threshold)
        plot_confusion_matrix(found.references, predictions, names, path)
    elif problem_type == "multi_label_classification":
        plot_per_label(found.metrics.per_class, path)
    else:
        plot_regression(found.references, found.probabilities, path)
