"""Fine-tuning on Hugging Face Accelerate: you choose the effective batch, and how it is cut changes nothing."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accumft.cli import main as main
    from accumft.cli import parse as parse
    from accumft.data.windows import Window as Window
    from accumft.data.windows import WindowDataset as WindowDataset
    from accumft.errors import EmptyWindowError as EmptyWindowError
    from accumft.errors import NonFiniteLossError as NonFiniteLossError
    from accumft.errors import UserError as UserError
    from accumft.evaluation import predict as predict
    from accumft.launch import make_accelerator as make_accelerator
    from accumft.plan import Plan as Plan
    from accumft.plan import resolve_batch_sizes as resolve_batch_sizes
    from accumft.recipe import TableRecipe as TableRecipe
    from accumft.recipe import TrainingRecipe as TrainingRecipe
    from accumft.run import Run as Run
    from accumft.run import RunResult as RunResult
    from accumft.schedule import Schedule as Schedule
    from accumft.schedule import build_scheduler as build_scheduler
    from accumft.step import StepResult as StepResult
    from accumft.step import train_step as train_step

__version__ = "0.1.0"

# Loaded at first use, so that `import accumft` costs nothing.
_HOMES = {
    "main": "cli",
    "parse": "cli",
    "Window": "data.windows",
    "WindowDataset": "data.windows",
    "EmptyWindowError": "errors",
    "NonFiniteLossError": "errors",
    "UserError": "errors",
    "predict": "evaluation",
    "make_accelerator": "launch",
    "Plan": "plan",
    "resolve_batch_sizes": "plan",
    "TableRecipe": "recipe",
    "TrainingRecipe": "recipe",
    "Run": "run",
    "RunResult": "run",
    "Schedule": "schedule",
    "build_scheduler": "schedule",
    "StepResult": "step",
    "train_step": "step",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'accumft' has no attribute {name!r}")
    return getattr(importlib.import_module(f"accumft.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
