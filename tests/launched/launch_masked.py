"""Started by the tests on two processes: a masked language model on several cuts, and its evaluation."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate.utils import InitProcessGroupKwargs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from masked_cases import blocks_of, collator, tiny_bert, train

from accumft.cut import Limits
from accumft.launch import make_accelerator
from accumft.tasks.masked import MaskedLoss, evaluate_masked


def main() -> None:
    torch.set_num_threads(1)
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=30))
    accelerator = make_accelerator(gradient_accumulation_steps=2, kwargs_handlers=[timeout])
    assert accelerator.num_processes == 2
    found = {}
    for packed in (False, True):
        for rows in (17, 21, 31):  # the last effective batch of an epoch has 1, 5 and 15 blocks
            weights, results = train(accelerator, rows, {"rows": 3}, packed=packed, selects=True)
            found[f"{packed} {rows}"] = {"weights": weights, "losses": [result.loss for result in results]}
    model, tokenizer = tiny_bert()
    loss = MaskedLoss(model)
    for rows in (1, 21):
        blocks = blocks_of(tokenizer, rows)
        found[f"scores {rows}"] = evaluate_masked(
            accelerator, model, blocks, collator(tokenizer), Limits(max_tokens=60), loss
        )
    torch.save(found, f"{sys.argv[1]}/{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
