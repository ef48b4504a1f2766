"""What a run of a masked language model checks beforehand, and what it leaves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accumft.data.blocks import digest_of_blocks
from accumft.data.raw_text import Corpus, is_raw
from accumft.data.windows import lengths_of
from accumft.errors import UserError
from accumft.finishing import leave_report, without_folders
from accumft.outputs import check_output_dir
from accumft.recipe import refuse_unused
from accumft.report.page import Task
from accumft.run import Run, RunResult
from accumft.tasks.classification import SPLIT_PREFIX

METRICS = {
    "perplexity": ("perplexity", "Perplexity"),
    "accuracy": ("accuracy", "Accuracy on masked tokens"),
    "loss": ("loss", "Loss"),
}
"""By name: (the Hub's name, the name written out)."""

TABLE_FIELDS = ("delimiter", "quotechar", "column_names")


def resolve_metric(name: str | None, greater_is_better: bool | None) -> tuple[str, bool]:
    """(metric that picks the best model, whether larger is better): unset, the perplexity.

    Raises:
        UserError: no metric of this task.
    """
    metric = "perplexity" if name is None else name.removeprefix("eval_")
    if metric not in METRICS:
        raise UserError(f"--metric_for_best_model {name}: must be one of {', '.join(METRICS)}")
    return metric, metric == "accuracy" if greater_is_better is None else greater_is_better


def fingerprint(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """What training data this is, by name: a run resumes with the same only, and every process must have the same.

    "validation" is of the validation data: where that is another, the best model is picked anew.
    """
    found = {"blocks": len(blocks["train"]), "digest": digest_of_blocks(blocks["train"])}
    return found | ({"validation": digest_of_blocks(blocks["validation"])} if "validation" in blocks else {})


def check_fields(recipe: Any) -> None:
    """Raises a `UserError` where the fields of a run do not fit each other: none is silently ignored.

    Args:
        recipe: a checked recipe with the fields of recipes/masked_lm.py.
    """
    files = (recipe.train_file, recipe.validation_file, recipe.test_file)
    if recipe.train_file is None and recipe.dataset_name is None:
        if recipe.validation_file or recipe.test_file:
            raise UserError("--validation_file and --test_file need --train_file or --dataset_name")
        names: tuple[str, ...] = (
            "text_column",
            "encoding",
            *TABLE_FIELDS,
            "on_bad_row",
            "dataset_config_name",
            "validation_split",
        )
        names += ("line_by_line", "max_train_samples", "max_eval_samples")
        refuse_unused(recipe, names, "the synthetic notes")
    else:
        refuse_unused(recipe, ("synthetic_language", "synthetic_size"), "data of your own")
        if all(is_raw(path) for path in files if path is not None) and recipe.dataset_name is None:
            refuse_unused(recipe, ("text_column", *TABLE_FIELDS, "on_bad_row"), "files of nothing but text (.txt)")
        if not any(is_raw(path) for path in files):
            refuse_unused(recipe, ("line_by_line",), "no .txt file")
    if recipe.from_scratch:
        refuse_unused(recipe, ("model_name_or_path", "trust_remote_code"), "--from_scratch")
    if not recipe.packing:
        refuse_unused(recipe, ("cross_document_attention",), "no --packing")
    if not 0 < recipe.mlm_probability < 1:
        raise UserError(f"--mlm_probability {recipe.mlm_probability}: must be above 0 and below 1")
    check_tracker_name(recipe)
    check_output_dir(recipe.output_dir, (*files, recipe.model_name_or_path))


def check_tracker_name(recipe: Any) -> None:
    """Raises a `UserError` for a `run_name` that no tracker takes."""
    if not recipe.report_to:
        refuse_unused(recipe, ("run_name",), "no tracker (--report_to)")
    elif Path(recipe.run_name).is_absolute() or ".." in Path(recipe.run_name).parts:
        # Trackers that keep files join it to the output folder.
        raise UserError(f"--run_name {recipe.run_name!r}: names a folder outside --output_dir; leave out the path")


def about(corpus: Corpus, blocks: Mapping[str, Any], source: str) -> list[str]:
    """What the model is trained and scored on, lines: for the log and the model card."""
    lines = [without_folders("train_file", source)]
    for split, found in blocks.items():
        lengths = lengths_of(found)
        lines.append(
            f"{split}: {len(corpus.splits[split]):,} documents, {int(lengths.sum()):,} tokens in {len(found):,} blocks "
            f"of {lengths.mean():.0f} mean / {int(np.median(lengths))} median / {lengths.max()} max"
        )
    return lines


def report_masked(
    run: Run,
    scores: Mapping[str, Mapping[str, float]],
    before: Mapping[str, Mapping[str, float]],
    unigram: Mapping[str, float],
    data: Sequence[str],
    base: str | None,
) -> RunResult:
    """Prints the metrics and writes all_results.json, the plots and the model card.

    Args:
        scores: metrics by split, "validation" and "test".
        before: the same before the first step.
        unigram: perplexities of `unigram_perplexity` by split.
        data: what the model was trained and scored on, lines.
        base: hub id or path that the weights came from; None: from scratch.
    """
    results: dict[str, float] = {}
    for split, found in scores.items():
        prefix = SPLIT_PREFIX[split]
        results |= {f"{prefix}_{name}": value for name, value in found.items()}
        results |= {f"{prefix}_{name}_before": before[split][name] for name in ("perplexity", "accuracy")}
        results[f"{prefix}_perplexity_unigram"] = unigram[split]
        if run.is_main:
            print(
                f"{split}: perplexity {found['perplexity']:,.2f} over {found['masked_tokens']:,} masked tokens, "
                f"{found['accuracy']:.1%} of them right; before the training {before[split]['perplexity']:,.2f}; by "
                f"the frequency of tokens alone {unigram[split]:,.2f}"
            )
    task = Task(
        pipeline_tag="fill-mask",
        does="fills in masked words of texts like those it was trained on, and is a start for other tasks on them",
        code=(
            "from transformers import pipeline\n\n"
            'fill = pipeline("fill-mask", model="path/to/this/folder")\n'
            'print(fill(f"The first {fill.tokenizer.mask_token} of a text."))\n'
        ),
        note="`recipes/text_cls.py --model_name_or_path path/to/this/folder` trains a classifier that starts from it.",
        metrics=METRICS,
    )
    return leave_report(run, task, results, data, base)
