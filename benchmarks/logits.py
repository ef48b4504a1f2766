"""Peak memory and time of the cross entropy over a large vocabulary, in chunks and at once, forward and backward.

    python benchmarks/logits.py                                  # SmolLM2-135M's head: 576 x 49,152
    python benchmarks/logits.py --hidden_size 896 --vocab_size 151936 --targets 4096

The head alone, with the hidden states of `--targets` tokens given: what the decoder under it needs is the same in every
row. "at once" is what `transformers` does: logits of all tokens, in float32. Each case runs in a process of its own.
Linux only.
"""

import argparse
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accumft.tasks.causal import token_losses

CHUNKS = (None, 2048, 1024, 512, 256, 128)


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def once(head: nn.Module, states: torch.Tensor, targets: torch.Tensor, chunk: int | None) -> None:
    """Forward and backward."""
    if chunk is None:
        loss = nn.functional.cross_entropy(head(states).float(), targets, reduction="sum")
    else:
        loss = token_losses(head, states, targets, chunk).sum()
    loss.backward()  # type: ignore[no-untyped-call]


def measure(args: argparse.Namespace, chunk: int | None, results: Any) -> None:
    """Puts (bytes by which the process grew at most, seconds) into the queue."""
    torch.manual_seed(0)
    head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
    states = torch.randn(args.targets, args.hidden_size, requires_grad=True)
    targets = torch.randint(args.vocab_size, (args.targets,))
    # The gradients are there before, and all that is loaded at the first use.
    once(head, states[:8], targets[:8], 4)
    states.grad = torch.zeros_like(states)
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    before, start = status("VmRSS"), time.perf_counter()
    once(head, states, targets, chunk)
    results.put((status("VmHWM") - before, time.perf_counter() - start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=576)
    parser.add_argument("--vocab_size", type=int, default=49_152)
    parser.add_argument("--targets", type=int, default=2048, help="tokens that are predicted")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    # Freed memory goes back at once; else it counts as in use.
    os.environ |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    print("| tokens whose logits are there at a time | peak, MiB | of at once | seconds |\n|---|---|---|---|")
    whole = 0
    for chunk in CHUNKS:
        if chunk is not None and chunk > args.targets:
            continue
        results = context.SimpleQueue()
        process = context.Process(target=measure, args=(args, chunk, results))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"the measurement ended with {process.exitcode}: is there memory for it?")
        peak, seconds = results.get()
        whole = whole or peak
        name = f"all {args.targets:,}, at once" if chunk is None else f"{chunk:,}"
        print(f"| {name} | {peak / 2**20:,.0f} | {peak / whole:.2f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
