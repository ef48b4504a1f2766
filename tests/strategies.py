"""What hypothesis writes into files, and how it is run: the same each time, and without a folder in the repository."""

import tempfile
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

hypothesis.configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "hypothesis")  # not into the repository
# The same examples in every run, on a machine however busy.
SETTINGS = {"derandomize": True, "deadline": None, "database": None}


def some(examples: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=examples, **SETTINGS)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
# What has a meaning in one of the formats, often.
WICKED = st.text(st.sampled_from(list(",;\t|\"'\r\n\\ \u2028\x85\ufeffa胸\U0001f637")), max_size=8)
CELL = st.one_of(TEXT, WICKED, st.sampled_from(["NA", "null", "", " ", "1.0", "true", "=1+1", '""']))
