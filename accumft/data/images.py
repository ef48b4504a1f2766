"""Images → what a model takes: augmented by (seed, epoch, image), scaled and normalised by the model's own processor.

The augmentations are a few lines of Pillow each, and not a library: those draw from generators whose state depends on
what ran before, and on the worker that it ran in. Here the numbers of an image are those of its seed, epoch and number,
so that a resume, another cut or another number of workers sees the same pictures. (As torchvision has them:
RandomRotation, RandomResizedCrop, RandomHorizontalFlip, RandomVerticalFlip, ColorJitter.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from accumft.data.image_decoding import Images
from accumft.data.text import label_tensor
from accumft.data.windows import Batch
from accumft.errors import UserError
from accumft.pretrained import quiet_transformers

if TYPE_CHECKING:
    from PIL import Image

# Apart from the streams of the order of examples, of masks and of dropout.
_STREAM = 0x696D6167
_NUMBERS = 10
# Width by height of a crop, as torchvision has it.
_RATIO = math.log(4 / 3)


@dataclass(frozen=True, slots=True)
class Augmentation:
    """What may happen to an image in training. At the defaults nothing does."""

    rotation: float = 0.0
    """Degrees to either side, at most; the corners become black."""
    crop: float = 1.0
    """Share of the image's area that is cut out and scaled, at least; sides of 3 : 4 to 4 : 3 of the image's own."""
    horizontal_flip: float = 0.0
    """Probability, 0 to 1."""
    vertical_flip: float = 0.0
    """Probability, 0 to 1."""
    brightness: float = 0.0
    """The image is made darker or lighter by a factor of 1 - this to 1 + this."""
    contrast: float = 0.0
    """Its distance from its mean grey, by a factor of 1 - this to 1 + this."""

    def apply(self, image: Image.Image, numbers: Sequence[float], size: tuple[int, int]) -> Image.Image:
        """The image as these numbers have it.

        Args:
            numbers: (10,) in [0, 1), as of `numbers_of_image`; each has its own purpose, whatever else is switched on.
            size: (width, height) that a crop is scaled to.
        """
        from PIL import Image, ImageEnhance

        angle, area, ratio, left, top, horizontal, vertical, brightness, contrast, _ = numbers
        if self.rotation:
            image = image.rotate((2 * angle - 1) * self.rotation, Image.Resampling.BILINEAR)
        if self.crop < 1:
            share = self.crop + area * (1 - self.crop)
            stretch = math.exp((2 * ratio - 1) * _RATIO / 2)
            # Of the image's sides; a crop that would be wider than the image is as wide.
            width, height = min(1.0, math.sqrt(share) * stretch), min(1.0, math.sqrt(share) / stretch)
            x, y = left * (1 - width) * image.width, top * (1 - height) * image.height
            box = (x, y, x + width * image.width, y + height * image.height)
            image = image.resize(size, Image.Resampling.BICUBIC, box=box)
        if horizontal < self.horizontal_flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if vertical < self.vertical_flip:
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        if self.brightness:
            image = ImageEnhance.Brightness(image).enhance(1 + (2 * brightness - 1) * self.brightness)
        if self.contrast:
            image = ImageEnhance.Contrast(image).enhance(1 + (2 * contrast - 1) * self.contrast)
        return image


def numbers_of_image(seed: int, epoch: int, index: int) -> list[float]:
    """Ten random numbers in [0, 1) that depend on these three alone."""
    # NumPy guarantees the raw stream of a bit generator between versions, not what `Generator` makes of it.
    raw = np.random.PCG64([seed % 2**64, _STREAM, epoch, index]).random_raw(_NUMBERS)
    return [float(number) for number in (raw >> np.uint64(11)) * 2.0**-53]


@dataclass(frozen=True, slots=True)
class ImageCollator:
    """Columns "image" and "labels" of some rows → a batch: pixel_values (rows, 3, height, width) float32, and labels.

    Without an augmentation an image becomes what `pipeline("image-classification")` makes of it.
    """

    images: Images
    processor: Any
    size: tuple[int, int]
    """(width, height) that the processor makes of an image."""
    augmentation: Augmentation | None = None
    seed: int = 0
    epoch: int = 0

    def in_epoch(self, epoch: int) -> ImageCollator:
        """The one of another epoch; `WindowDataset` asks for it."""
        return replace(self, epoch=epoch)

    def __call__(self, columns: dict[str, list[Any]]) -> Batch:
        images = [self._image(index) for index in columns["image"]]
        pixels = self.processor(images=images, return_tensors="pt")["pixel_values"]
        batch = {"pixel_values": pixels.float()}
        if "labels" in columns:
            batch["labels"] = label_tensor(columns["labels"])
        return batch

    def _image(self, index: int) -> Image.Image:
        image = self.images.load(index)
        if self.augmentation is None:
            return image
        return self.augmentation.apply(image, numbers_of_image(self.seed, self.epoch, index), self.size)


def load_processor(
    path: str | None,
    *,
    image_size: int | None = None,
    image_mean: Sequence[float] = (),
    image_std: Sequence[float] = (),
    trust_remote_code: bool = False,
) -> Any:
    """The image processor of a model folder or hub id, with what is given in place of its own; saved with the model.

    Args:
        path: None: one for a new model, of `image_size`, which maps 0 … 255 to -1 … 1.
        image_size: side of what it makes, in pixels: its resizing and cropping are scaled to it.
        image_mean, image_std: of the three channels, as shares of white: a pixel p becomes (p / 255 - mean) / std, and
            nothing else is done to it (EfficientNet's processor may divide by std a second time).
    """
    import transformers
    from transformers import AutoImageProcessor

    with quiet_transformers():
        # Pillow's way of resizing on every machine, whether torchvision is there or not.
        if path is None:
            side = image_size or 32
            # Releases before there was a choice have no other, and the plain name for it.
            kind = getattr(transformers, "ViTImageProcessorPil", None) or transformers.ViTImageProcessor
            processor = kind(size={"height": side, "width": side})
        else:
            try:
                processor = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=trust_remote_code)
            except Exception as error:  # at files that are damaged or of another kind, it raises whatever comes
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise UserError(
                    f'--model_name_or_path "{path}": its image processor is not loaded ({reason}): give a folder with '
                    "a preprocessor_config.json"
                ) from error
    if image_size is not None and output_size(processor) != (image_size, image_size):
        _scale(processor, image_size)
    if image_mean:
        processor.do_rescale, processor.rescale_factor, processor.do_normalize = True, 1 / 255, True
        processor.image_mean, processor.image_std = list(image_mean), list(image_std)
        for name in ("include_top", "rescale_offset"):
            if getattr(processor, name, False):
                setattr(processor, name, False)
    output_size(processor)
    return processor


def _scale(processor: Any, side: int) -> None:
    """Lets a processor make images of another side, in place."""
    factor = side / output_size(processor)[0]
    size = dict(processor.size.items()) if hasattr(processor.size, "items") else dict(vars(processor.size))
    processor.size = type(processor.size)(**{k: max(1, round(v * factor)) for k, v in size.items() if v is not None})
    if getattr(processor, "do_center_crop", False):
        processor.crop_size = type(processor.crop_size)(height=side, width=side)
    if output_size(processor) != (side, side):
        raise UserError(f"--image_size {side}: {type(processor).__name__} does not make images of it; leave it out")


def output_size(processor: Any) -> tuple[int, int]:
    """(width, height) that a processor makes of any image.

    Raises:
        UserError: it depends on the image.
    """
    from PIL import Image

    sizes = set()
    for shape in ((40, 60), (90, 30)):
        pixels = processor(images=[Image.new("RGB", shape)], return_tensors="pt")["pixel_values"]
        sizes.add((int(pixels.shape[-1]), int(pixels.shape[-2])))
    if len(sizes) > 1:
        raise UserError(
            "the model's image processor keeps the form of each image, so that they do not fit into one batch: set "
            '"size" to a height and a width in its preprocessor_config.json'
        )
    return sizes.pop()
