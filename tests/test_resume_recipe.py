"""A recipe that resumes and is not the one that was begun: listed and honoured, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from resumed import copy_of, finished_run, recipe_of, step_folder
from small import rows_of
from text_cls import run

from accumft.errors import UserError
from accumft.resume import check_recipe
from accumft.state import load_state, read_progress


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("finished") / "run")


def listed(finished: Path, **changed: Any) -> list[str]:
    """What a resume with these fields changed would list."""
    checkpoint = step_folder(finished, 8)
    values = yaml.safe_load((checkpoint / "recipe.yaml").read_text(encoding="utf-8"))
    return check_recipe(checkpoint, {**values, **changed}, read_progress(checkpoint).fingerprint)


def test_the_same_recipe_lists_nothing(finished: Path) -> None:
    assert listed(finished) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens_per_micro_batch", 64),
        ("per_device_train_batch_size", 2),
        ("gradient_accumulation_steps", 4),
        ("dataloader_num_workers", 2),
        ("gradient_checkpointing", True),
        ("padding_free", False),
        ("torch_compile", True),
        ("output_dir", "/elsewhere"),
        ("logging_steps", 7),
        ("save_steps", 1),
        ("save_total_limit", 9),
        ("max_runtime", 3.0),
        ("report_to", ["tensorboard"]),
        ("train_file", "/moved/notes.csv"),  # whether it is the same data, the data says
        ("encoding", "gb18030"),
    ],
)
def test_what_changes_no_number_is_not_listed(finished: Path, name: str, value: Any) -> None:
    assert listed(finished, **{name: value}) == []


@pytest.mark.parametrize(
    ("name", "before", "value"),
    [
        ("learning_rate", 0.001, 5e-5),
        ("lr_scheduler_type", "cosine", "linear"),
        ("num_train_epochs", 2.0, 3.0),
        ("warmup_ratio", None, 0.2),
        ("weight_decay", 0.01, 0.0),
        ("max_length", 24, 12),
        ("max_grad_norm", 1.0, None),
        ("dropout", 0.1, 0.0),
        ("loss", "cross_entropy", "focal"),
        ("class_weights", [], ["balanced"]),
        ("label_smoothing", 0.0, 0.1),
        ("eval_steps", 4, 2),
        ("metric_for_best_model", None, "f1_macro"),
        ("early_stopping_patience", None, 2),
        ("mixed_precision", "no", "bf16"),
    ],
)
def test_what_changes_numbers_is_listed_with_both_values(finished: Path, name: str, before: Any, value: Any) -> None:
    assert listed(finished, **{name: value}) == [f"{name}: {before} before, {value} from here on"]


def test_several_are_listed_each(finished: Path) -> None:
    assert listed(finished, learning_rate=1.0, output_dir="x", dropout=0.5) == [
        "learning_rate: 0.001 before, 1.0 from here on",
        "dropout: 0.1 before, 0.5 from here on",
    ]


def test_another_learning_rate_is_honoured(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of(finished, tmp_path / "run")
    path = step_folder(folder, 8)
    run(
        recipe_of(
            folder,
            resume_from_checkpoint=str(path),
            learning_rate=4e-4,
            lr_scheduler_type="constant",
            weight_decay=0.5,
        )
    )
    printed = capsys.readouterr().out
    for line in (
        "learning_rate: 0.001 before, 0.0004 from here on",
        "lr_scheduler_type: cosine before, constant from here on",
        "weight_decay: 0.01 before, 0.5 from here on",
    ):
        assert line in printed
    rates = [row["learning_rate"] for row in rows_of(folder)]
    assert rates[:8] == [row["learning_rate"] for row in rows_of(finished)][:8]
    assert rates[8:] == [4e-4] * 4
    saved = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert (saved["learning_rate"], saved["weight_decay"], saved["resume_from_checkpoint"]) == (4e-4, 0.5, None)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"seed": 7}, "--seed 7 (there 42)"),
        ({"effective_batch_size": 16}, "--effective_batch_size 16 (there 8)"),
        ({"optim": "sgd"}, "--optim sgd (there adamw_torch_fused)"),
        ({"seed": 7, "optim": "adafactor"}, "--optim adafactor (there adamw_torch_fused), --seed 7 (there 42)"),
        ({"from_scratch": False}, "--from_scratch False (there True)"),
    ],
)
def test_what_cannot_be_honoured_is_refused(finished: Path, tmp_path: Path, fields: dict[str, Any], shown: str) -> None:
    folder = copy_of(finished, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as error:
        run(recipe_of(folder, resume_from_checkpoint="true", **fields))
    assert str(error.value) == (
        f"{step_folder(folder, 12)} cannot go on with {shown}: give the values it was begun with, or leave "
        "--resume_from_checkpoint out to begin anew"
    )
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_a_model_folder_may_lie_elsewhere_but_must_be_the_same(finished: Path) -> None:
    name = "sentence-transformers/all-MiniLM-L6-v2"
    assert listed(finished, model_name_or_path="/models/all-MiniLM-L6-v2") == []
    with pytest.raises(UserError, match=rf"cannot go on with --model_name_or_path bert-base \(there {name}\): give"):
        listed(finished, model_name_or_path="bert-base")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"synthetic_size": 40}, r"rows 40 \(there 48\), .*--synthetic_size 40 \(there 48\)"),
        ({"synthetic_language": "zh"}, r"digest \w+ \(there \w+\), --synthetic_language zh \(there en\)"),
    ],
)
def test_other_training_data_is_refused(finished: Path, tmp_path: Path, fields: dict[str, Any], shown: str) -> None:
    folder = copy_of(finished, tmp_path / "run")
    with pytest.raises(UserError) as error:
        run(recipe_of(folder, resume_from_checkpoint="true", **fields))
    assert str(error.value).startswith(f"{step_folder(folder, 12)} was made with other training data: ")
    assert str(error.value).endswith(
        "; resume with the data it was begun with, or leave --resume_from_checkpoint out to begin anew"
    )
    error.match(shown)


class OfAnotherSize(torch.nn.Module):
    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}


def test_a_model_of_another_size_is_refused_before_a_weight_is_touched(finished: Path) -> None:
    """A folder of the same name may hold another model: seen from its shapes."""
    from fp16_cpu import Fp16CpuAccelerator

    name = "bert.embeddings.word_embeddings.weight"
    model = OfAnotherSize({name: torch.Size((7, 3))})
    checkpoint = step_folder(finished, 8)
    with pytest.raises(UserError) as error:
        load_state(checkpoint, Fp16CpuAccelerator(), model, None, None, {})  # type: ignore[arg-type]
    error.match(rf"^{checkpoint}: its model has {name} of \(\d+, \d+\) where this one has \(7, 3\); resume with the r")
