"""The gradient that each way of training makes of one effective batch. Imported and started by exactness.py.

Everything is in float64, without dropout and without clipping, and the optimizer records what it is given and leaves
the weights alone: what differs from the full-batch reference is arithmetic, not rounding.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from exactness_cases import CASES, CLASS_WEIGHTS, Case, Recorder, collate, make_model, make_rows, mean_loss, reference
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

FABRIC_PACKAGES = {"lightning": "lightning.fabric", "lightning_fabric": "lightning_fabric"}
TOKEN_BUDGET = 64  # of accumft's micro-batches: two or three of the longest rows


def trainer(case: Case, accepts_loss_kwargs: bool | None = None) -> torch.Tensor:
    """transformers.Trainer; class weights as its documentation has them, by overriding `compute_loss`.

    Args:
        accepts_loss_kwargs: what `model.accepts_loss_kwargs` is set to; None: left as the model class has it.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class WeightedTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = mean_loss(case, outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    model = make_model()
    if accepts_loss_kwargs is not None:
        model.accepts_loss_kwargs = accepts_loss_kwargs
    optimizer = Recorder(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=case.micro_batch,
            gradient_accumulation_steps=case.accumulation,
            num_train_epochs=1,
            train_sampling_strategy="sequential",
            max_grad_norm=0.0,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        kind = WeightedTrainer if case.class_weights else Trainer
        running = kind(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(make_rows(case.examples)),
            data_collator=collate,
            optimizers=(optimizer, schedule),
        )
        running.remove_callback(PrinterCallback)
        running.train()
    return optimizer.gradients[-1]


def trainer_fixed(case: Case) -> torch.Tensor:
    return trainer(case, accepts_loss_kwargs=False)


def accelerate_example(case: Case) -> torch.Tensor:
    """The loop of Accelerate's examples/by_feature/gradient_accumulation.py."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulation)
    model = make_model().train()
    recorder = Recorder(model)
    loader = DataLoader(make_rows(case.examples), batch_size=case.micro_batch, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, recorder, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            labels = batch.pop("labels")
            accelerator.backward(mean_loss(case, model(**batch).logits, labels))
            optimizer.step()
            optimizer.zero_grad()
    return recorder.gradients[-1]


def bare(case: Case) -> torch.Tensor:
    """Plain PyTorch as tutorials have it: each mean loss divided by the number of micro-batches of a full step."""
    model: Any = make_model().train()
    recorder = Recorder(model)
    rank = torch.distributed.get_rank() if case.processes > 1 else 0
    if case.processes > 1:
        model = DistributedDataParallel(model)
    batches = torch.arange(case.examples).split(case.micro_batch)[rank :: case.processes]
    rows = make_rows(case.examples)
    for number, indices in enumerate(batches, start=1):
        batch = collate([rows[index] for index in indices])
        is_last = number % case.accumulation == 0 or number == len(batches)
        with contextlib.nullcontext() if is_last or case.processes == 1 else model.no_sync():
            labels = batch.pop("labels")
            (mean_loss(case, model(**batch).logits, labels) / case.accumulation).backward()
        if is_last:
            recorder.step()
            recorder.zero_grad()
    return recorder.gradients[-1]


def fabric(case: Case) -> torch.Tensor:
    """Lightning Fabric as its page on gradient accumulation has it."""
    fabric_class: Any = fabric_module().Fabric
    runner = fabric_class(accelerator="cpu", devices=case.processes, precision="64-true")
    runner.launch()
    model = make_model().train()
    recorder = Recorder(model)
    model, optimizer = runner.setup(model, recorder)
    loader = DataLoader(make_rows(case.examples), batch_size=case.micro_batch, collate_fn=collate)  # type: ignore[arg-type]
    loader = runner.setup_dataloaders(loader)
    for number, batch in enumerate(loader, start=1):
        is_last = number % case.accumulation == 0 or number == len(loader)
        with runner.no_backward_sync(model, enabled=not is_last):
            labels = batch.pop("labels")
            runner.backward(mean_loss(case, model(**batch).logits, labels) / case.accumulation)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return recorder.gradients[-1]


def fabric_module() -> Any:
    """lightning.fabric or lightning_fabric, whichever is installed; None: neither is."""
    for package, module in FABRIC_PACKAGES.items():
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(module)
    return None


def accumft(case: Case) -> torch.Tensor:
    """accumft's plan, windows and step; it cuts by itself, by tokens, into micro-batches of unequal sizes."""
    import numpy as np
    from datasets import Dataset

    from accumft.data.windows import WindowDataset, lengths_of
    from accumft.launch import make_accelerator
    from accumft.losses import ClassificationLoss
    from accumft.plan import Plan, epoch_order, resolve_batch_sizes
    from accumft.step import train_step
    from accumft.window_plan import WindowPlan

    batch = resolve_batch_sizes(
        case.effective_batch, None, None, num_processes=case.processes, max_tokens_per_micro_batch=TOKEN_BUDGET
    )
    accelerator = make_accelerator(gradient_accumulation_steps=batch.gradient_accumulation_steps)
    model = make_model()
    recorder = Recorder(model)
    model, optimizer = accelerator.prepare(model, recorder)
    weights = CLASS_WEIGHTS if case.class_weights else None
    criterion = ClassificationLoss("single_label_classification", class_weights=weights).double()
    plan = Plan.of(case.examples, batch, seed=0, num_train_epochs=1, max_steps=-1)
    # The plan shuffles; in this order the shuffled data set is the one that the peers read from start to end.
    dataset = Dataset.from_list(make_rows(case.examples)).select(np.argsort(epoch_order(case.examples, 0, 0)))

    def collate_columns(columns: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
        names = ("input_ids", "labels")
        return collate([dict(zip(names, values)) for values in zip(*(columns[name] for name in names))])

    def loss_sum(model: Any, batch: Any) -> torch.Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return criterion(model(**inputs).logits, batch["labels"])

    windows = WindowDataset(dataset, WindowPlan(plan, lengths_of(dataset)), collate_columns, accelerator.process_index)
    for window in windows.loader():
        train_step(accelerator, model, optimizer, window, loss_sum, lambda batch: criterion.num_items(batch["labels"]))
    return recorder.gradients[-1]


PEERS: dict[str, Callable[[Case], torch.Tensor]] = {
    "Trainer": trainer,
    "Trainer, accepts_loss_kwargs=False": trainer_fixed,
    "Accelerate's example loop": accelerate_example,
    "bare loop": bare,
    "Lightning Fabric": fabric,
    "accumft": accumft,
}


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """Accelerate keeps its state for the whole process: each peer starts without the last one's."""
    from accumft.launch import reset_accelerate_state

    kept = dict(os.environ)
    reset_accelerate_state()
    try:
        yield
    finally:
        reset_accelerate_state()
        os.environ.clear()
        os.environ.update(kept)


def measure(case: Case) -> dict[str, dict[str, float]]:
    """For each peer: "error" ‖g − g_ref‖ / ‖g_ref‖ and "scale" ⟨g, g_ref⟩ / ‖g_ref‖², the best factor between them."""
    expected = reference(case)
    found = {}
    for name, peer in PEERS.items():
        if peer is fabric and fabric_module() is None:
            continue
        with clean_state():
            gradient = peer(case)
        error = float((gradient - expected).norm() / expected.norm())
        found[name] = {"error": error, "scale": float(gradient @ expected / (expected @ expected))}
    return found


def main() -> None:
    """On each of several processes: the cases of that many; the first writes them as json into the file named."""
    import json

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    size = torch.distributed.get_world_size()
    results = [{**asdict(case), "found": measure(case)} for case in CASES if case.processes == size]
    if torch.distributed.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(results, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
