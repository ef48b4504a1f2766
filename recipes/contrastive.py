"""Embeddings from pairs of texts that mean the same: InfoNCE over the whole effective batch, cosine or triplet loss.

    accelerate launch recipes/contrastive.py
    accelerate launch recipes/contrastive.py --train_file faq.csv --text_column question answer

With no arguments it fine-tunes MiniLM on 720 synthetic pairs of clinical questions with hard negatives, in under two
minutes of one core. On 180 questions about diseases and drugs that it has not seen, recall@1 goes from 0.62 (the
untouched model) to a range of 0.93 to 0.95, and MRR from 0.76 to 0.96 to 0.97 (seeds 42, 1, 2).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list, set_seed

from accumft.cached_step import cached_step, trial_loss
from accumft.cli import main
from accumft.compute import configure_compute
from accumft.data.pair_batches import PairCollator, PairWindows, examples_of, tokenize_texts
from accumft.data.pairs import PairData, load_pair_data, read_pair_tables
from accumft.data.text import TextCollator
from accumft.dry_run import RunPlan
from accumft.evaluation import predict
from accumft.launch import leaves_no_state
from accumft.models import fitting_length, position_limit, train_vocabulary
from accumft.plan import Plan
from accumft.preflight import preflight
from accumft.recipe import TableRecipe, checked, refuse_unused
from accumft.run import Run, RunResult
from accumft.schedule import build_schedule
from accumft.synthetic.pairs import load_synthetic_pairs
from accumft.tasks.contrastive import Contrast
from accumft.tasks.embeddings import (
    Embedder,
    Pooling,
    build_small_encoder,
    embed,
    load_encoder,
    pooling_of,
    write_sentence_transformer_files,
)
from accumft.tasks.packed_encoder import pack_encoder
from accumft.tasks.pair_scores import (
    PairScores,
    best_metric,
    check_fields,
    contrast_of,
    describe_pairs,
    fingerprint,
    report,
    score,
)
from accumft.training import begin, set_up


@dataclass(kw_only=True, slots=True)
class ContrastiveRecipe(TableRecipe):
    """Fine-tune a transformer that embeds texts. Without data of your own: synthetic pairs of clinical questions."""

    model_name_or_path: str = "sentence-transformers/all-MiniLM-L6-v2"
    """Model folder or hub id. The default comes with the extra `demo`, without a network."""
    from_scratch: bool = False
    """Train a new small BERT with a vocabulary from the training texts, instead of model_name_or_path."""
    trust_remote_code: bool = False
    """Run code that a model on the hub brings along."""
    dropout: float | None = 0.0
    """Every dropout probability of the model, 0 to 1; None: as the model has them."""
    max_length: int = 256
    """Tokens of a text, special tokens included; longer ones are truncated. Never beyond the model's positions."""
    pooling: Pooling | None = None
    """How the vectors of a text's tokens become one: their mean, or the first token's (cls). Unset: what the model's
    own 1_Pooling/config.json says, else mean."""
    normalize: bool = True
    """Whether the saved model gives vectors of length 1. Losses and metrics are of cosines, whatever this says."""

    text_column: tuple[str, ...] = ("anchor", "positive")
    """Columns of the two texts of a pair."""
    negative_column: tuple[str, ...] = ()
    """Columns of hard negatives: texts that are near to the anchor and do not mean the same. A cell may be empty."""
    score_column: str | None = None
    """Column of the pairs' scores, -1 to 1, for the loss cosine."""
    test_split: float | None = None
    """Share of the training pairs, 0 to 1, held out for the test where no test data is given, sharing no text with
    training and validation. Unset: none."""

    loss: Literal["infonce", "cosine", "triplet"] = "infonce"
    """infonce: the positive among all positives and negatives of the effective batch; triplet: the positive nearer than
    the pair's own hard negative; cosine: squared difference of the pair's cosine and its score."""
    temperature: float = 0.05
    """What infonce divides cosines by."""
    symmetric: bool = True
    """Whether infonce also asks each positive for its anchor."""
    margin: float = 0.2
    """Difference of cosines that the loss triplet asks for."""

    synthetic_size: int = 720
    """Synthetic pairs to train on; a quarter as many for validation, and for test."""

    effective_batch_size: int | None = 64
    """Pairs per optimizer step, over all processes: the pool of infonce's negatives. However it is cut, all of them
    meet. With None as in other recipes."""
    num_train_epochs: float = 1.0
    """Passes over the training data; a fraction ends mid-epoch. Not used when max_steps is positive."""
    learning_rate: float = 1e-4
    """Peak learning rate. The default suits MiniLM; larger models want 1e-5 to 5e-5, the new small BERT 1e-3."""
    output_dir: str = "outputs/contrastive"
    """Folder for the model, the log and the report. An earlier run found there is moved aside, never overwritten."""


def load_data(recipe: ContrastiveRecipe) -> tuple[PairData, str]:
    """The pairs, and what they are in a line."""
    notes: list[str] = []
    if recipe.train_file is not None or recipe.dataset_name is not None:
        tables = read_pair_tables(recipe, notes)
        return load_pair_data(tables, recipe, notes), recipe.train_file or recipe.dataset_name or ""
    tables = load_synthetic_pairs(recipe.synthetic_size, max(8, recipe.synthetic_size // 4))
    with_negatives = replace(recipe, negative_column=("negative",))
    return load_pair_data(tables, with_negatives, notes), "synthetic pairs of clinical questions of accumft"


def build_model(recipe: ContrastiveRecipe, data: PairData) -> tuple[Any, Any]:
    """(model, tokenizer), the same on every process."""
    set_seed(recipe.seed)
    if not recipe.from_scratch:
        return load_encoder(
            recipe.model_name_or_path, dropout=recipe.dropout, trust_remote_code=recipe.trust_remote_code
        )
    vocabulary = [train_vocabulary(data.splits["train"].texts)]
    broadcast_object_list(vocabulary)
    return build_small_encoder(vocabulary[0], dropout=recipe.dropout)


def loss_sum(contrast: Contrast, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the losses of an effective batch, from the embeddings of all its texts."""
    return contrast.loss_sum(embeddings, labels)


def num_items(contrast: Contrast, labels: torch.Tensor) -> float:
    """What that sum is to be divided by."""
    return contrast.num_items(labels)


@leaves_no_state
def run(recipe: ContrastiveRecipe) -> RunResult:
    """Trains, evaluates, and leaves the model and its report in `recipe.output_dir`."""
    recipe = checked(recipe)
    check_fields(recipe)
    best = best_metric(recipe.metric_for_best_model, recipe.greater_is_better, recipe.loss)
    accelerator, batch = begin(recipe)
    data, source = load_data(recipe)
    if "validation" not in data.splits:
        fields = ("early_stopping_patience", "metric_for_best_model", "greater_is_better", "eval_steps")
        refuse_unused(recipe, fields, "no validation data")
    steps = Plan.of(len(data.splits["train"]), batch, recipe.seed, recipe.num_train_epochs, recipe.max_steps)
    schedule = build_schedule(recipe, steps.total_steps)

    model, tokenizer = build_model(recipe, data)
    pooling = recipe.pooling or ("mean" if recipe.from_scratch else pooling_of(recipe.model_name_or_path))
    configure_compute(model, recipe)
    max_length = fitting_length(recipe.max_length, position_limit(model, tokenizer), None)
    show = accelerator.is_main_process
    tokenized = {name: tokenize_texts(split, tokenizer, max_length, show) for name, split in data.splits.items()}
    accelerator.print(describe_pairs(data, tokenized, max_length, steps, recipe.loss))
    examples = examples_of(data.splits["train"], tokenized["train"], packed=True)
    packed = pack_encoder(model, tokenizer, examples, recipe, pooling, accelerator.device.type)
    if packed is None:
        examples = examples_of(data.splits["train"], tokenized["train"], packed=False)
    embedding = partial(embed, pooling)
    trial, collate = partial(trial_loss, embedding), PairCollator(tokenizer)
    ready = set_up(recipe, accelerator, model, steps, schedule, examples, collate, trial, packed)
    if isinstance(ready, RunResult):
        return ready
    model, optimizer, scheduler, steps, windows, eval_limits = ready
    windows = PairWindows.of(windows)
    contrast = contrast_of(recipe, data.splits["train"]).to(accelerator.device)

    def scores(name: str) -> PairScores | None:
        """The scores of a split on the main process; None elsewhere."""
        embedder = Embedder(accelerator.unwrap_model(model), pooling)
        found = predict(accelerator, embedder, tokenized[name], TextCollator(tokenizer), eval_limits)
        split = data.splits[name]
        in_step = steps.batch.effective_batch_size
        return score(found, split, contrast_of(recipe, split), in_step) if accelerator.is_main_process else None

    def all_scores() -> dict[str, PairScores]:
        found = {name: scores(name) for name in data.splits if name != "train"}
        return {name: value for name, value in found.items() if value}

    def evaluate() -> dict[str, float]:
        found = scores("validation")
        return found.scalars if found else {}

    untouched = all_scores()
    due = evaluate if "validation" in data.splits else None
    data_seen = fingerprint(data, examples)
    with Run(recipe, accelerator, model, optimizer, scheduler, steps, tokenizer, best, due, data_seen) as running:
        preflight(accelerator, model, optimizer, windows, trial, running.memory)
        for window in running.windows(windows):
            result = cached_step(
                accelerator,
                model,
                optimizer,
                window,
                embedding,
                partial(loss_sum, contrast),
                partial(num_items, contrast),
                recipe.max_grad_norm,
                running.memory,
            )
            if result.stepped:
                scheduler.step()
            running.after_step(result)
        running.load_best_model()
        if running.is_main:
            write_sentence_transformer_files(
                running.output_dir,
                pooling=pooling,
                dimensions=accelerator.unwrap_model(model).config.hidden_size,
                max_length=max_length,
                normalize=recipe.normalize,
            )
        base = None if recipe.from_scratch else recipe.model_name_or_path
        return report(running, data, all_scores(), untouched, source, base)


def plan(recipe: ContrastiveRecipe) -> RunPlan:
    """What `run` would do: steps, learning rate, cut, memory."""
    planned: RunPlan = run(replace(recipe, dry_run=True)).plan
    return planned


if __name__ == "__main__":
    main(run, ContrastiveRecipe)
