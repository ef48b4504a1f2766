"""Real launches for the tests: `accelerate launch` as a user types it, on gloo, each on a port of its own."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def launch(
    script: Path,
    *args: str,
    num_processes: int = 2,
    config: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Runs `script` with `args` through `accelerate launch` and returns its exit code and text, whatever they are.

    With `config` that file alone decides what is started; without, `num_processes` CPU processes that talk over gloo.
    `env` is added to the environment. After `timeout` seconds the processes are ended and TimeoutExpired is raised.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(free_port())]
    if config is not None:
        command += ["--config_file", str(config)]
    elif num_processes == 1:
        command += ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
        command += ["--dynamo_backend", "no"]
    else:
        command += ["--multi_gpu", "--num_processes", str(num_processes), "--num_machines", "1"]
        command += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    return run_command([*command, str(script), *args], env=env, timeout=timeout)


def run_command(
    command: list[str], *, env: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs `command` in a session of its own, with the environment of a test launch; see `launch`."""
    with tempfile.TemporaryDirectory() as hf_home:
        defaults = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "HF_HOME": hf_home,  # so that the user's own default_config.yaml is not taken
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
        }
        process = subprocess.Popen(
            command,
            env=launch_environment() | defaults | dict(env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # the workers too: they are in the launcher's session
            process.communicate()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def launch_environment() -> dict[str, str]:
    """This process's environment without what an outer launch, or this process's Accelerate, left there."""
    distributed = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    prefixes = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "KMP_")
    return {k: v for k, v in os.environ.items() if k not in distributed and not k.startswith(prefixes)}
