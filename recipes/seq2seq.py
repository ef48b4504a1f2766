"""Sequence to sequence: a text from a text, such as the note of a conversation, with T5, BART and their like.

    accelerate launch recipes/seq2seq.py
    accelerate launch recipes/seq2seq.py --train_file visits.csv --source_column dialogue --target_column note

With no arguments it makes a new T5 of 0.2 M weights and teaches it to write the note of a synthetic conversation
between doctor and patient, in two minutes on two cores, to a ROUGE-L of 0.71 to 0.75 (test and validation, seeds 42, 1
and 2) on combinations of findings that it has not seen, where copying the patient's first line has 0.35 to 0.36. It
finds the right findings (ROUGE-1 0.95 to 0.97) and often puts them in the wrong sentence: 4 to 12 % of the notes are
exact.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list, set_seed

from accumft.cli import main
from accumft.compute import configure_compute
from accumft.data.files import cells_of
from accumft.data.splits import read_splits
from accumft.data.target_tokens import PairCollator, tokenize_pairs
from accumft.data.targets import TargetData, load_targets
from accumft.data.windows import Batch
from accumft.dry_run import RunPlan
from accumft.errors import UserError
from accumft.launch import leaves_no_state
from accumft.models import fitting_length
from accumft.plan import Plan
from accumft.preflight import preflight
from accumft.recipe import TableRecipe, checked, refuse_unused
from accumft.run import Run, RunResult
from accumft.schedule import build_schedule
from accumft.step import train_step
from accumft.synthetic.dialogues import load_dialogues
from accumft.tasks.seq2seq import (
    Seq2SeqScores,
    count_targets,
    fingerprint,
    generate_all,
    score_texts,
    target_loss_sum,
)
from accumft.tasks.seq2seq_models import build_small_t5, load_seq2seq, set_generation, side_limits, train_pieces
from accumft.tasks.seq2seq_report import best_metric, check_fields, describe_pairs, report
from accumft.training import begin, set_up


@dataclass(kw_only=True, slots=True)
class Seq2SeqRecipe(TableRecipe):
    """Train an encoder-decoder that writes a text from a text. Without data of your own: conversations and notes."""

    model_name_or_path: str | None = None
    """Model folder or hub id of a T5, BART or the like. Unset: a small new T5 with pieces of the training texts."""
    trust_remote_code: bool = False
    """Run code that a model on the hub brings along."""
    d_model: int = 64
    """Width of the new T5, a multiple of 4."""
    num_layers: int = 2
    """Layers of the new T5's encoder, and of its decoder."""
    dropout: float | None = 0.0
    """Every dropout probability of the model, 0 to 1; None: as the model has them. At 0 nothing depends on the cut."""

    source_column: str = "dialogue"
    """Column of the texts that the model reads."""
    target_column: str = "note"
    """Column of the texts that it is to write."""
    source_prefix: str = ""
    """What stands before each source, such as "summarize: " for T5."""
    max_source_length: int = 512
    """Tokens of a source, special tokens included; longer ones are truncated. Never beyond the model's positions."""
    max_target_length: int = 128
    """Tokens of a target in training and in the loss of an evaluation; ROUGE is of the whole target."""
    pad_to_multiple_of: int | None = None
    """Pad both sides of micro-batches to a multiple of this many tokens."""
    label_smoothing: float = 0.0
    """Share of the target, 0 to 1, spread over the vocabulary in training. The loss of an evaluation is without."""

    predict_with_generate: bool = True
    """Generate texts in evaluations, for ROUGE; off: loss and perplexity alone."""
    num_beams: int | None = None
    """Beams of the generation. Unset: as the model has it, which is 1 in the new T5. Saved with the model."""
    max_new_tokens: int | None = None
    """Tokens of a generated text, at most. Unset: max_target_length. Saved with the model."""

    synthetic_language: Literal["en", "zh"] = "en"
    """Language of the synthetic conversations."""
    synthetic_size: int = 2000
    """Synthetic conversations to train on; 100 more for validation, and 100 for test."""

    effective_batch_size: int | None = 16
    """Examples per optimizer step, over all processes. None: per_device_train_batch_size x
    gradient_accumulation_steps x processes."""
    num_train_epochs: float = 7.0
    """Passes over the training data; a fraction ends mid-epoch. Not used when max_steps is positive."""
    learning_rate: float = 5e-3
    """Peak learning rate. The default suits the new T5; T5 wants 1e-4 to 1e-3 with AdamW, BART 1e-5 to 5e-5."""
    output_dir: str = "outputs/seq2seq"
    """Folder for the model, the log and the report. An earlier run found there is moved aside, never overwritten."""


def load_data(recipe: Seq2SeqRecipe) -> tuple[TargetData, str]:
    """The pairs of texts, and what they are in a line."""
    if recipe.train_file is None and recipe.dataset_name is None:
        held_out = min(100, recipe.synthetic_size // 4)
        tables = load_dialogues(
            num_train=recipe.synthetic_size, num_held_out=held_out, language=recipe.synthetic_language
        )
        return load_targets(tables, recipe), f"synthetic conversations ({recipe.synthetic_language}) of accumft"
    return load_targets(read_splits(recipe), recipe), recipe.train_file or recipe.dataset_name or ""


def build_model(recipe: Seq2SeqRecipe, data: TargetData) -> tuple[Any, Any]:
    """(model, tokenizer), the same on every process."""
    set_seed(recipe.seed)
    if recipe.model_name_or_path is not None:
        model, tokenizer = load_seq2seq(
            recipe.model_name_or_path, dropout=recipe.dropout, trust_remote_code=recipe.trust_remote_code
        )
    else:
        texts = (text for side in ("source", "target") for text in cells_of(data.splits["train"], side))
        pieces = [train_pieces(texts)]
        broadcast_object_list(pieces)
        model, tokenizer = build_small_t5(
            pieces[0], d_model=recipe.d_model, num_layers=recipe.num_layers, dropout=recipe.dropout
        )
    set_generation(model, recipe.num_beams, recipe.max_new_tokens or recipe.max_target_length)
    return model, tokenizer


def loss_sum(label_smoothing: float, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Sum of the losses of a micro-batch over its target tokens."""
    return target_loss_sum(model, batch, label_smoothing)


def num_items(batch: Batch) -> torch.Tensor | float:
    """What that sum is to be divided by: target tokens."""
    return count_targets(batch)


@leaves_no_state
def run(recipe: Seq2SeqRecipe) -> RunResult:
    """Trains, evaluates, and leaves the model and its report in `recipe.output_dir`."""
    recipe = checked(recipe)
    check_fields(recipe)
    best = best_metric(recipe)
    accelerator, batch = begin(recipe)
    data, source = load_data(recipe)
    if "validation" not in data.splits:
        fields = ("early_stopping_patience", "metric_for_best_model", "greater_is_better", "eval_steps")
        refuse_unused(recipe, fields, "no validation data")
    steps = Plan.of(len(data.splits["train"]), batch, recipe.seed, recipe.num_train_epochs, recipe.max_steps)
    schedule = build_schedule(recipe, steps.total_steps)

    model, tokenizer = build_model(recipe, data)
    configure_compute(model, recipe)
    multiple, (of_source, of_target) = recipe.pad_to_multiple_of, side_limits(model.config)
    max_source = fitting_length(recipe.max_source_length, of_source, multiple)
    max_target = fitting_length(recipe.max_target_length, of_target, multiple)
    if recipe.predict_with_generate and of_target is not None and model.generation_config.max_new_tokens >= of_target:
        raise UserError(
            f"--max_new_tokens {model.generation_config.max_new_tokens}: the model has {of_target} positions"
        )
    tokenized = {
        name: tokenize_pairs(split, tokenizer, recipe.source_prefix, max_source, max_target)
        for name, split in data.splits.items()
    }
    accelerator.print(describe_pairs(data, tokenized, (max_source, max_target), model, accelerator.mixed_precision))
    collate = PairCollator(tokenizer.pad_token_id, multiple)
    losses = partial(loss_sum, recipe.label_smoothing)
    ready = set_up(recipe, accelerator, model, steps, schedule, tokenized["train"], collate, losses)
    if isinstance(ready, RunResult):
        return ready
    model, optimizer, scheduler, steps, windows, eval_limits = ready

    def scores(split: str) -> Seq2SeqScores | None:
        """The scores of a split on the main process; None elsewhere."""
        generating = recipe.predict_with_generate
        found = generate_all(accelerator, model, tokenizer, tokenized[split], collate, eval_limits, generating)
        if not accelerator.is_main_process:
            return None
        return score_texts(found, list(cells_of(data.splits[split], "target")))

    def evaluate() -> dict[str, float]:
        found = scores("validation")
        return found.scalars if found else {}

    due = evaluate if "validation" in tokenized else None
    data_seen = fingerprint(tokenized, data)
    with Run(recipe, accelerator, model, optimizer, scheduler, steps, tokenizer, best, due, data_seen) as running:
        preflight(accelerator, model, optimizer, windows, losses, running.memory)
        for window in running.windows(windows):
            result = train_step(
                accelerator, model, optimizer, window, losses, num_items, recipe.max_grad_norm, running.memory
            )
            if result.stepped:
                scheduler.step()
            running.after_step(result)
        running.load_best_model()
        found = {name: scores(name) for name in tokenized if name != "train"}
        shown = {name: value for name, value in found.items() if value}
        return report(running, data, shown, source, recipe.model_name_or_path)


def plan(recipe: Seq2SeqRecipe) -> RunPlan:
    """What `run` would do: steps, learning rate, cut, memory."""
    planned: RunPlan = run(replace(recipe, dry_run=True)).plan
    return planned


if __name__ == "__main__":
    main(run, Seq2SeqRecipe)
