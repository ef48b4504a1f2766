"""The reader of the xml files of question pairs of RQE (Ben Abacha & Demner-Fushman, AMIA 2016)."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING

from accumft.data.files import ROW_COLUMN, checked_path
from accumft.errors import UserError

if TYPE_CHECKING:
    import datasets


def read_rqe(path: str, notes: list[str]) -> datasets.Dataset:
    """The pairs of a file of which one question entails the other: columns "anchor" (chq) and "positive" (faq).

    Line ends and blanks in a text become one blank. Rows are numbered by their `pair` in the file, from 1; the pairs
    that the file calls false are left out, with a note.

    Raises:
        UserError: the file cannot be read, or is of another shape.
    """
    import datasets

    path = checked_path(path)
    try:
        with open(path, "rb") as file:
            content = file.read()
        if b"<!ENTITY" in content or b"<!DOCTYPE" in content:
            raise UserError(f"{path}: declares a document type or entities, which pairs need not: remove these lines")
        pairs = ElementTree.fromstring(content).findall("pair")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        raise UserError(f"{path}: not valid XML ({error}): correct or convert it") from error
    columns: dict[str, list[int | str]] = {ROW_COLUMN: [], "anchor": [], "positive": []}
    left_out = 0
    for row, pair in enumerate(pairs, start=1):
        value = pair.get("value")
        if value not in ("true", "false"):
            raise UserError(f'{path}, row {row}: its value is {value!r}; a pair of RQE has value="true" or "false"')
        if value == "false":
            left_out += 1
            continue
        columns[ROW_COLUMN].append(row)
        for name, tag in (("anchor", "chq"), ("positive", "faq")):
            columns[name].append(" ".join((pair.findtext(tag) or "").split()))
    if not columns[ROW_COLUMN]:
        raise UserError(f'{path}: holds no <pair value="true"> with <chq> and <faq>: is it a file of RQE?')
    if left_out:
        notes.append(f"{path}: {left_out} of {len(pairs)} pairs are false ones, left out")
    return datasets.Dataset.from_dict(columns)
