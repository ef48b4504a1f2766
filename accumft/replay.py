"""Random generators and buffers put back, so that a window, or one micro-batch, runs again as it ran before."""

import random
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed


class RandomState:
    """The state of Python's, NumPy's and torch's generators when this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
        self.states: tuple[Any, Any, torch.Tensor, Any] = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            of_device,
        )

    def restore(self) -> None:
        """Puts them back to it."""
        python, numpy, cpu, of_device = self.states
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if of_device is not None:
            torch.get_device_module(self.device).set_rng_state(of_device)


class Start:
    """The state of buffers and random generators before a window, to begin it again from."""

    def __init__(self, model: torch.nn.Module, device: torch.device, seed: int | None) -> None:
        self.seed = seed
        self.buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self.attempts = 0
        self.random = RandomState(device) if seed is None else None

    def restore(self) -> None:
        """Before each attempt, the first one too."""
        if self.seed is not None:
            set_seed(self.seed)
        self.attempts += 1
        if self.attempts == 1:
            return
        self.restore_buffers()
        if self.random is not None:
            self.random.restore()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Such as BatchNorm's statistics, which a forward changes."""
        for buffer, value in self.buffers:
            buffer.copy_(value)
