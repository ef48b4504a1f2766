"""The recipe from end to end: what it leaves, that cut and processes do not matter, resumes, and how mistakes end."""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lm import CausalLmRecipe, load_data, plan, run
from launching import ROOT, launch
from safetensors.torch import load_file
from small import rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from accumft.cli import main
from accumft.errors import UserError
from accumft.tasks.causal_model import UNMARKED_TEMPLATE, build_small_llama, build_tokenizer, texts_of, word_counts

RECIPE = ROOT / "recipes" / "causal_lm.py"


def small(output_dir: Path, **fields: Any) -> CausalLmRecipe:
    """32 conversations, 4 steps of 8 an epoch, 8 validation rows; no answers, no tests of speed."""
    defaults: dict[str, Any] = {"synthetic_size": 32, "num_generations": 0, "num_train_epochs": 1.0}
    defaults["effective_batch_size"] = 8
    if fields.get("train_file") or fields.get("model_name_or_path"):
        defaults["learning_rate"] = 1e-3
    if fields.get("train_file"):
        del defaults["synthetic_size"]
    return CausalLmRecipe(output_dir=str(output_dir), **{**defaults, **fields})


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows_of(folder)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run on one process, with a few answers."""
    folder = tmp_path_factory.mktemp("causal") / "run"
    run(small(folder, num_generations=4, max_new_tokens=6, num_train_epochs=2.0, save_steps=3, eval_steps=4))
    return folder


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder whose chat template has no marks."""
    folder = tmp_path_factory.mktemp("pretrained")
    data, _ = load_data(CausalLmRecipe(synthetic_size=32))
    tokenizer = build_tokenizer(word_counts(texts_of(data.splits["train"])))
    tokenizer.chat_template = UNMARKED_TEMPLATE
    torch.manual_seed(0)
    build_small_llama(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_what_a_run_leaves(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "README.md"} <= names
    results = json.loads((finished / "all_results.json").read_text())
    assert results["eval_perplexity"] == pytest.approx(2.718281828 ** results["eval_loss"], rel=1e-6)
    assert results["before_loss"] > results["eval_loss"] > 0
    assert results["generations"] == 4 and 0 <= results["test_exact_match"] <= 1
    rows = rows_of(finished)
    assert [row["examples"] for row in rows] == [8] * 8
    assert all(row["padded_tokens"] >= row["tokens"] > row["items"] > 0 for row in rows)
    card = (finished / "README.md").read_text()
    assert "### Generated" in card and "Perplexity per target token" in card and "pipeline_tag: text-generation" in card
    assert "accumft_packed" not in (finished / "config.json").read_text()


def test_the_model_is_loaded_by_transformers(finished: Path) -> None:
    model, tokenizer = (kind.from_pretrained(finished) for kind in (AutoModelForCausalLM, AutoTokenizer))
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    answer = generator([{"role": "user", "content": "Whose patient is it?"}], max_new_tokens=4, do_sample=False)
    assert answer[0]["generated_text"][-1]["role"] == "assistant"


@pytest.mark.parametrize(
    "fields",
    [
        {"per_device_train_batch_size": 3},
        {"max_tokens_per_micro_batch": 100, "padding_free": False},
        {"logits_chunk_size": 7, "pad_to_multiple_of": 8},
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_cut_and_computation_do_not_matter(finished: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    run(small(tmp_path / "run", num_train_epochs=2.0, eval_steps=8, eval_on_start=False, **fields))
    assert losses(tmp_path / "run") == pytest.approx(losses(finished), rel=1e-5)


def test_two_processes_log_the_same_losses(finished: Path, tmp_path: Path) -> None:
    arguments = "--effective_batch_size 8 --synthetic_size 32 --num_generations 4 --max_new_tokens 6"
    arguments += " --num_train_epochs 2 --eval_steps 4"
    result = launch(RECIPE, *arguments.split(), "--output_dir", str(tmp_path / "run"), timeout=240)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(finished), rel=1e-5)
    one, two = (json.loads((folder / "all_results.json").read_text()) for folder in (finished, tmp_path / "run"))
    for name in ("eval_loss", "test_loss", "before_loss", "test_exact_match"):
        assert two[name] == pytest.approx(one[name], rel=1e-4)


def resumed(folder: Path, **fields: Any) -> None:
    """A run that stops after its third step, and is then gone on with."""
    import causal_lm

    train_step, made = causal_lm.train_step, 0

    def stopping(*args: Any) -> Any:
        nonlocal made
        made += 1
        if made == 4:
            raise KeyboardInterrupt
        return train_step(*args)

    causal_lm.train_step = stopping
    try:
        with pytest.raises(KeyboardInterrupt):
            run(small(folder, **fields))
    finally:
        causal_lm.train_step = train_step
    assert len(rows_of(folder)) == 3
    run(small(folder, resume_from_checkpoint="true", **fields))


def test_a_resumed_run_is_the_undisturbed_one_to_the_last_bit(finished: Path, tmp_path: Path) -> None:
    resumed(tmp_path / "run", num_generations=4, max_new_tokens=6, num_train_epochs=2.0, save_steps=3, eval_steps=4)
    one, other = (load_file(folder / "model.safetensors") for folder in (finished, tmp_path / "run"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert losses(tmp_path / "run") == losses(finished) and len(losses(finished)) == 8


def test_an_adapter_from_end_to_end(pretrained: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"model_name_or_path": pretrained, "use_peft": True, "lora_r": 4, "num_train_epochs": 2.0}
    fields |= {"save_steps": 3, "eval_steps": 4, "merge_adapter": True, "lora_dropout": 0.1, "learning_rate": 1e-2}
    fields["use_dora"] = True
    run(small(tmp_path / "whole", **fields))
    resumed(tmp_path / "resumed", **fields)
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "resumed"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert losses(tmp_path / "whole") == losses(tmp_path / "resumed")
    results = json.loads((tmp_path / "whole" / "all_results.json").read_text())
    assert results["eval_loss"] < results["before_loss"]
    checkpoints = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    assert [path.name for path in checkpoints][-2:] == ["step-00000006", "step-00000008"]
    for folder in (*checkpoints, tmp_path / "whole"):
        assert (folder / "adapter_model.safetensors").exists() and not (folder / "model.safetensors").exists()
    # The adapter on its base, and the merged model, say the same.
    ids = torch.arange(4, 20)[None]
    card = (tmp_path / "whole" / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0].replace(
        "path/to/this/folder", str(tmp_path / "whole")
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing", category=FutureWarning)
        said: dict[str, Any] = {}
        exec(code, said)
    adapted = said["model"].eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "merged").eval()
    base = AutoModelForCausalLM.from_pretrained(pretrained).eval()
    assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-4)
    assert (base(ids).logits - merged(ids).logits).abs().max() > 1e-2
    assert "library_name: peft" in card


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", ["messages", "prompt_completion", "text"])
def test_files_of_every_format(kind: str, pretrained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = []
    for i in range(20):
        question, answer = f"Which department sees case {i}?", "Cardiology, by a sign and a symptom." * (1 + i % 3)
        if kind == "messages":
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            rows.append({"messages": messages})
        elif kind == "prompt_completion":
            rows.append({"prompt": question, "completion": answer})
        else:
            rows.append({"text": f"{question} {answer}"})
    file = write_rows(tmp_path / "rows.jsonl", rows)
    fields = {"max_steps": 2, "max_length": 60, "num_generations": 2, "max_new_tokens": 3}
    result = run(small(tmp_path / "run", train_file=file, model_name_or_path=pretrained, **fields))
    assert result.metrics["eval_loss"] > 0 and result.metrics["generations"] == 2
    printed = capsys.readouterr().out
    assert f"train: 18 rows of {kind}" in printed and "rows truncated at 60, which loses" in printed


def test_without_validation_data_the_last_model_is_saved(pretrained: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"case {i}?", "completion": "yes"} for i in range(16)])
    result = run(small(tmp_path / "run", train_file=file, validation_split=0.0, max_steps=2))
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert not any(name.startswith(("eval_", "before_")) for name in result.metrics)


def test_a_dry_run_plans(tmp_path: Path) -> None:
    planned = plan(small(tmp_path / "run"))
    assert planned is not None and not (tmp_path / "run").exists()


MISTAKES = [
    (["--train_file", "absent.jsonl"], "absent.jsonl"),
    (["--train_file", "rows.jsonl", "--prompt_column", "question"], "its columns: 'prompt', 'completion'"),
    (["--train_file", "rows.jsonl", "--data_format", "text"], "--text_column"),
    (["--train_file", "bad.jsonl"], "bad.jsonl, row 2: an empty text in 'completion'"),
    (["--train_file", "rows.jsonl", "--max_length", "8"], "--max_length"),
    (["--validation_file", "rows.jsonl"], "--train_file"),
    (["--train_file", "rows.jsonl", "--synthetic_size", "90"], "--synthetic_size"),
    (["--prompt_column", "question"], "--prompt_column"),
    (["--chat_template", "rows.jsonl"], "--chat_template"),
    (["--use_peft"], "--use_peft"),
    (["--lora_r", "4"], "--lora_r 4: has no effect with no adapter"),
    (["--merge_adapter"], "--merge_adapter"),
    (["--model_name_or_path", "nobody/nothing", "--train_file", "rows.jsonl"], "--learning_rate"),
    (["--model_name_or_path", "nobody/nothing", "--learning_rate", "1e-4"], "nobody/nothing"),
    (["--metric_for_best_model", "exact_match"], "loss, perplexity"),
    (["--logits_chunk_size", "0"], "--logits_chunk_size 0"),
    (["--num_generations", "0", "--max_new_tokens", "9"], "--max_new_tokens 9"),
    (["--train_file", "rows.jsonl", "--validation_split", "0", "--no-eval_on_start"], "no validation data"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"case {i}?", "completion": "yes"} for i in range(30)]
    write_rows(tmp_path / "rows.jsonl", rows)
    write_rows(tmp_path / "bad.jsonl", [rows[0], {"prompt": "a", "completion": " "}, rows[2]])
    yield tmp_path


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_mistakes_end_in_one_line_before_training(here: Path, capsys: pytest.CaptureFixture[str], mistake: int) -> None:
    args, expected = MISTAKES[mistake]
    with pytest.raises(SystemExit) as end:
        main(run, CausalLmRecipe, args)
    assert end.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and expected in message
    assert not (here / "outputs").exists(), "nothing was written"


MEDQUAD = Path(__file__).resolve().parents[2] / "shared/data/medquad/niddk_qa.jsonl"


@pytest.mark.skipif(not MEDQUAD.exists(), reason="the shared data is not here")
def test_real_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small(tmp_path / "run", train_file=str(MEDQUAD), prompt_column="question", completion_column="answer")
    recipe.max_train_samples, recipe.max_eval_samples, recipe.max_length, recipe.max_steps = 48, 8, 64, 2
    recipe.on_bad_row = "skip"
    result = run(recipe)
    assert result.metrics["eval_loss"] < result.metrics["before_loss"]
    assert "train: 48 of 1073 rows are drawn" in capsys.readouterr().out


def test_an_edit_in_a_notebook_is_checked() -> None:
    recipe = CausalLmRecipe()
    recipe.data_format = "chat"  # type: ignore[assignment]
    with pytest.raises(UserError, match="--data_format"):
        run(recipe)
