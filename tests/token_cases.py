"""What the tests of entity recognition share: a small recipe, sentences, and a tiny model with its reference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from token_cls import TokenClsRecipe

from accumft.data.tags import Sentence

LABELS = ["O", "B-a", "I-a", "B-b", "I-b"]


def small_recipe(output_dir: Path, **fields: Any) -> TokenClsRecipe:
    """48 sentences in windows of at most 24 tokens, 16 windows a step."""
    defaults: dict[str, Any] = {
        "from_scratch": True,
        "max_length": 24,
        "stride": 8,
        "effective_batch_size": 16,
        "learning_rate": 1e-3,
        "num_train_epochs": 1.0,
        "output_dir": str(output_dir),
    }
    if fields.get("train_file") is None:
        defaults["synthetic_size"] = 48
    return TokenClsRecipe(**{**defaults, **fields})


def sentence(words: str | Sequence[str], tags: str | Sequence[str], **fields: Any) -> Sentence:
    """Words and tags, lists or parted by blanks."""
    words = words.split() if isinstance(words, str) else words
    tags = tags.split() if isinstance(tags, str) else tags
    defaults: dict[str, Any] = {"row": 1, "source": "x.tsv", "lines": list(range(1, len(words) + 1))}
    return Sentence(words, tags, **{**defaults, **fields})


def tiny_tokenizer() -> Any:
    """WordPiece over the letters a to z: a word has as many pieces as letters."""
    from transformers import BertTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz.,"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    return BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, model_max_length=64)


def tiny_model(dtype: torch.dtype = torch.float64) -> Any:
    """A BERT of one layer of 8 for LABELS, always with the same weights."""
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=len(LABELS),
        attn_implementation="eager",
        initializer_range=0.5,
    )
    return BertForTokenClassification(config).to(dtype)


def random_sentences(number: int, seed: int = 0) -> list[Sentence]:
    """Of 1 to 9 words of 1 to 4 letters, with any tags."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    found = []
    for row in range(1, number + 1):
        words = ["".join(chr(97 + draw(0, 25)) for _ in range(draw(1, 4))) for _ in range(draw(1, 9))]
        found.append(sentence(words, [LABELS[draw(0, 4)] for _ in words], row=row))
    return found


def reference(dataset: Any, batches: Sequence[Sequence[int]], lr: float) -> tuple[torch.Tensor, list[float]]:
    """Plain PyTorch, each batch in one forward: (weights after SGD, loss of each step)."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for indices in batches:
        rows = [dataset[int(index)] for index in indices]
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
        mask = torch.tensor([[1] * row["length"] + [0] * (width - row["length"]) for row in rows])
        labels = torch.tensor([row["labels"] + [-100] * (width - len(row["labels"])) for row in rows])
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = torch.nn.CrossEntropyLoss(ignore_index=-100)(logits.reshape(-1, len(LABELS)), labels.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return weights_of(model), losses


def weights_of(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def windows_of(number: int = 32) -> Any:
    """The windows of random sentences, of at most 12 tokens."""
    from accumft.data.tokens import tokenize_sentences

    return tokenize_sentences(random_sentences(number), tiny_tokenizer(), LABELS, 12, 4)


def train_on(accelerator: Any, examples: int, limits: dict[str, Any], lr: float) -> tuple[torch.Tensor, list[Any], Any]:
    """An epoch of the first `examples` windows in effective batches of 16, by the package: (weights, results, plan)."""
    from token_cls import loss_sum, num_items

    from accumft.data.tokens import TokenCollator
    from accumft.data.windows import WindowDataset, lengths_of
    from accumft.plan import BatchSizes, Plan
    from accumft.step import train_step
    from accumft.window_plan import WindowPlan

    dataset = windows_of().windows.select(range(examples))
    share = 16 // accelerator.num_processes
    micro = limits.get("micro_batch_size", share)
    batch = BatchSizes(16, micro, -(-share // micro), accelerator.num_processes)
    plan = Plan.of(examples, batch, seed=3, num_train_epochs=1, max_steps=-1)
    model = tiny_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    windows = WindowDataset(
        dataset, WindowPlan(plan, lengths_of(dataset)), TokenCollator(tiny_tokenizer()), accelerator.process_index
    )
    results = [train_step(accelerator, model, optimizer, window, loss_sum, num_items) for window in windows.loader()]
    return weights_of(accelerator.unwrap_model(model)), results, plan
