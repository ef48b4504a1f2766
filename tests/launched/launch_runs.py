"""Started by the tests: imports everything once, then forks the processes of one small run after the other.

Standard input has a request a line: {"start": recipe fields, "processes": n, "port": p, "log": file} → process ids,
{"kill": process ids, "signal": number} → null, {"wait": process ids, "seconds": s} → exit codes, negative for a signal
(null: alive still after that time, and killed now).
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "recipes")]

import text_cls  # noqa: E402
from small import small_recipe  # noqa: E402

from accumft import cli  # noqa: E402


def start(fields: dict[str, Any], processes: int, port: int, log: str) -> list[int]:
    """Forks the processes of a run, which end as the command line does."""
    ids = []
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            _run(dict(fields), rank, processes, port, f"{log}.{rank}")
        ids.append(pid)
    return ids


def _run(fields: dict[str, Any], rank: int, processes: int, port: int, log: str) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(output), "w", buffering=1) for _ in range(2))
    sys.stdin.close()
    if processes > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    code = 0
    # Slower than it could be, where a test wants to be sure to interrupt it.
    pause = fields.pop("pause", 0.0)
    original = text_cls.train_step

    def paused(*args: Any) -> Any:
        time.sleep(pause)
        return original(*args)

    text_cls.train_step = paused
    try:
        # As on the command line, where errors become exit codes.
        recipe = small_recipe(Path(fields.pop("output_dir")), **fields)
        cli.parse = lambda recipe_class, args: recipe  # type: ignore[assignment]
        cli.main(text_cls.run, text_cls.TextClsRecipe)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(ids: list[int], seconds: float) -> list[int | None]:
    codes: dict[int, int | None] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(ids):
        for pid in ids:
            if pid in codes:
                continue
            late = time.monotonic() > end
            if late:
                os.kill(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if found:
                codes[pid] = None if late else os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return [codes[pid] for pid in ids]


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        if "start" in request:
            answer = start(request["start"], request["processes"], request["port"], request["log"])
        elif "kill" in request:
            for pid in request["kill"]:
                os.kill(pid, request["signal"])
        else:
            answer = wait(request["wait"], request["seconds"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
