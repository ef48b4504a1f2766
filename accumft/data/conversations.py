"""What a causal language model is trained on, read and checked: conversations, prompts with completions, or texts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from accumft.data.draw import draw_rows, hold_out
from accumft.data.files import ROW_COLUMN, cells_of
from accumft.errors import UserError

if TYPE_CHECKING:
    import datasets

Kind = Literal["messages", "prompt_completion", "text"]
Message = dict[str, str]
"""{"role": …, "content": …}."""

DEFAULT_SPLIT = 0.1
_SPLITS = ("train", "validation", "test")
_MAXIMUM_ROWS_SHOWN = 10


class ConversationRecipe(Protocol):
    """The fields of a recipe that say what it is trained on. See TableRecipe for the others."""

    data_format: Kind | None
    messages_column: str
    prompt_column: str
    completion_column: str
    text_column: str
    train_file: str | None
    validation_file: str | None
    test_file: str | None
    dataset_name: str | None
    on_bad_row: Literal["error", "skip"]
    validation_split: float | None
    max_train_samples: int | None
    max_eval_samples: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Example:
    """One row. Either `messages` or `text` is there; a prompt with its completion is (prompt, completion)."""

    row: int
    """In its source, from 1."""
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    completion: str = ""
    text: str = ""

    @property
    def asked(self) -> str:
        """What rows must share to stay on one side of a split: all before the last answer; of a text, all of it."""
        if self.messages:
            return "\x1f".join(f"{m['role']}\x1e{m['content'].strip()}" for m in self.messages[:-1])
        return (self.text if self.prompt is None else self.prompt).strip()


@dataclass(frozen=True)
class ConversationData:
    """The examples of a run, by split: "train", and "validation" and "test" where there are such."""

    splits: dict[str, list[Example]]
    kind: Kind
    sources: dict[str, str]
    """How messages name each split's source."""
    notes: list[str] = field(default_factory=list)
    """Remarks of one line each, to be printed before training."""


def load_conversations(splits: Mapping[str, datasets.Dataset], recipe: ConversationRecipe) -> ConversationData:
    """The tables of a run (`accumft.data.splits.read_splits`) → its examples.

    Without validation data a share of the training rows is held out; rows that ask the same stay on one side.

    Raises:
        UserError: a column, a row or a field of the recipe that nothing can be trained on.
    """
    kind = _kind_of(splits["train"], _source(recipe, "train"), recipe)
    notes: list[str] = []
    sources = {name: _source(recipe, name) for name in splits}
    examples = {name: read_examples(table, sources[name], kind, recipe, notes) for name, table in splits.items()}
    if "validation" in examples and recipe.validation_split:
        raise UserError(
            f"--validation_split {recipe.validation_split}: there is validation data already; leave out one of them"
        )
    if "validation" not in examples and recipe.validation_split != 0:
        _hold_out(examples, sources, recipe, notes)
    for name, every in examples.items():
        size = recipe.max_train_samples if name == "train" else recipe.max_eval_samples
        drawn = draw_rows(len(every), size, recipe.seed, stream=_SPLITS.index(name) + 1)
        if len(drawn) < len(every):
            notes.append(f"{name}: {len(drawn)} of {len(every)} rows are drawn")
            examples[name] = [every[i] for i in drawn]
    known = {_digest(example) for example in examples["train"]}
    for name in ("validation", "test"):
        again = sum(_digest(example) in known for example in examples.get(name, ()))
        if again:
            notes.append(f"{sources[name]}: {again} of {len(examples[name])} rows ask what a training row asks")
    return ConversationData(examples, kind, sources, notes)


def read_examples(
    table: datasets.Dataset, source: str, kind: Kind, recipe: ConversationRecipe, notes: list[str]
) -> list[Example]:
    """The usable rows of a table; an unusable one is an error, or skipped with a note."""
    columns = _columns(kind, recipe)
    _check_columns(table, columns, source)
    n = len(table)
    rows: Sequence[int] = list(cells_of(table, ROW_COLUMN)) if ROW_COLUMN in table.column_names else range(1, n + 1)
    good: list[Example] = []
    bad: list[str] = []
    for row, *cells in zip(rows, *(cells_of(table, name) for name in columns.values()), strict=True):
        found = _example(row, kind, list(columns.values()), cells)
        if isinstance(found, Example):
            good.append(found)
        else:
            bad.append(f"row {row}: {found}")
    if bad:
        shown = "; ".join(bad[:3]) + (f"; … ({len(bad)} rows)" if len(bad) > 3 else "")
        if recipe.on_bad_row == "error":
            raise UserError(f"{source}, {shown}; correct them, or --on_bad_row skip")
        notes.append(f"{source}: {len(bad)} of {n} rows are skipped ({shown})")
    if not good:
        raise UserError(f"{source}: no row can be used ({'; '.join(bad[:1]) or 'it has none'})")
    return good


def check_messages(messages: Any) -> tuple[Message, ...] | str:
    """A cell as messages, or what is the matter with it."""
    if not isinstance(messages, list | tuple) or not messages:
        return "no messages" if messages is None or messages == [] else "the messages are no list of objects"
    checked = []
    for number, message in enumerate(messages, start=1):
        where = f"message {number}"
        if not isinstance(message, Mapping):
            return f"{where} is no object with role and content"
        # Arrow gives every object the keys of all of them.
        present = {name: value for name, value in message.items() if value is not None}
        if "from" in present and "value" in present:
            return f"{where} has from and value: rename them to role and content (user, assistant)"
        if others := sorted(set(present) - {"role", "content", "name"}):
            return f"{where} has {others[0]!r}: only role and content are trained on"
        role, content = present.get("role"), present.get("content")
        if not isinstance(role, str) or not role.strip():
            return f"{where} has no role"
        if not isinstance(content, str):
            return f"{where} has no text as its content"
        if role == "assistant" and not content.strip():
            return f"{where} is an empty answer"
        checked.append({"role": role, "content": content})
    if not any(message["role"] == "assistant" for message in checked):
        return "no message of the assistant to learn from"
    return tuple(checked)


def _example(row: int, kind: Kind, columns: list[str], cells: list[Any]) -> Example | str:
    if kind == "messages":
        messages = check_messages(cells[0])
        return messages if isinstance(messages, str) else Example(row, messages=messages)
    for name, cell in zip(columns, cells, strict=True):
        if not isinstance(cell, str):
            return f"no text in {name!r}" if cell is None else f"{name!r} holds {type(cell).__name__}, not a text"
    if not cells[-1].strip():
        return f"an empty text in {columns[-1]!r}"
    if kind == "text":
        return Example(row, text=cells[0])
    return Example(row, prompt=cells[0], completion=cells[1])


def _columns(kind: Kind, recipe: ConversationRecipe) -> dict[str, str]:
    """Flags and the columns that they name."""
    flags = {
        "messages": ("messages_column",),
        "prompt_completion": ("prompt_column", "completion_column"),
        "text": ("text_column",),
    }[kind]
    return {flag: getattr(recipe, flag) for flag in flags}


def _kind_of(table: datasets.Dataset, source: str, recipe: ConversationRecipe) -> Kind:
    if recipe.data_format is not None:
        return recipe.data_format
    kinds: tuple[Kind, ...] = ("messages", "prompt_completion", "text")
    found = [kind for kind in kinds if set(_columns(kind, recipe).values()) <= set(table.column_names)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(repr(name) for name in table.column_names if name != ROW_COLUMN)
    if found:
        raise UserError(f"{source}: could be read as {' or '.join(found)}: say which by --data_format")
    raise UserError(
        f"{source}: has neither --messages_column {recipe.messages_column}, nor --prompt_column {recipe.prompt_column} "
        f"with --completion_column {recipe.completion_column}, nor --text_column {recipe.text_column}; its columns: "
        f"{listed}"
    )


def _check_columns(table: datasets.Dataset, columns: Mapping[str, str], source: str) -> None:
    for flag, name in columns.items():
        if name not in table.column_names:
            listed = ", ".join(repr(column) for column in table.column_names if column != ROW_COLUMN)
            raise UserError(f"{source}: has no column {name!r} (--{flag}); its columns: {listed}")
    if not len(table):
        raise UserError(f"{source}: has columns but no rows")


def _hold_out(
    examples: dict[str, list[Example]], sources: dict[str, str], recipe: ConversationRecipe, notes: list[str]
) -> None:
    train = examples["train"]
    fraction = DEFAULT_SPLIT if recipe.validation_split is None else recipe.validation_split
    held_out = hold_out([_digest(example) for example in train], np.zeros(len(train), np.int64), fraction, recipe.seed)
    if not held_out.any():
        if recipe.validation_split is not None:
            raise UserError(
                f"--validation_split {fraction}: of the {len(train)} rows of {sources['train']} that is none"
            )
        notes.append(f"{sources['train']}: too few rows to hold some out, so there is no evaluation")
        return
    notes.append(f"{sources['train']}: {int(held_out.sum())} of {len(train)} rows are held out for validation")
    sources["validation"] = f"{sources['train']} (held out)"
    examples["validation"] = [example for example, out in zip(train, held_out, strict=True) if out]
    examples["train"] = [example for example, out in zip(train, held_out, strict=True) if not out]


def _digest(example: Example) -> bytes:
    return hashlib.blake2b(example.asked.encode(), digest_size=16).digest()


def _source(recipe: ConversationRecipe, split: str) -> str:
    """How messages name the source of a split: its file, or the folder or data set with the split."""
    file: str | None = getattr(recipe, f"{split}_file")
    whole = recipe.dataset_name or recipe.train_file
    return file or (f"{whole} ({split})" if whole else split)


def row_list(rows: Sequence[int]) -> str:
    """Ten row numbers at most, and how many there are."""
    shown = ", ".join(map(str, rows[:_MAXIMUM_ROWS_SHOWN]))
    more = f", … ({len(rows)} rows)" if len(rows) > _MAXIMUM_ROWS_SHOWN else ""
    return f"{'row' if len(rows) == 1 else 'rows'} {shown}{more}"
