"""What a worker of throughput.py is told, and how it measures."""

import os
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook


@dataclass(frozen=True)
class Job:
    """What a worker is to do; throughput.py writes it."""

    peer: str
    texts: str
    """jsonl of {"text", "labels"}, the whole data set."""
    model: str
    num_labels: int
    max_length: int
    threads: int
    """Threads of each process."""
    effective_batch: int
    warmup: dict[str, Any]
    """What the peer trains on first: "rows", or "windows" for each process."""
    measured: dict[str, Any]
    micro_batch: int | None = None
    """Rows of a micro-batch, for the peers that take a number of rows."""
    max_tokens_per_micro_batch: int | Literal["auto"] | None = None
    """accumft's: padded tokens, or "auto"; None: its default."""
    learning_rate: float = 5e-5
    max_grad_norm: float = 1.0
    search: dict[str, Any] | None = None
    """Of the peer "search": for each kind of cut, its sizes with their micro-batches."""

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def world(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))


class Meter:
    """Times a pass and what of it is forward and backward, and counts its tokens, whoever runs the loop."""

    def __init__(self) -> None:
        self.first_step_at: float | None = None
        self._reset()
        self._original_backward = torch.autograd.backward
        torch.autograd.backward = self._backward
        register_optimizer_step_post_hook(self._stepped)

    def _reset(self) -> None:
        self.wall = self.forward = self.backward = 0.0
        self.tokens = self.padded_tokens = self.examples = self.micro_batches = self.steps = 0
        self._forward_began = 0.0

    def watch(self, model: torch.nn.Module) -> None:
        """Hooks of the bare model; whatever wraps it later calls it."""
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def start(self) -> None:
        """Begins a pass, on all processes together."""
        self._reset()
        if dist.is_initialized():
            dist.barrier()
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Ends the pass."""
        self.wall = time.perf_counter() - self._began

    def _before(self, module: Any, args: Any, kwargs: dict[str, torch.Tensor]) -> None:
        self._forward_began = time.perf_counter()
        packing = kwargs.get("packing")
        mask = kwargs["attention_mask"] if packing is None else packing.mask
        self.tokens += int(mask.sum())
        self.padded_tokens += mask.numel()
        self.examples += len(mask) if packing is None else len(packing.first)
        self.micro_batches += 1

    def _after(self, *_: Any) -> None:
        self.forward += time.perf_counter() - self._forward_began

    def _backward(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = self._original_backward(*args, **kwargs)
        self.backward += time.perf_counter() - began
        return result

    def _stepped(self, *_: Any) -> None:
        self.steps += 1
        if self.first_step_at is None:
            self.first_step_at = time.time()

    def result(self) -> dict[str, Any]:
        """The last pass."""
        names = ("wall", "forward", "backward", "tokens", "padded_tokens", "examples", "micro_batches", "steps")
        return {**{name: getattr(self, name) for name in names}, "first_step_at": self.first_step_at}
