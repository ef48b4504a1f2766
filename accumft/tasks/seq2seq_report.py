"""What sequence-to-sequence training adds around its loop: checks of its fields, remarks on the data, the report."""

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accumft.data.files import cells_of, numbers_of
from accumft.data.targets import TargetData
from accumft.errors import UserError
from accumft.finishing import leave_report, without_folders
from accumft.metrics.rouge import TYPES, check_installed
from accumft.outputs import check_output_dir
from accumft.recipe import refuse_unused
from accumft.report.page import Task
from accumft.report.text import metrics_table, printable
from accumft.run import Run, RunResult
from accumft.tasks.classification import SPLIT_PREFIX
from accumft.tasks.seq2seq import Seq2SeqScores, copying_baseline

GREATER_IS_BETTER = {
    "rougeL": True,
    "rouge1": True,
    "rouge2": True,
    "exact_match": True,
    "loss": False,
    "perplexity": False,
}
"""What may pick the best model, the task's own first."""
NOT_GENERATED = ("loss", "perplexity")
_NAMES = {
    "rouge1": ("rouge", "ROUGE-1"),
    "rouge2": ("rouge", "ROUGE-2"),
    "rougeL": ("rouge", "ROUGE-L"),
    "exact_match": ("exact_match", "Exact match"),
    "perplexity": ("perplexity", "Perplexity a target token"),
    "loss": ("loss", "Loss a target token"),
}


def check_fields(recipe: Any) -> None:
    """Raises a `UserError` where the fields of recipes/seq2seq.py do not fit each other: none is silently ignored."""
    if recipe.train_file is None and recipe.dataset_name is None:
        if recipe.validation_file or recipe.test_file:
            raise UserError("--validation_file and --test_file need --train_file or --dataset_name")
        names = ("encoding", "delimiter", "quotechar", "column_names", "dataset_config_name", "validation_split")
        refuse_unused(recipe, (*names, "on_bad_row"), "the synthetic conversations")
        refuse_unused(recipe, ("source_column", "target_column"), "the synthetic conversations")
    else:
        refuse_unused(recipe, ("synthetic_language", "synthetic_size"), "data of your own")
    if recipe.dataset_name is not None:
        refuse_unused(recipe, ("encoding", "delimiter", "quotechar", "column_names"), "--dataset_name")
    elif recipe.dataset_config_name is not None:
        refuse_unused(recipe, ("dataset_config_name",), "files")
    if recipe.model_name_or_path is None:
        refuse_unused(recipe, ("trust_remote_code",), "a model made from scratch")
        if recipe.d_model < 4 or recipe.d_model % 4:
            raise UserError(f"--d_model {recipe.d_model}: must be a multiple of 4, the number of heads")
        if recipe.num_layers < 1:
            raise UserError(f"--num_layers {recipe.num_layers}: must be at least 1")
    else:
        refuse_unused(recipe, ("d_model", "num_layers"), "--model_name_or_path")
    for name, least in (("max_source_length", 4), ("max_target_length", 4), ("num_beams", 1), ("max_new_tokens", 1)):
        value = getattr(recipe, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    if not recipe.predict_with_generate:
        refuse_unused(recipe, ("num_beams", "max_new_tokens"), "--no_predict_with_generate")
    else:
        check_installed()
    if recipe.padding_free:
        raise UserError("--padding_free: not possible with an encoder and a decoder; leave it out")
    if not recipe.report_to:
        refuse_unused(recipe, ("run_name",), "no tracker (--report_to)")
    elif Path(recipe.run_name).is_absolute() or ".." in Path(recipe.run_name).parts:
        raise UserError(f"--run_name {recipe.run_name!r}: names a folder outside --output_dir; leave out the path")
    inputs = (recipe.train_file, recipe.validation_file, recipe.test_file, recipe.model_name_or_path)
    check_output_dir(recipe.output_dir, inputs)


def best_metric(recipe: Any) -> tuple[str, bool]:
    """(metric that picks the best model, whether larger is better)."""
    known = [name for name in GREATER_IS_BETTER if recipe.predict_with_generate or name in NOT_GENERATED]
    metric = known[0] if recipe.metric_for_best_model is None else recipe.metric_for_best_model.removeprefix("eval_")
    if metric not in known:
        if metric in GREATER_IS_BETTER:
            raise UserError(f"--metric_for_best_model {metric}: needs generated texts, --predict_with_generate")
        nearest = difflib.get_close_matches(metric, known, n=1, cutoff=0.0)[0]
        raise UserError(f"--metric_for_best_model {metric}: did you mean {nearest}? There are {', '.join(known)}")
    return metric, GREATER_IS_BETTER[metric] if recipe.greater_is_better is None else recipe.greater_is_better


def describe_pairs(
    data: TargetData, tokenized: Mapping[str, Any], limits: tuple[int, int], model: Any, mixed_precision: str
) -> str:
    """Rows, lengths, what truncation loses, and remarks, in lines.

    Args:
        limits: tokens of a source and of a target.
    """
    lines = []
    for split, dataset in tokenized.items():
        sides = []
        for side, column, limit in (("source", "input_ids", limits[0]), ("target", "labels", limits[1])):
            sizes = np.array(
                [len(row) for block in dataset.select_columns([column]).iter(1000) for row in block[column]]
            )
            lost = numbers_of(dataset, f"{side}_lost")
            text = f"{side} {sizes.mean():.0f} mean / {np.median(sizes):.0f} median / {sizes.max()} max tokens"
            text += f", {np.mean(lost > 0):.1%} truncated at {limit}"
            if lost.any():
                text += f", which loses {lost.sum() / (sizes.sum() + lost.sum()):.1%} of all (--max_{side}_length)"
            sides.append(text)
        lines.append(f"{split}: {len(dataset):,} rows; {'; '.join(sides)}")
    lines += [f"note: {printable(note)}" for note in data.notes]
    eos = model.generation_config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    if tokenized["train"][0]["labels"][-1] not in ends:
        lines.append(
            "note: the tokenizer does not end a target with the model's end-of-text token, so the model does not learn "
            "to stop"
        )
    if mixed_precision == "fp16" and "t5" in model.config.model_type:
        lines.append("note: T5 was trained in bfloat16 and tends to overflow in fp16: --mixed_precision bf16")
    return "\n".join(lines)


def report(run: Run, data: TargetData, scores: Mapping[str, Seq2SeqScores], source: str, base: str | None) -> RunResult:
    """Prints the scores beside those of copying the first line, and writes all_results.json, predictions.jsonl, the
    curves and the model card.

    Args:
        scores: by split, "validation" and "test"; empty on processes other than the main one.
        source: what the data is, in a line.
        base: hub id or path that the weights came from; None: from scratch.
    """
    results: dict[str, float] = {}
    for split, found in scores.items():
        prefix = SPLIT_PREFIX[split]
        results |= {f"{prefix}_{name}": value for name, value in found.scalars.items()}
        if found.texts:
            pairs = data.splits[split]
            copied = copying_baseline(list(cells_of(pairs, "source")), list(cells_of(pairs, "target")))
            results |= {f"{prefix}_first_line_{name}": value for name, value in copied.items()}

    def draw(folder: Path) -> Sequence[str]:
        (folder / "predictions.jsonl").unlink(missing_ok=True)
        for split, found in scores.items():
            prefix = f"{SPLIT_PREFIX[split]}_first_line_"
            copied = {
                f"first line copied: {n.removeprefix(prefix)}": results[n] for n in results if n.startswith(prefix)
            }
            print(f"\n{split} ({len(data.splits[split])} rows)\n{metrics_table({**found.scalars, **copied})}")
            if found.texts:
                write_texts(folder / "predictions.jsonl", split, data.splits[split], found)
                if len(set(found.texts)) == 1 and len(found.texts) > 1:
                    print(f"note: every row of {split} gets the same text: the model has learnt nothing yet")
        return ()

    rows = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    about = [without_folders("train_file", source), f"{rows} rows"]
    return leave_report(run, seq2seq_task(run.recipe_values), results, about, base, draw)


def write_texts(path: Path, split: str, pairs: Any, found: Seq2SeqScores) -> None:
    """Adds a line of JSON a row: split, row, text_sha256 (of the source), prediction, rouge1, rouge2, rougeL.

    The generated text is written, which says what its source says; source and target are not.
    """
    with path.open("a", encoding="utf-8") as file:
        rows = zip(cells_of(pairs, "row"), cells_of(pairs, "source"), found.texts, found.rouge, strict=True)
        for row, source, text, rouge in rows:
            values = {
                "split": split,
                "row": row,
                "text_sha256": hashlib.sha256(source.encode()).hexdigest()[:16],
                "prediction": text,
                **{name: round(float(value), 6) for name, value in zip(TYPES, rouge, strict=True)},
            }
            file.write(json.dumps(values, ensure_ascii=False) + "\n")


def seq2seq_task(recipe: Mapping[str, Any]) -> Task:
    """What a card says of the task."""
    prefix = recipe.get("source_prefix") or ""
    generated = bool(recipe.get("predict_with_generate"))
    return Task(
        pipeline_tag="summarization",
        does="writes a text from a text",
        code=(
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
            'folder = "path/to/this/folder"\n'
            "tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)\n"
            f"text = {json.dumps(prefix, ensure_ascii=False)} + "
            '"The text to begin from."\n'
            f"inputs = tokenizer(text, truncation=True, max_length={recipe.get('max_source_length')}, "
            'return_tensors="pt")\n'
            "tokens = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask)\n"
            "print(tokenizer.decode(tokens[0], skip_special_tokens=True))\n"
        ),
        note="The folder's generation_config.json has the number of beams and of new tokens that it was scored with. "
        "A generated text may say what its source does not: it is a draft for somebody who knows the source.",
        metrics={name: _NAMES[name] for name in _NAMES if generated or name in NOT_GENERATED},
    )
