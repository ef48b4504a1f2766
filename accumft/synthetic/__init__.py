"""Synthetic clinical notes, English and Chinese, whose label is the department of the active problem."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from accumft.errors import UserError
from accumft.synthetic.chinese import CHINESE
from accumft.synthetic.english import ENGLISH
from accumft.synthetic.lexicon import Language
from accumft.synthetic.notes import write_note

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["DEPARTMENTS", "generate_notes", "load_synthetic"]

_LANGUAGES: dict[str, Language] = {"en": ENGLISH, "zh": CHINESE}

DEPARTMENTS: dict[str, tuple[str, ...]] = {
    name: tuple(department.label for department in language.departments) for name, language in _LANGUAGES.items()
}
"""The eight labels of each language, "en" and "zh"."""


def generate_notes(
    num_notes: int, *, language: Literal["en", "zh"] = "en", seed: int = 42, start: int = 0
) -> Iterator[dict[str, str]]:
    """Write notes `start` to `start + num_notes - 1`, one at a time, as {"text": ..., "label": ...}.

    Note i is a pure function of (seed, language, i): any slice can be written alone, and memory does not grow.

    Raises:
        UserError: the language is not "en" or "zh", or a number is negative.
    """
    if language not in _LANGUAGES:
        raise UserError(f'language="{language}": the synthetic notes are written in "en" or "zh"')
    if num_notes < 0 or start < 0:
        raise UserError(f"num_notes={num_notes}, start={start}: neither may be negative")
    # Checked here rather than in a generator function, whose body would only run at the first note.
    return _notes(_LANGUAGES[language], f"accumft synthetic {language} {seed}", range(start, start + num_notes))


def _notes(language: Language, key: str, indices: range) -> Iterator[dict[str, str]]:
    for index in indices:
        text, label = write_note(language, f"{key} {index}")
        yield {"text": text, "label": label}


def load_synthetic(
    *, num_train: int, num_validation: int, num_test: int, language: Literal["en", "zh"] = "en", seed: int = 42
) -> "dict[str, Dataset]":
    """Make the splits "train", "validation" and "test", columns `text` and `label`, from disjoint slices of the notes.

    The validation and test notes come first (0 to num_validation + num_test - 1), so that they stay the same when
    num_train changes.
    """
    from datasets import Dataset

    sizes = {"validation": num_validation, "test": num_test, "train": num_train}
    starts = itertools.accumulate(sizes.values(), initial=0)
    slices = {
        name: list(generate_notes(size, language=language, seed=seed, start=start))
        for (name, size), start in zip(sizes.items(), starts, strict=False)
    }
    return {name: Dataset.from_list(slices[name]) for name in ("train", "validation", "test")}
