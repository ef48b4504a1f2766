"""From the command line to a recipe: flags, saved recipes, and how a mistake ends."""

import contextlib
import difflib
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from accumft.errors import EmptyWindowError, NonFiniteLossError, NotEnoughMemoryError, OutputError, UserError
from accumft.ranks import lost_rank
from accumft.recipe import TrainingRecipe
from accumft.report.text import printable
from accumft.signals import Interrupted

RecipeT = TypeVar("RecipeT", bound=TrainingRecipe)

MESSAGES = (UserError, NonFiniteLossError, EmptyWindowError, NotEnoughMemoryError, OutputError)
"""Errors whose message says all there is to know."""


def parse(recipe_class: type[RecipeT], args: Sequence[str] | None = None) -> RecipeT:
    """The recipe that a command line asks for.

    Args:
        recipe_class: its fields are the flags, written with underscores or hyphens; its docstrings are the help.
        args: default: the process's arguments. `--config FILE` starts from a recipe saved as YAML; the flags win.
    """
    import tyro

    rest = list(sys.argv[1:] if args is None else args)
    config = _pop_config(rest)
    about = f"{recipe_class.__doc__}\n\n--config FILE starts from a saved recipe (YAML), such as a run's recipe.yaml."
    if config is None:
        return tyro.cli(recipe_class, args=rest, description=about, use_underscores=True)
    default = load_recipe(recipe_class, config)
    return tyro.cli(recipe_class, args=rest, default=default, description=about, use_underscores=True)


def _pop_config(args: list[str]) -> str | None:
    """Takes `--config FILE` or `--config=FILE` out of the arguments."""
    config = None
    for index in range(len(args) - 1, -1, -1):
        if args[index].startswith("--config="):
            config = config or args.pop(index).split("=", 1)[1]
        elif args[index] == "--config":
            if index + 1 == len(args):
                raise UserError("--config: name a recipe file, as in --config outputs/run/recipe.yaml")
            config = config or args[index + 1]
            del args[index : index + 2]
    return config


def load_recipe(recipe_class: type[RecipeT], path: str) -> RecipeT:
    """A recipe from a YAML file of field names and values, such as a run's recipe.yaml."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: not read ({error})") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: must hold field names and values, one `name: value` a line")
    known = [field.name for field in fields(recipe_class)]
    args: list[str] = []
    for name, value in values.items():
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1)
            hint = f'; did you mean "{nearest[0]}"?' if nearest else ""
            raise UserError(f'--config {path}: {recipe_class.__name__} has no field "{name}"{hint}')
        args += _as_arguments(recipe_class, str(name), value)
    recipe = _from_arguments(recipe_class, args)
    if recipe is None:
        raise UserError(f"--config {path}: {_first_bad(recipe_class, values)}")
    return recipe


def _from_arguments(recipe_class: type[RecipeT], args: list[str]) -> RecipeT | None:
    """The same conversions and checks as for flags (YAML 1.1 reads 5e-5 as a string), without their message."""
    import tyro

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(recipe_class, args=args, use_underscores=True)
    except SystemExit:
        return None


def _as_arguments(recipe_class: type[TrainingRecipe], name: str, value: Any) -> list[str]:
    if isinstance(value, bool) and get_type_hints(recipe_class)[name] is bool:
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def _first_bad(recipe_class: type[RecipeT], values: dict[str, Any]) -> str:
    """Which of the values is not taken, alone."""
    for name, value in values.items():
        if _from_arguments(recipe_class, _as_arguments(recipe_class, name, value)) is None:
            kind = next(field.type for field in fields(recipe_class) if field.name == name)
            return f'"{name}: {value}" does not fit; it takes {getattr(kind, "__name__", kind)}'
    return "its values do not fit together"


def main(run: Callable[[RecipeT], Any], recipe_class: type[RecipeT], args: Sequence[str] | None = None) -> None:
    """Parses the command line and runs.

    A `UserError` ends in one line on standard error and exit code 2; a loss that is not finite, a row that does not fit
    into memory, and an output that cannot be written in one line and 1; a signal in a checkpoint and 128 + signal.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A label that the terminal's encoding lacks is no reason to stop.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        run(parse(recipe_class, args))
    except MESSAGES as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank > 0:
            # Every process finds the same mistake, and the first one says it; its launcher then ends the others. Only
            # a mistake of this process alone, such as a file missing on one node, is still to be told after a while.
            time.sleep(5)
            print(f"error (process {rank}): {printable(str(error))}", file=sys.stderr, flush=True)
        else:
            print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except Interrupted as end:
        # Everything is saved; the end of the interpreter can take seconds that the job may not have.
        sys.stdout.flush()
        os._exit(128 + end.signum)
    except RuntimeError:
        # Another process has died, as this one has said: its own error only follows.
        if lost_rank() is None:
            raise
        sys.stdout.flush()
        # Not sys.exit: the end of the interpreter may wait for a device that waits for the process that died.
        os._exit(1)
