"""Small decoders, a tokenizer and rows for the tests of causal language models, and plain PyTorch to compare with."""

from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset

from accumft.data.chat import ChatEncoder
from accumft.data.conversations import Example
from accumft.tasks.causal_model import SCRATCH_TEMPLATE, build_tokenizer, word_counts

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}
WITHOUT_GROUPS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "pad_token_id": 0}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", SIZES),
    "Llama tied": ("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    "Qwen2": ("Qwen2ForCausalLM", SIZES),
    "GPT2": ("GPT2LMHeadModel", GPT2),
    "GPTNeoX": ("GPTNeoXForCausalLM", WITHOUT_GROUPS),
}

EXAMPLES = [
    Example(
        1,
        messages=(
            {"role": "user", "content": "Which department sees fever and cough?"},
            {"role": "assistant", "content": "Pulmonology.\n\nFever and cough, märz 2024."},
        ),
    ),
    Example(
        2,
        messages=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "fever?"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "cough?"},
            {"role": "assistant", "content": " no"},
        ),
    ),
]


def model_of(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> Any:
    """A small decoder without dropout whose logits differ from token to token by about one."""
    architecture, values = MODELS[name]
    torch.manual_seed(seed)
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**values, "initializer_range": 0.2, **settings})
    for field, value in config.to_dict().items():
        if ("dropout" in field or field.endswith("pdrop")) and isinstance(value, float):
            setattr(config, field, 0.0)
    return model_class(config).to(dtype)


def rows_of_tokens(n: int = 24, longest: int = 20, seed: int = 0) -> Dataset:
    """Rows of 3 to `longest` tokens, together more than a model has positions; about half of the tokens are learnt,
    also a row's last one, which is the padding token."""
    draw = np.random.default_rng(seed)
    ids = [[*draw.integers(1, VOCABULARY, length - 1).tolist(), 0] for length in draw.integers(3, longest + 1, n)]
    labels = [[token if draw.random() < 0.5 else -100 for token in row] for row in ids]
    for row, own in zip(ids, labels, strict=True):
        own[0], own[-1] = -100, row[-1]
    columns = {"row": list(range(1, n + 1)), "input_ids": ids, "labels": labels, "length": [len(row) for row in ids]}
    return Dataset.from_dict(columns)


def reference_loss(model: Any, columns: dict[str, Any]) -> torch.Tensor:
    """() the mean over all target tokens of the rows, each alone in its forward: plain PyTorch, no padding, no cut."""
    losses, items = [], 0
    for ids, labels in zip(columns["input_ids"], columns["labels"], strict=True):
        logits = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0]
        places = [place for place in range(1, len(ids)) if labels[place] != -100]
        targets = torch.tensor([ids[place] for place in places])
        before = logits[[place - 1 for place in places]]
        losses.append(torch.nn.functional.cross_entropy(before, targets, reduction="sum"))
        items += len(places)
    return torch.stack(losses).sum() / items


def tiny_tokenizer() -> Any:
    """Made of the words of EXAMPLES; its padding token is its end-of-text token."""
    texts = [message["content"] for example in EXAMPLES for message in example.messages]
    return build_tokenizer(word_counts([*texts, *texts, "user\nassistant\nsystem\n" * 2]))


def encoder(template: str | None = SCRATCH_TEMPLATE) -> ChatEncoder:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return ChatEncoder(tokenizer)
