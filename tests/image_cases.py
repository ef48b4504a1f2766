"""Small images and image classifiers for tests, and the effective batch that the step is tested on."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from image_cls import ImageClsRecipe, loss_sum, num_items
from PIL import Image
from tasks import WEIGHTS, flat
from torch import nn

from accumft.losses import ClassificationLoss
from accumft.step import StepResult, train_step
from accumft.tasks.image_models import freeze_batch_norm

CLASSES = {0: "bar", 1: "disc", 2: "grid", 3: "void"}
SIDE = 16


def picture(kind: int, number: int, side: int = SIDE) -> Image.Image:
    """A grey picture of one of the four classes, with noise of its own."""
    noise = np.random.default_rng([kind, number]).integers(0, 90, (side, side))
    y, x = np.mgrid[:side, :side]
    shape = [x // 4 % 2, (x - side / 2) ** 2 + (y - side / 2) ** 2 < side, (x % 4 == 0) | (y % 4 == 0), x < 0][kind]
    return Image.fromarray((noise + 150 * shape).astype(np.uint8))


def write_folders(folder: Path, a_class: int = 6) -> Path:
    """A folder of images for each class; returns it."""
    for kind, name in CLASSES.items():
        (folder / name).mkdir(parents=True)
        for number in range(a_class):
            picture(kind, number).save(folder / name / f"{number}.png")
    return folder


def tiny_config(kind: str) -> Any:
    """Of a model of a few thousand weights."""
    from transformers import ConvNextConfig, EfficientNetConfig, ResNetConfig, ViTConfig

    if kind == "vit":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        return ViTConfig(image_size=SIDE, patch_size=8, **sizes)
    if kind == "convnext":
        return ConvNextConfig(hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, patch_size=4, drop_path_rate=0.3)
    if kind == "resnet":
        return ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic")
    # Its channels are a quarter of these.
    stages = {"in_channels": [32, 32], "out_channels": [32, 48], "kernel_sizes": [3, 3], "strides": [1, 2]}
    stages |= {"num_block_repeats": [1, 2], "expand_ratios": [1, 2], "depthwise_padding": []}
    sizes = {"width_coefficient": 0.25, "depth_coefficient": 1.0, "hidden_dim": 320, "image_size": SIDE}
    return EfficientNetConfig(**stages, **sizes, drop_connect_rate=0.3, dropout_rate=0.2)


def tiny_model(kind: str, labels: dict[int, str] | None = None, **changed: Any) -> Any:
    from transformers import AutoModelForImageClassification

    config = tiny_config(kind)
    for name, value in changed.items():
        setattr(config, name, value)
    config.num_labels = len(labels or CLASSES)
    config.id2label = labels or CLASSES
    torch.manual_seed(3)
    model = AutoModelForImageClassification.from_config(config)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


def save_model(kind: str, folder: Path, labels: dict[int, str] | None = None, **processor: Any) -> str:
    """The folder of a tiny model with its image processor, as a hub repository has it."""
    tiny_model(kind, labels or {number: str(number) for number in range(7)}).save_pretrained(folder)
    types = {"vit": "ViT", "convnext": "ConvNext", "resnet": "ConvNext", "efficientnet": "EfficientNet"}
    size = {"shortest_edge": SIDE} if types[kind] == "ConvNext" else {"height": SIDE, "width": SIDE}
    values = {"image_processor_type": f"{types[kind]}ImageProcessor", "size": size, **processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return str(folder)


def small_recipe(output_dir: Path, **fields: Any) -> ImageClsRecipe:
    """48 digits, 3 steps of 16 an epoch."""
    defaults: dict[str, Any] = {
        "effective_batch_size": 16,
        "num_train_epochs": 2.0,
        "max_train_samples": 48,
        "max_eval_samples": 16,
        "output_dir": str(output_dir),
    }
    return ImageClsRecipe(**{**defaults, **fields})


def batch_of(n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """n random images and labels, float64."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn((n, 3, SIDE, SIDE), generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(4, (n,), generator=generator)}


def step_model(kind: str, frozen: bool = True) -> Any:
    """float64, without dropout; BatchNorm frozen or not."""
    model = tiny_model(kind, drop_path_rate=0.0).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if frozen:
        freeze_batch_norm(model)
    return model


def reference_step(kind: str, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """One SGD step at a learning rate of 1 in plain PyTorch over the whole batch: (weights, loss)."""
    model = step_model(kind, frozen=False).eval()
    criterion = nn.CrossEntropyLoss(weight=WEIGHTS.double(), label_smoothing=0.1)
    loss = criterion(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return flat(model), loss.item()


def package_step(
    accelerator: Accelerator, kind: str, batch: dict[str, torch.Tensor], pieces: list[slice], frozen: bool = True
) -> tuple[torch.Tensor, StepResult, Any]:
    """The same through the package, these pieces of the batch being micro-batches of this process."""
    model = step_model(kind, frozen)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    criterion = ClassificationLoss(
        "single_label_classification", class_weights=WEIGHTS.tolist(), label_smoothing=0.1
    ).double()
    window = [{name: tensor[piece] for name, tensor in batch.items()} for piece in pieces]
    result = train_step(
        accelerator,
        model,
        optimizer,
        window,
        lambda model, batch: loss_sum(criterion, model, batch),
        lambda batch: num_items(criterion, batch),
    )
    bare = accelerator.unwrap_model(model)
    return flat(bare), result, bare


def pieces_of(sizes: list[int], start: int = 0) -> list[slice]:
    bounds = np.cumsum([start, *sizes]).tolist()
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]
