"""Processes that disagree (another recipe, other data, another version on one machine) stop before step 1."""

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

import accumft
from accumft.errors import UserError

ABSENT = "absent"


def versions() -> dict[str, str]:
    """Versions by name of what the numbers of a run depend on."""
    found = {"python": platform.python_version(), "accumft": accumft.__version__}
    for name in ("torch", "transformers", "accelerate", "tokenizers", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ABSENT
    return found


def check_agreement(accelerator: Accelerator, values: Mapping[str, Any]) -> None:
    """Compares what must be the same on every process. Each process calls it.

    Args:
        values: plain values (numbers, texts, tuples, None) by the name that a message gives them, such as "--seed".
            Compared by their `repr`, so NaN is NaN, and 1 is neither 1.0 nor True.

    Raises:
        UserError: on every process, the same line, if a value of one differs from that of process 0.
    """
    if accelerator.num_processes == 1:
        return
    everyone: list[dict[str, str]] = gather_object([{name: repr(value) for name, value in values.items()}])
    names = dict.fromkeys(name for each in everyone for name in each)  # another version may have another field
    differing = []
    for name in names:
        processes: dict[str, list[int]] = {}
        for process, each in enumerate(everyone):
            processes.setdefault(each.get(name, ABSENT), []).append(process)
        if len(processes) > 1:
            differing.append(f"{name} is {_listed(processes)}")
    if differing:
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise UserError(
            f"processes disagree: {'; '.join(differing[:3])}{more}; "
            "start all of them with the same command, the same data and the same versions"
        )


def _listed(processes: Mapping[str, list[int]]) -> str:
    """{"1": [0, 2], "2": [1]} → "1 on processes 0, 2 and 2 on process 1". Of long texts, the part that differs."""
    texts = list(processes)
    same = next((i for i, signs in enumerate(zip(*texts)) if len(set(signs)) > 1), min(map(len, texts)))
    start = max(0, same - 40)
    parts = []
    for text in texts[:3]:
        where = processes[text]
        before, after = "…" if start else "", "…" if len(text) > start + 100 else ""
        shown = text if len(text) <= 120 else f"{before}{text[start : start + 100]}{after}"
        ranks = ", ".join(map(str, where[:4])) + (f" and {len(where) - 4} more" if len(where) > 4 else "")
        parts.append(f"{shown} on process{'es' if len(where) > 1 else ''} {ranks}")
    return ", ".join(parts[:-1]) + " and " + parts[-1] + (" and others elsewhere" if len(texts) > 3 else "")
