# ruff: noqa: E402
"""The benchmarks: what they measure on, how they sum up, and that the exactness of the table is what it says."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from cuts import into_windows, of_rows, pad_free, padding, representative, thinned
from exactness import cell
from exactness_cases import CASES
from exactness_peers import measure
from tables import plot, ratio, summary, table
from texts import SHAPES, read_texts

LENGTHS = np.random.Generator(np.random.PCG64(0)).geometric(0.02, 500).clip(3, 512)


def test_pad_free_micro_batches_hold_every_row_once_within_the_budget() -> None:
    batches = pad_free(LENGTHS, 512)
    assert sorted(row for rows in batches for row in rows) == list(range(500))
    assert all(len(rows) * LENGTHS[rows].max() <= 512 for rows in batches)
    random = of_rows(list(range(500)), 8)
    assert [len(rows) for rows in random] == [8] * 62 + [4]
    assert 1.0 <= padding(LENGTHS, batches) < 1.05 < 2.0 < padding(LENGTHS, random)


def test_padding_is_counted_by_hand() -> None:
    assert padding(np.array([2, 4, 6]), [[0, 1], [2]]) == pytest.approx((2 * 4 + 6) / 12)


def test_thinned_micro_batches_keep_the_spread_of_lengths() -> None:
    batches = pad_free(LENGTHS, 256)
    few = thinned(batches, 12)
    assert len(few) == 12
    means = [np.mean([LENGTHS[rows].mean() for rows in part]) for part in (few, batches)]
    assert means[0] == pytest.approx(means[1], rel=0.1)
    assert thinned(batches, 10**6) == batches


def test_measured_rows_are_like_the_data_set() -> None:
    rows = representative(LENGTHS, 32, seed=1)
    assert len(set(rows)) == 32 and rows == representative(LENGTHS, 32, seed=1) != representative(LENGTHS, 32, seed=2)
    assert LENGTHS[rows].mean() == pytest.approx(LENGTHS.mean(), rel=0.15)
    assert rows != sorted(rows, key=lambda row: LENGTHS[row])


def test_windows_deal_every_micro_batch_once() -> None:
    batches = of_rows(list(range(70)), 4)
    shares = into_windows(batches, steps=3, processes=2, seed=0)
    assert [[len(window) for window in share] for share in shares] == [[3, 3, 3], [3, 3, 3]]
    assert sorted(rows for share in shares for window in share for rows in window) == batches


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_synthetic_texts_are_longer_where_they_should_be(shape: Any) -> None:
    texts, labels, source = read_texts(shape, None)
    assert len(texts) == len(labels) == 1200 and set(labels) == set(range(8))
    assert source.startswith("synthetic")
    words = np.mean([len(text.split()) for text in texts])
    assert words == pytest.approx(43 * shape.notes, rel=0.1)


def measured(peer: str, repeat: int, speed: float) -> dict[str, Any]:
    rank = {"wall": 10.0, "forward": 3.0, "backward": 6.0, "padded_tokens": 20 * speed, "tokens": 10 * speed}
    rank |= {"examples": 8, "micro_batches": 2, "steps": 1, "first_step_at": 107.5, "peak_mib": 500.0}
    setting = {"shape": "notes", "effective_batch": 8, "processes": 1, "cut": "8 rows"}
    return {"peer": peer, "repeat": repeat, **setting, **summary(100.0, [rank])}


def test_summary_takes_the_slowest_process() -> None:
    rank = {"wall": 4.0, "forward": 1.0, "backward": 2.0, "tokens": 30, "padded_tokens": 45, "examples": 3}
    rank |= {"micro_batches": 2, "steps": 1, "first_step_at": 12.0, "peak_mib": 100.0}
    found = summary(10.0, [rank, {**rank, "wall": 5.0, "first_step_at": 13.0, "peak_mib": 90.0}])
    assert found["tokens_per_second"] == 12.0 and found["padded_over_real"] == 1.5
    assert found["outside_seconds"] == 2.0 and found["first_step_seconds"] == 3.0 and found["peak_mib"] == 100.0


def test_ratios_are_medians_of_the_same_repeat(tmp_path: Path) -> None:
    speeds = {
        "ceiling": [100, 50, 100],
        "trainer": [25, 10, 20],
        "accumft": [98, 48, 10],
        "bare_on_accumft": [99, 48, 9],
    }
    rows = [measured(peer, i, speed) for peer, values in speeds.items() for i, speed in enumerate(values)]
    assert ratio(rows, "accumft", "ceiling") == pytest.approx(0.96)
    assert ratio(rows, "accumft", "trainer") == pytest.approx(3.92)
    assert ratio(rows, "fabric", "trainer") is None
    lines = table(rows).splitlines()
    assert "| accumft | 8 rows | 48 | 0.960 | 3.92 | 2.00 | 10.0 | 500 | 7.5 |" in lines
    assert lines[-1].endswith("+0.0 % time")
    plot(rows, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("case", [case for case in CASES if case.processes == 1], ids=lambda case: case.name)
def test_accumft_is_exact_and_others_leak(case: Any) -> None:
    found = measure(case)
    assert found["accumft"]["error"] < 1e-12
    factor = 4.0 if case.name == "even cut" else None
    trainer = found["Trainer"]
    assert trainer["error"] > 1.0 and (factor is None or trainer["scale"] == pytest.approx(factor))
    for name in ("Trainer, accepts_loss_kwargs=False", "Accelerate's example loop", "bare loop"):
        error = found[name]["error"]
        assert error < 1e-12 if case.name == "even cut" else error > 1e-2, name


def test_cells_of_the_exactness_table() -> None:
    assert cell({"error": 3.0, "scale": 4.0}) == "3.00 (× 4.00)"
    assert cell({"error": 9e-16, "scale": 1.0}) == "9e-16"
    assert cell({"error": 0.19, "scale": 1.0}) == "0.19"
    assert cell(None) == "not installed"
