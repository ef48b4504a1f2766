"""Started by the tests on two processes: seq2seq steps on several cuts, and evaluations of many sizes; writes each
process's findings to a file."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate.utils import InitProcessGroupKwargs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seq2seq_cases import CUTS, EVALUATIONS, FAMILIES, SIZES, generated, train

from accumft.launch import make_accelerator


def main() -> None:
    torch.set_num_threads(1)
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=120))
    accelerator = make_accelerator(gradient_accumulation_steps=2, kwargs_handlers=[timeout])
    assert accelerator.num_processes == 2
    steps = {}
    for family in FAMILIES:
        for rows, tokens in CUTS:
            weights, results = train(accelerator, family, rows, tokens, torch.float64)
            steps[family, rows, tokens] = (weights, [(result.loss, result.items) for result in results])
    found = {(n, *limits): vars(generated(accelerator, "bart", n, *limits)) for n in SIZES for limits in EVALUATIONS}
    torch.save({"steps": steps, "generated": found}, f"{sys.argv[1]}/{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
