"""Augmentation as a function of (seed, epoch, image), and the image processor that the model is given."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_cases import SIDE, picture, save_model
from PIL import Image

from accumft.data.image_decoding import ArrayImages
from accumft.data.image_splits import _dataset
from accumft.data.images import Augmentation, ImageCollator, load_processor, numbers_of_image, output_size
from accumft.data.windows import WindowDataset
from accumft.errors import UserError
from accumft.plan import BatchSizes, Plan
from accumft.window_plan import WindowPlan

MIDDLE = [0.5] * 10
SIZE = (SIDE, SIDE)


def apply(image: Image.Image, numbers: list[float], size: tuple[int, int] = SIZE, **fields: float) -> np.ndarray:
    return np.asarray(Augmentation(**fields).apply(image, numbers, size)).astype(int)


def test_numbers_are_these_on_every_machine_and_version() -> None:
    assert numbers_of_image(42, 3, 7)[:3] == pytest.approx(EXPECTED, abs=1e-12)
    several = np.array([numbers_of_image(seed, epoch, i) for seed in (0, 1) for epoch in (0, 1) for i in range(500)])
    assert several.shape == (2000, 10) and len(np.unique(several)) == several.size
    assert several.min() >= 0 and several.max() < 1
    assert np.abs(several.mean(axis=0) - 0.5).max() < 0.03
    assert np.abs(np.corrcoef(several.T) - np.eye(10)).max() < 0.08


EXPECTED = [0.24191410657537737, 0.7947854990307023, 0.028500349191935892]


def test_nothing_happens_at_the_defaults_nor_in_the_middle() -> None:
    image = picture(2, 0).convert("RGB")
    same = np.asarray(image).astype(int)
    assert np.array_equal(apply(image, numbers_of_image(0, 0, 0)), same)
    for name in ("rotation", "brightness", "contrast"):
        assert np.abs(apply(image, MIDDLE, **{name: 0.9}) - same).max() <= 1


def test_flips_come_with_their_probability() -> None:
    image = picture(1, 0).convert("RGB")
    same = np.asarray(image).astype(int)
    numbers = [0.5] * 5 + [0.29, 0.31, 0.5, 0.5, 0.5]
    assert np.array_equal(apply(image, numbers, horizontal_flip=0.3, vertical_flip=0.3), same[:, ::-1])
    assert np.array_equal(apply(image, numbers, horizontal_flip=0.3, vertical_flip=0.4), same[::-1, ::-1])
    assert np.array_equal(apply(image, numbers, vertical_flip=1.0), same[::-1])


def test_brightness_and_contrast_by_their_factors() -> None:
    image = picture(0, 0).convert("RGB")
    same = np.asarray(image).astype(float)
    darker = apply(image, [0.5] * 7 + [0.0, 0.5, 0.5], brightness=0.4)
    assert np.abs(darker - 0.6 * same).max() <= 1
    flat = apply(image, [0.5] * 8 + [0.0, 0.5], contrast=1.0)
    assert len(np.unique(flat)) == 1 and abs(flat.mean() - same.mean()) <= 1


def test_rotation_by_a_quarter() -> None:
    image = picture(3, 0).convert("RGB")
    turned = apply(image, [1.0] + [0.5] * 9, rotation=90)
    assert np.array_equal(turned, np.rot90(np.asarray(image).astype(int)))


def test_crops_lie_where_the_numbers_say() -> None:
    ramp = np.tile(np.linspace(0, 240, 32).astype(np.uint8), (64, 1))  # 32 wide, 64 high, brighter to the right
    image = Image.fromarray(ramp).convert("RGB")
    # A quarter of the area, of the image's own form: at the left, at the right.
    left = apply(image, [0.5, 0.0, 0.5, 0.0, 0.0, *[0.5] * 5], crop=0.25)
    right = apply(image, [0.5, 0.0, 0.5, 1.0, 1.0, *[0.5] * 5], crop=0.25)
    assert left.shape == right.shape == (SIDE, SIDE, 3)
    assert left[..., 0].mean() == pytest.approx(240 * 7.5 / 31, abs=4)
    assert right[..., 0].mean() == pytest.approx(240 * 23.5 / 31, abs=4)
    assert left.std(axis=0).max() <= 1
    whole = apply(image, [0.5, 1.0, 0.5, 0.3, 0.3, *[0.5] * 5], crop=0.25)
    assert whole[..., 0].mean() == pytest.approx(120, abs=3), "the largest crop is the whole image"


def collator(tmp_path: Path, **fields: float) -> ImageCollator:
    images = ArrayImages(np.stack([np.asarray(picture(i % 4, i)) for i in range(20)]))
    processor = load_processor(save_model("vit", tmp_path / "model"))
    return ImageCollator(images, processor, SIZE, Augmentation(**fields) if fields else None, seed=4)


def test_a_batch_is_what_the_processor_makes(tmp_path: Path) -> None:
    collate = collator(tmp_path)
    batch = collate({"image": [3, 1], "labels": [0, 2]})
    assert batch["labels"].tolist() == [0, 2]
    assert batch["pixel_values"].shape == (2, 3, SIDE, SIDE) and batch["pixel_values"].dtype == torch.float32
    expected = np.asarray(picture(3, 3)) / 127.5 - 1
    assert np.abs(batch["pixel_values"][0].numpy() - expected).max() < 1e-6


def test_windows_have_other_pictures_in_each_epoch_whatever_the_cut(tmp_path: Path) -> None:
    import types

    cells: Any = types.SimpleNamespace(usable=np.arange(20), cells=types.SimpleNamespace(rows=range(1, 21)))
    dataset = _dataset(cells, np.arange(20), np.arange(20))
    collate = collator(tmp_path, rotation=20.0, crop=0.5, horizontal_flip=0.5, brightness=0.2, contrast=0.2)

    def pictures(micro: int, steps: range, workers: int = 0) -> dict[tuple[int, int], torch.Tensor]:
        plan = Plan.of(20, BatchSizes(8, micro, 1, 1), 0, 2, -1)
        found = {}
        for step, window in zip(steps, WindowDataset(dataset, WindowPlan(plan), collate).loader(steps[0], workers)):
            for batch in window.micro_batches:
                for label, pixels in zip(batch["labels"].tolist(), batch["pixel_values"], strict=True):
                    found[step // 3, label] = pixels
        return found

    whole = pictures(8, range(6))
    assert len(whole) == 40
    for other in (pictures(3, range(6)), pictures(1, range(6), workers=1)):
        assert other.keys() == whole.keys()
        assert all(torch.equal(other[key], whole[key]) for key in whole)
    later = pictures(8, range(4, 6))
    assert all(torch.equal(later[key], whole[key]) for key in later) and len(later) == 12
    assert not any(torch.equal(whole[0, i], whole[1, i]) for i in range(20))


@pytest.mark.parametrize("kind", ["vit", "convnext", "efficientnet"])
def test_processor_of_another_size(tmp_path: Path, kind: str) -> None:
    path = save_model(kind, tmp_path / "model", do_center_crop=kind == "vit", crop_size={"height": 14, "width": 14})
    assert output_size(load_processor(path)) == ((14, 14) if kind == "vit" else SIZE)
    processor = load_processor(path, image_size=28)
    assert output_size(processor) == (28, 28)
    processor.save_pretrained(tmp_path / "saved")
    assert output_size(load_processor(str(tmp_path / "saved"))) == (28, 28)


def test_normalisation_by_fields_is_all_that_is_done(tmp_path: Path) -> None:
    path = save_model("efficientnet", tmp_path / "model", include_top=True, image_std=[0.5] * 3, image_mean=[0.5] * 3)
    white = [Image.new("RGB", (20, 20), "white")]
    twice = load_processor(path)(images=white, return_tensors="pt")["pixel_values"]
    assert twice.max() == pytest.approx(2.0), "EfficientNet's divides by std twice"
    processor = load_processor(path, image_mean=(0.5, 0.6, 0.7), image_std=(0.5, 0.2, 0.1))
    pixels = processor(images=white, return_tensors="pt")["pixel_values"]
    assert pixels.amax((0, 2, 3)).tolist() == pytest.approx([1.0, 2.0, 3.0], rel=1e-5)
    processor.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "preprocessor_config.json").read_text())["include_top"] is False


def test_processor_that_keeps_the_form_of_images(tmp_path: Path) -> None:
    path = save_model("vit", tmp_path / "model", do_resize=False)
    with pytest.raises(UserError, match="keeps the form of each image"):
        load_processor(path)
    (tmp_path / "model" / "preprocessor_config.json").write_text("{")
    with pytest.raises(UserError, match=r'--model_name_or_path ".*model": its image processor is not loaded'):
        load_processor(path)
