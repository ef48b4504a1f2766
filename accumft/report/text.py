"""Text for terminals and pages: aligned tables, and names from the data made safe to show."""

import unicodedata
from collections.abc import Mapping, Sequence

from accumft.metrics import Metrics


def metrics_table(metrics: Metrics | Mapping[str, float]) -> str:
    """A plain-text table: a line a scalar, then a line a class, aligned also where names are Chinese.

    Args:
        metrics: the metrics of a split, or scalars by name.

    Returns:
        Lines joined by newlines, none at the end. A metric that the data leaves undefined shows its reason.
    """
    if not isinstance(metrics, Metrics):
        metrics = Metrics(scalars=dict(metrics))
    scalars = [[printable(name), format_number(value)] for name, value in metrics.scalars.items()]
    scalars += [[printable(name), f"undefined: {reason}"] for name, reason in metrics.undefined.items()]
    widths = [max((display_width(row[0]) for row in scalars), default=0)]
    lines = [f"{_pad(name, widths[0])}  {value}" for name, value in scalars]
    if metrics.per_class:
        columns = ["precision", "recall", "f1", "support"]
        rows = [["class", *columns]]
        rows += [[printable(c["name"]), *(format_number(c[column]) for column in columns)] for c in metrics.per_class]
        lines += ["", *_align(rows)]
    return "\n".join(lines)


def format_number(value: float) -> str:
    """Four decimals, or four significant digits where these say little; whole numbers as they are."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"


def printable(text: str) -> str:
    """The text on one line, with what does not print (control characters, direction marks) as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def display_width(text: str) -> int:
    """Columns that the text takes in a terminal: two for a wide character, none for a combining mark."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )


def shorten(text: str, width: int) -> str:
    """The text cut to at most width columns, with an ellipsis where something was cut."""
    if display_width(text) <= width:
        return text
    while display_width(text) > width - 1:
        text = text[:-1]
    return text + "…"


def _pad(text: str, width: int, right: bool = False) -> str:
    spaces = " " * (width - display_width(text))
    return spaces + text if right else text + spaces


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the first column to the left and the others to the right, two spaces apart."""
    widths = [max(display_width(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(_pad(cell, width, right=i > 0) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
