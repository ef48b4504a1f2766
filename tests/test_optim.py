"""Optimizers: what decays, and what each name makes."""

import pytest
import torch

from accumft.errors import UserError
from accumft.optim import build_optimizer, parameter_groups
from accumft.recipe import TrainingRecipe


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))


def test_biases_and_norms_do_not_decay() -> None:
    net = model()
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    decayed, kept = parameter_groups(net, 0.1)
    assert [names[id(p)] for p in decayed["params"]] == ["0.weight", "2.weight"]
    assert [names[id(p)] for p in kept["params"]] == ["1.weight", "1.bias", "2.bias"]
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)


def test_frozen_parameters_are_left_out() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(net, 0.1)) == 4
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameters"):
        build_optimizer(net, TrainingRecipe())


@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({}, "AdamW", {"fused": True, "lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8}),
        ({"optim": "adamw_torch", "adam_beta2": 0.98}, "AdamW", {"fused": False, "betas": (0.9, 0.98)}),
        ({"optim": "sgd", "sgd_momentum": 0.9, "learning_rate": 0.1}, "SGD", {"momentum": 0.9, "lr": 0.1}),
        ({"optim": "adafactor"}, "Adafactor", {"relative_step": False, "scale_parameter": False, "lr": 5e-5}),
    ],
)
def test_names(fields: dict, kind: str, expected: dict) -> None:
    optimizer = build_optimizer(model(), TrainingRecipe(**fields))
    assert type(optimizer).__name__ == kind
    assert {name: optimizer.param_groups[0][name] for name in expected} == expected
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optim": "sgd", "adam_beta1": 0.8}, "--adam_beta1 0.8: has no effect with --optim sgd"),
        ({"sgd_momentum": 0.9}, "--sgd_momentum 0.9: has no effect with --optim adamw_torch_fused"),
    ],
)
def test_fields_without_effect(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_optimizer(model(), TrainingRecipe(**fields))


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"])
def test_each_lowers_the_loss(optim: str) -> None:
    torch.manual_seed(0)
    net = model()
    optimizer = build_optimizer(net, TrainingRecipe(optim=optim, learning_rate=0.05))
    tokens, labels = torch.arange(5), torch.tensor([0, 1, 2, 0, 1])
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(net(tokens), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
