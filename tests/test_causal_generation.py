"""Answers at the end of a run: prompts within the model's positions, rows without one, and what is said of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from causal_cases import EXAMPLES, encoder, model_of, tiny_tokenizer
from causal_lm import CausalLmRecipe, run

from accumft.data.chat import has_prompt
from accumft.data.conversations import ConversationData, Example
from accumft.errors import UserError
from accumft.launch import make_accelerator
from accumft.tasks.causal_generation import Answer, generate, prompt_length, rows_to_generate
from accumft.tasks.causal_model import build_small_llama
from accumft.tasks.causal_report import scores_table

GREETING = {"role": "assistant", "content": "Pulmonology sees fever."}


def rows_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def recipe_of(number: int, new: int) -> Any:
    return SimpleNamespace(num_generations=number, max_new_tokens=new)


def test_a_prompt_and_its_answer_stay_within_the_positions() -> None:
    assert prompt_length(64, 64, recipe_of(8, 10)) == 54
    assert prompt_length(30, 64, recipe_of(8, 10)) == 30, "there is room"
    assert prompt_length(64, None, recipe_of(8, 1000)) == 64, "no limit is known"
    assert prompt_length(64, 64, recipe_of(0, 64)) == 64, "nothing is generated"
    with pytest.raises(UserError) as error:
        prompt_length(64, 64, recipe_of(8, 64))
    assert str(error.value) == (
        "--max_new_tokens 64: the model has 64 positions for a prompt and its answer; lower it, or --num_generations 0"
    )


@pytest.fixture
def gpt2(tmp_path: Path) -> str:
    """The folder of a GPT-2 of 40 learned positions."""
    model = transformers.GPT2Config(vocab_size=len(tiny_tokenizer()), n_positions=40, n_embd=16, n_layer=1, n_head=2)
    model.bos_token_id = model.eos_token_id = tiny_tokenizer().eos_token_id
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(model).save_pretrained(tmp_path / "gpt2")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.model_max_length = None, 40
    tokenizer.save_pretrained(tmp_path / "gpt2")
    return str(tmp_path / "gpt2")


def gpt2_run(gpt2: str, folder: Path, new: int) -> Any:
    # The longest prompt and its answer take 39 of the 40 positions.
    rows = [{"prompt": f"{i}" + "x" * (34 if i % 3 == 0 else 5), "completion": "yes"[: 1 + i % 2]} for i in range(10)]
    file = rows_file(folder / "rows.jsonl", rows)
    fields: dict[str, Any] = {"train_file": file, "test_file": file, "model_name_or_path": gpt2, "learning_rate": 1e-3}
    fields |= {"output_dir": str(folder / "run"), "num_generations": 4, "max_new_tokens": new, "max_steps": 1}
    return run(CausalLmRecipe(**fields))


def test_learned_positions_are_enough_after_training(gpt2: str, tmp_path: Path) -> None:
    assert gpt2_run(gpt2, tmp_path, new=20).metrics["generations"] == 4


def test_an_answer_longer_than_the_positions_is_refused_before_training(gpt2: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--max_new_tokens 40: the model has 40 positions"):
        gpt2_run(gpt2, tmp_path, new=40)
    assert not (tmp_path / "run").exists()


def test_the_end_of_a_prompt_is_kept_and_what_is_expected_of_a_text_is_its_second_half() -> None:
    encode = encoder(None)
    model = build_small_llama(encode.tokenizer)
    text = "fever and cough, " * 4
    ids = encode(Example(1, text=text), "").input_ids
    half = (len(ids) - 1) // 2
    assert half > 4, "it is cut"
    (answer,) = generate(make_accelerator(), model, encode, [Example(1, text=text)], 3, 4)
    assert answer.prompt + answer.expected == text
    assert answer.expected == encode.tokenizer.decode(ids[half:-1])
    prompt = torch.tensor([ids[half - 4 : half]])
    end = encode.tokenizer.eos_token_id
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=3, eos_token_id=end, pad_token_id=end)
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    assert answer.generated == encode.tokenizer.decode(found[0, 4:], skip_special_tokens=True)


def test_rows_that_begin_with_the_only_answer_are_not_generated() -> None:
    asked = EXAMPLES[0].messages
    examples = [
        Example(1, messages=(GREETING,)),
        Example(2, messages=asked),
        Example(3, messages=(GREETING, {"role": "user", "content": "fever?"})),
        Example(4, messages=(GREETING, *asked)),
        Example(5, messages=asked),
        Example(6, messages=(GREETING,)),
    ]
    assert [has_prompt(example) for example in examples] == [False, True, False, True, True, False]
    assert has_prompt(Example(7, prompt="", completion="a")) and has_prompt(Example(8, text="a"))
    data = ConversationData({"train": [], "validation": examples}, "messages", {"validation": "rows.jsonl"})
    assert [example.row for example in rows_to_generate(data, encoder(), 2)] == [2, 4]
    assert data.notes == [
        "rows.jsonl: nothing stands before the last answer of rows 1, 3, so it is not generated; loss and perplexity "
        "are of all rows"
    ]
    data.notes.clear()
    assert rows_to_generate(data, encoder(), 0) == [] and data.notes == []


def test_a_template_that_does_not_take_a_prompt_is_an_error_before_training() -> None:
    encode = encoder("{% if messages[-1]['role'] != 'assistant' %}{{ raise_exception('no answer') }}{% endif %}")
    data = ConversationData({"test": EXAMPLES[:1]}, "messages", {"test": "rows.jsonl"})
    with pytest.raises(UserError) as error:
        rows_to_generate(data, encode, 1)
    assert str(error.value) == "rows.jsonl, row 1: the chat template does not take these messages (no answer)"


@pytest.mark.parametrize("all_of_them", [True, False])
def test_a_run_with_rows_that_begin_with_an_answer(
    all_of_them: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [{"role": "user", "content": "Which department?"}, GREETING]
    rows = [{"messages": [GREETING] if all_of_them or i < 2 else asked} for i in range(12)]
    file = rows_file(tmp_path / "rows.jsonl", rows)
    fields: dict[str, Any] = {"num_generations": 3, "max_new_tokens": 4, "max_steps": 1}
    result = run(CausalLmRecipe(train_file=file, test_file=file, output_dir=str(tmp_path / "run"), **fields))
    printed = capsys.readouterr().out
    assert (
        "note: rows.jsonl" not in printed and "rows.jsonl: nothing stands before the last answer of rows 1" in printed
    )
    assert result.metrics.get("generations") == (None if all_of_them else 3)
    assert result.metrics["test_perplexity"] > 1
    lines = printed.splitlines()
    table = lines[lines.index("test (12 rows)") + 1 :]
    assert table[0].split() == ["perplexity", f"{result.metrics['test_perplexity']:.4f}"]
    assert table[1].split() == ["loss", f"{result.metrics['test_loss']:.4f}"]
    note = "note: its README.md shows prompts and expected answers of the data, word by word (3 rows of test): look at "
    note += "it before you share it, or --num_generations 0"
    assert (lines[-1] == note) is not all_of_them
    assert ("exact match of 3 generated rows" in printed) is not all_of_them


def test_scores_stand_beside_those_before_training() -> None:
    answers = [Answer(1, "a", "b", "b"), Answer(2, "a", "b", "c")]
    found = scores_table({"loss": 0.5, "perplexity": 1.64872}, {"loss": 2.0, "perplexity": 7.389056}, answers)
    assert found.splitlines() == [
        "perplexity                       1.6487",
        "perplexity before training       7.3891",
        "loss                             0.5000",
        "loss before training             2.0000",
        "exact match of 2 generated rows  0.5000",
    ]
    assert scores_table({"loss": 0.5}, {}, answers[:1]).splitlines()[1] == "exact match of 1 generated row  1.0000"
    assert scores_table({"loss": 0.5}, {}, []) == "loss  0.5000"


@pytest.mark.parametrize("kind", ["messages", "prompt_completion", "text"])
def test_rows_that_are_cut_raise_no_warning_of_their_length(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    encode = encoder(None if kind == "prompt_completion" else encoder().template)
    encode.tokenizer.model_max_length = 12
    long = "fever and cough " * 4
    example = {
        "messages": EXAMPLES[0],
        "prompt_completion": Example(1, prompt="fever?", completion=long),
        "text": Example(1, text=long),
    }[kind]
    lengths = [len(encode(example, "file").input_ids), len(encode.prompt(example))]
    assert max(lengths) > 12
    assert [record.message for record in caplog.records] == []


def test_positions_of_a_model_whose_prompts_are_short_change_nothing() -> None:
    encode = encoder()
    model = model_of("GPT2", vocab_size=len(encode.tokenizer), n_positions=200)
    cut = prompt_length(200, 200, recipe_of(2, 4))
    whole, found = (generate(make_accelerator(), model, encode, EXAMPLES, 4, length) for length in (200, cut))
    assert cut == 196 and found == whole
