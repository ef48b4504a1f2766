"""Started by the tests through a launcher, OUTPUT_DIR MARKER: a small run whose process 1 is killed once, in a step.

It is killed at its first start, which leaves MARKER behind, and goes on from the newest checkpoint at any other.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "recipes")]

import text_cls  # noqa: E402
from runs import FIELDS  # noqa: E402
from small import small_recipe  # noqa: E402

from accumft import cli  # noqa: E402

OUTPUT_DIR, MARKER = Path(sys.argv[1]), Path(sys.argv[2])
STEP = 5


def step_or_die(accelerator: Any, model: Any, optimizer: Any, window: Any, losses: Any, *args: Any) -> Any:
    """Dies with the gradients half made, while the other process waits for them."""

    def die(*batch: Any) -> Any:
        losses(*batch).backward()
        MARKER.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    dies = accelerator.process_index == 1 and window.step + 1 == STEP and not MARKER.exists()
    return train_step(accelerator, model, optimizer, window, die if dies else losses, *args)


train_step, text_cls.train_step = text_cls.train_step, step_or_die
recipe = small_recipe(OUTPUT_DIR, **FIELDS, resume_from_checkpoint="true")
cli.parse = lambda recipe_class, args: recipe  # type: ignore[assignment]
cli.main(text_cls.run, text_cls.TextClsRecipe)
