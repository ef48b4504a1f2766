"""One setting of throughput.py: a data set at an effective batch and a number of processes, and what is run at it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cuts import into_windows, of_rows, pad_free, padding, representative, thinned
from processes import run_workers

HERE = Path(__file__).resolve().parent
MAX_LENGTH = 512
SIZES = (4, 8, 16, 32)
BUDGETS = (256, 512, 1024, 2048)
SEARCH_TOKENS = 2_000  # padded, for each size tried
WARMUP_ROWS = 16


@dataclass(frozen=True)
class Setting:
    """A data set, its tokens counted, and the batch and processes that peers are compared at."""

    shape: str
    effective_batch: int
    processes: int
    lengths: np.ndarray
    texts: str
    model: str
    num_labels: int
    steps: int
    threads: int
    max_tokens: int | str | None = None
    """accumft's token budget."""

    @property
    def sizes(self) -> list[int]:
        """Micro-batch sizes that divide a process's share of the effective batch."""
        share = self.effective_batch // self.processes
        return [size for size in SIZES if share % size == 0]

    def run(self, folder: str, peer: str, **fields: Any) -> tuple[float, list[dict[str, Any]]]:
        """(when it was started, what each process found) of one fresh measurement."""
        processes = 1 if peer == "search" else self.processes
        job = {
            "peer": peer,
            "texts": self.texts,
            "model": self.model,
            "num_labels": self.num_labels,
            "max_length": MAX_LENGTH,
            "threads": max(1, self.threads // self.processes),
            "effective_batch": self.effective_batch,
            "max_tokens_per_micro_batch": self.max_tokens,
        }
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job | fields), encoding="utf-8")
        result = str(Path(folder) / "result")
        started = run_workers(HERE / "worker.py", [str(file), result], processes, job["threads"])
        return started, [json.loads(Path(f"{result}.{rank}.json").read_text("utf-8")) for rank in range(processes)]

    def grouped(self, size: int, seed: int) -> list[list[int]]:
        """Micro-batches of an epoch in the order of Trainer's own sampler for group_by_length; a short last one left
        out."""
        import torch
        from transformers.trainer_pt_utils import LengthGroupedSampler

        generator = torch.Generator().manual_seed(seed)
        per_process = self.effective_batch // self.processes
        sampler = LengthGroupedSampler(per_process, lengths=self.lengths.tolist(), generator=generator)
        return [rows for rows in of_rows(list(sampler), size) if len(rows) == size]

    def cuts(self, kind: str, size: int, seed: int) -> list[list[int]]:
        """An epoch in the micro-batches of a kind."""
        if kind == "ceiling":
            return pad_free(self.lengths, size)
        if kind == "grouped":
            return self.grouped(size, seed)
        return of_rows(np.random.Generator(np.random.PCG64(seed)).permutation(len(self.lengths)).tolist(), size)

    def search(self, folder: str, kinds: list[str]) -> dict[str, dict[str, Any]]:
        """The best size of each kind of cut, by a short measurement."""
        todo: dict[str, list[dict[str, Any]]] = {}
        for kind in kinds:
            todo[kind] = []
            for size in BUDGETS if kind == "ceiling" else self.sizes:
                batches = sorted(self.cuts(kind, size, 0), key=lambda rows: -len(rows) * self.lengths[rows].max())
                mean = sum(len(rows) * int(self.lengths[rows].max()) for rows in batches) / len(batches)
                sample = thinned(batches, max(2, round(SEARCH_TOKENS / mean)))
                padded = sum(len(rows) * int(self.lengths[rows].max()) for rows in sample)
                ratio = padding(self.lengths, batches)
                todo[kind].append({"size": size, "batches": sample, "padded_tokens": padded, "padding": ratio})
        found: dict[str, dict[str, Any]] = self.run(folder, "search", warmup={}, measured={}, search=todo)[1][0][
            "found"
        ]
        return found

    def passes(self, peer: str, size: int | None, seed: int) -> dict[str, dict[str, Any]]:
        """{"warmup", "measured"} of a peer. All get the same rows, in random order; the ceiling and group_by_length,
        which choose theirs from the whole data set, as many in the same spread of lengths."""
        number = self.steps * self.effective_batch
        rows = {"warmup": representative(self.lengths, WARMUP_ROWS, seed + 1000)}
        rows["measured"] = representative(self.lengths, number, seed)
        if peer == "trainer_grouped":
            batches = thinned(self.grouped(size, seed), number // size)
            rows["measured"] = [row for batch in batches for row in batch]
        if peer != "ceiling":
            return {name: {"rows": list_} for name, list_ in rows.items()}
        batches = pad_free(self.lengths, size)
        wanted = max(self.steps * self.processes, round(number / len(self.lengths) * len(batches)))
        few = thinned(batches, 2 * self.processes)
        return {
            "warmup": {"windows": into_windows(few, 1, self.processes, seed)},
            "measured": {"windows": into_windows(thinned(batches, wanted), self.steps, self.processes, seed)},
        }
