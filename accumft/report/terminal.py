"""Pictures for the terminal, in plain text."""

from collections.abc import Sequence

import numpy as np

from accumft.report.text import display_width

# The dots of a braille character as bits of its code point, by row from the top and by column.
BRAILLE_BLANK = 0x2800
BRAILLE_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
DOT_ROWS, DOT_COLUMNS = 4, 2


def line_plot(
    values: Sequence[float] | np.ndarray,
    width: int = 60,
    height: int = 10,
    y_format: str = ".3g",
    x_labels: tuple[str, str] | None = None,
) -> str:
    """A curve of braille dots with axes, each character 2 × 4 dots.

    Args:
        values: finite, at equal distances; of more than 2 × width, a column of dots spans all that fall into it.
        width: columns of the curve; the labels to the left come on top.
        height: lines of the curve; the axis and the labels below are two more.
        y_format: of the largest and the smallest value, as in `format`.
        x_labels: below the first and the last value; None: "1" and their number, as of steps.

    Returns:
        height + 2 lines joined by newlines, none at the end and no trailing spaces.

    Raises:
        ValueError: there is no value, one is not finite, or the size is not positive.
    """
    curve = np.asarray(values, dtype=np.float64)
    if curve.ndim != 1 or len(curve) == 0 or not np.isfinite(curve).all():
        raise ValueError("line_plot: needs at least one value, all of them finite")
    if width < 1 or height < 1:
        raise ValueError(f"line_plot: width {width} and height {height} must be at least 1")
    smallest, largest = curve.min(), curve.max()
    low_label, high_label = format(smallest, y_format), format(largest, y_format)
    if smallest == largest:
        labels = {(height - 1) // 2: high_label}
    elif height == 1:
        labels = {0: f"{low_label} … {high_label}"}
    else:
        labels = {0: high_label, height - 1: low_label}
    margin = max(display_width(label) for label in labels.values())

    lines = []
    for index, line in enumerate(_draw(curve, width, height)):
        label = labels.get(index, "")
        tick = "┤" if label else "│"
        lines.append(f"{' ' * (margin - display_width(label))}{label} {tick}{line}".rstrip())
    lines.append(f"{' ' * margin} └{'─' * width}")
    first, last = x_labels or ("1", f"{len(curve):,}" if len(curve) > 1 else "")
    gap = max(1, width - display_width(first) - display_width(last))
    lines.append(f"{' ' * (margin + 2)}{first}{' ' * gap}{last}".rstrip())
    return "\n".join(lines)


def _draw(curve: np.ndarray, width: int, height: int) -> list[str]:
    """The lines of the curve from the top, `width` characters each."""
    columns, rows = width * DOT_COLUMNS, height * DOT_ROWS
    if len(curve) < columns:
        curve = np.interp(np.linspace(0, len(curve) - 1, columns), np.arange(len(curve)), curve)
    span = curve.max() - curve.min()
    # Rows of dots from the bottom; a constant runs in the middle of its line.
    heights = (curve - curve.min()) / span * (rows - 1) if span > 0 else np.full(len(curve), rows // 2)
    levels = np.rint(heights).astype(np.int64)
    column = np.arange(len(curve)) * columns // len(curve)
    low, high = np.full(columns, rows), np.full(columns, -1)
    np.minimum.at(low, column, levels)
    np.maximum.at(high, column, levels)
    # Steep parts are joined: each column reaches to just beside the one before.
    joined_low, joined_high = low.copy(), high.copy()
    joined_low[1:] = np.minimum(low[1:], high[:-1] + 1)
    joined_high[1:] = np.maximum(high[1:], low[:-1] - 1)

    cells = np.full((height, width), BRAILLE_BLANK)
    for dot_column in range(columns):
        for level in range(joined_low[dot_column], joined_high[dot_column] + 1):
            from_top = rows - 1 - level
            bit = BRAILLE_BITS[from_top % DOT_ROWS][dot_column % DOT_COLUMNS]
            cells[from_top // DOT_ROWS, dot_column // DOT_COLUMNS] |= bit
    return ["".join(" " if cell == BRAILLE_BLANK else chr(cell) for cell in line) for line in cells]
