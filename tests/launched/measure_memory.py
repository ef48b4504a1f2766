"""Peak memory of an optimizer step, measured: each case in a process of its own. Linux.

Argument: a json list of cases, objects with "config" (fields of BertConfig), "rows", "length", "optim",
"mixed_precision", "gradient_checkpointing". Prints a json list: the bytes by which the process grew at most
over what it was before the model.

The environment must make malloc return what is freed: MALLOC_ARENA_MAX=1, and MALLOC_MMAP_THRESHOLD_=65536, from which
size on a tensor is a mapping of its own. Else freed memory counts as in use.
"""

import json
import multiprocessing
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from accumft.optim import build_optimizer
from accumft.recipe import TrainingRecipe

TINY = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 100}


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def train(case: dict[str, Any]) -> None:
    """Two steps: a short one, after which optimizer and gradients have all they keep, and that of the case."""
    model = BertForSequenceClassification(BertConfig(**case["config"])).train()
    if case["gradient_checkpointing"]:
        model.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = build_optimizer(model, TrainingRecipe(optim=case["optim"]))
    mixed = case["mixed_precision"] != "no"
    for rows, length in ((1, 8), (case["rows"], case["length"])):
        input_ids = torch.randint(5, 100, (rows, length))
        mask = torch.ones_like(input_ids)
        # Padding, so that attention has a mask.
        mask[-1, -1] = 0
        with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
            logits = model(input_ids=input_ids, attention_mask=mask).logits
        labels = torch.zeros(len(logits), dtype=torch.long)
        torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def warm_up(case: dict[str, Any]) -> None:
    train({**case, "config": {**case["config"], **TINY}, "rows": 2, "length": 16})


def measure(case: dict[str, Any], results: Any) -> None:
    """Puts the growth of this process into the queue."""
    # What is loaded at the first use (oneDNN, imports) is not the model's; nor are the pages of libraries, which a
    # forked process maps again one by one.
    warm_up(case)
    # Sets the peak back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    train(case)
    results.put(status("VmHWM") - before)


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    for case in cases:
        warm_up(case)
    measured = []
    context = multiprocessing.get_context("fork")
    for case in cases:
        results = context.SimpleQueue()
        process = context.Process(target=measure, args=(case, results))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(1)
        measured.append(results.get())
    print(json.dumps(measured))
