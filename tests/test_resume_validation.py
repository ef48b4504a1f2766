"""Another validation set at a resume: every recipe can tell, and its best model is picked anew."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resumed import step_folder
from small import rows_of
from token_cls import TokenClsRecipe, run

from accumft.recipe import TrainingRecipe
from accumft.state import read_progress

SIZES = {"train": 24, "validation": 8}
SMALL: dict[str, Any] = {"effective_batch_size": 8, "max_steps": 2}
SCRATCH = {"from_scratch": True, "max_length": 24}


class Reached(Exception):
    """A run that is about to begin, with what it says of its data."""


def seen(recipe: TrainingRecipe, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The fingerprint that the recipe's own `run` gives to its Run."""
    module = importlib.import_module(type(recipe).__module__)

    def begin(*arguments: Any) -> Any:
        raise Reached(arguments[-1])

    monkeypatch.setattr(module, "Run", begin)
    with pytest.raises(Reached) as reached:
        module.run(recipe)
    found: dict[str, Any] = reached.value.args[0]
    return found


def lines(make: Callable[[int, bool], dict[str, Any]]) -> Callable[[Path, list[tuple[int, bool]]], None]:
    """Writes a JSON object of each (number, whether its answer is another)."""

    def write(path: Path, rows: list[tuple[int, bool]]) -> None:
        path.write_text("".join(json.dumps(make(*row)) + "\n" for row in rows), encoding="utf-8")

    return write


def texts(path: Path, rows: list[tuple[int, bool]]) -> None:
    path.write_text("".join(f"the dose of drug {i} {'falls' if other else 'rises'}\n" for i, other in rows))


def arrays(path: Path, rows: list[tuple[int, bool]]) -> None:
    images = np.stack([np.full((16, 16), 2 * i + 1, np.uint8) for i, _ in rows])
    np.savez(path, images=images, labels=np.array([(i + other) % 2 for i, other in rows]))


def letters(i: int) -> str:
    return "abcdefgh"[i % 8]


RECIPES: dict[str, tuple[str, dict[str, Any], Callable[[Path, list[tuple[int, bool]]], None]]] = {
    "text_cls": (
        "jsonl",
        SCRATCH,
        lines(lambda i, other: {"text": f"dose {letters(i)} {i}", "label": "no" if other ^ (i % 2 == 0) else "yes"}),
    ),
    "token_cls": (
        "jsonl",
        SCRATCH,
        # The last word is of no tokens: its tag is scored all the same.
        lines(
            lambda i, other: {"tokens": ["take", letters(i), "\ufffd"], "tags": ["O", "B-D", "B-D" if other else "O"]}
        ),
    ),
    "masked_lm": ("txt", {**SCRATCH, "line_by_line": True}, texts),
    "causal_lm": (
        "jsonl",
        {"max_length": 64, "num_generations": 0},
        lines(lambda i, other: {"prompt": f"drug {letters(i)} {i}", "completion": "falls" if other else "rises"}),
    ),
    "image_cls": ("npz", {}, arrays),
    "contrastive": (
        "jsonl",
        SCRATCH,
        lines(lambda i, other: {"anchor": f"dose {letters(i)} {i}", "positive": f"drug {i + 100 * other}"}),
    ),
    "seq2seq": (
        "jsonl",
        # Targets of 4 tokens: what is left out of them is scored all the same.
        {"d_model": 32, "num_layers": 1, "max_target_length": 4, "max_new_tokens": 4},
        lines(lambda i, other: {"dialogue": f"{letters(i)} {i}", "note": f"the dose {'rises ' * 9}{'b' * other}"}),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_which_validation_data_it_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(name)
    (kind,) = (
        value for value in vars(module).values() if getattr(value, "__module__", "") == name and is_recipe(value)
    )
    suffix, fields, write = RECIPES[name]
    train = [(i, i % 5 == 4) for i in range(SIZES["train"])]  # both answers, so that no words are new
    held_out = [(i, False) for i in range(100, 100 + SIZES["validation"])]
    sets = {"train": train, "turned": train[::-1], "one": held_out, "other": [*held_out[:-1], (held_out[-1][0], True)]}
    for file, rows in sets.items():
        write(tmp_path / f"{file}.{suffix}", rows)

    def fingerprint(training: str, validation: str | None) -> dict[str, Any]:
        files = {"train_file": str(tmp_path / f"{training}.{suffix}"), "validation_split": None if validation else 0.0}
        if validation:
            files["validation_file"] = str(tmp_path / f"{validation}.{suffix}")
        return seen(kind(output_dir=str(tmp_path / "run"), **SMALL, **fields, **files), monkeypatch)

    first, other, turned = (fingerprint(*pair) for pair in (("train", "one"), ("train", "other"), ("turned", "one")))
    assert fingerprint("train", "one") == first
    assert len(first["validation"]) == 16 and other["validation"] != first["validation"] == turned["validation"]
    assert {**other, "validation": 0} == {**first, "validation": 0}, "what a resume is refused for"
    assert turned["digest"] != first["digest"]
    assert fingerprint("train", None) == {name: first[name] for name in first if name != "validation"}


def is_recipe(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, TrainingRecipe)


def test_the_best_model_is_picked_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(name: str, tags: list[str]) -> None:
        rows = [{"tokens": ["take", letters(i), "for", "pain"], "tags": tags} for i in range(32)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("train.jsonl", ["O", "B-D", "O", "O"])
    write("dev.jsonl", ["O", "B-D", "O", "O"])
    fields: dict[str, Any] = {**SCRATCH, "effective_batch_size": 8, "learning_rate": 3e-3, "eval_steps": 4}
    fields |= {"train_file": str(tmp_path / "train.jsonl"), "validation_file": str(tmp_path / "dev.jsonl")}
    fields |= {"save_steps": 4, "save_total_limit": None, "output_dir": str(tmp_path / "run")}
    run(TokenClsRecipe(max_steps=8, **fields))
    before = [row["eval_f1"] for row in rows_of(tmp_path / "run", "eval_f1")]
    assert max(before) == 1.0
    capsys.readouterr()
    write("dev.jsonl", ["B-D", "O", "O", "B-D"])  # the contrary
    fields["resume_from_checkpoint"] = "true"
    result = run(TokenClsRecipe(max_steps=16, **fields))
    assert capsys.readouterr().out.count(
        "other validation data: the best model is picked among the evaluations from here on\n"
    ) == 1  # fmt: skip
    progress = read_progress(step_folder(tmp_path / "run", 16))
    assert (progress.best_value, result.metrics["eval_f1"]) == (0.0, 0.0)
