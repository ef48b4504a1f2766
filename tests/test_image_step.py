"""The step of an image classifier against one plain forward over the whole batch; BatchNorm frozen and not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from image_cases import SIDE, batch_of, package_step, pieces_of, reference_step, small_recipe, step_model
from image_cls import run
from launching import launch
from small import rows_of
from step_cases import EFFECTIVE, ONE_PROCESS_CUTS, TWO_PROCESS_CUTS
from tasks import flat, relative_error

from accumft.launch import make_accelerator
from accumft.plan import BatchSizes, Plan
from accumft.tasks.image_models import batch_norms, check_batches, freeze_batch_norm, is_frozen
from accumft.window_plan import WindowPlan

KINDS = ["vit", "convnext", "resnet", "efficientnet"]
by_kind = pytest.mark.parametrize("kind", KINDS)


@by_kind
def test_gradient_does_not_depend_on_the_cut(kind: str) -> None:
    accelerator, batch = make_accelerator(), batch_of(EFFECTIVE)
    expected, loss = reference_step(kind, batch)
    start = flat(step_model(kind))
    assert (start - expected).norm() > 1e-2
    assert len(ONE_PROCESS_CUTS) == 5
    for cut in [*ONE_PROCESS_CUTS.values(), [[1] * 16]]:
        weights, result, _ = package_step(accelerator, kind, batch, pieces_of(cut[0]))
        assert relative_error(start - weights, start - expected) < 1e-10
        assert result.loss == pytest.approx(loss, rel=1e-10)
        assert result.examples == EFFECTIVE


@pytest.mark.parametrize("tail", [1, 7, 15])
def test_gradient_of_a_short_tail(tail: int) -> None:
    batch = batch_of(tail, seed=5)
    expected, loss = reference_step("resnet", batch)
    start = flat(step_model("resnet"))
    sizes = [3] * (tail // 3) + [tail % 3] * (tail % 3 > 0)
    weights, result, _ = package_step(make_accelerator(), "resnet", batch, pieces_of(sizes))
    assert relative_error(start - weights, start - expected) < 1e-10
    assert result.loss == pytest.approx(loss, rel=1e-10)


@pytest.mark.parametrize("kind", ["resnet", "efficientnet"])
def test_frozen_statistics_stay_and_their_layers_learn(kind: str) -> None:
    before = step_model(kind)
    assert len(batch_norms(before)) == {"resnet": 6, "efficientnet": 10}[kind] and is_frozen(before)
    _, _, model = package_step(make_accelerator(), kind, batch_of(16), pieces_of([8, 8]))
    for old, new in zip(batch_norms(before), batch_norms(model), strict=True):
        assert torch.equal(old.running_mean, new.running_mean) and torch.equal(old.running_var, new.running_var)
        assert new.num_batches_tracked == 0
    assert any(not torch.equal(old.weight, new.weight) for old, new in zip(batch_norms(before), batch_norms(model)))
    assert model.state_dict().keys() == step_model(kind, frozen=False).state_dict().keys()


def test_batch_norm_in_training_mode_depends_on_the_cut() -> None:
    accelerator, batch = make_accelerator(), batch_of(16)
    whole, _, model = package_step(accelerator, "resnet", batch, pieces_of([16]), frozen=False)
    cut, _, _ = package_step(accelerator, "resnet", batch, pieces_of([5, 5, 6]), frozen=False)
    start = flat(step_model("resnet"))
    assert relative_error(start - cut, start - whole) > 1e-2, "by its nature; hence freeze_batch_norm"
    assert all(layer.num_batches_tracked == 1 for layer in batch_norms(model))


class Pooled(torch.nn.Module):
    """BatchNorm over single pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.norm(pixel_values.mean((2, 3)))


class Windows:
    """As `check_batches` looks at a WindowDataset."""

    def __init__(self, examples: int, micro: int) -> None:
        self.plan = WindowPlan(Plan.of(examples, BatchSizes(8, micro, 1, 1), 0, 1, -1))

    def __getitem__(self, step: int) -> Any:
        class Window:
            micro_batches = ({"pixel_values": torch.ones(2, 3, SIDE, SIDE)},)

        return Window


def test_micro_batch_of_one_image_before_a_batch_norm_of_single_pixels() -> None:
    from accumft.errors import UserError

    for examples, micro in ((9, 4), (16, 1)):  # a tail of one; all of one
        with pytest.raises(UserError, match=r"a micro-batch of one image.*--freeze_batch_norm True"):
            check_batches(Pooled(), Windows(examples, micro))
    model = Pooled()
    check_batches(model, Windows(16, 4))
    assert model.norm.num_batches_tracked == 0 and model.training
    freeze_batch_norm(model)
    check_batches(model, Windows(9, 4))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each of two processes found, and the run that they made together. One launch serves all tests."""
    folder = tmp_path_factory.mktemp("image")
    result = launch(Path(__file__).parent / "launched" / "launch_image.py", str(folder), timeout=280)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize("kind", ["vit", "efficientnet"])
def test_gradient_on_two_processes(two: Path, kind: str) -> None:
    expected, loss = reference_step(kind, batch_of(EFFECTIVE))
    start = flat(step_model(kind))
    for rank in range(2):
        found = torch.load(two / f"{rank}.pt", weights_only=False)
        assert len(TWO_PROCESS_CUTS) == 5
        for name in TWO_PROCESS_CUTS:
            case = found[f"{kind} {name}"]
            assert relative_error(start - case["weights"], start - expected) < 1e-10
            assert case["loss"] == pytest.approx(loss, rel=1e-10)


def test_a_run_on_two_processes_is_that_on_one(two: Path, tmp_path: Path) -> None:
    run(small_recipe(tmp_path / "one", per_device_train_batch_size=5, max_steps=4))
    one, both = rows_of(tmp_path / "one"), rows_of(two / "run")
    assert len(one) == len(both) == 4
    assert [row["loss"] for row in both] == pytest.approx([row["loss"] for row in one], rel=1e-5)
    found, expected = rows_of(two / "run", "eval_loss"), rows_of(tmp_path / "one", "eval_loss")
    assert [row["eval_loss"] for row in found] == pytest.approx([row["eval_loss"] for row in expected], rel=1e-5)
    assert (two / "run" / "predictions.jsonl").read_text().count("\n") == 32


def test_damaged_images_are_named_on_both_processes(two: Path) -> None:
    for rank in range(2):
        message = (two / f"broken.{rank}").read_text()
        assert "row 2: bar/1.png: a damaged image (" in message
        assert "(and 1 more images: row 5)" in message
