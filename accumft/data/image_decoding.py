"""Images by number, each decoded when it is asked for: whole, upright, RGB, or an error that names it."""

from __future__ import annotations

import io
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from accumft.data.files import unmapped
from accumft.data.text_files import one_line
from accumft.errors import UserError

if TYPE_CHECKING:
    import datasets
    from PIL import Image

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000")
"""What is decoded. Others are not even tried: for some (EPS) Pillow starts another program."""
MAX_PIXELS = 89_478_485
"""Pillow's own limit, of 256 MiB in RGB: a small file that claims more is a decompression bomb, or needs scaling."""


class Images(ABC):
    """The images of a source by number, each decoded only when it is asked for; a function of the number alone."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, index: int) -> Image.Image:
        """The image in mode RGB; grey ones get three equal channels. A `UserError` names one that cannot be had."""


class ArrayImages(Images):
    """An array of images, (n, height, width) or (n, height, width, 1 or 3), uint8."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def load(self, index: int) -> Image.Image:
        from PIL import Image

        pixels = self.array[index]
        return Image.fromarray(pixels[..., 0] if pixels.shape[-1:] == (1,) else pixels).convert("RGB")


class CellImages(Images):
    """A column of images: paths of files, the bytes of such, or dicts of both as `datasets` has them."""

    def __init__(self, table: datasets.Dataset, column: str, folder: str, source: str, rows: Sequence[int]) -> None:
        """
        Args:
            folder: that paths are relative to.
            source, rows: how messages name the table and its rows.
        """
        # Arrow's own: `datasets` would decode an Image column, from wherever the file says that it lies.
        self.cells = unmapped(table.select_columns([column])).data.column(column)
        self.column, self.folder, self.source, self.rows = column, folder, source, rows

    def __len__(self) -> int:
        return len(self.cells)

    def load(self, index: int) -> Image.Image:
        place, cell = f"{self.source}, row {self.rows[index]}", self.cells[index].as_py()
        path = cell.get("path") if isinstance(cell, dict) else cell
        if isinstance(cell, dict) and cell.get("bytes"):
            cell = cell["bytes"]
        if isinstance(cell, bytes):
            return decode(io.BytesIO(cell), place)
        if not isinstance(path, str) or not path.strip():
            raise UserError(f"{place}: no image in {self.column!r}")
        path = path.strip()
        place += f": {path if path.isprintable() else ascii(path)}"
        if "://" in path:
            raise UserError(f"{place}: an address, not a file here: download it first")
        path = os.path.join(self.folder, os.path.expanduser(path))
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for, perhaps for ever
                raise UserError(f"{place}: not a regular file")
        except (OSError, ValueError) as error:
            why = "no such file" if isinstance(error, FileNotFoundError) else one_line(error)
            raise UserError(f"{place}: {why}") from error
        return decode(path, place)


def decode(file: str | io.BytesIO, place: str) -> Image.Image:
    """One image, whole, in mode RGB, upright as its EXIF data say; of several frames the first.

    Transparency is dropped, and 16 bits of grey become the upper 8 of them.

    Raises:
        UserError: it is damaged, cut off, too large, or of a kind that is not read.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.init()
    try:
        with Image.open(file, formats=[kind for kind in FORMATS if kind in Image.OPEN]) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} x {image.height}")
            image.load()
            return _as_rgb(ImageOps.exif_transpose(image))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(
            f"{place}: has more than {MAX_PIXELS:,} pixels ({one_line(error)}), as decompression bombs have: scale it "
            "down, or leave it out"
        ) from error
    except UnidentifiedImageError as error:
        raise UserError(f"{place}: not an image of a known kind ({', '.join(FORMATS)})") from error
    except MemoryError:
        raise
    except Exception as error:  # its decoders raise whatever comes: OSError, SyntaxError, struct.error, ValueError
        raise UserError(f"{place}: a damaged image ({one_line(error)})") from error


def _as_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I;16"):  # `convert` would make all above 255 white
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32 bits a pixel, whose range nobody knows: save it with 8 or 16")
    return image.convert("RGB")
