"""Where images come from: folders of classes, tables with paths, NumPy archives, data sets; decoded when asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from accumft.data.files import ROW_COLUMN, checked_path, is_saved_dataset, read_folder, read_table, to_dataset
from accumft.data.image_decoding import ArrayImages, CellImages, Images
from accumft.data.splits import read_splits
from accumft.data.text_files import one_line
from accumft.errors import UserError

if TYPE_CHECKING:
    import datasets

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pnm", ".jp2")
SPLIT_NAMES = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
_ARRAYS = {split: (f"{name}_images", f"{name}_labels") for split, name in zip(SPLIT_NAMES, ("train", "val", "test"))}


@dataclass(frozen=True)
class ImageTable:
    """One split: its images, and a table of as many rows with their labels."""

    images: Images
    table: datasets.Dataset
    """With the label columns and ROW_COLUMN."""
    label_columns: tuple[str, ...]
    source: str
    """The file or folder, for messages."""
    notes: tuple[str, ...] = ()


def read_image_splits(recipe: Any) -> dict[str, ImageTable]:
    """The images that a recipe names, by "train", and "validation" and "test" where there are such.

    A folder or archive given as train_file that holds several splits provides those for which there is no file:

    - a folder with a folder for each class, or with such folders as train, val (validation, valid, dev) and test;
    - .npz with train_images and train_labels, val_…, test_… (MedMNIST's names), or images and labels;
    - any table of `read_table` with paths in image_column, relative to the file's own folder, or image files in its
      cells, and a folder or hub data set of `datasets` with an Image column.

    Args:
        recipe: with the fields of a TableRecipe, image_column and label_column.
    """
    if recipe.dataset_name is not None:
        tables = read_splits(recipe)
        return {split: _of_table(t, f"{recipe.dataset_name} ({split})", ".", recipe) for split, t in tables.items()}
    splits: dict[str, ImageTable] = {}
    for split in SPLIT_NAMES:
        path = getattr(recipe, f"{split}_file")
        if path is None:
            continue
        if not path.strip():
            raise UserError(f"--{split}_file {path!r}: names no file; name one, or leave out the flag")
        found = _read(checked_path(path), path, recipe)
        if split == "train":
            if "train" not in found:
                raise UserError(f"{path}: holds no images to train on, only {', '.join(found)}")
            splits |= found
        elif split not in found and len(found) > 1:
            raise UserError(f"{path}: has several splits ({', '.join(found)}) and none is for {split}")
        else:
            splits[split] = found[split] if split in found else next(iter(found.values()))
    return splits


def _read(path: str, source: str, recipe: Any) -> dict[str, ImageTable]:
    """The splits of one file or folder; what holds a single one has it as "train"."""
    if path.lower().endswith(".npz"):
        return read_arrays(path)
    if not os.path.isdir(path):
        table = read_table(
            path,
            encoding=recipe.encoding,
            delimiter=recipe.delimiter,
            quotechar=recipe.quotechar,
            column_names=recipe.column_names,
        )
        return {"train": _of_table(table, source, os.path.dirname(path) or ".", recipe)}
    if not is_saved_dataset(path):
        return read_class_folders(path)
    tables, found = read_folder(path), {}
    for split, names in SPLIT_NAMES.items():
        for name in [name for name in names if name in tables][:1]:
            found[split] = _of_table(tables[name], source if len(tables) == 1 else f"{source} ({split})", path, recipe)
    if not found:
        raise UserError(f"{source}: has no split for training or test; its splits: {', '.join(tables)}")
    return found


def _of_table(table: datasets.Dataset, source: str, folder: str, recipe: Any) -> ImageTable:
    name = recipe.image_column
    if name not in table.column_names:
        there = ", ".join(repr(column[:40]) for column in table.column_names if column != ROW_COLUMN)
        raise UserError(f"{source}: has no column {name!r} (--image_column); its columns: {there or 'none'}")
    kind = str(table.data.column(name).type)
    if not kind.startswith(("string", "large_string", "binary", "large_binary", "struct<", "null")):
        raise UserError(f"{source}: {name!r} (--image_column) holds values of type {kind}, not paths or images")
    rows = table.data.column(ROW_COLUMN).to_pylist() if table._indices is None else list(table[ROW_COLUMN])
    return ImageTable(CellImages(table, name, folder, source, rows), table, recipe.label_column, source)


def read_class_folders(path: str) -> dict[str, ImageTable]:
    """The images of a folder that has a folder for each class, or such folders for each split; sorted by name."""
    # Folders without images, as archives and synchronisation leave them, say nothing of what the others are.
    names = [name for name in _visible(path) if _holds_images(os.path.join(path, name))]
    by_split = {split: [n for n in names if n.lower() in known] for split, known in SPLIT_NAMES.items()}
    by_split = {split: found for split, found in by_split.items() if found}
    others = [name for name in names if all(name not in found for found in by_split.values())]
    if "train" not in by_split or (others and len(by_split) == 1):  # "train" may well be a class among others
        return {"train": _classes(path)}
    if others:
        splits = _listed([name for found in by_split.values() for name in found])
        raise UserError(
            f"{path}: has images in {_listed(others)} beside the splits {splits}: move them elsewhere, or name the "
            f"splits one by one, as in --train_file {os.path.join(path, by_split['train'][0])}"
        )
    for split, found in by_split.items():
        if len(found) > 1:
            raise UserError(f"{path}: has {_listed(found)}, all for {split}: move all but one elsewhere")
    tables = {split: _classes(os.path.join(path, found[0])) for split, found in by_split.items()}
    if empty := [n for n in _visible(path) if n not in names and os.path.isdir(os.path.join(path, n))]:
        note = f"{path}: folders without images: {_listed(empty)}"
        tables["train"] = replace(tables["train"], notes=(*tables["train"].notes, note))
    return tables


def _holds_images(path: str) -> bool:
    """Whether there are images in a folder, or where `_classes` would look for them, links to classes included."""
    _, below, _ = next(os.walk(path), ("", [], []))
    folders = [path, *(os.path.join(path, name) for name in below if _is_visible(name))]
    return any(file.lower().endswith(SUFFIXES) for folder in folders for file in _files_below(folder))


def _files_below(path: str) -> Iterator[str]:
    """The paths of all visible files, those of a folder itself first, sorted by name."""
    for folder, below, names in os.walk(path):
        below[:] = sorted(filter(_is_visible, below))
        yield from (os.path.join(folder, name) for name in sorted(filter(_is_visible, names)))


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"  # what macOS puts beside the files of an archive


def _visible(path: str) -> list[str]:
    try:
        return sorted(filter(_is_visible, os.listdir(path)))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _listed(names: list[str]) -> str:
    return ", ".join(map(ascii, names[:5])) + (", …" if len(names) > 5 else "")


def _classes(path: str) -> ImageTable:
    """All images below one folder, by the name of the folder that they are in."""
    files: list[str] = []
    labels: list[str] = []
    left_out, empty = [name for name in _visible(path) if os.path.isfile(os.path.join(path, name))], []
    for label in (name for name in _visible(path) if os.path.isdir(os.path.join(path, name))):
        before = len(files)
        for file in _files_below(os.path.join(path, label)):
            place = os.path.relpath(file, path)
            if place.lower().endswith(SUFFIXES):
                files.append(place)
                labels.append(label)
            else:
                left_out.append(place)
        if len(files) == before:
            empty.append(label)
    if not files:
        raise UserError(
            f"{path}: holds no folders of images: make one for each class, or give a table with their paths"
        )
    notes = []
    if left_out:
        some = ", ".join(map(ascii, left_out[:3])) + (", …" if len(left_out) > 3 else "")
        notes.append(f"{path}: left out, as no image of a class by name and place: {len(left_out)} files ({some})")
    if empty:
        notes.append(f"{path}: folders without images: {', '.join(map(ascii, empty[:10]))}")
    table = _table({"image": files, "label": labels})
    return ImageTable(CellImages(table, "image", path, path, table[ROW_COLUMN]), table, ("label",), path, tuple(notes))


def read_arrays(path: str) -> dict[str, ImageTable]:
    """The splits of a NumPy archive; one with the arrays images and labels is all "train"."""
    try:
        # Opened here: np.load leaves a damaged file open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            names = {split: pair for split, pair in _ARRAYS.items() if pair[0] in archive.files}
            if not names and "images" in archive.files:
                names = {"train": ("images", "labels")}
            if not names:
                raise UserError(
                    f"{path}: has no array train_images, or images; its arrays: {', '.join(archive.files) or 'none'}"
                )
            if absent := [labels for _, labels in names.values() if labels not in archive.files]:
                raise UserError(f"{path}: has no array {absent[0]}")
            arrays = {split: (archive[images], archive[labels]) for split, (images, labels) in names.items()}
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except Exception as error:  # zipfile's and zlib's errors, ValueError for pickles, EOFError, MemoryError
        raise UserError(f"{path}: not a readable NumPy archive ({one_line(error)}): save it anew") from error
    return {split: _of_arrays(path, names[split], *pair) for split, pair in arrays.items()}


def _of_arrays(path: str, names: tuple[str, str], images: np.ndarray, labels: np.ndarray) -> ImageTable:
    is_image = images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3))
    if images.dtype != np.uint8 or not is_image:
        raise UserError(
            f"{path}: {names[0]} holds {images.dtype} of shape {images.shape}: give uint8, 0 to 255, of shape (images, "
            "height, width), or with 1 or 3 channels at the end"
        )
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.ndim not in (1, 2) or len(labels) != len(images):
        raise UserError(f"{path}: {len(images)} {names[0]}, but {names[1]} is of shape {labels.shape}")
    if labels.dtype.kind not in "biufU":
        raise UserError(f"{path}: {names[1]} holds {labels.dtype}, not numbers or texts")
    columns: Mapping[str, list[Any]] = {"label": labels.tolist()}
    if labels.ndim == 2:
        columns = {str(number): column.tolist() for number, column in enumerate(labels.T)}
    return ImageTable(ArrayImages(images), _table(columns), tuple(columns), f"{path} ({names[0]})")


def _table(columns: Mapping[str, list[Any]]) -> datasets.Dataset:
    import pyarrow as pa

    rows = len(next(iter(columns.values())))
    return to_dataset(pa.table({**columns, ROW_COLUMN: pa.array(range(1, rows + 1), pa.int64())}))
