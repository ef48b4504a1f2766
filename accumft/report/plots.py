"""The pictures of a run, as PNG files.

Figures are made without pyplot, so a notebook's own figures, backend and settings are not touched. Fonts are looked at
before anything is drawn: names that no installed font can show are replaced by their ids.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from accumft.report.fonts import drawable_names
from accumft.report.text import display_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREEN, _GREY = "#2f6db3", "#d9702b", "#4f9d69", "#6b7280"
_DOTS_PER_INCH = 150
_MAX_NAMED = 60  # classes: with more of them on an axis the names are too small to read
_MAX_COUNTED = 20  # classes: with more of them the counts do not fit into the cells


def plot_training(rows: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Loss and learning rate against optimizer steps, one above the other.

    Args:
        rows: the rows of metrics.jsonl. Training rows give step, loss and learning_rate; evaluation rows give step and
            eval_loss. Attempts that made no step (stepped: false) are left out.
        path: the PNG file; its folder is made.
    """
    rows = list(rows)
    training = [row for row in rows if row.get("stepped", True) and _is_number(row.get("loss"))]
    rates = [row for row in rows if row.get("stepped", True) and _is_number(row.get("learning_rate"))]
    evaluations = [row for row in rows if _is_number(row.get("eval_loss"))]

    figure = _figure(8.0, 6.0)
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    steps, losses = [row["step"] for row in training], np.array([row["loss"] for row in training])
    smooth = len(losses) >= 50
    # A line through one point shows nothing, so few points are also marked.
    marker = "" if len(losses) > 30 else "."
    loss_axes.plot(
        steps,
        losses,
        color=_BLUE,
        linewidth=0.8,
        marker=marker,
        alpha=0.45 if smooth else 1.0,
        label="training, each step",
    )
    if smooth:
        loss_axes.plot(*_running_mean(steps, losses), color=_BLUE, linewidth=1.8, label="training, running mean")
    if evaluations:
        loss_axes.plot(
            [row["step"] for row in evaluations],
            [row["eval_loss"] for row in evaluations],
            color=_ORANGE,
            linewidth=1.2,
            marker="o",
            markersize=5,
            label="validation",
        )
    loss_axes.set_ylabel("Loss")
    figure.legend(*loss_axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    rate_axes.plot([row["step"] for row in rates], [row["learning_rate"] for row in rates], color=_GREEN, marker=marker)
    rate_axes.set_ylabel("Learning rate")
    rate_axes.set_xlabel("Optimizer step")
    rate_axes.set_ylim(bottom=0)
    rate_axes.set_xlim(0, 1.02 * max([1, *(row["step"] for row in training + rates + evaluations)]))
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    rate_axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (loss_axes, rate_axes):
        _clean(axes)
    _save(figure, path)


def plot_confusion_matrix(
    references: np.ndarray, predictions: np.ndarray, label_names: Sequence[str], path: str | Path
) -> None:
    """How often each true class was predicted as which: the colour is the share of the true class, the text the count.

    Counts are written for up to 20 classes, names for up to 60.

    Args:
        references: (n,) class ids.
        predictions: (n,) class ids.
        label_names: the names, by id. Ids stand for names that no installed font shows.
        path: the PNG file; its folder is made.
    """
    num_labels = len(label_names)
    counts = np.zeros((num_labels, num_labels), dtype=np.int64)
    np.add.at(counts, (np.asarray(references), np.asarray(predictions)), 1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)

    names, family, as_ids = drawable_names(label_names)
    longest = 0.085 * max(display_width(name) for name in names)  # inches
    side = float(np.clip(num_labels * (0.52 if num_labels <= _MAX_COUNTED else 0.27), 3.0, 16.0))
    margin = longest if num_labels <= _MAX_NAMED else 0.4
    figure = _figure(side + margin + 2.2, side + margin + 1.3)
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.7, aspect=25, pad=0.02)
    bar.set_label("Share of the true class", color=_GREY)
    bar.outline.set_visible(False)
    if num_labels <= _MAX_COUNTED:
        for row, column in zip(*np.nonzero(counts), strict=True):
            axes.text(
                column,
                row,
                str(counts[row, column]),
                ha="center",
                va="center",
                fontsize=9 if counts.max() < 1000 else 7,
                color="white" if shares[row, column] > 0.55 else "#1f2937",
            )
    if num_labels <= _MAX_NAMED:
        axes.set_xticks(range(num_labels), names, rotation=90 if longest > side / num_labels else 0, family=family)
        axes.set_yticks(range(num_labels), names, family=family)
        axes.set_xticks(np.arange(num_labels - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(num_labels - 1) + 0.5, minor=True)
        axes.grid(which="minor", color="#e5e7eb", linewidth=0.6)
    suffix = " (id)" if as_ids or num_labels > _MAX_NAMED else ""
    axes.set_xlabel(f"Predicted class{suffix}")
    axes.set_ylabel(f"True class{suffix}")
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_color("#d1d5db")
    _save(figure, path)


def plot_per_label(per_class: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Precision, recall and F1 of each label as bars, with the number of examples that it applies to.

    Args:
        per_class: a dict a label: name, precision, recall, f1, support. Ids stand for names that no installed font
            shows.
        path: the PNG file; its folder is made.
    """
    names, family, as_ids = drawable_names([row["name"] for row in per_class])
    positions = np.arange(len(names))
    figure = _figure(8.0, float(np.clip(0.42 * len(names), 1.5, 60.0)) + 1.1)
    axes = figure.add_subplot()
    for i, (column, title, color) in enumerate(
        [("precision", "Precision", _BLUE), ("recall", "Recall", _ORANGE), ("f1", "F1", _GREEN)]
    ):
        values = [row[column] for row in per_class]
        axes.barh(positions + (i - 1) * 0.26, values, height=0.24, color=color, label=title)
    axes.set_yticks(positions, names, family=family)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_ylabel("Label (id)" if as_ids else "Label")
    support = axes.secondary_yaxis("right")
    support.set_yticks(positions, [str(row["support"]) for row in per_class])
    support.set_ylabel("Examples", color=_GREY)
    support.tick_params(length=0, labelcolor=_GREY)
    support.spines["right"].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    _clean(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    _save(figure, path)


def plot_regression(references: np.ndarray, predictions: np.ndarray, path: str | Path) -> None:
    """Predicted against true values, a panel a target, with the line on which both are equal.

    Args:
        references: (n,) or (n, num_targets) values.
        predictions: values of the same shape.
        path: the PNG file; its folder is made.
    """
    true = np.asarray(references, dtype=np.float64).reshape(len(references), -1)
    predicted = np.asarray(predictions, dtype=np.float64).reshape(len(predictions), -1)
    num_targets = true.shape[1]
    columns = min(num_targets, 3)
    lines = math.ceil(num_targets / columns)
    figure = _figure(5.0 * columns if columns == 1 else 4.0 * columns, 5.0 if columns == 1 else 4.0 * lines)
    for i in range(num_targets):
        axes = figure.add_subplot(lines, columns, i + 1)
        ends = [min(true[:, i].min(), predicted[:, i].min()), max(true[:, i].max(), predicted[:, i].max())]
        room = 0.05 * (ends[1] - ends[0]) or 1.0
        limits = (ends[0] - room, ends[1] + room)
        axes.plot(limits, limits, color=_GREY, linewidth=1.0, linestyle="--", label="equal")
        alpha = float(np.clip(30.0 / math.sqrt(len(true)), 0.05, 0.8))
        axes.scatter(true[:, i], predicted[:, i], s=14, color=_BLUE, alpha=alpha, linewidths=0)
        axes.set_xlim(*limits)
        axes.set_ylim(*limits)
        axes.set_aspect("equal")
        axes.set_xlabel("True value")
        axes.set_ylabel("Predicted value")
        if num_targets > 1:
            axes.set_title(f"Target {i}", fontsize=10)
        axes.legend(frameon=False, loc="upper left")
        _clean(axes, grid="both")
    _save(figure, path)


def _running_mean(steps: Sequence[int], losses: np.ndarray) -> tuple[Sequence[int], np.ndarray]:
    """Each loss averaged with its neighbours, a twentieth of all losses at once; at the ends with those there are."""
    window = np.ones(max(len(losses) // 20, 3))
    return steps, np.convolve(losses, window, "same") / np.convolve(np.ones(len(losses)), window, "same")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def plot_plan(
    learning_rates: np.ndarray, padding: np.ndarray, plain_padding: float, imbalance: np.ndarray, path: str | Path
) -> None:
    """What a dry run knows: the learning rate of every step, and padding and balance over the steps of an epoch.

    Args:
        learning_rates: (total steps,).
        padding: (steps of an epoch,) tokens computed for each real one; `plain_padding` the mean in random order.
        imbalance: (steps of an epoch,) cost of the slowest process over the mean.
        path: the PNG file; its folder is made.
    """
    figure = _figure(8.0, 7.0)
    rate_axes, padding_axes, balance_axes = figure.subplots(3, 1)
    rate_axes.plot(np.arange(1, len(learning_rates) + 1), learning_rates, color=_ORANGE)
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_xlabel("optimizer step")
    padding_axes.hist(padding, bins=40, color=_BLUE)
    padding_axes.axvline(plain_padding, color=_GREY, linestyle="--", label="in random order, mean")
    padding_axes.set_xlabel("tokens computed for each real one")
    padding_axes.set_ylabel("steps")
    padding_axes.legend(frameon=False)
    balance_axes.hist(imbalance, bins=40, color=_GREEN)
    balance_axes.set_xlabel("slowest process against the mean")
    balance_axes.set_ylabel("steps")
    for axes in (rate_axes, padding_axes, balance_axes):
        _clean(axes)
    _save(figure, path)


def _figure(width: float, height: float) -> "Figure":
    """An empty figure of the given size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained", facecolor="white")


def _clean(axes: "Axes", grid: Literal["x", "y", "both"] = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9ca3af")
    axes.grid(axis=grid, color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def _save(figure: "Figure", path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
