"""Where images come from, and how each that cannot be had is named."""

import csv
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import CLASSES, SIDE, picture, small_recipe, write_folders
from PIL import Image

from accumft.data.image_decoding import ArrayImages, CellImages, decode
from accumft.data.image_files import read_arrays, read_class_folders, read_image_splits
from accumft.data.image_splits import ImageData, load_image_data
from accumft.errors import UserError


def load(tmp_path: Path, **fields: Any) -> ImageData:
    recipe = small_recipe(tmp_path / "out", **{"max_train_samples": None, "max_eval_samples": None, **fields})
    return load_image_data(read_image_splits(recipe), recipe)


def write_csv(path: Path, rows: list[list[str]], header: tuple[str, ...] = ("image", "label")) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def pixels(data: ImageData, split: str) -> list[np.ndarray]:
    return [np.asarray(data.images[split].load(i)) for i in data.splits[split]["image"]]


def test_class_folders(tmp_path: Path) -> None:
    folder = write_folders(tmp_path / "photos")
    (folder / "bar" / "notes.txt").write_text("none")
    (folder / "bar" / ".hidden.png").write_bytes(b"")
    (folder / "bar" / "more").mkdir()
    picture(0, 99).save(folder / "bar" / "more" / "x.PNG")
    (folder / "empty").mkdir()
    data = load(tmp_path, train_file=str(folder), validation_split=0)
    assert data.labels.names == tuple(CLASSES.values()) == ("bar", "disc", "grid", "void")
    assert len(data.train) == 25 and data.train["row"] == list(range(1, 26))
    assert data.train["labels"] == [0] * 7 + [1] * 6 + [2] * 6 + [3] * 6
    # Sorted by name, those of the folder itself first.
    assert np.array_equal(pixels(data, "train")[6][..., 0], np.asarray(picture(0, 99)))
    assert np.array_equal(pixels(data, "train")[7][..., 2], np.asarray(picture(1, 0)))
    assert data.notes == [
        f"{folder}: left out, as no image of a class by name and place: 1 files ('bar/notes.txt')",
        f"{folder}: folders without images: 'empty'",
    ]


def test_folders_of_splits(tmp_path: Path) -> None:
    for split, size in (("train", 4), ("val", 2), ("test", 1)):
        write_folders(tmp_path / "photos" / split, size)
    data = load(tmp_path, train_file=str(tmp_path / "photos"))
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 16, "validation": 8, "test": 4}
    assert data.notes == [  # the same pictures, as they are written here
        f"{tmp_path}/photos/val: 8 of 8 images are in {tmp_path}/photos/train too, so its score flatters",
        f"{tmp_path}/photos/test: 4 of 4 images are in {tmp_path}/photos/train too, so its score flatters",
    ]


def test_table_with_paths_relative_to_it(tmp_path: Path) -> None:
    folder = write_folders(tmp_path / "data" / "photos", 3)
    rows = [[f"photos/{name}/{n}.png", name] for name in CLASSES.values() for n in range(3)]
    rows[1][0] = str(folder / "bar" / "1.png")  # an absolute one is taken as it is
    table = write_csv(tmp_path / "data" / "train.csv", rows, ("file", "kind"))
    data = load(tmp_path, train_file=table, image_column="file", label_column=("kind",), validation_split=1 / 3)
    assert len(data.train) == 8 and data.validation is not None and len(data.validation) == 4
    assert sorted(data.validation["labels"]) == [0, 1, 2, 3], "stratified"
    assert sorted([*data.train["row"], *data.validation["row"]]) == list(range(1, 13))
    for split in ("train", "validation"):
        for row, image in zip(data.splits[split]["row"], pixels(data, split), strict=True):
            kind, number = divmod(row - 1, 3)
            assert np.array_equal(image[..., 0], np.asarray(picture(kind, number)))


def test_jsonl_and_parquet_and_saved_data_sets(tmp_path: Path) -> None:
    import datasets

    write_folders(tmp_path / "photos", 2)
    names = [(f"photos/{name}/{n}.png", name) for name in CLASSES.values() for n in range(2)]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"image": "{path}", "label": "{name}"}}\n' for path, name in names))
    content = [(tmp_path / path).read_bytes() for path, _ in names]
    labels = [name for _, name in names]
    datasets.Dataset.from_dict({"image": content, "label": labels}).to_parquet(str(tmp_path / "b.parquet"))
    kind = datasets.ClassLabel(names=["void", "grid", "disc", "bar"])
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    table = datasets.Dataset.from_dict(
        {"image": [{"bytes": c, "path": None} for c in content], "label": labels}, features=features
    )
    table.to_parquet(str(tmp_path / "c.parquet"))
    datasets.DatasetDict({"train": table, "valid": table.select([0])}).save_to_disk(str(tmp_path / "d"))
    expected = [picture(kind, number) for kind in range(4) for number in range(2)]
    for name in ("a.jsonl", "b.parquet", "c.parquet", "d"):
        data = load(tmp_path, train_file=str(tmp_path / name), validation_split=None if name == "d" else 0)
        assert data.labels.names == ("bar", "disc", "grid", "void")
        assert data.train["labels"] == [0, 0, 1, 1, 2, 2, 3, 3]
        for found, wanted in zip(pixels(data, "train"), expected, strict=True):
            assert np.array_equal(found[..., 1], np.asarray(wanted))
    assert data.validation is not None and data.validation["labels"] == [0]


def arrays(path: Path, **changed: Any) -> str:
    images = np.stack([np.asarray(picture(i % 2, i)) for i in range(12)])
    values = {
        "train_images": images[:8],
        "train_labels": np.arange(8)[:, None] % 2,
        "val_images": images[8:10],
        "val_labels": np.arange(2)[:, None],
        "test_images": images[10:],
        "test_labels": np.arange(2)[:, None],
    }
    np.savez_compressed(path, **{name: value for name, value in {**values, **changed}.items() if value is not None})
    return str(path)


def test_arrays_of_medmnist(tmp_path: Path) -> None:
    data = load(tmp_path, train_file=arrays(tmp_path / "a.npz"))
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 8, "validation": 2, "test": 2}
    assert data.labels.names == ("0", "1") and data.train["labels"] == [0, 1] * 4
    assert np.array_equal(pixels(data, "test")[1][..., 0], np.asarray(picture(1, 11)))
    # A file of its own goes before what the archive holds; that of one split is taken for what it is given as.
    own = tmp_path / "own.npz"
    np.savez(own, images=np.zeros((3, 8, 8, 3), np.uint8), labels=np.array([1, 0, 1]))
    data = load(tmp_path, train_file=str(tmp_path / "a.npz"), test_file=str(own))
    assert data.test is not None and data.test["labels"] == [1, 0, 1]


def test_arrays_of_several_labels(tmp_path: Path) -> None:
    labels = np.array([[0, 1, 1], [1, 0, 0]] * 4, np.uint8)
    data = load(tmp_path, train_file=arrays(tmp_path / "a.npz", train_labels=labels, val_images=None, test_images=None))
    assert data.labels.problem_type == "multi_label_classification" and data.labels.names == ("0", "1", "2")
    assert data.train["labels"][0] in ([0, 1, 1], [1, 0, 0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"train_images": np.zeros((8, 4, 4), np.float32)},
            r"train_images holds float32 of shape \(8, 4, 4\): give uint8",
        ),
        ({"train_images": np.zeros((8, 4, 4, 4), np.uint8)}, r"holds uint8 of shape \(8, 4, 4, 4\)"),
        ({"train_labels": np.zeros(7)}, r"8 train_images, but train_labels is of shape \(7,\)"),
        ({"train_labels": None}, "has no array train_labels"),
        ({"train_labels": np.array([{}] * 8)}, "not a readable NumPy archive .*allow_pickle=False"),
        ({"train_labels": np.zeros(8, "M8[s]")}, r"train_labels holds datetime64\[s\], not numbers or texts"),
    ],
)
def test_arrays_that_are_no_images(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_arrays(arrays(tmp_path / "a.npz", **changed))


def test_archives_that_are_none(tmp_path: Path) -> None:
    whole = Path(arrays(tmp_path / "a.npz")).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    for name, message in (("cut.npz", "not a readable NumPy archive"), ("none.npz", "no such file")):
        with pytest.raises(UserError, match=message):
            read_arrays(str(tmp_path / name))
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(UserError, match="has no array train_images, or images; its arrays: x"):
        read_arrays(str(tmp_path / "other.npz"))
    with pytest.raises(UserError, match="holds no folders of images"):
        read_class_folders(str(tmp_path))


def broken_table(tmp_path: Path) -> str:
    """Rows 2 to 6 are cut off, missing, no image, blank and a decompression bomb."""
    write_folders(tmp_path / "photos", 4)
    whole = (tmp_path / "photos" / "bar" / "1.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("<svg/>")
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + whole[33:])
    bad = ["cut.png", "gone.png", "text.png", " ", "bomb.png"]
    good = [[f"photos/{name}/{n}.png", name] for name in CLASSES.values() for n in range(4)]
    return write_csv(tmp_path / "train.csv", [good[0], *([path, "bar"] for path in bad), *good[1:]])


def test_broken_images_end_the_run_by_file_and_row(tmp_path: Path) -> None:
    table = broken_table(tmp_path)
    with pytest.raises(UserError) as error:
        load(tmp_path, train_file=table)
    assert str(error.value) == (
        f"{table}, row 2: cut.png: a damaged image (image file is truncated) (and 4 more "
        "images: rows 3, 4, 5, 6); mend it, or --on_bad_row skip"
    )
    images = read_image_splits(small_recipe(tmp_path / "out", train_file=table))["train"].images
    for index, message in (
        (2, ", row 3: gone.png: no such file"),
        (3, ", row 4: text.png: not an image of a known kind (JPEG, "),
        (4, ", row 5: no image in 'image'"),
        (5, ", row 6: bomb.png: has more than 89,478,485 pixels ("),
    ):
        with pytest.raises(UserError) as error:
            images.load(index)
        assert str(error.value).startswith(table + message)


def test_broken_images_are_skipped_where_asked_for(tmp_path: Path) -> None:
    table = broken_table(tmp_path)
    data = load(tmp_path, train_file=table, on_bad_row="skip", validation_split=0)
    assert data.train["row"] == [1, *range(7, 22)]
    assert data.notes == [f"{table}: 5 of 21 rows are skipped (no whole image: rows 2, 3, 4, 5, 6)"]
    assert np.array_equal(pixels(data, "train")[1][..., 0], np.asarray(picture(0, 1)))


def test_what_is_no_file_here(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for path, message in (
        ("https://example.org/a.png", "row 1: https://example.org/a.png: an address, not a file here: download it"),
        ("pipe.png", "row 1: pipe.png: not a regular file"),
        ("a\u202eb.png", r"row 1: 'a\\u202eb.png': no such file"),
    ):
        table = write_csv(tmp_path / "train.csv", [[path, "a"], ["b.png", "b"]])
        images = read_image_splits(small_recipe(tmp_path / "out", train_file=table))["train"].images
        with pytest.raises(UserError, match=message):
            images.load(0)
    with pytest.raises(UserError, match=r"has no column 'image' \(--image_column\); its columns: 'path', 'label'"):
        load(tmp_path, train_file=write_csv(tmp_path / "x.csv", [["b.png", "b"]], ("path", "label")))


def test_missing_labels_are_named(tmp_path: Path) -> None:
    write_folders(tmp_path / "photos", 1)
    rows = [["photos/bar/0.png", "a"], ["photos/disc/0.png", ""], ["photos/grid/0.png", "b"]]
    with pytest.raises(UserError, match=r"train.csv: no label in 'label': row 2; fill them in"):
        load(tmp_path, train_file=write_csv(tmp_path / "train.csv", rows))


def test_the_same_picture_stays_on_one_side(tmp_path: Path) -> None:
    images = np.stack([np.asarray(picture(i % 2, i // 4)) for i in range(40)])  # each twice
    path = arrays(tmp_path / "a.npz", train_images=images, train_labels=np.arange(40) % 2, val_images=None)
    data = load(tmp_path, train_file=path, validation_split=0.2)
    sides = [{data.digests["train"][i] for i in data.splits[split]["image"]} for split in ("train", "validation")]
    assert len(data.train) == 32 and not sides[0] & sides[1] and len(sides[0] | sides[1]) == 20


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    image = Image.fromarray(grey.astype(np.uint16) << 8) if mode == "I;16" else Image.fromarray(grey).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "TIFF" if mode == "CMYK" else "PNG")
    found = decode(io.BytesIO(buffer.getvalue()), "x")
    assert found.mode == "RGB"
    expected = (grey > 127) * 255 if mode == "1" else grey
    if mode != "1":  # which is dithered
        assert np.abs(np.asarray(found).astype(int) - expected[..., None]).max() <= (1 if mode == "CMYK" else 0)


def test_what_of_an_image_is_taken(tmp_path: Path) -> None:
    colours = Image.new("RGB", (8, 4), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    colours.save(tmp_path / "turned.jpg", exif=exif)
    assert decode(str(tmp_path / "turned.jpg"), "x").size == (4, 8)
    frames = [picture(0, 0), picture(1, 0)]
    frames[0].save(tmp_path / "two.gif", save_all=True, append_images=frames[1:])
    assert np.abs(np.asarray(decode(str(tmp_path / "two.gif"), "x"))[..., 0] - np.asarray(frames[0])).max() <= 1
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "float.tiff")
    (tmp_path / "a.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    for name, message in (("float.tiff", "32 bits a pixel"), ("a.eps", "not an image of a known kind")):
        with pytest.raises(UserError, match=message):
            decode(str(tmp_path / name), "x")


def test_images_by_number() -> None:
    assert len(ArrayImages(np.zeros((5, SIDE, SIDE, 1), np.uint8))) == 5
    assert ArrayImages(np.full((1, 2, 3, 1), 7, np.uint8)).load(0).getpixel((2, 1)) == (7, 7, 7)
    import datasets

    table = datasets.Dataset.from_dict({"image": [png(picture(0, 0)), png(picture(1, 0))]}).select([1])
    images = CellImages(table, "image", ".", "x", [9])
    assert len(images) == 1 and np.array_equal(np.asarray(images.load(0))[..., 0], np.asarray(picture(1, 0)))
