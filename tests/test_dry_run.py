"""The dry run: its numbers are those of the run, for any number of processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import rows_of, small_recipe
from text_cls import plan, run

from accumft.cut import CostModel
from accumft.dry_run import RunPlan
from accumft.errors import UserError
from accumft.memory import MemoryEstimate
from accumft.plan import Plan, resolve_batch_sizes
from accumft.schedule import Schedule
from accumft.synthetic import generate_notes
from accumft.window_plan import WindowPlan


def test_the_plan_is_what_the_run_does(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path / "run", max_tokens_per_micro_batch=96)
    planned = plan(recipe)
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "run-plan.png").stat().st_size > 10_000
    result = run(recipe)
    assert result.plan is None
    rows = rows_of(tmp_path / "run")
    epoch = rows[:3]
    assert [row["micro_batches"] for row in epoch] == planned.steps.micro_batches.sum(axis=1).tolist()
    assert [row["padded_tokens"] for row in epoch] == planned.steps.padded_tokens.tolist()
    assert [row["tokens"] for row in epoch] == planned.steps.tokens.tolist()
    assert [row["learning_rate"] for row in rows] == pytest.approx(planned.learning_rates().tolist())
    assert planned.steps.largest[0] * planned.steps.largest[1] <= 96


def test_any_number_of_processes_from_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, Any] = {"mixed_precision": "fp16", "num_processes_planned": 4, "device_memory_gb": 16.0}
    planned = plan(small_recipe(tmp_path / "run", **fields))
    assert planned.steps.micro_batches.shape == (3, 4)
    assert planned.fits
    text = capsys.readouterr().out
    assert "16 examples over 4 processes, in micro-batches of up to 1,024 tokens" in text
    assert f"{planned.trainable * 4 / 1e6:,.0f} MB" in dict(planned.rows())["reduced between processes a step"]
    assert "memory of a device (fp16), estimated" in text
    assert "learning rate by step" in text
    assert "<table>" in planned._repr_html_()


def test_fields_of_a_dry_run_without_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--num_processes_planned 4: has no effect with no --dry_run"):
        run(small_recipe(tmp_path / "run", num_processes_planned=4))


def test_a_measurement_of_another_machine_is_refused(tmp_path: Path) -> None:
    for field in ({"num_processes_planned": 8}, {"device_memory_gb": 16.0}, {"mixed_precision": "fp16"}):
        with pytest.raises(UserError, match="--max_tokens_per_micro_batch auto: would be measured on this machine"):
            plan(small_recipe(tmp_path / "run", max_tokens_per_micro_batch="auto", **field))
    with pytest.raises(UserError, match="--num_processes_planned 10001: at most 10,000"):
        plan(small_recipe(tmp_path / "run", num_processes_planned=10_001))


def test_plan_of_a_run_shorter_than_an_epoch(tmp_path: Path) -> None:
    assert len(plan(small_recipe(tmp_path / "run", max_steps=2, warmup_steps=0)).steps.tokens) == 2


def million_records(tokens: int) -> RunPlan:
    """1,000,000 Chinese records of up to 512 tokens, RoBERTa-large in fp16, effective batch 256, 8 x V100 16 GB."""
    from transformers import RobertaConfig

    from accumft.memory import estimate_memory

    some = np.array([min(512, len(note["text"]) + 2) for note in generate_notes(2000, language="zh")], np.int32)
    lengths = some[np.random.default_rng(0).integers(0, len(some), 1_000_000)]
    batch = resolve_batch_sizes(256, None, None, 8, tokens)
    steps = Plan.of(len(lengths), batch, seed=42, num_train_epochs=3, max_steps=-1)
    config = RobertaConfig(
        vocab_size=21128,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=514,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=8,
    )
    window_plan = WindowPlan(steps, lengths, CostModel.of(config, "cuda"), pad_to_multiple_of=8, packed=True)
    table = window_plan.table()
    memory = estimate_memory(config, *table.largest, mixed_precision="fp16")
    schedule = Schedule("cosine", steps.total_steps, 1172)
    recipe = small_recipe(Path("outputs/none"), device_memory_gb=16.0)
    return RunPlan(recipe, window_plan, table, schedule, memory.weights // 4, memory.weights // 4, memory, "fp16")


def test_the_clinical_case_planned_on_a_laptop() -> None:
    """The worked example of docs/planning.md: micro-batches of 4,096 tokens fit 16 GB, and would not fit 10."""
    planned = million_records(4096)
    assert planned.window_plan.plan.steps_per_epoch == 3907
    assert planned.window_plan.plan.total_steps == 11721
    assert planned.parameters == pytest.approx(325e6, rel=0.02)
    assert planned.padding < 1.1
    assert planned.plain_padding > 1.6
    assert planned.imbalance < 1.1
    assert planned.steps.largest[0] * planned.steps.largest[1] <= 4096
    assert planned.fits
    smaller = replace(planned, recipe=replace(planned.recipe, device_memory_gb=10.0))
    assert not smaller.fits


def test_memory_that_does_not_fit_is_said() -> None:
    huge = MemoryEstimate(weights=2**33, gradients=2**33, optimizer=2**34, activations=2**30, update=0)
    steps = Plan.of(64, resolve_batch_sizes(16, None, None, 1), 0, 1, -1)
    window_plan = WindowPlan(steps)
    recipe = small_recipe(Path("outputs/none"), device_memory_gb=16.0)
    planned = RunPlan(recipe, window_plan, window_plan.table(), Schedule("constant", 4), 10**9, 10**9, huge, "float32")
    assert planned.fits is False
    assert "does NOT fit" in dict(planned.rows())["on 16 GB"]
    assert planned.imbalance == 1
