"""How far each way of training is from the gradient of the effective batch: a table.

    python benchmarks/exactness.py

Under two minutes on two cores; no weights, no data, no network. Prints a markdown table and saves exactness.json.
"""

import argparse
import json
import tempfile
import warnings
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from exactness_cases import CASES
from exactness_peers import PEERS, fabric, fabric_module, measure
from processes import run_workers

HERE = Path(__file__).resolve().parent


def cell(found: dict[str, float] | None) -> str:
    """A relative error; with the factor of the gradient where that is what is wrong."""
    if found is None:
        return "not installed"
    error, scale = found["error"], found["scale"]
    if error < 1e-6:
        return f"{error:.0e}"
    return f"{error:.2f} (× {scale:.2f})" if abs(scale - 1.0) > 0.01 else f"{error:.2f}"


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a row a case, a column a peer."""
    lines = ["| effective batch, as it is cut | " + " | ".join(PEERS) + " |", "|---" * (len(PEERS) + 1) + "|"]
    for case in results:
        cells = [cell(case["found"].get(name)) for name in PEERS]
        lines.append(f"| {describe(case)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def describe(case: dict[str, Any]) -> str:
    """A case in words: "short tail: 22 in micro-batches of 4, 4 a step"."""
    cut = f"{case['examples']} in micro-batches of {case['micro_batch']}, {case['accumulation']} a step"
    return f"{case['name']}: {cut}" + (" and process" if case["processes"] > 1 else "")


def run_cases() -> list[dict[str, Any]]:
    """Every case: those of one process here, those of two in two fresh ones."""
    results = [{**asdict(case), "found": measure(case)} for case in CASES if case.processes == 1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        run_workers(HERE / "exactness_peers.py", [str(file)], num_processes=2, threads=1, timeout=300)
        return results + json.loads(file.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "exactness.json", help="where the numbers are saved")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if fabric_module() is None:
        print("Lightning Fabric is not installed: skipped")
        PEERS.pop(next(name for name, peer in PEERS.items() if peer is fabric))
    results = run_cases()
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    args.output.write_text(json.dumps({"versions": versions, "cases": results}, indent=2) + "\n", encoding="utf-8")
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    print(table(results))


if __name__ == "__main__":
    main()
