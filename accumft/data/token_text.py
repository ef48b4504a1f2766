"""What the readers of tokens share: lines of a file, words of a text, and the text of words."""

import re
from collections.abc import Sequence

from accumft.data.text_files import lines_of, wrong_encoding
from accumft.errors import UserError

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# A character of Chinese, a run of letters and digits, or a sign.
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]")
_WIDE = re.compile(rf"[{_CJK}\u3000-\u303f\uff00-\uffef]")
BLANK = "".join(map(chr, (*range(0x21), 0x7F, 0x85, 0xA0, 0x200B, 0x3000, 0xFEFF)))
"""What shows as nothing."""


def read_lines(path: str, encoding: str) -> list[str]:
    """The lines of a text file with their line ends; a `UserError` where it cannot be read."""
    try:
        return list(lines_of(path, encoding))
    except UnicodeError as error:
        raise wrong_encoding(path, encoding) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def words_of(text: str, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
    """Where the words of a text begin and end: runs of letters and digits, signs, and characters of Chinese."""
    return [match.span() for match in _WORD.finditer(text, start, len(text) if stop is None else stop)]


def text_of(words: Sequence[str]) -> tuple[str, list[int]]:
    """The text of a sentence that was given as words, and where each begins: joined by blanks, Chinese by nothing."""
    pieces: list[str] = []
    starts, length = [], 0
    for before, word in zip(("", *words), words, strict=False):
        if before and not (_WIDE.match(before[-1]) and _WIDE.match(word[:1])):
            pieces.append(" ")
            length += 1
        starts.append(length)
        pieces.append(word)
        length += len(word)
    return "".join(pieces), starts


def is_chinese(text: str) -> bool:
    """Whether a character of Chinese is in it."""
    return re.search(f"[{_CJK}]", text) is not None
