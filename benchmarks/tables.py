"""From the measurements of throughput.py to what is shown: medians, ratios, a table, a picture."""

from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
SETTING = ("shape", "effective_batch", "processes")


def summary(started: float, ranks: list[dict[str, Any]]) -> Row:
    """One measurement from what its processes found; the slowest of them is the one that counts."""
    wall = max(rank["wall"] for rank in ranks)
    tokens, padded = (sum(rank[name] for rank in ranks) for name in ("tokens", "padded_tokens"))
    return {
        "tokens_per_second": tokens / wall,
        "padded_over_real": padded / tokens,
        "seconds": wall,
        "outside_seconds": max(rank["wall"] - rank["forward"] - rank["backward"] for rank in ranks),
        "peak_mib": max(rank["peak_mib"] for rank in ranks),
        "first_step_seconds": max(rank["first_step_at"] for rank in ranks) - started,
        "tokens": tokens,
        "examples": sum(rank["examples"] for rank in ranks),
        "micro_batches": sum(rank["micro_batches"] for rank in ranks),
        "steps": ranks[0]["steps"],
    }


def ratio(rows: list[Row], peer: str, other: str) -> float | None:
    """Median over the repeats of a peer's tokens per second over another's in the same repeat; None: not measured."""
    speeds = {(row["peer"], row["repeat"]): row["tokens_per_second"] for row in rows}
    repeats = [repeat for name, repeat in speeds if name == peer and (other, repeat) in speeds]
    return median(speeds[peer, repeat] / speeds[other, repeat] for repeat in repeats) if repeats else None


def by_setting(rows: list[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The measurements of each (shape, effective batch, processes), in order."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in SETTING), []).append(row)
    return found


def table(rows: list[Row]) -> str:
    """Markdown, of the measurements of one setting: a row a peer, medians over the repeats."""
    names = ["peer", "micro-batch", "tokens/s", "of the ceiling", "of Trainer", "padded/real"]
    names += ["outside, %", "peak MiB", "first step, s"]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for peer in dict.fromkeys(row["peer"] for row in rows):
        mine = [row for row in rows if row["peer"] == peer]
        middle = {
            name: median(row[name] for row in mine) for name in mine[0] if isinstance(mine[0][name], (int, float))
        }
        outside = median(row["outside_seconds"] / row["seconds"] for row in mine)
        cells = [
            peer,
            mine[0]["cut"],
            f"{middle['tokens_per_second']:.0f}",
            _number(ratio(rows, peer, "ceiling"), "{:.3f}"),
            _number(ratio(rows, peer, "trainer"), "{:.2f}"),
            f"{middle['padded_over_real']:.2f}",
            f"{100 * outside:.1f}",
            f"{middle['peak_mib']:.0f}",
            f"{middle['first_step_seconds']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    overhead = ratio(rows, "bare_on_accumft", "accumft")
    if overhead is not None:
        lines += ["", f"accumft over a bare loop on its own micro-batches: {100 * (overhead - 1):+.1f} % time"]
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def plot(rows: list[Row], path: Path) -> None:
    """Bars of tokens per second over Trainer's (over the ceiling's where Trainer took no part), a panel a setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = by_setting(rows)
    columns = min(3, len(settings))
    lines = -(-len(settings) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4.6 * columns, 3.0 * lines), squeeze=False)
    for axis in axes.flat[len(settings) :]:
        axis.remove()
    for axis, ((shape, batch, processes), mine) in zip(axes.flat, settings.items()):
        peers = list(dict.fromkeys(row["peer"] for row in mine))
        base = "trainer" if "trainer" in peers else "ceiling" if "ceiling" in peers else peers[0]
        values = [ratio(mine, peer, base) or 0.0 for peer in peers]
        colours = ["tab:orange" if peer.startswith("accumft") else "tab:grey" for peer in peers]
        bars = axis.barh(peers[::-1], values[::-1], color=colours[::-1])
        axis.bar_label(bars, fmt="%.2f", padding=2)
        axis.set_xlim(0, 1.18 * max(values))
        axis.set_title(f"{shape}, effective batch {batch}, {processes} process{'es' * (processes > 1)}", fontsize=9)
        axis.set_xlabel(f"real tokens per second over {base}'s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
