"""Text classification: one label, several labels, or a number for each text, or pair of texts.

    accelerate launch recipes/text_cls.py
    accelerate launch recipes/text_cls.py --train_file notes.csv --text_column note --label_column department

With no arguments it fine-tunes MiniLM on 720 synthetic clinical notes of eight departments, in about a minute on two
cores, to a test accuracy of 0.84 to 0.90 (seeds 42, 1, 2), where TF-IDF with logistic regression reaches 0.56 to 0.61.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list, set_seed

from accumft.agreement import check_agreement
from accumft.cli import main
from accumft.compute import configure_compute
from accumft.data.files import cells_of, numbers_of
from accumft.data.long_text import collator_of, overlap_of
from accumft.data.splits import ClassificationData, load_classification_data, read_splits
from accumft.data.text import check_end_tokens, tokenize
from accumft.data.windows import Batch
from accumft.dry_run import RunPlan
from accumft.evaluation import logits_of, predict
from accumft.launch import leaves_no_state
from accumft.losses import ClassificationLoss
from accumft.models import (
    build_small_bert,
    fitting_length,
    load_sequence_classifier,
    position_limit,
    train_vocabulary,
)
from accumft.packing import pack
from accumft.plan import Plan
from accumft.preflight import preflight
from accumft.recipe import TableRecipe, checked, refuse_unused
from accumft.report.overview import describe_data
from accumft.run import Run, RunResult
from accumft.schedule import build_schedule
from accumft.step import train_step
from accumft.synthetic import load_synthetic
from accumft.tasks.classification import Scores, best_metric, check_fields, fingerprint, loss_of, report, score
from accumft.training import begin, set_up


@dataclass(kw_only=True, slots=True)
class TextClsRecipe(TableRecipe):
    """Fine-tune a transformer that classifies texts. Without data of your own: synthetic clinical notes."""

    model_name_or_path: str = "sentence-transformers/all-MiniLM-L6-v2"
    """Model folder or hub id. The default comes with the extra `demo`, without a network."""
    from_scratch: bool = False
    """Train a new small BERT with a vocabulary from the training texts, instead of model_name_or_path."""
    trust_remote_code: bool = False
    """Run code that a model on the hub brings along."""
    dropout: float | None = 0.0
    """Every dropout probability of the model, 0 to 1; None: as the model has them. At 0 nothing depends on the cut, and
    short runs learn faster; long ones may want None."""
    max_length: int = 512
    """Tokens of a text, special tokens included; longer ones are truncated. Never beyond the model's positions."""
    long_text: Literal["truncate", "windows"] = "truncate"
    """What becomes of a text of more than max_length tokens: its beginning alone, or several windows of it whose
    logits are pooled into one prediction."""
    window_overlap: int | None = None
    """Tokens that neighbouring windows of a text share. Unset: 32, or half a window where that is less."""
    window_pooling: Literal["mean", "max"] = "mean"
    """How the logits of a text's windows become one."""
    pad_to_multiple_of: int | None = None
    """Pad micro-batches to a multiple of this many tokens."""

    text_column: tuple[str, ...] = ("text",)
    """Column of the text; two for pairs of texts."""
    label_column: tuple[str, ...] = ("label",)
    """Column of the label; several for columns of 0 and 1, one a label."""
    label_delimiter: str | None = None
    """What separates the labels in a cell, such as "|", where a text may have several."""
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    """Unset: seen from the labels. Texts and whole numbers are classes, lists and 0/1 columns several labels, decimal
    numbers regression."""
    threshold: float = 0.5
    """Probability, 0 to 1, from which a label of several is predicted."""

    loss: Literal["cross_entropy", "focal"] = "cross_entropy"
    """Loss of a classification; a regression has squared error."""
    focal_gamma: float = 2.0
    """Exponent of the focal loss."""
    class_weights: tuple[str, ...] = ()
    """"balanced", or a weight for each class in the order of their names."""
    pos_weight: tuple[str, ...] = ()
    """"balanced", or a weight for the positives of each label, where a text may have several."""
    label_smoothing: float = 0.0
    """Share of the target, 0 to 1, spread over all classes."""

    synthetic_language: Literal["en", "zh"] = "en"
    """Language of the synthetic notes."""
    synthetic_size: int = 720
    """Synthetic notes to train on; a quarter as many for validation, and for test."""

    num_train_epochs: float = 1.0
    """Passes over the training data; a fraction ends mid-epoch. Not used when max_steps is positive. One suits the
    synthetic notes, a few hundred rows of your own want 3 to 10."""
    learning_rate: float = 3e-4
    """Peak learning rate. The default suits MiniLM; larger models want 1e-5 to 5e-5, the new small BERT 1e-3."""
    output_dir: str = "outputs/text_cls"
    """Folder for the model, the log and the report. An earlier run found there is moved aside, never overwritten."""


def load_data(recipe: TextClsRecipe) -> tuple[ClassificationData, str]:
    """The texts with their labels, and what they are in a line."""
    if recipe.train_file is None and recipe.dataset_name is None:
        held_out = max(8, recipe.synthetic_size // 4)
        splits = load_synthetic(
            num_train=recipe.synthetic_size,
            num_validation=held_out,
            num_test=held_out,
            language=recipe.synthetic_language,
        )
        source = f"synthetic clinical notes ({recipe.synthetic_language}) of accumft"
    else:
        splits = read_splits(recipe)
        source = recipe.train_file or recipe.dataset_name or ""
    return load_classification_data(splits, recipe), source


def build_model(recipe: TextClsRecipe, data: ClassificationData) -> tuple[Any, Any]:
    """(model, tokenizer), the same on every process."""
    set_seed(recipe.seed)
    id2label, problem_type = data.labels.id2label, data.labels.problem_type
    if not recipe.from_scratch:
        return load_sequence_classifier(
            recipe.model_name_or_path,
            id2label=id2label,
            problem_type=problem_type,
            dropout=recipe.dropout,
            trust_remote_code=recipe.trust_remote_code,
        )
    columns = [name for name in ("text", "text_pair") if name in data.train.column_names]
    texts = (text for name in columns for text in cells_of(data.train, name))
    vocabulary = [train_vocabulary(texts)]
    broadcast_object_list(vocabulary)
    return build_small_bert(vocabulary[0], id2label=id2label, problem_type=problem_type, dropout=recipe.dropout)


def loss_sum(criterion: ClassificationLoss, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Sum of the losses of a micro-batch."""
    return criterion(logits_of(model, batch), batch["labels"])


def num_items(criterion: ClassificationLoss, batch: Batch) -> torch.Tensor | float:
    """What that sum is to be divided by."""
    return criterion.num_items(batch["labels"])


@leaves_no_state
def run(recipe: TextClsRecipe) -> RunResult:
    """Trains, evaluates, and leaves the model and its report in `recipe.output_dir`."""
    recipe = checked(recipe)
    check_fields(recipe)
    accelerator, batch = begin(recipe)
    data, source = load_data(recipe)
    data_seen = fingerprint(data)
    # Before the processes send each other tensors, whose shapes depend on the labels.
    check_agreement(accelerator, {f"data: {name}": value for name, value in data_seen.items()})
    if data.labels.problem_type != "multi_label_classification":
        refuse_unused(recipe, ("threshold",), data.labels.problem_type)
    if data.validation is None:
        fields = ("early_stopping_patience", "metric_for_best_model", "greater_is_better", "eval_steps")
        refuse_unused(recipe, fields, "no validation data")
    steps = Plan.of(len(data.train), batch, recipe.seed, recipe.num_train_epochs, recipe.max_steps)
    schedule = build_schedule(recipe, steps.total_steps)
    criterion = loss_of(recipe, data).to(accelerator.device)
    validation = recipe.validation_file or f"the validation rows of {source}"
    best = best_metric(recipe.metric_for_best_model, recipe.greater_is_better, data, validation)

    model, tokenizer = build_model(recipe, data)
    configure_compute(model, recipe)
    max_length = fitting_length(recipe.max_length, position_limit(model, tokenizer), recipe.pad_to_multiple_of)
    overlap = overlap_of(recipe, tokenizer, max_length, data)
    tokenized = {
        name: tokenize(split, tokenizer, max_length, accelerator.is_main_process, overlap)
        for name, split in data.splits.items()
    }
    names = {split: getattr(recipe, f"{split}_file") or f"{split} of {source}" for split in tokenized}
    check_end_tokens(model, tokenizer, tokenized, names)
    packed = pack(model, tokenizer, tokenized["train"], recipe) if overlap is None else None
    accelerator.print(describe_data(data, tokenized, max_length))
    collate = collator_of(recipe, tokenizer)
    losses = partial(loss_sum, criterion)
    ready = set_up(recipe, accelerator, model, steps, schedule, tokenized["train"], collate, losses, packed)
    if isinstance(ready, RunResult):
        return ready
    model, optimizer, scheduler, steps, windows, eval_limits = ready

    def scores(split: str) -> Scores | None:
        """The scores of a split on the main process; None elsewhere."""
        logits = predict(accelerator, model, tokenized[split], collate, eval_limits)
        references = numbers_of(data.splits[split], "labels")
        if not accelerator.is_main_process:
            return None
        return score(logits, references, criterion, data.labels.names, recipe.threshold)

    def evaluate() -> dict[str, float]:
        found = scores("validation")
        return found.scalars if found else {}

    due = evaluate if "validation" in tokenized else None
    with Run(recipe, accelerator, model, optimizer, scheduler, steps, tokenizer, best, due, data_seen) as running:
        preflight(accelerator, model, optimizer, windows, losses, running.memory)
        for window in running.windows(windows):
            result = train_step(
                accelerator,
                model,
                optimizer,
                window,
                losses,
                partial(num_items, criterion),
                recipe.max_grad_norm,
                running.memory,
            )
            if result.stepped:
                scheduler.step()
            running.after_step(result)
        running.load_best_model()
        found = {name: scores(name) for name in tokenized if name != "train"}
        base = None if recipe.from_scratch else recipe.model_name_or_path
        return report(running, data, {name: value for name, value in found.items() if value}, source, base)


def plan(recipe: TextClsRecipe) -> RunPlan:
    """What `run` would do: steps, learning rate, cut, memory."""
    planned: RunPlan = run(replace(recipe, dry_run=True)).plan
    return planned


if __name__ == "__main__":
    main(run, TextClsRecipe)
