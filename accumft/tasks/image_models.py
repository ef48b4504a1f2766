"""Image classifiers: from a folder or the hub with a head for the labels at hand, or a new small ViT."""

from typing import Any

import torch
from torch import nn

from accumft.data.image_decoding import Images
from accumft.data.text_files import one_line
from accumft.data.windows import WindowDataset
from accumft.errors import UserError
from accumft.memory_limit import is_out_of_memory
from accumft.pretrained import Pretrained, set_dropout, set_labels
from accumft.window_plan import WindowPlan

SMALL_VIT = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192}
PATCH = 4
"""Side of the patches of the small ViT, in pixels."""
PIXELS_OF_A_TOKEN = 16
"""Side of what counts as a token where a model has no patches of its own all the way through."""
_DEPTH_DROPOUT = ("drop_path_rate", "drop_connect_rate", "drop_path", "drop_rate")


class _FrozenStatistics:
    """A BatchNorm that normalises by what it has learnt before, in training too."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)  # type: ignore[misc]


_FROZEN = {
    kind: type(f"Frozen{kind.__name__}", (_FrozenStatistics, kind), {})
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The layers whose output for a row depends in training on what else is in its micro-batch."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def freeze_batch_norm(model: nn.Module) -> None:
    """Lets BatchNorm use its running statistics in training too, in place, and leave them; its weights still learn."""
    for module in batch_norms(model):
        kind: Any = type(module)
        if kind in _FROZEN:
            module.__class__ = _FROZEN[kind]  # saved and loaded as what it was: the class has no say in that
            module.eval()


def is_frozen(model: nn.Module) -> bool:
    """Whether all BatchNorm layers of a model are frozen."""
    return all(isinstance(module, _FrozenStatistics) for module in batch_norms(model))


def choose_batch_norm(model: nn.Module, freeze: bool | None) -> None:
    """`freeze_batch_norm` where a recipe says so, or says nothing and the pretrained model has any."""
    if freeze and not batch_norms(model):
        raise UserError(f"--freeze_batch_norm: {type(model).__name__} has no BatchNorm; leave it out")
    if freeze is not False:
        freeze_batch_norm(model)


def load_image_classifier(
    model_name_or_path: str,
    *,
    id2label: dict[int, str],
    problem_type: str,
    image_size: int,
    dropout: float | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """A model for `AutoModelForImageClassification` in float32; a head for other labels is replaced by a new one.

    Args:
        image_size: side of its images.
        dropout: every dropout and drop-path probability of the configuration, 0 to 1; None: as the model has them.
    """
    from transformers import AutoModelForImageClassification

    source = Pretrained(model_name_or_path, trust_remote_code, new="left out, a small new ViT is trained")
    config = source.config()
    _configure(config, id2label, problem_type, dropout)
    model, found = source.model_and_keys(AutoModelForImageClassification, config, ignore_mismatched_sizes=True)
    for name, there, here in found["mismatched_keys"]:
        if list(there[1:]) != list(here[1:]) or here[0] != len(id2label):
            raise UserError(f'--model_name_or_path "{model_name_or_path}": {name} does not fit its config.json')
    if getattr(config, "num_channels", 3) != 3:
        raise UserError(
            f'--model_name_or_path "{model_name_or_path}": takes {config.num_channels} channels, but images have 3, as '
            "in the pipelines of transformers"
        )
    own = getattr(config, "image_size", None)
    if own is not None and position_of(model) and own not in (image_size, (image_size, image_size), [image_size] * 2):
        raise UserError(
            f"--image_size {image_size}: the positions of this model are those of {own} pixels; leave it out"
        )
    model.config.image_size = image_size
    # A new head is nothing to speak of. CLIP and its like have their parts side by side, in no module of that name.
    body = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    new = [name for name in found["missing_keys"] if name.startswith(body) and not name.startswith("classifier")]
    source.note_new({"missing_keys": new})
    return model


def position_of(model: nn.Module) -> bool:
    """Whether a model has a table of positions, as ViT has, which fits images of one size alone."""
    return any(name.endswith("position_embeddings") and p.ndim == 3 for name, p in model.named_parameters())


def fitting_size(images: Images) -> int:
    """Side for a new ViT: that of the first image, up to a multiple of 16, and 16 to 64."""
    return min(64, -(-max(images.load(0).size) // 16) * 16)


def build_small_vit(
    *, id2label: dict[int, str], problem_type: str, image_size: int, dropout: float | None = None
) -> Any:
    """A new ViT of 4 layers of 96 over patches of 4 x 4 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    if image_size % PATCH:
        raise UserError(f"--image_size {image_size}: the new ViT takes multiples of {PATCH}")
    config = ViTConfig(image_size=image_size, patch_size=PATCH, **SMALL_VIT)
    _configure(config, id2label, problem_type, dropout)
    return ViTForImageClassification(config)


def _configure(config: Any, id2label: dict[int, str], problem_type: str, dropout: float | None) -> None:
    set_labels(config, id2label)
    config.problem_type = problem_type
    set_dropout(config, dropout)
    for name in _DEPTH_DROPOUT:
        if dropout is not None and isinstance(getattr(config, name, None), float):
            setattr(config, name, dropout)


def tokens_of_image(config: Any, size: tuple[int, int]) -> int:
    """What an image counts in `max_tokens_per_micro_batch`: a ViT's patches and one; else a token for 16 x 16 pixels.

    Models of stages (Swin, ConvNeXt, ResNet) name patches of 4 pixels which they soon merge: they are counted like
    EfficientNet, which names none.

    Args:
        size: (width, height).
    """
    patch, (width, height) = getattr(config, "patch_size", None), size
    if isinstance(patch, int) and not hasattr(config, "depths"):
        return (width // patch) * (height // patch) + 1
    return -(-width // PIXELS_OF_A_TOKEN) * -(-height // PIXELS_OF_A_TOKEN)


def with_lengths(dataset: Any, config: Any, size: tuple[int, int]) -> Any:
    """A data set with the column "length", the same for all: the planner cuts by it."""
    return dataset.add_column("length", [tokens_of_image(config, size)] * len(dataset))


def check_batches(model: nn.Module, windows: WindowDataset) -> None:
    """Runs the model on the first image, and raises a `UserError` where it cannot take what it will be given.

    A BatchNorm over single pixels has no variance in a micro-batch of one image, which torch refuses.

    Args:
        model: where it trains; its statistics stay as they are.
    """
    pixels = windows[0].micro_batches[0]["pixel_values"][:1].to(next(model.parameters()).device)
    state = [(buffer, buffer.clone()) for buffer in model.buffers()]
    was_training = model.training
    alone = min(_sizes(windows.plan)) == 1
    try:
        with torch.no_grad():
            model.train(alone)(pixel_values=pixels)
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            return  # the preflight has more to say of that
        if "more than 1 value per channel" in str(error):
            raise UserError(
                "a micro-batch of one image, which BatchNorm of this model cannot train on: --freeze_batch_norm True, "
                "or another --effective_batch_size or --per_device_train_batch_size"
            ) from error
        side = tuple(pixels.shape[-2:])
        raise UserError(f"--image_size: the model does not take images of {side} ({one_line(error)})") from error
    finally:
        model.train(was_training)
        with torch.no_grad():
            for buffer, value in state:
                buffer.copy_(value)


def _sizes(plan: WindowPlan) -> list[int]:
    """Rows of the micro-batches of a whole step and of the last one of an epoch: as all images count alike, of all."""
    steps = {0, min(plan.plan.steps_per_epoch, plan.plan.total_steps) - 1}
    processes = range(plan.plan.batch.num_processes)
    return [len(rows) for step in steps for process in processes for rows in plan.micro_batches(step, process)]
