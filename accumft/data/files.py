"""One source of examples into one table: text, JSON and Parquet files, and folders written by `datasets`."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accumft.data.json_files import read_json
from accumft.data.text_files import DELIMITERS, DelimitedFile, one_line
from accumft.errors import UserError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

ROW_COLUMN = "__row__"
"""Name of the column of row numbers that every table gets."""

ROWS_AT_ONCE = 1_000
"""Rows that are looked at together. (`datasets` gathers them by number in a time that grows with their square.)"""

_SUFFIXES = (*DELIMITERS, ".json", ".jsonl", ".ndjson", ".parquet")
_NOT_TEXT = {
    b"\x1f\x8b": "compressed with gzip: decompress it first",
    b"BZh": "compressed with bzip2: decompress it first",
    b"\xfd7zXZ": "compressed with xz: decompress it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: decompress it first",
    b"PK\x03\x04": "a zip archive or an Excel workbook: unpack it, or save the sheet as CSV UTF-8",
    b"\xd0\xcf\x11\xe0": "an Excel workbook: save the sheet as CSV UTF-8",
    b"PAR1": "a Parquet file: name it .parquet",
}


def read_table(
    path: str,
    *,
    encoding: str = "utf-8",
    delimiter: str | None = None,
    quotechar: str = '"',
    column_names: Sequence[str] = (),
) -> datasets.Dataset:
    """The rows of one file or folder, in its order, in memory (a folder stays mapped from disk).

    Besides the columns of the file there is ROW_COLUMN, int64: data rows counted from 1, the header and blank lines
    not counted. The suffix decides the reader:

    - .csv, .tsv, .txt: every cell is a text, exactly as written ("NA" and "null" too; a blank cell is ""). Quotes as in
      RFC 4180, line ends of any kind. Each row has as many cells as the header; names are stripped of white space.
    - .json (an array of objects, or an object that holds one as "data"), .jsonl, .ndjson: typed; a key that an object
      lacks is None.
    - .parquet: typed.
    - a folder written by `Dataset.save_to_disk`.

    Args:
        path: The file or folder.
        encoding: Encoding of text and JSON files, by Python's name. A byte order mark is removed.
        delimiter: Of text files, one character. None: seen from the first line.
        quotechar: Of text files, one character; "" where quotes are ordinary characters.
        column_names: Of text files whose first line is data already.

    Raises:
        UserError: The file cannot be read, or a row of it is malformed.
    """
    path = checked_path(path)
    if os.path.isdir(path):
        splits = read_folder(path)
        if len(splits) > 1:
            raise UserError(f"{path}: holds several splits ({', '.join(splits)}): give the folder of one of them")
        return next(iter(splits.values()))
    suffix = check_file(path)
    if suffix == ".parquet":
        table = _read_parquet(path)
    elif suffix in DELIMITERS:
        delimiter = {r"\t": "\t", "tab": "\t"}.get(delimiter or "", delimiter)
        table = DelimitedFile(path, delimiter, quotechar, column_names, DELIMITERS[suffix]).read(encoding)
    else:
        table = read_json(path, encoding, lines=suffix != ".json")
    twice = [name for name in dict.fromkeys(table.column_names) if table.column_names.count(name) > 1]
    if twice:
        raise UserError(f"{path}: several columns are named {twice[0]!r}: rename them")
    if cut := [name for name in table.column_names if "\0" in name]:
        raise UserError(f"{path}: the name of the column {cut[0]!r} holds a NUL, at which it would be cut: rename it")
    if ROW_COLUMN not in table.column_names:
        table = table.append_column(ROW_COLUMN, [range(1, table.num_rows + 1)])
    try:
        return to_dataset(table)
    except Exception as error:  # what datasets raises at types and metadata of Parquet that it does not know
        raise UserError(f"{path}: {_why_no_dataset(table)} ({one_line(error)})") from error


def read_folder(path: str) -> dict[str, datasets.Dataset]:
    """The splits that `save_to_disk` wrote into a folder; of a single Dataset: {"train": it}. Rows as in read_table."""
    import datasets

    path = checked_path(path)
    if not is_saved_dataset(path):
        raise UserError(f"{path}: a folder, but not one written by datasets' save_to_disk: give a file")
    try:
        saved = datasets.load_from_disk(path)
    except Exception as error:  # at files of another shape it raises whatever comes: a KeyError, a TypeError
        raise UserError(f"{path}: cannot be read ({one_line(error)}): save the data set anew") from error
    splits = {"train": saved} if isinstance(saved, datasets.Dataset) else dict(saved)
    if not splits:
        raise UserError(f"{path}: holds no splits")
    return {name: with_row_numbers(split) for name, split in splits.items()}


def is_saved_dataset(path: str) -> bool:
    """Whether a folder was written by datasets' `save_to_disk`."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json"))


def with_row_numbers(dataset: datasets.Dataset) -> datasets.Dataset:
    """The data set with ROW_COLUMN, numbered in its present order, and without an output format."""
    dataset = dataset.with_format(None)
    if ROW_COLUMN in dataset.column_names:
        return dataset
    return dataset.add_column(ROW_COLUMN, list(range(1, len(dataset) + 1)))


def checked_path(path: str) -> str:
    """A path with ~ spelled out; an error unless messages, which are one line, can name it."""
    if any(unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in path):
        raise UserError(f"{path!r}: a line end or a control character is in this name: rename the file")
    return os.path.expanduser(path)


def check_file(path: str) -> str:
    """The file's suffix in lower case, once the file is known to be readable and of the kind that its name says."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for, perhaps for ever
            raise UserError(f"{path}: not a regular file but a pipe or a device: save its content as a file")
        with open(path, "rb") as file:
            start = file.read(8)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    suffix = os.path.splitext(path)[1].lower()
    for magic, kind in _NOT_TEXT.items():
        if start.startswith(magic) and suffix != ".parquet":
            raise UserError(f"{path}: is {kind}")
    if suffix not in _SUFFIXES:
        raise UserError(f"{path}: unknown kind of file; known are {', '.join(_SUFFIXES)} and folders of datasets")
    if not start:
        raise UserError(f"{path}: is empty")
    return suffix


def to_dataset(table: pa.Table) -> datasets.Dataset:
    """A table as a data set, without the default fingerprint, which hashes all of it: seconds for a million rows."""
    import datasets

    return datasets.Dataset(table, fingerprint=datasets.fingerprint.generate_random_fingerprint())


def cells_of(dataset: datasets.Dataset, name: str) -> Iterator[Any]:
    """The cells of a column, one after the other; only some at a time are in memory as Python objects.

    What iterating over `dataset[name]` yields, but ten times as fast where the data set is a mapping of row numbers.
    """
    for block in dataset.select_columns([name]).iter(ROWS_AT_ONCE):
        yield from block[name]


def numbers_of(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """A column of numbers, or of lists of equally many, as an array: (rows,) or (rows, numbers).

    What `np.asarray(dataset[name])` makes, but ten times as fast.
    """
    blocks = [np.asarray(block[name]) for block in unmapped(dataset.select_columns([name])).iter(ROWS_AT_ONCE)]
    return np.concatenate(blocks) if blocks else np.zeros(0)


def first_invalid(column: pa.ChunkedArray) -> int:
    """Index of the first cell that is no valid value of the column's type, by bisection."""
    import pyarrow as pa

    valid, invalid = 0, len(column)  # column[:valid] is valid, column[:invalid] is not
    while invalid - valid > 1:
        middle = (valid + invalid) // 2
        try:
            column.slice(0, middle).validate(full=True)
            valid = middle
        except pa.ArrowException:
            invalid = middle
    return valid


def blocks_of(dataset: datasets.Dataset) -> Iterator[pa.Table]:
    """The rows as Arrow tables of ROWS_AT_ONCE.

    `datasets` gathers rows of a mapping one by one. Here the numbers are mostly ascending and near to each other, and
    the rows between the first and the last of a block are few enough to be looked at together.
    """
    as_arrow = dataset.with_format("arrow")
    if dataset._indices is None:
        yield from as_arrow.iter(ROWS_AT_ONCE)
        return
    numbers = dataset._indices.column(0).to_numpy()
    for start in range(0, len(numbers), ROWS_AT_ONCE):
        some = numbers[start : start + ROWS_AT_ONCE].astype(np.int64)
        first, stop = int(some.min()), int(some.max()) + 1
        if stop - first <= 8 * ROWS_AT_ONCE:
            yield dataset.data.slice(first, stop - first).table.take(some - first)
        else:
            yield as_arrow[start : start + len(some)]


def unmapped(dataset: datasets.Dataset) -> datasets.Dataset:
    """The same rows without a mapping of row numbers, copied into memory if there is one."""
    import datasets
    import pyarrow as pa

    if dataset._indices is None:
        return dataset
    if not len(dataset):
        return datasets.Dataset.from_dict({name: [] for name in dataset.column_names}, features=dataset.features)
    table = pa.concat_tables([block.combine_chunks() for block in blocks_of(dataset)])
    fingerprint = datasets.fingerprint.generate_random_fingerprint()
    return datasets.Dataset(table, info=dataset.info.copy(), fingerprint=fingerprint)


def _read_parquet(path: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({one_line(error)}): write it anew") from error
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):  # pandas' categories, which datasets does not know
            table = table.set_column(i, field.name, table.column(i).cast(field.type.value_type))
    return table


def _why_no_dataset(table: pa.Table) -> str:
    """What of a table `datasets` cannot take, and the remedy."""
    for field in table.schema:
        try:
            to_dataset(table.select([field.name]).replace_schema_metadata(None))
        except Exception:
            return f"{field.name!r} is of the type {str(field.type)[:80]}, which datasets lacks: leave this column out"
    return "its metadata do not fit its columns: write it anew, without those of datasets"
