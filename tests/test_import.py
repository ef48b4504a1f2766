"""Importing the package costs nothing that is not used."""

import subprocess
import sys

import accumft


def test_import_is_light() -> None:
    code = (
        "import sys, accumft; accumft.UserError; "
        "heavy = {'torch', 'accelerate', 'transformers', 'datasets', 'evaluate', 'sklearn', 'matplotlib', 'tyro'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_step_needs_torch_and_accelerate_alone() -> None:
    code = (
        "import sys, accumft; accumft.train_step, accumft.Run, accumft.make_accelerator, accumft.predict; "
        "heavy = {'transformers', 'datasets', 'evaluate', 'sklearn', 'matplotlib', 'pandas', 'tyro'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert len(accumft.__all__) == 19
    for name in accumft.__all__:
        assert getattr(accumft, name).__name__ == name
