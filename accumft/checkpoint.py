"""Checkpoint folders: written beside their place and renamed into it, sealed by a manifest, verified before use.

    checkpoints/step-00000120/manifest.json     names, sizes and SHA-256 of the files beside it

A folder of that name whose manifest fits is whole, whatever happened to the machine while it was written. Nothing here
knows what the files hold.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """The folder's name of a step."""
    return f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending, whole or not; without the folder none."""
    try:
        found = [_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for match in found if match)


def write(folder: Path, step: int, fill: Callable[[Path], Any]) -> Path:
    """Makes the checkpoint of a step: all of it, or, where that fails, none of it.

    Args:
        folder: where checkpoints are; made if need be.
        fill: writes the files into the empty folder that it is given; plain files, no folders.

    Raises:
        whatever `fill` raises, and OSError: the earlier checkpoints are as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place, beside = folder / name_of(step), folder / f".{name_of(step)}"
    replaced = folder / f".replaced-{name_of(step)}"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        fill(beside)
        files = {path.name: _entry(path) for path in sorted(beside.iterdir())}
        text = json.dumps({"format": _FORMAT, "step": step, "files": files}, indent=1)
        (beside / MANIFEST).write_text(text + "\n", encoding="utf-8")
        for path in [*beside.iterdir(), beside]:
            _sync(path)
        shutil.rmtree(replaced, ignore_errors=True)
        if place.exists():
            place.rename(replaced)  # and back again by `tidy`, if the next line is never reached
        beside.rename(place)
        _sync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        if replaced.exists() and not place.exists():
            replaced.rename(place)
        raise
    return place


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; None: it is whole."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        if manifest["format"] != _FORMAT:
            return f"its format {manifest['format']} is not known to this version of accumft"
        if not path.name.endswith(name_of(manifest["step"])):
            return f"it is the checkpoint of step {manifest['step']}"
    except FileNotFoundError:
        return f"it has no {MANIFEST}" if path.is_dir() else "there is no such folder"
    except OSError as error:
        return f"its {MANIFEST} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"its {MANIFEST} is damaged"
    if not files:
        return f"its {MANIFEST} names no files"
    for name, entry in files.items():
        if Path(name).name != name or name == ".." or "\0" in name:
            return f"its {MANIFEST} names a file outside of it"
        try:
            if not isinstance(entry, dict) or (path / name).stat().st_size != entry.get("size"):
                return f"{name} has another size than its {MANIFEST} says"
            if _entry(path / name) != entry:
                return f"{name} has another content than its {MANIFEST} says"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def newest_whole(folder: Path, at_most: int | None = None) -> tuple[Path | None, dict[Path, str]]:
    """The newest whole checkpoint of a folder, and what is wrong with the newer ones.

    Args:
        at_most: of this step or an earlier one.
    """
    damaged: dict[Path, str] = {}
    for step in reversed(steps_in(folder)):
        if at_most is not None and step > at_most:
            continue
        path = folder / name_of(step)
        problem = damage(path)
        if problem is None:
            return path, damaged
        damaged[path] = problem
    return None, damaged


def tidy(folder: Path) -> None:
    """Removes what a killed run left half-written or half-deleted. Not while a run is going on there."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if path.name.startswith((".step-", ".doomed-")):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(".replaced-"):
            place = folder / path.name.removeprefix(".replaced-")
            if place.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(place)


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Renames the checkpoints of later steps, which a run that goes on from this one makes anew: their new paths."""
    aside = []
    for later in steps_in(folder):
        if later > step:
            number = 1
            while (place := folder / f"aside-{number}-{name_of(later)}").exists():
                number += 1
            (folder / name_of(later)).rename(place)
            aside.append(place)
    return aside


def prune(folder: Path, save_total_limit: int | None, kept: Iterable[int | None]) -> None:
    """Deletes the oldest checkpoints above the limit, never one of the steps in `kept`, never the newest."""
    if save_total_limit is None:
        return
    steps = steps_in(folder)
    for step in steps[: max(0, len(steps) - max(1, save_total_limit))]:
        if step not in kept:
            # Renamed first: half of a deleted one must not look like a checkpoint.
            doomed = folder / f".doomed-{name_of(step)}"
            with contextlib.suppress(OSError):
                (folder / name_of(step)).rename(doomed)
                shutil.rmtree(doomed)


def link_or_copy(source: Path, target: Path) -> None:
    """Gives `target` the content of a file whole: a hard link, which stays valid when `source` is deleted and takes no
    room, or where the file system has none, a copy."""
    beside = target.with_name(f".{target.name}.new")
    beside.unlink(missing_ok=True)
    try:
        try:
            os.link(source, beside)
        except OSError:
            shutil.copyfile(source, beside)
            _sync(beside)
        os.replace(beside, target)
    finally:
        # What a full disk left of a copy; or one more name of the same file, which `replace` leaves alone.
        beside.unlink(missing_ok=True)


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": digest_of(path)}


def _sync(path: Path) -> None:
    """Until the file, or the folder's list of names, is on the disk."""
    if os.name != "posix":  # others sync only what is open for writing
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
