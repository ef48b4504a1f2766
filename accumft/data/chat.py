"""Examples → token ids and labels: the tokenizer's chat template, and the loss on the assistant's tokens only.

Labels are those of `transformers`: one a token, the token itself where it is to be learnt and -100 elsewhere. They are
made from where an answer stands, never from which token pads: an end-of-text token that is also the padding token is
learnt at the end of every answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accumft.data.conversations import Example, Message
from accumft.errors import UserError

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Encoded:
    """One example as tokens."""

    input_ids: list[int]
    labels: list[int]
    """One a token: the token, or -100; that of the first token, which nothing predicts, is always -100."""


class ChatEncoder:
    """Turns examples into tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        template = tokenizer.chat_template
        if isinstance(template, dict):
            if "default" not in template:
                raise UserError(f"the tokenizer has several chat templates ({', '.join(template)}) and no default one")
            tokenizer.chat_template = template = template["default"]
        self.template: str | None = template
        self.has_masks = template is not None and "{% generation" in template.replace("{%-", "{%")
        """Whether the template marks the assistant's words itself."""
        self.special = tuple(map(str, tokenizer.added_tokens_encoder))

    def __call__(self, example: Example, source: str) -> Encoded:
        """
        Args:
            source: for messages: the file.

        Raises:
            UserError: the template does not take the messages, or does not show where an answer stands.
        """
        where = f"{source}, row {example.row}"
        if self._is_chat(example):
            return self._conversation(_messages_of(example), where)
        if example.prompt is not None:
            start, rest = self.prompt(example), self._ids(example.completion, add_special_tokens=False)
            answer = [*rest, self._eos(where)]
            return _encoded([*start, *answer], np.arange(len(start) + len(answer)) >= len(start))
        ids = [*self._without_end(self._ids(example.text)), self._eos(where)]
        return _encoded(ids, np.ones(len(ids), bool))

    def prompt(self, example: Example, source: str = "the data") -> list[int]:
        """Tokens of all before the example's last answer, as generation begins with; of a text, its first half.

        Args:
            example: of which `has_prompt` holds.
        """
        if self._is_chat(example):
            messages = _messages_of(example)
            last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
            text = self._render(messages[:last], f"{source}, row {example.row}", add_generation_prompt=True)
            return self._ids(text, add_special_tokens=False)
        if example.prompt is not None:
            return self._without_end(self._ids(f"{example.prompt}\n"))
        ids = self._without_end(self._ids(example.text))
        return ids[: max(1, len(ids) // 2)]

    def _ids(self, text: str, **options: Any) -> list[int]:
        # Not verbose: it would warn of rows beyond the model's positions, which are cut before the model sees them.
        ids: list[int] = self.tokenizer(text, verbose=False, **options)["input_ids"]
        return ids

    def _is_chat(self, example: Example) -> bool:
        """Whether the template writes it."""
        return bool(example.messages) or (example.prompt is not None and self.template is not None)

    def _conversation(self, messages: Sequence[Message], where: str) -> Encoded:
        if self.template is None:
            raise UserError(
                f"{where}: the tokenizer has no chat template to write messages with; give an instruction model, or "
                "--chat_template FILE"
            )
        for number, message in enumerate(messages, start=1):
            if held := [token for token in self.special if token in message["content"]]:
                raise UserError(
                    f"{where}, message {number}: holds {held[0]!r}, a token of the template's own: remove it"
                )
        text = self._render(messages, where)
        spans = self._marked(messages, where) if self.has_masks else self._found(messages, text, where)
        # The token that ends a turn belongs to the answer, also where the template's marks leave it out.
        spans = [(start, stop + self._length_of_special(text[stop:])) for start, stop in spans]
        start, stop = spans[-1]
        if messages[-1]["role"] == "assistant" and not text[start:stop].endswith(self.special):
            # A template that ends no turn would never teach the model to stop.
            stop += len(self.tokenizer.eos_token or "")
            text, spans[-1] = text[: spans[-1][1]] + (self.tokenizer.eos_token or ""), (start, stop)
        try:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        except NotImplementedError as error:
            raise UserError(
                f"{where}: {type(self.tokenizer).__name__} does not say where its tokens stand: give a model folder "
                "with a tokenizer.json"
            ) from error
        return _encoded(encoded["input_ids"], _inside(np.array(encoded["offset_mapping"]), spans))

    def _length_of_special(self, text: str) -> int:
        """Characters of the special token that the text begins with; 0: it begins with none."""
        return max((len(token) for token in self.special if text.startswith(token)), default=0)

    def _marked(self, messages: Sequence[Message], where: str) -> list[tuple[int, int]]:
        """The spans that the template marks by {% generation %}, in characters."""
        from transformers.utils.chat_template_utils import render_jinja_template

        _, indices = render_jinja_template(
            conversations=[list(messages)],
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        if not indices[0]:
            raise UserError(f"{where}: the chat template's {{% generation %}} marks nothing in these messages")
        return [(int(start), int(stop)) for start, stop in indices[0]]

    def _found(self, messages: Sequence[Message], text: str, where: str) -> list[tuple[int, int]]:
        """Where the answers stand in the rendered text: what each adds to the prompt that generation begins with."""
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:i], where, add_generation_prompt=True) if i else None
            after = self._render(messages[: i + 1], where)
            if before is None or not after.startswith(before) or not text.startswith(after):
                raise UserError(
                    f"{where}, message {i + 1}: the chat template writes this answer in another way than generation "
                    "begins it, so that its tokens cannot be told apart; give a template with {% generation %} around "
                    "the assistant's words (--chat_template FILE)"
                )
            answer = text[len(before) : len(after)]
            # The white space after the end of a turn belongs to the template.
            if answer.rstrip().endswith(self.special):
                answer = answer.rstrip()
            spans.append((len(before), len(before) + len(answer)))
        return spans

    def _render(self, messages: Sequence[Message], where: str, add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            rendered: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise UserError(f"{where}: the chat template does not take these messages ({error})") from error
        return rendered

    def _eos(self, where: str) -> int:
        if self.tokenizer.eos_token_id is None:
            raise UserError(
                f"{where}: the tokenizer has no end-of-text token to end a text with; add one to its folder"
            )
        return int(self.tokenizer.eos_token_id)

    def _without_end(self, ids: list[int]) -> list[int]:
        """Without the end-of-text token that some tokenizers put at the end of every text."""
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids


def has_prompt(example: Example) -> bool:
    """Whether anything stands before the last answer; nothing can be generated where a conversation begins with it."""
    return not example.messages or any(message["role"] == "assistant" for message in example.messages[1:])


def _messages_of(example: Example) -> tuple[Message, ...]:
    if example.messages:
        return example.messages
    assert example.prompt is not None
    return ({"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.completion})


def _inside(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """(tokens,) bool: whether a token begins inside a span.

    Args:
        offsets: (tokens, 2) characters. Byte-level tokenizers trim white space off them, so that a token of nothing
            else has an empty one at its end: that of the line break before a span must not count as its first.
    """
    start, stop = offsets.reshape(-1, 2).T
    inside = np.zeros(len(start), bool)
    for begin, end in spans:
        inside |= np.where(start < stop, (begin <= start) & (start < end), (begin < start) & (start <= end))
    return inside


def _encoded(ids: Sequence[int], learnt: np.ndarray) -> Encoded:
    labels = np.where(learnt, np.array(ids, np.int64), IGNORED)
    labels[:1] = IGNORED
    return Encoded(list(ids), labels.tolist())
