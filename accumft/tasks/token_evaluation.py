"""Evaluation of token tasks: every labelled piece exactly once, in data set order, on any number of processes."""

from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import pad_across_processes, send_to_device

from accumft.cut import Limits
from accumft.data.tokens import IGNORED
from accumft.data.windows import Batch, Collate, lengths_of
from accumft.errors import NonFiniteLossError
from accumft.evaluation import batches_by_length, fitting, inputs_of


@torch.no_grad()
def predict_tokens(
    accelerator: Accelerator, model: torch.nn.Module, dataset: Any, collate: Collate, limits: Limits
) -> torch.Tensor:
    """The model's logits for every labelled piece of `dataset`, on every process.

    Args:
        model: prepared, with `config.num_labels`. It is left in evaluation mode.
        dataset: windows with "labels", see `accumft.data.tokens`.
        limits: of one forward on one process; the result does not depend on them.

    Returns:
        (labelled pieces, labels) float32 on the CPU: those of window 0 from left to right, then those of window 1, …

    Raises:
        NonFiniteLossError: an output is not finite, on every process.
        NotEnoughMemoryError: a single row does not fit.
    """
    # Not the DDP wrapper: its forward communicates, and processes may have different numbers of batches.
    bare = accelerator.unwrap_model(model)
    bare.eval()
    counts = np.array([sum(label != IGNORED for label in row) for row in dataset["labels"]], np.int64)
    first = np.concatenate([[0], np.cumsum(counts)])
    device = accelerator.device
    # A piece of number -1, dropped below, gives the gather its shape where a process has nothing.
    places, outputs = [torch.full((1,), -1)], [torch.zeros(1, bare.config.num_labels, device=device)]
    lengths = lengths_of(dataset)

    def logits_of_labelled(part: Batch) -> torch.Tensor:
        logits: torch.Tensor = bare(**inputs_of(part)).logits
        return logits[part["labels"] != IGNORED].float()

    for rows in batches_by_length(lengths, accelerator.num_processes, accelerator.process_index, limits):
        batch = collate(dataset[rows.tolist()])
        outputs += fitting(logits_of_labelled, send_to_device(batch, device))
        places += [torch.arange(first[row], first[row + 1]) for row in rows]
    place, output = torch.cat(places).to(device), torch.cat(outputs)
    if accelerator.num_processes > 1:
        place = accelerator.gather(pad_across_processes(place, pad_index=-1))
        output = accelerator.gather(pad_across_processes(output))
    kept = place >= 0
    place, output = place[kept].cpu(), output[kept].cpu()
    output = output[torch.argsort(place)]
    bad = int((~torch.isfinite(output).all(dim=1)).sum())
    if bad:
        raise NonFiniteLossError(
            f"evaluation: the model's output is not finite for {bad} of {len(output)} tokens: the training has "
            "diverged; lower the learning rate"
        )
    return output
