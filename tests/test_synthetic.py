"""The embedded notes: the same for ever, of many lengths, and not to be classified by counting words."""

import hashlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from accumft.errors import UserError
from accumft.synthetic import _LANGUAGES, DEPARTMENTS, generate_notes, load_synthetic
from accumft.synthetic.lexicon import Department

LANGUAGE_NAMES = ("en", "zh")
NUM_NOTES = 2000


@pytest.fixture(scope="module", params=LANGUAGE_NAMES)
def corpus(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, str]]]:
    return request.param, list(generate_notes(NUM_NOTES, language=request.param))


def length(language: str, text: str) -> int:
    """Words in English, characters in Chinese."""
    return len(text.split()) if language == "en" else len(text)


def phrases_of(department: Department) -> list[str]:
    names = [test.name for test in department.tests]
    return [*department.symptoms, *department.signs, *department.diseases, *department.drugs, *names]


def departments_mentioned(language: str, text: str) -> set[str]:
    lowered = text.lower()
    return {
        department.label
        for department in _LANGUAGES[language].departments
        if any(phrase.lower() in lowered for phrase in phrases_of(department))
    }


def test_notes_never_change(corpus: tuple[str, list[dict[str, str]]]) -> None:
    language, notes = corpus
    joined = "\x1e".join(f"{note['label']}\x1f{note['text']}" for note in notes[:200])
    digest = {"en": "166c236dd2b9232f", "zh": "72f1a181799f120e"}
    assert hashlib.sha256(joined.encode()).hexdigest()[:16] == digest[language]


def test_any_slice_can_be_written_alone(corpus: tuple[str, list[dict[str, str]]]) -> None:
    language, notes = corpus
    assert list(generate_notes(50, language=language, start=777)) == notes[777:827]
    assert next(generate_notes(1, language=language, seed=7)) not in notes


def test_notes_are_streamed() -> None:
    begin = time.perf_counter()
    endless = generate_notes(10**9)
    far = generate_notes(10**9, start=10**12)
    assert isinstance(endless, Iterator)
    assert len(list(itertools.islice(endless, 3)) + list(itertools.islice(far, 3))) == 6
    assert time.perf_counter() - begin < 1.0


def test_no_text_comes_twice(corpus: tuple[str, list[dict[str, str]]]) -> None:
    assert len({note["text"] for note in corpus[1]}) == NUM_NOTES


def test_splits_are_disjoint_and_evaluation_stays_when_training_grows() -> None:
    small = load_synthetic(num_train=40, num_validation=20, num_test=30, language="en", seed=5)
    large = load_synthetic(num_train=90, num_validation=20, num_test=30, language="en", seed=5)
    assert {name: len(split) for name, split in small.items()} == {"train": 40, "validation": 20, "test": 30}
    assert all(split.column_names == ["text", "label"] for split in small.values())
    assert len({text for split in small.values() for text in split["text"]}) == 90
    for name in ("validation", "test"):
        assert small[name].to_list() == large[name].to_list()
    assert large["train"].to_list()[:40] == small["train"].to_list()


def test_eight_labels_mildly_skewed(corpus: tuple[str, list[dict[str, str]]]) -> None:
    language, notes = corpus
    counts = Counter(note["label"] for note in notes)
    assert len(DEPARTMENTS[language]) == 8
    assert set(counts) == set(DEPARTMENTS[language])
    assert 0.05 < min(counts.values()) / NUM_NOTES < 0.11
    assert 0.13 < max(counts.values()) / NUM_NOTES < 0.20


def test_lengths_have_a_long_tail(corpus: tuple[str, list[dict[str, str]]]) -> None:
    language, notes = corpus
    lengths = sorted(length(language, note["text"]) for note in notes)
    median, mean = statistics.median(lengths), statistics.mean(lengths)
    assert median < 0.8 * mean
    assert lengths[0] < 0.6 * median
    assert lengths[-1] > 5 * median
    one_liners = sum("\n" not in note["text"] and length(language, note["text"]) < median for note in notes)
    assert one_liners > 0.3 * NUM_NOTES


def test_every_placeholder_is_filled(corpus: tuple[str, list[dict[str, str]]]) -> None:
    assert not [note["text"] for note in corpus[1] if "{" in note["text"] or "}" in note["text"]]


def test_notes_mention_other_departments(corpus: tuple[str, list[dict[str, str]]]) -> None:
    language, notes = corpus
    mentioned = [departments_mentioned(language, note["text"]) for note in notes]
    assert statistics.mean(len(departments) >= 2 for departments in mentioned) > 0.9
    # The active department is named, too, wherever no typo hides it.
    assert statistics.mean(note["label"] in found for note, found in zip(notes, mentioned, strict=True)) > 0.95


def test_sections_negation_and_relatives(corpus: tuple[str, list[dict[str, str]]]) -> None:
    language, notes = corpus
    cues = {
        "en": (("no ", "denies", "without", "not ", "excluded", "never", "negative"), ("mother", "uncle", "sister")),
        "zh": (("无", "否认", "未", "排除", "除外", "没有"), ("母亲", "叔叔", "姐姐")),
    }
    negations, relatives = cues[language]
    texts = [note["text"].lower() for note in notes]
    assert statistics.mean(any(cue in text for cue in negations) for text in texts) > 0.6
    assert statistics.mean(any(cue in text for cue in relatives) for text in texts) > 0.05
    headings = [heading.lower() for heading in _LANGUAGES[language].headings["family"]]
    assert statistics.mean(any(heading in text for heading in headings) for text in texts) > 0.05


@pytest.mark.parametrize("language", LANGUAGE_NAMES)
def test_counting_words_is_not_enough(language: str) -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    notes = list(generate_notes(1200, language=language))  # type: ignore[arg-type]
    texts, labels = [note["text"] for note in notes], [note["label"] for note in notes]
    vectorizer = TfidfVectorizer(analyzer="word" if language == "en" else "char", sublinear_tf=True)
    train, test = vectorizer.fit_transform(texts[400:]), vectorizer.transform(texts[:400])
    accuracy = LogisticRegression(C=10, max_iter=1000).fit(train, labels[400:]).score(test, labels[:400])
    assert 0.25 < accuracy < 0.65  # always answering the largest class: about 0.16


def test_result_flags_agree_with_the_ranges() -> None:
    for language in _LANGUAGES.values():
        for department in language.departments:
            for test in department.tests:
                assert test.normal[0] <= test.normal[1] < test.abnormal[0] < test.abnormal[1] or (
                    test.abnormal[0] < test.abnormal[1] < test.normal[0] < test.normal[1]
                ), test.name


def test_no_phrase_belongs_to_two_departments() -> None:
    for language in _LANGUAGES.values():
        counts = Counter(phrase for department in language.departments for phrase in phrases_of(department))
        assert not [phrase for phrase, count in counts.items() if count > 1]


def test_mistakes_are_named_before_the_first_note() -> None:
    with pytest.raises(UserError, match=r'language="fr".*"en" or "zh"'):
        generate_notes(1, language="fr")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="num_notes=-1"):
        generate_notes(-1)
