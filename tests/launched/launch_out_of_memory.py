"""Started by the tests on two processes: one of them runs out of memory at each micro-batch in turn."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import InitProcessGroupKwargs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from out_of_memory import PLACES, TASK, failing, three_steps
from step_cases import losses_of

from accumft.errors import NotEnoughMemoryError
from accumft.launch import make_accelerator
from accumft.memory_limit import MemoryLimit

CUT = [[4, 4], [4, 4]]


def main() -> None:
    torch.set_num_threads(1)
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=30))
    accelerator = make_accelerator(kwargs_handlers=[timeout])
    expected, _, _ = three_steps(accelerator, CUT, losses_of(TASK)[0])
    found: dict[str, Any] = {"expected": expected}
    for culprit in range(2):
        for place in PLACES:
            for call in range(2, 4):
                calls = iter(range(10**6))
                fails = lambda calls=calls, call=call, culprit=culprit: (  # noqa: E731
                    next(calls) == call and accelerator.process_index == culprit
                )
                memory = MemoryLimit()
                weights, results, model = three_steps(accelerator, CUT, failing(place, fails), memory)
                found[f"{culprit} {place} {call}"] = {
                    "weights": weights,
                    "retries": [result.oom_retries for result in results],
                    "limits": [result.micro_batch_limit for result in results],
                    "micro_batches": [result.micro_batches for result in results],
                    "statistics": model.statistics.running_mean.clone(),
                }
    always = failing("forward", lambda: accelerator.process_index == 1)
    try:
        three_steps(accelerator, CUT, always)
    except NotEnoughMemoryError as error:
        found["hopeless"] = str(error)
    torch.save(found, f"{sys.argv[1]}/{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
