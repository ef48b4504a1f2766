"""What a run of a causal language model checks before it begins, and leaves at its end: scores, model card."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accumft.adapters import FIELDS, check_adapter_fields, describe_adapter, is_adapted, write_merged
from accumft.data.cache import digest_of_tokens
from accumft.data.chat import IGNORED
from accumft.data.chat_table import Truncation
from accumft.data.conversations import ConversationData
from accumft.data.files import numbers_of
from accumft.errors import UserError
from accumft.finishing import leave_report, without_folders
from accumft.outputs import check_output_dir
from accumft.recipe import refuse_unused
from accumft.report.page import Table, Task, markdown
from accumft.report.text import metrics_table, printable
from accumft.run import Run, RunResult
from accumft.tasks.causal_generation import Answer
from accumft.tasks.classification import SPLIT_PREFIX

METRICS = {"loss": False, "perplexity": False, "exact_match": True}
"""Metrics of the task, and whether larger is better."""
_ROWS_IN_CARD = 8
_CHARACTERS_IN_CARD = 400
OWN_DATA = ("data_format", "messages_column", "prompt_column", "completion_column", "text_column")


def check_fields(recipe: Any) -> None:
    """Raises a `UserError` where the fields of recipes/causal_lm.py do not fit each other: none is silently ignored.

    Args:
        recipe: a checked recipe.
    """
    if recipe.train_file is None and recipe.dataset_name is None:
        if recipe.validation_file or recipe.test_file:
            raise UserError("--validation_file and --test_file need --train_file or --dataset_name")
        names = ("encoding", "delimiter", "quotechar", "column_names", "dataset_config_name", "validation_split")
        refuse_unused(recipe, (*names, *OWN_DATA), "the synthetic questions")
    else:
        refuse_unused(recipe, ("synthetic_size",), "data of your own")
    if recipe.model_name_or_path is None:
        refuse_unused(recipe, ("trust_remote_code", "chat_template"), "a new model (no --model_name_or_path)")
        refuse_unused(recipe, ("use_peft",), "a new model, whose weights would stay random")
    elif recipe.learning_rate == type(recipe).__dataclass_fields__["learning_rate"].default:
        raise UserError(
            "--learning_rate: the default is for a new model; give one, such as 2e-5 for all weights of "
            f"{recipe.model_name_or_path}, or 2e-4 for an adapter (--use_peft)"
        )
    if recipe.use_peft:
        check_adapter_fields(recipe)
    else:
        refuse_unused(recipe, FIELDS, "no adapter (--use_peft)")
    for name, minimum in (("logits_chunk_size", 1), ("num_generations", 0), ("max_new_tokens", 1)):
        value = getattr(recipe, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name} {value}: must be at least {minimum}")
    if not recipe.num_generations:
        refuse_unused(recipe, ("max_new_tokens",), "--num_generations 0")
    if not recipe.report_to:
        refuse_unused(recipe, ("run_name",), "no tracker (--report_to)")
    elif Path(recipe.run_name).is_absolute() or ".." in Path(recipe.run_name).parts:
        raise UserError(f"--run_name {recipe.run_name!r}: names a folder outside --output_dir; leave out the path")
    files = (recipe.train_file, recipe.validation_file, recipe.test_file, recipe.model_name_or_path)
    check_output_dir(recipe.output_dir, (*files, recipe.chat_template))


def best_metric(recipe: Any) -> tuple[str, bool]:
    """(metric that picks the best model, whether larger is better)."""
    name = (recipe.metric_for_best_model or "loss").removeprefix("eval_")
    if name not in ("loss", "perplexity"):
        raise UserError(f"--metric_for_best_model {name}: must be one of loss, perplexity")
    greater = recipe.greater_is_better
    return name, METRICS[name] if greater is None else greater


def fingerprint(tokenized: Mapping[str, Any]) -> dict[str, Any]:
    """What training data this is, by name: a run resumes with the same only, and every process must have the same.

    "validation" is of the validation data: where that is another, the best model is picked anew.
    """
    found = {"rows": len(tokenized["train"]), "digest": digest_of_tokens(tokenized["train"])}
    return found | ({"validation": digest_of_tokens(tokenized["validation"])} if "validation" in tokenized else {})


def describe_data(
    data: ConversationData,
    tokenized: Mapping[str, Any],
    left_out: Mapping[str, Truncation],
    max_length: int,
    model: Any,
) -> str:
    """Rows, tokens, target tokens, and what `max_length` leaves out, in numbers."""
    lines = []
    for split, dataset in tokenized.items():
        lengths, targets, lost = numbers_of(dataset, "length"), _targets(dataset), left_out[split]
        lines.append(
            f"{split}: {len(dataset):,} rows of {data.kind}, tokens {lengths.mean():.0f} mean / "
            f"{np.median(lengths):.0f} median / {lengths.max()} max, {targets:,} of {lengths.sum():,} are learnt; "
            f"{lost.rows:,} rows truncated at {max_length}, which loses {lost.tokens:,} tokens, {lost.targets:,} of "
            "them to be learnt"
        )
    lines += [f"note: {printable(note)}" for note in data.notes]
    if is_adapted(model):
        lines.append(describe_adapter(model))
    return "\n".join(lines)


def _targets(dataset: Any) -> int:
    return sum(sum(label != IGNORED for label in row) for block in dataset.iter(1_000) for row in block["labels"])


def report(
    run: Run,
    data: ConversationData,
    scores: Mapping[str, Mapping[str, float]],
    before: Mapping[str, float],
    answers: Sequence[Answer],
    source: str,
    model: Any,
    processor: Any,
) -> RunResult:
    """Prints the scores and writes all_results.json, the merged model, the curves and the model card.

    Args:
        scores: by split, "validation" and "test"; empty on processes other than the main one.
        before: the validation scores before the first step; may be empty.
        answers: of the test rows, or else the validation rows; may be empty.
        model: unwrapped, the best one.
    """
    recipe = run.recipe_values
    results = {f"{SPLIT_PREFIX[split]}_{name}": v for split, found in scores.items() for name, v in found.items()}
    results |= {f"before_{name}": value for name, value in before.items()}
    shown = "test" if "test" in data.splits else "validation"
    if answers:
        results[f"{SPLIT_PREFIX[shown]}_exact_match"] = sum(answer.is_exact for answer in answers) / len(answers)
        results["generations"] = len(answers)

    def draw(folder: Path) -> Sequence[str]:
        for split, found in scores.items():
            table = scores_table(found, before if split == "validation" else {}, answers if split == shown else ())
            print(f"\n{split} ({len(data.splits[split])} rows)\n{table}")
        if recipe["merge_adapter"]:
            write_merged(model, processor, folder / "merged")
        return ()

    rows = [
        [markdown(_short(text)) for text in (answer.prompt, answer.expected, answer.generated)]
        for answer in answers[:_ROWS_IN_CARD]
    ]
    task = Task(
        pipeline_tag="text-generation",
        does="continues a text" if data.kind == "text" else "answers a message",
        code=_code(data, recipe),
        note="It is an adapter: its base model is loaded with it." if recipe["use_peft"] else "",
        metrics={
            "perplexity": ("perplexity", "Perplexity per target token"),
            "exact_match": ("exact_match", "Exact match of generated answers"),
            "loss": ("loss", "Loss per target token"),
        },
        tables=[Table(title="Generated", header=["Prompt", "Expected", "Generated"], rows=rows, text_columns=3)],
        library_name="peft" if recipe["use_peft"] else "transformers",
    )
    sizes = ", ".join(f"{len(examples):,} {name}" for name, examples in data.splits.items())
    about = [without_folders("train_file", source), f"{sizes} rows ({data.kind.replace('_', ' and ')})"]
    result = leave_report(run, task, results, about, recipe["model_name_or_path"], draw)
    is_own = recipe["train_file"] is not None or recipe["dataset_name"] is not None
    if run.is_main and rows and is_own:
        print(
            f"note: its README.md shows prompts and expected answers of the data, word by word ({len(rows)} rows of "
            f"{shown}): look at it before you share it, or --num_generations 0"
        )
    return result


def scores_table(scores: Mapping[str, float], before: Mapping[str, float], answers: Sequence[Answer]) -> str:
    """The scores of a split, each beside that before training, and of how many rows the exact match is.

    Args:
        before: may be empty.
        answers: of rows of the split; may be empty.
    """
    shown: dict[str, float] = {}
    for name in sorted(scores, key=lambda name: name != "perplexity"):
        shown[name] = scores[name]
        if name in before:
            shown[f"{name} before training"] = before[name]
    if answers:
        exact = sum(answer.is_exact for answer in answers) / len(answers)
        shown[f"exact match of {len(answers)} generated row{'s'[: len(answers) > 1]}"] = exact
    return metrics_table(shown)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _CHARACTERS_IN_CARD else text[:_CHARACTERS_IN_CARD] + " …"


def _code(data: ConversationData, recipe: Mapping[str, Any]) -> str:
    asked = '[{"role": "user", "content": "Your question."}]' if data.kind != "text" else '"The beginning of a text"'
    call = f"print(generator({asked}, max_new_tokens={recipe['max_new_tokens']}, do_sample=False))\n"
    if not recipe["use_peft"]:
        return (
            "from transformers import pipeline\n\n"
            f'generator = pipeline("text-generation", model="path/to/this/folder")\n{call}'
        )
    # By peft: transformers 5.24 loads an adapter too, but drops the magnitudes of DoRA with no more than a warning.
    return (
        "from peft import AutoPeftModelForCausalLM\n"
        "from transformers import AutoTokenizer, pipeline\n\n"
        'folder = "path/to/this/folder"\n'
        "model = AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()\n"
        'generator = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))\n'
        f"{call}"
    )
