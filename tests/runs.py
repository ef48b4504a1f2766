"""Runs of the text recipe in processes of their own, which a test can kill: see launched/launch_runs.py."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from launching import free_port, launch_environment
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
STEPS = 12
FIELDS: dict[str, Any] = {
    "num_train_epochs": 2.0,
    "effective_batch_size": 8,
    "eval_steps": 3,
    "save_steps": 2,
    "save_total_limit": 2,
    "dropout": 0.1,
}
"""12 steps with dropout, a checkpoint at each second one, an evaluation at each third."""


class Runs:
    """Starts runs, each of some forked processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = launch_environment() | {
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            "ACCUMFT_CACHE": str(folder / "cache"),
        }
        script = ROOT / "tests" / "launched" / "launch_runs.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert self.process.stdout and self.process.stdout.readline() == "ready\n"

    def _ask(self, **request: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self, name: str, processes: int = 1, *, per_rank: Sequence[Mapping[str, Any]] = (), **fields: Any
    ) -> list[int]:
        """Begins a run in the folder `name`, with FIELDS and what else is given: process ids.

        Besides the recipe's fields there are: pause (seconds that each step takes longer), pauses (these steps, by
        number), evaluation_pause, tracker_pause (the end of a tracker), tokenize_pause (where it tokenises a first
        split), timeout (of the process group, in seconds), environment, folder (to work in), version (that accumft
        says it has).

        Args:
            per_rank: fields of each process that go before the others.
        """
        values = {**FIELDS, **fields, "output_dir": str(self.folder / name)}
        of_ranks = [{**values, **own} for own in per_rank or [{}] * processes]
        return self._ask(start=of_ranks, port=free_port(), log=str(self.folder / f"{name}.log"))

    def kill(self, ids: list[int], number: int = signal.SIGKILL, groups: bool = False) -> None:
        """Signals the processes; with `groups` also those that they have started."""
        self._ask(kill=ids, signal=int(number), groups=groups)

    def wait(self, ids: list[int], seconds: float = 120.0) -> list[int | None]:
        """Exit codes; negative where a signal ended the process, None where it had to be killed for lateness."""
        return self._ask(wait=ids, seconds=seconds)

    def finish(self, name: str, processes: int = 1, **fields: Any) -> list[int | None]:
        """A run to its end: exit codes."""
        return self.wait(self.start(name, processes, **fields))

    def log(self, name: str, rank: int = 0) -> str:
        """What a process of the run has printed."""
        path = self.folder / f"{name}.log.{rank}"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def wait_for(self, name: str, text: str, rank: int = 0) -> None:
        """Until a process of the run has printed it."""
        assert until(lambda: text in self.log(name, rank)), self.log(name, rank)

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


def runs_of(folder: Path) -> Iterator[Runs]:
    """For a fixture."""
    runs = Runs(folder)
    yield runs
    runs.close()


def until(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Waits for it; False: in vain."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what differs from run to run: times, and rows of checkpoints."""
    found = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not any(name.startswith("save_") for name in row):
            found.append({name: value for name, value in row.items() if not name.endswith("seconds")})
    return found


def same_model(one: Path, other: Path) -> bool:
    """Whether the models of two folders are the same to the last bit."""
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_same_run(found: Path, expected: Path) -> None:
    """That a run which was interrupted has come to what the undisturbed one came to, to the last bit."""
    assert same_model(found, expected), "the best model"
    assert same_model(last_checkpoint(found), last_checkpoint(expected)), "the last model"
    assert rows(found) == rows(expected), "each step and evaluation once, with the same numbers"
    assert [row["step"] for row in rows(found) if "loss" in row] == list(range(1, STEPS + 1))
    assert checkpoints(found)[-1] == STEPS


def last_checkpoint(folder: Path) -> Path:
    return sorted((folder / "checkpoints").glob("step-*"))[-1]


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's folder."""
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
