"""Text files of every dialect: lines, encodings, and delimited cells; see `accumft.data.files.read_table`."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from accumft.data.encodings import is_damaged_utf_8, is_utf_8, likely_encodings
from accumft.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

DELIMITERS = {".csv": ",\t;|", ".tsv": "\t,;|", ".txt": "\t,;|"}
"""Suffixes of delimited text, each with the delimiters that are looked for, the usual one first."""

_CHUNK = 2_000  # rows that stand in memory as Python strings before they go into Arrow
_NO_LIMIT = 2**31 - 1  # of a cell's characters: what fits into a C long on every platform


def one_line(error: Exception) -> str:
    """The first line of an error's message, without what does not print."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def lines_of(path: str, encoding: str) -> Iterator[str]:
    """The lines of a text file with their line ends, of any kind; a byte order mark is removed.

    Raises:
        UserError: No such encoding; another encoding for certain; or a NUL byte: no text, or another encoding too.
        UnicodeError: Not in that encoding; `wrong_encoding` says where and what to do.
    """
    try:
        file = open(path, encoding=encoding, newline="")  # noqa: SIM115 (only what open itself raises is caught)
    except (LookupError, ValueError) as error:
        raise UserError(
            f"--encoding {encoding!r}: {one_line(error)}; utf-8 and gb18030 are two that there are"
        ) from error
    with file:
        if not _same_encoding(encoding, "utf-8") and is_utf_8(
            _bytes_of(path)
        ):  # it may decode all the same, into rubbish
            raise UserError(
                f"{path}: is UTF-8, not {encoding}: leave out --encoding, or save all files in one encoding"
            )
        for number, line in enumerate(file, start=1):
            if "\0" in line:
                others = [name for name in likely_encodings(_bytes_of(path)) if not _same_encoding(name, encoding)]
                remedy = f"--encoding {others[0]} may be right" if others else "remove it"
                raise UserError(f"{path}, line {number}: holds a NUL byte, which no text has; {remedy}")
            yield line.removeprefix("\ufeff") if number == 1 else line


def wrong_encoding(path: str, encoding: str, delimited: DelimitedFile | None = None) -> UserError:
    """What to say of a file that is not in the encoding stated: file, row, line, likely encodings, remedy."""
    data = _bytes_of(path)
    place, reason = path, ""
    try:
        data.decode(encoding)
    except UnicodeDecodeError as error:
        reason = f" (byte 0x{data[error.start]:02x})" if error.start < len(data) else f" ({error.reason})"
        with contextlib.suppress(UnicodeError):  # some codecs, such as punycode, cannot leave out what they cannot read
            # An x stands for what cannot be decoded, so that its line and its row are there to be counted.
            before = data[: error.start].decode(encoding, errors="ignore") + "x"
            line = len(list(io.StringIO(before, newline="")))
            where = f"line {line}" if delimited is None else _place(delimited.last_row(before), line)
            place = f"{path}, {where}"
    except UnicodeError as error:
        reason = f" ({one_line(error)})"
    likely = [name for name in likely_encodings(data) if not _same_encoding(name, encoding)]
    if is_damaged_utf_8(data):
        remedy = "nearly all the rest is UTF-8, so repair this place"
    elif likely:
        remedy = f"likely: {', '.join(likely)}; try --encoding {likely[0]}"
    else:
        remedy = "save it as UTF-8"
    return UserError(f"{place}: not in the encoding {encoding}{reason}; {remedy}")


class Record(NamedTuple):
    """A row of cells: its number (data rows from 1, the header 0) and the line where it begins (from 1)."""

    row: int
    line: int
    cells: list[str]


@dataclass(frozen=True)
class DelimitedFile:
    """A text file of rows and cells. Fields as the arguments of `accumft.data.files.read_table`."""

    path: str
    delimiter: str | None
    quotechar: str
    column_names: Sequence[str]
    candidates: str
    """Delimiters that the first line may show where `delimiter` is None, the usual one first."""

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in "\r\n"):
            raise UserError(f"--delimiter {self.delimiter!r}: must be one character, and no line end")
        if len(self.quotechar) > 1 or (self.quotechar and self.quotechar in f"\r\n{self.delimiter or ''}"):
            raise UserError(f"--quotechar {self.quotechar!r}: must be empty, or one character other than the delimiter")
        try:
            self._reader([], self.delimiter or self._candidates()[0])
        except (TypeError, ValueError, csv.Error) as error:
            flags = f"--delimiter {self.delimiter!r} --quotechar {self.quotechar!r}"
            raise UserError(f"{flags}: cannot be read with ({one_line(error)}); give other characters") from error

    def read(self, encoding: str) -> pa.Table:
        """All rows, every column of texts; cells as they are written, names stripped of white space."""
        import pyarrow as pa

        chunks: list[list[pa.Array]] = []
        try:
            with _cells_of_any_length():
                records = self.records(lines_of(self.path, encoding))
                names = list(self.column_names) or self._header(records)
                while some := list(itertools.islice(records, _CHUNK)):
                    columns = zip(*(record.cells for record in some), strict=True)
                    chunks.append([pa.array(column, pa.string()) for column in columns])
        except UnicodeError as error:
            raise wrong_encoding(self.path, encoding, self) from error
        arrays = [pa.chunked_array([chunk[i] for chunk in chunks], pa.string()) for i in range(len(names))]
        return pa.Table.from_arrays(arrays, names)

    def records(self, lines: Iterator[str]) -> Iterator[Record]:
        """Every record that is not blank, the header first unless `column_names` stand for it."""
        ahead = []  # up to the first line that is not blank
        for line in lines:
            ahead.append(line)
            if line.strip():
                break
        delimiter = self.delimiter or self._delimiter_of(ahead[-1] if ahead else "")
        reader = self._reader(itertools.chain(ahead, lines), delimiter)
        row, width = (1, len(self.column_names)) if self.column_names else (0, 0)
        while True:
            line_number = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise UserError(
                    f"{self.path}, {_place(row, line_number)}: a cell that begins with the quote {self.quotechar} does "
                    f'not end where a cell can end ({error}); where quotes are ordinary characters: --quotechar ""'
                ) from error
            if not cells or (len(cells) == 1 != width and not cells[0].strip()):
                continue
            width = width or len(cells)
            if len(cells) != width:
                raise UserError(
                    f"{self.path}, {_place(row, line_number)}: has {len(cells)} cells instead of {width} (delimiter "
                    f"{delimiter!r}); quote cells that hold the delimiter or a line end, or correct --delimiter"
                    + (" or --column_names" if self.column_names else "")
                )
            yield Record(row, line_number, cells)
            row += 1

    def last_row(self, text: str) -> int:
        """Number of the row in which a text, a beginning of this file, ends; 0: the header."""
        row = 0 if self.column_names else -1
        try:
            with _cells_of_any_length():
                for record in self.records(iter(io.StringIO(text, newline=""))):
                    row = record.row
        except UserError:  # its last row is cut off, so it may well be malformed
            row += 1
        return row

    def _header(self, records: Iterator[Record]) -> list[str]:
        header = next(records, None)
        if header is None:
            raise UserError(f"{self.path}: is empty")
        return [name.strip() or f"column {i}" for i, name in enumerate(header.cells, start=1)]

    def _reader(self, lines: Iterable[str], delimiter: str, strict: bool = True) -> Any:
        quoting: Any = csv.QUOTE_MINIMAL if self.quotechar else csv.QUOTE_NONE
        return csv.reader(lines, delimiter=delimiter, quotechar=self.quotechar or None, quoting=quoting, strict=strict)

    def _delimiter_of(self, first_line: str) -> str:
        candidates = self._candidates()
        widths = {c: len(next(self._reader([first_line], c, strict=False), [])) for c in candidates}
        wanted = len(self.column_names)
        fitting = [c for c, width in widths.items() if (width == wanted if wanted else width > 1)]
        return fitting[0] if fitting else candidates[0]

    def _candidates(self) -> str:
        return self.candidates.replace(self.quotechar, "") if self.quotechar else self.candidates


def _place(row: int, line: int) -> str:
    return f"row {row} (line {line})" if row else f"line {line} (the header)"


def _bytes_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _same_encoding(a: str, b: str) -> bool:
    return codecs.lookup(a).name.removesuffix("-sig") == codecs.lookup(b).name.removesuffix("-sig")


@contextlib.contextmanager
def _cells_of_any_length() -> Iterator[None]:
    """The csv module's limit of 131,072 characters a cell, which is one for the whole process, lifted meanwhile."""
    before = csv.field_size_limit(_NO_LIMIT)
    try:
        yield
    finally:
        csv.field_size_limit(before)
