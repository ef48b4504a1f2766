"""A run that is asked to end leaves a whole checkpoint, on whatever process the signal came, and goes on from it."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import STEPS, Runs, assert_same_run, checkpoints, last_checkpoint, rows, runs_of, same_model, until

from accumft.checkpoint import damage

STOPPED = {signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield from runs_of(tmp_path_factory.mktemp("signals"))


@pytest.fixture(scope="module")
def expected(runs: Runs) -> dict[int, Path]:
    """Folders of the undisturbed runs, by number of processes."""
    for processes in (1, 2):
        name = f"undisturbed-{processes}"
        assert runs.finish(name, processes) == [0] * processes, runs.log(name)
    return {processes: runs.folder / f"undisturbed-{processes}" for processes in (1, 2)}


def assert_stopped_at(folder: Path, step: int) -> None:
    """That the checkpoint of this step is whole, and nothing was done after it."""
    assert checkpoints(folder)[-1] == step
    assert damage(last_checkpoint(folder)) is None
    assert max(row["step"] for row in rows(folder)) == step
    assert not list((folder / "checkpoints").glob(".*"))


def assert_goes_on(runs: Runs, name: str, expected: Path, processes: int) -> None:
    log = len(runs.log(name))
    step = checkpoints(runs.folder / name)[-1]
    assert runs.finish(name, processes, resume_from_checkpoint="true") == [0] * processes, runs.log(name)
    assert f"(step {step} of {STEPS})" in runs.log(name)[log:]
    assert_same_run(runs.folder / name, expected)


ONE_OF_THEM = [(1, [0]), (2, [0]), (2, [1])]
BOTH = (signal.SIGINT, 2, [0, 1])  # as from a terminal


@pytest.mark.parametrize("number, processes, to", [*((n, *case) for n in STOPPED for case in ONE_OF_THEM), BOTH])
def test_the_step_that_runs_is_the_last(
    runs: Runs, expected: dict[int, Path], number: signal.Signals, processes: int, to: list[int]
) -> None:
    name = f"{number.name}-{processes}-{to}"
    ids = runs.start(name, processes, pauses={7: 1.0})
    runs.wait_for(name, "step 7 runs")
    runs.kill([ids[rank] for rank in to], number)
    assert runs.wait(ids) == [STOPPED[number]] * processes
    assert_stopped_at(runs.folder / name, 7)  # where none would have been saved
    log = "".join(runs.log(name, rank) for rank in range(processes))
    assert "Traceback" not in log and "error:" not in log
    assert (f"{number.name}: saving a checkpoint after this step, then ending" in log) == (0 in to)
    assert_goes_on(runs, name, expected[processes], processes)


@pytest.mark.parametrize("processes", [1, 2])
def test_in_an_evaluation(runs: Runs, expected: dict[int, Path], processes: int) -> None:
    """It comes to its end, and so does one step more, where there is one."""
    name = f"evaluation-{processes}"
    ids = runs.start(name, processes, eval_steps=6, evaluation_pause=1.0)
    runs.wait_for(name, "an evaluation runs")
    runs.kill(ids[-1:], signal.SIGTERM)
    assert runs.wait(ids) == [143] * processes
    assert_stopped_at(runs.folder / name, 7)
    ids = runs.start(name, processes, eval_steps=6, evaluation_pause=1.0, resume_from_checkpoint="true")
    assert until(lambda: runs.log(name).count("an evaluation runs") == 2)
    runs.kill(ids[:1], signal.SIGTERM)
    assert runs.wait(ids) == [143] * processes
    assert_stopped_at(runs.folder / name, STEPS)
    assert [row["step"] for row in rows(runs.folder / name) if "eval_loss" in row] == [6, STEPS]
    assert runs.finish(name, processes, eval_steps=6, resume_from_checkpoint="true") == [0] * processes
    assert [row["step"] for row in rows(runs.folder / name) if "eval_loss" in row] == [6, STEPS]
    assert same_model(last_checkpoint(runs.folder / name), last_checkpoint(expected[processes]))


@pytest.mark.parametrize("processes", [1, 2])
def test_in_the_last_step(runs: Runs, expected: dict[int, Path], processes: int) -> None:
    name = f"last-{processes}"
    ids = runs.start(name, processes, pauses={STEPS: 1.0})
    runs.wait_for(name, f"step {STEPS} runs")
    runs.kill(ids[-1:], signal.SIGTERM)
    assert runs.wait(ids) == [143] * processes
    assert_stopped_at(runs.folder / name, STEPS)
    assert not (runs.folder / name / "all_results.json").exists()
    assert_goes_on(runs, name, expected[processes], processes)


@pytest.mark.parametrize("environment", [{}, {"TORCHELASTIC_RUN_ID": "none"}], ids=["alone", "under a launcher"])
def test_the_second_ctrl_c_ends_at_once(runs: Runs, environment: dict[str, str]) -> None:
    """A launcher repeats the first one, which is not meant as a second."""
    name = f"twice-{len(environment)}"
    ids = runs.start(name, environment=environment, pauses={7: 60.0})
    runs.wait_for(name, "step 7 runs")
    runs.kill(ids, signal.SIGINT)
    runs.wait_for(name, "Ctrl-C again ends at once, and the step is lost")
    if environment:
        runs.kill(ids, signal.SIGINT)
    time.sleep(2.5)
    runs.kill(ids, signal.SIGINT)
    assert runs.wait(ids, 20) in ([130], [-signal.SIGINT])
    assert_stopped_at(runs.folder / name, 6)


def test_the_second_ctrl_c_ends_a_process_that_hangs_in_a_collective(runs: Runs) -> None:
    """Python's handlers do not run there."""
    name = "hangs"
    ids = runs.start(name, per_rank=[{}, {"pauses": {7: 60.0}}])
    runs.wait_for(name, "step 7 runs")
    time.sleep(1.0)
    runs.kill(ids[:1], signal.SIGINT)
    runs.wait_for(name, "SIGINT: saving a checkpoint after this step")
    time.sleep(2.5)
    runs.kill(ids[:1], signal.SIGINT)
    assert runs.wait(ids, 30) == [130, 1]
    assert "process 0 has ended without a word" in runs.log(name, 1)


def test_loader_workers_outlive_a_signal_to_all(runs: Runs, expected: dict[int, Path]) -> None:
    name = "workers"
    ids = runs.start(name, 2, dataloader_num_workers=2, pauses={7: 1.0})
    runs.wait_for(name, "step 7 runs")
    runs.kill(ids, signal.SIGTERM, groups=True)
    assert runs.wait(ids) == [143, 143]
    assert_stopped_at(runs.folder / name, 7)
    assert until(lambda: not any(map(group_exists, ids)), 30), "the workers end with the run"
    assert_goes_on(runs, name, expected[2], 2)


def group_exists(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_tracker_that_ends_slowly_is_waited_for(runs: Runs) -> None:
    """The other process, which has none and ends sooner, is not taken for dead."""
    name = "tracker"
    ids = runs.start(name, 2, report_to=["tensorboard"], tracker_pause=6.0, pauses={7: 1.0})
    runs.wait_for(name, "step 7 runs")
    runs.kill(ids[:1], signal.SIGTERM)
    assert runs.wait(ids) == [143, 143]
    assert "error:" not in runs.log(name)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_time_limit(runs: Runs, expected: dict[int, Path], processes: int) -> None:
    """One command, queued anew until it ends well."""
    name, starts, codes = f"limited-{processes}", 0, [143] * processes
    while codes == [143] * processes:
        codes = runs.finish(name, processes, max_runtime=0.02, pause=0.25, resume_from_checkpoint="true")
        starts += 1
        assert damage(last_checkpoint(runs.folder / name)) is None
    assert codes == [0] * processes, runs.log(name)
    assert 2 <= starts <= STEPS
    assert_same_run(runs.folder / name, expected[processes])


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_ends_the_other(runs: Runs, expected: dict[int, Path], killed: int) -> None:
    name, other = f"killed-{killed}", 1 - killed
    ids = runs.start(name, 2, pauses={7: 1.0})
    runs.wait_for(name, "step 7 runs")
    runs.kill([ids[killed]])
    codes = runs.wait(ids, 30)
    assert (codes[killed], codes[other]) == (-signal.SIGKILL, 1)
    log = runs.log(name, other)
    assert f"error: process {killed} has ended without a word" in log and "Traceback" not in log
    assert checkpoints(runs.folder / name)[-1] == 6
    assert_goes_on(runs, name, expected[2], 2)
