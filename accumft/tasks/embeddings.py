"""Encoders that make one vector of a text: their models, pooling, and files as `sentence_transformers` reads them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from accumft.data.windows import Batch
from accumft.errors import UserError
from accumft.evaluation import inputs_of
from accumft.models import build_small_bert
from accumft.pretrained import Pretrained, choose_padding, resolve_model_path, set_dropout

Pooling = Literal["mean", "cls"]
# In a module of its own, so that `sentence_transformers` need not be installed.
_MODULE = "sentence_transformers.models."


def load_encoder(
    model_name_or_path: str, *, dropout: float | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """(model, tokenizer) for `AutoModel`, in float32 whatever the dtype on disk; padding is on the right.

    Args:
        dropout: every dropout probability of the configuration, 0 to 1; None: as the model has them.

    Raises:
        UserError: it cannot be loaded.
    """
    from transformers import AutoModel

    source = Pretrained(model_name_or_path, trust_remote_code)
    config, tokenizer = source.config(), source.tokenizer()
    set_dropout(config, dropout)
    choose_padding(tokenizer, config)
    return source.model(AutoModel, config), tokenizer


def build_small_encoder(vocabulary: dict[str, int], *, dropout: float | None = None) -> tuple[Any, Any]:
    """(model, tokenizer): a new BERT of 4 layers of 128 over `vocabulary` (token → id), without a head."""
    model, tokenizer = build_small_bert(
        vocabulary, id2label={0: "0", 1: "1"}, problem_type="single_label_classification", dropout=dropout
    )
    model.bert.config.problem_type = None
    return model.bert, tokenizer


def pooling_of(model_name_or_path: str) -> Pooling:
    """What the model's own files (1_Pooling/config.json, of `sentence_transformers`) say; else "mean".

    Raises:
        UserError: they say something else than "mean" or "cls".
    """
    path = Path(resolve_model_path(model_name_or_path)) / "1_Pooling" / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "mean"
    names: dict[str, Pooling] = {"mean_tokens": "mean", "cls_token": "cls", "mean": "mean", "cls": "cls"}
    found = [name.removeprefix("pooling_mode_") for name, value in config.items() if value is True]
    found += [str(config["pooling_mode"])] if "pooling_mode" in config else []
    poolings = [name for name in found if not name.startswith("include")]
    if len(poolings) == 1 and poolings[0] in names:
        return names[poolings[0]]
    raise UserError(f"{path}: pooling {', '.join(poolings) or 'unknown'} is not supported: give --pooling mean or cls")


def embed(pooling: Pooling, model: Any, batch: Batch) -> torch.Tensor:
    """(rows, dimensions) the embeddings of a batch, padded or packed: the mean over each row's tokens, or its first."""
    states = model(**inputs_of(batch)).last_hidden_state
    packing = batch.get("packing")
    if packing is None:
        return pool(pooling, states, batch["attention_mask"])
    if pooling == "cls":
        first: torch.Tensor = states[0, packing.first]
        return first
    parts, start = [], 0
    for rows, length, _ in packing.rectangles:
        stop = start + rows * length
        parts.append(
            pool(pooling, states[0, start:stop].unflatten(0, (rows, length)), packing.mask[start:stop].view(rows, -1))
        )
        start = stop
    return torch.cat(parts)


def pool(pooling: Pooling, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(rows, tokens, dimensions) and a mask (rows, tokens) → (rows, dimensions)."""
    if pooling == "cls":
        return states[:, 0]
    weights = mask[..., None].to(states.dtype)
    return (states * weights).sum(dim=1) / weights.sum(dim=1)


class Embedder(nn.Module):
    """An encoder whose "logits" are its embeddings, for `accumft.evaluation.predict`."""

    def __init__(self, model: Any, pooling: Pooling) -> None:
        """
        Args:
            model: prepared.
        """
        super().__init__()
        self.model = model
        self.pooling: Pooling = pooling

    def forward(self, **batch: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=embed(self.pooling, self.model, batch))


def write_sentence_transformer_files(
    folder: Path, *, pooling: Pooling, dimensions: int, max_length: int, normalize: bool
) -> None:
    """Lets `sentence_transformers.SentenceTransformer(folder)` load a model folder: with this pooling and length.

    Args:
        folder: where `save_pretrained` of the model and the tokenizer write, before or after.
        normalize: whether the vectors that it gives have length 1.
    """
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * normalize
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": _MODULE + name}
        for index, (path, name) in enumerate(modules)
    ]
    files: dict[str, Any] = {
        "modules.json": listed,
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": dimensions,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine", "prompts": {}},
    }
    for path, _ in modules[1:]:
        (folder / path).mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
