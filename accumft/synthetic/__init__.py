"""Synthetic clinical notes, English and Chinese, whose label is the department of the active problem."""

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from accumft.data.cache import made_once
from accumft.data.files import to_dataset
from accumft.errors import UserError
from accumft.synthetic.chinese import CHINESE
from accumft.synthetic.english import ENGLISH
from accumft.synthetic.lexicon import Language
from accumft.synthetic.notes import write_note

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

__all__ = ["DEPARTMENTS", "generate_notes", "load_synthetic"]

_LANGUAGES: dict[str, Language] = {"en": ENGLISH, "zh": CHINESE}

DEPARTMENTS: dict[str, tuple[str, ...]] = {
    name: tuple(department.label for department in language.departments) for name, language in _LANGUAGES.items()
}
"""The eight labels of each language, "en" and "zh"."""

NOTES_IN_MEMORY = 20_000  # about 10 MB of text
_NOTES_AT_ONCE = 1_000


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
    sizes = {"validation": num_validation, "test": num_test, "train": num_train}
    starts = itertools.accumulate(sizes.values(), initial=0)
    splits = {
        name: _load(size, language=language, seed=seed, start=start)
        for (name, size), start in zip(sizes.items(), starts, strict=False)
    }
    return {name: splits[name] for name in ("train", "validation", "test")}


def _load(size: int, *, language: Literal["en", "zh"], seed: int, start: int) -> "Dataset":
    """A slice of the notes as a table: in memory, or where there are many, written to disk a thousand at a time."""
    import datasets
    import pyarrow as pa

    if size <= NOTES_IN_MEMORY:
        return datasets.Dataset.from_list(list(generate_notes(size, language=language, seed=seed, start=start)))
    schema = pa.schema({"text": pa.string(), "label": pa.string()})

    def batches() -> "Iterator[pa.RecordBatch]":
        notes = generate_notes(size, language=language, seed=seed, start=start)
        while some := list(itertools.islice(notes, _NOTES_AT_ONCE)):
            yield pa.RecordBatch.from_pylist(some, schema)

    def write(path: str) -> None:
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for batch in batches():
                stream.write_batch(batch)

    # Not `Dataset.from_generator`: it knows its function by name, and would not see that a phrase has changed.
    written = made_once("notes", [_source_digest(), language, seed, start, size], write)
    return to_dataset(pa.Table.from_batches(batches(), schema)) if written is None else written


def _source_digest() -> str:
    """SHA-256 of what writes the notes."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
