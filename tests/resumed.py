"""A finished small run, and copies of it that a test damages and resumes."""

import shutil
from pathlib import Path
from typing import Any

from small import small_recipe
from text_cls import TextClsRecipe, run

STEPS = 12
CHECKPOINTS = [4, 8, 12]


def recipe_of(folder: Path, **fields: Any) -> TextClsRecipe:
    """12 steps with dropout, an evaluation and a checkpoint at each fourth."""
    defaults: dict[str, Any] = {
        "num_train_epochs": 2.0,
        "effective_batch_size": 8,
        "eval_steps": 4,
        "save_steps": 4,
        "save_total_limit": None,
        "dropout": 0.1,
    }
    return small_recipe(folder, **{**defaults, **fields})


def finished_run(folder: Path, **fields: Any) -> Path:
    run(recipe_of(folder, **fields))
    return folder


def copy_of(finished: Path, folder: Path) -> Path:
    shutil.copytree(finished, folder)
    return folder


def step_folder(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def break_checkpoint(folder: Path, step: int) -> Path:
    """One byte in the middle of its weights is another: the checkpoint."""
    path = step_folder(folder, step)
    content = bytearray((path / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "model.safetensors").write_bytes(content)
    return path
