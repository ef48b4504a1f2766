"""Started by the tests: makes two Accelerators, one after the other, and prints a line of JSON on what came."""

import json
import os
import sys
from datetime import timedelta

import torch
from accelerate.utils import InitProcessGroupKwargs

from accumft.errors import UserError
from accumft.launch import make_accelerator, num_processes


def main() -> None:
    asked = num_processes()
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=20))
    accelerator = make_accelerator(gradient_accumulation_steps=4, kwargs_handlers=[timeout])
    total = accelerator.reduce(torch.tensor(10.0**accelerator.process_index), reduction="sum")
    second = make_accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    ranks = second.gather(torch.tensor([second.process_index]))
    row = {
        "asked": asked,
        "num_processes": accelerator.num_processes,
        "rank": accelerator.process_index,
        "distributed_type": accelerator.distributed_type.value,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "device": accelerator.device.type,
        "total": total.item(),
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "first": [accelerator.mixed_precision, accelerator.gradient_accumulation_steps],
        "second": [second.mixed_precision, second.gradient_accumulation_steps],
        "ranks": ranks.tolist(),
    }
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    second.wait_for_everyone()
    second.end_training()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
