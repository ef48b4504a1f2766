"""The true logic of fp16 training without a GPU: autocast to float16 and a live loss scaler, both on the CPU."""

from typing import Any

import torch
from accelerate import Accelerator


class Fp16CpuAccelerator(Accelerator):
    """An Accelerator that, asked for fp16 on the CPU, does it, where Accelerate silently leaves it out.

    Args:
        init_scale: first loss scale. At 2**24 the float16 gradients of any ordinary loss really overflow.
        growth_interval: good steps in a row after which the scale doubles.

    The other arguments are Accelerator's.
    """

    def __init__(self, *args: Any, init_scale: float = 2.0**24, growth_interval: int = 2000, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mixed_precision == "fp16" and self.device.type == "cpu":
            self.native_amp = True
            self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
