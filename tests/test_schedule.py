"""The learning rate: value tables of every schedule, and that no update is wasted."""

import math

import pytest
import torch

from accumft.errors import UserError
from accumft.recipe import TrainingRecipe, checked
from accumft.schedule import build_schedule, build_scheduler

NAMES = [
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]

# Total 8, warm-up 3: (1/3, 2/3, 1), then the decay at 1/6 … 5/6.
TABLES = {
    "cosine": [1 / 3, 2 / 3, 1, *(0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(1, 6))],
    "linear": [1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6],
    "constant_with_warmup": [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1],
    "polynomial": [1 / 3, 2 / 3, 1, 25 / 36, 16 / 36, 9 / 36, 4 / 36, 1 / 36],
    "inverse_sqrt": [1 / 3, 2 / 3, 1, *(math.sqrt(3 / (3 + k)) for k in range(1, 6))],
    "warmup_stable_decay": [1 / 3, 2 / 3, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4],
}
EXTRA = {"polynomial": {"lr_power": 2.0}, "warmup_stable_decay": {"lr_decay_ratio": 3 / 8}}


def factors(total: int, **fields: object) -> list[float]:
    schedule = build_schedule(checked(TrainingRecipe(**fields)), total)
    return [schedule(step) for step in range(total)]


@pytest.mark.parametrize("name", TABLES)
def test_values(name: str) -> None:
    found = factors(8, lr_scheduler_type=name, warmup_steps=3, **EXTRA.get(name, {}))
    assert found == pytest.approx(TABLES[name], abs=1e-12)


@pytest.mark.parametrize("name", ["cosine", "linear", "polynomial"])
def test_min_lr_ratio_is_what_progress_one_reaches(name: str) -> None:
    plain = factors(8, lr_scheduler_type=name, warmup_steps=3)
    found = factors(8, lr_scheduler_type=name, warmup_steps=3, min_lr_ratio=0.2)
    assert found[:3] == pytest.approx(plain[:3])
    assert found[3:] == pytest.approx([0.2 + 0.8 * value for value in plain[3:]])
    schedule = build_schedule(TrainingRecipe(lr_scheduler_type=name, warmup_steps=3, min_lr_ratio=0.2), 8)
    assert schedule(8) == pytest.approx(0.2)


def test_min_lr_ratio_of_the_others() -> None:
    wsd = factors(8, lr_scheduler_type="warmup_stable_decay", warmup_steps=3, min_lr_ratio=0.2, lr_decay_ratio=0.375)
    assert wsd == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 0.8, 0.6, 0.4])
    assert min(factors(400, lr_scheduler_type="inverse_sqrt", warmup_steps=1, min_lr_ratio=0.3)) == 0.3


def test_without_warmup() -> None:
    assert factors(3, lr_scheduler_type="linear", warmup_steps=0) == pytest.approx([0.75, 0.5, 0.25])
    assert factors(3, lr_scheduler_type="constant") == [1, 1, 1]
    assert factors(2, lr_scheduler_type="inverse_sqrt", warmup_ratio=0.0) == pytest.approx(
        [math.sqrt(1e4 / (1e4 + k)) for k in (1, 2)]
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("total", [2, 3, 10, 101])
@pytest.mark.parametrize("warmup", [0, 1])
def test_no_update_is_wasted_and_the_peak_is_kept(name: str, total: int, warmup: int) -> None:
    warmup = 0 if name == "constant" else warmup
    found = factors(total, lr_scheduler_type=name, warmup_steps=warmup)
    assert all(0 < value <= 1 for value in found)
    assert max(found) == 1 or not warmup


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (2, 1), (10, 1), (11, 2), (100, 10)])
def test_a_tenth_warms_up_by_default_but_never_all(total: int, warmup: int) -> None:
    assert build_schedule(TrainingRecipe(), total).warmup_steps == warmup
    assert build_schedule(TrainingRecipe(lr_scheduler_type="constant"), total).warmup_steps == 0


@pytest.mark.parametrize(("ratio", "total", "warmup"), [(0.1, 10, 1), (0.1, 11, 2), (0.3, 10, 3), (0.06, 1000, 60)])
def test_warmup_ratio_is_rounded_up(ratio: float, total: int, warmup: int) -> None:
    assert build_schedule(TrainingRecipe(warmup_ratio=ratio), total).warmup_steps == warmup


@pytest.mark.parametrize(
    ("fields", "total", "message"),
    [
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, 10, "both set"),
        ({"warmup_steps": 10}, 10, "--warmup_steps 10 leaves nothing of the 10 optimizer steps"),
        ({"warmup_ratio": 0.95}, 10, "--warmup_ratio 0.95 of 10 steps is 10, which leaves nothing"),
        ({"warmup_ratio": 1.5}, 10, "--warmup_ratio 1.5: must be between 0 and 1"),
        ({"warmup_steps": -1}, 10, "--warmup_steps -1: must be at least 0"),
        ({"min_lr_ratio": 2.0}, 10, "--min_lr_ratio 2.0"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 1}, 10, "constant_with_warmup"),
        ({"lr_scheduler_type": "constant", "min_lr_ratio": 0.1}, 10, "does not decay"),
        ({"lr_power": 2.0}, 10, "--lr_power 2.0: has no effect with --lr_scheduler_type cosine"),
        ({"lr_decay_ratio": 0.2}, 10, "--lr_decay_ratio 0.2: has no effect"),
        ({"lr_scheduler_type": "cosin"}, 10, "did you mean 'cosine'"),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 6, "lr_decay_ratio": 0.5},
            10,
            r"warm-up 6 \+ decay 5 steps exceed the 10",
        ),
    ],
)
def test_contradictions(fields: dict, total: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        factors(total, **fields)


def test_scheduler_follows_the_schedule() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = build_schedule(TrainingRecipe(warmup_steps=3), 8)
    scheduler = build_scheduler(optimizer, schedule)
    used = []
    for _ in range(8):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert used == pytest.approx([0.5 * value for value in TABLES["cosine"]])
