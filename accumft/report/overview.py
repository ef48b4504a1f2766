"""What is printed before step 1: the data, the batch, the steps, the hardware."""

from collections import Counter
from typing import Any

import numpy as np
from accelerate import Accelerator

from accumft.data.files import numbers_of
from accumft.data.splits import ClassificationData
from accumft.recipe import TrainingRecipe
from accumft.report.text import display_width, printable
from accumft.schedule import Schedule
from accumft.window_plan import WindowPlan

MAX_CLASSES_SHOWN = 50
# Steps whose cut is summed up before a run: a plan of a million rows takes seconds, and these say enough.
STEPS_LOOKED_AT = 512


def describe_data(data: ClassificationData, tokenized: dict[str, Any], max_length: int) -> str:
    """Rows, lengths, share of truncated texts, and the labels with their counts in the training data.

    Args:
        tokenized: by split, with the columns "length" and "truncated".
    """
    lines = []
    for split, dataset in tokenized.items():
        lengths = numbers_of(dataset, "length")
        tokens = "tokens of windows" if "windows" in dataset.column_names else "tokens"
        lines.append(
            f"{split}: {len(dataset):,} rows, {tokens} {lengths.mean():.0f} mean / {np.median(lengths):.0f} median / "
            f"{lengths.max()} max, {_describe_loss(dataset, lengths, max_length)}"
        )
    lines.append(describe_labels(data))
    lines += [f"note: {printable(note)}" for note in data.notes]
    return "\n".join(lines)


def _describe_loss(dataset: Any, lengths: np.ndarray, max_length: int) -> str:
    """What becomes of texts that are too long, and how much of all tokens is lost."""
    if "windows" in dataset.column_names:
        windows = numbers_of(dataset, "windows")
        return (
            f"in {windows.mean():.1f} windows of up to {max_length} on average, {np.mean(windows > 1):.1%} in several"
        )
    truncated, lost = np.mean(numbers_of(dataset, "truncated")), numbers_of(dataset, "lost")
    text = f"{truncated:.1%} truncated at {max_length}"
    if truncated and lost.min() >= 0:
        text += f", which loses {lost.sum() / (lengths.sum() + lost.sum()):.1%} of all tokens (--long_text windows)"
    return text


def describe_labels(data: ClassificationData) -> str:
    """The labels with their counts in the training data."""
    names, problem_type = data.labels.names, data.labels.problem_type
    labels = numbers_of(data.train, "labels")
    if problem_type == "regression":
        return f"regression: targets {labels.min():g} to {labels.max():g}, mean {labels.mean():g}"
    if problem_type == "single_label_classification":
        counts = Counter(labels.tolist())
        title = f"single-label classification, {len(names)} classes in training:"
    else:
        counts = Counter(dict(enumerate(labels.sum(axis=0).astype(int).tolist())))
        title = f"multi-label classification, {len(names)} labels in training:"
    shown = range(min(len(names), MAX_CLASSES_SHOWN))
    width = max(display_width(printable(names[index])) for index in shown)
    lines = [title]
    for index in shown:
        name = printable(names[index])
        lines.append(f"  {name}{' ' * (width - display_width(name))}  {counts[index]:>8,}")
    if len(names) > MAX_CLASSES_SHOWN:
        lines.append(f"  … and {len(names) - MAX_CLASSES_SHOWN} more")
    return "\n".join(lines)


def describe_run(
    recipe: TrainingRecipe, window_plan: WindowPlan, schedule: Schedule, accelerator: Accelerator, model: Any
) -> str:
    """The effective batch and how it is cut, steps, schedule, optimizer, precision and devices."""
    plan = window_plan.plan
    epochs = plan.total_steps / plan.steps_per_epoch
    passes = f"{epochs:.4g} of an epoch" if epochs < 1 else "an epoch" if epochs == 1 else f"{epochs:.4g} epochs"
    tail = plan.num_examples % plan.batch.effective_batch_size
    precision = {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    clip = "no clipping" if recipe.max_grad_norm is None else f"clipped at {recipe.max_grad_norm:g}"
    return "\n".join(
        (
            f"effective batch: {plan.batch}",
            f"cut: {_describe_cut(window_plan)}",
            f"steps: {plan.total_steps} = {passes} of {plan.steps_per_epoch} steps"
            + (f" (the last of an epoch has {tail} example{'s' if tail > 1 else ''})" if tail else ""),
            f"learning rate: {recipe.learning_rate:g} peak, {schedule.lr_scheduler_type}, "
            f"{schedule.warmup_steps} warm-up step{'' if schedule.warmup_steps == 1 else 's'}; {recipe.optim}, {clip}",
            f"model: {type(model).__name__}, {parameters / 1e6:.1f} M parameters",
            f"hardware: {accelerator.num_processes} x {accelerator.device.type}, {precision}",
        )
    )


def _describe_cut(window_plan: WindowPlan) -> str:
    steps = min(window_plan.plan.total_steps, window_plan.plan.steps_per_epoch, STEPS_LOOKED_AT)
    table = window_plan.table(max_steps=steps)
    counts = table.micro_batches.sum(axis=1)
    rows, tokens = table.largest
    way = "without padding" if window_plan.packed else "padded"
    return (
        f"{way}; in the first {steps:,} steps {counts.mean():.1f} micro-batches a step ({counts.min()} to "
        f"{counts.max()}), the largest of {rows * tokens:,} tokens, and "
        f"{table.padded_tokens.sum() / table.tokens.sum():.2f} tokens computed for each real one"
    )
