"""Synthetic pairs of clinical questions: as a patient asks and as a textbook heads it, with a hard negative.

Each pair is of one intent (what it is, how it is treated, what it may do to a pregnancy, …) about one entity, a disease
or a drug. The hard negative is another intent about the same entity, and it keeps the patient's words where it can: the
words alone do not tell which question is the same. The entities of the three splits are different ones.
"""

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from accumft.errors import UserError
from accumft.synthetic.english import ENGLISH
from accumft.synthetic.lexicon import phrases

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")

# kind → intent → (as it is asked, as it is headed)
INTENTS: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "disease": {
        "cause": (
            phrases("""what brings {x} on?; why did I get {x} of all people?; where does {x} come from?; is there
                something I did that gave me {x}?; how come some people end up with {x}?"""),
            phrases("aetiology of {x}; origins and risk factors of {x}; pathogenesis of {x}"),
        ),
        "treatment": (
            phrases("""what can be done about {x}?; how do I get rid of {x}?; what would you give somebody with {x}?;
                is there a cure for {x}?; which medicine helps when you have {x}?"""),
            phrases("management of {x}; therapeutic options in {x}; first-line therapy for {x}"),
        ),
        "prognosis": (
            phrases("""how long will I live with {x}?; will {x} ever go away?; what should my family expect now that I
                have {x}?; does {x} get worse with the years?; how bad can {x} get?"""),
            phrases("prognosis of {x}; natural course and outcome of {x}; long-term outlook in {x}"),
        ),
        "diagnosis": (
            phrases("""how do you find out that it is {x}?; which checks show {x}?; can you be sure that I have {x}?;
                what would tell {x} from something harmless?; do I need a scan for {x}?"""),
            phrases("diagnostic work-up of suspected {x}; investigations to confirm {x}; criteria for identifying {x}"),
        ),
        "prevention": (
            phrases("""how can I keep from getting {x}?; what should my children do so as not to get {x}?; is there a
                way to stay clear of {x}?; how do I stop {x} from coming back?; does living healthily keep {x} away?"""),
            phrases("prevention of {x}; prophylactic measures against {x}; reducing the incidence of {x}"),
        ),
        "inheritance": (
            phrases("""will my children get {x} from me?; does {x} run in families?; my mother had {x}, am I next?; is
                {x} in the genes?; should my brother be looked at because I have {x}?"""),
            phrases("heritability of {x}; genetic predisposition to {x}; familial risk of {x}"),
        ),
    },
    "drug": {
        "side_effects": (
            phrases("""what nasty things can {x} do to me?; is it {x} that makes me feel unwell?; what should I watch
                out for on {x}?; can {x} make me ill?; how badly do people take {x}?"""),
            phrases("adverse reactions to {x}; undesirable effects of {x}; tolerability of {x}"),
        ),
        "pregnancy": (
            phrases("""can I have {x} while I am expecting?; is {x} all right for my unborn baby?; we want a child, may
                I stay on {x}?; could {x} hurt a baby at the breast?; I am in my third month, is {x} safe?"""),
            phrases("use of {x} in gestation and lactation; teratogenicity of {x}; foetal exposure to {x}"),
        ),
        "purpose": (
            phrases("""what is {x} good for?; why did the doctor put me on {x}?; who is given {x}?; what does {x} do for
                me?; for what complaint does one get {x}?"""),
            phrases("indications for {x}; approved uses of {x}; conditions in which {x} is recommended"),
        ),
        "mechanism": (
            phrases("""how does {x} work in the body?; what does {x} do once it is inside me?; in what way does {x}
                help?; what happens in my cells with {x}?; why does {x} have any effect at all?"""),
            phrases("mechanism of action of {x}; pharmacodynamics of {x}; molecular target of {x}"),
        ),
        "stopping": (
            phrases("""may I just leave {x} off?; what happens if I quit {x} from one day to the next?; how do I come
                off {x}?; I feel fine, do I still need {x}?; for how many months must I stay on {x}?"""),
            phrases("discontinuation of {x}; withdrawal and duration of {x}; tapering of {x}"),
        ),
        "interactions": (
            phrases("""does {x} go together with my other pills?; may I drink wine with {x}?; what must I not mix with
                {x}?; is grapefruit a problem with {x}?; I take ten medicines, does {x} fit in?"""),
            phrases("interactions of {x}; concomitant use of {x} with other agents; substances incompatible with {x}"),
        ),
    },
}
_OPENINGS = phrases("""Doctor, ; Hello, ; A question: ; I would like to know: ; Please tell me, ; My husband asks: ;
    Since last week I wonder: ; Sorry to bother you, but ; Quick one: """)
_SHARES = {"validation": (0.0, 0.2), "test": (0.2, 0.4), "train": (0.4, 1.0)}


def generate_pairs(num_pairs: int, *, split: str = "train", seed: int = 42) -> Iterator[dict[str, str]]:
    """Writes pairs as {"anchor": …, "positive": …, "negative": …}: pair i is a pure function of (seed, split, i).

    Each entity is asked about with each intent once before any comes again, asked in other words.

    Args:
        split: "train", "validation" or "test": their entities are different ones.

    Raises:
        UserError: there is no such split, or the number is negative.
    """
    if split not in _SHARES or num_pairs < 0:
        raise UserError(f"split={split!r}, num_pairs={num_pairs}: train, validation or test, and not negative")
    return _pairs(num_pairs, split, f"accumft synthetic pairs {seed}")


def _pairs(num_pairs: int, split: str, key: str) -> Iterator[dict[str, str]]:
    questions = [(kind, x, intent) for kind, x in entities(split, key) for intent in INTENTS[kind]]
    questions = _shuffled(questions, f"{key} {split} questions")
    for index in range(num_pairs):
        kind, x, intent = questions[index % len(questions)]
        draw = random.Random(f"{key} {split} {index}").random
        other = _pick([name for name in INTENTS[kind] if name != intent], draw())
        anchor = _pick(INTENTS[kind][intent][0], draw()).format(x=x)
        if draw() < 0.5:
            anchor = f"{_pick(_OPENINGS, draw())} {anchor}"
        yield {
            "anchor": anchor,
            "positive": _heading(kind, x, intent, key),
            "negative": _heading(kind, x, other, key),
        }


def _heading(kind: str, x: str, intent: str, key: str) -> str:
    """One for each intent of an entity: another one would be as right an answer, and count as a wrong one."""
    return _pick(INTENTS[kind][intent][1], random.Random(f"{key} {x} {intent}").random()).format(x=x)


def entities(split: str, key: str = "accumft synthetic pairs 42") -> list[tuple[str, str]]:
    """The diseases and drugs of a split: (kind, phrase)."""
    every = [
        (kind, phrase)
        for kind in INTENTS
        for phrase in dict.fromkeys(p for d in ENGLISH.departments for p in d.words(kind))
    ]
    every = _shuffled(every, f"{key} entities")
    low, high = _SHARES[split]
    return every[round(low * len(every)) : round(high * len(every))]


def load_synthetic_pairs(num_train: int, num_held_out: int, seed: int = 42) -> "dict[str, Dataset]":
    """The splits "train", "validation" and "test", columns anchor, positive and negative, in memory."""
    import datasets

    sizes = {"train": num_train, "validation": num_held_out, "test": num_held_out}
    return {
        split: datasets.Dataset.from_list(list(generate_pairs(size, split=split, seed=seed)))
        for split, size in sizes.items()
    }


def _pick(options: Sequence[T], draw: float) -> T:
    return options[int(draw * len(options))]


def _shuffled(options: Sequence[Any], key: str) -> list[Any]:
    draw = random.Random(key).random  # its sequence is promised from version to version; that of `shuffle` is not
    return [option for _, option in sorted((draw(), option) for option in options)]
