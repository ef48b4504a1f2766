"""Greedy answers of a causal language model to the prompts of some rows, the same on any number of processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from accumft.adapters import base_of
from accumft.data.chat import IGNORED, ChatEncoder, has_prompt
from accumft.data.conversations import ConversationData, Example, row_list
from accumft.errors import UserError
from accumft.evaluation import fitting

GENERATED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model says to a row's prompt, beside what the row has."""

    row: int
    prompt: str
    expected: str
    generated: str

    @property
    def is_exact(self) -> bool:
        """Whether they are the same but for white space."""
        return self.generated.split() == self.expected.split()


def prompt_length(max_length: int, limit: int | None, recipe: Any) -> int:
    """Tokens of a prompt, at most, so that it and its answer stay within the model's positions.

    Args:
        limit: the model's positions; None: none is known.
        recipe: its `num_generations` and `max_new_tokens`.

    Raises:
        UserError: an answer may take all positions.
    """
    if limit is None or not recipe.num_generations:
        return max_length
    if recipe.max_new_tokens >= limit:
        raise UserError(
            f"--max_new_tokens {recipe.max_new_tokens}: the model has {limit} positions for a prompt and its answer; "
            "lower it, or --num_generations 0"
        )
    return min(max_length, limit - recipe.max_new_tokens)


def rows_to_generate(data: ConversationData, encode: ChatEncoder, number: int) -> list[Example]:
    """The first `number` test rows, or else validation rows, with anything before their last answer.

    What has nothing there is left out, and said in the data's notes. The prompts are written here once, so that a chat
    template which does not take them is an error before training and not after it.
    """
    split = "test" if "test" in data.splits else "validation"
    taken: list[Example] = []
    without: list[int] = []
    for example in data.splits.get(split, ()):
        if len(taken) == number:
            break
        if has_prompt(example):
            encode.prompt(example, data.sources[split])
            taken.append(example)
        else:
            without.append(example.row)
    if without:
        data.notes.append(
            f"{data.sources[split]}: nothing stands before the last answer of {row_list(without)}, so it is not "
            "generated; loss and perplexity are of all rows"
        )
    return taken


@torch.no_grad()
def generate(
    accelerator: Accelerator,
    model: Any,
    encode: ChatEncoder,
    examples: Sequence[Example],
    max_new_tokens: int,
    max_length: int,
) -> list[Answer]:
    """Greedy answers to the examples' prompts, in their order, on every process.

    Each batch is made of the same rows on any number of processes.

    Args:
        max_length: tokens of a prompt, of which the last are taken.
    """
    causal, tokenizer = base_of(accelerator.unwrap_model(model)), encode.tokenizer
    causal.eval()
    whole = [encode.prompt(example) for example in examples]
    prompts = [prompt[-max_length:] for prompt in whole]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [order[i : i + GENERATED_AT_ONCE] for i in range(0, len(order), GENERATED_AT_ONCE)]
    greedy = _greedy(tokenizer, _stops(encode, examples, causal), max_new_tokens)
    found: list[tuple[int, list[int]]] = []
    for batch in batches[accelerator.process_index :: accelerator.num_processes]:
        width = max(len(prompts[i]) for i in batch)
        ids = torch.full((len(batch), width), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for number, i in enumerate(batch):
            ids[number, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[number, width - len(prompts[i]) :] = 1
        prompts_of_batch = {"input_ids": ids.to(accelerator.device), "attention_mask": mask.to(accelerator.device)}
        with accelerator.autocast():
            parts = fitting(
                lambda part: causal.generate(**part, generation_config=greedy)[:, part["input_ids"].shape[1] :],
                prompts_of_batch,
            )
        answers = [answer.tolist() for part in parts for answer in part]
        found += list(zip(batch, answers, strict=True))
    every = dict(gather_object(found) if accelerator.num_processes > 1 else found)
    return [_answer(example, tokenizer, whole[i], every[i], encode) for i, example in enumerate(examples)]


def _greedy(tokenizer: Any, stop: list[int], max_new_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )


def _stops(encode: ChatEncoder, examples: Sequence[Example], causal: Any) -> list[int]:
    """Tokens that end an answer: the end-of-text token, the model's own, and what the examples' answers end with."""
    own = getattr(getattr(causal, "generation_config", None), "eos_token_id", None)
    stops = {encode.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    special = set(encode.tokenizer.added_tokens_decoder)
    for example in examples[:1]:
        last = [label for label in encode(example, "").labels if label != IGNORED][-1:]
        stops.update(token for token in last if token in special)
    return sorted(token for token in stops if token is not None)


def _answer(example: Example, tokenizer: Any, prompt: list[int], tokens: list[int], encode: ChatEncoder) -> Answer:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if example.messages:
        last = max(i for i, message in enumerate(example.messages) if message["role"] == "assistant")
        asked = "\n".join(message["content"] for message in example.messages[:last])
        return Answer(example.row, asked, example.messages[last]["content"], text)
    if example.prompt is not None:
        return Answer(example.row, example.prompt, example.completion, text)
    rest = [label for label in encode(example, "").input_ids[len(prompt) :]]
    return Answer(
        example.row,
        tokenizer.decode(prompt, skip_special_tokens=True),
        tokenizer.decode(rest, skip_special_tokens=True),
        text,
    )
