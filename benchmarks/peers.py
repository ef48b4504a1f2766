"""The ways of training that throughput.py compares, except accumft's own (accumft_peer.py).

Each is a class: made once in a worker, it reads the data and the weights; `train(model, part, meter)` is one pass, and
starts and stops the meter around its loop. All of them: float32, dropout 0, fused AdamW, clipping at the same norm.
"""

import contextlib
import json
import tempfile
from typing import Any

import torch
from measuring import Job, Meter
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accumft.evaluation import inputs_of


class Peer:
    """The data set, tokenised, and the model, as a user of transformers loads them."""

    def __init__(self, job: Job) -> None:
        from datasets import Dataset
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

        self.job = job
        tokenizer = AutoTokenizer.from_pretrained(job.model)
        with open(job.texts, encoding="utf-8") as file:
            dataset = Dataset.from_list([json.loads(line) for line in file])

        def encode(columns: dict[str, list[Any]]) -> Any:
            return tokenizer(columns["text"], truncation=True, max_length=job.max_length)

        self.dataset = dataset.map(encode, batched=True, remove_columns=["text"])
        self.collate = DataCollatorWithPadding(tokenizer)
        config = AutoConfig.from_pretrained(job.model)
        config.num_labels, config.problem_type = job.num_labels, "single_label_classification"
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        torch.manual_seed(0)
        self.model = AutoModelForSequenceClassification.from_pretrained(job.model, config=config, dtype=torch.float32)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step on one process."""
        return self.job.effective_batch // (self.job.world * (self.job.micro_batch or 1))

    @property
    def cut(self) -> str:
        """How the effective batch is cut, in a word."""
        return f"{self.job.micro_batch} rows"

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.job.learning_rate, fused=True)

    def loader(self, part: dict[str, Any], share: bool) -> Any:
        """The part's rows in their (random) order, in micro-batches padded when fetched; `share`: this process's."""
        rows = part["rows"][self.job.rank :: self.job.world] if share else part["rows"]
        return DataLoader(self.dataset.select(rows), batch_size=self.job.micro_batch, collate_fn=self.collate)

    def train(self, model: Any, part: dict[str, Any], meter: Meter) -> None:
        raise NotImplementedError


def wrapped(model: torch.nn.Module, world: int) -> Any:
    return DistributedDataParallel(model) if world > 1 else model


def no_sync(model: Any, is_last: bool) -> Any:
    """All but the last micro-batch of a step leave the gradients where they are."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else contextlib.nullcontext()


class Bare(Peer):
    """Plain PyTorch over plain random micro-batches."""

    def train(self, model: Any, part: dict[str, Any], meter: Meter) -> None:
        optimizer, loader = self.optimizer(model), self.loader(part, share=True)
        running = wrapped(model, self.job.world).train()
        meter.start()
        for number, batch in enumerate(loader, start=1):
            is_last = number % self.accumulation == 0 or number == len(loader)
            with no_sync(running, is_last):
                (running(**batch).loss / self.accumulation).backward()
            if is_last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.job.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        meter.stop()


def train_on_windows(job: Job, model: Any, windows: list[list[Any]], optimizer: Any, meter: Meter) -> None:
    """Plain PyTorch over micro-batches that lie ready, collated, by step; exact, as accumft's step is."""
    running = model if isinstance(model, DistributedDataParallel) else wrapped(model, job.world)
    running.train()
    counts = torch.tensor([sum(len(batch["labels"]) for batch in window) for window in windows])
    if job.world > 1:
        torch.distributed.all_reduce(counts)
    meter.start()
    for window, count in zip(windows, counts.tolist(), strict=True):
        for number, batch in enumerate(window, start=1):
            with no_sync(running, number == len(window)):
                loss = F.cross_entropy(running(**inputs_of(batch)).logits, batch["labels"], reduction="sum")
                (loss * (job.world / count)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    meter.stop()


class Ceiling(Peer):
    """The same over micro-batches of nearly equal lengths from the whole data set: hardly a token is padded."""

    @property
    def cut(self) -> str:
        return f"{self.job.micro_batch} tokens"

    def train(self, model: Any, part: dict[str, Any], meter: Meter) -> None:
        windows = [[self.batch(rows) for rows in window] for window in part["windows"][self.job.rank]]
        train_on_windows(self.job, model, windows, self.optimizer(model), meter)

    def batch(self, rows: list[int]) -> Any:
        return self.collate([self.dataset[row] for row in rows])


class TransformersTrainer(Peer):
    """transformers.Trainer, everything that the race does not fix at its defaults."""

    strategy = "random"

    def train(self, model: Any, part: dict[str, Any], meter: Meter) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class Clock(TrainerCallback):
            def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
                meter.start()

            def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
                meter.stop()

        # Without this Trainer 5.24 multiplies loss and gradient by the accumulation steps: see exactness.py.
        model.accepts_loss_kwargs = False
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=self.job.micro_batch,
                gradient_accumulation_steps=self.accumulation,
                num_train_epochs=1,
                learning_rate=self.job.learning_rate,
                max_grad_norm=self.job.max_grad_norm,
                optim="adamw_torch_fused",
                train_sampling_strategy=self.strategy,
                use_cpu=True,
                save_strategy="no",
                report_to="none",
            )
            Trainer(
                model=model,
                args=arguments,
                train_dataset=self.dataset.select(part["rows"]),
                data_collator=self.collate,
                callbacks=[Clock()],
            ).train()


class TrainerGrouped(TransformersTrainer):
    """Trainer with group_by_length: throughput.py has drawn the order from its sampler, over the whole data set."""

    strategy = "sequential"


class AccelerateExample(Peer):
    """The loop of Accelerate's examples/by_feature/gradient_accumulation.py, with clipping as its guide has it."""

    def train(self, model: Any, part: dict[str, Any], meter: Meter) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        # The warm-up's Accelerator would hold on to its own state.
        AcceleratorState._reset_state()
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.accumulation)
        schedule = torch.optim.lr_scheduler.ConstantLR(plain := self.optimizer(model), factor=1.0)
        running, optimizer, loader, schedule = accelerator.prepare(
            model, plain, self.loader(part, share=False), schedule
        )
        running.train()
        meter.start()
        for batch in loader:
            with accelerator.accumulate(running):
                accelerator.backward(running(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(running.parameters(), self.job.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        meter.stop()


class Fabric(Peer):
    """Lightning Fabric as its page on gradient accumulation has it."""

    def train(self, model: Any, part: dict[str, Any], meter: Meter) -> None:
        from exactness_peers import fabric_module

        fabric = fabric_module().Fabric(accelerator="cpu", devices=self.job.world)
        fabric.launch()
        running, optimizer = fabric.setup(model, self.optimizer(model))
        loader = fabric.setup_dataloaders(self.loader(part, share=False))
        running.train()
        meter.start()
        for number, batch in enumerate(loader, start=1):
            is_last = number % self.accumulation == 0 or number == len(loader)
            with fabric.no_backward_sync(running, enabled=not is_last):
                fabric.backward(running(**batch).loss / self.accumulation)
            if is_last:
                fabric.clip_gradients(running, optimizer, max_norm=self.job.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        meter.stop()
