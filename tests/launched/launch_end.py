"""Started by the tests on two processes: a backward and a reduction, then how many threads of gloo are left."""

import atexit
import sys
from pathlib import Path

import torch


def threads() -> int:
    """Threads of gloo that carry out collectives, and may hold tensors."""
    names = [task.read_text(encoding="utf-8") for task in Path("/proc/self/task").glob("*/comm")]
    assert names
    return sum("gloo_runloop" in name for name in names)


# What is registered first runs last.
atexit.register(lambda: sys.stdout.write(f"at the end {threads()}\n"))

from accumft.launch import make_accelerator, prepare  # noqa: E402

accelerator = make_accelerator()
model = torch.nn.Linear(3, 1)
model, optimizer = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1, 3)).sum().backward()
optimizer.step()  # imports modules that keep the process group
sys.stdout.write(f"in the run {threads()}\n")
