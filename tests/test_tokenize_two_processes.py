"""One process tokenises for longer than the process group's timeout, and the other waits for it without the group."""

from collections.abc import Iterator

import pytest
from runs import Runs, runs_of

TIMEOUT = 5.0
LONGER = 3 * TIMEOUT


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield from runs_of(tmp_path_factory.mktemp("tokenizing"))


def test_a_tokenisation_longer_than_the_timeout_is_waited_for(runs: Runs) -> None:
    own = [{"tokenize_pause": LONGER}, {"tokenize_pause": 1e-3}]
    ids = runs.start("tokenises", per_rank=own, timeout=TIMEOUT, validation_split=None, max_steps=2, eval_steps=None)
    assert runs.wait(ids, 120) == [0, 0], [runs.log("tokenises", rank) for rank in (0, 1)]
    assert "tokenises" in runs.log("tokenises") and "tokenises" not in runs.log("tokenises", 1)


def test_a_step_that_long_ends_the_run(runs: Runs) -> None:
    """So that the test above does not pass because nothing has that timeout."""
    ids = runs.start("steps", per_rank=[{"pauses": {2: LONGER}}, {}], timeout=TIMEOUT)
    assert runs.wait(ids, 120) == [1, 1]
    assert "imed out" in runs.log("steps", 1)
