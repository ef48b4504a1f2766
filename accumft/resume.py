"""Where a run goes on from: which checkpoint, and whether the recipe that resumes is the one that was begun."""

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accumft.checkpoint import (
    FOLDER,
    MANIFEST,
    damage,
    link_or_copy,
    name_of,
    newest_whole,
    set_aside_later,
    steps_in,
    tidy,
    write,
)
from accumft.errors import UserError
from accumft.outputs import holds_model_of, read_metrics
from accumft.state import Progress, read_progress

_logger = logging.getLogger(__name__)

_TOLD = "told.json"

# By so many fields versions of a recipe may differ; two recipes differ by more.
_FIELDS_OF_ANOTHER_VERSION = 6

# Fields that change no number of the training, or (the cut) none beyond rounding.
_FREE = {
    "max_tokens_per_micro_batch",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
    "dataloader_num_workers",
    "padding_free",
    "gradient_checkpointing",
    "torch_compile",
    "torch_compile_backend",
    "output_dir",
    "logging_steps",
    "save_steps",
    "save_total_limit",
    "max_runtime",
    "resume_from_checkpoint",
    "report_to",
    "run_name",
    "dry_run",
    "num_processes_planned",
    "device_memory_gb",
}
# Where the data is, which may have moved; whether it is the same is seen from the data itself.
_PLACES = {"train_file", "validation_file", "test_file", "dataset_name", "dataset_config_name", "encoding", "delimiter"}
_PLACES |= {"quotechar", "column_names", "on_bad_row", "max_eval_samples", "trust_remote_code"}
# What a run cannot take over: the order of the examples, what the saved tensors belong to.
_FIXED = {"use_peft", "lora_r", "lora_target_modules", "lora_modules_to_save", "use_dora"}
_FIXED |= {"effective_batch_size", "seed", "optim", "from_scratch", "model_name_or_path", "problem_type"}


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on with."""

    checkpoint: Path
    in_place: bool
    """Whether it lies in the output folder itself."""
    history: list[dict[str, Any]]
    """Rows of metrics.jsonl up to it."""
    logged: frozenset[tuple[int, str]]
    """What trackers have seen already: (step, kind of row)."""
    changes: tuple[str, ...] = ()
    """What the recipe has other than the checkpoint's."""
    best_is_lost: bool = False
    """Whether the checkpoint of its best model is gone or damaged: a new best one must be found."""


def wants_to_resume(value: bool | str | None) -> bool | Path:
    """`resume_from_checkpoint` as True (the newest), False, or a path."""
    if value is None or str(value).lower() == "false":
        return False
    return True if str(value).lower() == "true" else Path(str(value)).expanduser().resolve()


def find_checkpoint(value: bool | str | None, output_dir: Path) -> Path | None:
    """The checkpoint to go on from; None: there is none yet, and the run begins at the beginning.

    Damaged ones are named in a warning and passed over.

    Raises:
        UserError: the path is none of a checkpoint, or all there are are damaged.
    """
    wanted = wants_to_resume(value)
    if wanted is False:
        return None
    if wanted is True:
        folder, latest = output_dir / FOLDER, None
    elif not wanted.is_dir():
        raise UserError(f"--resume_from_checkpoint {value}: no such folder; name a checkpoint or a run's output_dir")
    elif (wanted / FOLDER).is_dir():
        folder, latest = wanted / FOLDER, None
    else:
        folder = wanted.parent
        latest = next((step for step in steps_in(folder) if name_of(step) == wanted.name), None)
        if latest is None:
            raise UserError(
                f"--resume_from_checkpoint {value}: not a checkpoint of accumft (a folder {name_of(120)} of a run's "
                f"{FOLDER}); name one, or a run's output_dir"
            )
    found, damaged = newest_whole(folder, latest)
    for path, problem in damaged.items():
        _logger.warning("checkpoint %s is damaged and passed over: %s", path, problem)
    if found is None and (damaged or wanted is not True):
        what = f"none of the {len(damaged)} checkpoints in {folder} is whole" if damaged else f"{folder} holds none"
        raise UserError(f"--resume_from_checkpoint {value}: {what}; leave the flag out to begin anew")
    return found


def is_in(checkpoint: Path, output_dir: Path) -> bool:
    """Whether a checkpoint is one of the run in that folder, whatever links lead there."""
    return checkpoint.parent.resolve() == (output_dir / FOLDER).resolve()


def resume(checkpoint: Path, output_dir: Path) -> Resumed:
    """Makes the output folder ready to go on from a checkpoint: rows and checkpoints of later steps go out of the way.

    Args:
        output_dir: this run's own, already claimed.
    """
    folder = output_dir / FOLDER
    progress = read_progress(checkpoint)
    in_place = is_in(checkpoint, output_dir)
    rows = [row for row in read_metrics(checkpoint.parent.parent / "metrics.jsonl") if "step" in row]
    history = [row for row in rows if _is_before(row, progress)]
    if in_place:
        tidy(folder)
        for path in set_aside_later(folder, progress.step):
            _logger.warning("the checkpoint of a later step is now %s", path)
    else:
        for step in {progress.step, progress.step if progress.best_step is None else progress.best_step}:
            _take_over(checkpoint.parent, folder, step)
    # The trackers of another folder may be others, and have been told nothing.
    logged = _told(folder, rows) if in_place else frozenset()
    best = progress.best_step
    best_is_lost = (
        best is not None
        and damage(folder / name_of(best)) is not None
        and not (in_place and holds_model_of(output_dir, best))
    )
    return Resumed(checkpoint, in_place, history, logged, best_is_lost=best_is_lost)


def _told(folder: Path, rows: Sequence[Mapping[str, Any]]) -> frozenset[tuple[int, str]]:
    """What trackers have been told of so far: the rows of the start before this one, and of those before it, whose
    later rows are gone from metrics.jsonl."""
    path = folder / _TOLD
    told = {(int(row["step"]), kind_of(row)) for row in rows}
    with contextlib.suppress(OSError, ValueError, TypeError):
        told |= {(int(step), str(kind)) for step, kind in json.loads(path.read_text(encoding="utf-8"))}
    with contextlib.suppress(OSError):
        beside = path.with_name(f".{_TOLD}")
        beside.write_text(json.dumps(sorted(told)), encoding="utf-8")
        os.replace(beside, path)
    return frozenset(told)


def kind_of(row: Mapping[str, Any]) -> str:
    """Whether a row of metrics.jsonl is of a step, an evaluation or a checkpoint."""
    return next(
        (kind for kind in ("eval", "save", "resumed") if any(name.startswith(f"{kind}_") for name in row)), "step"
    )


def _is_before(row: Mapping[str, Any], progress: Progress) -> bool:
    if row["step"] > progress.step:
        return False
    if row["step"] < progress.step:
        return True
    return kind_of(row) == "step" or (kind_of(row) == "eval" and not progress.pending_evaluation)


def _take_over(source: Path, folder: Path, step: int) -> None:
    """A checkpoint of another run becomes one of this; one that is damaged or gone does not."""
    found, _ = newest_whole(source, step)
    if found is None or found.name != name_of(step):
        return

    def fill(place: Path) -> None:
        for path in found.iterdir():
            if path.name != MANIFEST:
                link_or_copy(path, place / path.name)

    write(folder, step, fill)


def check_recipe(checkpoint: Path, values: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> list[str]:
    """What differs between a recipe and a checkpoint's, and changes the numbers from here on: lines for the log.

    Args:
        values: the resolved recipe that resumes.
        fingerprint: of its data.

    Raises:
        UserError: something differs that cannot be honoured.
    """
    saved: dict[str, Any] = {}
    with contextlib.suppress(OSError, yaml.YAMLError):
        saved = yaml.safe_load((checkpoint / "recipe.yaml").read_text(encoding="utf-8"))
    differing = [name for name in values if name in saved and not _same(name, values[name], saved[name])]
    fixed = [name for name in differing if name in _FIXED]
    progress = read_progress(checkpoint)
    if len(set(values) ^ set(saved)) > _FIELDS_OF_ANOTHER_VERSION and saved:
        raise UserError(f"{checkpoint} was made by another recipe: resume it with that one")
    if fixed:
        shown = ", ".join(f"--{name} {values[name]} (there {saved[name]})" for name in fixed)
        raise UserError(
            f"{checkpoint} cannot go on with {shown}: give the values it was begun with, or leave "
            "--resume_from_checkpoint out to begin anew"
        )
    known = [name for name in fingerprint if name in progress.fingerprint and name != "validation"]
    if other := [name for name in known if fingerprint[name] != progress.fingerprint[name]]:
        shown = ", ".join(f"{name} {fingerprint[name]} (there {progress.fingerprint[name]})" for name in other)
        # One of these may be why.
        shown += "".join(f", --{name} {values[name]} (there {saved[name]})" for name in differing if _is_of_data(name))
        raise UserError(
            f"{checkpoint} was made with other training data: {shown}; resume with the data it was begun with, or "
            "leave --resume_from_checkpoint out to begin anew"
        )
    listed = [name for name in differing if name not in _PLACES]
    return [f"{name}: {saved[name]} before, {values[name]} from here on" for name in listed]


def _is_of_data(name: str) -> bool:
    """Whether a field decides what the training data is."""
    shaping = ("max_train_samples", "validation_split", "long_text", "window_overlap", "max_length")
    return name in _PLACES or name in shaping or name.endswith("_column") or name.startswith(("synthetic_", "on_bad_"))


def _same(name: str, value: Any, saved: Any) -> bool:
    if name in _FREE or (name == "problem_type" and None in (value, saved)):
        return True
    if name == "model_name_or_path":
        # A folder may lie elsewhere on another machine.
        return Path(str(value)).name == Path(str(saved)).name
    return bool(value == saved) or (isinstance(value, (list, tuple)) and list(value) == saved)
