"""Tiny encoder-decoders and pairs for the tests of sequence to sequence, on one process or several."""

from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from tasks import flat

from accumft.data.target_tokens import PairCollator
from accumft.data.windows import WindowDataset
from accumft.plan import BatchSizes, Plan
from accumft.step import StepResult, train_step
from accumft.tasks.seq2seq import count_targets, target_loss_sum
from accumft.window_plan import WindowPlan

VOCABULARY = 61
EFFECTIVE = 16
TAIL = 5
SMOOTHING = 0.1
FAMILIES = ("t5", "bart")


def tiny(family: str, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY) -> Any:
    """A model of two layers a side without dropout, whose weights are large enough to make its tokens differ."""
    from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    if family == "t5":
        config = T5Config(
            vocab_size=vocabulary,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
        return T5ForConditionalGeneration(config).to(dtype)
    config = BartConfig(
        vocab_size=vocabulary,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=64,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        init_std=0.3,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config).to(dtype)


def pairs(n: int, seed: int = 0) -> Dataset:
    """n rows of 2 to 12 source and 1 to 9 target tokens, of ids that no special token has."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high + 1, (1,), generator=generator))
        return torch.randint(3, 20, (size,), generator=generator).tolist()

    rows = [(ids(2, 12), ids(1, 9)) for _ in range(n)]
    return Dataset.from_dict(
        {
            "row": list(range(1, n + 1)),
            "input_ids": [source for source, _ in rows],
            "labels": [target for _, target in rows],
            "length": [len(source) + len(target) for source, target in rows],
        }
    )


def reference_loss(model: Any, dataset: Dataset, rows: Any, smoothing: float) -> torch.Tensor:
    """torch's own mean loss over some rows in one forward, with decoder inputs shifted here."""
    some = [dataset[int(i)] for i in rows]
    width, long = max(len(row["input_ids"]) for row in some), max(len(row["labels"]) for row in some)
    pad, start = model.config.pad_token_id, model.config.decoder_start_token_id
    ids = torch.tensor([row["input_ids"] + [pad] * (width - len(row["input_ids"])) for row in some])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in some])
    before = torch.tensor([[start, *row["labels"][:-1]] + [pad] * (long - len(row["labels"])) for row in some])
    labels = torch.tensor([row["labels"] + [-100] * (long - len(row["labels"])) for row in some])
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=before).logits
    return torch.nn.CrossEntropyLoss(label_smoothing=smoothing)(logits.transpose(1, 2), labels)


def reference_run(family: str, dataset: Dataset, batches: list[Any], dtype: torch.dtype) -> torch.Tensor:
    """Weights after SGD at a learning rate of 0.1 over whole effective batches."""
    model = tiny(family, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in batches:
        optimizer.zero_grad()
        reference_loss(model, dataset, rows, SMOOTHING).backward()
        optimizer.step()
    return flat(model)


def the_plan(processes: int, rows: int | None, tokens: int | None) -> Plan:
    """A full effective batch and one of TAIL."""
    batch = BatchSizes(EFFECTIVE, rows, 1, processes, tokens)
    return Plan.of(EFFECTIVE + TAIL, batch, seed=3, num_train_epochs=1, max_steps=-1)


def train(
    accelerator: Accelerator, family: str, rows: int | None, tokens: int | None, dtype: torch.dtype
) -> tuple[torch.Tensor, list[StepResult]]:
    """The same through the package's own plan, windows and step: (weights, results)."""
    dataset, model = pairs(EFFECTIVE + TAIL), tiny(family, dtype)
    plan, collate = the_plan(accelerator.num_processes, rows, tokens), PairCollator(model.config.pad_token_id, 4)
    windows = WindowDataset(
        dataset, WindowPlan(plan, torch.tensor(dataset["length"]).numpy()), collate, accelerator.process_index
    )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    results = [
        train_step(accelerator, model, optimizer, window, lambda m, b: target_loss_sum(m, b, SMOOTHING), count_targets)
        for window in windows.loader()
    ]
    return flat(accelerator.unwrap_model(model)), results


CUTS = [(16, None), (4, None), (3, None), (1, None), (None, 64), (None, 30)]
"""(rows, tokens) of a micro-batch, at most."""


class Letters:
    """Stands for a tokenizer: each id a word; what is special says nothing."""

    def batch_decode(self, tokens: torch.Tensor, skip_special_tokens: bool) -> list[str]:
        return [" ".join(f"w{i}" for i in row if i > 2) for row in tokens.tolist()]


SIZES = (1, 2, 7, 23)
EVALUATIONS = [(1, None), (3, None), (64, None), (None, 40)]


def speaking(family: str) -> Any:
    """A model whose texts differ from source to source: a new T5, whose embeddings are tied, would repeat its start."""
    from accumft.tasks.seq2seq_models import set_generation

    model = tiny(family, torch.float64)
    set_generation(model, 2 if family == "bart" else None, 6)
    if family == "t5":
        model.generation_config.suppress_tokens = [model.config.pad_token_id]
        with torch.no_grad():
            for block in model.decoder.block:
                block.layer[1].EncDecAttention.o.weight.mul_(8)
    return model


def generated(accelerator: Accelerator, family: str, n: int, rows: int | None, tokens: int | None) -> Any:
    """Everything that an evaluation of n rows finds."""
    from accumft.cut import Limits
    from accumft.tasks.seq2seq import generate_all

    model = speaking(family)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    collate = PairCollator(accelerator.unwrap_model(model).config.pad_token_id)
    found = generate_all(accelerator, model, Letters(), pairs(n), collate, Limits(rows, tokens))
    return SimpleNamespace(loss=found.loss, items=found.items, texts=found.texts, tokens=found.tokens)
