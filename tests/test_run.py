"""The loop's partner: log, evaluation when due, best model, early stopping, fp16 attempts, output folder."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fp16_cpu import Fp16CpuAccelerator
from small import rows_of, small_recipe
from text_cls import run as run_recipe

from accumft.errors import NonFiniteLossError, UserError
from accumft.launch import make_accelerator
from accumft.models import build_small_bert
from accumft.outputs import check_output_dir, claim_output_dir
from accumft.plan import Plan, resolve_batch_sizes
from accumft.recipe import TrainingRecipe
from accumft.run import Run
from accumft.schedule import build_schedule, build_scheduler
from accumft.step import StepResult


def made_run(
    recipe: TrainingRecipe, epochs: float = 4, best: tuple[str, bool] = ("accuracy", True), evaluates: bool = False
) -> Run:
    """A run of 10 examples in effective batches of 5 over a tiny BERT whose weights the test sets itself."""
    accelerator = make_accelerator()
    torch.manual_seed(0)
    model, tokenizer = build_small_bert(
        {token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"])},
        id2label={0: "x", 1: "y"},
        problem_type="single_label_classification",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.of(10, resolve_batch_sizes(5, None, None, 1), 0, epochs, -1)
    scheduler = build_scheduler(optimizer, build_schedule(recipe, plan.total_steps))
    # Scores come later: see `drive`.
    evaluate = (lambda: {}) if evaluates else None
    return Run(recipe, accelerator, model, optimizer, scheduler, plan, tokenizer, best, evaluate)


class Windows:
    """Stands for a WindowDataset: empty windows, counted."""

    def __init__(self, total: int) -> None:
        self.total, self.made = total, 0

    def loader(self, start: int, num_workers: int, pin_memory: bool) -> Iterator[Any]:
        for _ in range(start, self.total):
            self.made += 1
            yield self

    def to(self, device: torch.device) -> "Windows":
        return self


def result_of(stepped: bool = True, loss: float = 1.0) -> StepResult:
    return StepResult(
        loss=loss,
        grad_norm=2.0,
        learning_rate=0.1,
        items=5.0,
        examples=5,
        tokens=10,
        padded_tokens=12,
        micro_batches=1,
        stepped=stepped,
    )


def drive(run: Run, scores: list[float], metric: str = "accuracy") -> list[float]:
    """Runs to the end with scripted scores; before each evaluation the weights become its number, 1, 2, …"""
    weight = next(run.model.parameters())
    used = iter(scores)

    def evaluate() -> dict[str, float]:
        evaluations.append(float(weight.detach().flatten()[0]))
        return {"loss": 0.5, metric: next(used)}

    evaluations: list[float] = []
    run.evaluate = evaluate
    for _ in run.windows(Windows(run.plan.total_steps)):
        weight.data.fill_(len(evaluations) + 1.0)
        run.after_step(result_of())
    run.load_best_model()
    return evaluations


def test_best_model_is_kept_and_loaded(tmp_path: Path) -> None:
    recipe = TrainingRecipe(output_dir=str(tmp_path / "run"))
    with made_run(recipe) as run:
        assert drive(run, [0.5, 0.9, 0.9, 0.7]) == [1, 2, 3, 4]
        assert run.saved_step == 4, "two steps an epoch; a tie is no gain"
        assert next(run.model.parameters()).unique().tolist() == [2.0]
    saved = type(run.model).from_pretrained(tmp_path / "run")
    assert next(saved.parameters()).unique().tolist() == [2.0]


def test_smaller_may_be_better(tmp_path: Path) -> None:
    with made_run(TrainingRecipe(output_dir=str(tmp_path / "run")), best=("rmse", False)) as run:
        drive(run, [0.5, 0.3, 0.4, 0.6], metric="rmse")
        assert (run.saved_step, run.progress.best_value) == (4, 0.3)


def test_last_model_where_asked_for(tmp_path: Path) -> None:
    recipe = TrainingRecipe(output_dir=str(tmp_path / "run"), load_best_model_at_end=False)
    with made_run(recipe) as run:
        drive(run, [0.9, 0.5, 0.4, 0.3])
        assert next(run.model.parameters()).unique().tolist() == [4.0]
    assert next(type(run.model).from_pretrained(tmp_path / "run").parameters()).unique().tolist() == [4.0]


def test_early_stopping_counts_evaluations_without_gain(tmp_path: Path) -> None:
    recipe = TrainingRecipe(output_dir=str(tmp_path / "run"), early_stopping_patience=2, eval_steps=1)
    with made_run(recipe) as run:
        assert len(drive(run, [0.5, 0.4, 0.6, 0.6, 0.5, 0.9, 0.9, 0.9])) == 5
        assert (run.step, run.saved_step) == (5, 3)
        assert run.finish({}).metrics["stop_reason"] == "no better eval_accuracy in 2 evaluation(s)"


def test_undefined_metric_is_no_gain(tmp_path: Path) -> None:
    with made_run(TrainingRecipe(output_dir=str(tmp_path / "run"))) as run:
        run.evaluate = lambda: {"loss": 0.1}
        for _ in run.windows(Windows(8)):
            run.after_step(result_of())
        assert (run.progress.best_value, run.progress.evaluations_without_gain) == (None, 4)
        run.load_best_model()
        assert run.saved_step == 8


@pytest.mark.parametrize(
    ("eval_steps", "epochs", "expected"), [(None, 2, [2, 4]), (3, 4, [3, 6, 8]), (1, 1, [1, 2]), (None, 1.5, [2, 3])]
)
def test_evaluations_are_due_in_steps_and_at_the_end(
    tmp_path: Path, eval_steps: int | None, epochs: float, expected: list[int]
) -> None:
    recipe = TrainingRecipe(output_dir=str(tmp_path / "run"), eval_steps=eval_steps)
    with made_run(recipe, epochs) as run:
        drive(run, [0.5] * 9)
    assert [row["step"] for row in rows_of(tmp_path / "run", "eval_accuracy")] == expected


def test_logging_steps(tmp_path: Path) -> None:
    with made_run(TrainingRecipe(output_dir=str(tmp_path / "run"), logging_steps=3)) as run:
        drive(run, [0.5] * 4)
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 3, 6, 8]
    assert [row["epoch"] for row in rows] == [0.5, 1.5, 3, 4]


def test_a_skipped_update_tries_the_same_window_again(tmp_path: Path) -> None:
    with made_run(TrainingRecipe(output_dir=str(tmp_path / "run"), logging_steps=100), epochs=1) as run:
        windows, outcomes = Windows(2), iter([False, False, True, False, True])
        for _ in run.windows(windows):
            run.after_step(result_of(next(outcomes), loss=float("nan")))
        assert (run.step, windows.made) == (2, 2)
    rows = rows_of(tmp_path / "run")
    assert [(row["step"], row["stepped"]) for row in rows] == [
        (1, False),
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert rows[0]["loss"] == "nan", "valid JSON that hides nothing"


def test_forgotten_after_step_is_an_error(tmp_path: Path) -> None:
    with (
        made_run(TrainingRecipe(output_dir=str(tmp_path / "run"))) as run,
        pytest.raises(RuntimeError, match=r"run\.after_step\(result\) once for each window"),
    ):
        for _ in run.windows(Windows(8)):
            pass


def test_earlier_runs_are_moved_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    for number in range(3):
        lock = claim_output_dir(check_output_dir(str(folder), ()))
        (folder / "recipe.yaml").write_text(str(number))
        lock.release()
    assert [(tmp_path / name / "recipe.yaml").read_text() for name in ("run-1", "run-2", "run")] == ["0", "1", "2"]
    assert f"the earlier run in {folder} is now in {folder}-2" in capsys.readouterr().out


def test_a_run_that_is_going_on_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lock = claim_output_dir(folder)
    (folder / "recipe.yaml").touch()
    with pytest.raises(UserError, match="another run is going on in it"):
        claim_output_dir(folder)
    lock.release()
    claim_output_dir(folder).release()
    assert (tmp_path / "run-1" / "recipe.yaml").exists()


@pytest.mark.parametrize(
    ("output_dir", "message"),
    [
        ("file", "a file; name a folder"),
        ("mine", "holds files that are not of an earlier run"),
        (".", "lies in it"),
        ("earlier", r"data\.csv lies in it"),
        ("x" * 300, "cannot be used"),
        ("a\0b", "cannot be used"),
        ("/proc/run", "not writable|cannot be used"),
    ],
)
def test_folders_that_a_run_must_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_dir: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "recipe.yaml").touch()
    for name in ("mine/README.md", "earlier/recipe.yaml", "earlier/data.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=message):
        claim_output_dir(check_output_dir(output_dir, ("earlier/data.csv", None, "absent.csv")))
    assert (tmp_path / "mine" / "README.md").exists() and (tmp_path / "earlier" / "data.csv").exists()


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_real_fp16_overflows_lose_no_window_and_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    made: list[Fp16CpuAccelerator] = []

    def accelerator(**arguments: Any) -> Fp16CpuAccelerator:
        made.append(Fp16CpuAccelerator(init_scale=2.0**30, growth_interval=3, **arguments))
        return made[-1]

    monkeypatch.setattr("accumft.launch.Accelerator", accelerator)
    recipe = small_recipe(tmp_path / "run", mixed_precision="fp16", optim=optim, warmup_ratio=None, warmup_steps=2)
    result = run_recipe(recipe)
    rows = rows_of(tmp_path / "run")
    skipped, made_steps = [r for r in rows if not r["stepped"]], [r for r in rows if r["stepped"]]
    assert len(skipped) >= 4, "the scale of 2^30 overflowed for real"
    assert [row["step"] for row in made_steps] == [1, 2, 3, 4, 5, 6]
    schedule = build_schedule(recipe, 6)
    assert [row["learning_rate"] for row in made_steps] == pytest.approx([1e-3 * schedule(s) for s in range(6)])
    assert all(row["learning_rate"] == 1e-3 * schedule(row["step"] - 1) for row in skipped)
    assert [row["examples"] for row in made_steps] == [16] * 6
    assert made[0].scaler.get_scale() < 2.0**30
    assert result.steps == 6


def test_fp16_that_overflows_at_every_scale_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accumft.launch.Accelerator", partial(Fp16CpuAccelerator, init_scale=2.0**-10))
    monkeypatch.setattr(
        "text_cls.loss_sum",
        lambda criterion, model, batch: (
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.sum() * float("inf")
        ),
    )
    with pytest.raises(NonFiniteLossError, match=r"step 1: loss .*at an fp16 loss scale of .*rows \d"):
        run_recipe(small_recipe(tmp_path / "run", mixed_precision="fp16"))


def test_trackers_get_the_rows(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_recipe(small_recipe(tmp_path / "run", report_to=("tensorboard",), num_train_epochs=1.0, run_name="mine"))
    events = EventAccumulator(str(tmp_path / "run" / "mine"))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("loss")]
    rows = rows_of(tmp_path / "run")
    assert logged == [(row["step"], pytest.approx(row["loss"])) for row in rows]
    assert [event.step for event in events.Scalars("eval_f1_macro")] == [3]


def test_results_are_json(tmp_path: Path) -> None:
    with made_run(TrainingRecipe(output_dir=str(tmp_path / "run"))) as run:
        drive(run, [0.5] * 4)
        run.progress.training_seconds = 4.0
        found = run.finish({"eval_accuracy": 0.5}).metrics
    assert json.loads((tmp_path / "run" / "all_results.json").read_text()) == found
    assert (found["steps"], found["epoch"], found["saved_step"]) == (8, 4.0, 2)
    assert (found["train_tokens_per_second"], found["train_examples_per_second"]) == (20.0, 10.0)
