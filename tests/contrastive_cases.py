"""Pairs of token ids with hard negatives and false ones, and the losses of a whole effective batch in plain PyTorch."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from tasks import TOKENS, USED, TinyModel, flat, inputs
from torch import nn

from accumft.cached_step import cached_step
from accumft.data.windows import Window
from accumft.step import StepResult
from accumft.tasks.contrastive import Contrast

WIDTH = 3
DIMENSIONS = 6
PAIRS = 16
LOSSES: dict[str, dict[str, Any]] = {
    "infonce": {"name": "infonce"},
    "one direction": {"name": "infonce", "symmetric": False, "temperature": 0.3},
    "triplet": {"name": "triplet", "margin": 0.7},
    "cosine": {"name": "cosine"},
}
ONE_PROCESS_CUTS: dict[str, list[list[int]]] = {
    "16x1": [[16]],
    "8x2": [[8, 8]],
    "1x16": [[1] * 16],
    "5+5+6": [[5, 5, 6]],
    "7+8+1": [[7, 8, 1]],
}
TWO_PROCESS_CUTS: dict[str, list[list[int]]] = {
    "2 x (8x1)": [[8], [8]],
    "3+5 / 5+3": [[3, 5], [5, 3]],
    "3 / 5+5+3": [[3], [5, 5, 3]],
    "1 / 15": [[1], [1] * 15],
}


def make_pairs(n: int = PAIRS, seed: int = 0) -> dict[str, torch.Tensor]:
    """n examples of up to three texts, flattened: input_ids, attention_mask, labels; and keys, scores by example.

    Of 16: the 3rd example has the positive of the 0th, the 5th the anchor of the 1st, the 7th's negative is the 2nd's
    positive, the 9th's negative its own positive, and the 11th's positive is the 4th's anchor.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, TOKENS + 1, (n, WIDTH), generator=generator)
    ids = torch.randint(1, USED, (n, WIDTH, TOKENS), generator=generator)
    ids[torch.arange(TOKENS) >= lengths[..., None]] = 0
    for (example, position), (source, of) in {
        (3, 1): (0, 1),
        (5, 0): (1, 0),
        (7, 2): (2, 1),
        (9, 2): (9, 1),
        (11, 1): (4, 0),
    }.items():
        if n > example:
            ids[example, position], lengths[example, position] = ids[source, of], lengths[source, of]
    there = torch.ones(n, WIDTH, dtype=torch.bool)
    there[:, 2] = (torch.arange(n) % 4 != 1) | (torch.arange(n) == 9)  # not every example has a negative
    number: dict[tuple[int, ...], int] = {}
    keys = torch.tensor([[number.setdefault(tuple(text), len(number)) for text in row] for row in ids.tolist()])
    keys[~there] = -1
    labels = torch.arange(n * WIDTH).view(n, WIDTH)
    return {
        "input_ids": ids[there],
        "attention_mask": (torch.arange(TOKENS) < lengths[..., None])[there].long(),
        "labels": labels[there],
        "keys": keys,
        "scores": torch.rand(n, generator=generator, dtype=torch.float64) * 2 - 1,
    }


def contrast_of(data: dict[str, torch.Tensor], loss: str) -> Contrast:
    return Contrast(keys=data["keys"], scores=data["scores"], **LOSSES[loss])


def make_encoder(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> TinyModel:
    torch.manual_seed(1)
    model = TinyModel(DIMENSIONS).to(dtype)
    if dropout:
        model.norm = nn.Sequential(model.norm, nn.Dropout(dropout))
    return model


def embed(model: Any, batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(**inputs(batch))
    return found


def texts_of(data: dict[str, torch.Tensor], examples: list[int]) -> dict[str, torch.Tensor]:
    """The batch of all texts of some examples, as they come."""
    rows = torch.cat([(data["labels"] // WIDTH == example).nonzero().flatten() for example in examples])
    return {name: data[name][rows] for name in ("input_ids", "attention_mask", "labels")}


def window_of(data: dict[str, torch.Tensor], sizes: list[int], first: int = 0, **fields: Any) -> Window:
    """A window of consecutive examples of an order that mixes them, cut as `sizes` says."""
    order = torch.randperm(len(data["keys"]), generator=torch.Generator().manual_seed(7)).tolist()
    pieces = [piece.tolist() for piece in torch.tensor(order[first : first + sum(sizes)]).split(sizes)]
    batches = [texts_of(data, piece) for piece in pieces]
    rows = [[int(label) // WIDTH for label in batch["labels"]] for batch in batches]
    return Window(batches, rows=rows, **fields)


def plain_loss(embeddings: torch.Tensor, data: dict[str, torch.Tensor], loss: str) -> torch.Tensor:
    """The mean loss of a whole effective batch: loops over pairs, no code of the package.

    Args:
        embeddings: of the texts in the order of data["labels"].
    """
    place = {int(label): row for row, label in enumerate(data["labels"])}
    unit = embeddings / embeddings.norm(dim=1, keepdim=True)
    fields = {"temperature": 0.05, "symmetric": True, "margin": 0.2, **LOSSES[loss]}
    keys, n = data["keys"].tolist(), len(data["keys"])
    vector = [[unit[place[i * WIDTH + t]] if i * WIDTH + t in place else None for t in range(WIDTH)] for i in range(n)]
    if fields["name"] == "cosine":
        terms = [(vector[i][0] @ vector[i][1] - data["scores"][i].to(unit)) ** 2 for i in range(n)]
        return torch.stack(terms).mean()
    if fields["name"] == "triplet":
        terms = [
            (vector[i][0] @ vector[i][2] - vector[i][0] @ vector[i][1] + fields["margin"]).clamp(min=0)
            for i in range(n)
            if vector[i][2] is not None and keys[i][2] not in keys[i][:2]
        ]
        return torch.stack(terms).mean()
    terms = []
    for i in range(n):
        anchor, positive = keys[i][:2]
        forward = [vector[i][0] @ vector[i][1]]
        backward = [vector[i][0] @ vector[i][1]]
        for j in range(n):
            if j != i and keys[j][0] != anchor and keys[j][1] not in (anchor, positive):
                forward.append(vector[i][0] @ vector[j][1])
            if j != i and keys[j][0] not in (anchor, positive) and keys[j][1] != positive:
                backward.append(vector[j][0] @ vector[i][1])
            if vector[j][2] is not None and keys[j][2] not in (anchor, positive):
                forward.append(vector[i][0] @ vector[j][2])
        for candidates in (forward, backward) if fields["symmetric"] else (forward,):
            scores = torch.stack(candidates) / fields["temperature"]
            terms.append(torch.logsumexp(scores, 0) - scores[0])
    return torch.stack(terms).mean()


def reference_step(data: dict[str, torch.Tensor], loss: str, lr: float = 1.0) -> tuple[torch.Tensor, float]:
    """One SGD step of the float64 model on the whole batch in one forward: (weights, loss)."""
    model = make_encoder()
    value = plain_loss(embed(model, data), data, loss)
    value.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= lr * (0 if parameter.grad is None else parameter.grad)
    return flat(model), float(value.detach())


def cached_on_cut(
    accelerator: Accelerator, data: dict[str, torch.Tensor], loss: str, cut: list[list[int]], lr: float = 1.0
) -> tuple[torch.Tensor, StepResult]:
    """The package's step on the same: (weights, result)."""
    model = make_encoder()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    sizes = cut[accelerator.process_index]
    window = window_of(data, sizes, sum(map(sum, cut[: accelerator.process_index])))
    contrast = contrast_of(data, loss)
    result = cached_step(accelerator, model, optimizer, window, embed, contrast.loss_sum, contrast.num_items)
    return flat(accelerator.unwrap_model(model)), result


def out_of_memory_at(number: int) -> Any:
    """`embed` whose call of that number, from 0, runs out of memory."""
    calls = iter(range(10**6))

    def failing(model: Any, batch: Any) -> torch.Tensor:
        if next(calls) == number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return embed(model, batch)

    return failing


def nan_in(number: int) -> Any:
    """`embed` that makes NaN of the text of that label."""

    def poisoned(model: Any, batch: Any) -> torch.Tensor:
        return embed(model, batch).masked_fill((batch["labels"] == number)[:, None], math.nan)

    return poisoned
