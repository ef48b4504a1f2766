"""The model card: README.md of a run, in the Hub's format."""

import html
import importlib.metadata
import math
import platform
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from accumft.metrics import METRIC_NAMES
from accumft.report.text import format_number, printable

# The Hub's name of each metric, and how it is written out. The loss is shown on the page; it is no metric of the Hub's.
_HUB_METRICS = {
    "accuracy": ("accuracy", "Accuracy"),
    "balanced_accuracy": ("balanced_accuracy", "Balanced accuracy"),
    "f1_macro": ("f1", "Macro F1"),
    "f1_micro": ("f1", "Micro F1"),
    "f1_weighted": ("f1", "Weighted F1"),
    "mcc": ("matthews_correlation", "MCC"),
    "auroc": ("roc_auc", "AUROC"),
    "exact_match": ("exact_match", "Exact match"),
    "pearson": ("pearsonr", "Pearson correlation"),
    "spearman": ("spearmanr", "Spearman correlation"),
    "rmse": ("rmse", "RMSE"),
    "mae": ("mae", "MAE"),
    "r2": ("r_squared", "R²"),
    "loss": ("loss", "Loss"),
}
_SPLITS = {"eval": "validation", "test": "test"}
_PACKAGES = ("accumft", "torch", "transformers", "accelerate", "datasets", "tokenizers")


def model_card(
    *,
    model_name: str,
    problem_type: str,
    recipe: Mapping[str, Any],
    results: Mapping[str, Any],
    per_class: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    data: str,
    base_model: str | None = None,
    language: str | list[str] | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
    plots: Sequence[str] = (),
) -> str:
    """The text of README.md: a YAML header that the Hub reads, then the page. Needs no network.

    Nothing that comes from the data or from file names can break out of its place in the page.

    Args:
        model_name: a name for the page, such as the name of the output folder.
        problem_type: Hugging Face's name of the problem type.
        recipe: the resolved recipe, by field name; values that YAML knows. Its dataset_name goes in the header.
        results: all_results.json. Numbers named eval_… and test_… after a metric are shown as metrics of their split,
            other numbers as figures of the run.
        per_class: a dict a class: name, precision, recall, f1, support; empty for regression.
        labels: the label names, by id.
        data: what the model was trained and scored on, in plain words; one line or several.
        base_model: the hub id, or the local folder, of the model that training began from; None: from scratch.
        language: codes of the language of the texts, for the header.
        license: the Hub's name of the license of the model, for the header.
        tags: tags besides "accumft" and "text-classification".
        plots: paths of pictures, relative to README.md.
    """
    from huggingface_hub import ModelCard, ModelCardData

    dataset_name = recipe.get("dataset_name")
    scores = _scores(problem_type, results)
    header = ModelCardData(
        base_model=base_model if _is_hub_id(base_model) else None,
        datasets=dataset_name if _is_hub_id(dataset_name) else None,
        eval_results=_eval_results(scores, data, dataset_name) or None,
        language=language,
        library_name="transformers",
        license=license,
        metrics=list(dict.fromkeys(_HUB_METRICS[metric][0] for _, metric in scores if metric != "loss")) or None,
        model_name=printable(model_name),
        pipeline_tag="text-classification",
        tags=["accumft", "text-classification", *tags],
    )
    sections = [
        f"# {markdown(model_name)}",
        _introduction(problem_type, base_model, labels, _is_pair(recipe), scored=bool(scores)),
        "## How to use it\n\n" + _usage(problem_type, recipe),
        "## Data\n\n" + "\n".join(f"- {markdown(line)}" for line in data.splitlines() if line.strip()),
        "## Results\n\n" + _results(scores, results),
    ]
    if per_class:
        columns = ["precision", "recall", "f1", "support"]
        body = [
            [str(i), markdown(row["name"]), *(format_number(row[column]) for column in columns)]
            for i, row in enumerate(per_class)
        ]
        sections.append("### By class\n\n" + _table(["Id", "Class", "Precision", "Recall", "F1", "Examples"], body, 2))
    sections += [_picture(path) for path in plots]
    sections.append("## Recipe\n\n" + _fence("yaml", yaml.safe_dump(dict(recipe), allow_unicode=True, sort_keys=False)))
    sections.append("## Versions\n\n" + _versions())
    return str(ModelCard(f"---\n{header.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"))


def markdown(text: str) -> str:
    """The text as it stands, wherever it is put in a line of Markdown or a cell of a table: nothing in it is markup."""
    text = html.escape(printable(" ".join(text.splitlines())), quote=False)
    text = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text)
    return re.sub(r"^(\s*(?:\d+(?=[.)]))?)([#+\-=.)])", r"\1\\\2", text)


def _introduction(problem_type: str, base_model: str | None, labels: Sequence[str], pair: bool, scored: bool) -> str:
    text = "a pair of texts" if pair else "a text"
    task = {
        "single_label_classification": f"gives {text} one of {len(labels)} classes",
        "multi_label_classification": f"gives {text} those of {len(labels)} labels that apply",
        "regression": f"gives {text} {'a number' if len(labels) == 1 else f'{len(labels)} numbers'}",
    }[problem_type]
    origin = "trained from scratch"
    if _is_hub_id(base_model):
        origin = f"fine-tuned from [{base_model}](https://huggingface.co/{base_model})"
    elif base_model is not None:
        origin = f"fine-tuned from {markdown(base_model)}"
    known = "On data like that below it does what the results below say; on other data, score it before you rely on it."
    return f"A model that {task}, {origin} with accumft. {known if scored else 'It has not been scored.'}"


def _usage(problem_type: str, recipe: Mapping[str, Any]) -> str:
    max_length = recipe.get("max_length")
    arguments = "truncation=True" + (f", max_length={max_length:d}" if isinstance(max_length, int) else "")
    if problem_type == "multi_label_classification":
        arguments += ", top_k=None"
    text = (
        '{"text": "The first text.", "text_pair": "The second text."}'
        if _is_pair(recipe)
        else '"The text to classify."'
    )
    code = (
        "from transformers import pipeline\n\n"
        'classifier = pipeline("text-classification", model="path/to/this/folder")\n'
        f"print(classifier({text}, {arguments}))\n"
    )
    note = ""
    if problem_type == "multi_label_classification":
        note = f"\n\nA label applies where its score is {recipe.get('threshold', 0.5)} or more."
    return _fence("python", code) + note


def _scores(problem_type: str, results: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The finite metrics of results and the loss, by split and metric."""
    return {
        (split, metric): float(results[f"{prefix}_{metric}"])
        for prefix, split in _SPLITS.items()
        for metric in (*METRIC_NAMES[problem_type], "loss")
        if _is_number(results.get(f"{prefix}_{metric}"))
    }


def _eval_results(scores: Mapping[tuple[str, str], float], data: str, dataset_name: str | None) -> list[Any]:
    from huggingface_hub import EvalResult

    name = dataset_name or next(iter(data.splitlines()), "")
    return [
        EvalResult(
            task_type="text-classification",
            task_name="Text Classification",
            dataset_type=dataset_name or "custom",
            dataset_name=printable(name) or "custom",
            dataset_split=split,
            metric_type=_HUB_METRICS[metric][0],
            metric_name=_HUB_METRICS[metric][1],
            metric_value=round(value, 6),
        )
        for (split, metric), value in scores.items()
        if metric != "loss"
    ]


def _results(scores: Mapping[tuple[str, str], float], results: Mapping[str, Any]) -> str:
    splits = list(dict.fromkeys(split for split, _ in scores))
    metrics = list(dict.fromkeys(metric for _, metric in scores))
    body = [
        [
            _HUB_METRICS[metric][1],
            *(format_number(scores[split, metric]) if (split, metric) in scores else "–" for split in splits),
        ]
        for metric in metrics
    ]
    shown = {
        f"{prefix}_{metric}" for prefix, split in _SPLITS.items() for metric in metrics if (split, metric) in scores
    }
    others = [
        [markdown(name), format_number(value)]
        for name, value in results.items()
        if name not in shown and _is_number(value)
    ]
    tables = []
    if body:
        tables.append(_table(["Metric", *(split.capitalize() for split in splits)], body))
    if others:
        tables.append(_table(["Run", "Value"], others))
    return "\n\n".join(tables) or "None."


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A table whose first columns are text, to the left, and whose others are numbers, to the right."""
    lines = [header, ["---" if i < text_columns else "---:" for i in range(len(header))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _fence(language: str, text: str) -> str:
    """A code block with a fence longer than any run of backticks in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _picture(path: str) -> str:
    title = PurePosixPath(path).stem.replace("_", " ").capitalize()
    return f"![{markdown(title)}]({urllib.parse.quote(path)})"


def _versions() -> str:
    lines = [f"- Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            lines.append(f"- {package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "\n".join(lines)


def _is_hub_id(name: str | None) -> bool:
    """Whether the name can only be meant for the Hub: of its form, and no folder here."""
    return (
        name is not None
        and re.fullmatch(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", name, re.ASCII) is not None
        and not Path(name).exists()
    )


def _is_pair(recipe: Mapping[str, Any]) -> bool:
    columns = recipe.get("text_column")
    return isinstance(columns, list | tuple) and len(columns) == 2


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
