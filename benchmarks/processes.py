"""Starts the workers of a measurement: fresh processes that find each other over gloo, or one alone."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

DISTRIBUTED = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WorkerError(RuntimeError):
    """A worker ended with an error; the message is the end of what it wrote."""


def run_workers(script: Path, args: Sequence[str], num_processes: int, threads: int, timeout: float = 3600) -> float:
    """Runs `script` on `num_processes` processes of `threads` threads each, to their end.

    Returns:
        The time (`time.time()`) at which they were started.

    Raises:
        WorkerError: one of them failed (the others are ended), or time ran out.
    """
    base = {name: value for name, value in os.environ.items() if name not in DISTRIBUTED}
    base = {name: value for name, value in base.items() if not name.startswith("ACCELERATE_")}
    base |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    base |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    if num_processes > 1:
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_processes)}
        base |= {"LOCAL_WORLD_SIZE": str(num_processes)}
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.txt" for rank in range(num_processes)]
        workers = []
        for rank, log in enumerate(logs):
            ranked = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_processes > 1 else {}
            with open(log, "wb") as output:
                workers.append(
                    subprocess.Popen(
                        [sys.executable, str(script), *args],
                        env=base | ranked,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            failed = _wait(workers, started + timeout)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
        if failed is not None:
            lines = logs[failed].read_text(encoding="utf-8", errors="replace").splitlines()
            raise WorkerError("\n".join(lines[-30:]) or "it ran out of time")
    return started


def _wait(workers: list["subprocess.Popen[bytes]"], deadline: float) -> int | None:
    """The number of the first worker seen to fail, or None when all have ended well."""
    while True:
        codes = [worker.poll() for worker in workers]
        bad = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if bad:
            return bad[0]
        if None not in codes:
            return None
        if time.time() > deadline:
            return codes.index(None)
        time.sleep(0.05)


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
