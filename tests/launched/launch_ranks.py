"""Started by the tests: imports torch once, then forks the processes of one run after the other, as it is asked to.

Standard input has a request a line, {"case", "processes", "folder", "port"} or {"wait": process ids, "seconds"};
standard output an answer a line: the process ids, or the exit codes (None: still alive then, and killed).
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from accumft import ranks
from accumft.agreement import check_agreement
from accumft.errors import UserError
from accumft.launch import make_accelerator
from accumft.ranks import RankWatch, lost_rank

GRACE = 1.0
STOP = "stop"


class Rank:
    """One process of a run: what its case needs."""

    def __init__(self, folder: Path) -> None:
        timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
        self.folder = folder
        self.accelerator: Accelerator = make_accelerator(kwargs_handlers=[timeout])
        self.rank, self.count = self.accelerator.process_index, self.accelerator.num_processes

    def watch(self) -> RankWatch:
        return RankWatch(self.accelerator, GRACE)

    def ready(self) -> None:
        """Tells the test that this process is where its case wants it."""
        (self.folder / f"ready-{self.rank}").touch()

    def hang(self) -> None:
        """Stands for a collective that NCCL does not end; ends when the test says so."""
        self.ready()
        while not (self.folder / STOP).exists():
            time.sleep(0.05)

    def train(self) -> None:
        """Collectives, one after the other, until the test says so."""
        self.ready()
        total = torch.zeros(())
        while not total.item():
            total = torch.tensor(float((self.folder / STOP).exists()))
            torch.distributed.all_reduce(total)
            time.sleep(0.005)


def hang(rank: Rank) -> None:
    with rank.watch():
        rank.hang()


def train(rank: Rank) -> None:
    with rank.watch():
        rank.train()


def raise_alone(rank: Rank) -> None:
    with rank.watch():
        if rank.rank == 1:
            raise ArithmeticError("loss nan\nat step 7 " + "x" * 600)
        rank.hang()


def raise_alone_in_training(rank: Rank) -> None:
    with rank.watch():
        if rank.rank == 1:
            raise ArithmeticError("loss nan")
        rank.train()


def raise_together(rank: Rank) -> None:
    with rank.watch():
        time.sleep(0.3 * rank.rank)
        raise UserError("--train_file notes.csv: no column")


def run_out_of_memory_together(rank: Rank) -> None:
    with rank.watch():
        time.sleep(0.3 * rank.rank)
        raise torch.OutOfMemoryError("CUDA out of memory")


def raise_each_its_own(rank: Rank) -> None:
    with rank.watch():
        time.sleep(0.3 * rank.rank)
        raise UserError(f"--train_file notes-{rank.rank}.csv: no column")


def first_one_first(rank: Rank) -> None:
    with rank.watch():
        time.sleep(0.5 * rank.rank)


def last_one_first(rank: Rank) -> None:
    with rank.watch():
        time.sleep(0.5 * (rank.count - rank.rank))


def twice(rank: Rank) -> None:
    """A second run in the same processes."""
    first_one_first(rank)
    rank.accelerator.wait_for_everyone()
    train(rank)


def finish_without_the_lost(rank: Rank) -> None:
    """Process 0 needs nobody any more, but a run that lost a process has not finished."""
    with rank.watch() as watch:
        rank.ready()
        while watch.lost is None:
            time.sleep(0.05)


def fork(rank: Rank) -> None:
    """Each process has a living child, as the workers of a DataLoader are, that was forked under the watch."""
    with rank.watch():
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        (rank.folder / f"child-{rank.rank}").write_text(str(child))
        rank.hang()


def child_leaves(rank: Rank) -> None:
    """A forked child that runs out of the `with` says nothing in its parent's name."""
    with rank.watch():
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            rank.hang()
    if child == 0:
        os._exit(0)


def foreign(rank: Rank) -> None:
    """Before process 1 calls, others do: with another token, with no bytes a text has, too short, silent, gone."""
    connect = socket.create_connection

    def late(address: tuple[str, int], timeout: float) -> socket.socket:
        hellos = [b"0" * 32 + b"00000001", b"\xff" * 5000, b"{}\n", b"", None]
        for hello in hellos:
            stranger = connect(address)
            if hello is None:
                stranger.close()
            else:
                stranger.sendall(hello)
                strangers.append(stranger)
        (rank.folder / "port").write_text(str(address[1]))
        return connect(address, timeout)

    strangers: list[socket.socket] = []
    if rank.rank == 1:
        socket.create_connection = late  # type: ignore[assignment]
    with rank.watch():
        for stranger in strangers:
            stranger.close()
        rank.hang()


def out_of_reach(rank: Rank) -> None:
    """A firewall between the machines: the run goes on without the watch."""
    ranks.JOIN_SECONDS = 2.0
    if rank.rank == 1:
        os.environ["MASTER_ADDR"] = "127.0.0.2"
    with rank.watch():
        rank.train()


def agree(rank: Rank) -> None:
    """Writes what each comparison came to."""
    me, nan = rank.rank, float("nan")
    several = {f"--field_{number}": number + me for number in range(5)}
    path = "/home/me/" + "x" * 200
    cases: dict[str, dict[str, Any]] = {
        "same": {"--seed": 1, "--learning_rate": nan, "--text_column": ("a", None), "torch": "2.13"},
        "one": {"--seed": 1, "--train_file": "ab.csv"[me == 1 :]},
        "none": {"--seed": None if me == 0 else 1},
        "kind": {"--dropout": 0 if me == 0 else 0.0},
        "three": {"--seed": me},
        "several": several,
        "absent": {"--seed": 1} | ({"--new": 2} if me == 2 else {}),
        "long": {"--train_file": f"{path}{me}/notes.csv"},
    }
    found = {}
    for name, values in cases.items():
        try:
            found[name] = check_agreement(rank.accelerator, values)
        except UserError as error:
            found[name] = str(error)
    (rank.folder / f"{me}.json").write_text(json.dumps(found))


CASES: dict[str, Callable[[Rank], None]] = {
    "hang": hang,
    "train": train,
    "raise_alone": raise_alone,
    "raise_alone_in_training": raise_alone_in_training,
    "raise_together": raise_together,
    "run_out_of_memory_together": run_out_of_memory_together,
    "raise_each_its_own": raise_each_its_own,
    "first_one_first": first_one_first,
    "last_one_first": last_one_first,
    "twice": twice,
    "finish_without_the_lost": finish_without_the_lost,
    "fork": fork,
    "child_leaves": child_leaves,
    "foreign": foreign,
    "out_of_reach": out_of_reach,
    "agree": agree,
}


def start(case: str, processes: int, folder: str, port: int) -> list[int]:
    pids = []
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            os._exit(as_main_does(case, rank, processes, Path(folder), port))
        pids.append(pid)
    return pids


def as_main_does(case: str, rank: int, processes: int, folder: Path, port: int) -> int:
    """→ the exit code. An error that only follows from a lost process has no traceback."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT), descriptor)
    code = 0
    try:
        CASES[case](Rank(folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except Exception:
        code = 1
        if lost_rank() is None:
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def wait(pids: list[int], seconds: float) -> list[int | None]:
    """→ as `subprocess` has them: -9 for a process that SIGKILL ended."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid in pids:
            if pid not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(status[1])
        time.sleep(0.02)
    for pid in set(pids) - codes.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = wait(request["wait"], request["seconds"]) if "wait" in request else start(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
