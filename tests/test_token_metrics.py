"""Entity scores: seqeval's strict IOB2 figures, hand-computed cases, and the dictionary."""

import random
import warnings
from typing import Any

import pytest

from accumft.data.tags import Span
from accumft.metrics.entities import Dictionary, entities, entity_scores

TAGS = ["O", "B-a", "I-a", "B-b", "I-b", "B-c", "I-c"]


def random_tags(seed: int, sentences: int = 40) -> list[list[str]]:
    draw = random.Random(seed)
    return [[draw.choice(TAGS) for _ in range(draw.randint(1, 12))] for _ in range(sentences)]


def test_entities_by_hand() -> None:
    tags = ["B-a", "I-a", "O", "I-a", "B-a", "B-a", "I-b", "B-b", "I-b", "I-b", "O", "B-a"]
    assert entities(tags) == [
        Span(0, 2, "a"),
        Span(4, 5, "a"),
        Span(5, 6, "a"),
        Span(7, 10, "b"),
        Span(11, 12, "a"),
    ]
    assert entities([]) == []
    assert entities(["I-a", "O"]) == []


@pytest.mark.parametrize("seed", range(6))
def test_scores_are_those_of_seqeval(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from seqeval.metrics import classification_report
        from seqeval.scheme import IOB2

        references = random_tags(seed)
        # Half of the sentences are right, so that something is found.
        guesses = random_tags(seed + 100)
        predictions = [
            r if i % 2 else (g * 12)[: len(r)] for i, (r, g) in enumerate(zip(references, guesses, strict=True))
        ]
        report: dict[str, Any] = classification_report(
            references, predictions, mode="strict", scheme=IOB2, output_dict=True, zero_division=0
        )
    found = entity_scores(references, predictions)
    for name, key in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
        assert found.scalars[name] == pytest.approx(report["micro avg"][key], abs=1e-12)
        for row in found.per_class:
            assert row[name] == pytest.approx(report[row["name"]][key], abs=1e-12)
    assert found.scalars["f1_macro"] == pytest.approx(report["macro avg"]["f1-score"], abs=1e-12)
    assert {row["name"]: row["support"] for row in found.per_class} == {k: report[k]["support"] for k in "abc"}
    assert 0.2 < found.scalars["f1"] < 0.9


def test_scores_by_hand() -> None:
    references = [["B-a", "I-a", "O", "B-b"], ["O", "B-a"], ["O", "O"]]
    predictions = [["B-a", "O", "O", "B-b"], ["O", "B-a"], ["B-b", "O"]]
    found = entity_scores(references, predictions, ["a", "b", "never"])
    # a: 1 of 2 predicted and of 2 true; b: 1 of 2 predicted, of 1 true.
    assert found.scalars == {
        "f1": pytest.approx(2 * 0.5 * (2 / 3) / (0.5 + 2 / 3)),
        "precision": pytest.approx(0.5),
        "recall": pytest.approx(2 / 3),
        "f1_macro": pytest.approx((0.5 + 2 / 3) / 2),
        "accuracy": pytest.approx(6 / 8),
    }
    assert [row["support"] for row in found.per_class] == [2, 1, 0]
    assert found.undefined == {}


def test_without_an_entity_in_the_references_recall_is_undefined() -> None:
    found = entity_scores([["O", "O"]], [["B-a", "O"]])
    assert found.scalars == {"precision": 0.0, "accuracy": 0.5}
    assert set(found.undefined) == {"f1", "recall", "f1_macro"}


def test_sentences_of_unlike_length_are_an_error() -> None:
    with pytest.raises(ValueError):
        entity_scores([["O", "O"]], [["O"]])


def test_dictionary_takes_the_longest_match_and_the_most_frequent_type() -> None:
    words = [["Chest", "pain", "now"], ["pain", "x"], ["pain"], ["pain"]]
    tags = [["B-a", "I-a", "O"], ["B-b", "O"], ["B-b"], ["B-a"]]
    look_up = Dictionary(words, tags)
    assert look_up(["no", "CHEST", "pain", "pain", "chest"]) == ["O", "B-a", "I-a", "B-b", "O"]
    assert look_up([]) == []
    assert Dictionary([], [])(["pain"]) == ["O"]
