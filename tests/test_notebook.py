"""The notebook as a user runs it: from top to bottom, in a fresh kernel, in an empty folder."""

import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from launching import ROOT, launch_environment
from nbclient import NotebookClient

NOTEBOOK = ROOT / "notebooks" / "text_cls.ipynb"
NUMBER = r"([0-9.e+-]+)"


def execute(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Any]], Path]:
    """(outputs by the id of their cell, the notebook's outputs/notebook folder)."""
    folder = tmp_path_factory.mktemp("notebook")
    settings = tmp_path_factory.mktemp("settings")
    environment = launch_environment() | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        # Not the kernels, startup files and caches of whoever runs the tests.
        "IPYTHONDIR": str(settings),
        "HF_HOME": str(settings),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=280, kernel_name="python3", allow_errors=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    return outputs, folder / "outputs" / "notebook"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Any]], Path]:
    return execute(NOTEBOOK, tmp_path_factory)


def printed(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def found(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    assert match, f"{pattern!r} not in {text!r}"
    return match.groups()


def training_rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "loss" in row]


def max_difference(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    return max(abs(row["loss"] - other["loss"]) for row, other in zip(rows, others, strict=True))


def test_committed_notebooks_are_valid_and_hold_no_outputs() -> None:
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert len(paths) == 2
    for path in paths:
        # As it lies in the file: nbformat.read would add ids that are missing.
        notebook = json.loads(path.read_text(encoding="utf-8"))
        nbformat.validate(notebook)
        assert (notebook["nbformat"], notebook["nbformat_minor"]) >= (4, 5)
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"
        ids = [cell["id"] for cell in notebook["cells"]]
        assert len(set(ids)) == len(ids) > 10
        for cell in notebook["cells"]:
            assert cell["metadata"] == {}
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [] and cell["execution_count"] is None


def test_a_mistyped_field_is_refused(executed: tuple[dict[str, list[Any]], Path]) -> None:
    outputs, _ = executed
    assert "has no attribute 'learning_rat'" in printed(outputs["typo"])


def test_the_run_shows_its_pictures_and_metrics(executed: tuple[dict[str, list[Any]], Path]) -> None:
    outputs, folder = executed
    pictures = [output.data["image/png"] for output in outputs["curves"] if "image/png" in output.get("data", {})]
    assert len(set(pictures)) == 2
    results = json.loads((folder / "minilm" / "all_results.json").read_text(encoding="utf-8"))
    assert results["steps"] == 90 == len(training_rows(folder / "minilm"))
    assert results["test_accuracy"] > 0.6, "eight classes, learnt for real"
    table = outputs["metrics"][0].data
    assert "text/html" in table
    for name in ("loss", "accuracy", "f1_macro", "mcc", "auroc"):
        shown = found(rf"{name} +{NUMBER} +{NUMBER}", table["text/plain"])
        assert list(map(float, shown)) == [round(results[f"{split}_{name}"], 4) for split in ("eval", "test")]


def test_new_notes_get_names_of_departments(executed: tuple[dict[str, list[Any]], Path]) -> None:
    outputs, folder = executed
    config = json.loads((folder / "minilm" / "config.json").read_text(encoding="utf-8"))
    names = set(config["id2label"].values())
    assert len(names) == 8
    lines = printed(outputs["predict"]).splitlines()
    assert len(lines) == 2
    for line in lines:
        label, probability = found(rf"^(\w+) \({NUMBER}\)", line)
        assert label in names
        assert 1 / 8 <= float(probability) <= 1  # of the likeliest of eight


def test_a_run_cut_differently_repeats_the_one_before(executed: tuple[dict[str, list[Any]], Path]) -> None:
    outputs, folder = executed
    first, second = training_rows(folder / "one_process"), training_rows(folder / "accumulated")
    assert [rows[0]["micro_batches"] for rows in (first, second)] == [1, 4]
    assert [rows[0]["examples"] for rows in (first, second)] == [32, 32]
    assert [row["learning_rate"] for row in second] == [row["learning_rate"] for row in first]
    difference = max_difference(first, second)
    assert difference < 1e-4
    text = printed(outputs["cut-difference"])
    assert "at once: 32 examples in 1 micro-batch" in text and "accumulated: 32 examples in 4 micro-batch" in text
    assert found(f"max difference of the losses: {NUMBER}", text) == (f"{difference:.1e}",)


def test_two_processes_after_runs_in_the_kernel_repeat_the_first(
    executed: tuple[dict[str, list[Any]], Path],
) -> None:
    outputs, folder = executed
    text = printed(outputs["launch"])
    assert text.count("effective batch:") == 1  # one process prints
    assert "32 examples over 2 processes, in micro-batches of up to 8" in text and "2 x cpu" in text
    first, second = training_rows(folder / "one_process"), training_rows(folder / "two_processes")
    assert [row["examples"] for row in second] == [row["examples"] for row in first]
    assert [row["learning_rate"] for row in second] == [row["learning_rate"] for row in first]
    difference = max_difference(first, second)
    assert difference < 1e-4
    assert found(f"max difference of the losses: {NUMBER}", printed(outputs["launch-difference"])) == (
        f"{difference:.1e}",
    )


def test_runs_stay_in_the_folder_of_the_kernel(executed: tuple[dict[str, list[Any]], Path]) -> None:
    _, folder = executed
    # Each run once: a folder moved aside would mean that two runs wrote into one.
    assert sorted(path.name for path in folder.iterdir()) == ["accumulated", "minilm", "one_process", "two_processes"]


def test_the_other_recipes(tmp_path_factory: pytest.TempPathFactory) -> None:
    outputs, folder = execute(ROOT / "notebooks" / "other_tasks.ipynb", tmp_path_factory)
    shown = {
        cell.removesuffix("-run"): found[-1]["data"]["text/plain"]
        for cell, found in outputs.items()
        if cell.endswith("-run")
    }
    assert list(shown) == ["token", "masked", "causal", "image", "pairs", "seq2seq"]
    for task, metric in {
        "token": "test_f1",
        "masked": "eval_perplexity",
        "causal": "eval_perplexity",
        "image": "test_accuracy",
        "pairs": "untouched_test_mrr",
        "seq2seq": "test_rougeL",
    }.items():
        value = re.search(rf"'{metric}': {NUMBER}", shown[task])
        assert value and float(value[1]) >= 0, (task, shown[task])
    assert len(list(folder.glob("*/model.safetensors"))) == 6
    assert len(list(folder.glob("*/checkpoints/step-*"))) >= 6
