"""Synthetic conversations between doctor and patient with the note that is made of each, English and Chinese.

A note is what was said, in a fixed order and in a doctor's words: the complaint and how long it has lasted, what else
there is, what is denied, earlier illness, medication. The doctor asks in any order, some lines are about nothing, and a
question counts for what its answer says. So a note cannot be had by copying lines, yet every finding in it is a phrase
of its conversation.

The complaint and the first symptom that is asked about make a combination, and a quarter of all combinations are never
in a training conversation and always in a validation or test one. Single phrases are in both.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from accumft.errors import UserError
from accumft.synthetic.chinese import CHINESE
from accumft.synthetic.english import ENGLISH
from accumft.synthetic.lexicon import Language

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")

PHRASES = 4
"""Phrases of each kind and department that are used, of eight departments."""
HELD_OUT_SHARE = 4
"""One of so many combinations is held out."""
_AGES = (20, 89)


@dataclass(frozen=True, slots=True)
class Talk:
    """The lines of a conversation and the sentences of a note in one language; {x} is a finding or a list of them."""

    openings: tuple[str, ...]
    """The patient's first line, of {x}, {age} and {duration}."""
    durations: tuple[str, ...]
    doctor: str
    patient: str
    """What their lines begin with."""
    symptom: tuple[str, ...]
    disease: tuple[str, ...]
    drug: tuple[str, ...]
    """The doctor's questions."""
    yes: tuple[str, ...]
    no: tuple[str, ...]
    chat: tuple[tuple[str, str], ...]
    """Questions and answers that no note mentions."""
    closing: tuple[str, ...]
    sentences: Mapping[str, str]
    """Of the note, in its order: main, reports, denies, past, takes."""
    joint: str
    joint_or: str
    """What stands between two findings of a sentence."""
    space: str
    """What stands between two sentences."""


_ENGLISH = Talk(
    openings=(
        "I have had {x} for {duration}. I am {age}.",
        "It is about {x}, for {duration} now. I am {age} years old.",
        "For {duration} there has been {x}. I turned {age} this year.",
        "I am {age} and I came because of {x} for {duration}.",
    ),
    durations=(
        "two days",
        "three days",
        "five days",
        "one week",
        "two weeks",
        "three weeks",
        "one month",
        "two months",
    ),
    doctor="Doctor: ",
    patient="Patient: ",
    symptom=("Any {x}?", "Have you noticed {x}?", "Is there {x}?", "What about {x}?"),
    disease=("Have you ever had {x}?", "Was there ever {x}?", "Is {x} in your history?"),
    drug=("Do you take {x}?", "Are you on {x}?", "Have you been given {x}?"),
    yes=("Yes.", "Yes, I have.", "I am afraid so.", "That is right.", "Yes, doctor."),
    no=("No.", "Not at all.", "No, never.", "I have not.", "No, doctor."),
    chat=(
        ("Did you find the way easily?", "Yes, by bus."),
        ("Is anybody with you today?", "My sister is."),
        ("Have you been here before?", "No, it is my first time."),
        ("Shall I open the window?", "Yes, please."),
    ),
    closing=("Thank you, I will examine you now.", "Good, let us have a look.", "We will take some blood today."),
    sentences={
        "main": "{age}-year-old patient with {x} for {duration}.",
        "reports": "Reports {x}.",
        "denies": "Denies {x}.",
        "past": "Past history of {x}.",
        "takes": "Takes {x}.",
    },
    joint=" and ",
    joint_or=" or ",
    space=" ",
)
_CHINESE = Talk(
    openings=(
        "我{x}{duration}了，今年{age}岁。",
        "我今年{age}岁，{x}有{duration}了。",
        "{x}，已经{duration}了，我{age}岁。",
    ),
    durations=("两天", "三天", "五天", "一周", "两周", "三周", "一个月", "两个月"),
    doctor="医生：",
    patient="患者：",
    symptom=("有没有{x}？", "{x}有吗？", "感觉到{x}吗？"),
    disease=("以前得过{x}吗？", "有{x}的病史吗？"),
    drug=("在用{x}吗？", "用过{x}吗？"),
    yes=("有的。", "是的。", "嗯，有。", "对。"),
    no=("没有。", "从来没有。", "不，没有。", "都没有。"),
    chat=(("路上顺利吗？", "顺利，坐公交来的。"), ("今天有人陪您吗？", "妹妹陪我。"), ("以前来过吗？", "第一次来。")),
    closing=("好，我给您检查一下。", "好，先抽血看看。", "谢谢，我们来看看。"),
    sentences={
        "main": "患者{age}岁，{x}{duration}。",
        "reports": "伴{x}。",
        "denies": "无{x}。",
        "past": "既往{x}。",
        "takes": "现用{x}。",
    },
    joint="、",
    joint_or="、",
    space="",
)
_LANGUAGES: dict[str, tuple[Language, Talk]] = {"en": (ENGLISH, _ENGLISH), "zh": (CHINESE, _CHINESE)}


def is_held_out(complaint: str, other: str) -> bool:
    """Whether a combination is kept out of the training conversations."""
    return hashlib.sha256(f"{complaint}\0{other}".encode()).digest()[0] % HELD_OUT_SHARE == 0


def write_dialogue(language: Literal["en", "zh"], key: str, held_out: bool) -> tuple[str, str, tuple[str, str]]:
    """(conversation, note, combination) that belong to `key`: lines separated by line breaks, one paragraph."""
    lexicon, talk = _LANGUAGES[language]
    draw = random.Random(key).random  # Python promises its sequence, and not that of `choice` or `shuffle`

    def pick(options: Sequence[T]) -> T:
        return options[int(draw() * len(options))]

    def phrase(kind: str) -> str:
        return pick(pick(lexicon.departments).words(kind)[:PHRASES])

    def question(kind: str) -> tuple[str, bool, str]:
        found = phrase(kind)
        while found in said:
            found = phrase(kind)
        said.add(found)
        return kind, draw() < 0.5, found

    while True:
        complaint, other = phrase("symptom"), phrase("symptom")
        if complaint != other and is_held_out(complaint, other) == held_out:
            break
    said = {complaint, other}
    asking = {"symptom": talk.symptom, "disease": talk.disease, "drug": talk.drug}
    questions = [("symptom", draw() < 0.5, other), question("symptom"), question(pick(("disease", "drug")))]
    questions = [asked for _, asked in sorted((draw(), asked) for asked in questions)]
    age, duration = str(_AGES[0] + int(draw() * (_AGES[1] - _AGES[0] + 1))), pick(talk.durations)
    facts = {"age": age, "duration": duration}
    exchanges = [
        (pick(asking[kind]).format(x=found), pick(talk.yes if answer else talk.no)) for kind, answer, found in questions
    ]
    if draw() < 0.4:
        exchanges.insert(int(draw() * (len(exchanges) + 1)), pick(talk.chat))
    lines = [talk.patient + pick(talk.openings).format(x=complaint, **facts)]
    for asked, answered in exchanges:
        lines += [talk.doctor + asked, talk.patient + answered]
    lines.append(talk.doctor + pick(talk.closing))

    def those(kind: str, answer: bool) -> list[str]:
        return [found for of_kind, given, found in questions if of_kind == kind and given == answer]

    parts = {
        "main": [complaint],
        "reports": those("symptom", True),
        "denies": those("symptom", False),
        "past": those("disease", True),
        "takes": those("drug", True),
    }
    note = [
        talk.sentences[name].format(x=(talk.joint_or if name == "denies" else talk.joint).join(found), **facts)
        for name, found in parts.items()
        if found
    ]
    return "\n".join(lines), talk.space.join(note), (complaint, other)


def generate_dialogues(
    size: int, *, split: str = "train", language: Literal["en", "zh"] = "en", seed: int = 42
) -> Iterator[dict[str, str]]:
    """Conversations 0 to `size` - 1 of a split, as {"dialogue": …, "note": …}; each a pure function of its number.

    Args:
        split: "train", or "validation" and "test", which hold the combinations that "train" never has.

    Raises:
        UserError: the language is not "en" or "zh".
    """
    if language not in _LANGUAGES:
        raise UserError(f'language="{language}": the synthetic conversations are in "en" or "zh"')
    for index in range(size):
        key = f"accumft dialogue {language} {seed} {split} {index}"
        dialogue, note, _ = write_dialogue(language, key, held_out=split != "train")
        yield {"dialogue": dialogue, "note": note}


def load_dialogues(
    *, num_train: int, num_held_out: int, language: Literal["en", "zh"] = "en", seed: int = 42
) -> "dict[str, Dataset]":
    """The splits "train", "validation" and "test", columns `dialogue` and `note`."""
    from datasets import Dataset

    sizes = {"train": num_train, "validation": num_held_out, "test": num_held_out}
    return {
        split: Dataset.from_list(list(generate_dialogues(size, split=split, language=language, seed=seed)))
        for split, size in sizes.items()
    }
