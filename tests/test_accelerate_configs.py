"""accelerate_configs/: each file key by key, to the launch that it leads to, without a GPU and without a process."""

import argparse
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from launching import ROOT, free_port, launch, launch_environment

FOLDER = ROOT / "accelerate_configs"
LOCAL = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1}
SINGLE = LOCAL | {"distributed_type": "NO", "num_processes": 1}
MULTI = LOCAL | {"distributed_type": "MULTI_GPU", "num_processes": 8, "main_process_port": 0}
KEYS: dict[str, dict[str, Any]] = {
    "cpu": SINGLE | {"use_cpu": True, "mixed_precision": "no"},
    "cpu_2_processes": MULTI | {"num_processes": 2, "use_cpu": True, "mixed_precision": "no", "gpu_ids": "-1,-1"},
    "single_gpu_fp16": SINGLE | {"mixed_precision": "fp16"},
    "single_gpu_bf16": SINGLE | {"mixed_precision": "bf16"},
    "multi_gpu_fp16": MULTI | {"mixed_precision": "fp16"},
    "multi_gpu_bf16": MULTI | {"mixed_precision": "bf16"},
    "multi_node_fp16": MULTI
    | {
        "mixed_precision": "fp16",
        "num_machines": 2,
        "num_processes": 16,
        "machine_rank": 0,
        "main_process_ip": "192.168.0.1",
        "main_process_port": 29500,
    },
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ.keys() - launch_environment().keys():
        monkeypatch.delenv(variable)
    for variable in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)


def parse(name: str, *flags: str) -> argparse.Namespace:
    arguments = ["--config_file", str(FOLDER / f"{name}.yaml"), *flags, "script.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    assert defaults is not None
    assert not (args.tpu or args.use_deepspeed or args.use_fsdp or args.use_megatron_lm or args.use_parallelism_config)
    return args


def test_the_folder_holds_the_seven_files() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(KEYS)
    assert len(KEYS) == 7


@pytest.mark.parametrize("name", KEYS)
def test_keys(name: str) -> None:
    path = FOLDER / f"{name}.yaml"
    assert yaml.safe_load(path.read_text()) == KEYS[name]
    config = load_config_from_file(str(path))  # raises at a key that Accelerate does not know
    for key, value in KEYS[name].items():
        assert getattr(config, key) == value
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("name", "precision", "use_cpu", "threads"),
    [("cpu", "no", "True", "8"), ("single_gpu_fp16", "fp16", "False", "1"), ("single_gpu_bf16", "bf16", "False", "1")],
)
def test_one_process(name: str, precision: str, use_cpu: str, threads: str) -> None:
    args = parse(name)
    assert not args.multi_gpu
    command, environment = prepare_simple_launcher_cmd_env(args)
    assert command[1:] == ["script.py"]
    assert environment["ACCELERATE_MIXED_PRECISION"] == precision
    assert environment["ACCELERATE_USE_CPU"] == use_cpu
    assert environment["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    assert environment["OMP_NUM_THREADS"] == threads
    assert "MASTER_ADDR" not in environment and "CUDA_VISIBLE_DEVICES" not in environment


@pytest.mark.parametrize(
    ("name", "processes", "precision", "devices", "threads"),
    [
        ("cpu_2_processes", "2", "no", "-1,-1", "4"),
        ("multi_gpu_fp16", "8", "fp16", None, "1"),
        ("multi_gpu_bf16", "8", "bf16", None, "1"),
    ],
)
def test_several_processes(name: str, processes: str, precision: str, devices: str | None, threads: str) -> None:
    args = parse(name)
    assert args.multi_gpu and not args.cpu
    environment = prepare_multi_gpu_env(args)
    assert args.nproc_per_node == processes
    assert int(args.master_port) not in (0, 29500)  # a free one
    assert environment["ACCELERATE_MIXED_PRECISION"] == precision
    assert environment["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    assert environment.get("CUDA_VISIBLE_DEVICES") == devices
    assert environment["OMP_NUM_THREADS"] == threads
    assert "ACCELERATE_USE_FSDP" not in environment


def test_flags_of_the_readme_win_over_the_file() -> None:
    args = parse("multi_gpu_fp16", "--num_processes", "4", "--mixed_precision", "no")
    assert prepare_multi_gpu_env(args)["ACCELERATE_MIXED_PRECISION"] == "no"
    assert args.nproc_per_node == "4"


@pytest.mark.parametrize("rank", [0, 1])
def test_two_machines(rank: int) -> None:
    # The first machine looks whether its port is free, which the file's may not be here.
    port = 29500 if rank else free_port()
    flags = ["--machine_rank", str(rank), "--main_process_ip", "10.1.2.3", "--main_process_port", str(port)]
    args = parse("multi_node_fp16", *flags)
    environment = prepare_multi_gpu_env(args)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", rank)
    assert args.rdzv_endpoint == f"10.1.2.3:{port}"
    assert args.rdzv_backend == "static"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "fp16"


def test_the_readme_names_every_file_and_its_commands_parse() -> None:
    text = (FOLDER / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line.partition("accelerate launch")[2]) for line in lines if "accelerate launch" in line]
    used = set()
    for command in commands:
        args = launch_command_parser().parse_args(command)
        if args.config_file is not None:
            assert (ROOT / args.config_file).is_file(), args.config_file
            used.add(Path(args.config_file).stem)
        assert args.training_script == "recipes/text_cls.py"
    assert used == set(KEYS)
    for name in KEYS:
        assert f"| `{name}.yaml` |" in text


def test_cpu_2_processes_starts_two_that_agree() -> None:
    result = launch(ROOT / "tests/launched/launch_probe.py", config=FOLDER / "cpu_2_processes.yaml")
    assert result.returncode == 0, result.stderr
    rows = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda row: row["rank"])
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        assert row["asked"] == row["num_processes"] == 2
        assert (row["distributed_type"], row["backend"], row["device"]) == ("MULTI_CPU", "gloo", "cpu")
        assert row["total"] == 11.0  # 10**0 + 10**1, reduced
        assert row["first"] == ["no", 4]
        assert row["second"] == ["bf16", 2]  # a second Accelerator in the same two processes
        assert row["ranks"] == [0, 1]  # gathered by the second
    assert "OMP_NUM_THREADS" not in result.stderr
