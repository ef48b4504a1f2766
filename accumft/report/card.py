"""The model card of a text classification."""

from collections.abc import Mapping, Sequence
from typing import Any

from accumft.data.long_text import DEFAULT_OVERLAP
from accumft.metrics import METRIC_NAMES
from accumft.report.page import Table, Task, markdown, task_card
from accumft.report.text import format_number

# The Hub's name of each metric, and how it is written out.
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
    """`task_card` of a text classification, where the arguments not named here are described.

    Args:
        problem_type: Hugging Face's name of the problem type.
        per_class: a dict a class: name, precision, recall, f1, support; empty for regression.
        labels: the label names, by id.
    """
    return task_card(
        task=classification_task(problem_type, recipe, per_class, labels),
        model_name=model_name,
        recipe=recipe,
        results=results,
        data=data,
        base_model=base_model,
        language=language,
        license=license,
        tags=tags,
        plots=plots,
    )


def classification_task(
    problem_type: str, recipe: Mapping[str, Any], per_class: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> Task:
    """What a card says of a text classification; the arguments are those of `model_card`."""
    text = "a pair of texts" if _is_pair(recipe) else "a text"
    does = {
        "single_label_classification": f"gives {text} one of {len(labels)} classes",
        "multi_label_classification": f"gives {text} those of {len(labels)} labels that apply",
        "regression": f"gives {text} {'a number' if len(labels) == 1 else f'{len(labels)} numbers'}",
    }[problem_type]
    note = ""
    if problem_type == "multi_label_classification":
        note = f"A label applies where its score is {recipe.get('threshold', 0.5)} or more."
    in_windows = recipe.get("long_text") == "windows"
    if in_windows:
        note += (
            f" Scored on windows of {recipe.get('max_length')} tokens that overlap; the "
            f"{recipe.get('window_pooling')} of whose logits decides, as in the code above."
        )
    columns = ["precision", "recall", "f1", "support"]
    rows = [
        [str(i), markdown(row["name"]), *(format_number(row[column]) for column in columns)]
        for i, row in enumerate(per_class)
    ]
    header = ["Id", "Class", "Precision", "Recall", "F1", "Examples"]
    return Task(
        pipeline_tag="text-classification",
        does=does,
        code=_code_of_windows(problem_type, recipe) if in_windows else _code(problem_type, recipe),
        note=note.strip(),
        metrics={name: _HUB_METRICS[name] for name in (*METRIC_NAMES[problem_type], "loss")},
        tables=[Table(title="By class", header=header, rows=rows, text_columns=2)],
    )


def _code(problem_type: str, recipe: Mapping[str, Any]) -> str:
    max_length = recipe.get("max_length")
    arguments = "truncation=True" + (f", max_length={max_length:d}" if isinstance(max_length, int) else "")
    if problem_type == "multi_label_classification":
        arguments += ", top_k=None"
    text = (
        '{"text": "The first text.", "text_pair": "The second text."}'
        if _is_pair(recipe)
        else '"The text to classify."'
    )
    return (
        "from transformers import pipeline\n\n"
        'classifier = pipeline("text-classification", model="path/to/this/folder")\n'
        f"print(classifier({text}, {arguments}))\n"
    )


def _code_of_windows(problem_type: str, recipe: Mapping[str, Any]) -> str:
    """A pipeline reads the first window alone."""
    overlap = recipe.get("window_overlap")
    pooled = "logits.mean(dim=0)" if recipe.get("window_pooling") == "mean" else "logits.amax(dim=0)"
    scores = {
        "single_label_classification": "pooled.softmax(dim=0)",
        "multi_label_classification": "pooled.sigmoid()",
        "regression": "pooled",
    }[problem_type]
    return (
        "import torch\n"
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n\n"
        'folder = "path/to/this/folder"\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "model = AutoModelForSequenceClassification.from_pretrained(folder)\n"
        f"length = {recipe.get('max_length')}\n"
        + (
            f"overlap = min({DEFAULT_OVERLAP}, (length - tokenizer.num_special_tokens_to_add()) // 2)\n"
            if overlap is None
            else f"overlap = {overlap}\n"
        )
        + 'arguments = {"truncation": True, "max_length": length, "stride": overlap, "padding": True}\n'
        "windows = tokenizer(\n"
        '    ["The text to classify."], return_overflowing_tokens=True, return_tensors="pt", **arguments\n'
        ")\n"
        'windows.pop("overflow_to_sample_mapping")\n'
        "with torch.no_grad():\n"
        "    logits = model(**windows).logits\n"
        f"pooled = {pooled}\n"
        f"print(dict(zip(model.config.id2label.values(), {scores}.tolist())))\n"
    )


def _is_pair(recipe: Mapping[str, Any]) -> bool:
    columns = recipe.get("text_column")
    return isinstance(columns, list | tuple) and len(columns) == 2
