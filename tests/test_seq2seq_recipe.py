"""recipes/seq2seq.py from end to end: what it learns and leaves, the cut, a resume, two processes, and mistakes."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, launch
from safetensors.torch import load_file
from seq2seq import Seq2SeqRecipe, plan, run
from seq2seq_cases import tiny
from small import rows_of
from transformers import AutoTokenizer, BartForConditionalGeneration

from accumft.cli import main
from accumft.errors import UserError
from accumft.synthetic.dialogues import load_dialogues

STEPS = 36


def small(folder: Path, **fields: Any) -> Seq2SeqRecipe:
    """36 steps of 16 conversations of a T5 of 32 dimensions."""
    values: dict[str, Any] = {
        "synthetic_size": 48,
        "d_model": 32,
        "num_layers": 1,
        "max_steps": STEPS,
        "eval_steps": 18,
        "save_steps": 18,
        "save_total_limit": None,
        "max_new_tokens": 32,
        "learning_rate": 1e-2,
        "dropout": 0.1,
        "max_tokens_per_micro_batch": 4096,
        "output_dir": str(folder),
    }
    return Seq2SeqRecipe(**{**values, **fields})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seq2seq") / "run"
    run(small(folder))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def predictions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text("utf-8").splitlines()]


def test_it_learns_the_form_of_a_note(finished: Path) -> None:
    """From nothing: the words of every note come first, long before the findings."""
    rows, evaluations = rows_of(finished), rows_of(finished, "eval_loss")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1.5
    results = json.loads((finished / "all_results.json").read_text())
    assert [row["step"] for row in evaluations] == [18, STEPS]
    assert results["eval_rougeL"] == max(row["eval_rougeL"] for row in evaluations) > 0.1
    assert results["eval_perplexity"] == pytest.approx(torch.tensor(results["eval_loss"]).exp().item(), rel=1e-4)
    assert 0.1 < results["test_first_line_rougeL"] < 0.6 and results["test_first_line_exact_match"] == 0


def test_outputs(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {
        "model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "recipe.yaml",
        "README.md",
        "plots",
    }
    rows = predictions(finished)
    assert [(row["split"], row["row"]) for row in rows] == [
        (split, i + 1) for split in ("validation", "test") for i in range(12)
    ]
    results = json.loads((finished / "all_results.json").read_text())
    for split, prefix in (("validation", "eval"), ("test", "test")):
        mean = sum(row["rougeL"] for row in rows if row["split"] == split) / 12
        assert results[f"{prefix}_rougeL"] == pytest.approx(mean, abs=1e-6)
    said = load_dialogues(num_train=1, num_held_out=12)["test"]["dialogue"][0]
    assert not any(said in path.read_text("utf-8", errors="replace") for path in finished.glob("*.jsonl"))
    assert "AutoModelForSeq2SeqLM" in (finished / "README.md").read_text("utf-8")


def test_auto_classes_generate_what_was_scored(finished: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(finished), AutoTokenizer.from_pretrained(finished)
    assert (model.generation_config.max_new_tokens, model.generation_config.do_sample) == (32, False)
    expected = [row["prediction"] for row in predictions(finished) if row["split"] == "test"]
    for said, text in zip(load_dialogues(num_train=1, num_held_out=12)["test"]["dialogue"][:4], expected, strict=False):
        inputs = tokenizer(said, return_tensors="pt")
        tokens = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        assert tokenizer.decode(tokens[0], skip_special_tokens=True).strip() == text


def test_resumed_run_is_bit_for_bit_the_same(finished: Path, tmp_path: Path) -> None:
    """From its checkpoint in the middle, with dropout, a saved best model and an evaluation to come."""
    folder = tmp_path / "again"
    shutil.copytree(finished, folder)
    for path in (folder / "checkpoints").glob(f"step-*{STEPS}"):
        shutil.rmtree(path)
    (folder / "model.safetensors").unlink()
    assert len(list((folder / "checkpoints").glob("step-*"))) == 1
    result = run(small(folder, resume_from_checkpoint=True))
    assert result.steps == STEPS
    once, twice = weights(finished), weights(folder)
    assert once.keys() == twice.keys() and all(torch.equal(once[name], twice[name]) for name in once)
    assert [row["loss"] for row in rows_of(folder)] == [row["loss"] for row in rows_of(finished)]
    assert predictions(folder) == predictions(finished)


def test_cut_and_processes_do_not_matter(tmp_path: Path) -> None:
    """A command on two processes, and one process with another cut: the same losses and the same texts."""
    fields = {"dropout": 0.0, "max_steps": 4, "eval_steps": 4, "label_smoothing": 0.1, "num_beams": 2}
    one = run(small(tmp_path / "one", **fields, per_device_train_batch_size=5, max_tokens_per_micro_batch=None))
    values = {
        **fields,
        "synthetic_size": 48,
        "d_model": 32,
        "num_layers": 1,
        "max_new_tokens": 32,
        "learning_rate": 1e-2,
    }
    flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    script = ROOT / "recipes" / "seq2seq.py"
    ended = launch(script, *flags, "--output_dir", str(tmp_path / "two"), timeout=280)
    assert ended.returncode == 0, ended.stderr
    rows, others = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    assert all(row["micro_batches"] >= 4 for row in rows)
    assert [row["loss"] for row in others] == pytest.approx([row["loss"] for row in rows], rel=1e-5)
    assert [row["items"] for row in others] == [row["items"] for row in rows]
    assert predictions(tmp_path / "two") == predictions(tmp_path / "one")
    results = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert results["test_loss"] == pytest.approx(one.metrics["test_loss"], rel=1e-5)
    assert json.loads((tmp_path / "two" / "generation_config.json").read_text())["num_beams"] == 2


def test_without_generation(tmp_path: Path) -> None:
    result = run(small(tmp_path / "run", predict_with_generate=False, max_new_tokens=None, max_steps=2, eval_steps=1))
    assert {name for name in result.metrics if name.startswith("test_")} == {"test_loss", "test_perplexity"}
    assert not (tmp_path / "run" / "predictions.jsonl").exists()


def test_positions_do_not_bound_what_is_not_generated(finished: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(finished)
    config = tiny("bart").config
    config.vocab_size, config.pad_token_id, config.eos_token_id = len(tokenizer), 0, 1
    config.decoder_start_token_id = config.bos_token_id = 1
    BartForConditionalGeneration(config).save_pretrained(tmp_path / "bart")
    tokenizer.save_pretrained(tmp_path / "bart")
    bart = partial(Seq2SeqRecipe, model_name_or_path=str(tmp_path / "bart"), synthetic_size=48, max_steps=1)
    with pytest.raises(UserError, match="--max_new_tokens 64: the model has 64 positions"):
        run(bart(max_new_tokens=64, output_dir=str(tmp_path / "no")))
    run(bart(predict_with_generate=False, max_target_length=64, output_dir=str(tmp_path / "yes")))
    assert rows_of(tmp_path / "yes", "eval_loss")


def test_activations_computed_again_change_nothing(tmp_path: Path) -> None:
    usual, other = (
        run(small(tmp_path / str(again), dropout=0.0, max_steps=2, eval_steps=2, gradient_checkpointing=again))
        for again in (False, True)
    )
    for name in ("eval_loss", "test_loss", "test_gen_len", "test_rougeL"):
        assert other.metrics[name] == pytest.approx(usual.metrics[name], rel=1e-5)


def test_plan_of_another_machine(tmp_path: Path) -> None:
    planned = plan(small(tmp_path / "run", num_processes_planned=2, device_memory_gb=8.0))
    assert planned.memory.activations > 0
    assert not (tmp_path / "run").exists()


MISTAKES = [
    (["--validation_file", "notes.csv"], "--train_file"),
    (["--train_file", "notes.csv"], "--source_column"),
    (["--train_file", "notes.csv", "--source_column", "a", "--target_column", "b"], "row 2"),
    (["--source_column", "a"], "--source_column"),
    (["--d_model", "10"], "--d_model"),
    (["--model_name_or_path", "x", "--d_model", "32"], "--d_model"),
    (["--model_name_or_path", "nobody/nothing"], "--model_name_or_path"),
    (["--num_beams", "0"], "--num_beams"),
    (["--no_predict_with_generate", "--num_beams", "2"], "--num_beams"),
    (["--no_predict_with_generate", "--metric_for_best_model", "rougeL"], "--predict_with_generate"),
    (["--metric_for_best_model", "rougel"], "did you mean rougeL"),
    (["--padding_free", "True"], "--padding_free"),
    (["--trust_remote_code"], "--trust_remote_code"),
    (["--label_smoothing", "1.0"], "--label_smoothing"),
]


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_mistakes_end_in_one_line_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mistake: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.csv").write_text("a,b\none,eins\ntwo,\n")
    args, expected = MISTAKES[mistake]
    with pytest.raises(SystemExit) as end:
        main(run, Seq2SeqRecipe, args)
    assert end.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and expected in message
    assert not (tmp_path / "outputs").exists(), "nothing was written"


def test_a_model_that_is_no_encoder_decoder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import BertConfig, BertModel, BertTokenizer

    config = BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    BertModel(config).save_pretrained(tmp_path / "bert")
    BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}).save_pretrained(
        tmp_path / "bert"
    )
    with pytest.raises(SystemExit) as end:
        main(
            run, Seq2SeqRecipe, ["--model_name_or_path", str(tmp_path / "bert"), "--output_dir", str(tmp_path / "run")]
        )
    assert end.value.code == 2
    assert "bert has no encoder and decoder" in capsys.readouterr().err


def test_a_saved_model_is_trained_further(finished: Path, tmp_path: Path) -> None:
    result = run(
        small(tmp_path / "run", model_name_or_path=str(finished), d_model=64, num_layers=2, max_steps=2, eval_steps=2)
    )
    first = next(row["loss"] for row in result.history if "loss" in row)
    assert first < rows_of(finished)[0]["loss"] - 1, "it goes on from where the other ended"
