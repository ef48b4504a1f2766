"""The Accelerator of every recipe: what was asked for is compared with what came, and a difference is an error.

Accelerate 1.15 lets several wrong launches train on without a word: two processes asked for and one started, two
processes that each believe themselves alone and write into one folder, fp16 that is no fp16, an environment variable
that beats an argument. `make_accelerator` ends each of them before step 1, with what to type instead.

How a launch that asked for several processes and got one is seen: the launcher that starts a single process (the one
for --cpu, for MULTI_CPU, and for a lone GPU without --multi_gpu) sets MASTER_ADDR when, and only when, it was asked
for more than one process or machine, and sets no WORLD_SIZE. A MASTER_ADDR that the user's own shell exported looks
the same, so the message names that remedy too.
"""

import atexit
import functools
import importlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import (
    GradientAccumulationPlugin,
    KwargsHandler,
    LoggerType,
    broadcast,
    get_int_from_env,
    is_bf16_available,
    is_torch_xla_available,
    parse_flag_from_env,
)

from accumft.errors import UserError

RecipeT = TypeVar("RecipeT")
ResultT = TypeVar("ResultT")

# Accelerate reads the same variables in the same order: torchrun's, then those of the MPI implementations.
WORLD_SIZE_VARIABLES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]

UNSUPPORTED_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config (tensor, context or sequence parallelism)",
}

MULTI_GPU_CONFIGS = "accelerate_configs/multi_gpu_fp16.yaml or multi_gpu_bf16.yaml"
CPU_CONFIG = "accelerate_configs/cpu_2_processes.yaml"


def num_processes() -> int:
    """Processes that this launch asked for, by the environment (1 for plain `python`), before an Accelerator exists."""
    return int(get_int_from_env(WORLD_SIZE_VARIABLES, 1))


def make_accelerator(
    *,
    gradient_accumulation_steps: int = 1,
    mixed_precision: str | None = None,
    report_to: Sequence[str] = (),
    output_dir: str | None = None,
    kwargs_handlers: Sequence[KwargsHandler] = (),
) -> Accelerator:
    """Makes the Accelerator of a run and checks that it is the one that was asked for.

    The CPU is taken (gloo between several processes) where the machine has no accelerator device, and where
    ACCELERATE_USE_CPU asks for it. Each call starts from a clean state, so a second run in one process is not bound by
    the first; an Accelerator made earlier keeps its own numbers and may still be stepped, but prepare nothing new with
    it. A process group that exists is kept.

    Args:
        gradient_accumulation_steps: micro-batches in one optimizer step, what `accelerator.backward` divides by.
        mixed_precision: "no", "fp16" or "bf16"; None: what the launch says, else "no". Given, it beats the launch.
        report_to: trackers by their Accelerate names; "all": each that is installed.
        output_dir: folder that trackers log to.
        kwargs_handlers: such as InitProcessGroupKwargs(timeout=...).

    Raises:
        UserError: the launch, the precision or a tracker cannot be had; the message says what to type instead.
    """
    _check_environment(gradient_accumulation_steps)
    precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "fp16", "bf16"):
        raise UserError(f"mixed_precision={precision} is not supported: use --mixed_precision fp16, bf16 or no")
    _check_trackers(report_to)

    if num_processes() > 1:
        # Its functions keep the process group of the moment of their import as a default, for ever; there is none yet.
        importlib.import_module("torch.distributed.nn.functional")
        atexit.unregister(_end_process_group)
        atexit.register(_end_process_group)
    reset_accelerate_state()
    with warnings.catch_warnings():
        # Without OMP_NUM_THREADS (notebook_launcher) Accelerate shares the cores out among the processes, and warns.
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")
        accelerator = Accelerator(
            # Never cpu=False on a machine without a device: several processes would each believe themselves alone.
            cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available(),
            mixed_precision=precision,
            # train_step decides which backward synchronises; the end of a data loader must not.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=gradient_accumulation_steps, sync_with_dataloader=False
            ),
            step_scheduler_with_optimizer=False,  # else a prepared schedule runs num_processes times too fast
            log_with=list(report_to) or None,
            project_dir=output_dir,
            kwargs_handlers=list(kwargs_handlers),
        )
    # A forked process (notebook_launcher) has no OpenMP threads, and hangs at the first operation that wants several
    # if torch has used them before the fork. One thread is safe.
    if isinstance(multiprocessing.current_process(), getattr(multiprocessing.context, "ForkProcess", ())):
        torch.set_num_threads(1)
    try:
        _check_processes(accelerator)
        _check_precision(accelerator)
    except UserError:
        reset_accelerate_state()
        raise
    return accelerator


def prepare(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, AcceleratedOptimizer]:
    """`accelerator.prepare` without DistributedDataParallel: device and mixed precision, the same weights everywhere.

    `train_step` adds up the gradients of the processes itself. It takes a model in DistributedDataParallel too, whose
    copy of all gradients is then memory without a use.
    """
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    if accelerator.num_processes > 1:
        # Detached: autograd would take it for a part of the next backward, and warn there.
        broadcast([tensor.detach() for tensor in (*prepared.parameters(), *prepared.buffers())])
    return prepared, accelerator.prepare_optimizer(optimizer)


def leaves_no_state(run: Callable[[RecipeT], ResultT]) -> Callable[[RecipeT], ResultT]:
    """Decorates a recipe's `run`: after it, and after an error in it, `notebook_launcher` starts from another cell.

    Between several processes the state stays, since they still talk to each other.
    """

    @functools.wraps(run)
    def clean(recipe: RecipeT) -> ResultT:
        try:
            return run(recipe)
        finally:
            if not torch.distributed.is_initialized():
                reset_accelerate_state()

    return clean


def _end_process_group() -> None:
    """Waits for gloo's threads: one that still held a tensor while the interpreter ends would abort the process."""
    # After an exception the others may never come to what this process has begun, and it would wait for them.
    if torch.distributed.is_initialized() and not hasattr(sys, "last_type"):
        torch.distributed.destroy_process_group()


def reset_accelerate_state() -> None:
    """Lets the next Accelerator of this process start clean, and `notebook_launcher` start after a run in a cell.

    The state that Accelerate keeps for the whole process is replaced, not emptied (as its own `_reset_state` does):
    the Accelerators, optimizers and schedulers made before hold on to theirs and do not change in the middle of use.
    """
    for state in (PartialState, AcceleratorState, GradientState):
        state._shared_state = {}


def _check_environment(gradient_accumulation_steps: int) -> None:
    """Refuses what the environment asks for and Accelerate would do silently, or accumft's step was not verified on."""
    for variable, engine in UNSUPPORTED_ENGINES.items():
        if parse_flag_from_env(variable):
            raise UserError(
                f"this launch asks for {engine} ({variable}=true), under which accumft's exact step is not verified "
                f"and not supported yet: launch with --config_file {MULTI_GPU_CONFIGS}"
            )
    if is_torch_xla_available():
        raise UserError(
            "torch_xla is installed, and accumft's exact step is not verified on TPU/XLA and not supported yet: "
            f"set USE_TORCH_XLA=0 and launch with --config_file {MULTI_GPU_CONFIGS}"
        )
    dynamo_backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if dynamo_backend != "no":
        raise UserError(
            f"this launch asks for torch.compile (dynamo backend {dynamo_backend}), which is not supported yet: "
            "launch with --dynamo_backend no, or remove dynamo_config from the config file"
        )
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if steps is not None and steps.strip() != str(gradient_accumulation_steps):
        raise UserError(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps} in the environment, but this run has "
            f"gradient_accumulation_steps {gradient_accumulation_steps}: unset the variable and use the flag alone"
        )
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ  # set by every launcher of Accelerate
    alone = "WORLD_SIZE" not in os.environ and num_processes() == 1
    if launched and alone and "MASTER_ADDR" in os.environ:
        raise UserError(
            "`accelerate launch` was asked for several processes and started one (it does so with --cpu, with "
            f"MULTI_CPU, and on one GPU): launch with --config_file {CPU_CONFIG} or {MULTI_GPU_CONFIGS}; "
            "for one process say --num_processes 1, and unset MASTER_ADDR if your shell exports it"
        )


def _check_trackers(report_to: Sequence[str]) -> None:
    installed = [str(tracker) for tracker in get_available_trackers()]
    for name in report_to:
        if name == "all":
            if not installed:
                raise UserError("--report_to all: no tracker is installed: pip install tensorboard, or drop the flag")
        elif name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise UserError(f"--report_to {name}: no such tracker, choose among {known}, or drop the flag")
        elif name in LoggerType and name not in installed:  # a tracker registered by the user is installed
            raise UserError(f"--report_to {name}: the package {name} is not installed: pip install {name}")


def _check_processes(accelerator: Accelerator) -> None:
    grouped = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    asked = max(num_processes(), grouped)
    if asked != accelerator.num_processes:
        raise UserError(
            f"{asked} processes were asked for, but each believes itself one of {accelerator.num_processes} on "
            f"{accelerator.device.type}: start them with `accelerate launch --config_file` {MULTI_GPU_CONFIGS}, or set "
            f"ACCELERATE_USE_CPU=true and take {CPU_CONFIG}"
        )
    here = get_int_from_env(["LOCAL_WORLD_SIZE"], 1)
    if accelerator.device.type == "cuda" and here > torch.cuda.device_count():
        raise UserError(
            f"{here} processes were started on a machine with {torch.cuda.device_count()} visible GPUs: launch with "
            f"--num_processes {torch.cuda.device_count()}, or set CUDA_VISIBLE_DEVICES to more"
        )


def _check_precision(accelerator: Accelerator) -> None:
    device = accelerator.device.type
    if accelerator.mixed_precision == "fp16" and (accelerator.scaler is None or not accelerator.scaler.is_enabled()):
        raise UserError(
            f"mixed_precision=fp16 does not exist on {device} (no loss scaling, and Accelerate would train in float32 "
            "without a word): use --mixed_precision bf16 or --mixed_precision no"
        )
    if accelerator.mixed_precision == "bf16" and not _has_bf16(device):
        raise UserError(
            f"mixed_precision=bf16 is not in the hardware of this {device} device: use --mixed_precision fp16"
        )


def _has_bf16(device: str) -> bool:
    if device == "cuda":  # True by default where it is emulated, on a V100 for one
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(device == "cpu" or is_bf16_available(True))
