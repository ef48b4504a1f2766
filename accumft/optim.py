"""Optimizers by their Hugging Face names."""

import torch
from torch import nn

from accumft.errors import UserError
from accumft.recipe import TrainingRecipe, refuse_unused


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters in two groups: matrices with `weight_decay`; biases and norm weights (1-D) without."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, recipe: TrainingRecipe) -> torch.optim.Optimizer:
    """The optimizer that `recipe.optim` names, over the trainable parameters of `model` (before it is prepared)."""
    adam = recipe.optim in ("adamw_torch", "adamw_torch_fused")
    if not adam:
        refuse_unused(recipe, ("adam_beta1", "adam_beta2", "adam_epsilon"), f"--optim {recipe.optim}")
    if recipe.optim != "sgd":
        refuse_unused(recipe, ("sgd_momentum",), f"--optim {recipe.optim}")
    groups = parameter_groups(model, recipe.weight_decay)
    if not any(group["params"] for group in groups):
        raise UserError("the model has no trainable parameters")
    if adam:
        fused = recipe.optim == "adamw_torch_fused"
        betas = (recipe.adam_beta1, recipe.adam_beta2)
        return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=betas, eps=recipe.adam_epsilon, fused=fused)
    if recipe.optim == "sgd":
        return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.sgd_momentum)
    from transformers.optimization import Adafactor

    # As transformers' Trainer sets it up: the schedule, not the optimizer, decides the learning rate.
    return Adafactor(groups, lr=recipe.learning_rate, scale_parameter=False, relative_step=False)
