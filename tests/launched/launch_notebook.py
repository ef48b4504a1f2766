"""Started by the tests: what a notebook does, cell after cell. Each process appends a line of JSON to a file."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, debug_launcher, notebook_launcher
from accelerate.utils import InitProcessGroupKwargs

from accumft.launch import make_accelerator, reset_accelerate_state


def train(cell: str, log: str, precision: str | None, steps: int) -> None:
    """One optimizer step on the process's own number, so that the weight tells how many processes took part."""
    accelerator = make_accelerator(
        gradient_accumulation_steps=steps,
        mixed_precision=precision,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=20))],
    )
    _use_all_threads()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loss = model(torch.full((1, 1), float(accelerator.process_index + 1))).sum()
    accelerator.backward(loss * steps)
    optimizer.step()
    row = {
        "cell": cell,
        "num_processes": accelerator.num_processes,
        "rank": accelerator.process_index,
        "mixed_precision": accelerator.mixed_precision,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "weight": accelerator.unwrap_model(model).weight.item(),
    }
    with Path(log).open("a") as file:
        file.write(json.dumps(row) + "\n")


def _use_all_threads() -> None:
    """Runs on several OpenMP threads, which hangs in a forked process that asks for more than one."""
    torch.zeros(4_000_000).exp_().sum()


def main(log: str, port: str) -> None:
    Accelerator(mixed_precision="bf16")  # an earlier cell of the user's
    _use_all_threads()
    train("first", log, None, 4)
    train("second", log, "bf16", 2)
    reset_accelerate_state()
    notebook_launcher(train, ("notebook_launcher", log, None, 3), num_processes=2, use_port=port)
    Accelerator(mixed_precision="bf16")  # this one alone makes debug_launcher train twice, each process alone
    debug_launcher(train, ("debug_launcher", log, None, 3), num_processes=2)
    train("last", log, None, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
