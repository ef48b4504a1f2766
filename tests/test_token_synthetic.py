"""The synthetic sentences: always the same, with entities of no other split, and words where the entities are."""

import hashlib
from collections import Counter
from typing import Any

import pytest

from accumft.errors import UserError
from accumft.metrics.entities import Dictionary, entities, entity_scores
from accumft.synthetic.entities import TYPES, load_synthetic_entities, split_of

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module", params=["en", "zh"])
def corpus(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, load_synthetic_entities(
        num_train=600, num_validation=200, num_test=200, language=request.param
    )


def forms(sentences: Any) -> set[str]:
    return {
        " ".join(sentence.words[start:stop]).casefold()
        for sentence in sentences
        for start, stop, _ in entities(sentence.tags)
    }


def test_sentences_never_change(corpus: tuple[str, dict[str, Any]]) -> None:
    language, splits = corpus
    text = "\n".join(f"{' '.join(s.words)}\t{' '.join(s.tags)}" for name in SPLITS for s in splits[name][:50])
    digest = {"en": "64148318e6ff12cd", "zh": "bf771d54223e2045"}
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest[language]


def test_a_sentence_depends_on_its_number_alone(corpus: tuple[str, dict[str, Any]]) -> None:
    language, splits = corpus
    few = load_synthetic_entities(num_train=5, num_validation=3, num_test=2, language=language)  # type: ignore[arg-type]
    assert few == {"train": splits["train"][:5], "validation": splits["validation"][:3], "test": splits["test"][:2]}
    other = load_synthetic_entities(num_train=5, num_validation=0, num_test=0, language=language, seed=7)  # type: ignore[arg-type]
    assert other["train"] != few["train"]


def test_no_entity_stands_in_two_splits(corpus: tuple[str, dict[str, Any]]) -> None:
    _, splits = corpus
    found = {name: forms(splits[name]) for name in SPLITS}
    assert all(len(found[name]) > 40 for name in SPLITS)
    assert not found["train"] & found["test"] and not found["train"] & found["validation"]
    assert not found["validation"] & found["test"]
    assert split_of("Asthma") == split_of("asthma")


def test_every_type_occurs_and_looking_up_finds_nothing(corpus: tuple[str, dict[str, Any]]) -> None:
    _, splits = corpus
    for name in SPLITS:
        counts = Counter(kind for s in splits[name] for _, _, kind in entities(s.tags))
        assert sorted(counts) == sorted(TYPES) and min(counts.values()) > 15
    train = splits["train"]
    look_up = Dictionary([s.words for s in train], [s.tags for s in train])
    scores = {
        name: entity_scores([s.tags for s in splits[name]], [look_up(s.words) for s in splits[name]]).scalars["f1"]
        for name in ("train", "test")
    }
    assert scores["test"] < 0.02
    assert scores["train"] < 0.75, "the same phrase has several types: only what is said of it tells which"


@pytest.mark.parametrize(("fields", "message"), [({"language": "fr"}, "en"), ({"num_test": -1}, "negative")])
def test_mistakes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_synthetic_entities(**{"num_train": 1, "num_validation": 1, "num_test": 1, **fields})
