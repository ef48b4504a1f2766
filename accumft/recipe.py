"""The fields that every run has. A recipe's dataclass extends one of these and adds its own."""

import difflib
import math
from dataclasses import dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from accumft.errors import UserError


@dataclass(kw_only=True, slots=True)
class TrainingRecipe:
    """Batch, duration, optimizer, schedule, evaluation, logging, precision: what every run has."""

    effective_batch_size: int | None = None
    """Examples per optimizer step, over all processes. Unset: per_device_train_batch_size x
    gradient_accumulation_steps x processes; with neither of them set, 8 on any number of processes."""
    max_tokens_per_micro_batch: int | Literal["auto"] | None = None
    """Tokens in one micro-batch on one process, padding counted, at most; a longer row runs alone. "auto": the fastest
    on this machine, tried out at the start. Unset: 1,024, unless one of the next two fields is set."""
    per_device_train_batch_size: int | None = None
    """Examples in one micro-batch on one process, at most, instead of a limit of tokens."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches of equal size that the effective batch would make on one process: another way to say how many
    examples a micro-batch has at most. Rows of unlike length may be cut further."""
    per_device_eval_batch_size: int | None = None
    """Examples in one batch of evaluation on one process. The results do not depend on it. Unset: twice the tokens of a
    training micro-batch, or 32 where that is limited by examples."""
    dataloader_num_workers: int = 0
    """Worker processes that read and collate the windows ahead; 0: in the main process."""

    num_train_epochs: float = 3.0
    """Passes over the training data; a fraction ends mid-epoch. Not used when max_steps is positive."""
    max_steps: int = -1
    """Optimizer steps to make; -1: as many as num_train_epochs needs."""

    optim: Literal["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"] = "adamw_torch_fused"
    """Optimizer, by its Hugging Face name."""
    learning_rate: float = 5e-5
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay (for sgd: L2), on matrices only: biases and norm weights are left out."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.999
    """Decay of AdamW's second moment."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""
    sgd_momentum: float = 0.0
    """Momentum of sgd."""
    max_grad_norm: float | None = 1.0
    """L2 norm that a step's whole gradient is clipped to, once; None: not clipped."""

    lr_scheduler_type: Literal[
        "cosine", "linear", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "warmup_stable_decay"
    ] = "cosine"
    """Shape of the learning rate over optimizer steps."""
    warmup_steps: int | None = None
    """Optimizer steps from zero to the peak. Not together with warmup_ratio."""
    warmup_ratio: float | None = None
    """Share of all optimizer steps, 0 to 1, that warms up, rounded up. Neither set: 0.1, but 0 for constant."""
    min_lr_ratio: float = 0.0
    """What a decay ends at, as a share of the peak learning rate, 0 to 1."""
    lr_power: float = 1.0
    """Exponent of the polynomial schedule."""
    lr_decay_ratio: float = 0.1
    """Share of all optimizer steps, 0 to 1, in which warmup_stable_decay decays."""

    eval_steps: int | None = None
    """Optimizer steps between evaluations. Unset: at the end of each epoch. The last step is always evaluated."""
    metric_for_best_model: str | None = None
    """Metric on the validation data that picks the best model, with or without "eval_". Unset: the task's own."""
    greater_is_better: bool | None = None
    """Whether a larger metric_for_best_model is better. Unset: known for every metric of the task."""
    load_best_model_at_end: bool = True
    """Save and report the best evaluated model; off: the last."""
    early_stopping_patience: int | None = None
    """Evaluations in a row without a better metric_for_best_model after which the run stops; unset: never."""

    save_steps: int | None = None
    """Optimizer steps between checkpoints. Unset: at the end of each epoch. The last step always has one, and so has a
    new best model."""
    save_total_limit: int | None = 2
    """Checkpoints that are kept: the newest, and the best model's besides; None: all."""
    resume_from_checkpoint: bool | str | None = None
    """Go on from a checkpoint: its path, or that of a run, or true for the newest whole one in output_dir. With true a
    run that has none yet starts from the beginning, so that one command serves a job that is started again."""
    max_runtime: float | None = None
    """Minutes of training after which a checkpoint is saved and the run ends with exit code 143, as after a SIGTERM;
    for queues with a time limit. Unset: none."""

    output_dir: str = "outputs/run"
    """Folder for the model, the log, the checkpoints and the report. An earlier run found there is moved aside, never
    overwritten, unless resume_from_checkpoint goes on with it."""
    logging_steps: int = 1
    """Optimizer steps between rows of metrics.jsonl."""
    report_to: tuple[str, ...] = ()
    """Trackers of Accelerate to log to: tensorboard, wandb, trackio, mlflow, ..."""
    run_name: str = "accumft"
    """Project name given to the trackers."""

    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    """Precision of the forward pass. Unset: what `accelerate launch` says, else "no" (float32)."""
    padding_free: bool | None = None
    """Rows of a micro-batch one after the other instead of padded to the longest: the same numbers with less work.
    Unset: where the model allows it."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    torch_compile: bool = False
    """Compile the model. Pays in long runs: the first compilation takes about a minute on a CPU."""
    torch_compile_backend: str = "inductor"
    """Backend of torch.compile."""
    dry_run: bool = False
    """Print the plan (steps, learning rate, cut, padding, balance, memory) and draw it, and do not train."""
    num_processes_planned: int | None = None
    """Processes that a dry run plans for. Unset: those of this launch."""
    device_memory_gb: float | None = None
    """Memory of one GPU in GB, for a dry run to say whether the run would fit."""
    seed: int = 42
    """Seed of the order of examples, the new weights, dropout and the validation split."""


@dataclass(kw_only=True, slots=True)
class TableRecipe(TrainingRecipe):
    """A run on tables of examples: files, a folder, or a data set of the hub."""

    train_file: str | None = None
    """Training data: .csv, .tsv, .txt, .json, .jsonl, .parquet, or a folder written by `datasets`."""
    validation_file: str | None = None
    """Validation data, in the same forms."""
    test_file: str | None = None
    """Test data, in the same forms: scored once, after training."""
    dataset_name: str | None = None
    """Data set of the hub, instead of files."""
    dataset_config_name: str | None = None
    """Configuration of dataset_name."""
    validation_split: float | None = None
    """Share of the training data, 0 to 1, held out for validation where no validation data is given; stratified by
    label where there is one, rows of the same text kept together. Unset: 0.1 where there is none; 0: no validation."""
    encoding: str = "utf-8"
    """Encoding of text files: utf-8 (with or without BOM), gb18030, latin-1, ..."""
    delimiter: str | None = None
    r"""Column delimiter of text files, such as "," or "\t". Unset: seen from the header line."""
    quotechar: str = '"'
    """Quote character of text files; "" for files that quote nothing."""
    column_names: tuple[str, ...] = ()
    """Column names, for text files without a header line."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that has an empty text or no label."""
    max_train_samples: int | None = None
    """Use only this many training rows, drawn by seed."""
    max_eval_samples: int | None = None
    """Use only this many rows of validation and of test data, drawn by seed."""


RecipeT = TypeVar("RecipeT", bound=TrainingRecipe)

# Fields of any recipe that must be at least this; None passes.
MINIMUM = {
    "per_device_eval_batch_size": 1,
    "dataloader_num_workers": 0,
    "weight_decay": 0,
    "sgd_momentum": 0,
    "warmup_steps": 0,
    "eval_steps": 1,
    "early_stopping_patience": 1,
    "logging_steps": 1,
    "save_steps": 1,
    "save_total_limit": 1,
    "seed": 0,
    "max_train_samples": 1,
    "max_eval_samples": 1,
    "max_length": 4,
    "pad_to_multiple_of": 1,
    "synthetic_size": 32,
    "num_processes_planned": 1,
}
POSITIVE = ("learning_rate", "max_grad_norm", "lr_power", "adam_epsilon", "device_memory_gb", "max_runtime")
BELOW_ONE = ("adam_beta1", "adam_beta2", "dropout", "label_smoothing")
SHARES = (
    "warmup_ratio",
    "min_lr_ratio",
    "lr_decay_ratio",
    "validation_split",
    "threshold",
)
MAXIMUM_PROCESSES = 10_000
MAXIMUM_SEED = 2**32 - 1  # NumPy's


def checked(recipe: RecipeT) -> RecipeT:
    """A copy of a recipe whose values fit their types and ranges, or a `UserError` that names the field.

    The command line checks types by itself; edits in a notebook are checked here. A single string is taken for a tuple
    of one, a list for a tuple.
    """
    hints = get_type_hints(type(recipe))
    changed: dict[str, Any] = {}
    for field in fields(recipe):
        name, value, hint = field.name, getattr(recipe, field.name), hints[field.name]
        if get_origin(hint) is tuple and not isinstance(value, tuple):
            value = (value,) if isinstance(value, (str, int, float)) else tuple(value or ())
        if hint == tuple[str, ...]:
            value = tuple(map(str, value))
        if name == "report_to":
            # As Hugging Face's Trainer spells it.
            value = tuple(tracker for tracker in value if tracker != "none")
        if not _fits(value, hint):
            raise UserError(f"--{name} {value!r}: {_expectation(value, hint)}")
        changed[name] = value
    recipe = replace(recipe, **changed)
    for name, minimum in MINIMUM.items():
        value = getattr(recipe, name, None)
        if value is not None and not value >= minimum:
            raise UserError(f"--{name} {value}: must be at least {minimum}")
    for name in POSITIVE:
        value = getattr(recipe, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name} {value}: must be positive and finite")
    for name in SHARES:
        value = getattr(recipe, name, None)
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"--{name} {value}: must be between 0 and 1")
    for name in BELOW_ONE:
        value = getattr(recipe, name, None)
        if value is not None and not 0 <= value < 1:
            raise UserError(f"--{name} {value}: must be at least 0 and below 1")
    if (recipe.num_processes_planned or 0) > MAXIMUM_PROCESSES:
        raise UserError(f"--num_processes_planned {recipe.num_processes_planned}: at most {MAXIMUM_PROCESSES:,}")
    if recipe.seed > MAXIMUM_SEED:
        raise UserError(f"--seed {recipe.seed}: must be at most {MAXIMUM_SEED}")
    return recipe


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return all(_fits(part, get_args(hint)[0]) for part in value)
    if isinstance(value, bool):
        return hint is bool
    # In Python an int is no float, to a user it is.
    return isinstance(value, (int, float) if hint is float else hint)


def _expectation(value: Any, hint: Any) -> str:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    if choices:
        nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
        hint_text = f"; did you mean {nearest[0]!r}?" if nearest else ""
        return f"must be one of {', '.join(choices)}{hint_text}"
    names = ["None" if part is NoneType else getattr(part, "__name__", str(part)) for part in parts]
    return f"must be of type {' or '.join(names)}"


def refuse_unused(recipe: TrainingRecipe, names: tuple[str, ...], because: str) -> None:
    """Raises a `UserError` if a field that has no effect here was changed: a recipe honours every field it takes."""
    defaults = {field.name: field.default for field in fields(recipe)}
    for name in names:
        value = getattr(recipe, name)
        if value != defaults[name]:
            raise UserError(f"--{name} {value}: has no effect with {because}; leave it out")
