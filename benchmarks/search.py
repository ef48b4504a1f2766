"""The best micro-batch size of a kind of cut, by a short measurement: what throughput.py gives to its peers."""

import time
from typing import Any

from measuring import Job
from peers import Peer

SLOWER = 0.9  # a size at less than this share of the best so far ends the search


def search(job: Job) -> dict[str, Any]:
    """For each kind of cut the size with the most real tokens per second: {"found": {kind: {"best", "tried"}}}.

    Each size's micro-batches are a sample; the padding of a size is known for the whole data set. Sizes are tried from
    small to large, until one is clearly slower than the best; then those tried once more, and the faster time counts.
    """
    peer = Peer(job)
    model = peer.model.train()

    def seconds(batches: list[list[int]]) -> float:
        began = time.perf_counter()
        for rows in batches:
            model(**peer.collate([peer.dataset[row] for row in rows])).loss.backward()
        return time.perf_counter() - began

    found = {}
    for kind, sizes in (job.search or {}).items():
        seconds(sizes[0]["batches"][:2])

        def speed(size: dict[str, Any]) -> float:
            return size["padded_tokens"] / size["padding"] / seconds(size["batches"])

        tried: dict[int, float] = {}
        for size in sizes:
            tried[size["size"]] = speed(size)
            if tried[size["size"]] < SLOWER * max(tried.values()):
                break
        for size in sizes[: len(tried)]:
            tried[size["size"]] = max(tried[size["size"]], speed(size))
        found[kind] = {"best": max(tried, key=lambda size: tried[size]), "tried": tried}
    return {"found": found}
