"""Low-rank adapters through `peft`: LoRA (arXiv 2106.09685), rsLoRA (2312.03732), DoRA (2402.09353).

A model with an adapter is a `peft.PeftModel`: its base weights are frozen, and what a run saves of it is the adapter
alone (adapter_model.safetensors, adapter_config.json), a few megabytes. The whole model, with the adapter added into
its weights, is written beside it on request.
"""

import copy
import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any, Literal, Protocol

from accumft.errors import UserError
from accumft.pretrained import without_progress_bars

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FIELDS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_modules_to_save",
    "use_rslora",
    "use_dora",
    "merge_adapter",
)
"""Fields of a recipe that have no effect without its `use_peft`."""


class AdapterRecipe(Protocol):
    """The fields of a recipe that describe an adapter, by their names in TRL."""

    model_name_or_path: str | None
    """What the adapter is loaded on again; None: the model says it."""
    lora_r: int
    """Rank."""
    lora_alpha: int
    """The adapter's product is scaled by lora_alpha / lora_r; with rsLoRA by lora_alpha / sqrt(lora_r)."""
    lora_dropout: float
    lora_target_modules: tuple[str, ...]
    """Names of the layers, or ends of names; "all-linear" for every linear layer but the head."""
    lora_modules_to_save: tuple[str, ...]
    """Layers that are trained whole and saved with the adapter."""
    use_rslora: bool
    use_dora: bool


def check_adapter_fields(recipe: AdapterRecipe) -> None:
    """Raises a `UserError` where peft is not installed or a field is out of range."""
    if importlib.util.find_spec("peft") is None:
        raise UserError("--use_peft: the package peft is not installed: pip install 'accumft[peft]'")
    if recipe.lora_r < 1:
        raise UserError(f"--lora_r {recipe.lora_r}: must be at least 1")
    if recipe.lora_alpha < 1:
        raise UserError(f"--lora_alpha {recipe.lora_alpha}: must be at least 1")
    if not 0 <= recipe.lora_dropout < 1:
        raise UserError(f"--lora_dropout {recipe.lora_dropout}: must be at least 0 and below 1")
    if not recipe.lora_target_modules:
        raise UserError("--lora_target_modules: name at least one layer, or all-linear")


def add_adapter(
    model: Any, recipe: AdapterRecipe, task_type: Literal["CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS"] = "CAUSAL_LM"
) -> Any:
    """A `peft.PeftModel` around the model, whose own weights are frozen in place.

    The adapter begins as a change of nothing. With a task of classification peft trains and saves the head too
    (`classifier`, `score`), which is new.

    Args:
        model: of `transformers`, on the CPU, not prepared yet.

    Raises:
        UserError: `lora_target_modules` names no layer of the model.
    """
    from peft import LoraConfig, get_peft_model

    names = recipe.lora_target_modules
    targets = names[0] if names == ("all-linear",) else list(names)
    config = LoraConfig(
        task_type=task_type,
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=targets,
        modules_to_save=list(recipe.lora_modules_to_save) or None,
        use_rslora=recipe.use_rslora,
        use_dora=recipe.use_dora,
        # GPT-2 keeps its matrices the other way round; peft would say so and set it by itself.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    known = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules() if name}
    if absent := [name for name in recipe.lora_modules_to_save if name.rsplit(".", 1)[-1] not in known]:
        raise UserError(f"--lora_modules_to_save {absent[0]}: {type(model).__name__} has no such layer")
    try:
        with warnings.catch_warnings():
            # peft 0.21 asks by the old name, of which transformers 5.20 warns.
            warnings.filterwarnings("ignore", message=".is_gradient_checkpointing", category=FutureWarning)
            adapted = get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        kinds = sorted({name for name in known if re.search(r"proj|query|key|value|dense|fc|attn", name)})
        raise UserError(
            f"--lora_target_modules {' '.join(names)}: {' '.join(str(error).split())[:160]}; layers of "
            f"{type(model).__name__}: {', '.join(kinds[:20])}; or all-linear"
        ) from error
    if recipe.model_name_or_path is not None:
        adapted.peft_config["default"].base_model_name_or_path = _base_name(recipe.model_name_or_path)
    return adapted


def _base_name(model_name_or_path: str) -> str:
    """The base model as adapter_config.json names it, to be found from any working folder.

    A hub id stays one also where the model was read from an installed package, whose folder nobody else has.
    """
    path = Path(model_name_or_path)
    return str(path.resolve()) if path.is_dir() else model_name_or_path


def is_adapted(model: Any) -> bool:
    """Whether it is a `peft.PeftModel`."""
    return getattr(model, "peft_type", None) is not None and hasattr(model, "get_base_model")


def base_of(model: Any) -> Any:
    """The model of `transformers` inside a `PeftModel`, whose layers hold the adapter; any other model itself."""
    return model.get_base_model() if is_adapted(model) else model


def describe_adapter(model: Any) -> str:
    """A line for the log."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    every = sum(parameter.numel() for parameter in model.parameters())
    return f"adapter: {trained:,} of {every:,} parameters are trained ({trained / every:.2%})"


def write_adapter(model: Any, folder: Path) -> None:
    """Writes the adapter and what else was trained into a folder, as `PeftModel.from_pretrained` reads it."""
    # Not "auto", which asks the hub for the base model's vocabulary.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    # peft's card knows nothing of the run; the run's own is written at its end.
    (folder / "README.md").unlink(missing_ok=True)


def load_adapter(model: Any, folder: Path) -> None:
    """Gives a `PeftModel` the adapter that `write_adapter` has written, in place."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    found = set_peft_model_state_dict(model, load_file(folder / WEIGHTS))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if lost := sorted(trained & set(found.missing_keys)) or list(found.unexpected_keys):
        raise UserError(
            f"{folder}: its adapter is another one, without {lost[0]}; resume with the recipe it was made by"
        )


def write_merged(model: Any, processor: Any, folder: Path) -> None:
    """Writes the whole model with the adapter added into its weights; the one in memory stays as it is."""
    # A copy: to merge and unmerge in place would round the weights.
    plain = copy.deepcopy(model).merge_and_unload()
    with without_progress_bars():
        plain.save_pretrained(folder)
    processor.save_pretrained(folder)
