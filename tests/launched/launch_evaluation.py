"""Started by the tests on two processes: predictions for data sets of many sizes; writes what each process got."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate.utils import InitProcessGroupKwargs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evaluation_cases import BATCH_SIZES, SIZES, predictions

from accumft.launch import make_accelerator


def main() -> None:
    torch.set_num_threads(1)
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=30))
    accelerator = make_accelerator(kwargs_handlers=[timeout])
    assert accelerator.num_processes == 2
    found = {(n, size): predictions(accelerator, n, size) for n in SIZES for size in BATCH_SIZES}
    torch.save(found, f"{sys.argv[1]}/{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
