"""Started by the tests on two processes: every task on every cut and tail; writes each process's weights to a file."""

import math
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp16_cpu import Fp16CpuAccelerator
from step_cases import COMMUNICATION_CUTS, TWO_PROCESS_CUTS, losses_of, prepared, train_on_cut, train_on_tail
from tasks import TASKS, flat, make_data, make_model, rows, task_named

from accumft.data.windows import Window
from accumft.errors import EmptyWindowError, NonFiniteLossError
from accumft.launch import make_accelerator, reset_accelerate_state
from accumft.step import train_step

Results = dict[str, Any]


def cuts(accelerator: Accelerator) -> Results:
    found = {}
    for task in TASKS:
        for name, cut in TWO_PROCESS_CUTS.items():
            weights, results = train_on_cut(accelerator, task, cut, 5, 0.1, torch.float32)
            exact, (first,) = train_on_cut(accelerator, task, cut, 1, 1.0, torch.float64)
            found[f"{task.name} {name}"] = {
                "weights": weights,
                "exact": exact,
                "losses": [result.loss for result in results],
                "grad_norm": first.grad_norm,
                "examples": first.examples,
            }
    return found


def tails(accelerator: Accelerator) -> Results:
    found = {}
    for task in TASKS:
        for tail in range(1, 16):
            weights, results = train_on_tail(accelerator, task, tail, 3, 1.0, torch.float64)
            found[f"{task.name} {tail}"] = {
                "weights": weights,
                "losses": [result.loss for result in results],
                "examples": [result.examples for result in results],
            }
    return found


def clipped(accelerator: Accelerator) -> Results:
    cut = TWO_PROCESS_CUTS["3 / 5+5+3"]
    weights, (result,) = train_on_cut(accelerator, task_named("single_label"), cut, 1, 1.0, torch.float64, 0.05)
    return {"weights": weights, "grad_norm": result.grad_norm}


def communication(accelerator: Accelerator) -> Results:
    """Per cut: the sizes of the all-reduces of one step, and whether DistributedDataParallel made any of its own."""
    return {name: communication_of(accelerator, cut) for name, cut in COMMUNICATION_CUTS.items()}


def communication_of(accelerator: Accelerator, cut: list[list[int]]) -> Results:
    task = task_named("single_label")
    model, optimizer = prepared(accelerator, task, 0.1, torch.float32)
    sizes_reduced: list[int] = []
    by_ddp: list[int] = []
    original = dist.all_reduce

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        by_ddp.append(len(bucket.parameters()))
        buffer = bucket.buffer().div_(2)
        return original(buffer, async_op=True).get_future().then(lambda future: future.value()[0])

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes_reduced.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    model.register_comm_hook(None, hook)
    data, sizes = make_data(task, 16), cut[accelerator.process_index]
    offset = sum(cut[0]) if accelerator.process_index else 0
    pieces = torch.arange(offset, offset + sum(sizes)).split(sizes)
    dist.all_reduce = counted
    try:
        train_step(accelerator, model, optimizer, [rows(data, piece) for piece in pieces], *losses_of(task))
    finally:
        dist.all_reduce = original
    return {"by_ddp": by_ddp, "all_reduces": sizes_reduced}


def failures(accelerator: Accelerator) -> Results:
    """A NaN on the second process alone, and an effective batch without items: both raise on both processes."""
    task = task_named("token_items")
    model, optimizer = prepared(accelerator, task, 0.1, torch.float32)
    before = flat(model)
    loss_sum, num_items = losses_of(task)

    def poisoned(model: Any, batch: Any) -> torch.Tensor:
        loss = loss_sum(model, batch)
        return loss * math.nan if accelerator.process_index == 1 and len(batch["labels"]) == 2 else loss

    data = make_data(task, 10)
    first = 100 * accelerator.process_index
    window = Window(
        [rows(data, range(5)), rows(data, range(5, 7))], rows=[range(first, first + 5), range(first + 5, first + 7)]
    )
    found: Results = {}
    try:
        train_step(accelerator, model, optimizer, window, poisoned, num_items)
    except NonFiniteLossError as error:
        found["nan"] = str(error)
    empty = data | {"labels": torch.full((10, 7), -100)}
    try:
        train_step(accelerator, model, optimizer, [empty], loss_sum, num_items)
    except EmptyWindowError as error:
        found["empty"] = str(error)
    found["untouched"] = torch.equal(flat(model), before)
    found["goes_on"] = train_step(accelerator, model, optimizer, [data], loss_sum, num_items).loss
    return found


def fp16() -> Results:
    """An inf in the gradient of one process: both skip; the next step trains on."""
    return {"plain": fp16_with(fused=False), "fused": fp16_with(fused=True)}


def fp16_with(fused: bool) -> Results:
    reset_accelerate_state()
    accelerator = Fp16CpuAccelerator(cpu=True, mixed_precision="fp16", init_scale=2.0**10)
    task = task_named("single_label")
    model = make_model(task)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))
    loss_sum, num_items = losses_of(task)
    data = make_data(task, 8, seed=accelerator.process_index)
    before = flat(model)

    def overflowing(model: Any, batch: Any) -> torch.Tensor:
        loss = loss_sum(model, batch)
        if accelerator.process_index == 0:
            return loss
        # Finite itself, with a gradient that is not.
        return loss + (model.head.weight * 0.0).sum().sqrt()

    skipped = train_step(accelerator, model, optimizer, [data], overflowing, num_items, 1.0)
    kept, scale = torch.equal(flat(model), before), accelerator.scaler.get_scale()
    stepped = train_step(accelerator, model, optimizer, [data], loss_sum, num_items, 1.0)
    return {
        "skipped": not skipped.stepped,
        "kept": kept,
        "scale": scale,
        "stepped": stepped.stepped,
        "weights": flat(model),
        "moved": not torch.equal(flat(model), before),
        "loss": stepped.loss,
    }


def main() -> None:
    torch.set_num_threads(1)
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=30))
    accelerator = make_accelerator(gradient_accumulation_steps=2, kwargs_handlers=[timeout])
    assert accelerator.num_processes == 2
    results = {part.__name__: part(accelerator) for part in (cuts, tails, clipped, communication, failures)}
    results["fp16"] = fp16()
    torch.save(results, f"{sys.argv[1]}/{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
