"""How the model is computed, with the same numbers: gradient checkpointing and torch.compile."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device

from accumft.data.windows import Batch
from accumft.errors import UserError
from accumft.models import enable_gradient_checkpointing
from accumft.recipe import TrainingRecipe, refuse_unused
from accumft.step import LossSum


def configure_compute(model: Any, recipe: TrainingRecipe) -> None:
    """Makes a `transformers` model compute as the recipe says, in place, before it is prepared.

    Raises:
        UserError: the model has no gradient checkpointing, or torch no such backend.
    """
    if recipe.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    if not recipe.torch_compile:
        refuse_unused(recipe, ("torch_compile_backend",), "no --torch_compile")
        return
    backends = sorted(map(str, torch.compiler.list_backends(exclude_tags=())))
    if recipe.torch_compile_backend not in backends:
        raise UserError(f"--torch_compile_backend {recipe.torch_compile_backend}: not one of {', '.join(backends)}")
    # In place: the model stays what it is to DDP, to saving, and to whoever asks for its class. Dynamic: micro-batches
    # have many shapes, and each would be compiled anew.
    model.compile(backend=recipe.torch_compile_backend, dynamic=True)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether `configure_compute` has compiled it."""
    return getattr(model, "_compiled_call_impl", None) is not None


def num_compilations() -> int:
    """Graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def warm_up(
    accelerator: Accelerator, model: torch.nn.Module, micro_batches: Sequence[Batch], loss_sum: LossSum
) -> None:
    """Runs forward and backward so that a compiled model is compiled before the clock of the training starts.

    Weights, buffers and gradients stay as they are.
    """
    bare = accelerator.unwrap_model(model)
    was_training = bare.training
    bare.train()  # another graph than that of evaluation
    buffers = {name: buffer.clone() for name, buffer in bare.named_buffers()}
    for batch in micro_batches:
        loss_sum(bare, send_to_device(batch, accelerator.device)).backward()
    bare.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in bare.named_buffers():
            buffer.copy_(buffers[name])
    bare.train(was_training)
