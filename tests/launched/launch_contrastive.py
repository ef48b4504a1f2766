"""Started by the tests on two processes: the contrastive step on every cut, tails, dropout, and failures of one."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contrastive_cases import (
    LOSSES,
    TWO_PROCESS_CUTS,
    cached_on_cut,
    contrast_of,
    embed,
    make_encoder,
    make_pairs,
    nan_in,
    out_of_memory_at,
    texts_of,
    window_of,
)
from tasks import flat

from accumft.cached_step import cached_step
from accumft.data.windows import Window
from accumft.errors import NonFiniteLossError
from accumft.launch import make_accelerator

Results = dict[str, Any]


def prepared(accelerator: Accelerator, **fields: Any) -> tuple[Any, Any]:
    model = make_encoder(**fields)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def step(accelerator: Accelerator, model: Any, optimizer: Any, window: Window, embed: Any, data: Any) -> Any:
    contrast = contrast_of(data, "infonce")
    return cached_step(accelerator, model, optimizer, window, embed, contrast.loss_sum, contrast.num_items)


def cuts(accelerator: Accelerator) -> Results:
    found = {}
    for loss in LOSSES:
        for name, cut in TWO_PROCESS_CUTS.items():
            weights, result = cached_on_cut(accelerator, make_pairs(), loss, cut)
            found[f"{loss} {name}"] = {
                "weights": weights,
                "loss": result.loss,
                "items": result.items,
                "grad_norm": result.grad_norm,
            }
    return found


def tails(accelerator: Accelerator) -> Results:
    """Short last effective batches; of one pair, the second process has a placeholder alone."""
    found = {}
    for pairs in (1, 2, 5):
        data = make_pairs(pairs)
        model, optimizer = prepared(accelerator)
        mine = list(range(pairs))[accelerator.process_index :: 2]
        window = Window([texts_of(data, mine or [0])], placeholders=frozenset() if mine else frozenset({0}))
        result = step(accelerator, model, optimizer, window, embed, data)
        found[str(pairs)] = {"weights": flat(accelerator.unwrap_model(model)), "loss": result.loss}
    return found


def dropout(accelerator: Accelerator) -> Results:
    """The vectors of both passes, and the gradient that each process's own graph would have had."""
    data = make_pairs()
    model, optimizer = prepared(accelerator, dropout=0.3)
    window = window_of(data, [3, 5], first=8 * accelerator.process_index, seed=5 + accelerator.process_index)
    seen: list[torch.Tensor] = []

    def watched(model: Any, batch: Any) -> torch.Tensor:
        seen.append(embed(model, batch))
        return seen[-1]

    result = step(accelerator, model, optimizer, window, watched, data)
    return {
        "first": [part.detach() for part in seen[:2]],
        "second": [part.detach() for part in seen[2:]],
        "batches": list(window.micro_batches),
        "weights": flat(accelerator.unwrap_model(model)),
        "loss": result.loss,
    }


def failures(accelerator: Accelerator) -> Results:
    """Out of memory on one process in each pass, and a NaN on one: both hear of it."""
    data = make_pairs()
    found: Results = {}
    first = 8 * accelerator.process_index
    for culprit in range(2):
        for call in range(4):
            model, optimizer = prepared(accelerator)
            fails = out_of_memory_at(call) if accelerator.process_index == culprit else embed
            result = step(accelerator, model, optimizer, window_of(data, [4, 4], first), fails, data)
            weights = flat(accelerator.unwrap_model(model))
            found[f"{culprit} {call}"] = {"weights": weights, "retries": result.oom_retries}
    model, optimizer = prepared(accelerator)
    before = flat(accelerator.unwrap_model(model))
    try:
        step(accelerator, model, optimizer, window_of(data, [4, 4], first), nan_in(7), data)
    except NonFiniteLossError as error:
        found["nan"] = str(error)
    found["untouched"] = torch.equal(flat(accelerator.unwrap_model(model)), before)
    return found


def main() -> None:
    torch.set_num_threads(1)
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
    accelerator = make_accelerator(gradient_accumulation_steps=2, kwargs_handlers=[timeout])
    assert accelerator.num_processes == 2
    results = {part.__name__: part(accelerator) for part in (cuts, tails, dropout, failures)}
    torch.save(results, f"{sys.argv[1]}/{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
