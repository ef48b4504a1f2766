"""Which encodings a text file may be in: for the message about a file that is not in the one stated."""

import codecs
import itertools

_SAMPLE = 200_000  # characters that are scored

# First bytes of the two-byte codes that ordinary texts consist of: punctuation, kana and the first-level characters.
_COMMON = {
    "gb18030": ("gb2312", {*range(0xA1, 0xA4), *range(0xB0, 0xD8)}),
    "big5": ("big5", set(range(0xA1, 0xC7))),
    "shift_jis": ("shift_jis", set(range(0x81, 0x98))),
}


def likely_encodings(data: bytes) -> list[str]:
    """Python names of the encodings that decode all of `data`, the most plausible first, at most three.

    Many encodings decode almost any bytes, so each is scored by the share of its characters beyond ASCII that are
    common where it is used: for the Chinese and Japanese ones the first-level characters, for cp1252 runs of one or
    two letters. Bytes that are valid UTF-8 are taken as UTF-8.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _those_that_decode(data, ["utf-16"])
    utf_8 = _those_that_decode(data, ["utf-8"])
    # A stray NUL is no sign of UTF-16, which has one beside each Latin letter.
    if b"\0" in data and (not utf_8 or 5 * data.count(0) > len(data)):
        big_endian = data[:_SAMPLE:2].count(0) > data[1:_SAMPLE:2].count(0)
        return _those_that_decode(data, ["utf-16-be" if big_endian else "utf-16-le"])
    if utf_8:
        return utf_8
    scores = {name: _plausibility(data, name) for name in _those_that_decode(data, [*_COMMON, "cp1252"])}
    best = max(scores.values(), default=0.0)
    likely = [name for name in sorted(scores, key=lambda name: -scores[name]) if scores[name] > best / 2]
    return likely[:3] or ["latin-1"]


def is_utf_8(data: bytes) -> bool:
    """Whether the bytes are UTF-8 that holds more than ASCII, and are so hardly by chance."""
    try:
        return len(data) - len(data.decode("utf-8")) >= 20
    except UnicodeDecodeError:
        return False


def is_damaged_utf_8(data: bytes) -> bool:
    """Whether few of the characters beyond ASCII are not UTF-8, and the others are."""
    text = data.decode("utf-8", errors="replace")
    damaged = text.count("\ufffd")
    foreign = sum(character > "\x7f" for character in text)
    return foreign >= 20 and 20 * damaged < foreign


def _those_that_decode(data: bytes, encodings: list[str]) -> list[str]:
    decoding = []
    for name in encodings:
        try:
            data.decode(name)
        except UnicodeError:
            continue
        decoding.append(name)
    return decoding


def _plausibility(data: bytes, encoding: str) -> float:
    """Share, 0 to 1, of the characters beyond ASCII that are common where the encoding is used."""
    common = total = 0
    for foreign, run in itertools.groupby(data.decode(encoding)[:_SAMPLE], key=lambda character: character > "\x7f"):
        if foreign:
            characters = list(run)
            total += len(characters)
            if encoding == "cp1252":
                common += len(characters) if len(characters) <= 2 else 0
            else:
                common += sum(_is_common(character, encoding) for character in characters)
    return common / total if total else 0.0


def _is_common(character: str, encoding: str) -> bool:
    codec, first_bytes = _COMMON[encoding]
    try:
        code = character.encode(codec)
    except UnicodeError:
        return False
    return len(code) == 2 and code[0] in first_bytes
