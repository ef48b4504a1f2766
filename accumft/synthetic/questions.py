"""Synthetic questions with answers, as conversations, made from the phrases of the English clinical notes.

Each question names two findings, perhaps with one that the patient does not have, and its answer the department that
is concerned, and the one that is not. A question of the held-out slices names a pair of phrases that no training
question names, each of which the training questions know: what it asks is not remembered but put together.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

from accumft.errors import UserError
from accumft.synthetic.english import ENGLISH
from accumft.synthetic.lexicon import Department

T = TypeVar("T")

KINDS = ("symptom", "sign", "disease", "drug")
_BOTH = (
    "Which department is concerned with {a} and {b}?",
    "A note mentions {a} and {b}. Whose patient is it?",
    "{a}, {b}: which department?",
)
_DENIED = (
    "A patient has {a} and {b}, but denies {c}. Which department?",
    "No {c}, but {a} and {b}. Whose patient is it?",
)
_UNIT = ("In what unit is {a} given?", "What is the unit of {a}?")
_PHRASES_A_KIND = 6
_HELD_OUT = 5  # one pair of so many
_TURNS = ((1, 0.7), (2, 0.9), (3, 1.0))


def generate_questions(
    num_conversations: int, *, held_out: bool = False, seed: int = 42, start: int = 0
) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Writes conversations `start` to `start + num_conversations - 1`, one at a time, as {"messages": [...]}.

    Conversation i is a pure function of (seed, held_out, i).

    Args:
        held_out: whether the pairs of phrases are those that no other conversation names.

    Raises:
        UserError: a number is negative.
    """
    if num_conversations < 0 or start < 0:
        raise UserError(f"num_conversations={num_conversations}, start={start}: neither may be negative")
    return (
        {"messages": Writer(f"accumft questions {seed} {held_out} {index}", held_out).conversation()}
        for index in range(start, start + num_conversations)
    )


def is_held_out(first: str, second: str) -> bool:
    """Whether a pair of phrases, in any order, is kept out of the training questions."""
    pair = "\x1f".join(sorted((first, second)))
    return hashlib.sha256(pair.encode()).digest()[0] % _HELD_OUT == 0


class Writer:
    """The random draws of one conversation; only `random.Random(str).random()` is used, as in `notes`."""

    def __init__(self, key: str, held_out: bool) -> None:
        self.random = random.Random(key).random
        self.held_out = held_out

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.random() * len(options))]

    def conversation(self) -> list[dict[str, str]]:
        """One to three questions with their answers."""
        draw = self.random()
        turns = next(number for number, edge in _TURNS if draw < edge)
        messages = []
        for _ in range(turns):
            # What one test is measured in can only be known: such questions are for training.
            asks_unit = not self.held_out and self.random() < 0.1
            question, answer = self.unit() if asks_unit else self.pair()
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return messages

    def unit(self) -> tuple[str, str]:
        test = self.pick(self.pick(ENGLISH.departments).tests)
        return self.pick(_UNIT).format(a=test.name), f"{test.unit}."

    def pair(self) -> tuple[str, str]:
        """A question about two findings of a department, perhaps with one of another that the patient does not have."""
        while True:
            department = self.pick(ENGLISH.departments)
            a, b = self.finding(department), self.finding(department)
            if a != b and is_held_out(a, b) == self.held_out:
                break
        if self.random() < 0.5:
            return self.pick(_BOTH).format(a=a, b=b), f"{department.label.capitalize()}."
        other = self.pick([each for each in ENGLISH.departments if each is not department])
        question = self.pick(_DENIED).format(a=a, b=b, c=self.finding(other))
        return question, f"{department.label.capitalize()}, not {other.label}."

    def finding(self, department: Department) -> str:
        """A phrase: one of the first few of its kind, so that a small corpus names each of them often."""
        return self.pick(department.words(self.pick(KINDS))[:_PHRASES_A_KIND])
