"""A run that is killed, anywhere, and started again ends with the very weights of the run that was not."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import STEPS, Runs, assert_same_run, checkpoints, runs_of, until


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield from runs_of(tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def undisturbed(runs: Runs, request: pytest.FixtureRequest) -> tuple[int, Path, float]:
    """Processes, folder, seconds."""
    name = f"undisturbed-{request.param}"
    started = time.monotonic()
    assert runs.finish(name, request.param) == [0] * request.param, runs.log(name)
    return request.param, runs.folder / name, time.monotonic() - started


def test_killed_at_random(runs: Runs, undisturbed: tuple[int, Path, float]) -> None:
    """Anywhere between its first and its last moment; each run is killed twice."""
    processes, expected, _ = undisturbed
    generator = random.Random(processes)
    survived = 0
    for number in range(4):
        name, steps = f"random-{processes}-{number}", 0
        for _ in range(2):
            ids = runs.start(name, processes, resume_from_checkpoint="true" if steps else None)
            # Not by the clock alone, which a busy machine makes meaningless: from a step on, and a moment more.
            steps = generator.randint(max(1, steps), STEPS - 1)
            assert until(lambda folder=runs.folder / name, steps=steps: logged(folder) >= steps)
            time.sleep(generator.uniform(0, 0.3))
            # One of two processes, or both.
            runs.kill(generator.choice([ids, ids[:1], ids[-1:]]))
            codes = runs.wait(ids, 30)
            assert None not in codes, "nobody is left waiting"
            survived += codes == [0] * processes
        assert runs.finish(name, processes, resume_from_checkpoint="true") == [0] * processes, runs.log(name)
        assert_same_run(runs.folder / name, expected)
    assert survived <= 2, "they were killed before their ends"


def logged(folder: Path) -> int:
    """Steps in metrics.jsonl so far."""
    path = folder / "metrics.jsonl"
    return sum(b'"loss"' in line for line in path.read_bytes().splitlines()) if path.exists() else 0


def test_killed_while_a_checkpoint_is_written(runs: Runs, undisturbed: tuple[int, Path, float]) -> None:
    processes, expected, _ = undisturbed
    generator = random.Random(processes)
    half_written = 0
    for number in range(3):
        name = f"saving-{processes}-{number}"
        folder = runs.folder / name / "checkpoints"
        ids = runs.start(name, processes)
        at = f".step-{2 * generator.randint(2, 5):08d}"
        assert until(lambda place=folder / at: place.exists())
        time.sleep(generator.uniform(0, 0.004))
        runs.kill(ids)
        runs.wait(ids)
        half_written += (folder / at).exists()
        assert runs.finish(name, processes, resume_from_checkpoint="true") == [0] * processes, runs.log(name)
        assert not list(folder.glob(".*")), "what was half-written is gone"
        assert_same_run(runs.folder / name, expected)
    assert half_written >= 1


def test_killed_in_an_evaluation(runs: Runs, undisturbed: tuple[int, Path, float]) -> None:
    processes, expected, _ = undisturbed
    for step in (6, 12):  # where a checkpoint is due as well, and written before the evaluation
        name = f"evaluating-{processes}-{step}"
        ids = runs.start(name, processes)
        assert until(lambda folder=runs.folder / name, step=step: (folder / f"checkpoints/step-{step:08d}").exists())
        runs.kill(ids)
        runs.wait(ids)
        assert runs.finish(name, processes, resume_from_checkpoint="true") == [0] * processes, runs.log(name)
        assert f"(step {step} of {STEPS})" in runs.log(name)
        assert_same_run(runs.folder / name, expected)


def test_killed_again_and_again(runs: Runs, undisturbed: tuple[int, Path, float]) -> None:
    """One command, started anew until it ends well."""
    processes, expected, _ = undisturbed
    name, seen = f"again-{processes}", []
    for step in (2, 4, 8, 10):
        ids = runs.start(name, processes, resume_from_checkpoint="true")
        assert until(lambda step=step: (runs.folder / name / f"checkpoints/step-{step:08d}").exists())
        runs.kill(ids)
        runs.wait(ids)
        seen.append(checkpoints(runs.folder / name)[-1])
    assert seen == [2, 4, 8, 10]
    assert runs.finish(name, processes, resume_from_checkpoint="true") == [0] * processes, runs.log(name)
    assert "no checkpoint in" in runs.log(name), "the first start began at the beginning"
    assert_same_run(runs.folder / name, expected)
