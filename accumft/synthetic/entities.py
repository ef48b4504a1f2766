"""Synthetic clinical sentences with entities, English and Chinese, for entity recognition.

What is said of a finding decides its type, not the finding: the same phrase is a Problem that the patient has, one that
is Denied, one of the Past, or one of the Family; what is given or measured is a Treatment or a Test. And no phrase of
the validation or test sentences is in the training sentences, so looking up what was an entity there finds nothing.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from accumft.data.tags import Sentence, Span, tags_of
from accumft.data.token_text import words_of
from accumft.errors import UserError
from accumft.synthetic.chinese import CHINESE
from accumft.synthetic.english import ENGLISH
from accumft.synthetic.lexicon import Language, Test
from accumft.synthetic.notes import Writer

SPLITS = ("train", "validation", "test")
TYPES = ("Denied", "Family", "Past", "Problem", "Test", "Treatment")

_LANGUAGES: dict[str, Language] = {"en": ENGLISH, "zh": CHINESE}
# Of 20 phrases: those of the training sentences, and of the validation sentences with them.
_TRAIN, _VALIDATION = 12, 15
_TYPE = {"active": "Problem", "denied": "Denied", "past": "Past", "family": "Family"}
# What is said of each kind; a status that stands twice is drawn twice as often.
_SAID = {
    "symptom": ("active", "active", "denied", "denied", "past", "family"),
    "disease": ("active", "active", "denied", "past", "family"),
    "sign": ("active", "denied", "past"),
    "result": ("active", "denied"),
    "drug": ("active", "past", "family", "denied"),
}
_STATEMENTS = tuple(f"{kind}.{said}" for kind, every in _SAID.items() for said in every)
_NEUTRAL_SECTIONS = ("vitals", "social", "exam", "results", "plan", "hpi")
_LOWERCASE_SHARE = 0.1
# Characters for private use, which no phrase holds: they stand around an entity until its place is known.
_OPEN, _CLOSE = "\ue000", "\ue001"


class _Words(NamedTuple):
    """The phrases of one split."""

    by_kind: Mapping[str, Sequence[str]]
    tests: Sequence[Test]


def load_synthetic_entities(
    *, num_train: int, num_validation: int, num_test: int, language: Literal["en", "zh"] = "en", seed: int = 42
) -> dict[str, list[Sentence]]:
    """The splits "train", "validation" and "test" in IOB2. Sentence i of a split depends on (seed, language, i) alone.

    Raises:
        UserError: the language is not "en" or "zh", or a number is negative.
    """
    if language not in _LANGUAGES:
        raise UserError(f'language="{language}": the synthetic sentences are written in "en" or "zh"')
    sizes = dict(zip(SPLITS, (num_train, num_validation, num_test), strict=True))
    if min(sizes.values()) < 0:
        raise UserError(f"{sizes}: no number may be negative")
    return {split: [_sentence(language, split, seed, index) for index in range(size)] for split, size in sizes.items()}


def split_of(phrase: str) -> str:
    """In whose sentences a phrase stands: decided by its letters alone."""
    number = hashlib.blake2b(phrase.casefold().encode()).digest()[0] % 20
    return "train" if number < _TRAIN else "validation" if number < _VALIDATION else "test"


@cache
def _words(language: str, split: str) -> _Words:
    departments = _LANGUAGES[language].departments
    by_kind = {
        kind: [word for department in departments for word in department.words(kind) if split_of(word) == split]
        for kind in ("symptom", "disease", "sign", "drug")
    }
    return _Words(
        by_kind, [test for department in departments for test in department.tests if split_of(test.name) == split]
    )


def _sentence(language: str, split: str, seed: int, index: int) -> Sentence:
    marked = _EntityWriter(_LANGUAGES[language], f"accumft entities {language} {seed} {split} {index}").marked(
        _words(language, split)
    )
    text, spans = _unmarked(marked)
    bounds = words_of(text)
    begins, ends = {a: i for i, (a, _) in enumerate(bounds)}, {b: i + 1 for i, (_, b) in enumerate(bounds)}
    own = [Span(begins[start], ends[stop], kind) for start, stop, kind in spans]
    return Sentence([text[a:b] for a, b in bounds], tags_of(own, len(bounds)), index + 1, f"synthetic {split}")


def _unmarked(marked: str) -> tuple[str, list[tuple[int, int, str]]]:
    """The text without its marks, and where the entities are in it: (first character, behind the last, type)."""
    first, *pieces = marked.split(_OPEN)
    text, spans = first, []
    for piece in pieces:
        entity, after = piece.split(_CLOSE)
        kind, phrase = TYPES[int(entity[0])], entity[1:]
        spans.append((len(text), len(text) + len(phrase), kind))
        text += phrase + after
    return text, spans


class _EntityWriter(Writer):
    """Writes a few statements with every entity marked: between _OPEN with the number of its type, and _CLOSE."""

    def marked(self, words: _Words) -> str:
        """One to three statements of one to three entities each, and sometimes one that has none."""
        sentences = []
        for _ in range(self.between((1, 3))):
            status = self.pick(_STATEMENTS)
            kind, said = status.split(".")
            single = said in ("family", "past") or kind == "result"
            count = 1 if single else self.between((1, 3))
            chosen = dict.fromkeys(self.entity(kind, said, words) for _ in range(count))
            sentences.append(self.statement(status, list(chosen), headed=False))
        if self.random() < 0.5:
            template = self.pick(self.language.neutral[self.pick(_NEUTRAL_SECTIONS)])
            sentences.append(template.format_map(self.fields))
        text = self.language.sentence_space.join(self.shuffled(sentences))
        return text.lower() if self.random() < _LOWERCASE_SHARE else text

    def entity(self, kind: str, said: str, words: _Words) -> str:
        if kind == "result":
            test = self.pick(words.tests)
            marked = Test(_mark("Test", test.name), test.unit, test.normal, test.abnormal, test.decimals)
            return self.result(marked, said == "active")
        return _mark("Treatment" if kind == "drug" else _TYPE[said], self.pick(words.by_kind[kind]))


def _mark(kind: str, phrase: str) -> str:
    return f"{_OPEN}{TYPES.index(kind)}{phrase}{_CLOSE}"
