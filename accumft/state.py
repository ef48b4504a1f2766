"""The state of a run: all that its next step depends on, in the files of a checkpoint.

    model.safetensors, config.json, tokenizer files     as `from_pretrained` reads them
    optimizer.pt                                         the optimizer's and other objects' tensors
    state.json                                           the step, the scaler, the counters, versions
    recipe.yaml                                          the resolved recipe

The order of examples and the random numbers of a step are functions of the seed and the step: nothing of them is here.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list
from safetensors import safe_open
from torch import distributed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_map

from accumft.errors import UserError
from accumft.outputs import load_weights, save_recipe, to_json, write_model

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class Progress:
    """What of a run's state is neither weights nor optimizer."""

    step: int = 0
    """Completed optimizer steps."""
    pending_evaluation: bool = False
    """Whether the evaluation that is due at this step is still to be made."""
    best_metric: str = ""
    greater_is_better: bool = True
    best_value: float | None = None
    best_step: int | None = None
    """Of the best evaluated model."""
    best_loss: float | None = None
    """Its loss, by which equal values are told apart."""
    evaluations_without_gain: int = 0
    stop_reason: str | None = None
    tokens: int = 0
    examples: int = 0
    training_seconds: float = 0.0
    data_seconds: float = 0.0
    changes: list[str] = field(default_factory=list)
    """What was changed in the recipe when the run was resumed, and from which step on."""
    run_id: str = ""
    """Names the run to trackers, over all its restarts."""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """Of the data."""
    num_processes: int = 1
    versions: dict[str, str] = field(default_factory=dict)

    def take(self, value: float | None, loss: float | None, greater_is_better: bool, patience: int | None) -> bool:
        """Takes an evaluation at this step into account: whether it is the best so far, and whether the run stops.

        Of equal values the one with the lower loss is the better; early stopping does not count that as a gain.

        Args:
            value: of `best_metric`; None: undefined, which is no gain.
            loss: of the same evaluation; None: it has none.
        """
        best = self.best_value
        gain = (
            value is not None
            and math.isfinite(value)
            and (best is None or (value > best if greater_is_better else value < best))
        )
        loss = loss if loss is not None and math.isfinite(loss) else None
        tie = value == best and loss is not None and self.best_loss is not None and loss < self.best_loss
        self.evaluations_without_gain = 0 if gain else self.evaluations_without_gain + 1
        if gain or tie:
            self.best_value, self.best_step, self.best_loss = value, self.step, loss
        self._stop_if_due(patience)
        return gain or tie

    def _stop_if_due(self, patience: int | None) -> None:
        self.stop_reason = None
        if patience is not None and self.evaluations_without_gain >= patience:
            self.stop_reason = f"no better eval_{self.best_metric} in {patience} evaluation(s)"

    def go_on_as(self, fresh: "Progress", patience: int | None, evaluates: bool) -> list[str]:
        """Takes over what a run that goes on says of itself: lines on what no longer holds.

        Args:
            fresh: of that run, before its first step.
            patience: its early_stopping_patience.
            evaluates: whether it has evaluations.
        """
        lines = []
        same = self.fingerprint.get("validation") == fresh.fingerprint.get("validation")
        measure = (self.best_metric, self.greater_is_better) == (fresh.best_metric, fresh.greater_is_better)
        if self.best_step is not None and not (same and measure and evaluates):
            why = "other validation data" if measure else "another metric_for_best_model"
            lines.append(f"{why}: the best model is picked among the evaluations from here on")
        if not (same and measure and evaluates):
            self.best_value, self.best_step, self.best_loss, self.evaluations_without_gain = None, None, None, 0
        for name in ("best_metric", "greater_is_better", "fingerprint", "versions", "num_processes"):
            setattr(self, name, getattr(fresh, name))
        self.pending_evaluation = self.pending_evaluation and evaluates
        self._stop_if_due(patience)
        return lines


def save_state(
    folder: Path,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    processor: Any,
    progress: Progress,
    recipe_values: Mapping[str, Any],
    stateful: Mapping[str, Any],
) -> None:
    """Writes the files of a checkpoint into an empty folder, on one process."""
    write_model(accelerator.unwrap_model(model), processor, folder)
    tensors = {
        "optimizer": optimizer.state_dict()["state"],
        "stateful": {name: thing.state_dict() for name, thing in stateful.items()},
    }
    torch.save(tensors, folder / "optimizer.pt")
    scaler = None if accelerator.scaler is None else accelerator.scaler.state_dict()
    (folder / "state.json").write_text(to_json({**asdict(progress), "scaler": scaler}, indent=1), encoding="utf-8")
    save_recipe(recipe_values, folder / "recipe.yaml")


def read_progress(checkpoint: Path) -> Progress:
    """The progress that a whole checkpoint holds."""
    values = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    values.pop("scaler")
    if isinstance(values["best_value"], str):  # JSON has no infinity
        values["best_value"] = None
    return Progress(**values)


def load_state(
    checkpoint: Path | None,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    stateful: Mapping[str, Any],
) -> Progress:
    """Takes over a checkpoint on all processes; the learning rate and its like stay the recipe's own.

    Args:
        checkpoint: whole; only the first process reads it, since the others may be on machines that do not see it.

    Raises:
        UserError: its model or optimizer is another one, on every process. Nothing was changed.
    """
    bare = accelerator.unwrap_model(model)

    def read() -> tuple[Progress, Any, Any]:
        assert checkpoint is not None
        _check_weights(checkpoint, bare)
        tensors = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        _check_optimizer(checkpoint, optimizer, tensors["optimizer"])
        if tensors["stateful"].keys() != stateful.keys():
            raise UserError(f"{checkpoint}: holds the state of {sorted(tensors['stateful'])}, not {sorted(stateful)}")
        values = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        load_weights(bare, checkpoint)
        return read_progress(checkpoint), values["scaler"], tensors

    progress, scaler, tensors = on_main(accelerator, read)
    if accelerator.num_processes > 1:
        broadcast(list(bare.state_dict().values()))
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "state": tensors["optimizer"]})
    for name, thing in stateful.items():
        thing.load_state_dict(tensors["stateful"][name])
    if scaler is not None and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(scaler)
    # The learning rate is a function of the step: what the recipe now says of it holds from here on.
    scheduler.last_epoch = progress.step
    for group, base in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = base * scheduler.lr_lambdas[0](progress.step)
    return progress


def on_main(accelerator: Accelerator, make: Callable[[], ResultT]) -> ResultT:
    """What `make` returns on the first process, on every process; a `UserError` that it raises, every process raises.

    Tensors in it travel as tensors.
    """
    if accelerator.num_processes == 1:
        return make()
    payload: list[Any] = [None, None]
    result: Any = None
    if accelerator.is_main_process:
        try:
            result = make()
            payload = [None, tree_map(_shape_of, result)]
        except UserError as error:
            payload = [str(error), None]
    broadcast_object_list(payload)
    if payload[0] is not None:
        raise UserError(payload[0])
    if not accelerator.is_main_process:
        result = tree_map(
            lambda leaf: torch.empty(leaf.size, dtype=leaf.dtype) if isinstance(leaf, _Shape) else leaf, payload[1]
        )
    return tree_map(lambda leaf: _broadcast(leaf, accelerator) if isinstance(leaf, torch.Tensor) else leaf, result)


@dataclass(frozen=True)
class _Shape:
    size: tuple[int, ...]
    dtype: torch.dtype


def _shape_of(leaf: Any) -> Any:
    return _Shape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _broadcast(tensor: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    sent = tensor.to(accelerator.device)
    distributed.broadcast(sent, 0)
    return sent.to(tensor.device)


def _check_weights(checkpoint: Path, bare: torch.nn.Module) -> None:
    """By the shapes in the files' headers: no weight has been touched yet."""
    own = {name: tuple(value.shape) for name, value in bare.state_dict().items()}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        for name, shape in saved.items():
            if own.get(name, shape) != shape:
                raise UserError(
                    f"{checkpoint}: its model has {name} of {shape} where this one has {own[name]}; resume with the "
                    "recipe it was made by"
                )


def _check_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer, saved: Mapping[int, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in saved.items():
        sizes = {tuple(v.shape) for v in state.values() if isinstance(v, torch.Tensor) and v.ndim} if state else set()
        if index >= len(parameters):
            raise UserError(f"{checkpoint}: of a model with more parameters; resume with the recipe it was made by")
        own = tuple(parameters[index].shape)
        if own not in sizes and sizes and len(own) == max(map(len, sizes)):
            raise UserError(
                f"{checkpoint}: its model has a parameter of {sizes.pop()} where this one has {own}; resume with the "
                "recipe it was made by"
            )
