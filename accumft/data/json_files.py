"""JSON and JSON lines, typed; see `accumft.data.files.read_table`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from accumft.data.text_files import lines_of, one_line, wrong_encoding
from accumft.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_HALF = "since it holds half a character (a lone surrogate, as \\ud83d): repair or remove it"


class _Twice(dict[str, Any]):
    """An object in which a key stands twice: Python would silently take the last."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.name = next(name for name in names if names.count(name) > 1)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _Twice(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_KINDS = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
    _Twice: "an object",
}


def read_json(path: str, encoding: str, *, lines: bool) -> pa.Table:
    """A file of objects → one column a key, in the order in which the keys first appear; a key not there is None.

    Args:
        lines: Whether each line holds one object. Otherwise the file holds an array of objects, or an object with such
            an array as "data"; a file that has several lines of one object each is read as JSON lines all the same.
    """
    try:
        text = list(lines_of(path, encoding))
    except UnicodeError as error:
        raise wrong_encoding(path, encoding) from error
    if not lines:
        try:
            rows = _rows_of_document(path, "".join(text))
            return _to_table(path, rows, lambda i: f"row {i + 1}")
        except json.JSONDecodeError as error:
            if not (error.msg == "Extra data" and text[0].lstrip().startswith("{")):
                raise UserError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: {_why_not_read(error)}") from error
    rows, numbers = [], []
    for number, line in enumerate(text, start=1):
        if line.strip():
            rows.append(_row_of_line(path, number, line))
            numbers.append(number)
    return _to_table(path, rows, lambda i: f"line {numbers[i]}")


def _rows_of_document(path: str, text: str) -> list[dict[str, Any]]:
    document = _DECODER.decode(text)
    rows = document.get("data") if isinstance(document, dict) else document
    if isinstance(document, dict) and not isinstance(rows, list) and "\n" not in text.strip():
        rows = [document]  # JSON lines of one line
    if not isinstance(rows, list):
        raise UserError(f'{path}: must hold an array of objects, an object with such an array as "data", or JSON lines')
    for i, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path}, row {i}: {_kind(row)}, not an object")
    return rows


def _row_of_line(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        row = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number}: not valid JSON ({error.msg}, character {error.pos + 1})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: {_why_not_read(error)}") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number}: {_kind(row)}, not an object")
    return row


def _to_table(path: str, rows: Sequence[dict[str, Any]], place: Callable[[int], str]) -> pa.Table:
    import pyarrow as pa

    if not rows:
        raise UserError(f"{path}: holds no rows")
    for i, row in enumerate(rows):
        if isinstance(row, _Twice):
            raise UserError(f"{path}, {place(i)}: the key {row.name!r} stands twice in the row: rename or remove one")
    columns = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(name) for row in rows]
        if _HALF_CHARACTER.search(name):
            i = next(i for i, row in enumerate(rows) if name in row)
            raise UserError(f"{path}, {place(i)}: the key {name!r} is no name, {_HALF}")
        _check_one_kind(path, name, values, place)
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            i = _first_unfit(values)
            why = (
                f", {_HALF}"
                if isinstance(error, UnicodeError)
                else f" ({one_line(error)}): give all rows the same kind"
            )
            others = " the rows before it" if i else ""
            raise UserError(f"{path}, {place(i)}: {name!r} does not fit{others}{why}") from error
    return pa.table(columns)


def _check_one_kind(path: str, name: str, values: Sequence[Any], place: Callable[[int], str]) -> None:
    kinds = {_KINDS[kind] for kind in set(map(type, values)) if kind in _KINDS}
    if len(kinds) > 1:
        first = next(i for i, value in enumerate(values) if value is not None)
        other = next(i for i, v in enumerate(values) if v is not None and _kind(v) != _kind(values[first]))
        raise UserError(
            f"{path}, {place(other)}: {name!r} is {_kind(values[other])}, but {_kind(values[first])} in "
            f"{place(first)}: give all rows the same kind"
        )


def _first_unfit(values: Sequence[Any]) -> int:
    """Index of the first value that has no Arrow type in common with all those before it, by bisection."""
    import pyarrow as pa

    fitting, unfit = 0, len(values)  # values[:fitting] can be an array, values[:unfit] cannot
    while unfit - fitting > 1:
        middle = (fitting + unfit) // 2
        try:
            pa.array(values[:middle])
            fitting = middle
        except (pa.ArrowException, OverflowError, UnicodeError):
            unfit = middle
    return fitting


def _why_not_read(error: Exception) -> str:
    """Of what the decoder raises besides JSONDecodeError: for recursion, and for more digits than Python reads."""
    return "nested too deep" if isinstance(error, RecursionError) else one_line(error)


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "null")
