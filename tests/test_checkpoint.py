"""Checkpoint folders: all or nothing when written, verified when read, never the wrong one deleted."""

import errno
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from accumft import checkpoint
from accumft.checkpoint import (
    MANIFEST,
    damage,
    name_of,
    newest_whole,
    steps_in,
    tidy,
    write,
)

CONTENT = {"model.safetensors": bytes(range(256)) * 3, "optimizer.pt": b"moments" * 50, "state.json": b'{"step": 1}'}


def fill(place: Path) -> None:
    for name, content in CONTENT.items():
        (place / name).write_bytes(content)


def make(folder: Path, *steps: int) -> None:
    for step in steps:
        write(folder, step, fill)


def test_what_is_written(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoints", 120, fill)
    assert path == tmp_path / "checkpoints" / "step-00000120"
    assert sorted(file.name for file in path.iterdir()) == [MANIFEST, *sorted(CONTENT)]
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["step"], set(manifest["files"])) == (120, set(CONTENT))
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == {k: len(v) for k, v in CONTENT.items()}
    assert damage(path) is None
    assert [file.name for file in path.parent.iterdir()] == ["step-00000120"]


def test_numbers_of_nine_digits_are_in_order(tmp_path: Path) -> None:
    make(tmp_path, 100_000_000, 99_999_999)
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-00000009").touch()
    assert steps_in(tmp_path) == [99_999_999, 100_000_000]
    assert steps_in(tmp_path / "absent") == []


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "a step that is there"])
def test_a_fill_that_raises_leaves_nothing(tmp_path: Path, again: bool) -> None:
    make(tmp_path, 1)
    before = (tmp_path / name_of(1) / MANIFEST).read_text()

    def half(place: Path) -> None:
        fill(place)
        (place / "model.safetensors").write_bytes(b"other")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 1 if again else 2, half)
    assert [path.name for path in tmp_path.iterdir()] == [name_of(1)]
    assert (tmp_path / name_of(1) / MANIFEST).read_text() == before
    assert damage(tmp_path / name_of(1)) is None


def test_a_rename_that_fails_brings_the_earlier_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == f".{name_of(1)}":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path, 1, lambda place: (place / "new").touch())
    assert [path.name for path in tmp_path.iterdir()] == [name_of(1)]
    assert damage(tmp_path / name_of(1)) is None and not (tmp_path / name_of(1) / "new").exists()


def killed_at(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """From here on the process dies (SIGKILL, so that no handler runs) at a stage of `write`."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def after(function: Callable[..., object]) -> Callable[..., None]:
        return lambda *args, **kwargs: (function(*args, **kwargs), die())[1]

    if stage == "manifest":
        monkeypatch.setattr(json, "dumps", die)
    elif stage == "half of the manifest":
        dumps = json.dumps
        monkeypatch.setattr(json, "dumps", lambda *args, **kwargs: dumps(*args, **kwargs)[:40])
        monkeypatch.setattr(checkpoint, "_sync", die)
    elif stage == "sync":
        monkeypatch.setattr(checkpoint, "_sync", die)
    elif stage == "before the renames":
        monkeypatch.setattr(Path, "rename", die)
    elif stage == "after the first rename":
        monkeypatch.setattr(Path, "rename", after(Path.rename))
    elif stage == "after both renames":
        calls = iter((lambda *_: None, die))
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda *args: (rename(*args), next(calls)())[0])


STAGES = [
    "fill",
    "manifest",
    "half of the manifest",
    "sync",
    "before the renames",
    "after the first rename",
    "after both renames",
]


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "a step that is there"])
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_each_stage(tmp_path: Path, stage: str, again: bool) -> None:
    """What is there afterwards is what was there before, or the new one: never half of one."""
    make(tmp_path, 1)
    step = 1 if again else 2

    def dying(place: Path) -> None:
        (place / "new").write_text("new")
        if stage == "fill":
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        try:
            with pytest.MonkeyPatch.context() as monkeypatch:
                killed_at(monkeypatch, stage)
                write(tmp_path, step, dying)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if stage == "after both renames" and not again:
        assert status == 0, "there is one rename only"
    else:
        assert os.WTERMSIG(status) == signal.SIGKILL
    tidy(tmp_path)
    found, damaged = newest_whole(tmp_path)
    is_new = stage == "after both renames" or (stage == "after the first rename" and not again)
    assert (found, damaged) == (tmp_path / name_of(step if is_new else 1), {})
    assert (found / "new").exists() == is_new
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    make(tmp_path, step)
    assert damage(tmp_path / name_of(step)) is None, "what was left is in nobody's way"


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    """One bit of one byte, anywhere in any file: the manifest, whose every byte matters or is whitespace, included."""
    path = write(tmp_path, 1, fill)
    generator = random.Random(0)
    tried = 0
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        positions = range(len(content)) if len(content) < 100 else sorted(generator.sample(range(len(content)), 120))
        for position in positions:
            if file.name == MANIFEST and content[position : position + 1].isspace():
                continue  # JSON that says the same
            for bit in (1, 128):
                changed = bytearray(content)
                changed[position] ^= bit
                file.write_bytes(changed)
                assert damage(path) is not None, f"{file.name}, byte {position}, bit {bit}"
                tried += 1
        file.write_bytes(content)
    assert tried > 600
    assert damage(path) is None


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, 1, fill)
    tried = 0
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for size in {0, 1, len(content) // 2, len(content) - 2, *range(0, len(content) - 2, 17)}:
            file.write_bytes(content[:size])
            assert damage(path) is not None, f"{file.name} of {size} bytes"
            tried += 1
        file.write_bytes(content + b"\0")
        assert damage(path) is not None, f"{file.name} with a byte more"
        file.unlink()
        assert damage(path) == (f"it has no {MANIFEST}" if file.name == MANIFEST else f"{file.name} is missing")
        file.write_bytes(content)
    assert tried > 80
    assert damage(path) is None


ENTRY = {"size": 1, "sha256": "0"}


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ("", "its manifest.json is damaged"),
        ("\0" * 300, "its manifest.json is damaged"),
        ("[]", "its manifest.json is damaged"),
        ("null", "its manifest.json is damaged"),
        ('{"format": 1}', "its manifest.json is damaged"),
        ('{"format": 1, "step": 1, "files": 7}', "its manifest.json is damaged"),
        ('{"format": 1, "step": 1, "files": {}}', "its manifest.json names no files"),
        ("[" * 200_000, "its manifest.json is damaged"),
        ('{"format": 2, "step": 1, "files": {}}', "its format 2 is not known to this version of accumft"),
        (json.dumps({"format": 1, "step": 2, "files": {"x": ENTRY}}), "it is the checkpoint of step 2"),
        (
            json.dumps({"format": 1, "step": 1, "files": {"../x": ENTRY}}),
            "its manifest.json names a file outside of it",
        ),
        (json.dumps({"format": 1, "step": 1, "files": {"/etc/passwd": ENTRY}}), "its manifest.json names a file outs"),
        (json.dumps({"format": 1, "step": 1, "files": {"..": ENTRY}}), "its manifest.json names a file outside of it"),
        (json.dumps({"format": 1, "step": 1, "files": {"a\0b": ENTRY}}), "its manifest.json names a file outside of"),
        (json.dumps({"format": 1, "step": 1, "files": {"state.json": 7}}), "state.json has another size"),
    ],
)
def test_manifests_that_are_none(tmp_path: Path, manifest: str, problem: str) -> None:
    path = write(tmp_path, 1, fill)
    (path / MANIFEST).write_text(manifest)
    assert str(damage(path)).startswith(problem)


def test_other_damage(tmp_path: Path) -> None:
    assert damage(tmp_path / "absent") == "there is no such folder"
    path = write(tmp_path, 1, fill)
    (path / MANIFEST).unlink()
    (path / MANIFEST).mkdir()
    assert damage(path) == "its manifest.json cannot be read (Is a directory)"
    path = write(tmp_path, 2, fill)
    (path / "state.json").unlink()
    (path / "state.json").symlink_to("state.json")
    assert str(damage(path)).startswith("state.json cannot be read (")
    make(tmp_path, 3)
    (tmp_path / name_of(3)).rename(tmp_path / name_of(4))
    assert damage(tmp_path / name_of(4)) == "it is the checkpoint of step 3"
