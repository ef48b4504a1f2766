"""Started by the tests: imports everything once, then forks the processes of one small run after the other.

Standard input has a request a line: {"start": recipe fields of each process, "port": p, "log": file} → process ids,
{"kill": process ids, "signal": number, "groups": bool} → null, {"wait": process ids, "seconds": s} → exit codes,
negative for a signal (null: alive still after that time, and killed now).
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import TensorBoardTracker
from torch import distributed

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "recipes")]

import text_cls  # noqa: E402
from small import small_recipe  # noqa: E402

import accumft  # noqa: E402
from accumft import cli  # noqa: E402
from accumft.data import text  # noqa: E402

# What a run imports only when it comes to it; here once for all of them.
LATER = ["datasets", "evaluate", "transformers.models.bert.modeling_bert", "accumft.report.plots", "scipy.optimize"]
LATER += ["accumft.metrics.single_label_classification", "matplotlib.backends.backend_agg", "matplotlib.colorbar"]


def start(fields: list[dict[str, Any]], port: int, log: str) -> list[int]:
    """Forks the processes of a run, which end as the command line does."""
    ids = []
    for rank, own in enumerate(fields):
        pid = os.fork()
        if pid == 0:
            _run(own, rank, len(fields), port, f"{log}.{rank}")
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
    _interfere(fields)
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


def _interfere(fields: dict[str, Any]) -> None:
    """What a test wants of this process besides the recipe: see `runs.Runs.start`."""
    os.environ |= fields.pop("environment", {})
    os.chdir(fields.pop("folder", "."))
    accumft.__version__ = fields.pop("version", accumft.__version__)
    pause, pauses = fields.pop("pause", 0.0), fields.pop("pauses", {})
    evaluation_pause, tracker_pause = fields.pop("evaluation_pause", 0.0), fields.pop("tracker_pause", 0.0)
    if timeout := fields.pop("timeout", None):
        begin = partial(distributed.init_process_group, timeout=timedelta(seconds=timeout))
        distributed.init_process_group = begin
    if tokenize_pause := fields.pop("tokenize_pause", 0.0):
        text.ROWS_IN_MEMORY, made_once, pauses_left = 0, text.made_once, [tokenize_pause]

        def slowly(kind: str, made_from: Any, write: Callable[[str], Any]) -> Any:
            def slow_write(path: str) -> Any:
                print("tokenises")
                time.sleep(pauses_left.pop() if pauses_left else 0.0)
                return write(path)

            return made_once(kind, made_from, slow_write)

        text.made_once = slowly
    train_step, predict, finish = text_cls.train_step, text_cls.predict, TensorBoardTracker.finish

    def slow_step(accelerator: Any, model: Any, optimizer: Any, window: Any, *args: Any) -> Any:
        print(f"step {window.step + 1} runs")
        time.sleep(pauses.get(str(window.step + 1), pause))
        return train_step(accelerator, model, optimizer, window, *args)

    def slow_predict(*args: Any) -> Any:
        print("an evaluation runs")
        time.sleep(evaluation_pause)
        return predict(*args)

    def slow_finish(tracker: Any) -> None:
        time.sleep(tracker_pause)
        finish(tracker)

    text_cls.train_step, text_cls.predict, TensorBoardTracker.finish = slow_step, slow_predict, slow_finish


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
    for name in LATER:
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        if "start" in request:
            answer = start(request["start"], request["port"], request["log"])
        elif "kill" in request:
            for pid in request["kill"]:
                (os.killpg if request["groups"] else os.kill)(pid, request["signal"])
        else:
            answer = wait(request["wait"], request["seconds"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
