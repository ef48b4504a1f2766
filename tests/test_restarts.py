"""A launcher that restarts a run whose process was killed: it goes on by itself, to the very same model."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, free_port, run_command
from runs import Runs, assert_same_run, runs_of

SCRIPT = ROOT / "tests" / "launched" / "launch_restarts.py"
TORCHRUN = ["torch.distributed.run", "--standalone", "--max-restarts", "2", "--nproc-per-node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--max_restarts", "2", "--rdzv_backend", "c10d"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield from runs_of(tmp_path_factory.mktemp("restarts"))


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> Path:
    assert runs.finish("undisturbed", 2) == [0, 0], runs.log("undisturbed")
    return runs.folder / "undisturbed"


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch"])
def test_a_killed_process_restarts_the_run(launcher: str, undisturbed: Path, tmp_path: Path) -> None:
    command = TORCHRUN if launcher == "torchrun" else [*ACCELERATE, "--main_process_port", str(free_port())]
    output_dir, marker = tmp_path / "run", tmp_path / "was killed"
    ended = run_command(
        [sys.executable, "-m", *command, str(SCRIPT), str(output_dir), str(marker)],
        env={
            "ACCELERATE_USE_CPU": "true",
            # With the agent's own store the restarted processes meet the dead ones' keys (pytorch#135712).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "ACCUMFT_CACHE": str(tmp_path / "cache"),
        },
    )
    assert ended.returncode == 0, ended.stderr
    assert marker.exists()
    assert "error: process 1 has ended without a word" in ended.stderr
    assert "no checkpoint in" in ended.stdout, "the first start"
    assert "step-00000004 (step 4 of 12)" in ended.stdout, "the second"
    assert_same_run(output_dir, undisturbed)
