"""accumft in the race of throughput.py: the text classification recipe's own pieces and its loop."""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import Job, Meter
from peers import train_on_windows

from accumft.cut import CostModel
from accumft.data.text import TextCollator, tokenize
from accumft.data.windows import WindowDataset, lengths_of
from accumft.launch import make_accelerator, prepare
from accumft.losses import ClassificationLoss
from accumft.models import load_sequence_classifier
from accumft.optim import build_optimizer
from accumft.packing import pack
from accumft.plan import Plan, resolve_batch_sizes
from accumft.preflight import preflight
from accumft.probe import with_token_budget
from accumft.run import Run
from accumft.schedule import build_schedule, build_scheduler
from accumft.step import train_step
from accumft.window_plan import WindowPlan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from text_cls import TextClsRecipe, loss_sum, num_items


class Prepared(NamedTuple):
    """What the recipe's loop needs."""

    recipe: TextClsRecipe
    accelerator: Any
    model: Any
    optimizer: Any
    scheduler: Any
    plan: Plan
    windows: WindowDataset


class Accumft:
    """The recipe's load_data, build_model and loop, without its evaluation."""

    def __init__(self, job: Job) -> None:
        from datasets import Dataset

        self.job = job
        id2label = {index: str(index) for index in range(job.num_labels)}
        torch.manual_seed(0)
        self.model, self.tokenizer = load_sequence_classifier(
            job.model, id2label=id2label, problem_type="single_label_classification", dropout=0.0
        )
        with open(job.texts, encoding="utf-8") as file:
            dataset = Dataset.from_list([json.loads(line) for line in file])
        self.dataset = tokenize(dataset, self.tokenizer, job.max_length)
        self.collate = TextCollator(self.tokenizer)
        criterion = ClassificationLoss("single_label_classification")
        self.losses, self.num_items = partial(loss_sum, criterion), partial(num_items, criterion)
        self.batch = resolve_batch_sizes(
            job.effective_batch,
            None,
            None,
            num_processes=job.world,
            max_tokens_per_micro_batch=job.max_tokens_per_micro_batch,
        )

    @property
    def cut(self) -> str:
        """The token budget: the one measured last, where it is "auto"."""
        return f"{self.batch.max_tokens_per_micro_batch} tokens"

    def prepared(self, model: Any, rows: list[int], output_dir: str) -> "Prepared":
        """The recipe's steps up to its loop, in its order."""
        recipe = TextClsRecipe(
            learning_rate=self.job.learning_rate,
            max_grad_norm=self.job.max_grad_norm,
            num_train_epochs=1.0,
            effective_batch_size=self.job.effective_batch,
            padding_free=False if self.job.peer == "accumft_padded" else None,
            output_dir=output_dir,
        )
        accelerator = make_accelerator(
            gradient_accumulation_steps=self.batch.gradient_accumulation_steps, mixed_precision="no"
        )
        dataset = self.dataset.select(rows)
        plan = Plan.of(len(dataset), self.batch, recipe.seed, recipe.num_train_epochs, recipe.max_steps)
        optimizer = build_optimizer(model, recipe)
        scheduler = build_scheduler(optimizer, build_schedule(recipe, plan.total_steps))
        cost = CostModel.of(model.config, accelerator.device.type)
        packed = pack(model, self.tokenizer, dataset, recipe)
        model, optimizer = prepare(accelerator, model, optimizer)
        lengths = lengths_of(dataset)
        plan = with_token_budget(plan, accelerator, model, dataset, lengths, self.collate, self.losses)
        self.batch = plan.batch
        window_plan = WindowPlan(plan, lengths, cost, packed=packed is not None)
        windows = WindowDataset(dataset, window_plan, packed or self.collate, accelerator.process_index)
        return Prepared(recipe, accelerator, model, optimizer, scheduler, plan, windows)

    def train(self, model: Any, part: dict[str, Any], meter: Meter) -> None:
        with tempfile.TemporaryDirectory() as folder:
            ready = self.prepared(model, part["rows"], f"{folder}/run")
            best = ("accuracy", True)
            with Run(*ready[:6], self.tokenizer, best) as running:
                preflight(ready.accelerator, ready.model, ready.optimizer, ready.windows, self.losses, running.memory)
                meter.start()
                for window in running.windows(ready.windows):
                    result = train_step(
                        ready.accelerator,
                        ready.model,
                        ready.optimizer,
                        window,
                        self.losses,
                        self.num_items,
                        ready.recipe.max_grad_norm,
                        running.memory,
                    )
                    if result.stepped:
                        ready.scheduler.step()
                    if window.step + 1 == ready.plan.total_steps:
                        meter.stop()  # the others save no checkpoint
                    running.after_step(result)


class BareOnAccumft(Accumft):
    """Plain PyTorch on accumft's very micro-batches, collated beforehand: what is left is accumft's overhead."""

    def train(self, model: Any, part: dict[str, Any], meter: Meter) -> None:
        ready = self.prepared(model, part["rows"], "unused")
        batches = [window.micro_batches for window in ready.windows.loader()]
        train_on_windows(self.job, ready.model, batches, ready.optimizer, meter)
