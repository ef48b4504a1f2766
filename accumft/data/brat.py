"""brat's standoff annotations: the entities (T lines) of an .ann file, checked against the text that they lie in."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from accumft.data.tags import Sentence, Span, tags_of
from accumft.data.token_text import read_lines, words_of
from accumft.errors import UserError

# T1<tab>Type 10 14<tab>text; of a discontinuous entity "10 14;20 25".
_ENTITY = re.compile(r"T\S*\t(\S+) (\d+ \d+(?:;\d+ \d+)*)(?:\t(.*))?")


def read_brat(path: str, encoding: str, on_bad_row: Literal["error", "skip"], notes: list[str]) -> Iterator[Sentence]:
    """The sentences of a folder of .txt files with .ann files beside them, or of one .ann file: a line of text each.

    Entities that begin or end inside a word are widened to it, with a note.
    """
    folder = Path(path)
    texts = sorted(folder.glob("*.txt")) if folder.is_dir() else [folder.with_suffix(".txt")]
    if not texts:
        raise UserError(f"{path}: a folder without .txt files; give a file, or a folder of brat")
    row, widened = 0, []
    for file in texts:
        if not file.exists() or not file.with_suffix(".ann").exists():
            missing = file if not file.exists() else file.with_suffix(".ann")
            if on_bad_row == "error":
                raise UserError(
                    f"{missing}: no such file; each text wants its .ann, an empty one where it has no entity"
                )
            notes.append(f"{missing}: no such file, so its document is skipped")
            continue
        text = "".join(read_lines(str(file), encoding))
        annotation = str(file.with_suffix(".ann"))
        spans = read_annotations(annotation, read_lines(annotation, encoding), text, on_bad_row, notes)
        for start, stop in _sentences(text, spans):
            bounds = words_of(text, start, stop)
            own: list[Span] = []
            for first, last, kind in spans:
                inside = [i for i, (a, b) in enumerate(bounds) if a < last and b > first]
                if start <= first < stop and inside:
                    if own and inside[0] < own[-1].stop:
                        shared = f"{annotation}: {kind} {first} {last} begins inside the word in which another ends"
                        if on_bad_row == "error":
                            raise UserError(f"{shared}, which tags cannot hold; --on_bad_row skip leaves it out")
                        notes.append(f"{shared}: left out")
                        continue
                    own.append(Span(inside[0], inside[-1] + 1, kind))
                    if (bounds[inside[0]][0], bounds[inside[-1]][1]) != (first, last):
                        widened.append(f"{annotation}: {kind} {first} {last}")
            if bounds:
                row += 1
                tags = tags_of(own, len(bounds))
                words = [text[a:b] for a, b in bounds]
                yield Sentence(words, tags, row, str(file), None, [a for a, _ in bounds])
    if widened:
        notes.append(
            f"{len(widened)} entities begin or end inside a word and are widened to it; the first: {widened[0]}"
        )


def _sentences(text: str, spans: Sequence[tuple[int, int, str]]) -> Iterator[tuple[int, int]]:
    """Where the lines of a text begin and end; an entity that goes over a line end keeps both lines together."""
    inside = {at for first, last, _ in spans for at in range(first, last - 1)}
    start = 0
    for match in re.finditer(r"\r\n|[\r\n]", text):
        if inside.isdisjoint(range(*match.span())):
            yield start, match.start()
            start = match.end()
    yield start, len(text)


def read_annotations(
    path: str, lines: Sequence[str], text: str, on_bad_row: Literal["error", "skip"], notes: list[str]
) -> list[tuple[int, int, str]]:
    """(first character, the one behind the last, type) of each entity, in the order of the text.

    Relations, events, attributes and comments are not looked at. Tags can hold neither a discontinuous entity nor one
    inside another: they are an error, or with on_bad_row "skip" left out with a note (of overlapping ones the shorter).

    Raises:
        UserError: a line that is none of brat's, offsets that do not fit the text, or such an entity.
    """
    found: list[tuple[int, int, str, int]] = []
    left_out = 0
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r\n")
        if not line.startswith("T"):
            if line.strip() and line[0] not in "REAMN#*":
                raise UserError(f"{path}, line {number}: no line of brat's standoff format: correct it")
            continue
        match = _ENTITY.fullmatch(line)
        if match is None:
            raise UserError(f'{path}, line {number}: no entity like "T1<tab>Type 0 5<tab>text": correct it')
        kind, places, written = match.groups()
        start, stop = (int(number) for number in places.split(";")[0].split())
        if ";" in places:
            if on_bad_row == "error":
                raise UserError(
                    f"{path}, line {number}: a discontinuous entity, which tags cannot hold; --on_bad_row skip"
                )
            left_out += 1
            continue
        there = text[start:stop]
        if not start < stop <= len(text) or not there.strip() or (written and written.split() != there.split()):
            shown = f"where the text has {there[:40]!r}" if there.strip() else "outside of the text"
            raise UserError(
                f"{path}, line {number}: {kind} {start} {stop} is {(written or '')[:40]!r}, {shown}: offsets count "
                "characters from 0; correct them, or give the --encoding of the files"
            )
        found.append((start, stop, kind, number))
    kept: list[tuple[int, int, str, int]] = []
    for entity in sorted(found, key=lambda entity: (entity[0] - entity[1], entity[0], entity[2])):
        start, stop, kind, number = entity
        other = next((one for one in kept if one[0] < stop and start < one[1]), None)
        if other is None:
            kept.append(entity)
        elif other[:3] != entity[:3]:  # the same one annotated twice is the same
            if on_bad_row == "error":
                raise UserError(
                    f"{path}, line {number}: {kind} {start} {stop} overlaps {other[2]} {other[0]} {other[1]} of line "
                    f"{other[3]}, which tags cannot hold; --on_bad_row skip keeps the longer"
                )
            left_out += 1
    if left_out:
        notes.append(f"{path}: {left_out} discontinuous or overlapping entities are left out")
    return [(start, stop, kind) for start, stop, kind, _ in sorted(kept)]
