"""Real tokens per second of accumft and of others, side by side: one command.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --shapes notes --effective_batch_sizes 128 --processes 1 --repeats 1

Each measurement is a fresh process (or two), the peers take turns, and within a repeat all see the same data. The whole
matrix takes hours; one shape, effective batch and number of processes takes about 5 minutes a repeat on two cores.
"""

import argparse
import json
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from exactness_peers import fabric_module
from processes import WorkerError
from setting import MAX_LENGTH, Setting
from tables import plot, summary, table
from texts import SHAPES, read_texts

HERE = Path(__file__).resolve().parent
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PEERS = (
    "ceiling",
    "bare",
    "trainer",
    "trainer_tuned",
    "trainer_grouped",
    "accelerate",
    "fabric",
    "bare_on_accumft",
    "accumft_padded",
    "accumft",
)
TRAINER_DEFAULT = 8  # per_device_train_batch_size of transformers.TrainingArguments
MEASURED_TOKENS = 10_000  # real, for each measurement, where --steps does not say
# Which search decides a peer's size. Trainer at its defaults has one, and accumft cuts by itself.
KIND = {peer: "random" for peer in ("bare", "trainer_tuned", "accelerate", "fabric")}
KIND |= {"ceiling": "ceiling", "trainer_grouped": "grouped"}


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from accumft.pretrained import resolve_model_path

    return AutoTokenizer.from_pretrained(resolve_model_path(MODEL))


def make_setting(args: argparse.Namespace, shape: str, batch: int, processes: int, folder: str) -> tuple[Setting, str]:
    """A setting and where its data is from; the texts are written for the workers to read."""
    texts, labels, source = read_texts(SHAPES[shape], args.data_dir)
    encoded = tokenizer()(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    lengths = np.array([len(ids) for ids in encoded])
    path = Path(folder) / f"{shape}.jsonl"
    lines = [json.dumps({"text": text, "labels": label}) for text, label in zip(texts, labels, strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    steps = args.steps or max(1, round(MEASURED_TOKENS / (batch * lengths.mean())))
    name = tokenizer().name_or_path
    steps = min(steps, len(lengths) // batch)
    return Setting(
        shape,
        batch,
        processes,
        lengths,
        str(path),
        name,
        max(labels) + 1,
        steps,
        args.threads,
        args.max_tokens_per_micro_batch,
    ), source


def best_sizes(setting: Setting, peers: list[str], folder: str, known: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The best size for each kind of micro-batches that the peers take, searched for where it is not yet known."""
    keys = {}
    for kind in dict.fromkeys(KIND[peer] for peer in peers if peer in KIND):
        # Only group_by_length's micro-batches depend on the effective batch.
        batch = setting.effective_batch if kind == "grouped" else tuple(setting.sizes)
        keys[kind] = (setting.shape, kind, setting.processes, batch)
    missing = [kind for kind, key in keys.items() if key not in known]
    found = setting.search(folder, missing) if missing else {}
    known.update({keys[kind]: found[kind] for kind in missing})
    for kind in missing:
        rates = ", ".join(f"{size}: {rate:.0f}" for size, rate in found[kind]["tried"].items())
        print(f"  size of {kind} micro-batches: {found[kind]['best']} (tokens/s by size: {rates})", flush=True)
    return {kind: known[key]["best"] for kind, key in keys.items()}


def compare(
    setting: Setting, peers: list[str], repeats: int, folder: str, known: dict[Any, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Every measurement of a setting: the peers in turn, the other way round in every other repeat."""
    sizes = best_sizes(setting, peers, folder, known)
    measured = []
    for repeat in range(repeats):
        for peer in peers if repeat % 2 == 0 else peers[::-1]:
            size = TRAINER_DEFAULT if peer == "trainer" else sizes.get(KIND.get(peer, ""))
            started, ranks = setting.run(folder, peer, micro_batch=size, **setting.passes(peer, size, repeat))
            row = {"peer": peer, "repeat": repeat, "shape": setting.shape, "processes": setting.processes}
            row |= {"effective_batch": setting.effective_batch, "cut": ranks[0]["cut"]}
            measured.append(row | summary(started, ranks))
            print(f"  {peer}: {measured[-1]['tokens_per_second']:.0f} tokens/s", flush=True)
    return measured


def _budget(text: str) -> int | str:
    return text if text == "auto" else int(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="data sets")
    add("--effective_batch_sizes", nargs="+", type=int, default=[32, 128], help="examples of a step")
    add("--processes", nargs="+", type=int, default=[1, 2], help="numbers of processes; threads are shared out")
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="who takes part")
    add("--repeats", type=int, default=3, help="measurements of each, of which the median counts")
    add("--steps", type=int, help="measured steps, after a short warm-up; unset: about 10,000 tokens, 1 at least")
    add("--threads", type=int, default=2, help="threads over all processes")
    add("--max_tokens_per_micro_batch", type=_budget, help="accumft's token budget or auto; unset: its default")
    add("--data_dir", type=Path, help="folder of mts-dialog and medical-abstracts; unset: ../shared/data, where it is")
    add("--output", type=Path, default=HERE / "throughput.json", help="where every measurement is saved")
    add("--plot", action="store_true", help="draw the ratios into throughput.png beside it")
    args = parser.parse_args()
    if args.data_dir is not None and not args.data_dir.is_dir():
        parser.error(f"--data_dir {args.data_dir}: no such folder; left out, it is ../shared/data, or synthetic texts")
    for name in ("repeats", "steps", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1")
    for batch in args.effective_batch_sizes:
        for processes in args.processes:
            if batch < 1 or processes < 1 or batch % (TRAINER_DEFAULT * processes):
                parser.error(f"--effective_batch_sizes {batch}: not {TRAINER_DEFAULT} rows x {processes} process(es) "
                             "times a whole number, as Trainer has it; give a multiple")  # fmt: skip
    if args.data_dir is None:
        args.data_dir = HERE.parents[1] / "shared" / "data"
    return args


def main() -> None:
    args = parse()
    peers = [peer for peer in PEERS if peer in args.peers]
    if "fabric" in peers and fabric_module() is None:
        print("Lightning Fabric is not installed: skipped")
        peers.remove("fabric")
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    results: dict[str, Any] = {"versions": versions, "threads": args.threads, "measured": []}
    known: dict[Any, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            for batch in args.effective_batch_sizes:
                for processes in args.processes:
                    setting, source = make_setting(args, shape, batch, processes, folder)
                    print(f"{shape} ({source}), effective batch {batch}, {processes} process(es)", flush=True)
                    rows = compare(setting, peers, args.repeats, folder, known)
                    results["measured"] += rows
                    # After each, so that a run that is broken off leaves what it has.
                    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                    print(table(rows), flush=True)
    if args.plot:
        plot(results["measured"], args.output.with_suffix(".png"))


if __name__ == "__main__":
    try:
        main()
    except WorkerError as error:
        sys.exit(f"error: a worker failed:\n{error}")
