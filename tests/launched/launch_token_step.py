"""Started by the tests on two processes: short epochs and evaluations of entity recognition; writes what each found."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate.utils import InitProcessGroupKwargs

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "recipes")]

from token_cases import tiny_model, tiny_tokenizer, train_on, windows_of  # noqa: E402

from accumft.cut import Limits  # noqa: E402
from accumft.data.tokens import TokenCollator  # noqa: E402
from accumft.launch import make_accelerator  # noqa: E402
from accumft.tasks.token_evaluation import predict_tokens  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
    accelerator = make_accelerator(gradient_accumulation_steps=2, kwargs_handlers=[timeout])
    assert accelerator.num_processes == 2
    tails = {}
    for tail in (1, 2, 5, 15):
        weights, results, plan = train_on(accelerator, 16 + tail, {"micro_batch_size": 3}, 1.0)
        tails[tail] = {
            "weights": weights,
            "losses": [result.loss for result in results],
            "examples": [result.examples for result in results],
            "batches": [plan.effective_batch(0), plan.effective_batch(1)],
        }
    model, collate = tiny_model(torch.float32), TokenCollator(tiny_tokenizer())
    logits = {
        number: predict_tokens(accelerator, model, windows_of(number).windows, collate, Limits(4)).numpy()
        for number in (1, 2, 20)
    }
    torch.save({"tails": tails, "logits": logits}, f"{sys.argv[1]}/{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
