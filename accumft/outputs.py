"""The output folder: claimed without overwriting, every file in it replaced whole."""

import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from accumft.adapters import ADAPTER_CONFIG, is_adapted, load_adapter, write_adapter
from accumft.checkpoint import FOLDER, MANIFEST, digest_of, link_or_copy, steps_in
from accumft.errors import OutputError, UserError
from accumft.pretrained import without_progress_bars

_logger = logging.getLogger(__name__)

_EXPORTED = ".exported.json"

NOT_OF_THE_MODEL = (MANIFEST, "optimizer.pt", "state.json", "recipe.yaml")
"""Files of a checkpoint that `from_pretrained` does not want."""


class MetricsLog:
    """metrics.jsonl: one row of JSON a line, each whole. A row that the disk has no room for waits for the next."""

    def __init__(self, path: Path, kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """
        Args:
            kept: rows of an earlier start that it begins with.
        """
        self._path, self._waiting = path, [to_json(row) + "\n" for row in kept]
        self._written: list[str] = []
        self._file = self._begin()

    def _begin(self) -> Any:
        """The file with all rows so far, in its place."""
        beside = self._path.with_name(f".{self._path.name}")
        beside.write_text("".join(self._written + self._waiting), encoding="utf-8")
        self._written, self._waiting = self._written + self._waiting, []
        file = open(beside, "ab", buffering=0)  # noqa: SIM115
        os.replace(beside, self._path)
        return file

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds a row, and those that still wait."""
        self._waiting.append(to_json(row) + "\n")
        if not self._path.exists():  # somebody has deleted it
            with suppress(OSError):
                self._file.close()
                self._file = self._begin()
            return
        good = self._file.seek(0, os.SEEK_END)
        text = "".join(self._waiting).encode()
        try:
            written = self._file.write(text)
            if written < len(text):
                raise OSError(f"{written} of {len(text)} bytes written")
        except OSError as error:
            if len(self._waiting) == 1:
                _logger.warning("metrics.jsonl: a row cannot be written now (%s); it waits for the next", error)
            with suppress(OSError):
                self._file.truncate(good)
            return
        self._written += self._waiting
        self._waiting.clear()

    def close(self) -> None:
        """Ends it; rows that found no room until now are lost."""
        self._file.close()


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """A full disk, a quota or a lost mount in here ends in a line that says what it has cost.

    Raises:
        OutputError: instead of `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{what} could not be written in {folder} ({error.strerror or error}): free some space and run again with "
            "--resume_from_checkpoint true, which goes on from the last checkpoint"
        ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a killed run left half-written is left out, no file is no rows."""
    rows = []
    with suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


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
        if not _is_of_a_run(path) and any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise UserError(f"--output_dir {output_dir}: holds files that are not of an earlier run; name a new folder")
        kept = [Path.cwd(), *(Path(name).expanduser().resolve() for name in inputs if name and Path(name).exists())]
        if inside := [place for place in kept if place == path or path in place.parents]:
            raise UserError(f"--output_dir {output_dir}: {inside[0]} lies in it; name another folder")
        if not os.access(path, os.W_OK):
            raise UserError(f"--output_dir {output_dir}: not writable; name another folder")
    except (OSError, ValueError) as error:
        raise UserError(f"--output_dir {output_dir!r}: cannot be used ({error}); name another folder") from error
    return path


def claim_output_dir(path: Path, goes_on: bool = False) -> FileLock:
    """Makes the folder and locks it; an earlier run in it is first renamed to the next free NAME-1, NAME-2, …

    Args:
        goes_on: this run goes on with the earlier one in it, which stays where it is.
    """
    try:
        if _is_of_a_run(path):
            # Not while that run is still going on.
            lock = _lock(path)
            if goes_on:
                return lock
            lock.release()
            number = 1
            while (aside := path.with_name(f"{path.name}-{number}")).exists():
                number += 1
            path.rename(aside)
            print(f"the earlier run in {path} is now in {aside}")
        path.mkdir(parents=True, exist_ok=True)
        return _lock(path)
    except OSError as error:
        raise UserError(f"--output_dir {path}: not writable ({error.strerror}); name another folder") from error


def _is_of_a_run(path: Path) -> bool:
    """Whether a run has been at work in the folder: it may have been killed before it could write its recipe."""
    return (path / "recipe.yaml").exists() or bool(steps_in(path / FOLDER))


def _lock(path: Path) -> FileLock:
    lock = FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"--output_dir {path}: another run is going on in it; wait until it has ended, or name another folder"
        ) from error
    return lock


def save_recipe(values: Mapping[str, Any], path: Path) -> None:
    """A recipe's values as YAML, for `--config`."""
    import yaml

    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    beside = path.with_name(f".{path.name}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON, in which NaN and infinity are written as strings: it has no such numbers, and the log hides nothing."""
    return json.dumps({name: _json_number(value) for name, value in values.items()}, indent=indent)


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_model(model: Any, processor: Any, folder: Path) -> None:
    """Writes a transformers model and its processor into a folder, as `from_pretrained` reads them; of a model of peft
    the adapter alone."""
    with without_progress_bars():
        if is_adapted(model):
            write_adapter(model, folder)
        else:
            model.save_pretrained(folder)
    processor.save_pretrained(folder)
    # safetensors makes files that only their owner reads; the others are as the folder's umask has them.
    mode = (folder / (ADAPTER_CONFIG if is_adapted(model) else "config.json")).stat().st_mode
    for file in folder.iterdir():
        file.chmod(mode)


def save_model(model: Any, processor: Any, folder: Path) -> None:
    """Writes the model and its processor into a run's folder: each file replaces its forerunner whole."""
    beside = folder / ".saving"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        write_model(model, processor, beside)
        for file in beside.iterdir():
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def export_model(checkpoint: Path, folder: Path, step: int) -> None:
    """Puts the model of a checkpoint into a run's folder, as copies: whoever saves into that folder must not change the
    checkpoint. Where there is no room for them, as links."""
    digests = {}
    for file in sorted(checkpoint.iterdir()):
        if file.name in NOT_OF_THE_MODEL:
            continue
        beside = folder / f".{file.name}.new"
        try:
            shutil.copyfile(file, beside)
            os.replace(beside, folder / file.name)
        except OSError:
            beside.unlink(missing_ok=True)
            link_or_copy(file, folder / file.name)
        digests[file.name] = digest_of(folder / file.name)
    (folder / _EXPORTED).write_text(json.dumps({"step": step, "files": digests}), encoding="utf-8")


def holds_model_of(folder: Path, step: int) -> bool:
    """Whether the model in a run's folder is still, to the last bit, the one that `export_model` put there."""
    try:
        exported = json.loads((folder / _EXPORTED).read_text(encoding="utf-8"))
        files = dict(exported["files"])
        return exported["step"] == step and all(digest_of(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def load_weights(model: Any, folder: Path) -> None:
    """Gives a transformers model the weights saved in the folder, in place, as float32; one of peft its adapter."""
    if is_adapted(model):
        load_adapter(model, folder)
        return
    with without_progress_bars():
        saved = type(model).from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(saved.state_dict())
