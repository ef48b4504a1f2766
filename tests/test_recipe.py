"""Recipes: their checks, the command line, and saved recipes."""

import ast
import inspect
import itertools
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from text_cls import TextClsRecipe

from accumft.cli import load_recipe, main, parse
from accumft.errors import UserError
from accumft.recipe import MINIMUM, POSITIVE, SHARES, TableRecipe, TrainingRecipe, checked

ROOT = Path(__file__).resolve().parents[1]


def test_mistyped_field_raises() -> None:
    recipe = TextClsRecipe()
    with pytest.raises(AttributeError):
        recipe.learing_rate = 1e-3  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe_class", [TrainingRecipe, TableRecipe, TextClsRecipe])
def test_every_field_is_documented(recipe_class: type) -> None:
    body = ast.parse(inspect.getsource(recipe_class)).body[0].body
    documented = [
        node.target.id
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    ]
    assert documented == [node.target.id for node in body if isinstance(node, ast.AnnAssign)]
    assert len(documented) >= 13


def test_ranges_name_fields_that_exist() -> None:
    known = {field.name for field in fields(TextClsRecipe)}
    assert known >= {*MINIMUM, *SHARES, *POSITIVE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": "3e-4"}, r"--learning_rate '3e-4': must be of type float"),
        ({"learning_rate": float("inf")}, "--learning_rate inf: must be positive and finite"),
        ({"learning_rate": 0.0}, "--learning_rate 0.0: must be positive"),
        ({"learning_rate": float("nan")}, "--learning_rate nan: must be positive"),
        ({"optim": "adamw"}, "--optim 'adamw': must be one of .*did you mean 'adamw_torch'"),
        ({"mixed_precision": "f16"}, "did you mean 'fp16'"),
        ({"max_steps": 1.5}, "--max_steps 1.5: must be of type int"),
        ({"from_scratch": 1}, "--from_scratch 1: must be of type bool"),
        ({"seed": True}, "--seed True: must be of type int"),
        ({"seed": 2**32}, "--seed 4294967296: must be at most 4294967295"),
        ({"max_length": 0}, "--max_length 0: must be at least 4"),
        ({"threshold": 1.5}, "--threshold 1.5: must be between 0 and 1"),
        ({"seed": -1}, "--seed -1: must be at least 0"),
        ({"eval_steps": 0}, "--eval_steps 0: must be at least 1"),
        ({"early_stopping_patience": 0}, "--early_stopping_patience 0"),
        ({"max_grad_norm": -1.0}, "--max_grad_norm -1.0: must be positive"),
        ({"adam_beta2": 1.0}, "--adam_beta2 1.0: must be at least 0 and below 1"),
        ({"train_file": 3}, "--train_file 3: must be of type str or None"),
    ],
)
def test_values_out_of_type_or_range(change: dict, message: str) -> None:
    recipe = TextClsRecipe()
    for name, value in change.items():
        setattr(recipe, name, value)
    with pytest.raises(UserError, match=message):
        checked(recipe)


def test_notebook_spellings_are_taken() -> None:
    recipe = TextClsRecipe(text_column="note", class_weights=[1, 2.5], report_to="none", learning_rate=1)
    found = checked(recipe)
    assert (found.text_column, found.class_weights, found.report_to) == (("note",), ("1", "2.5"), ())
    assert recipe.text_column == "note", "the user's object is left alone"


def test_flags_with_underscores_and_hyphens() -> None:
    recipe = parse(
        TextClsRecipe,
        ["--learning-rate", "3e-4", "--text_column", "a", "b", "--from_scratch", "--max-grad-norm", "None"],
    )
    assert recipe == TextClsRecipe(learning_rate=3e-4, text_column=("a", "b"), from_scratch=True, max_grad_norm=None)


def test_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(TextClsRecipe, ["--learnin_rate", "1"])
    assert end.value.code == 2
    assert "--learning_rate" in capsys.readouterr().err


def test_config_then_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "learning_rate: 3e-4\ntext_column: [a, b]\nquotechar: ''\nfrom_scratch: true\nmax_grad_norm: null\n"
    )
    for args in (["--config", str(path), "--seed", "7", "--learning_rate", "1e-3"], [f"--config={path}", "--seed=7"]):
        recipe = parse(TextClsRecipe, args)
        assert (recipe.text_column, recipe.quotechar, recipe.from_scratch) == (("a", "b"), "", True)
        assert (recipe.seed, recipe.max_grad_norm) == (7, None)
        assert recipe.learning_rate == (1e-3 if "--learning_rate" in args else 3e-4)


def test_every_field_survives_yaml(tmp_path: Path) -> None:
    recipe = TextClsRecipe(
        greater_is_better=False,
        delimiter="\t",
        label_delimiter="-",
        class_weights=("1", "2"),
        report_to=("tensorboard",),
    )
    path = tmp_path / "recipe.yaml"
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    path.write_text(yaml.safe_dump({k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}))
    assert load_recipe(TextClsRecipe, str(path)) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnin_rate: 1", 'TextClsRecipe has no field "learnin_rate"; did you mean "learning_rate"'),
        ("learning_rate: fast", '"learning_rate: fast" does not fit; it takes float'),
        ("optim: adam", '"optim: adam" does not fit'),
        ("- a\n- b", "must hold field names and values"),
        ("a: [", "not valid YAML"),
    ],
)
def test_bad_config(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"--config {path}: .*{message}"):
        parse(TextClsRecipe, ["--config", str(path)])


def test_missing_config() -> None:
    with pytest.raises(UserError, match=r"--config nowhere\.yaml: not read"):
        parse(TextClsRecipe, ["--config", "nowhere.yaml"])
    with pytest.raises(UserError, match="name a recipe file"):
        parse(TextClsRecipe, ["--config"])


def test_user_errors_end_in_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def run(recipe: TextClsRecipe) -> None:
        raise UserError("notes.csv, row 3: no label; fill it in")

    with pytest.raises(SystemExit) as end:
        main(run, TextClsRecipe, [])
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: notes.csv, row 3: no label; fill it in\n"


def test_links_of_the_docs_lead_somewhere() -> None:
    folders = (ROOT, ROOT / "recipes", ROOT / "accelerate_configs", ROOT / "docs", ROOT / "benchmarks")
    pages = sorted(path for folder in folders for path in folder.glob("*.md"))
    assert len(pages) == 8
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8"))]
    assert len(links) >= 5
    assert [link for page, link in links if not (page.parent / link).exists()] == []
