"""Readers of sentences with tags: columns of tokens, tables of lists, and brat's standoff annotations."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from accumft.data.brat import read_brat
from accumft.data.files import ROW_COLUMN, cells_of, checked_path, is_saved_dataset, read_table
from accumft.data.tags import Sentence
from accumft.data.token_text import BLANK, read_lines
from accumft.errors import UserError
from accumft.recipe import refuse_unused

if TYPE_CHECKING:
    import datasets

TABLES = (".json", ".jsonl", ".ndjson", ".parquet")
TOKEN_COLUMNS, TAG_COLUMNS = ("tokens", "words"), ("tags", "ner_tags", "labels")
"""What columns of lists are called where the recipe does not say."""


def read_sentences(path: str, recipe: Any, notes: list[str]) -> list[Sentence]:
    """The sentences of one file or folder, with their tags as they are written there.

    - .json, .jsonl, .ndjson, .parquet, a folder of `datasets`: a row a sentence, with a list of tokens and one of tags.
    - A folder of brat, or one .ann file: .txt files with .ann files beside them; a line of text is a sentence.
    - Any other name: a line a token, its columns parted by a tab or else by white space; a blank line parts sentences.
      The first column is the token, the last its tag, unless column_names and text_column, label_column say otherwise.
      Lines of -DOCSTART- part sentences too, and lines "# name = value" of tab-separated files are comments.

    Args:
        recipe: with the fields of recipes/token_cls.py, of which those that do not concern this file must be unset.

    Raises:
        UserError: what cannot be read, with file and line.
    """
    path = checked_path(path)
    suffix = os.path.splitext(path)[1].lower()
    if suffix in TABLES or is_saved_dataset(path):
        refuse_unused(recipe, ("delimiter", "column_names"), path)
        return sentences_of_table(read_table(path, encoding=recipe.encoding), path, recipe, notes)
    if not os.path.exists(path):
        raise UserError(f"{path}: no such file")
    if not (os.path.isfile(path) or os.path.isdir(path)):
        raise UserError(f"{path}: not a regular file but a pipe or a device: save its content as a file")
    beside = os.path.splitext(path)[0] + ".ann"
    if os.path.isdir(path) or suffix == ".ann" or (suffix == ".txt" and os.path.exists(beside)):
        names = ("delimiter", "column_names", "text_column", "label_column", "tag_scheme", "on_bad_tags")
        refuse_unused(recipe, names, f"the annotations of {path}")
        place = path if os.path.isdir(path) else beside
        sentences = list(read_brat(place, recipe.encoding, recipe.on_bad_row, notes))
    else:
        sentences = list(_read_columns(path, recipe, notes))
    if not sentences:
        raise UserError(f"{path}: holds no sentence")
    return sentences


def _read_columns(path: str, recipe: Any, notes: list[str]) -> Iterator[Sentence]:
    lines = read_lines(path, recipe.encoding)
    delimiter = {r"\t": "\t", "tab": "\t"}.get(recipe.delimiter or "", recipe.delimiter)
    if delimiter is None and any("\t" in line.strip() for line in lines[:100]):
        delimiter = "\t"
    if delimiter == "":
        raise UserError("--delimiter '': must be one character or more; leave it out")
    token, tag = _columns(recipe)
    width, row, skipped = len(recipe.column_names), 1, 0
    words: list[str] = []
    tags: list[str] = []
    numbers: list[int] = []
    for number, line in enumerate([*lines, ""], start=1):
        line = line.rstrip("\r\n")
        if not line.strip() or line.startswith("-DOCSTART-"):
            if words:
                yield Sentence(words, tags, row, path, numbers)
                row, words, tags, numbers = row + 1, [], [], []
            continue
        if delimiter == "\t" and line.startswith("# ") and "=" in line and "\t" not in line:
            continue
        cells = line.split(delimiter)
        while delimiter == "\t" and len(cells) > 2 and not cells[-1].strip():
            cells.pop()  # a tab at the end of the line
        width = width or len(cells)
        if len(cells) != width or width < 2:
            what = f"{len(cells)} columns where {width} are expected: correct it, or name the --delimiter"
            if width < 2:
                what = "a token without a tag: a line wants both, parted by a tab, a blank or the --delimiter"
            raise UserError(f"{path}, line {number}: {what}")
        word, own = cells[token].strip(BLANK), cells[tag].strip()
        if not word or not own:
            if recipe.on_bad_row == "error":
                what = "tag" if word else "token"
                raise UserError(f"{path}, line {number}: an empty {what}; fill it in, or --on_bad_row skip")
            skipped += 1
            continue
        words.append(word)
        tags.append(own)
        numbers.append(number)
    if skipped:
        notes.append(f"{path}: {skipped} lines with an empty token or tag are skipped")


def _columns(recipe: Any) -> tuple[int, int]:
    """Numbers of the columns of tokens and tags."""
    if not recipe.column_names:
        for flag, name in (("text_column", recipe.text_column), ("label_column", recipe.label_column)):
            if name is not None:
                raise UserError(f"--{flag} {name}: the columns of this file have no names; give them by --column_names")
        return 0, -1
    found = []
    for flag, name, default in (
        ("text_column", recipe.text_column, recipe.column_names[0]),
        ("label_column", recipe.label_column, recipe.column_names[-1]),
    ):
        if (name or default) not in recipe.column_names:
            raise UserError(f"--{flag} {name}: not among --column_names {', '.join(recipe.column_names)}")
        found.append(recipe.column_names.index(name or default))
    return found[0], found[1]


def sentences_of_table(table: datasets.Dataset, source: str, recipe: Any, notes: list[str]) -> list[Sentence]:
    """The rows of a table with a column of lists of tokens and one of lists of tags (names, or numbers of a class)."""
    text = _list_column(table, source, "text_column", recipe.text_column, TOKEN_COLUMNS)
    label = _list_column(table, source, "label_column", recipe.label_column, TAG_COLUMNS)
    names = getattr(getattr(table.features[label], "feature", None), "names", None)
    rows = cells_of(table, ROW_COLUMN) if ROW_COLUMN in table.column_names else iter(range(1, len(table) + 1))
    sentences, skipped = [], 0
    for row, words, tags in zip(rows, cells_of(table, text), cells_of(table, label), strict=True):
        problem = _problem(words, tags, names, text, label)
        if problem is None:
            tags = [names[tag] if names else tag for tag in tags]
            sentences.append(Sentence([word.strip(BLANK) for word in words], tags, row, source))
        elif recipe.on_bad_row == "error":
            raise UserError(f"{source}, row {row}: {problem}; correct it, or --on_bad_row skip")
        else:
            skipped += 1
    if skipped:
        notes.append(f"{source}: {skipped} of {len(table)} rows are skipped")
    if not sentences:
        raise UserError(f"{source}: holds no sentence")
    return sentences


def _list_column(table: datasets.Dataset, source: str, flag: str, name: str | None, usual: Sequence[str]) -> str:
    there = [column for column in table.column_names if column != ROW_COLUMN]
    found = [column for column in ([name] if name else usual) if column in there]
    if not found:
        wanted = repr(name) if name else " or ".join(map(repr, usual))
        raise UserError(f"{source}: has no column {wanted} (--{flag}); its columns: {', '.join(there)}")
    if getattr(table.features[found[0]], "feature", None) is None:
        raise UserError(
            f"{source}: {found[0]!r} (--{flag}) holds no lists; a row wants a list of tokens and one of tags"
        )
    return found[0]


def _problem(words: Any, tags: Any, names: Sequence[str] | None, text: str, label: str) -> str | None:
    """What is wrong with a row, if something is."""
    if not words or tags is None:
        return f"no tokens in {text!r}" if not words else f"no tags in {label!r}"
    if len(words) != len(tags):
        return f"{len(words)} tokens in {text!r} but {len(tags)} tags in {label!r}"
    for number, (word, tag) in enumerate(zip(words, tags, strict=True), start=1):
        if not isinstance(word, str) or not word.strip(BLANK):
            return f"token {number} in {text!r} is {word!r}, no text"
        if names is None and (not isinstance(tag, str) or not tag):
            return f"tag {number} in {label!r} is {tag!r}, not a name like B-X"
        if names is not None and (tag is None or not 0 <= tag < len(names)):
            return f"tag {number} in {label!r} is {tag!r}, and there are {len(names)} classes"
    return None
