"""One measurement of throughput.py in a fresh process: `worker.py JOB.json RESULT`. Writes RESULT.0.json, .1.json …

A peer trains twice here, each time on a fresh copy of the model with a fresh optimizer: first over a short warm-up
set, then over the measured rows. Only the second counts; the first gives the time from the start of the process to the
end of the first step.
"""

import copy
import gc
import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import Job, Meter


def peak_mib() -> float:
    """Peak resident memory of this process, libraries included, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    torch.set_num_threads(job.threads)
    if job.peer == "search":
        from search import search

        result: dict[str, Any] = search(job)
    else:
        result = run(job)
    result["job"] = {name: value for name, value in asdict(job).items() if isinstance(value, (int, float, str))}
    Path(f"{sys.argv[2]}.{job.rank}.json").write_text(json.dumps(result), encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def maker(peer: str) -> Callable[[Job], Any]:
    """The class of a peer; accumft's own are loaded for its own measurements only."""
    if "accumft" in peer:
        from accumft_peer import Accumft, BareOnAccumft

        return BareOnAccumft if peer == "bare_on_accumft" else Accumft
    import peers

    return {
        "ceiling": peers.Ceiling,
        "bare": peers.Bare,
        "trainer": peers.TransformersTrainer,
        "trainer_tuned": peers.TransformersTrainer,
        "trainer_grouped": peers.TrainerGrouped,
        "accelerate": peers.AccelerateExample,
        "fabric": peers.Fabric,
    }[peer]


def run(job: Job) -> dict[str, Any]:
    if job.world > 1:
        dist.init_process_group("gloo")
    peer = maker(job.peer)(job)
    meter = Meter()
    for part in (job.warmup, job.measured):
        model = copy.deepcopy(peer.model) if part is job.warmup else peer.model
        meter.watch(model)
        peer.train(model, part, meter)
        del model
        gc.collect()
    return {**meter.result(), "peak_mib": peak_mib(), "cut": peer.cut}


if __name__ == "__main__":
    main()
