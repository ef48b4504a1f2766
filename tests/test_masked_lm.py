"""recipes/masked_lm.py end to end: what it learns, leaves, resumes, refuses, and what a classifier makes of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from masked_cases import tiny_bert
from masked_lm import MaskedLmRecipe, plan, run
from safetensors.torch import load_file
from small import rows_of
from text_cls import TextClsRecipe
from text_cls import run as run_text_cls

from accumft.cli import main
from accumft.tasks.masked_models import load_masked_lm, with_pooler


def small(output_dir: Path, **fields: Any) -> MaskedLmRecipe:
    """A new small BERT on 48 short notes."""
    defaults: dict[str, Any] = {
        "from_scratch": True,
        "max_length": 48,
        "effective_batch_size": 32,
        "learning_rate": 3e-3,
        "num_train_epochs": 2.0,
        "output_dir": str(output_dir),
    }
    if fields.get("train_file") is None:
        defaults["synthetic_size"] = 48
    return MaskedLmRecipe(**{**defaults, **fields})


WORDS = ["ache", "burn", "cough", "drain", "edema", "fever", "graze", "heal", "itch", "jolt", "knee", "limp"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On one sentence of twelve words again and again: a masked word follows from its place."""
    folder = tmp_path_factory.mktemp("masked")
    lines = (" ".join(WORDS) + "\n") * 96
    for name in ("train", "dev"):
        (folder / f"{name}.txt").write_text(lines)
    files = {"train_file": str(folder / "train.txt"), "validation_file": str(folder / "dev.txt"), "line_by_line": True}
    run(small(folder / "run", **files, num_train_epochs=20.0, eval_steps=20, save_steps=30))
    return folder / "run"


def test_it_learns_more_than_the_frequency_of_words(finished: Path) -> None:
    results = json.loads((finished / "all_results.json").read_text())
    assert results["eval_perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert results["eval_perplexity"] < 4
    assert 10 < results["eval_perplexity_unigram"] < 14 < results["eval_perplexity_before"]
    assert results["eval_accuracy"] > 0.5 > results["eval_accuracy_before"]
    rows = rows_of(finished)
    assert len(rows) == 60 and len(rows_of(finished, "eval_perplexity")) == 3
    assert rows[0]["items"] == 32 * 2, "two of twelve words in each"
    assert rows[0]["padded_tokens"] == rows[0]["tokens"] == 32 * 14
    card = (finished / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card and "Perplexity" in card and "96 documents" in card


def test_transformers_loads_it(finished: Path) -> None:
    from transformers import AutoModelForMaskedLM, pipeline

    model = AutoModelForMaskedLM.from_pretrained(finished)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    fill = pipeline("fill-mask", model=str(finished))
    found = fill(f"ache burn {fill.tokenizer.mask_token} drain edema fever")
    assert found[0]["token_str"] == "cough"


def test_a_classifier_starts_from_it(finished: Path, tmp_path: Path) -> None:
    run_text_cls(
        TextClsRecipe(
            model_name_or_path=str(finished),
            synthetic_size=32,
            max_length=24,
            max_steps=1,
            learning_rate=1e-12,
            output_dir=str(tmp_path / "run"),
        )
    )
    before, after = load_file(finished / "model.safetensors"), load_file(tmp_path / "run" / "model.safetensors")
    shared = before.keys() & after.keys()
    assert len(shared) > 60
    assert all(torch.allclose(before[name], after[name], atol=1e-9) for name in shared)
    assert {name for name in after if name not in shared} == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "classifier.weight",
        "classifier.bias",
    }


def test_resume_is_exact(tmp_path: Path) -> None:
    """With dropout, packed documents and a new epoch after the interruption."""
    fields = {"dropout": 0.1, "save_steps": 2, "eval_steps": 3, "packing": True, "save_total_limit": None}
    whole = run(small(tmp_path / "whole", **fields))
    assert whole.steps == 8
    part = tmp_path / "part"
    run(small(part, **fields))
    for path in [part / "model.safetensors", *sorted((part / "checkpoints").glob("step-*"))[1:]]:
        path.rename(tmp_path / f"gone-{path.name}")
    resumed = run(small(part, **fields, resume_from_checkpoint=True))
    assert len(list((part / "checkpoints").glob("step-*"))) >= 3
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    drop = ("seconds", "per_second")
    numbers = [
        [{k: v for k, v in row.items() if not k.endswith(drop)} for row in rows_of(tmp_path / name)]
        for name in ("whole", "part")
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 8
    for name, value in whole.metrics.items():
        if not name.endswith(drop):
            assert resumed.metrics[name] == value, name


@pytest.mark.parametrize(
    "fields",
    [
        {"padding_free": False},
        {"per_device_train_batch_size": 3},
        {"max_tokens_per_micro_batch": 200, "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_the_cut_changes_no_number(tmp_path: Path, fields: dict[str, Any]) -> None:
    plain, other = (
        run(small(tmp_path / name, num_train_epochs=1.0, learning_rate=1e-4, **extra)).history
        for name, extra in (("plain", {}), ("other", fields))
    )
    losses = [[row["loss"] for row in history if "loss" in row] for history in (plain, other)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5) and len(losses[0]) == 5
    items = [[row["items"] for row in history if "loss" in row] for history in (plain, other)]
    assert items[0] == items[1]


def test_own_text_in_chinese(tmp_path: Path) -> None:
    lines = [f"患者发热{i}天,伴咳嗽。\n既往有高血压病史。\n\n" for i in range(40)]
    (tmp_path / "notes.txt").write_text("".join(lines), encoding="gb18030")
    fields: dict[str, Any] = {"train_file": str(tmp_path / "notes.txt"), "encoding": "gb18030", "max_steps": 2}
    result = run(small(tmp_path / "run", **fields, packing=True, cross_document_attention=True))
    assert result.metrics["eval_masked_tokens"] > 4
    text = (tmp_path / "run" / "README.md").read_text()
    assert "36 documents" in text and "高血压" not in text


def test_evaluation_has_one_mask_whatever_the_seed(tmp_path: Path) -> None:
    fields = {"max_steps": 1, "learning_rate": 1e-12}
    results = [run(small(tmp_path / str(seed), seed=seed, **fields)).metrics for seed in (1, 2)]
    for name in ("eval_perplexity_unigram", "eval_masked_tokens", "test_perplexity_unigram"):
        assert results[0][name] == results[1][name]
    assert results[0]["eval_perplexity_before"] == pytest.approx(results[0]["eval_perplexity"], rel=1e-6)
    assert results[0]["eval_perplexity"] != results[1]["eval_perplexity"], "other new weights"


def test_dry_run(tmp_path: Path) -> None:
    found = plan(small(tmp_path / "run", num_train_epochs=1.0))
    assert found.window_plan.plan.total_steps == 5
    assert not (tmp_path / "run").exists()


def test_an_encoder_keeps_its_pooler_and_gets_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, BertModel

    model, tokenizer = tiny_bert(torch.float32)
    encoder = BertModel(model.config)
    encoder.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    found, _ = load_masked_lm(str(tmp_path / "encoder"))
    assert type(found) is with_pooler()
    assert "these weights are new" in capsys.readouterr().out
    assert torch.equal(found.bert.pooler.dense.weight, encoder.pooler.dense.weight)
    trained = {name for name, parameter in found.named_parameters() if parameter.requires_grad}
    assert not any("pooler" in name for name in trained) and len(trained) > 30
    found.save_pretrained(tmp_path / "adapted")
    assert json.loads((tmp_path / "adapted" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapted")
    assert torch.equal(classifier.bert.pooler.dense.weight, encoder.pooler.dense.weight)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "adapted")
    assert torch.equal(again.cls.predictions.transform.dense.weight, found.cls.predictions.transform.dense.weight)
    # It loads into itself, as a resume does.
    type(found).from_pretrained(tmp_path / "adapted").load_state_dict(found.state_dict())


MISTAKES = [
    (["--train_file", "absent.txt"], "absent.txt"),
    (["--train_file", "notes.csv", "--line_by_line"], "--line_by_line"),
    (["--train_file", "notes.txt", "--text_column", "note"], "--text_column"),
    (["--text_column", "note"], "--text_column"),
    (["--train_file", "notes.txt", "--synthetic_size", "90"], "--synthetic_size"),
    (["--cross_document_attention"], "no --packing"),
    (["--mlm_probability", "1"], "--mlm_probability"),
    (["--from_scratch", "--model_name_or_path", "x"], "--model_name_or_path"),
    (["--metric_for_best_model", "f1"], "perplexity, accuracy, loss"),
    (["--packing", "--padding_free", "True", "--from_scratch", "--synthetic_size", "32"], "--padding_free"),
    (["--max_length", "2"], "--max_length"),
    (["--train_file", "notes.txt", "--validation_split", "0", "--eval_steps", "2", "--from_scratch"], "--eval_steps"),
    (["--model_name_or_path", "gpt", "--synthetic_size", "32"], "no mask token"),
    (["--validation_file", "notes.txt"], "--train_file"),
    (["--run_name", "x"], "--run_name"),
]


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_mistakes_end_in_one_line_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mistake: int
) -> None:
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("".join(f"note {i} of a patient\n\n" for i in range(30)))
    Path("notes.csv").write_text("text\n" + "".join(f"note {i}\n" for i in range(30)))
    GPT2Config(n_layer=1).save_pretrained("gpt")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), eos_token="a").save_pretrained("gpt")
    args, expected = MISTAKES[mistake]
    with pytest.raises(SystemExit) as end:
        main(run, MaskedLmRecipe, args)
    assert end.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and expected in message
    assert not (tmp_path / "outputs").exists(), "nothing was written"
