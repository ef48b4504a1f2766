"""Started by the tests: 2,000 steps of a tiny model through `Run` and `train_step`, hardly two of the same shape.

Prints the resident memory in KiB after each 250 steps, as JSON. Arguments: the output folder, "packed" or "padded".
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accumft.data.text import TextCollator
from accumft.data.windows import WindowDataset
from accumft.evaluation import inputs_of
from accumft.launch import make_accelerator
from accumft.models import build_small_bert
from accumft.packing import pack
from accumft.plan import BatchSizes, Plan
from accumft.preflight import preflight
from accumft.recipe import TrainingRecipe
from accumft.run import Run
from accumft.schedule import build_schedule, build_scheduler
from accumft.step import train_step
from accumft.window_plan import WindowPlan

STEPS, EVERY = 2000, 250


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def loss_sum(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(**inputs_of(batch)).logits, batch["labels"], reduction="sum")


def main(folder: str, way: str) -> None:
    torch.set_num_threads(1)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(50))]
    model, tokenizer = build_small_bert(
        {word: index for index, word in enumerate(words)},
        id2label={0: "x", 1: "y"},
        problem_type="single_label_classification",
    )
    config = model.config
    config.update({"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32})
    model = type(model)(config)
    generator = random.Random(0)
    ids = [[generator.randrange(5, 55) for _ in range(generator.randint(2, 40))] for _ in range(8000)]
    columns = {
        "input_ids": ids,
        "attention_mask": [[1] * len(row) for row in ids],
        "labels": [len(row) % 2 for row in ids],
        "length": list(map(len, ids)),
    }
    data = Dataset.from_dict(columns)
    recipe = TrainingRecipe(
        output_dir=folder, padding_free=way == "packed", max_steps=STEPS, save_steps=500, max_tokens_per_micro_batch=64
    )
    accelerator = make_accelerator()
    plan = Plan.of(len(data), BatchSizes(4, None, 1, 1, 64), seed=0, num_train_epochs=1, max_steps=STEPS)
    packed = pack(model, tokenizer, data, recipe)
    assert (packed is not None) == (way == "packed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scheduler = build_scheduler(optimizer, build_schedule(recipe, plan.total_steps))
    model, optimizer = accelerator.prepare(model, optimizer)
    window_plan = WindowPlan(plan, np.array(columns["length"]), packed=packed is not None)
    windows = WindowDataset(data, window_plan, packed or TextCollator(tokenizer, None))
    shapes, found = set(), []
    with Run(recipe, accelerator, model, optimizer, scheduler, plan, tokenizer, ("loss", False)) as running:
        preflight(accelerator, model, optimizer, windows, loss_sum, running.memory)
        for window in running.windows(windows):
            shapes.add(tuple(tuple(batch["input_ids"].shape) for batch in window.micro_batches))
            result = train_step(
                accelerator, model, optimizer, window, loss_sum, lambda batch: len(batch["labels"]), 1.0, running.memory
            )
            scheduler.step()
            running.after_step(result)
            if running.step % EVERY == 0:
                found.append(resident())
    print(json.dumps({"resident": found, "shapes": len(shapes)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
