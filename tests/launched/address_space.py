"""Started by the tests: trains under an address-space limit that the planned micro-batches do not fit under.

The limit is the kernel's (RLIMIT_AS), the failure the allocator's own. Prints one line of JSON.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accumft.data.windows import Window
from accumft.launch import make_accelerator
from accumft.memory_limit import MemoryLimit
from accumft.step import train_step

WIDTH, ROWS = 4096, 16_000
ROOM = 500 * 2**20  # bytes beyond what the process has when it begins; the whole window in one needs 2 GiB and more


def loss_sum(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch["x"]).squeeze(-1) - batch["labels"]).square().sum()


def weights_after(limit: bool) -> tuple[list[int], list[int | None], torch.Tensor]:
    torch.manual_seed(0)
    accelerator = make_accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(8, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, generator=generator)
    batch = {"x": x, "labels": x.sum(dim=1)}
    memory = MemoryLimit()
    # Threads and kernels are made before the limit, as in a run that has been going on.
    train_step(accelerator, model, optimizer, [{k: v[:64] for k, v in batch.items()}], loss_sum, len_of, None, memory)
    if limit:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
    results = [
        train_step(accelerator, model, optimizer, Window([batch], step=step), loss_sum, len_of, None, memory)
        for step in range(3)
    ]
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return [r.oom_retries for r in results], [r.micro_batch_limit for r in results], weights


def len_of(batch: Any) -> int:
    return len(batch["labels"])


def main() -> None:
    torch.set_num_threads(1)
    retries, limits, found = weights_after(limit=True)
    free, _, expected = weights_after(limit=False)
    error = float((found - expected).norm() / expected.norm())
    print(json.dumps({"retries": retries, "limits": limits, "without": free, "error": error}))


if __name__ == "__main__":
    main()
