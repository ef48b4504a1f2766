"""Started by the tests on two processes: an epoch of packed windows, an evaluation and answers of a small decoder."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "recipes")]

from causal_cases import EXAMPLES, encoder, model_of, rows_of_tokens  # noqa: E402
from causal_lm import loss_sum, num_items  # noqa: E402

from accumft.cut import Limits  # noqa: E402
from accumft.data.windows import WindowDataset  # noqa: E402
from accumft.launch import make_accelerator, prepare  # noqa: E402
from accumft.plan import Plan, resolve_batch_sizes  # noqa: E402
from accumft.step import train_step  # noqa: E402
from accumft.tasks.causal import CausalLoss, row_sums  # noqa: E402
from accumft.tasks.causal_generation import generate  # noqa: E402
from accumft.tasks.causal_model import build_small_llama  # noqa: E402
from accumft.tasks.causal_packing import PaddedTargets, pack_causal  # noqa: E402
from accumft.window_plan import WindowPlan  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    accelerator = make_accelerator()
    assert accelerator.num_processes == 2
    data, model = rows_of_tokens(21), model_of("Llama tied", torch.float64)
    recipe = SimpleNamespace(padding_free=True, torch_compile=False, pad_to_multiple_of=None)
    collate: Any = pack_causal(model, SimpleNamespace(pad_token_id=0, pad_token_type_id=0), data, recipe)
    model, optimizer = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.5))
    plan = Plan.of(21, resolve_batch_sizes(16, None, None, 2, 40), 0, 1, -1)
    windows = WindowDataset(
        data, WindowPlan(plan, np.array(data["length"][:]), packed=True), collate, accelerator.process_index
    )
    criterion = CausalLoss(accelerator.autocast, 5)
    found: dict[str, Any] = {"rows": [], "losses": []}
    for window in windows.loader():
        result = train_step(
            accelerator, model, optimizer, window, lambda m, batch: loss_sum(criterion, m, batch), num_items
        )
        found["losses"].append(result.loss)
        found["rows"].append([row for part in window.rows for row in part])
    found["weights"] = torch.cat([p.detach().reshape(-1) for p in accelerator.unwrap_model(model).parameters()])
    found["sums"] = row_sums(accelerator, model, criterion, data, PaddedTargets(0), Limits(4, None))
    encode = encoder()
    torch.manual_seed(0)
    answers = generate(accelerator, build_small_llama(encode.tokenizer), encode, (EXAMPLES * 3)[:5], 4, 64)
    found["answers"] = [(answer.row, answer.expected, answer.generated) for answer in answers]
    torch.save(found, f"{sys.argv[1]}/{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
