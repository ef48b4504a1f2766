"""Nothing from the data or a name runs, breaks out of its page, or lands outside the output folder."""

import ast
import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from small import small_recipe
from text_cls import run

from accumft.dry_run import RunPlan
from accumft.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
WICKED = [
    "<script>alert(1)</script>",
    "$(touch ran)",
    "`touch ran`",
    "../../out",
    '"; touch ran; "',
    "{{ 7 * 7 }} {% raw %}",
    "line\n---\nlicense: mit\n# title",
    "a | b",
    "!!python/object/apply:os.system ['touch ran']",
]
COLUMN = "<img src=x onerror=alert(1)>|{{text}}"


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# The files of a run


@pytest.fixture(scope="module")
def wicked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose labels, texts, columns, file and folder are wicked; the working folder is `work`."""
    root = tmp_path_factory.mktemp("root")
    (root / "work").mkdir()
    source = root / "work" / "$(touch ran) {{x}} <b>.csv"
    with source.open("w", newline="", encoding="utf-8") as file:
        rows = [(f"{label} note {i}", label) for i in range(5) for label in WICKED]
        csv.writer(file).writerows([(COLUMN, "label; rm"), *rows])
    before = os.getcwd()
    os.chdir(root / "work")
    try:
        recipe = small_recipe(root / "work" / "run `touch ran` <i>|{{y}}", train_file=str(source))
        recipe.text_column, recipe.label_column, recipe.max_steps = (COLUMN,), ("label; rm",), 2
        run(recipe)
    finally:
        os.chdir(before)
    return root


def output(root: Path) -> Path:
    (folder,) = [path for path in (root / "work").iterdir() if path.is_dir()]
    return folder


def test_a_run_leaves_its_files_and_no_others(wicked):
    folder = output(wicked)
    assert folder.name == "run `touch ran` <i>|{{y}}"
    outside = {name for name in files_of(wicked) if not name.startswith(f"work/{folder.name}/")}
    assert outside == {"work/$(touch ran) {{x}} <b>.csv"}
    found = files_of(folder)
    assert {"README.md", "config.json", "model.safetensors", "predictions.jsonl", "recipe.yaml"} <= found
    assert [name for name in found if not re.fullmatch(r"[A-Za-z0-9_./-]+", name)] == []
    assert {name for name in found if name.startswith("plots/")} == {
        "plots/training.png", "plots/validation_confusion_matrix.png"
    }  # fmt: skip


def test_labels_stay_what_they_are(wicked):
    folder = output(wicked)
    config = json.loads((folder / "config.json").read_text())
    assert sorted(config["id2label"].values()) == sorted(WICKED)
    predictions = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert {row["label"] for row in predictions} <= set(WICKED) and len(predictions) == 5
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert (recipe["text_column"], recipe["label_column"]) == ([COLUMN], ["label; rm"])


def test_nothing_breaks_the_model_card(wicked):
    from huggingface_hub import ModelCard

    card = ModelCard((output(wicked) / "README.md").read_text())
    header = card.data.to_dict()
    assert set(header) == {"library_name", "metrics", "model-index", "pipeline_tag", "tags"}
    assert header["model-index"][0]["name"] == "run `touch ran` <i>|{{y}}"
    assert header["tags"] == ["accumft", "text-classification"]
    (result, *_) = header["model-index"][0]["results"]
    assert result["dataset"]["type"] == "custom" and "{{x}} <b>.csv" in result["dataset"]["name"]
    page, recipe = card.text.split("## Recipe")
    assert "<" not in page and "{{ 7 \\* 7 }}" in page
    rows = page.split("### By class\n\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) == 2 + len(WICKED)
    headings = [line for line in card.text.splitlines() if line.startswith("#") and "title" not in line]
    assert [line for line in headings if line.startswith("## ")] == [
        "## How to use it", "## Data", "## Results", "## Recipe", "## Versions"
    ]  # fmt: skip
    block = recipe.split("```yaml\n")[1].split("\n```")[0]
    assert yaml.safe_load(block)["text_column"] == [COLUMN]


def test_the_table_of_a_dry_run_is_escaped(monkeypatch):
    monkeypatch.setattr(RunPlan, "rows", lambda self: [("<script>", "'\"><b>&"), ("{{x}}", "</table>")])
    cells = RunPlan._repr_html_(object.__new__(RunPlan))
    assert cells == (
        "<table><tr><td style='text-align:left'>&lt;script&gt;</td>"
        "<td style='text-align:left'>&#x27;&quot;&gt;&lt;b&gt;&amp;</td></tr>"
        "<tr><td style='text-align:left'>{{x}}</td><td style='text-align:left'>&lt;/table&gt;</td></tr></table>"
    )


@pytest.mark.parametrize("name", ["../../out", "/tmp/out", "a/../../../out"])
def test_a_run_name_leads_out_of_no_folder(tmp_path, name):
    recipe = small_recipe(tmp_path / "a" / "b", report_to=("tensorboard",), run_name=name, max_steps=1)
    with pytest.raises(UserError, match="--run_name"):
        run(recipe)
    assert files_of(tmp_path) == set()


# The source


def calls_of(tree: ast.AST) -> Iterator[tuple[str, dict[str, Any]]]:
    """(dotted name, constant keyword arguments) of each call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            constants = {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
            yield ast.unparse(node.func), constants


def dangerous(source: str) -> list[str]:
    """The calls that run code or a shell, or that may when what they read is wicked."""
    never = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
    modules = ("pickle.", "dill.", "joblib.", "marshal.", "shelve.", "cloudpickle.", "pd.read_pickle", "pandas.read_p")
    found = []
    for name, constants in calls_of(ast.parse(source)):
        unpickles = name in ("torch.load", "load") and constants.get("weights_only") is not True
        flags = {flag for flag in ("shell", "allow_pickle", "trust_remote_code") if constants.get(flag) is True}
        if name in never or name.startswith(modules) or unpickles or flags:
            found.append(name)
    return found


def test_the_source_runs_nothing_it_reads():
    files = [path for folder in ("accumft", "recipes") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) >= 48
    assert {str(path): calls for path in files if (calls := dangerous(path.read_text(encoding="utf-8")))} == {}


def test_what_is_dangerous_is_found():
    sources = [
        "eval(x)",
        "exec('1')",
        "os.system(c)",
        "subprocess.run(c, shell=True)",
        "pickle.load(f)",
        "torch.load(f)",
    ]
    sources += ["torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)", "yaml.load(f)", "joblib.load(f)"]
    assert [source for source in sources if not dangerous(source)] == []
    harmless = ["model.eval()", "yaml.safe_load(f)", "torch.load(f, weights_only=True)", "re.compile(x)", "run([c])"]
    assert [source for source in harmless if dangerous(source)] == []
