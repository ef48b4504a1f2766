"""Tag schemes of entity recognition: which one a set of sentences is written in, and the same sentences in IOB2."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from accumft.errors import UserError

OUTSIDE = "O"
Scheme = Literal["io", "iob1", "iob2", "bioes"]
SCHEME_NAMES: dict[Scheme, str] = {"io": "IO (no prefixes)", "iob1": "IOB1", "iob2": "IOB2", "bioes": "BIOES"}

# Further letters of the same meaning: BILOU's last and unit, BMES's middle.
_LETTERS = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S", "M": "I"}
_PREFIXED = re.compile(r"([BIESLUM])[-_](.+)", re.DOTALL)


class Span(NamedTuple):
    """An entity of a sentence."""

    start: int
    """Its first word."""
    stop: int
    """The word behind its last."""
    type: str


@dataclass(frozen=True, slots=True)
class Sentence:
    """The words of a sentence with a tag each."""

    words: Sequence[str]
    tags: Sequence[str]
    row: int
    """Which sentence of its source it is, from 1."""
    source: str
    """The file, or what else it comes from."""
    lines: Sequence[int] | None = None
    """Line of each word in the file, from 1, where each has one."""
    starts: Sequence[int] | None = None
    """Character of the document where each word begins; None: the sentence has no document (see `text_of`)."""

    def place(self, word: int) -> str:
        """Where a word stands, for messages."""
        return f"{self.source}, " + (
            f"row {self.row}, tag {word + 1}" if self.lines is None else f"line {self.lines[word]}"
        )


def to_iob2(
    sentences: Sequence[Sentence],
    scheme: Scheme | None = None,
    on_bad_tags: Literal["error", "repair"] = "error",
    notes: list[str] | None = None,
) -> tuple[list[Sentence], Scheme]:
    """The same sentences with tags O, B-TYPE and I-TYPE, and the scheme that they came in.

    A sequence is malformed where an entity goes on that has not begun (IOB2: I-X after O or another type; BIOES: also
    one that does not end). Repaired, what goes on begins, and what does not end ends where the next tag stands.

    Args:
        sentences: of one run together, so that a small file is not judged by itself.
        scheme: None: found by `find_scheme`.
        on_bad_tags: whether a malformed sequence is an error or repaired with a note.
        notes: to which that note is added.

    Raises:
        UserError: a tag that is none, or a malformed sequence; with its file and line.
    """
    scheme = scheme or find_scheme(sentences)
    converted, bad = [], []
    for sentence in sentences:
        spans, malformed = spans_of(sentence, scheme)
        bad += [(sentence, word) for word in malformed]
        converted.append(replace(sentence, tags=tags_of(spans, len(sentence.words))))
    if bad:
        sentence, word = bad[0]
        before = sentence.tags[word - 1] if word else "the start of the sentence"
        found = f"{sentence.place(word)}: {sentence.tags[word]!r} after {before!r} is malformed {SCHEME_NAMES[scheme]}"
        if on_bad_tags == "error":
            more = f" (and {len(bad) - 1} more places)" if len(bad) > 1 else ""
            raise UserError(f"{found}{more}; correct it, or --on_bad_tags repair, or name another --tag_scheme")
        if notes is not None:
            notes.append(f"{len(bad)} malformed tag{'s are' if len(bad) > 1 else ' is'} repaired; the first: {found}")
    return converted, scheme


def find_scheme(sentences: Iterable[Sentence]) -> Scheme:
    """The scheme that sentences are written in: from their prefixes, and for B and I from how entities begin.

    Where entities begin with B-X as well as with I-X, the more frequent decides: IOB2 or IOB1, where B-X only parts
    two neighbours of one type. Without any entity: IOB2.
    """
    letters: set[str] = set()
    begins = {"B": 0, "I": 0}  # entities that follow no other of their type
    plain, prefixed = None, None
    for sentence in sentences:
        before = OUTSIDE
        for word, tag in enumerate(sentence.tags):
            if tag != OUTSIDE:
                match = _PREFIXED.fullmatch(tag)
                if match is None:
                    plain = plain or (sentence, word)
                else:
                    prefixed = prefixed or (sentence, word)
                    letter, kind = match.groups()
                    letters.add(letter)
                    if letter in begins and before != kind:
                        begins[letter] += 1
                before = tag if match is None else match[2]
            else:
                before = OUTSIDE
    if plain and prefixed:
        sentence, word = plain
        raise _no_tag(sentence, word)
    if plain:
        return "io"
    if letters - {"B", "I"}:
        return "bioes"
    return "iob1" if begins["I"] > begins["B"] else "iob2"


def spans_of(sentence: Sentence, scheme: Scheme) -> tuple[list[Span], list[int]]:
    """Its entities, and the words at which its tags are malformed."""
    spans: list[Span] = []
    bad: list[int] = []
    start, kind, ended = 0, "", False  # of the entity that is open; ended: by E or S

    def close(stop: int) -> None:
        nonlocal kind
        if kind:
            spans.append(Span(start, stop, kind))
            if scheme == "bioes" and not ended:
                bad.append(min(stop, len(sentence.tags) - 1))
        kind = ""

    for word, tag in enumerate(sentence.tags):
        if tag == OUTSIDE:
            close(word)
            continue
        letter, own = _split(sentence, word, scheme)
        goes_on = kind == own and not ended
        if letter in ("B", "S") or not goes_on:
            close(word)
            # In IO and IOB1 an entity may begin with I.
            if letter in ("I", "E") and scheme in ("iob2", "bioes"):
                bad.append(word)
            start, kind = word, own
        ended = letter in ("E", "S")
    close(len(sentence.tags))
    return spans, sorted(set(bad))


def tags_of(spans: Iterable[Span], words: int) -> list[str]:
    """The IOB2 tags of a sentence of so many words."""
    tags = [OUTSIDE] * words
    for span in spans:
        tags[span.start : span.stop] = [f"B-{span.type}"] + [f"I-{span.type}"] * (span.stop - span.start - 1)
    return tags


def types_of(sentences: Iterable[Sentence]) -> list[str]:
    """The entity types of sentences in IOB2, sorted."""
    return sorted({tag[2:] for sentence in sentences for tag in sentence.tags if tag != OUTSIDE})


def _split(sentence: Sentence, word: int, scheme: Scheme) -> tuple[str, str]:
    """(B, I, E or S, type) of a tag that is not O."""
    tag = sentence.tags[word]
    if scheme == "io":
        return "I", tag
    match = _PREFIXED.fullmatch(tag)
    letter = "" if match is None else _LETTERS[match[1]]
    if match is None or (scheme != "bioes" and letter in ("E", "S")):
        raise _no_tag(sentence, word)
    return letter, match[2]


def _no_tag(sentence: Sentence, word: int) -> UserError:
    return UserError(
        f"{sentence.place(word)}: {sentence.tags[word]!r} is no tag like O, B-X or I-X, as others are; correct it, "
        "leave out a header line, or name the right --label_column"
    )
