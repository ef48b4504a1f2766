"""What is left of an entity recognition: predictions.jsonl with spans, and its words of the model card."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accumft.data.tags import Sentence
from accumft.data.token_text import is_chinese, text_of
from accumft.metrics.entities import entities
from accumft.report.page import Table, Task, markdown
from accumft.report.text import format_number

_DIGITS = 6
_HUB_METRICS = {
    "f1": ("f1", "Entity F1"),
    "precision": ("precision", "Entity precision"),
    "recall": ("recall", "Entity recall"),
    "f1_macro": ("f1", "Entity F1, mean of types"),
    "accuracy": ("accuracy", "Accuracy of words"),
    "loss": ("loss", "Loss"),
}


def write_entities(
    path: Path,
    split: str,
    sentences: Sequence[Sentence],
    tags: Sequence[Sequence[str]],
    probabilities: Sequence[np.ndarray],
) -> None:
    """Adds one JSON object a sentence: split, row, text_sha256, entities (those of the data), prediction.

    An entity has start and end, in characters of the sentence's text (its words joined by blanks, Chinese by nothing)
    or, with "document", of the file that it comes from; its label; and if predicted a score, the mean probability of
    its words' tags. The text itself is not written: text_sha256 is the first 16 hexadecimal digits of its SHA-256.

    Args:
        path: the file; it is added to.
        tags: predicted, in IOB2; entities by the strict rule.
        probabilities: (words,) of each sentence.
    """
    with path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for row in zip(sentences, tags, probabilities, strict=True):
            file.write(json.dumps({"split": split, **_record(*row)}, ensure_ascii=False) + "\n")


def _record(sentence: Sentence, tags: Sequence[str], probabilities: np.ndarray) -> dict[str, Any]:
    text, starts = text_of(sentence.words)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    record: dict[str, Any] = {"row": sentence.row, "text_sha256": digest}
    if sentence.starts is not None:
        record["document"], starts = Path(sentence.source).name, list(sentence.starts)

    def places(own: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {"start": starts[first], "end": starts[stop - 1] + len(sentence.words[stop - 1]), "label": kind}
            for first, stop, kind in entities(own)
        ]

    predicted = places(tags)
    for place, (first, stop, _) in zip(predicted, entities(tags), strict=True):
        place["score"] = round(float(probabilities[first:stop].mean()), _DIGITS)
    return {**record, "entities": places(sentence.tags), "prediction": predicted}


def entity_task(types: Sequence[str], per_type: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> Task:
    """What a card says of an entity recognition.

    Args:
        per_type: a dict a type: name, precision, recall, f1, support.
        texts: some of the training data, for their language.
    """
    columns = ("precision", "recall", "f1", "support")
    rows = [[markdown(row["name"]), *(format_number(row[column]) for column in columns)] for row in per_type]
    example = "患者否认胸痛。" if any(map(is_chinese, texts)) else "The text to look through."
    code = (
        "from transformers import pipeline\n\n"
        'find = pipeline("token-classification", model="path/to/this/folder", aggregation_strategy="first")\n'
        f'print(find("{example}"))\n'
    )
    return Task(
        pipeline_tag="token-classification",
        does=f"finds entities of {len(types)} type{'s' if len(types) > 1 else ''} in a text",
        code=code,
        note=(
            "A word has the tag of its first piece. Words of your own: `find([words], is_split_into_words=True)`. The "
            "scores are strict: an I- tag that continues nothing is no entity, where the pipeline begins one."
        ),
        metrics=_HUB_METRICS,
        tables=[Table(title="By type", header=["Type", "Precision", "Recall", "F1", "Entities"], rows=rows)],
    )
