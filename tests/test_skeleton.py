"""Every recipe has the same parts, by the same names, in the same order."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from text_cls import TextClsRecipe

from accumft.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
PARTS = ["load_data", "build_model", "loss_sum", "num_items", "run", "plan"]
MAXIMUM_LINES = 250

each = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def recipe_class(path: Path) -> ast.ClassDef:
    (found,) = [node for node in tree_of(path).body if isinstance(node, ast.ClassDef) and node.name.endswith("Recipe")]
    return found


def test_number_of_recipes() -> None:
    names = ["causal_lm", "contrastive", "image_cls", "masked_lm", "seq2seq", "text_cls", "token_cls"]
    assert [path.stem for path in RECIPES] == names


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "recipes" / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    found: dict[str, Any] = {"TextClsRecipe": TextClsRecipe}
    exec(code, found)
    file = tmp_path / "notes.csv"
    file.write_text("text\n" + "".join(f"a{i}. b{i}. c{i}\n" for i in range(20)), encoding="utf-8")
    recipe = TextClsRecipe(train_file=str(file), text_column=("text", "text_pair"), validation_split=0.0)
    data, source = found["load_data"](recipe)
    assert source == str(file) and data.labels.names == ("in order", "turned")
    assert (data.train["text"][:2], data.train["text_pair"][:2]) == (["a0", "c0"], ["b0", "b0"])
    assert data.train["labels"][:3] == [0, 1, 0] and len(data.train) == 40
    with pytest.raises(UserError, match="--train_file: name a file with a column of texts"):
        found["load_data"](TextClsRecipe())


@each
def test_parts_in_their_order(path: Path) -> None:
    functions = [node.name for node in tree_of(path).body if isinstance(node, ast.FunctionDef)]
    assert [name for name in functions if name in PARTS] == PARTS
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAXIMUM_LINES
    last = tree_of(path).body[-1]
    assert ast.unparse(last) == f"if __name__ == '__main__':\n    main(run, {recipe_class(path).name})"


@each
def test_docstring_says_what_to_launch_and_to_expect(path: Path) -> None:
    text = ast.get_docstring(tree_of(path)) or ""
    assert f"accelerate launch recipes/{path.name}" in text
    assert re.search(r"\d to \d|\d–\d", text), "the expected metric with its range"
    assert re.search(r"minute|second", text)


@each
def test_every_field_is_documented(path: Path) -> None:
    body = recipe_class(path).body
    fields = [index for index, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    for index in fields:
        following = body[index + 1] if index + 1 < len(body) else None
        assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant), ast.unparse(body[index])
        assert len(str(following.value.value)) > 15
    decorator = ast.unparse(recipe_class(path).decorator_list[0])
    assert decorator == "dataclass(kw_only=True, slots=True)"
    assert len(fields) > 3


def test_nothing_happens_at_import(tmp_path: Path) -> None:
    """One process for all: no file, no output, no thread, no data set library."""
    names = [path.stem for path in RECIPES]
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'recipes')!r})\n"
        f"import {', '.join(names)}\nimport threading\n"
        f"recipes = [{', '.join(names)}]\n"
        "assert threading.active_count() == 1\n"
        "print(len(recipes), sorted({'datasets', 'evaluate', 'matplotlib', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(names)} []\n"
    assert list(tmp_path.iterdir()) == []


@each
def test_a_run_is_a_row_of_the_table(path: Path) -> None:
    table = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    assert f"| [{path.name}]({path.name}) |" in table
