"""Whether the loader keeps up: rows per second and memory from synthetic notes to collated micro-batches.

    python benchmarks/loader.py --rows 1000000

Each phase says its rows per second and the most memory that the process held while it lasted, above what it held
before the first (which is mostly PyTorch). Anonymous memory is what counts; pages that are mapped from the cache on
disk are the operating system's to drop, and are said beside it. "again" is what a second start takes. Linux only.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer

from accumft.cut import CostModel
from accumft.data.cache import FOLDER_VARIABLE
from accumft.data.splits import load_classification_data
from accumft.data.text import TextCollator, tokenize
from accumft.data.windows import WindowDataset, lengths_of
from accumft.plan import Plan, resolve_batch_sizes
from accumft.pretrained import resolve_model_path
from accumft.recipe import TableRecipe
from accumft.synthetic import load_synthetic
from accumft.window_plan import WindowPlan

ResultT = TypeVar("ResultT")
SAMPLED_EVERY = 0.01  # seconds


class Recipe(TableRecipe):
    """The fields that the splits want to know."""

    text_column = ("text",)
    label_column = ("label",)
    label_delimiter = None
    problem_type = None


class Meter:
    """Seconds and memory of phases."""

    def __init__(self) -> None:
        self.before = memory_now()
        self.phases: list[dict[str, Any]] = []

    def measure(self, name: str, rows: int, work: Callable[[], ResultT]) -> ResultT:
        """Does `work` on so many rows, prints and keeps what it took."""
        peak = {"anonymous": 0.0, "mapped": 0.0}
        over = threading.Event()

        def sample() -> None:
            while True:
                for kind, megabytes in memory_now().items():
                    peak[kind] = max(peak[kind], megabytes - self.before[kind])
                if over.wait(SAMPLED_EVERY):
                    return

        sampler = threading.Thread(target=sample)
        sampler.start()
        began = time.perf_counter()
        try:
            result = work()
        finally:
            seconds = time.perf_counter() - began
            over.set()
            sampler.join()
        phase = {
            "phase": name,
            "rows": rows,
            "seconds": round(seconds, 2),
            "rows_per_second": round(rows / seconds),
            "peak_anonymous_mb": round(peak["anonymous"]),
            "peak_mapped_mb": round(peak["mapped"]),
        }
        self.phases.append(phase)
        print(
            f"{name:<16} {rows:>9,} rows {seconds:>8.1f} s {phase['rows_per_second']:>10,} rows/s   peak "
            f"{phase['peak_anonymous_mb']:>6,} MB anonymous, {phase['peak_mapped_mb']:>6,} MB mapped",
            flush=True,
        )
        return result


def memory_now() -> dict[str, float]:
    """Resident memory of this process in MB: its own, and what it has mapped from files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    sizes = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Rss")}
    return {"anonymous": int(sizes["RssAnon"]) / 1024, "mapped": int(sizes["RssFile"]) / 1024}


def run(rows: int, steps: int, effective_batch: int, tokens: int, language: Any, model: str) -> list[dict[str, Any]]:
    """Every phase in turn; `steps` windows of an effective batch are collated."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(model))
    collate = TextCollator(tokenizer)
    meter = Meter()

    def make() -> Any:
        splits = load_synthetic(num_train=rows, num_validation=0, num_test=0, language=language)
        return {"train": splits["train"]}

    meter.measure("generate", rows, make)
    splits = meter.measure("generate, again", rows, make)
    # A tenth is held out of the training rows, so this is the harder case: their texts are looked up by row.
    data = meter.measure("split and label", rows, lambda: load_classification_data(splits, Recipe()))
    train = data.train

    def encode() -> Any:
        return tokenize(train, tokenizer, max_length=512, show_progress=True)

    meter.measure("tokenise", len(train), encode)
    tokenized = meter.measure("tokenise, again", len(train), encode)
    batch = resolve_batch_sizes(effective_batch, None, None, 1, tokens)
    plan = Plan.of(len(tokenized), batch, seed=42, num_train_epochs=1.0, max_steps=-1)

    def cut() -> WindowPlan:
        window_plan = WindowPlan(plan, lengths_of(tokenized), CostModel())
        table = window_plan.table()
        print(f"{'':<16} {table.padded_tokens.sum() / table.tokens.sum():.3f} tokens computed for each real one")
        return window_plan

    windows = WindowDataset(tokenized, meter.measure("plan", len(train), cut), collate)
    steps = min(steps, len(windows))

    def collate_windows() -> None:
        for step in range(steps):
            windows[step]

    meter.measure("collate", min(steps * effective_batch, len(train)), collate_windows)
    return meter.phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=500, help="windows to collate")
    parser.add_argument("--effective_batch_size", type=int, default=128)
    parser.add_argument("--max_tokens_per_micro_batch", type=int, default=1024)
    parser.add_argument("--language", choices=("en", "zh"), default="en")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="whose tokenizer")
    parser.add_argument("--cache", help="folder that stays; default: a temporary one")
    parser.add_argument("--output", type=Path, help="JSON file for the numbers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = given.cache or folder
        phases = run(
            given.rows,
            given.steps,
            given.effective_batch_size,
            given.max_tokens_per_micro_batch,
            given.language,
            given.model,
        )
    if given.output is not None:
        given.output.write_text(json.dumps(phases, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
