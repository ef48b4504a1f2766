"""The model card of any task: README.md of a run, in the Hub's format."""

import html
import importlib.metadata
import math
import platform
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from accumft.report.text import format_number, printable

_SPLITS = {"eval": "validation", "test": "test"}
_PACKAGES = ("accumft", "torch", "transformers", "accelerate", "datasets", "tokenizers")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the page. Its cells are Markdown: texts of the data go through `markdown`."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    """How many of the first columns are text."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a card says of its task."""

    pipeline_tag: str
    """The Hub's name of it: "text-classification", "token-classification", "fill-mask", …"""
    does: str
    """What the model does, as in "A model that …"; Markdown."""
    code: str
    """Python that uses the model."""
    note: str = ""
    """A line below that code; Markdown."""
    metrics: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Metrics by accumft's name, in the order of the page: (the Hub's name, the name written out). The loss is shown on
    the page; it is no metric of the Hub's."""
    tables: Sequence[Table] = ()
    """By class, by type, examples, …"""
    library_name: str = "transformers"


def task_card(
    *,
    task: Task,
    model_name: str,
    recipe: Mapping[str, Any],
    results: Mapping[str, Any],
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
        recipe: the resolved recipe, by field name; values that YAML knows. Its dataset_name goes in the header.
        results: all_results.json. Numbers named eval_… and test_… after a metric of the task are shown as metrics of
            their split, other numbers as figures of the run.
        data: what the model was trained and scored on, in plain words; one line or several.
        base_model: the hub id, or the local folder, of the model that training began from; None: from scratch.
        language: codes of the language of the texts, for the header.
        license: the Hub's name of the license of the model, for the header.
        tags: tags besides "accumft" and the task's.
        plots: paths of pictures, relative to README.md.
    """
    from huggingface_hub import ModelCard, ModelCardData

    dataset_name = recipe.get("dataset_name")
    scores = _scores(task, results)
    header = ModelCardData(
        base_model=base_model if is_hub_id(base_model) else None,
        datasets=dataset_name if is_hub_id(dataset_name) else None,
        eval_results=_eval_results(task, scores, data, dataset_name) or None,
        language=language,
        library_name=task.library_name,
        license=license,
        metrics=list(dict.fromkeys(task.metrics[metric][0] for _, metric in scores if metric != "loss")) or None,
        model_name=printable(model_name),
        pipeline_tag=task.pipeline_tag,
        tags=["accumft", task.pipeline_tag, *tags],
    )
    sections = [
        f"# {markdown(model_name)}",
        _introduction(task, base_model, scored=bool(scores)),
        "## How to use it\n\n" + fence("python", task.code) + (f"\n\n{task.note}" if task.note else ""),
        "## Data\n\n" + "\n".join(f"- {markdown(line)}" for line in data.splitlines() if line.strip()),
        "## Results\n\n" + _results(task, scores, results),
    ]
    sections += [
        f"### {markdown(table.title)}\n\n" + _table(table.header, table.rows, table.text_columns)
        for table in task.tables
        if table.rows
    ]
    sections += [_picture(path) for path in plots]
    sections.append("## Recipe\n\n" + fence("yaml", yaml.safe_dump(dict(recipe), allow_unicode=True, sort_keys=False)))
    sections.append("## Versions\n\n" + _versions())
    return str(ModelCard(f"---\n{header.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"))


def markdown(text: str) -> str:
    """The text as it stands, wherever it is put in a line of Markdown or a cell of a table: nothing in it is markup."""
    text = html.escape(printable(" ".join(text.splitlines())), quote=False)
    text = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text)
    return re.sub(r"^(\s*(?:\d+(?=[.)]))?)([#+\-=.)])", r"\1\\\2", text)


def _introduction(task: Task, base_model: str | None, scored: bool) -> str:
    origin = "trained from scratch"
    if is_hub_id(base_model):
        origin = f"fine-tuned from [{base_model}](https://huggingface.co/{base_model})"
    elif base_model is not None:
        origin = f"fine-tuned from {markdown(base_model)}"
    known = "On data like that below it does what the results below say; on other data, score it before you rely on it."
    return f"A model that {task.does}, {origin} with accumft. {known if scored else 'It has not been scored.'}"


def _scores(task: Task, results: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The finite metrics of results, by split and metric."""
    return {
        (split, metric): float(results[f"{prefix}_{metric}"])
        for prefix, split in _SPLITS.items()
        for metric in task.metrics
        if _is_number(results.get(f"{prefix}_{metric}"))
    }


def _eval_results(
    task: Task, scores: Mapping[tuple[str, str], float], data: str, dataset_name: str | None
) -> list[Any]:
    from huggingface_hub import EvalResult

    name = dataset_name or next(iter(data.splitlines()), "")
    return [
        EvalResult(
            task_type=task.pipeline_tag,
            task_name=task.pipeline_tag.replace("-", " ").title(),
            dataset_type=dataset_name or "custom",
            dataset_name=printable(name) or "custom",
            dataset_split=split,
            metric_type=task.metrics[metric][0],
            metric_name=task.metrics[metric][1],
            metric_value=round(value, 6),
        )
        for (split, metric), value in scores.items()
        if metric != "loss"
    ]


def _results(task: Task, scores: Mapping[tuple[str, str], float], results: Mapping[str, Any]) -> str:
    splits = list(dict.fromkeys(split for split, _ in scores))
    metrics = list(dict.fromkeys(metric for _, metric in scores))
    body = [
        [
            task.metrics[metric][1],
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


def fence(language: str, text: str) -> str:
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


def is_hub_id(name: str | None) -> bool:
    """Whether the name can only be meant for the Hub: of its form, and no folder here."""
    return (
        name is not None
        and re.fullmatch(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", name, re.ASCII) is not None
        and not Path(name).exists()
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
