"""Masked language modelling: adapts a model like BERT to texts of a field, before it is fine-tuned on few labels.

    accelerate launch recipes/masked_lm.py
    accelerate launch recipes/masked_lm.py --train_file notes.txt --output_dir outputs/notes

With no arguments it adapts MiniLM, which gets a new head, to 720 synthetic clinical notes, in two to three minutes on
two cores. The perplexity over a fixed mask of whole words in unseen notes falls from 34,000 to 50,000 (as the new head
is drawn) to 67 to 80 (seeds 42, 1, 2), where the frequency of the tokens alone gives 537.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list, set_seed

from accumft.cli import main
from accumft.compute import configure_compute
from accumft.data.blocks import to_blocks
from accumft.data.files import cells_of
from accumft.data.masking import Masking, MaskingCollator
from accumft.data.raw_text import Corpus, load_corpus
from accumft.data.text import TextCollator
from accumft.data.windows import Batch
from accumft.dry_run import RunPlan
from accumft.launch import leaves_no_state
from accumft.models import first_position, fitting_length, position_embedding, position_limit, train_vocabulary
from accumft.plan import Plan
from accumft.preflight import preflight
from accumft.recipe import TableRecipe, checked, refuse_unused
from accumft.report.text import printable
from accumft.run import Run, RunResult
from accumft.schedule import build_schedule
from accumft.step import train_step
from accumft.synthetic import load_synthetic
from accumft.tasks.masked import MaskedLoss, evaluate_masked, num_masked, unigram_perplexity
from accumft.tasks.masked_models import (
    build_small_masked_bert,
    check_separation,
    load_masked_lm,
    pack_masked,
    sample_of,
)
from accumft.tasks.masked_report import about, check_fields, fingerprint, report_masked, resolve_metric
from accumft.training import begin, set_up


@dataclass(kw_only=True, slots=True)
class MaskedLmRecipe(TableRecipe):
    """Go on with the pretraining of a masked language model on raw text. Without text of your own: synthetic notes."""

    model_name_or_path: str = "sentence-transformers/all-MiniLM-L6-v2"
    """Model folder or hub id. The default comes with the extra `demo`, without a network."""
    from_scratch: bool = False
    """Train a new small BERT with a vocabulary from the training texts, instead of model_name_or_path."""
    trust_remote_code: bool = False
    """Run code that a model on the hub brings along."""
    dropout: float | None = 0.0
    """Every dropout probability of the model, 0 to 1; None: as the model has them."""
    max_length: int = 256
    """Tokens of a block, special tokens included: a longer document becomes several, and nothing is lost. Never beyond
    the model's positions."""
    pad_to_multiple_of: int | None = None
    """Pad micro-batches to a multiple of this many tokens."""

    text_column: str = "text"
    """Column of the text, where the data is a table. Files named .txt are text: documents parted by blank lines."""
    line_by_line: bool = False
    """In .txt files each line is a document."""
    packing: bool = False
    """Join documents until a block is full, so that every step has as many tokens. Off: a block is of one document."""
    cross_document_attention: bool = False
    """With packing: tokens see those of other documents in their block, and positions run on."""
    mlm_probability: float = 0.15
    """Share of a block's tokens that are masked and predicted, above 0 and below 1; new ones in each epoch."""
    whole_word_mask: bool = True
    """Mask all pieces of a word together (in Chinese, of a character). Off: pieces on their own."""

    synthetic_language: Literal["en", "zh"] = "en"
    """Language of the synthetic notes."""
    synthetic_size: int = 720
    """Synthetic notes to train on; a quarter as many for validation, and for test."""

    num_train_epochs: float = 2.0
    """Passes over the training data; a fraction ends mid-epoch. Not used when max_steps is positive."""
    learning_rate: float = 5e-4
    """Peak learning rate. The default suits MiniLM with its new head; larger models with a head of their own want 5e-5,
    the new small BERT 1e-3."""
    output_dir: str = "outputs/masked_lm"
    """Folder for the model, the log and the report. An earlier run found there is moved aside, never overwritten."""


def load_data(recipe: MaskedLmRecipe) -> tuple[Corpus, str]:
    """The documents, and what they are in a line."""
    if recipe.train_file is not None or recipe.dataset_name is not None:
        return load_corpus(recipe), recipe.train_file or recipe.dataset_name or ""
    held_out = max(8, recipe.synthetic_size // 4)
    splits = load_synthetic(
        num_train=recipe.synthetic_size,
        num_validation=held_out,
        num_test=held_out,
        language=recipe.synthetic_language,
    )
    rows = {name: split.add_column("row", list(range(1, len(split) + 1))) for name, split in splits.items()}
    return Corpus(rows, []), f"synthetic clinical notes ({recipe.synthetic_language}) of accumft"


def build_model(recipe: MaskedLmRecipe, corpus: Corpus) -> tuple[Any, Any]:
    """(model, tokenizer), the same on every process."""
    set_seed(recipe.seed)
    if not recipe.from_scratch:
        return load_masked_lm(
            recipe.model_name_or_path, dropout=recipe.dropout, trust_remote_code=recipe.trust_remote_code
        )
    vocabulary = [train_vocabulary(cells_of(corpus.splits["train"], "text"))]
    broadcast_object_list(vocabulary)
    return build_small_masked_bert(vocabulary[0], dropout=recipe.dropout)


def loss_sum(losses: MaskedLoss, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Sum of the cross entropies of a micro-batch's masked tokens."""
    return losses(model, batch)


def num_items(batch: Batch) -> torch.Tensor | float:
    """What that sum is to be divided by: the masked tokens."""
    return num_masked(batch)


@leaves_no_state
def run(recipe: MaskedLmRecipe) -> RunResult:
    """Trains, evaluates, and leaves the model and its report in `recipe.output_dir`."""
    recipe = checked(recipe)
    check_fields(recipe)
    best = resolve_metric(recipe.metric_for_best_model, recipe.greater_is_better)
    accelerator, batch = begin(recipe)
    corpus, source = load_data(recipe)
    if "validation" not in corpus.splits:
        fields = ("early_stopping_patience", "metric_for_best_model", "greater_is_better", "eval_steps")
        refuse_unused(recipe, fields, "no validation data")

    model, tokenizer = build_model(recipe, corpus)
    configure_compute(model, recipe)
    max_length = fitting_length(recipe.max_length, position_limit(model, tokenizer), recipe.pad_to_multiple_of)
    blocks = {
        name: to_blocks(
            split,
            tokenizer,
            max_length,
            packing=recipe.packing,
            separate=not recipe.cross_document_attention,
            whole_words=recipe.whole_word_mask,
            show_progress=accelerator.is_main_process,
        )
        for name, split in corpus.splits.items()
    }
    steps = Plan.of(len(blocks["train"]), batch, recipe.seed, recipe.num_train_epochs, recipe.max_steps)
    schedule = build_schedule(recipe, steps.total_steps)
    collate = MaskingCollator(
        TextCollator(tokenizer, recipe.pad_to_multiple_of),
        Masking.of(tokenizer, recipe.mlm_probability, recipe.seed),
        token_types="token_type_ids" in tokenizer.model_input_names,
        first_position=first_position(position_embedding(model)),
    )
    fixed = replace(collate, masking=Masking.of(tokenizer, recipe.mlm_probability, seed=0))
    packed = pack_masked(model, tokenizer, collate, blocks["train"], recipe)
    if "segments" in blocks["train"].column_names:
        check_separation(model, collate, blocks["train"])
    criterion = MaskedLoss(model, None if recipe.torch_compile else collate(sample_of(blocks["train"])))
    accelerator.print("\n".join(about(corpus, blocks, source) + [f"note: {printable(note)}" for note in corpus.notes]))
    losses = partial(loss_sum, criterion)
    ready = set_up(recipe, accelerator, model, steps, schedule, blocks["train"], collate, losses, packed)
    if isinstance(ready, RunResult):
        return ready
    model, optimizer, scheduler, steps, windows, eval_limits = ready

    def scores(split: str) -> dict[str, float]:
        """Those of a split, over the fixed mask, which depends on the texts alone."""
        return evaluate_masked(accelerator, model, blocks[split], fixed, eval_limits, criterion)

    held_out = [name for name in blocks if name != "train"]
    before = {name: scores(name) for name in held_out}
    due = partial(scores, "validation") if "validation" in blocks else None
    data_seen = fingerprint(blocks)
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
        found = {name: scores(name) for name in held_out}
        unigram = {name: unigram_perplexity(blocks["train"], blocks[name], fixed) for name in held_out}
        base = None if recipe.from_scratch else recipe.model_name_or_path
        return report_masked(running, found, before, unigram, about(corpus, blocks, source), base)


def plan(recipe: MaskedLmRecipe) -> RunPlan:
    """What `run` would do: steps, learning rate, cut, memory."""
    planned: RunPlan = run(replace(recipe, dry_run=True)).plan
    return planned


if __name__ == "__main__":
    main(run, MaskedLmRecipe)
