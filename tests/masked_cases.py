"""A tiny BERT on short texts: what the tests of masked language models share."""

from typing import Any

import torch
from accelerate import Accelerator
from tasks import flat

from accumft.data.blocks import to_blocks
from accumft.data.masking import Masking, MaskingCollator
from accumft.data.text import TextCollator
from accumft.data.windows import WindowDataset, lengths_of
from accumft.models import train_vocabulary
from accumft.plan import BatchSizes, Plan
from accumft.step import StepResult, train_step
from accumft.tasks.masked import MaskedLoss, model_inputs, num_masked
from accumft.tasks.masked_models import pack_masked, sample_of
from accumft.window_plan import WindowPlan

WORDS = ["fever", "cough", "chest", "pain", "severe", "mild", "chronic", "patient", "reports", "denies", "nausea"]
WORDS += ["pulmonary", "embolism", "发", "热", "三", "天"]
EFFECTIVE = 16


def texts_of(count: int) -> list[str]:
    """Texts of 3 to 11 words, none like another."""
    return [" ".join(WORDS[(i * 7 + j * (1 + i % 5)) % len(WORDS)] for j in range(3 + i % 9)) for i in range(count)]


def tiny_bert(dtype: torch.dtype = torch.float64, **config: Any) -> tuple[Any, Any]:
    """(model, tokenizer): 2 layers of 16, without dropout, its head tied to the word embeddings."""
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    pieces = train_vocabulary(texts_of(40))
    # These are in pieces.
    for word in ("pulmonary", "embolism", "severe"):
        pieces.pop(word, None)
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = BertTokenizer(vocab=vocabulary, do_lower_case=True, model_max_length=64)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64}
    settings = BertConfig(vocab_size=len(vocabulary), initializer_range=0.2, **{**sizes, **config})
    return BertForMaskedLM(settings).to(dtype), tokenizer


def blocks_of(tokenizer: Any, count: int, max_length: int = 64, **options: Any) -> Any:
    from datasets import Dataset

    documents = Dataset.from_dict({"row": list(range(1, count + 1)), "text": texts_of(count)})
    return to_blocks(documents, tokenizer, max_length, **options)


def collator(tokenizer: Any, probability: float = 0.3, seed: int = 3) -> MaskingCollator:
    return MaskingCollator(TextCollator(tokenizer), Masking.of(tokenizer, probability, seed), token_types=True)


class Flags:
    """The fields of a recipe that `pack_masked` reads."""

    padding_free, packing, torch_compile, pad_to_multiple_of = True, False, False, None


def train(
    accelerator: Accelerator, rows: int, limits: dict[str, int], *, packed: bool, selects: bool, separate: bool = False
) -> tuple[torch.Tensor, list[StepResult]]:
    """One epoch of SGD over so many blocks in float64, cut to the limits: (weights, results)."""
    model, tokenizer = tiny_bert()
    blocks = blocks_of(tokenizer, rows, packing=separate)
    collate = collator(tokenizer)
    plan = plan_of(len(blocks), accelerator.num_processes, **limits)
    padding_free = pack_masked(model.float(), tokenizer, collate, blocks, Flags()) if packed else None
    loss = MaskedLoss(model, collate(sample_of(blocks)) if selects else None)
    assert loss.selects == selects
    model = tiny_bert()[0].to(torch.float64) if not (packed or selects) else restored(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    window_plan = WindowPlan(plan, lengths_of(blocks), packed=packed)
    windows = WindowDataset(blocks, window_plan, padding_free or collate, accelerator.process_index)
    results = [train_step(accelerator, model, optimizer, window, loss, num_masked) for window in windows.loader()]
    return flat(accelerator.unwrap_model(model)), results


def restored(model: Any) -> Any:
    """The same object, with its hooks, in float64 with the weights that it had before it was rounded."""
    model.to(torch.float64)
    model.load_state_dict(tiny_bert()[0].state_dict())
    return model


def plan_of(num_blocks: int, processes: int, **limits: int) -> Plan:
    tokens, size = limits.get("tokens"), limits.get("rows")
    share = EFFECTIVE // processes
    batch = BatchSizes(EFFECTIVE, size, -(-share // size) if size else 1, processes, tokens)
    return Plan.of(num_blocks, batch, seed=3, num_train_epochs=2, max_steps=-1)


def reference(rows: int, separate: bool = False) -> tuple[torch.Tensor, list[float]]:
    """The same in plain PyTorch, each effective batch in one padded forward, with transformers' own mean loss."""
    model, tokenizer = tiny_bert()
    blocks = blocks_of(tokenizer, rows, packing=separate)
    plan = plan_of(len(blocks), 1, rows=EFFECTIVE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step in range(plan.total_steps):
        of_epoch = collator(tokenizer).in_epoch(step // plan.steps_per_epoch)
        batch = of_epoch(blocks[plan.effective_batch(step).tolist()])
        loss = model(**model_inputs(batch), labels=batch["targets"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return flat(model), losses
