"""Conversations, prompts with completions and texts → tokens and labels: the answers and their ends are learnt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from causal_cases import EXAMPLES, encoder, tiny_tokenizer
from causal_lm import CausalLmRecipe
from datasets import Dataset

from accumft.data.chat import IGNORED, ChatEncoder, _inside
from accumft.data.chat_table import encode_split
from accumft.data.conversations import Example, check_messages, load_conversations
from accumft.errors import UserError
from accumft.synthetic.questions import generate_questions, is_held_out
from accumft.tasks.causal_model import END, SCRATCH_TEMPLATE, build_tokenizer, read_template, word_counts
from accumft.tasks.causal_model import UNMARKED_TEMPLATE as UNMARKED

MARKED_WITHOUT_END = SCRATCH_TEMPLATE.replace(
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
)
WITHOUT_ENDS = UNMARKED.replace(" + '<|im_end|>'", "")
WITH_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}{% endif %}" + UNMARKED
)


def learnt(encode: ChatEncoder, example: Example) -> list[str]:
    """The stretches of tokens that are learnt, as texts."""
    found = encode(example, "file")
    stretches: list[list[int]] = []
    for place, label in enumerate(found.labels):
        if label != IGNORED:
            assert label == found.input_ids[place]
            if place == 0 or found.labels[place - 1] == IGNORED:
                stretches.append([])
            stretches[-1].append(label)
    return [encode.tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize(
    ("template", "has_masks"),
    [(SCRATCH_TEMPLATE, True), (UNMARKED, False), (MARKED_WITHOUT_END, True), (WITH_SYSTEM, False)],
    ids=["marked", "spans", "marked without the end", "spans after a default system prompt"],
)
def test_the_answers_and_their_ends_are_learnt(template: str, has_masks: bool) -> None:
    encode = encoder(template)
    assert encode.has_masks is has_masks
    for example in EXAMPLES:
        expected = [m["content"] + END for m in example.messages if m["role"] == "assistant"]
        assert learnt(encode, example) == expected
    assert encode.tokenizer.pad_token_id == encode.tokenizer.eos_token_id, "and still the end is learnt"


def test_marks_and_spans_make_the_same_labels() -> None:
    marked, found = encoder(SCRATCH_TEMPLATE), encoder(UNMARKED)
    assert [marked(example, "") for example in EXAMPLES] == [found(example, "") for example in EXAMPLES]


def test_a_template_without_ends_gets_one_after_the_last_answer() -> None:
    first, second = (learnt(encoder(WITHOUT_ENDS), example) for example in EXAMPLES)
    assert first == [EXAMPLES[0].messages[1]["content"] + f"\n{END}"]
    assert second[-1] == f" no\n{END}"


def test_prompts_are_what_generation_begins_with() -> None:
    for template in (SCRATCH_TEMPLATE, WITH_SYSTEM):
        encode = encoder(template)
        for example in EXAMPLES:
            prompt, whole = encode.prompt(example), encode(example, "")
            assert whole.input_ids[: len(prompt)] == prompt
            answer = [label for label in whole.labels[len(prompt) :] if label != IGNORED]
            assert encode.tokenizer.decode(answer) == example.messages[-1]["content"] + END


def test_prompt_and_completion_with_and_without_a_template() -> None:
    example = Example(1, prompt="Which department?", completion="Cardiology, ärztlich.")
    encode = encoder(SCRATCH_TEMPLATE)
    as_messages = Example(
        1, messages=({"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.completion})
    )
    assert encode(example, "") == encode(as_messages, "")
    plain = encoder(None)
    assert learnt(plain, example) == [f"Cardiology, ärztlich.{END}"]
    assert plain.tokenizer.decode(plain(example, "").input_ids) == f"Which department?\nCardiology, ärztlich.{END}"


def test_of_a_text_all_but_the_first_token_is_learnt() -> None:
    encode = encoder(None)
    found = encode(Example(1, text="fever and cough"), "")
    assert found.labels == [IGNORED, *found.input_ids[1:]]
    assert encode.tokenizer.decode(found.input_ids) == f"fever and cough{END}"


def test_a_byte_level_tokenizer_that_trims_its_offsets() -> None:
    """A token of white space alone has an empty offset; the line break before an answer must not be learnt."""
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = UNMARKED
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    encode = ChatEncoder(tokenizer)
    assert learnt(encode, EXAMPLES[0]) == learnt(encoder(UNMARKED), EXAMPLES[0])


def test_which_tokens_are_inside_a_span() -> None:
    """The second token is a line break before the span, the sixth a blank inside of it, the last one a break after."""
    offsets = [[0, 9], [10, 10], [10, 15], [15, 16], [16, 20], [21, 21], [21, 24], [25, 25]]
    assert _inside(np.array(offsets), [(10, 24)]).tolist() == [False, False, True, True, True, True, True, False]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (None, EXAMPLES[0].messages, "row 7: the tokenizer has no chat template"),
        (UNMARKED, ({"role": "assistant", "content": "Hello."},), "row 7, message 1: the chat template writes this"),
        (
            "{% for m in messages %}{{ m['content'] if loop.last else '' }}{% endfor %}",
            EXAMPLES[1].messages,
            "row 7, message 3: the chat template writes this answer in another way",
        ),
        ("{{ raise_exception('roles must alternate') }}", EXAMPLES[0].messages, "roles must alternate"),
        (
            SCRATCH_TEMPLATE,
            ({"role": "user", "content": "a <|im_end|> b"}, {"role": "assistant", "content": "c"}),
            "message 1: holds '<|im_end|>'",
        ),
    ],
    ids=["none", "begins with an answer", "rewrites", "refuses", "control token"],
)
def test_what_a_template_cannot_say_names_the_row(template: str | None, messages: Any, expected: str) -> None:
    with pytest.raises(UserError) as error:
        encoder(template)(Example(7, messages=messages), "notes.jsonl")
    assert str(error.value).startswith("notes.jsonl, row 7") and expected in str(error.value)


def test_truncation_is_counted_and_rows_without_targets_are_refused_or_skipped() -> None:
    encode, notes = encoder(None), []
    examples = [Example(i, prompt="w " * n, completion="yes no") for i, n in ((1, 3), (2, 30), (3, 8))]
    full = [len(encode(example, "").input_ids) for example in examples]
    with pytest.raises(UserError, match=r"^file: no token to be learnt within 20 tokens: row 2; raise --max_length"):
        encode_split(examples, encode, 20, "file", False, notes)
    table, kept, left_out = encode_split(examples, encode, 20, "file", True, notes)
    assert [example.row for example in kept] == table["row"][:] == [1, 3]
    assert max(table["length"]) <= 20
    assert (left_out.skipped, left_out.rows) == ([2], sum(n > 20 for n in full))
    assert left_out.tokens == sum(max(0, n - 20) for n in full)
    targets = [len([label for label in encode(example, "").labels if label != IGNORED]) for example in examples]
    assert full[1] - targets[1] > 20 and left_out.targets == targets[1], "all that the skipped row had"
    assert notes == ["file: no token to be learnt within 20 tokens: row 2; skipped"]


def recipe_of(**fields: Any) -> CausalLmRecipe:
    return CausalLmRecipe(train_file="train.jsonl", **fields)


def table_of(n: int = 20, **columns: Any) -> Dataset:
    return Dataset.from_dict(columns or {"prompt": [f"question {i}" for i in range(n)], "completion": ["yes"] * n})


def test_columns_decide_the_format() -> None:
    assert load_conversations({"train": table_of()}, recipe_of()).kind == "prompt_completion"
    assert load_conversations({"train": table_of(text=["a", "b"] * 9)}, recipe_of()).kind == "text"
    both = table_of(text=["a"], prompt=["b"], completion=["c"])
    with pytest.raises(UserError, match=r"read as prompt_completion or text: say which by --data_format"):
        load_conversations({"train": both}, recipe_of())
    assert load_conversations({"train": both}, recipe_of(data_format="text", validation_split=0.0)).kind == "text"
    with pytest.raises(UserError, match=r"has neither --messages_column messages, .*its columns: 'note'"):
        load_conversations({"train": table_of(note=["a"])}, recipe_of())


def test_rows_that_ask_the_same_stay_on_one_side() -> None:
    table = table_of(prompt=[f"question {i // 4}" for i in range(40)], completion=[f"answer {i}" for i in range(40)])
    data = load_conversations({"train": table}, recipe_of(validation_split=0.2))
    asked = {name: {example.prompt for example in examples} for name, examples in data.splits.items()}
    assert len(data.splits["validation"]) == 8 and not asked["train"] & asked["validation"]
    again = load_conversations({"train": table, "test": table_of(prompt=["question 3"], completion=["x"])}, recipe_of())
    assert "train.jsonl (test): 1 of 1 rows ask what a training row asks" in again.notes


def test_bad_rows_are_named_or_skipped() -> None:
    table = table_of(prompt=["a", "b", "c"], completion=["x", " ", None])
    with pytest.raises(
        UserError, match=r"^train.jsonl, row 2: an empty text in 'completion'; row 3: no text in 'compl"
    ):
        load_conversations({"train": table}, recipe_of())
    data = load_conversations({"train": table}, recipe_of(on_bad_row="skip", validation_split=0.0))
    assert [example.row for example in data.splits["train"]] == [1]
    assert data.notes[0].startswith("train.jsonl: 2 of 3 rows are skipped (row 2: an empty text")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "no messages"),
        ("hello", "the messages are no list of objects"),
        ([{"role": "user", "content": "a"}], "no message of the assistant to learn from"),
        ([{"from": "human", "value": "a"}], "rename them to role and content"),
        ([{"role": "user", "content": ["picture"]}], "message 1 has no text as its content"),
        ([{"role": "assistant", "content": " "}], "message 1 is an empty answer"),
        ([{"content": "a"}], "message 1 has no role"),
        ([{"role": "assistant", "content": "a", "tool_calls": []}], "message 1 has 'tool_calls'"),
    ],
)
def test_messages_that_cannot_be_used(messages: Any, expected: str) -> None:
    found = check_messages(messages)
    assert isinstance(found, str) and expected in found


def test_arrow_fills_in_keys_that_other_messages_have() -> None:
    found = check_messages([{"role": "assistant", "content": "a", "name": None, "tool_calls": None}])
    assert found == ({"role": "assistant", "content": "a"},)


def test_the_new_vocabulary_loses_nothing() -> None:
    texts = ["fever, fever and 38.5 °C", "发热 发热 cough\n\tcough", "🙂"]
    tokenizer = build_tokenizer(word_counts(texts))
    for text in [*texts, "unseen  wörds\r\n", ""]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("cough cough fever") == [*"cough", "Ġ", *"cough", "Ġ", *"fever"]
    words = build_tokenizer(word_counts([" cough cough fever", " fever"]))
    assert words.tokenize(" cough cough fever") == ["Ġcough", "Ġcough", "Ġfever"]


def test_held_out_pairs_are_in_no_training_question() -> None:
    train = [m for found in generate_questions(400) for m in found["messages"]]
    held = [m for found in generate_questions(100, held_out=True) for m in found["messages"]]
    assert {m["content"] for m in train if m["role"] == "user"}.isdisjoint(m["content"] for m in held)
    assert list(generate_questions(3, start=397)) == list(generate_questions(400))[397:]
    assert is_held_out("a", "b") == is_held_out("b", "a")
    share = sum(is_held_out(f"a{i}", f"b{i}") for i in range(2000)) / 2000
    assert 0.17 < share < 0.23
    answers = [m["content"] for m in held if m["role"] == "assistant"]
    commonest = max(answers.count(answer) for answer in set(answers))
    assert commonest / len(answers) < 0.15, "guessing the commonest answer is of no use"
    with pytest.raises(UserError, match="negative"):
        generate_questions(-1)


def test_a_chat_template_file(tmp_path: Path) -> None:
    (tmp_path / "good.jinja").write_text(UNMARKED)
    (tmp_path / "bad.jinja").write_text("{% for %}")
    assert read_template(str(tmp_path / "good.jinja")) == UNMARKED
    for name in ("bad.jinja", "absent.jinja"):
        with pytest.raises(UserError, match=rf"--chat_template .*{name}: not"):
            read_template(str(tmp_path / name))
