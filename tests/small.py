"""A recipe small enough for tests: a new BERT on a few short synthetic notes, without dropout."""

import json
from pathlib import Path
from typing import Any

from text_cls import TextClsRecipe


def small_recipe(output_dir: Path, **fields: Any) -> TextClsRecipe:
    """48 notes of at most 24 tokens, 3 steps of 16 an epoch."""
    defaults: dict[str, Any] = {
        "from_scratch": True,
        "max_length": 24,
        "dropout": 0.0,
        "effective_batch_size": 16,
        "learning_rate": 1e-3,
        "num_train_epochs": 2.0,
        "output_dir": str(output_dir),
    }
    if fields.get("train_file") is None:
        defaults["synthetic_size"] = 48
    return TextClsRecipe(**{**defaults, **fields})


def rows_of(output_dir: Path, kind: str = "loss") -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that hold `kind`: "loss" for training, "eval_loss" for evaluation."""
    lines = (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if kind in row]
