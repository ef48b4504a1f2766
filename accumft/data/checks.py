"""What is wrong, or worth a remark, with the labels and texts of a run as a whole."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accumft.data.examples import Examples
from accumft.data.labels import LabelSpec
from accumft.errors import UserError


def check_training_labels(
    train: Examples, labels: LabelSpec, encoded: np.ndarray, problem_type_given: bool, notes: list[str]
) -> None:
    """Raises for labels of which nothing can be learnt, and notes what a person would want to know of them."""
    source, n = train.cells.source, len(train)
    columns = ", ".join(map(repr, train.cells.columns))
    alike = _look_alike(labels.names) if labels.problem_type != "regression" else []
    if alike:
        some = ", ".join(f"{a!r} and {b!r}" for a, b in alike[:5]) + (", …" if len(alike) > 5 else "")
        notes.append(f"{source}: labels of {columns} that hardly differ, yet are different labels: {some}")
    if labels.problem_type == "single_label_classification":
        if labels.num_labels == 1:
            raise UserError(f"{source}: every row has the label {labels.names[0]!r} in {columns}: nothing to learn")
        if (
            labels.num_labels > 5
            and not problem_type_given
            and all(name.lstrip("-").isdigit() for name in labels.names)
        ):
            notes.append(
                f"{source}: {columns} holds whole numbers, so these are {labels.num_labels} classes; if they are "
                "amounts: --problem_type regression"
            )
        if labels.num_labels == n > 20 and not problem_type_given:
            raise UserError(
                f"{source}: no two of its {n} rows have the same label in {columns}: is --label_column right? "
                "If it holds numbers to predict: --problem_type regression"
            )
    elif labels.problem_type == "multi_label_classification":
        without = int((encoded.sum(axis=1) == 0).sum())
        if without:
            notes.append(f"{source}: {without} of {n} rows have none of the {labels.num_labels} labels")
        if never := [name for name, count in zip(labels.names, encoded.sum(axis=0), strict=True) if not count]:
            notes.append(f"{source}: no row has the label {', '.join(map(repr, never))}")
    elif (encoded == encoded[0]).all():
        raise UserError(f"{source}: every row has the same number in {columns}: nothing to learn")
    elif not problem_type_given:
        notes.append(
            f"{source}: {columns} holds numbers, so this is a regression; if they are names of classes: "
            "--problem_type single_label_classification"
        )


def note_repeated(
    examples: Mapping[str, Any], labels: LabelSpec, encoded: np.ndarray, notes: list[str], kind: str, shared_by: str
) -> None:
    """Notes examples that contradict each other in training, and those that are in training and elsewhere too.

    Args:
        examples: by split, each with `comparable` (what makes two the same), `cells` and a length.
        kind: what an example is; shared_by: what "3 of 9 … the training data" says of it: both for the notes.
    """
    train = examples["train"]
    first: dict[Any, int] = {}
    contradicted = set()
    for i, key in enumerate(train.comparable):
        j = first.setdefault(key, i)
        if j != i and (encoded[j] != encoded[i]).any():
            contradicted.add(key)
    if contradicted and labels.problem_type != "regression":
        notes.append(
            f"{train.cells.source}: {kind}s that stand there several times with different labels: {len(contradicted)}"
        )
    for split, other in examples.items():
        shared = sum(key in first for key in other.comparable) if split != "train" else 0
        if shared:
            notes.append(
                f"{other.cells.source}: {shared} of {len(other)} {shared_by} "
                f"{train.cells.source} too, so its score flatters"
            )


def _look_alike(names: Sequence[str]) -> list[tuple[str, str]]:
    """Labels that are another but for case, white space, width and characters that do not show: (that other, label)."""
    first: dict[str, str] = {}
    alike = []
    for name in names:
        shown = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) not in ("Cc", "Cf"))
        other = first.setdefault(" ".join(shown.casefold().split()), name)
        if other is not name:
            alike.append((other, name))
    return alike
