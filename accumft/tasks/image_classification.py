"""What recipes/image_cls.py leaves to the library: field checks, the default data, the overview and the report."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from accumft.data.files import ROW_COLUMN, is_saved_dataset, numbers_of, to_dataset
from accumft.data.image_decoding import ArrayImages
from accumft.data.image_files import ImageTable
from accumft.data.image_splits import ImageData
from accumft.data.images import Augmentation
from accumft.errors import UserError
from accumft.finishing import leave_report, without_folders
from accumft.outputs import check_output_dir
from accumft.recipe import refuse_unused
from accumft.report.card import classification_task
from accumft.report.overview import describe_labels
from accumft.report.text import printable
from accumft.run import Run, RunResult
from accumft.tasks.classification import SPLIT_PREFIX, Scores, show_and_draw
from accumft.tasks.image_models import batch_norms, is_frozen, tokens_of_image

_TEXT_FILES = ("encoding", "delimiter", "quotechar", "column_names")
_AUGMENTATION = ("horizontal_flip", "vertical_flip", "random_rotation", "random_crop", "brightness", "contrast")
_AT_MOST_ONE = ("horizontal_flip", "vertical_flip", "random_crop", "brightness", "contrast")
# Of scikit-learn's digits, in their order: those at the end were written by other people than those at the beginning.
DIGITS = {"train": slice(0, 1257), "validation": slice(1257, 1437), "test": slice(1437, 1797)}


def check_fields(recipe: Any) -> None:
    """Raises a `UserError` where the fields of an image classification do not fit each other: none is ignored.

    Args:
        recipe: a checked recipe with the fields of recipes/image_cls.py.
    """
    files = (recipe.train_file, recipe.validation_file, recipe.test_file)
    if recipe.train_file is None and recipe.dataset_name is None:
        if recipe.validation_file or recipe.test_file:
            raise UserError("--validation_file and --test_file need --train_file or --dataset_name")
        names = (*_TEXT_FILES, "dataset_config_name", "validation_split", "image_column", "label_column")
        refuse_unused(recipe, (*names, "label_delimiter", "problem_type"), "the digits of scikit-learn")
    elif recipe.dataset_name is not None and any(files):
        raise UserError("--dataset_name and --train_file, --validation_file or --test_file: give one of them")
    elif recipe.dataset_name is None:
        refuse_unused(recipe, ("dataset_config_name",), "files")
        given = [Path(path).expanduser() for path in files if path is not None]
        if all(path.suffix.lower() == ".npz" or (path.is_dir() and not is_saved_dataset(str(path))) for path in given):
            refuse_unused(recipe, (*_TEXT_FILES, "image_column", "label_column"), "folders of classes and .npz files")
    if recipe.model_name_or_path is None:
        refuse_unused(recipe, ("trust_remote_code", "freeze_batch_norm"), "a new ViT (no --model_name_or_path)")
    if bool(recipe.image_mean) != bool(recipe.image_std):
        raise UserError("--image_mean and --image_std: give both, or neither")
    for name in ("image_mean", "image_std"):
        values = getattr(recipe, name)
        if values and (
            len(values) != 3 or not all(math.isfinite(v) and (v > 0 or name[-4:] == "mean") for v in values)
        ):
            raise UserError(f"--{name} {' '.join(map(str, values))}: three finite numbers, one a channel, std above 0")
    if recipe.image_size is not None and not 8 <= recipe.image_size <= 4096:
        raise UserError(f"--image_size {recipe.image_size}: must be between 8 and 4096 pixels")
    for name in _AT_MOST_ONE:
        if not 0 <= getattr(recipe, name) <= 1:
            raise UserError(f"--{name} {getattr(recipe, name)}: must be between 0 and 1")
    if recipe.random_crop == 0:
        raise UserError("--random_crop 0: a share of the image's area, above 0; 1 is all of it")
    if not 0 <= recipe.random_rotation <= 180:
        raise UserError(f"--random_rotation {recipe.random_rotation}: must be between 0 and 180 degrees")
    refuse_unused(recipe, ("padding_free",), "images, which all have one size")
    if recipe.loss != "focal":
        refuse_unused(recipe, ("focal_gamma",), f"--loss {recipe.loss}")
    if not recipe.report_to:
        refuse_unused(recipe, ("run_name",), "no tracker (--report_to)")
    elif Path(recipe.run_name).is_absolute() or ".." in Path(recipe.run_name).parts:
        # Trackers that keep files join it to the output folder.
        raise UserError(f"--run_name {recipe.run_name!r}: names a folder outside --output_dir; leave out the path")
    check_output_dir(recipe.output_dir, (*files, recipe.model_name_or_path))


def augmentation_of(recipe: Any) -> Augmentation | None:
    """What the fields of a recipe say; None where nothing happens to an image."""
    augmentation = Augmentation(
        rotation=recipe.random_rotation,
        crop=recipe.random_crop,
        horizontal_flip=recipe.horizontal_flip,
        vertical_flip=recipe.vertical_flip,
        brightness=recipe.brightness,
        contrast=recipe.contrast,
    )
    return None if augmentation == Augmentation() else augmentation


def load_digits() -> dict[str, ImageTable]:
    """Handwritten digits of 8 x 8 pixels, which come with scikit-learn (UCI, Alpaydin and Kaynak, 1998; CC BY 4.0)."""
    import pyarrow as pa
    from sklearn import datasets

    digits = datasets.load_digits()
    pixels = np.minimum(digits.images * 16, 255).astype(np.uint8)
    tables = {}
    for split, part in DIGITS.items():
        labels = digits.target[part]
        rows = pa.array(range(part.start + 1, part.stop + 1), pa.int64())
        table = to_dataset(pa.table({"label": labels.astype(np.int64), ROW_COLUMN: rows}))
        tables[split] = ImageTable(ArrayImages(pixels[part]), table, ("label",), f"digits ({split})")
    return tables


def describe_data(data: ImageData, size: tuple[int, int], model: Any) -> str:
    """Rows, what the model sees of an image, what becomes of its BatchNorm, and the labels with their counts."""
    rows = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    tokens = tokens_of_image(model.config, size)
    lines = [f"images: {rows}; the model sees {size[0]} x {size[1]} pixels, which count as {tokens} tokens"]
    if batch_norms(model):
        frozen = "keeps the statistics that it has (--freeze_batch_norm False lets it learn new ones)"
        learns = "learns the statistics of micro-batches: the step depends on how it is cut"
        lines.append(f"BatchNorm: {frozen if is_frozen(model) else learns}")
    return "\n".join((*lines, describe_labels(data), *(f"note: {printable(note)}" for note in data.notes)))


def fingerprint(data: ImageData, size: tuple[int, int]) -> dict[str, Any]:
    """What training data this is, by name: a run resumes with the same only, and every process must have the same.

    "validation" is of the validation data: where that is another, the best model is picked anew.

    Args:
        size: (width, height) that the model sees.
    """

    def digest_of(split: str) -> str:
        pictures = data.digests[split]
        digest = hashlib.sha256(b"".join(pictures[i] for i in numbers_of(data.splits[split], "image")))
        digest.update(numbers_of(data.splits[split], "labels").astype(np.float64).tobytes())
        return digest.hexdigest()[:16]

    labels, pixels = ", ".join(data.labels.names), f"{size[0]} x {size[1]}"
    found = {"rows": len(data.train), "labels": labels, "pixels": pixels, "digest": digest_of("train")}
    return found | ({} if data.validation is None else {"validation": digest_of("validation")})


def report(run: Run, data: ImageData, scores: Mapping[str, Scores], source: str, base: str | None) -> RunResult:
    """Prints the metrics and writes all_results.json, predictions.jsonl, the plots and the model card.

    Args:
        scores: by split, "validation" and "test"; empty on processes other than the main one.
        source: what the data is, in a line.
        base: hub id or path that the weights came from; None: from scratch.
    """
    results = {
        f"{SPLIT_PREFIX[split]}_{name}": value
        for split, found in scores.items()
        for name, value in found.scalars.items()
    }
    names, problem_type = data.labels.names, data.labels.problem_type
    shown = scores.get("test") or scores.get("validation")
    task = classification_task(problem_type, run.recipe_values, shown.metrics.per_class if shown else [], names)
    task = replace(
        task,
        pipeline_tag="image-classification",
        does=task.does.replace("a text", "an image"),
        code=(
            "from transformers import pipeline\n\n"
            'classifier = pipeline("image-classification", model="path/to/this/folder")\n'
            'print(classifier("image.png"))\n'
        ),
    )
    rows = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    about = [without_folders("train_file", source), f"{rows} images", f"labels: {', '.join(names[:50])}"]

    def digests_of(split: str) -> Iterable[bytes]:
        return (data.digests[split][i] for i in data.splits[split]["image"])

    return leave_report(
        run, task, results, about, base, lambda folder: show_and_draw(run, data, scores, digests_of, folder)
    )
