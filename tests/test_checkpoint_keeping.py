"""Which checkpoint is taken and which ones stay, the newest and the best always; links that outlive their source."""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from test_checkpoint import CONTENT, fill, make

from accumft.checkpoint import (
    MANIFEST,
    damage,
    link_or_copy,
    name_of,
    newest_whole,
    prune,
    set_aside_later,
    steps_in,
    tidy,
    write,
)


@pytest.mark.parametrize(
    ("steps", "limit", "kept", "survivors"),
    [
        ((2, 4, 6), None, (), [2, 4, 6]),
        ((2, 4, 6), 5, (), [2, 4, 6]),
        ((2, 4, 6), 3, (), [2, 4, 6]),
        ((2, 4, 6), 2, (), [4, 6]),
        ((2, 4, 6), 1, (), [6]),
        ((2, 4, 6), 0, (), [6]),  # never the newest, whatever is asked for
        ((2, 4, 6, 8), 1, (4,), [4, 8]),
        ((2, 4, 6, 8), 2, (4,), [4, 6, 8]),  # the best one comes on top of the newest
        ((2, 4, 6, 8), 2, (8,), [6, 8]),
        ((2, 4, 6, 8), 1, (None,), [8]),
        ((2, 4, 6, 8), 1, (5,), [8]),
        ((8, 100), 1, (), [100]),
        ((99_999_999, 100_000_000), 1, (), [100_000_000]),
        ((2,), 1, (), [2]),
        ((), 1, (), []),
    ],
)
def test_survivors(
    tmp_path: Path, steps: tuple[int, ...], limit: int | None, kept: Iterable[int | None], survivors: list[int]
) -> None:
    make(tmp_path, *steps)
    prune(tmp_path, limit, kept)
    assert steps_in(tmp_path) == survivors
    assert all(damage(tmp_path / name_of(step)) is None for step in survivors)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_one_that_cannot_be_deleted_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 2, 4, 6)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == name_of(2):
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    prune(tmp_path, 1, ())
    assert steps_in(tmp_path) == [2, 6]


def test_newest_whole_passes_over_damaged_ones(tmp_path: Path) -> None:
    make(tmp_path, 2, 4, 6, 8)
    (tmp_path / name_of(8) / "state.json").unlink()
    (tmp_path / name_of(6) / MANIFEST).write_text("{")
    paths = {step: tmp_path / name_of(step) for step in (2, 4, 6, 8)}
    damaged = {paths[8]: "state.json is missing", paths[6]: "its manifest.json is damaged"}
    assert newest_whole(tmp_path) == (paths[4], damaged)
    assert newest_whole(tmp_path, at_most=6) == (paths[4], {paths[6]: "its manifest.json is damaged"})
    assert newest_whole(tmp_path, at_most=4) == (paths[4], {})
    assert newest_whole(tmp_path, at_most=1) == (None, {})
    assert newest_whole(tmp_path / "absent") == (None, {})
    for step in (2, 4):
        shutil.rmtree(paths[step])
    assert newest_whole(tmp_path) == (None, damaged)


def test_tidy(tmp_path: Path) -> None:
    make(tmp_path, 2, 4)
    (tmp_path / name_of(2)).rename(tmp_path / f".replaced-{name_of(2)}")  # killed between the renames
    (tmp_path / f".replaced-{name_of(4)}").mkdir()  # killed before the old one was deleted
    for name in (f".{name_of(6)}", f".doomed-{name_of(1)}"):
        (tmp_path / name).mkdir()
        fill(tmp_path / name)
    (tmp_path / ".mine").mkdir()
    tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", name_of(2), name_of(4)]
    assert damage(tmp_path / name_of(2)) is None
    tidy(tmp_path / "absent")


def test_later_ones_go_aside_and_stay_whole(tmp_path: Path) -> None:
    make(tmp_path, 2, 4, 6)
    assert set_aside_later(tmp_path, 2) == [tmp_path / f"aside-1-{name_of(4)}", tmp_path / f"aside-1-{name_of(6)}"]
    assert steps_in(tmp_path) == [2]
    make(tmp_path, 4)
    assert set_aside_later(tmp_path, 2) == [tmp_path / f"aside-2-{name_of(4)}"]
    assert set_aside_later(tmp_path, 2) == []
    assert [damage(tmp_path / f"aside-1-{name_of(step)}") for step in (4, 6)] == [None, None]
    prune(tmp_path, 1, ())
    assert len(list(tmp_path.glob("aside-*"))) == 3, "they are no checkpoints of this run, and not its to delete"


def no_links(source: Path, target: Path) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("linking", [True, False], ids=["links", "no links"])
def test_link_or_copy_outlives_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linking: bool) -> None:
    if not linking:
        monkeypatch.setattr(os, "link", no_links)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new" * 1000)
    target.write_bytes(b"old")
    (tmp_path / ".target.new").write_bytes(b"of a run that was killed here")
    link_or_copy(source, target)
    assert source.samefile(target) == linking
    source.unlink()
    assert target.read_bytes() == b"new" * 1000
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_copy_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(shutil, "copyfile", full)
    (tmp_path / "source").write_bytes(b"new")
    (tmp_path / "target").write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"):
        link_or_copy(tmp_path / "source", tmp_path / "target")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"source": b"new", "target": b"old"}


def test_linked_twice_leaves_no_third_name(tmp_path: Path) -> None:
    """POSIX: a rename between two names of one file does nothing."""
    (tmp_path / "source").write_bytes(b"new")
    for _ in range(2):
        link_or_copy(tmp_path / "source", tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_a_best_model_that_is_linked_stays_when_its_checkpoint_is_written_again(tmp_path: Path) -> None:
    """What is written anew lies in a new file: nothing is written into one that has another name besides."""
    path = write(tmp_path / "checkpoints", 2, fill)
    link_or_copy(path / "model.safetensors", tmp_path / "model.safetensors")

    def other(place: Path) -> None:
        (place / "model.safetensors").write_bytes(b"other")

    write(tmp_path / "checkpoints", 2, other)
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT["model.safetensors"]
