"""The end of every run: results, curves, model card."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accumft.outputs import writing
from accumft.report.page import Task, task_card
from accumft.report.plots import plot_training
from accumft.run import Run, RunResult


def leave_report(
    run: Run,
    task: Task,
    results: Mapping[str, Any],
    data: Sequence[str],
    base: str | None,
    draw: Callable[[Path], Sequence[str]] | None = None,
) -> RunResult:
    """Writes all_results.json, the curves, what `draw` draws, and the model card. Every process calls it.

    Args:
        results: metrics by name, "eval_…" and "test_…".
        data: what the model was trained and scored on, lines in plain words.
        base: hub id or path that the weights came from; None: from scratch.
        draw: given the output folder, draws further pictures into its folder plots/ and returns their paths in it.
    """
    with writing("the report", run.output_dir):
        return _leave_report(run, task, results, data, base, draw)


def _leave_report(
    run: Run,
    task: Task,
    results: Mapping[str, Any],
    data: Sequence[str],
    base: str | None,
    draw: Callable[[Path], Sequence[str]] | None,
) -> RunResult:
    result = run.finish(dict(results))
    if not run.is_main:
        return result
    plots = ["plots/training.png"]
    plot_training(result.history, run.output_dir / plots[0])
    plots += draw(run.output_dir) if draw else ()
    card = task_card(
        task=task,
        model_name=run.output_dir.name,
        recipe={name: without_folders(name, value) for name, value in run.recipe_values.items()},
        results=result.metrics,
        data="\n".join([*data, *run.progress.changes]),
        base_model=None if base is None else without_folders("model_name_or_path", base),
        plots=plots,
    )
    (run.output_dir / "README.md").write_text(card, encoding="utf-8", errors="backslashreplace")
    print(f"\nmodel, metrics, plots and model card: {run.recipe.output_dir}")
    return result


def without_folders(name: str, value: Any) -> Any:
    """A path without the folders of this machine: a model card is made to be shown to others."""
    is_path = name.endswith("_file") or name in ("output_dir", "model_name_or_path", "dataset_name")
    if is_path and isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value
