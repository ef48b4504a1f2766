"""Folders of images: which are splits, which are classes, and which are neither."""

import re
from pathlib import Path

import pytest
from image_cases import CLASSES, picture, write_folders

from accumft.data.image_files import read_class_folders
from accumft.errors import UserError

NAMES = tuple(CLASSES.values())


def sizes(folder: Path) -> dict[str, int]:
    """Images by split."""
    return {split: len(table.table) for split, table in read_class_folders(str(folder)).items()}


def labels(folder: Path, split: str = "train") -> list[str]:
    return sorted(set(read_class_folders(str(folder))[split].table["label"]))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with 8 images to train on, and 4 to test on."""
    for split, a_class in (("train", 2), ("test", 1)):
        write_folders(tmp_path / "photos" / split, a_class)
    return tmp_path / "photos"


@pytest.mark.parametrize("stray", ["__MACOSX/train", ".thumbnails/x", "empty", "val", "logs/train"])
def test_folders_without_images_do_not_turn_splits_into_classes(photos: Path, stray: str) -> None:
    (photos / stray).mkdir(parents=True)
    hidden = stray.startswith(".")
    picture(0, 0).save(photos / stray / ("0.png" if hidden else "._0.png"))
    (photos / stray / "notes.txt").write_text("none")
    assert sizes(photos) == {"train": 8, "test": 4}
    assert labels(photos) == labels(photos, "test") == sorted(NAMES)
    listed = stray.split("/")[0] not in ("__MACOSX", ".thumbnails")
    note = f"{photos}: folders without images: '{stray.split('/')[0]}'"
    assert read_class_folders(str(photos))["train"].notes == ((note,) if listed else ())


def test_what_macos_adds_to_an_archive_is_no_class(tmp_path: Path) -> None:
    folder = write_folders(tmp_path / "photos", 1)
    picture(0, 0).save(write_folders(folder / "__MACOSX", 1) / "bar" / "1.png")
    assert labels(folder) == sorted(NAMES) and read_class_folders(str(folder))["train"].notes == ()


def test_linked_classes_of_a_split_are_images_of_it(photos: Path, tmp_path: Path) -> None:
    (photos / "val").mkdir()
    for name in NAMES:
        (photos / "val" / name).symlink_to(photos / "test" / name)
    assert sizes(photos) == {"train": 8, "validation": 4, "test": 4}


def test_images_beside_the_splits_are_named(photos: Path) -> None:
    write_folders(photos / "extra", 1)
    with pytest.raises(UserError) as error:
        read_class_folders(str(photos))
    assert str(error.value) == (
        f"{photos}: has images in 'extra' beside the splits 'train', 'test': move them elsewhere, or name the splits "
        f"one by one, as in --train_file {photos}/train"
    )


def test_two_folders_of_one_split_are_named(photos: Path) -> None:
    for name in ("val", "validation"):
        write_folders(photos / name, 1)
    with pytest.raises(UserError) as error:
        read_class_folders(str(photos))
    assert str(error.value) == f"{photos}: has 'val', 'validation', all for validation: move all but one elsewhere"


def test_a_split_without_folders_of_classes_is_named(photos: Path) -> None:
    (photos / "val").mkdir()
    picture(0, 0).save(photos / "val" / "0.png")
    with pytest.raises(UserError, match=re.escape(f"{photos}/val: holds no folders of images: make one for each")):
        read_class_folders(str(photos))


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    for name in ("train", "bus"):
        (tmp_path / "cars" / name).mkdir(parents=True)
        picture(0, 0).save(tmp_path / "cars" / name / "0.png")
    assert sizes(tmp_path / "cars") == {"train": 2} and labels(tmp_path / "cars") == ["bus", "train"]
