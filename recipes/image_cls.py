"""Image classification: one label, several labels, or a number for each image.

    accelerate launch recipes/image_cls.py
    accelerate launch recipes/image_cls.py --train_file photos --model_name_or_path google/vit-base-patch16-224

With no arguments it trains a new small ViT on the digits of scikit-learn, in about a minute of one free core, to a test
accuracy of 0.91 to 0.92 (seeds 42, 1, 2) on the handwriting of other people, where logistic regression on the pixels
has 0.90.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import set_seed

from accumft.cli import main
from accumft.compute import configure_compute
from accumft.data.files import numbers_of
from accumft.data.image_files import read_image_splits
from accumft.data.image_splits import ImageData, load_image_data
from accumft.data.images import ImageCollator, load_processor, output_size
from accumft.data.windows import Batch
from accumft.dry_run import RunPlan
from accumft.evaluation import logits_of, predict
from accumft.launch import leaves_no_state
from accumft.losses import ClassificationLoss
from accumft.plan import Plan
from accumft.preflight import preflight
from accumft.pretrained import resolve_model_path
from accumft.recipe import TableRecipe, checked, refuse_unused
from accumft.run import Run, RunResult
from accumft.schedule import build_schedule
from accumft.step import train_step
from accumft.tasks.classification import Scores, best_metric, loss_of, score
from accumft.tasks.image_classification import (
    augmentation_of,
    check_fields,
    describe_data,
    fingerprint,
    load_digits,
    report,
)
from accumft.tasks.image_models import (
    build_small_vit,
    check_batches,
    choose_batch_norm,
    fitting_size,
    load_image_classifier,
    with_lengths,
)
from accumft.training import begin, set_up


@dataclass(kw_only=True, slots=True)
class ImageClsRecipe(TableRecipe):
    """Train a model that classifies images. Without data of your own: handwritten digits.

    train_file and the like may also be a folder with a folder of images for each class (or with such folders as train,
    val and test), or an .npz file with train_images, train_labels, val_images, … (MedMNIST) or images and labels."""

    model_name_or_path: str | None = None
    """Model folder or hub id: ViT, ConvNeXt, ResNet, EfficientNet, … Unset: a new small ViT."""
    trust_remote_code: bool = False
    """Run code that a model on the hub brings along."""
    dropout: float | None = 0.0
    """Every dropout and drop-path probability of the model, 0 to 1; None: as the model has them. At 0 nothing depends
    on the cut."""
    freeze_batch_norm: bool | None = None
    """Let BatchNorm use the statistics that it has, in training too: otherwise the step depends on how it is cut, and
    small micro-batches learn badly. Unset: yes, for a model that has any."""
    image_size: int | None = None
    """Side of the images that the model sees, in pixels. Unset: as the model's image processor has it; for a new ViT
    that of the first image, 16 to 64. An image counts as its 16 x 16 squares, or a ViT's patches, in
    max_tokens_per_micro_batch."""
    image_mean: tuple[float, ...] = ()
    """Mean of the three channels, as a share of white, instead of the image processor's; with image_std."""
    image_std: tuple[float, ...] = ()
    """Standard deviation of the three channels, likewise: a pixel p becomes (p / 255 - mean) / std, and no more."""

    image_column: str = "image"
    """Column of a table with the paths of images, relative to the table's folder, or the images themselves."""
    label_column: tuple[str, ...] = ("label",)
    """Column of the label; several for columns of 0 and 1, one a label."""
    label_delimiter: str | None = None
    """What separates the labels in a cell, such as "|", where an image may have several."""
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    """Unset: seen from the labels. Texts and whole numbers are classes, lists and 0/1 columns several labels, decimal
    numbers regression."""
    threshold: float = 0.5
    """Probability, 0 to 1, from which a label of several is predicted."""

    random_crop: float = 0.6
    """Training images: share of the area, 0 to 1, that a random crop has at least; 1: no crops. The six fields from
    here on are drawn anew for each image and epoch, from seed, epoch and image alone."""
    random_rotation: float = 15.0
    """Training images: degrees to either side, 0 to 180, that an image is turned at most."""
    horizontal_flip: float = 0.0
    """Training images: probability, 0 to 1, that left and right are exchanged. Not for digits, nor for X-rays."""
    vertical_flip: float = 0.0
    """Training images: probability, 0 to 1, that they are turned upside down by a mirror."""
    brightness: float = 0.0
    """Training images: made darker or lighter by a factor of 1 - this to 1 + this, 0 to 1."""
    contrast: float = 0.0
    """Training images: more or less contrast by a factor of 1 - this to 1 + this, 0 to 1."""

    loss: Literal["cross_entropy", "focal"] = "cross_entropy"
    """Loss of a classification; a regression has squared error."""
    focal_gamma: float = 2.0
    """Exponent of the focal loss."""
    class_weights: tuple[str, ...] = ()
    """"balanced", or a weight for each class in the order of their names."""
    pos_weight: tuple[str, ...] = ()
    """"balanced", or a weight for the positives of each label, where an image may have several."""
    label_smoothing: float = 0.0
    """Share of the target, 0 to 1, spread over all classes."""

    effective_batch_size: int | None = 32
    """Images per optimizer step, over all processes. Unset (None): per_device_train_batch_size x
    gradient_accumulation_steps x processes."""
    num_train_epochs: float = 40.0
    """Passes over the training data; a fraction ends mid-epoch. Not used when max_steps is positive. The default suits
    the digits; a pretrained model wants 2 to 10."""
    learning_rate: float = 2e-3
    """Peak learning rate. The default suits the new ViT; EfficientNet wants 3e-4 to 1e-3, a pretrained ViT 2e-5 to
    1e-4."""
    output_dir: str = "outputs/image_cls"
    """Folder for the model, the log and the report. An earlier run found there is moved aside, never overwritten."""


def load_data(recipe: ImageClsRecipe) -> tuple[ImageData, str]:
    """The images with their labels, and what they are in a line."""
    if recipe.train_file is None and recipe.dataset_name is None:
        return load_image_data(load_digits(), recipe), "handwritten digits, as scikit-learn brings them"
    return load_image_data(read_image_splits(recipe), recipe), recipe.train_file or recipe.dataset_name or ""


def build_model(recipe: ImageClsRecipe, data: ImageData) -> tuple[Any, Any]:
    """(model, image processor), the same on every process."""
    set_seed(recipe.seed)
    path = recipe.model_name_or_path and resolve_model_path(recipe.model_name_or_path)
    processor = load_processor(
        path,
        image_size=recipe.image_size or (fitting_size(data.images["train"]) if path is None else None),
        image_mean=recipe.image_mean,
        image_std=recipe.image_std,
        trust_remote_code=recipe.trust_remote_code,
    )
    head: dict[str, Any] = {
        "id2label": data.labels.id2label,
        "problem_type": data.labels.problem_type,
        "dropout": recipe.dropout,
    }
    side = max(output_size(processor))
    if recipe.model_name_or_path is None:
        return build_small_vit(image_size=side, **head), processor
    model = load_image_classifier(
        recipe.model_name_or_path, image_size=side, **head, trust_remote_code=recipe.trust_remote_code
    )
    choose_batch_norm(model, recipe.freeze_batch_norm)
    return model, processor


def loss_sum(criterion: ClassificationLoss, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Sum of the losses of a micro-batch."""
    return criterion(logits_of(model, batch), batch["labels"])


def num_items(criterion: ClassificationLoss, batch: Batch) -> torch.Tensor | float:
    """What that sum is to be divided by."""
    return criterion.num_items(batch["labels"])


@leaves_no_state
def run(recipe: ImageClsRecipe) -> RunResult:
    """Trains, evaluates, and leaves the model and its report in `recipe.output_dir`."""
    recipe = checked(recipe)
    check_fields(recipe)
    accelerator, batch = begin(recipe)
    data, source = load_data(recipe)
    if data.labels.problem_type != "multi_label_classification":
        refuse_unused(recipe, ("threshold",), data.labels.problem_type)
    if data.validation is None:
        fields = ("early_stopping_patience", "metric_for_best_model", "greater_is_better", "eval_steps")
        refuse_unused(recipe, fields, "no validation data")
    steps = Plan.of(len(data.train), batch, recipe.seed, recipe.num_train_epochs, recipe.max_steps)
    schedule = build_schedule(recipe, steps.total_steps)
    criterion = loss_of(recipe, data).to(accelerator.device)
    validation = recipe.validation_file or f"the validation rows of {source}"
    best = best_metric(recipe.metric_for_best_model, recipe.greater_is_better, data, validation)

    model, processor = build_model(recipe, data)
    configure_compute(model, recipe)
    size = output_size(processor)
    plain = {name: ImageCollator(images, processor, size) for name, images in data.images.items()}
    collate = replace(plain["train"], augmentation=augmentation_of(recipe), seed=recipe.seed)
    rows = {name: with_lengths(split, model.config, size) for name, split in data.splits.items()}
    accelerator.print(describe_data(data, size, model))
    losses = partial(loss_sum, criterion)
    ready = set_up(recipe, accelerator, model, steps, schedule, rows["train"], collate, losses)
    if isinstance(ready, RunResult):
        return ready
    model, optimizer, scheduler, steps, windows, eval_limits = ready
    check_batches(accelerator.unwrap_model(model), windows)

    def scores(split: str) -> Scores | None:
        """The scores of a split on the main process; None elsewhere."""
        logits = predict(accelerator, model, rows[split], plain[split], eval_limits)
        references = numbers_of(data.splits[split], "labels")
        if not accelerator.is_main_process:
            return None
        return score(logits, references, criterion, data.labels.names, recipe.threshold)

    def evaluate() -> dict[str, float]:
        found = scores("validation")
        return found.scalars if found else {}

    due = evaluate if "validation" in rows else None
    data_seen = fingerprint(data, size)
    with Run(recipe, accelerator, model, optimizer, scheduler, steps, processor, best, due, data_seen) as running:
        preflight(accelerator, model, optimizer, windows, losses, running.memory)
        for window in running.windows(windows):
            result = train_step(
                accelerator,
                model,
                optimizer,
                window,
                losses,
                partial(num_items, criterion),
                recipe.max_grad_norm,
                running.memory,
            )
            if result.stepped:
                scheduler.step()
            running.after_step(result)
        running.load_best_model()
        found = {name: scores(name) for name in rows if name != "train"}
        scored = {name: value for name, value in found.items() if value}
        return report(running, data, scored, source, recipe.model_name_or_path)


def plan(recipe: ImageClsRecipe) -> RunPlan:
    """What `run` would do: steps, learning rate, cut, memory."""
    planned: RunPlan = run(replace(recipe, dry_run=True)).plan
    return planned


if __name__ == "__main__":
    main(run, ImageClsRecipe)
