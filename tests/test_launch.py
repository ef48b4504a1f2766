"""make_accelerator: what comes is what was asked for, and each silent trap of a launch is an error that helps."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import InitProcessGroupKwargs
from launching import ROOT, free_port, launch, launch_environment, run_command

from accumft import launch as launch_module
from accumft.errors import UserError
from accumft.launch import make_accelerator, num_processes, reset_accelerate_state

PROBE = ROOT / "tests/launched/launch_probe.py"
NOTEBOOK = ROOT / "tests/launched/launch_notebook.py"
END = ROOT / "tests/launched/launch_end.py"
SHORT = InitProcessGroupKwargs(timeout=timedelta(seconds=20))


@pytest.fixture(autouse=True)
def plain_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launch in the environment, no state of Accelerate's left by, or for, another test."""
    for variable in os.environ.keys() - launch_environment().keys():
        monkeypatch.delenv(variable)
    reset_accelerate_state()
    yield
    reset_accelerate_state()


class FakeAccelerator(SimpleNamespace):
    """Stands in for the Accelerator of a machine with GPUs, and keeps the arguments that it was made with."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(
            arguments=arguments,
            device=torch.device("cpu" if arguments["cpu"] else "cuda"),
            num_processes=1,
            mixed_precision=arguments["mixed_precision"],
            scaler=torch.amp.GradScaler("cpu") if arguments["mixed_precision"] == "fp16" else None,
        )


@pytest.fixture
def machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four V100: bfloat16 in emulation only."""
    monkeypatch.setattr(launch_module, "Accelerator", FakeAccelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)


def test_num_processes_is_what_the_launch_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_processes() == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert num_processes() == 3
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert num_processes() == 4


def test_the_accelerator_is_the_one_asked_for(tmp_path: Path) -> None:
    accelerator = make_accelerator(
        gradient_accumulation_steps=5,
        report_to=("tensorboard",),
        output_dir=str(tmp_path),
        kwargs_handlers=[SHORT],
    )
    assert accelerator.device.type == "cpu" and accelerator.num_processes == 1
    assert accelerator.mixed_precision == "no"
    assert accelerator.gradient_accumulation_steps == 5
    assert not accelerator.gradient_state.sync_with_dataloader
    assert not accelerator.step_scheduler_with_optimizer
    assert accelerator.init_handler.timeout == timedelta(seconds=20)
    assert [str(tracker) for tracker in accelerator.log_with] == ["tensorboard"]
    assert accelerator.project_dir == str(tmp_path)
    weight = torch.nn.Parameter(torch.ones(()))
    accelerator.backward(weight * 10.0)
    assert weight.grad is not None and weight.grad.item() == 2.0  # backward divides by the 5 asked for


def test_a_plain_call_reports_nowhere() -> None:
    accelerator = make_accelerator()
    assert accelerator.log_with == [] and accelerator.gradient_accumulation_steps == 1


def test_the_argument_beats_the_precision_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert make_accelerator().mixed_precision == "bf16"
    assert make_accelerator(mixed_precision="no").mixed_precision == "no"


def test_a_second_run_is_not_bound_by_the_first_nor_changes_it() -> None:
    first = make_accelerator(gradient_accumulation_steps=4)
    model, optimizer = first.prepare(bare := torch.nn.Linear(1, 1), torch.optim.SGD(bare.parameters(), lr=1.0))
    second = make_accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    assert (second.mixed_precision, second.gradient_accumulation_steps) == ("bf16", 2)
    assert (first.mixed_precision, first.gradient_accumulation_steps) == ("no", 4)

    seen: list[torch.dtype] = []
    layer = torch.nn.Linear(1, 1)
    layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    bare.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    second.prepare(torch.nn.Sequential(layer))(torch.ones(1, 1))
    second.sync_gradients = False  # in the middle of a window of the second run
    first.backward(model(torch.ones(1, 1)).sum())
    before = bare.weight.item()
    optimizer.step()
    assert seen == [torch.bfloat16, torch.float32]
    assert bare.weight.item() == before - 0.25


def test_an_accelerator_of_an_earlier_cell_does_not_bind_the_run() -> None:
    Accelerator(mixed_precision="bf16", gradient_accumulation_steps=8)
    accelerator = make_accelerator(gradient_accumulation_steps=3)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 3)
    assert not accelerator.gradient_state.sync_with_dataloader


ALONE = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
REFUSED = {
    "accumulation": ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}, {}, ["STEPS=2", "unset", "steps 1"]),
    "fsdp": ({"ACCELERATE_USE_FSDP": "true"}, {}, ["FSDP", "multi_gpu_fp16.yaml", "multi_gpu_bf16.yaml"]),
    "fsdp on the cpu": ({"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true"}, {}, ["FSDP"]),
    "deepspeed": ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, ["DeepSpeed", "multi_gpu_fp16.yaml"]),
    "megatron": ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, ["Megatron-LM", "multi_gpu_fp16.yaml"]),
    "parallelism": ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, {}, ["tensor", "multi_gpu_fp16.yaml"]),
    "dynamo": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}, ["inductor", "--dynamo_backend no"]),
    "one of two": (ALONE, {}, ["cpu_2_processes.yaml", "--num_processes 1", "MASTER_ADDR"]),
    "fp8": ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, ["fp8", "bf16", "no"]),
    "fp16 by launch": ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, ["fp16", "cpu", "bf16", "precision no"]),
    "fp16 by flag": ({}, {"mixed_precision": "fp16"}, ["fp16", "cpu", "bf16", "precision no"]),
    "no such precision": ({}, {"mixed_precision": "fp32"}, ["fp32", "bf16"]),
    "tracker absent": ({}, {"report_to": ("wandb",)}, ["pip install wandb"]),
    "no tracker for all": ({}, {"report_to": ("all",)}, ["pip install tensorboard"]),
    "no such tracker": ({}, {"report_to": ("tensorbord",)}, ["tensorbord", "tensorboard, "]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, arguments, words = REFUSED[name]
    monkeypatch.setattr(launch_module, "get_available_trackers", list)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(UserError) as caught:
        make_accelerator(**arguments)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    for state in (PartialState, AcceleratorState, GradientState):
        assert state._shared_state == {}  # else notebook_launcher, in the next cell, would refuse to start


def test_harmless_environments_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "6")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    monkeypatch.setenv("MASTER_ADDR", "node0")  # exported by a cluster's shell, with plain python
    assert make_accelerator(gradient_accumulation_steps=6).gradient_accumulation_steps == 6


def test_torch_xla_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "is_torch_xla_available", lambda: True)
    with pytest.raises(UserError, match="USE_TORCH_XLA=0"):
        make_accelerator()


def test_processes_that_believe_themselves_alone_are_refused(
    machine_with_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"2 processes .* one of 1 on cuda.*multi_gpu_fp16.yaml"):
        make_accelerator()


def test_a_process_group_that_the_environment_does_not_tell_of_is_refused(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_world_size", lambda: 2)
            with pytest.raises(UserError, match="2 processes"):
                make_accelerator()
    finally:
        torch.distributed.destroy_process_group()


def test_the_cpu_is_taken_without_a_device_or_on_request(
    machine_with_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_accelerator().arguments["cpu"] is False
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert make_accelerator().arguments["cpu"] is True
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert make_accelerator().arguments["cpu"] is True


def test_precisions_of_a_gpu(machine_with_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_accelerator(mixed_precision="fp16").mixed_precision == "fp16"
    with pytest.raises(UserError, match=r"bf16.*--mixed_precision fp16"):
        make_accelerator(mixed_precision="bf16")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert make_accelerator(mixed_precision="bf16").mixed_precision == "bf16"
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: SimpleNamespace(is_enabled=lambda: False))
    with pytest.raises(UserError, match="fp16"):
        make_accelerator(mixed_precision="fp16")


def test_more_processes_than_gpus_are_refused(machine_with_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    make_accelerator()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UserError, match=r"8 processes .* 4 visible GPUs.*--num_processes 4"):
        make_accelerator()


def ends_in(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The launch failed, no process printed a result, and stderr holds the message."""
    assert result.returncode != 0
    assert result.stdout == ""
    (message, *_) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for word in words:
        assert word in message


def test_launched_cpu_flag_with_two_processes() -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", str(PROBE)]
    ends_in(run_command(command), "cpu_2_processes.yaml")


def test_launched_multi_cpu_config(tmp_path: Path) -> None:
    config = tmp_path / "multi_cpu.yaml"
    config.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n")
    ends_in(launch(PROBE, config=config), "cpu_2_processes.yaml")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the names of threads from /proc")
def test_launched_end_of_the_processes() -> None:
    # A thread of gloo that still holds a tensor while the interpreter ends aborts the process, once in a long while.
    result = launch(END)
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    assert lines == ["at the end 0", "at the end 0", "in the run 2", "in the run 2"]
    assert "autograd kernel" not in result.stderr


def test_launched_fsdp_without_a_gpu(tmp_path: Path) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 1\n")
    ends_in(launch(PROBE, config=config, env={"ACCELERATE_USE_CPU": "true"}), "FSDP", "multi_gpu_fp16.yaml")


def test_launched_fp16_without_a_gpu() -> None:
    ends_in(launch(PROBE, config=ROOT / "accelerate_configs/single_gpu_fp16.yaml"), "fp16", "bf16", "precision no")


def test_cells_of_a_notebook(tmp_path: Path) -> None:
    """Runs in the cell's process and in two forked ones, in turn, none poisoned by an Accelerator made before.

    The weight is -1 after one process's step and -(1 + 2) / 2 after that of two, whatever the accumulation.
    """
    log = tmp_path / "log.jsonl"
    command = [sys.executable, str(NOTEBOOK), str(log), str(free_port())]
    result = run_command(command, env={"OMP_NUM_THREADS": "2"}, timeout=60)
    assert result.returncode == 0, result.stderr
    names = ("cell", "rank", "num_processes", "mixed_precision", "gradient_accumulation_steps", "weight")
    rows = sorted(tuple(json.loads(line)[name] for name in names) for line in log.read_text().splitlines())
    assert rows == [
        ("debug_launcher", 0, 2, "no", 3, -1.5),
        ("debug_launcher", 1, 2, "no", 3, -1.5),
        ("first", 0, 1, "no", 4, -1.0),
        ("last", 0, 1, "no", 1, -1.0),
        ("notebook_launcher", 0, 2, "no", 3, -1.5),
        ("notebook_launcher", 1, 2, "no", 3, -1.5),
        ("second", 0, 1, "bf16", 2, -1.0),
    ]
