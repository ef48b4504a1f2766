"""The output folder: claimed without overwriting, every file in it replaced whole."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from accumft.errors import UserError
from accumft.models import without_progress_bars


def check_output_dir(output_dir: str, inputs: Iterable[str | None]) -> Path:
    """The folder as a path, if a run may have it: a new or empty one, or one of an earlier run.

    Args:
        inputs: files and folders that the run reads, None where there is none: they must not lie in it.
    """
    try:
        path = Path(output_dir).expanduser().resolve()
        if not path.exists():
            parent = next(parent for parent in path.parents if parent.exists())
            if not os.access(parent, os.W_OK):
                raise UserError(f"--output_dir {output_dir}: {parent} is not writable; name another folder")
            return path
        if not path.is_dir():
            raise UserError(f"--output_dir {output_dir}: a file; name a folder")
        if any(path.iterdir()) and not (path / "recipe.yaml").exists():
            raise UserError(f"--output_dir {output_dir}: holds files that are not of an earlier run; name a new folder")
        kept = [Path.cwd(), *(Path(name).expanduser().resolve() for name in inputs if name and Path(name).exists())]
        if inside := [place for place in kept if place == path or path in place.parents]:
            raise UserError(f"--output_dir {output_dir}: {inside[0]} lies in it; name another folder")
        if not os.access(path, os.W_OK):
            raise UserError(f"--output_dir {output_dir}: not writable; name another folder")
    except (OSError, ValueError) as error:
        raise UserError(f"--output_dir {output_dir!r}: cannot be used ({error}); name another folder") from error
    return path


def claim_output_dir(path: Path) -> FileLock:
    """Makes the folder and locks it; an earlier run in it is first renamed to the next free NAME-1, NAME-2, …"""
    try:
        if (path / "recipe.yaml").exists():
            # Not while that run is still going on.
            _lock(path).release()
            number = 1
            while (aside := path.with_name(f"{path.name}-{number}")).exists():
                number += 1
            path.rename(aside)
            print(f"the earlier run in {path} is now in {aside}")
        path.mkdir(parents=True, exist_ok=True)
        return _lock(path)
    except OSError as error:
        raise UserError(f"--output_dir {path}: not writable ({error.strerror}); name another folder") from error


def _lock(path: Path) -> FileLock:
    lock = FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"--output_dir {path}: another run is going on in it; name another folder") from error
    return lock


def save_recipe(values: Mapping[str, Any], path: Path) -> None:
    """A recipe's values as YAML, for `--config`."""
    import yaml

    path.write_text(yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True), encoding="utf-8")


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON, in which NaN and infinity are written as strings: it has no such numbers, and the log hides nothing."""
    return json.dumps({name: _json_number(value) for name, value in values.items()}, indent=indent)


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def save_model(model: Any, processor: Any, folder: Path) -> None:
    """Writes a transformers model and its processor into the folder: each file replaces its forerunner whole."""
    beside = folder / ".saving"
    shutil.rmtree(beside, ignore_errors=True)
    with without_progress_bars():
        model.save_pretrained(beside)
    processor.save_pretrained(beside)
    # safetensors makes files that only their owner reads; the others are as the folder's umask has them.
    mode = (beside / "config.json").stat().st_mode
    for file in beside.iterdir():
        file.chmod(mode)
        os.replace(file, folder / file.name)
    beside.rmdir()


def load_weights(model: Any, folder: Path) -> None:
    """Gives a transformers model the weights saved in the folder, in place, as float32."""
    with without_progress_bars():
        saved = type(model).from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(saved.state_dict())
