"""Tag schemes: found from the data, brought to IOB2, and refused or repaired where they are malformed."""

import pytest
from token_cases import sentence

from accumft.data.tags import find_scheme, spans_of, to_iob2
from accumft.errors import UserError

WORDS = "w1 w2 w3 w4 w5 w6"
# All of them: an entity of two words, its neighbour of one, O, and an entity of another type at the end.
IOB2 = "B-a I-a B-a O B-b I-b"
SAME = {
    "io": ("a a O O b b", "B-a I-a O O B-b I-b"),  # cannot part neighbours
    "iob1": ("I-a I-a B-a O I-b I-b", IOB2),
    "iob2": (IOB2, IOB2),
    "bioes": ("B-a E-a S-a O B-b E-b", IOB2),
}


@pytest.mark.parametrize("scheme", SAME)
def test_scheme_is_found_and_brought_to_iob2(scheme: str) -> None:
    written, expected = SAME[scheme]
    (found,), seen = to_iob2([sentence(WORDS, written)])
    assert (seen, " ".join(found.tags)) == (scheme, expected)


@pytest.mark.parametrize(
    ("written", "expected", "scheme"),
    [
        ("B_a I_a B_a O B_b I_b", IOB2, "iob2"),
        ("B-a L-a U-a O B-b L-b", IOB2, "bioes"),
        ("B-a E-a S-a O B-b E-b", IOB2, "bioes"),
        ("B-a M-a E-a O O O", "B-a I-a I-a O O O", "bioes"),
        ("B-a-x I-a-x O O O B-b_y", "B-a-x I-a-x O O O B-b_y", "iob2"),
        ("O O O O O O", "O O O O O O", "iob2"),
    ],
)
def test_other_ways_to_write_it(written: str, expected: str, scheme: str) -> None:
    (found,), seen = to_iob2([sentence(WORDS, written)])
    assert (" ".join(found.tags), seen) == (expected, scheme)


def test_scheme_of_all_sentences_together() -> None:
    """A lone I-X of a small file is IOB1 by itself, and a mistake beside many in IOB2."""
    lone = sentence("x y", "I-a O", source="test.tsv", lines=[40, 41])
    assert find_scheme([lone]) == "iob1"
    with pytest.raises(UserError) as error:
        to_iob2([sentence(WORDS, IOB2), lone])
    assert str(error.value) == (
        "test.tsv, line 40: 'I-a' after 'the start of the sentence' is malformed IOB2; correct it, or --on_bad_tags "
        "repair, or name another --tag_scheme"
    )


MALFORMED = [
    ("iob2", "O I-a I-a O B-b I-b", "O B-a I-a O B-b I-b", 2, 1),
    ("iob2", "B-a I-b O O O O", "B-a B-b O O O O", 2, 1),
    ("iob2", "I-a O I-a O B-a O", "B-a O B-a O B-a O", 1, 2),
    ("bioes", "B-a O E-b O S-a O", "B-a O B-b O B-a O", 2, 2),
    ("bioes", "B-a I-a O O O O", "B-a I-a O O O O", 3, 1),
    ("bioes", "O O O O O B-a", "O O O O O B-a", 6, 1),
]


@pytest.mark.parametrize(("scheme", "written", "repaired", "line", "places"), MALFORMED)
def test_malformed_tags_are_refused_or_repaired(
    scheme: str, written: str, repaired: str, line: int, places: int
) -> None:
    one = sentence(WORDS, written)
    with pytest.raises(UserError, match=rf"^x.tsv, line {line}: .* is malformed .*--on_bad_tags repair") as error:
        to_iob2([one], scheme)  # type: ignore[arg-type]
    assert ("more place" in str(error.value)) == (places > 1)
    notes: list[str] = []
    (found,), _ = to_iob2([one], scheme, "repair", notes)  # type: ignore[arg-type]
    assert " ".join(found.tags) == repaired
    assert len(notes) == 1 and notes[0].startswith(f"{places} malformed tag") and f"x.tsv, line {line}" in notes[0]
    assert spans_of(found, "iob2")[1] == []


@pytest.mark.parametrize("tags", ["B-a NER O O O O", "O O O Disease O B-x"])
def test_what_is_no_tag_is_named(tags: str) -> None:
    with pytest.raises(UserError, match=r"x.tsv, line [24]: '(NER|Disease)' is no tag like O, B-X or I-X"):
        to_iob2([sentence(WORDS, tags)])
