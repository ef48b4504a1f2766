"""Processes of one run that were given different things stop before step 1, and each says what differs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Runs, runs_of

REMEDY = "; start all of them with the same command, the same data and the same versions\n"
NOTES = [(f"fever and rash on day {n}", "ab"[n % 2]) for n in range(48)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield from runs_of(tmp_path_factory.mktemp("disagreement"))


def assert_stopped(runs: Runs, name: str, message: str, per_rank: list[dict[str, Any]], **fields: Any) -> None:
    ids = runs.start(name, per_rank=per_rank, **fields)
    assert runs.wait(ids) == [2, 2], [runs.log(name, rank) for rank in (0, 1)]
    for rank, says in enumerate(("error: ", "error (process 1): ")):
        log = runs.log(name, rank)
        assert f"{says}processes disagree: {message}" in log and log.endswith(REMEDY), log
        assert "step 1 runs" not in log and "Traceback" not in log
    assert not (runs.folder / name).exists(), "nothing was written"


def test_another_recipe(runs: Runs) -> None:
    message = "--learning_rate is 0.001 on process 0 and 0.002 on process 1; --seed is 42 on process 0 and 43 on"
    assert_stopped(runs, "recipe", message, [{}, {"seed": 43, "learning_rate": 2e-3}])


def test_another_version(runs: Runs) -> None:
    assert_stopped(
        runs,
        "version",
        "accumft is '9.8' on process 0 and '9.9' on process 1",
        [{"version": "9.8"}, {"version": "9.9"}],
    )


@pytest.mark.parametrize(
    "changed, message",
    [
        ([("fever and a rash on day 0", "a"), *NOTES[1:]], "data: digest is "),
        ([("fever and pain on day 0", "a"), *NOTES[1:]], "data: digest is "),
        ([*NOTES, ("no fever", "b")], "data: rows is 43 on process 0 and 44 on process 1; data: digest is "),
        (
            [*NOTES[:-1], ("fever", "c")],
            "data: labels is 'a, b' on process 0 and 'a, b, c' on process 1; data: digest is ",
        ),
    ],
    ids=["another length", "another word", "another row", "another label"],
)
def test_other_data_under_the_same_name(
    runs: Runs, tmp_path: Path, changed: list[tuple[str, str]], message: str, request: pytest.FixtureRequest
) -> None:
    """As on two machines."""
    per_rank = []
    for rank, notes in enumerate((NOTES, changed)):
        folder = tmp_path / str(rank)
        folder.mkdir()
        text = "text,label\n" + "".join(f"{note},{label}\n" for note, label in notes)
        (folder / "notes.csv").write_text(text, encoding="utf-8")
        per_rank.append({"folder": str(folder)})
    assert_stopped(runs, request.node.callspec.id, message, per_rank, train_file="notes.csv")
