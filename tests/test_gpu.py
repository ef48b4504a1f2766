"""What only a GPU can show. Skipped without one."""

from pathlib import Path

import pytest
import torch
from launching import ROOT, launch
from small import rows_of, small_recipe
from step_cases import ONE_PROCESS_CUTS, train_on_cut
from tasks import TASKS, Task, flat, make_data, make_model, reference_run, relative_error
from text_cls import run

from accumft.launch import make_accelerator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("name", ONE_PROCESS_CUTS)
def test_gradient_in_float64(task: Task, name: str) -> None:
    cut = ONE_PROCESS_CUTS[name]
    accelerator = make_accelerator(gradient_accumulation_steps=len(cut[0]))
    assert accelerator.device.type == "cuda"
    weights, _ = train_on_cut(accelerator, task, cut, steps=1, lr=1.0, dtype=torch.float64)
    expected, _ = reference_run(task, make_data(task, 16), [range(16)], 1.0, torch.float64)
    start = flat(make_model(task, torch.float64))
    assert relative_error(start - weights.cpu(), start - expected) < 1e-10


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_recipe_in_each_precision(tmp_path: Path, precision: str) -> None:
    run(small_recipe(tmp_path / "float32", mixed_precision="no"))
    run(small_recipe(tmp_path / precision, mixed_precision=precision, per_device_train_batch_size=5))
    expected = [row["loss"] for row in rows_of(tmp_path / "float32")]
    found = [row["loss"] for row in rows_of(tmp_path / precision) if row["stepped"]]
    assert found == pytest.approx(expected, rel={"no": 1e-4, "fp16": 1e-2, "bf16": 3e-2}[precision])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_losses_of_one(tmp_path: Path) -> None:
    run(small_recipe(tmp_path / "one"))
    args = "--from_scratch --synthetic_size 48 --max_length 24 --dropout 0 --effective_batch_size 16"
    args += f" --learning_rate 1e-3 --num_train_epochs 2 --output_dir {tmp_path / 'two'}"
    visible = {"CUDA_VISIBLE_DEVICES": "0,1"}
    ended = launch(ROOT / "recipes" / "text_cls.py", *args.split(), env=visible, timeout=240)
    assert ended.returncode == 0, ended.stderr
    one, two = ([row["loss"] for row in rows_of(tmp_path / name)] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)
