"""Pictures for the terminal: the exact characters."""

import pytest

from accumft.report.terminal import line_plot


def test_a_ramp() -> None:
    expected = """\
19 ┤      ⢀⡠⠔⠊
   │   ⢀⠤⠒⠁
 0 ┤⡠⠔⠊⠁
   └──────────
    1       20"""
    assert line_plot(range(20), width=10, height=3) == expected


def test_two_values_are_joined() -> None:
    expected = """\
1 ┤    ⣀⠤⠒⠉
0 ┤⣀⠤⠒⠉
  └────────
   a      b"""
    assert line_plot([0.0, 1.0], width=8, height=2, x_labels=("a", "b")) == expected


def test_a_jump_is_drawn_as_a_line() -> None:
    expected = """\
2e-05 ┤     ⡏⠉⠉⠉⠉
      │     ⡇
1e-05 ┤⣀⣀⣀⣀⣀⠇
      └──────────
       1    2,000"""
    assert line_plot([1e-5] * 1000 + [2e-5] * 1000, width=10, height=3, y_format=".0e") == expected


def test_of_many_values_the_extremes_are_seen() -> None:
    values = [0.0] * 100_000
    values[55_555] = 1.0
    expected = """\
1.00 ┤     ⢸
     │     ⢸
0.00 ┤⣀⣀⣀⣀⣀⣸⣀⣀⣀⣀
     └──────────
      1  100,000"""
    assert line_plot(values, width=10, height=3, y_format=".2f") == expected


@pytest.mark.parametrize("values", [[3e-4], [3e-4] * 7, [3e-4] * 70])
def test_a_constant_runs_in_the_middle(values: list[float]) -> None:
    lines = line_plot(values, width=6, height=3).splitlines()
    assert lines[:4] == ["       │", "0.0003 ┤⠒⠒⠒⠒⠒⠒", "       │", "       └──────"]
    assert lines[4] == {1: "        1", 7: "        1    7", 70: "        1   70"}[len(values)]


def test_every_column_and_line_is_there() -> None:
    lines = line_plot([1.0, -1.0, 1.0]).splitlines()
    assert len(lines) == 12
    assert lines[10] == "   └" + "─" * 60
    curve = [line[4:] for line in lines[:10]]
    assert {len(line) for line in curve} <= set(range(61)) and max(map(len, curve)) == 60
    assert all(any(line[column : column + 1].strip() for line in curve) for column in range(60))


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")], [[1.0, 2.0]]])
def test_values_that_have_no_picture(values: list[float]) -> None:
    with pytest.raises(ValueError, match="all of them finite"):
        line_plot(values)


def test_no_size() -> None:
    with pytest.raises(ValueError, match="width 0"):
        line_plot([1.0], width=0)
