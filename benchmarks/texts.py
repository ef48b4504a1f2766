"""The data of throughput.py: three shapes of texts, from files where they are, else synthetic."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SEED = 20
SYNTHETIC_TEXTS = 1200


@dataclass(frozen=True)
class Shape:
    """A data set whose lengths are of one kind."""

    name: str
    about: str
    file: str
    """Below the data folder; csv with a header."""
    text_column: str
    label_column: str
    notes: float
    """Synthetic: mean number of notes in a text, at least one each."""
    at_least: int = 1
    """Synthetic: fewest notes in a text."""


MTS = "mts-dialog/MTS-Dialog-TrainingSet.csv"
SHAPES = {
    "notes": Shape("notes", "short notes", MTS, "section_text", "section_header", 1.0),
    "dialogue": Shape("dialogue", "skewed dialogue", MTS, "dialogue", "section_header", 2.5),
    "abstracts": Shape(
        "abstracts",
        "long abstracts",
        "medical-abstracts/medical_tc_test.csv",
        "medical_abstract",
        "condition_label",
        5.0,
        at_least=3,
    ),
}


def read_texts(shape: Shape, data_dir: Path | None) -> tuple[list[str], list[int], str]:
    """(texts, class ids, where they are from); without a file of that name, synthetic texts."""
    path = None if data_dir is None else data_dir / shape.file
    if path is None or not path.is_file():
        texts, labels = zip(*_synthetic(shape))
        source = f"synthetic notes of accumft, {shape.notes:g} a text"
    else:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row[shape.text_column].strip()]
        texts, labels = zip(*((row[shape.text_column], row[shape.label_column]) for row in rows))
        source = f"{shape.file}, {shape.text_column}"
    names = sorted(set(labels))
    return list(texts), [names.index(label) for label in labels], source


def _synthetic(shape: Shape) -> Iterator[tuple[str, str]]:
    """Texts of one note or several, as many as a geometric law says, which has the long tail of real ones."""
    from accumft.synthetic import generate_notes

    draws = np.random.Generator(np.random.PCG64(SEED)).random(SYNTHETIC_TEXTS)
    more = shape.notes - shape.at_least
    counts = np.full(SYNTHETIC_TEXTS, shape.at_least)
    if more > 0:
        counts += np.floor(np.log(draws) / np.log(more / (1 + more))).astype(int)
    notes = generate_notes(int(counts.sum()), seed=SEED)
    for count in counts:
        parts = [next(notes) for _ in range(count)]
        yield " ".join(part["text"] for part in parts), parts[0]["label"]
