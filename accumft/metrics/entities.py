"""Entity-level scores of tag sequences: seqeval's strict mode for IOB2, and a dictionary to compare with.

An entity counts as found when its type, its first and its last word are all right. It begins with B-X and goes on with
I-X of the same type; an I-X that continues nothing is no entity. The same figures as
`seqeval.metrics.classification_report(…, mode="strict", scheme=IOB2)` (Nakayama, 2018).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from accumft.data.tags import OUTSIDE, Span, tags_of
from accumft.metrics import Metrics

ENTITY_METRICS = ("f1", "precision", "recall", "f1_macro", "accuracy")
"""Scalars in the order in which they are shown: over all entities, the mean of the types' F1, and the share of words
with the right tag."""


def entities(tags: Iterable[str]) -> list[Span]:
    """The entities of a sequence of IOB2 tags, by the strict rule."""
    spans: list[Span] = []
    start, kind, word = 0, "", 0
    for word, tag in enumerate(tags, start=1):  # word: the place behind the tag
        if kind and tag == f"I-{kind}":
            continue
        if kind:
            spans.append(Span(start, word - 1, kind))
        start, kind = word - 1, tag[2:] if tag.startswith("B-") else ""
    if kind:
        spans.append(Span(start, word, kind))
    return spans


def entity_scores(
    references: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]], types: Sequence[str] = ()
) -> Metrics:
    """Scores over whole sentences.

    Args:
        references, predictions: IOB2 tags, sentence by sentence, as many for each.
        types: that are listed even if they do not occur.

    Returns:
        The scalars of ENTITY_METRICS and precision, recall, F1 and support by type. A share of nothing is 0; f1, recall
        and f1_macro are undefined where the references hold no entity.

    Raises:
        ValueError: sentences of unlike length.
    """
    true, predicted, right = Counter[str](), Counter[str](), Counter[str]()
    words = same = 0
    for reference, prediction in zip(references, predictions, strict=True):
        words += len(reference)
        same += sum(a == b for a, b in zip(reference, prediction, strict=True))
        expected, found = set(entities(reference)), set(entities(prediction))
        for counts, spans in ((true, expected), (predicted, found), (right, expected & found)):
            counts.update(span.type for span in spans)
    occurring = sorted({*true, *predicted})
    per_class: list[dict[str, Any]] = []
    for name in sorted({*types, *occurring}):
        precision, recall, f1 = _shares(right[name], predicted[name], true[name])
        per_class.append({"name": name, "precision": precision, "recall": recall, "f1": f1, "support": true[name]})
    precision, recall, f1 = _shares(right.total(), predicted.total(), true.total())
    macro = sum(row["f1"] for row in per_class if row["name"] in occurring) / max(1, len(occurring))
    scalars = {"f1": f1, "precision": precision, "recall": recall, "f1_macro": macro, "accuracy": same / max(1, words)}
    undefined = {}
    if not true:
        for name in ("f1", "recall", "f1_macro"):
            undefined[name] = "no entity in the references"
            del scalars[name]
    return Metrics(scalars=scalars, per_class=per_class, undefined=undefined)


def _shares(right: int, predicted: int, true: int) -> tuple[float, float, float]:
    """(precision, recall, F1)."""
    precision = right / predicted if predicted else 0.0
    recall = right / true if true else 0.0
    return precision, recall, 2 * precision * recall / (precision + recall) if right else 0.0


class Dictionary:
    """Finds what was an entity in training, and nothing else: the score that a model must beat.

    The longest match of words, lower and upper case alike, from left to right, with the type that it most often had.
    """

    def __init__(self, words: Iterable[Sequence[str]], tags: Iterable[Sequence[str]]) -> None:
        """
        Args:
            words, tags: of the training sentences, in IOB2.
        """
        counts: dict[tuple[str, ...], Counter[str]] = {}
        for sentence, own in zip(words, tags, strict=True):
            for start, stop, kind in entities(own):
                counts.setdefault(_form(sentence[start:stop]), Counter())[kind] += 1
        # Of equally frequent types the first by name.
        self.types = {form: min(kinds, key=lambda kind: (-kinds[kind], kind)) for form, kinds in counts.items()}
        self.longest = max(map(len, self.types), default=0)

    def __call__(self, words: Sequence[str]) -> list[str]:
        """The tags of a sentence."""
        form, spans, start = _form(words), [], 0
        while start < len(form):
            for stop in range(min(len(form), start + self.longest), start, -1):
                if kind := self.types.get(form[start:stop]):
                    spans.append(Span(start, stop, kind))
                    break
            start = spans[-1].stop if spans and spans[-1].start == start else start + 1
        return tags_of(spans, len(words)) if spans else [OUTSIDE] * len(words)


def _form(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word.casefold() for word in words)
