"""How one note is written.

A note mentions findings of several departments about equally often. Only one department's findings are the patient's
own, present and current; the others are denied, past, normal, excluded or a relative's. Every department draws the same
kinds of finding (symptom, disease, sign, result, treatment) at the same rates, so the words of a note tell which
departments are mentioned, and only their context tells which one counts.
"""

import random
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from accumft.synthetic.lexicon import Department, Language, Test

T = TypeVar("T")

# Kinds of finding, with cumulative shares.
_KINDS = ("symptom", "disease", "sign", "result", "drug")
_KIND_EDGES = (0.36, 0.62, 0.77, 0.90)
# A note's first finding of a department is one of these, so that every note names a problem.
_LEADING_KINDS = ("symptom", "symptom", "disease")
# What is said of a distractor's finding.
_DISTRACTOR_STATUS = {
    "symptom": ("denied", "denied", "denied", "past", "family"),
    "disease": ("past", "family", "denied"),
    "sign": ("denied", "denied", "denied", "past"),
    "result": ("denied",),
    "drug": ("past", "past", "family", "denied"),
}
_SECTIONS = {
    "symptom.active": "hpi",
    "symptom.denied": "ros",
    "symptom.past": "past",
    "symptom.family": "family",
    "disease.active": "assessment",
    "disease.denied": "assessment",
    "disease.past": "past",
    "disease.family": "family",
    "sign.active": "exam",
    "sign.denied": "exam",
    "sign.past": "past",
    "result.active": "results",
    "result.denied": "results",
    "drug.active": "plan",
    "drug.denied": "medication",
    "drug.past": "medication",
    "drug.family": "family",
}
_ORDERS = (
    ("hpi", "ros", "past", "family", "medication", "social", "vitals", "exam", "results", "assessment", "plan"),
    ("assessment", "plan", "hpi", "ros", "past", "medication", "family", "social", "vitals", "exam", "results"),
    ("past", "family", "social", "medication", "hpi", "ros", "vitals", "exam", "results", "assessment", "plan"),
    ("hpi", "past", "medication", "family", "social", "ros", "exam", "vitals", "results", "assessment", "plan"),
    ("family", "past", "ros", "hpi", "exam", "results", "vitals", "assessment", "plan", "medication", "social"),
)


_NEUTRAL_SECTIONS = ("vitals", "social", "exam", "medication", "results", "plan", "hpi")


class _Form(NamedTuple):
    """A shape of note. Counts are (low, high), both included."""

    main: tuple[int, int]  # findings of the active department and, drawn alike, of the first distractor
    minor: tuple[int, int]  # findings of the second distractor
    neutral: tuple[int, int]  # sentences that belong to no department
    headed: bool  # whether sections have headings


# From the one-liner to the discharge letter, with cumulative shares.
_FORMS = (
    _Form(main=(1, 1), minor=(0, 1), neutral=(0, 0), headed=False),
    _Form(main=(1, 2), minor=(0, 1), neutral=(0, 1), headed=False),
    _Form(main=(2, 3), minor=(1, 2), neutral=(0, 2), headed=False),
    _Form(main=(2, 4), minor=(1, 2), neutral=(2, 5), headed=True),
    _Form(main=(4, 6), minor=(2, 4), neutral=(24, 44), headed=True),
)
_FORM_EDGES = (0.42, 0.70, 0.84, 0.955)

_AGES = (18, 93)
_THIS_YEAR = 2024  # "year" placeholders lie before it, within the patient's life
_TYPO_SHARE = 0.2
_LOWERCASE_SHARE = 0.1
_TERSE_SHARE = 0.35


def write_note(language: Language, key: str) -> tuple[str, str]:
    """Write the note that belongs to `key`: its text and its label."""
    return Writer(language, key).note()


class _Fields(dict[str, str]):
    """The placeholders of a template; all but `age` and `x` are drawn when a template asks for them."""

    def __init__(self, writer: "Writer") -> None:
        super().__init__()
        self.writer = writer

    def __missing__(self, name: str) -> str:
        language = self.writer.language
        if name == "year":
            return str(_THIS_YEAR - self.writer.between((2, min(35, int(self["age"]) - 10))))
        if name in language.numbers:
            return str(self.writer.between(language.numbers[name]))
        return self.writer.pick(language.fillers[name]).format_map(self)


class Writer:
    """The language and the random draws of one note.

    Only `random.Random(str).random()` is used: Python promises its sequence from version to version, which it does not
    for `choice`, `sample` or `shuffle`.
    """

    def __init__(self, language: Language, key: str) -> None:
        self.language = language
        self.random = random.Random(key).random
        self.fields = _Fields(self)
        self.fields["age"] = str(self.between(_AGES))

    def between(self, bounds: tuple[int, int]) -> int:
        return bounds[0] + int(self.random() * (bounds[1] - bounds[0] + 1))

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.random() * len(options))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        return [option for _, option in sorted((self.random(), option) for option in options)]

    def note(self) -> tuple[str, str]:
        form = _FORMS[bisect(_FORM_EDGES, self.random())]
        departments = self.language.departments
        edges = list(accumulate(department.share for department in departments))
        active = departments[bisect(edges, self.random() * edges[-1], hi=len(edges) - 1)]
        others = [departments[index] for index in self.shuffled(range(len(departments)))]
        others = [department for department in others if department is not active][:2]

        findings: dict[str, list[str]] = {}
        self.add_findings(
            findings, active, self.between(form.main) + int(self.random() < self.language.extra_share), is_active=True
        )
        for department, count in zip(others, (form.main, form.minor), strict=True):
            self.add_findings(findings, department, self.between(count), is_active=False)
        sections = self.sections(findings, form)
        return self.noisy(self.layout(sections, form)), active.label

    def add_findings(self, findings: dict[str, list[str]], source: Department, count: int, is_active: bool) -> None:
        """Draw `count` findings of a department into lists by kind and status ("symptom.denied")."""
        for index in range(count):
            kind = self.pick(_LEADING_KINDS) if index == 0 else _KINDS[bisect(_KIND_EDGES, self.random())]
            status = "active" if is_active else self.pick(_DISTRACTOR_STATUS[kind])
            words = findings.setdefault(f"{kind}.{status}", [])
            word = (
                self.result(self.pick(source.tests), is_active) if kind == "result" else self.pick(source.words(kind))
            )
            if word not in words:
                words.append(word)

    def result(self, test: Test, is_active: bool) -> str:
        low, high = test.abnormal if is_active else test.normal
        value = f"{low + self.random() * (high - low):.{test.decimals}f}"
        flag = ("high" if test.abnormal > test.normal else "low") if is_active else "normal"
        return self.pick(self.language.flags[flag]).format(
            x=self.language.measurement.format(name=test.name, value=value, unit=test.unit)
        )

    def sections(self, findings: dict[str, list[str]], form: _Form) -> dict[str, list[str]]:
        """Turn findings into sentences, add neutral ones, and sort them by section."""
        sections: dict[str, list[str]] = {}
        for status in sorted(findings):
            words = self.shuffled(findings[status])
            while words:
                # Family and past come one by one, each with its own relative or year.
                size = 1 if status.endswith(("past", "family")) else self.between((1, 3))
                group, words = words[:size], words[size:]
                sections.setdefault(_SECTIONS[status], []).append(self.statement(status, group, form.headed))
        used = set()
        for _ in range(self.between(form.neutral)):
            section = self.pick(_NEUTRAL_SECTIONS)
            template = self.pick(self.language.neutral[section])
            # Said twice, a sentence could contradict itself; so could two sets of vital signs.
            key = section if section == "vitals" else template
            if key not in used:
                used.add(key)
                sections.setdefault(section, []).append(template.format_map(self.fields))
        return sections

    def statement(self, status: str, words: list[str], headed: bool) -> str:
        language = self.language
        templates = language.statements[status]
        if headed and status in language.terse and self.random() < _TERSE_SHARE:
            templates = language.terse[status]
        negated = status.endswith("denied") and status != "result.denied"
        joint = self.pick(language.list_or if negated else language.list_and)
        head = language.list_comma.join(words[:-1])
        self.fields["x"] = f"{head}{joint}{words[-1]}" if head else words[-1]
        sentence = self.pick(templates).format_map(self.fields)
        return sentence[0].upper() + sentence[1:]

    def layout(self, sections: dict[str, list[str]], form: _Form) -> str:
        language = self.language
        order = self.pick(_ORDERS)
        opening = self.pick(language.openings).format_map(self.fields)
        bodies = [
            (name, language.sentence_space.join(self.shuffled(sections[name]))) for name in order if name in sections
        ]
        if not form.headed:
            return language.sentence_space.join([opening, *(body for _, body in bodies)])
        style, separator = self.pick(language.heading_styles), self.pick(("\n", "\n\n", language.sentence_space))
        upper = self.random() < 0.3
        lines = [opening]
        for name, body in bodies:
            heading = self.pick(language.headings[name])
            lines.append(style.format(h=heading.upper() if upper else heading) + body)
        return separator.join(lines)

    def noisy(self, text: str) -> str:
        """Swap or drop a few letters, and sometimes give up capitals."""
        if self.random() < _LOWERCASE_SHARE:
            text = text.lower()
        if self.random() < _TYPO_SHARE:
            for _ in range(self.between((1, 3))):
                at = self.between((0, len(text) - 3))
                pair = text[at : at + 2]
                if pair.isalpha():
                    text = text[:at] + (pair[::-1] if self.random() < 0.5 else pair[0]) + text[at + 2 :]
        return text
