"""RankWatch and check_agreement on real processes over gloo: who dies is named, who lives is left alone.

One helper process imports torch, and forks the two or three processes of each case (tests/launched/launch_ranks.py).
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, free_port, launch_environment

from accumft.agreement import check_agreement, versions
from accumft.launch import make_accelerator, reset_accelerate_state
from accumft.ranks import RankWatch, lost_rank

KILLED = "has ended without a word (killed, out of memory, or its machine is gone)"
RESUME = "; with --resume_from_checkpoint true the run goes on from its last checkpoint"
SECONDS = 10.0
"""In which the others end: many times what they need."""


class Processes:
    """The processes of one case."""

    def __init__(self, helper: "Helper", case: str, count: int, folder: Path) -> None:
        self.helper, self.folder, self.count = helper, folder, count
        request = {"case": case, "processes": count, "folder": str(folder), "port": free_port()}
        self.pids: list[int] = helper.ask(request)

    def wait_until_ready(self, name: str = "ready") -> None:
        end = time.monotonic() + 60
        while not all((self.folder / f"{name}-{rank}").exists() for rank in range(self.count)):
            assert time.monotonic() < end, self.stderr
            time.sleep(0.02)

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], signal_number)

    def stop(self) -> None:
        """Ends the loop of a case."""
        (self.folder / "stop").touch()

    def wait(self, seconds: float = SECONDS) -> list[int | None]:
        """→ exit codes by rank; None: still alive after `seconds`."""
        return self.helper.ask({"wait": self.pids, "seconds": seconds})

    @property
    def stderr(self) -> list[str]:
        """By rank, without empty lines."""
        files = [self.folder / f"stderr-{rank}" for rank in range(self.count)]
        return [
            "\n".join(filter(None, file.read_text().split("\n"))) if file.exists() else "not started" for file in files
        ]


class Helper:
    """The process that forks those of a case."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder, self.cases = process, folder, 0
        assert process.stdout is not None and process.stdout.readline() == "ready\n"

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, case: str, count: int = 2) -> Processes:
        self.cases += 1
        folder = self.folder / f"{self.cases}-{case}"
        folder.mkdir()
        return Processes(self, case, count, folder)


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    environment = launch_environment() | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(ROOT / "tests/launched/launch_ranks.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as process:
        try:
            yield Helper(process, tmp_path_factory.mktemp("ranks"))
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("case", ["hang", "train", "fork"])
def test_a_killed_process_is_named_and_ends_the_other(helper: Helper, case: str, killed: int) -> None:
    processes = helper.start(case)
    processes.wait_until_ready()
    processes.kill(killed)
    codes = processes.wait()
    other = 1 - killed
    assert codes[killed] == -9 and codes[other] == 1
    assert processes.stderr[other] == f"error: process {killed} {KILLED}; this process ({other}) ends too{RESUME}"
    if case == "fork":
        child = int((processes.folder / f"child-{killed}").read_text())
        os.kill(child, 0)  # it lived on all the time: it did not hide the death of its parent


@pytest.mark.parametrize("case", ["hang", "train"])
def test_the_third_process_learns_which_one_was_killed(helper: Helper, case: str) -> None:
    processes = helper.start(case, 3)
    processes.wait_until_ready()
    processes.kill(1)
    assert processes.wait() == [1, -9, 1]
    for rank in (0, 2):
        assert processes.stderr[rank] == f"error: process 1 {KILLED}; this process ({rank}) ends too{RESUME}"


def test_an_exception_of_one_process_is_quoted_by_the_others(helper: Helper) -> None:
    processes = helper.start("raise_alone", 3)
    assert processes.wait() == [1, 1, 1]
    assert "Traceback" in processes.stderr[1] and "this process" not in processes.stderr[1]
    quoted = f"ArithmeticError: loss nan at step 7 {'x' * 600}"[:500]  # in one line
    for rank in (0, 2):
        assert processes.stderr[rank] == f"error: process 1 ended: {quoted}; this process ({rank}) ends too"


def test_the_broken_collective_of_the_others_is_not_shown_beside_the_exception(helper: Helper) -> None:
    processes = helper.start("raise_alone_in_training", 3)
    assert processes.wait() == [1, 1, 1]
    for rank in (0, 2):
        assert processes.stderr[rank] == (
            f"error: process 1 ended: ArithmeticError: loss nan; this process ({rank}) ends too"
        )


@pytest.mark.parametrize("case, files", [("raise_together", ["notes.csv"] * 3), ("raise_each_its_own", None)])
def test_a_mistake_that_every_process_finds_is_no_death(helper: Helper, case: str, files: list[str] | None) -> None:
    processes = helper.start(case, 3)
    assert processes.wait() == [2, 2, 2]
    files = files or [f"notes-{rank}.csv" for rank in range(3)]
    assert processes.stderr == [f"error: --train_file {file}: no column" for file in files]


def test_a_shortage_on_every_process_keeps_its_tracebacks(helper: Helper) -> None:
    processes = helper.start("run_out_of_memory_together", 3)
    assert processes.wait() == [1, 1, 1]
    for text in processes.stderr:
        assert text.startswith("Traceback") and text.endswith("OutOfMemoryError: CUDA out of memory")


def test_a_process_that_is_stopped_for_a_while_is_not_dead(helper: Helper) -> None:
    processes = helper.start("train", 3)
    processes.wait_until_ready()
    for rank in (0, 1):
        processes.kill(rank, signal.SIGSTOP)
        time.sleep(5.0 if rank == 1 else 2.0)
        processes.kill(rank, signal.SIGCONT)
    processes.stop()
    assert processes.wait() == [0, 0, 0]
    assert processes.stderr == ["", "", ""]


@pytest.mark.parametrize("case", ["first_one_first", "last_one_first"])
def test_who_finishes_is_dead_to_nobody(helper: Helper, case: str) -> None:
    processes = helper.start(case, 3)
    assert processes.wait() == [0, 0, 0]
    assert processes.stderr == ["", "", ""]


def test_a_second_run_in_the_same_processes_is_watched_again(helper: Helper) -> None:
    processes = helper.start("twice")
    processes.wait_until_ready()
    processes.kill(1)
    assert processes.wait() == [1, -9]
    assert processes.stderr[0] == f"error: process 1 {KILLED}; this process (0) ends too{RESUME}"


def test_a_run_that_lost_a_process_does_not_end_well(helper: Helper) -> None:
    processes = helper.start("finish_without_the_lost")
    processes.wait_until_ready()
    processes.kill(1)
    assert processes.wait() == [1, -9]
    assert processes.stderr[0].startswith("error: process 1 ") and "\n" not in processes.stderr[0]


def test_a_forked_child_says_nothing_in_its_parents_name(helper: Helper) -> None:
    processes = helper.start("child_leaves")
    processes.wait_until_ready()
    time.sleep(0.5)
    processes.stop()
    assert processes.wait() == [0, 0]
    assert processes.stderr == ["", ""]


def test_strangers_change_nothing(helper: Helper) -> None:
    processes = helper.start("foreign", 3)
    processes.wait_until_ready()
    port = int((processes.folder / "port").read_text())
    with pytest.raises(ConnectionRefusedError), contextlib.closing(socket.create_connection(("127.0.0.1", port))):
        pass  # once all have come, nobody else can
    processes.kill(1)
    assert processes.wait() == [1, -9, 1]
    assert processes.stderr[2] == f"error: process 1 {KILLED}; this process (2) ends too{RESUME}"


def test_out_of_reach_is_a_warning(helper: Helper) -> None:
    processes = helper.start("out_of_reach")
    processes.wait_until_ready()
    processes.stop()
    assert processes.wait() == [0, 0]
    said, silence = processes.stderr
    assert said.startswith(
        "warning: a process that dies will be noticed late: process 0 waited in vain for 1; process 1 "
    )
    assert "process 1 does not reach process 0 at 127.0.0.2 (" in said and "\n" not in said
    assert silence == ""


def test_one_process_alone_is_not_watched_and_agrees_with_itself() -> None:
    reset_accelerate_state()
    accelerator = make_accelerator()
    with pytest.raises(RuntimeError, match="mine"), RankWatch(accelerator) as watch:
        raise RuntimeError("mine")
    assert watch.lost is None and lost_rank() is None
    check_agreement(accelerator, {"--seed": object()})
    reset_accelerate_state()


def test_versions_are_those_installed() -> None:
    import accelerate
    import numpy
    import torch

    found = versions()
    assert list(found) == ["python", "accumft", "torch", "transformers", "accelerate", "tokenizers", "numpy"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["accumft"] == __import__("accumft").__version__
    assert (found["accelerate"], found["numpy"]) == (accelerate.__version__, numpy.__version__)
    assert torch.__version__.startswith(found["torch"].split("+")[0])


def test_agreement(helper: Helper) -> None:
    processes = helper.start("agree", 3)
    assert processes.wait(30) == [0, 0, 0], processes.stderr
    found = [json.loads((processes.folder / f"{rank}.json").read_text()) for rank in range(3)]
    assert found[0] == found[1] == found[2]
    remedy = "; start all of them with the same command, the same data and the same versions"
    same = "x" * 40
    assert {name: text and text.removesuffix(remedy) for name, text in found[0].items()} == {
        "same": None,
        "one": "processes disagree: --train_file is 'ab.csv' on processes 0, 2 and 'b.csv' on process 1",
        "none": "processes disagree: --seed is None on process 0 and 1 on processes 1, 2",
        "kind": "processes disagree: --dropout is 0 on process 0 and 0.0 on processes 1, 2",
        "three": "processes disagree: --seed is 0 on process 0, 1 on process 1 and 2 on process 2",
        "several": "processes disagree: "
        + "; ".join(f"--field_{n} is {n} on process 0, {n + 1} on process 1 and {n + 2} on process 2" for n in range(3))
        + "; and 2 more",
        "absent": "processes disagree: --new is absent on processes 0, 1 and 2 on process 2",
        "long": f"processes disagree: --train_file is …{same}0/notes.csv' on process 0, "
        f"…{same}1/notes.csv' on process 1 and …{same}2/notes.csv' on process 2",
    }
