"""What a language brings to the generator: the words of each department and the sentences around them."""

from collections.abc import Mapping
from dataclasses import dataclass

Phrases = tuple[str, ...]


def phrases(text: str) -> Phrases:
    """Split a semicolon-separated block into its phrases, line breaks inside a phrase becoming a blank."""
    return tuple(" ".join(part.split()) for part in text.split(";") if part.strip())


@dataclass(frozen=True, slots=True)
class Test:
    """A measurement: values are drawn from `normal` or from `abnormal`, both (low, high) in `unit`."""

    name: str
    unit: str
    normal: tuple[float, float]
    abnormal: tuple[float, float]
    decimals: int
    """Digits written after the decimal point."""


def tests(text: str) -> tuple[Test, ...]:
    """Read one test per line, as `name | unit | normal low-high | abnormal low-high`."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    return tuple(
        Test(name, unit, _span(normal), _span(abnormal), decimals=int("." in normal))
        for name, unit, normal, abnormal in rows
    )


def _span(text: str) -> tuple[float, float]:
    low, high = text.split("-")
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Department:
    """The words of one department. Every phrase may stand for the active problem or for a distractor."""

    label: str
    share: float
    """Share of the notes, 0 to 1, that carry this label."""
    symptoms: Phrases
    signs: Phrases
    diseases: Phrases
    drugs: Phrases
    """Treatments of any sort."""
    tests: tuple[Test, ...]

    def words(self, kind: str) -> Phrases:
        """The phrases of a kind of finding: "symptom", "sign", "disease" or "drug"."""
        phrases: Phrases = getattr(self, f"{kind}s")
        return phrases


@dataclass(frozen=True, slots=True)
class Language:
    """One language of the generator: departments, sentence templates, headings and punctuation.

    Templates hold `{x}` for the finding or list of findings, and any key of `fillers` or `numbers`.
    """

    departments: tuple[Department, ...]
    statements: Mapping[str, Phrases]
    """Full sentences for each status of a finding ("symptom.active", "disease.family", ...)."""
    terse: Mapping[str, Phrases]
    """Short forms, clear only below the section's heading; a status without them uses `statements`."""
    neutral: Mapping[str, Phrases]
    """Sentences without a department, by section."""
    measurement: str
    """A test's `name`, `value` and `unit` in one phrase."""
    openings: Phrases
    headings: Mapping[str, Phrases]
    heading_styles: Phrases
    fillers: Mapping[str, Phrases]
    numbers: Mapping[str, tuple[int, int]]
    flags: Mapping[str, Phrases]
    """How a result is marked: "high", "low" and "normal"."""
    extra_share: float
    """Share of the notes, 0 to 1, in which the active department has one finding more than it would by chance: what
    makes the label easier to learn, and also what counting words can learn."""
    list_and: Phrases
    """How the last item of a list is joined where all hold."""
    list_or: Phrases
    """How the last item of a list is joined where none holds."""
    list_comma: str
    sentence_space: str
