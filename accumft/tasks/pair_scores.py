"""What a run on pairs of texts is worth: the scores of a split, the checks of the fields, and the report."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accumft.data.pairs import PairData, PairSplit
from accumft.data.windows import lengths_of
from accumft.errors import UserError
from accumft.finishing import leave_report, without_folders
from accumft.metrics.retrieval import (
    DEFAULT_METRIC,
    METRIC_NAMES,
    cosines,
    ranks_of,
    retrieval_metrics,
    retrieval_of,
    score_metrics,
)
from accumft.outputs import check_output_dir
from accumft.plan import Plan
from accumft.recipe import refuse_unused
from accumft.report.page import Task
from accumft.report.pair_predictions import Ranking, write_pair_predictions
from accumft.run import Run, RunResult
from accumft.tasks.contrastive import Contrast

PREFIX = {"validation": "eval", "test": "test"}
_HUB_METRICS = {
    **{f"recall@{k}": (f"cosine_recall@{k}", f"Recall@{k}") for k in (1, 5, 10)},
    "mrr": ("cosine_mrr", "MRR"),
    "map": ("cosine_map", "MAP"),
    "spearman": ("spearman_cosine", "Spearman correlation"),
    "pearson": ("pearson_cosine", "Pearson correlation"),
    "loss": ("loss", "Loss"),
}


@dataclass(frozen=True, slots=True)
class PairScores:
    """What the embeddings of a split are worth."""

    loss: float
    """Mean loss over the split, in blocks of the effective batch, in their order."""
    metrics: dict[str, float]
    ranking: Ranking | None
    """None for scored pairs."""
    cosines: np.ndarray
    """(examples,) of anchor and positive."""

    @property
    def scalars(self) -> dict[str, float]:
        """The loss and the metrics by name."""
        return {"loss": self.loss, **self.metrics}


def check_fields(recipe: Any) -> None:
    """Raises a `UserError` where the fields of recipes/contrastive.py do not fit each other."""
    if recipe.train_file is None and recipe.dataset_name is None:
        if recipe.validation_file or recipe.test_file:
            raise UserError("--validation_file and --test_file need --train_file or --dataset_name")
        of_tables = ("encoding", "delimiter", "quotechar", "column_names", "dataset_config_name", "validation_split")
        of_pairs = ("test_split", "text_column", "negative_column", "score_column", "on_bad_row")
        refuse_unused(recipe, of_tables + of_pairs, "the synthetic pairs")
    else:
        refuse_unused(recipe, ("synthetic_size",), "data of your own")
    if len(recipe.text_column) != 2:
        raise UserError(f"--text_column: two columns, anchor and positive, not {len(recipe.text_column)}")
    columns = [*recipe.text_column, *recipe.negative_column, *filter(None, [recipe.score_column])]
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise UserError(f"--text_column, --negative_column, --score_column: {twice[0]!r} is named more than once")
    fractions = {flag: getattr(recipe, flag) for flag in ("validation_split", "test_split")}
    for flag, value in fractions.items():
        if value is not None and not 0 <= value < 1:
            raise UserError(f"--{flag} {value}: must be at least 0 and less than 1")
    for flag in ("temperature", "margin"):
        if not 0 < getattr(recipe, flag) <= 2:
            raise UserError(f"--{flag} {getattr(recipe, flag)}: must be above 0 and at most 2")
    synthetic = recipe.train_file is None and recipe.dataset_name is None
    if recipe.loss == "cosine" and recipe.score_column is None:
        raise UserError("--loss cosine: learns scores of pairs; name their column by --score_column")
    if recipe.score_column is not None and recipe.loss != "cosine":
        raise UserError(f"--score_column {recipe.score_column}: scores are learnt by --loss cosine alone")
    if recipe.loss == "triplet" and not recipe.negative_column and not synthetic:
        raise UserError("--loss triplet: needs negatives; name their columns by --negative_column")
    if recipe.loss == "cosine":
        refuse_unused(recipe, ("negative_column",), "--loss cosine")
    if recipe.loss != "infonce":
        refuse_unused(recipe, ("temperature", "symmetric"), f"--loss {recipe.loss}")
    if recipe.loss != "triplet":
        refuse_unused(recipe, ("margin",), f"--loss {recipe.loss}")
    if recipe.from_scratch:
        refuse_unused(recipe, ("model_name_or_path", "trust_remote_code"), "--from_scratch")
    if not recipe.report_to:
        refuse_unused(recipe, ("run_name",), "no tracker (--report_to)")
    elif Path(recipe.run_name).is_absolute() or ".." in Path(recipe.run_name).parts:
        raise UserError(f"--run_name {recipe.run_name!r}: names a folder outside --output_dir; leave out the path")
    inputs = (recipe.train_file, recipe.validation_file, recipe.test_file, recipe.model_name_or_path)
    check_output_dir(recipe.output_dir, inputs)


def best_metric(name: str | None, greater_is_better: bool | None, loss: str) -> tuple[str, bool]:
    """(metric that picks the best model, whether larger is better).

    Args:
        name, greater_is_better: the recipe's fields; None: the task's own.
        loss: the recipe's.
    """
    kind = "scores" if loss == "cosine" else "retrieval"
    metric = DEFAULT_METRIC[kind] if name is None else name.removeprefix("eval_")
    known = (*METRIC_NAMES[kind], "loss")
    if metric not in known:
        raise UserError(f"--metric_for_best_model {name}: not one of {', '.join(known)}")
    return metric, metric != "loss" if greater_is_better is None else greater_is_better


def contrast_of(recipe: Any, split: PairSplit) -> Contrast:
    """The loss that the fields of a recipe name, on a split's examples."""
    return Contrast(
        recipe.loss,
        torch.from_numpy(split.keys),
        None if split.scores is None else torch.from_numpy(split.scores),
        recipe.temperature,
        recipe.symmetric,
        recipe.margin,
    )


def score(embeddings: torch.Tensor, split: PairSplit, contrast: Contrast, block: int) -> PairScores:
    """Scores of the embeddings of a split's texts, (texts, dimensions) on the CPU.

    Args:
        contrast: of this split.
        block: examples that meet in the loss.
    """
    embeddings = embeddings.double()
    ids = torch.from_numpy(split.ids)
    total = items = 0.0
    for start in range(0, len(split), block):
        some = ids[start : start + block]
        example, position = (some >= 0).nonzero(as_tuple=True)
        labels = (example + start) * ids.shape[1] + position
        total += float(contrast.loss_sum(embeddings[some[example, position]], labels))
        items += contrast.num_items(labels)
    vectors = embeddings.numpy()
    between = cosines(vectors, split.ids)
    loss = total / items if items else float("nan")
    if split.scores is not None:
        return PairScores(loss, score_metrics(between, split.scores), None, between)
    retrieval = retrieval_of(split.ids, split.keys, split.rows)
    ranks = ranks_of(vectors, retrieval)
    return PairScores(loss, retrieval_metrics(ranks), (retrieval, ranks), between)


def describe_pairs(data: PairData, tokenized: Mapping[str, Any], max_length: int, plan: Plan, loss: str) -> str:
    """The notes; and for each split its examples and the lengths of its texts."""
    lines = list(data.notes)
    alone = 1 in (plan.batch.effective_batch_size, plan.num_examples % plan.batch.effective_batch_size)
    if loss == "infonce" and alone and data.splits["train"].ids.shape[1] == 2:
        lines.append(
            "note: the last effective batch of an epoch is a single pair, which has no negatives: its step teaches "
            "nothing; another --effective_batch_size leaves another rest"
        )
    for name, split in data.splits.items():
        lengths = lengths_of(tokenized[name])
        truncated = np.mean(np.asarray(tokenized[name]["truncated"]))
        hard = f", {int((split.ids[:, 2:] >= 0).sum()):,} hard negatives" if split.ids.shape[1] > 2 else ""
        lines.append(
            f"{name}: {len(split):,} pairs{hard} of {len(split.texts):,} texts, tokens {lengths.mean():.0f} mean / "
            f"{np.median(lengths):.0f} median / {lengths.max()} max, {truncated:.1%} truncated at {max_length}"
        )
    return "\n".join(lines)


def fingerprint(data: PairData, examples: Any) -> dict[str, Any]:
    """What training data this is, by name: a run resumes with the same only, and every process must have the same.

    Args:
        examples: of `accumft.data.pair_batches.examples_of`.
    """

    def digest_of(split: PairSplit, lengths: bytes = b"") -> str:
        digest = hashlib.sha256(lengths)
        for text in split.texts:
            digest.update(hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest())
        digest.update(split.ids.tobytes() + (b"" if split.scores is None else split.scores.tobytes()))
        return digest.hexdigest()[:16]

    train = data.splits["train"]
    found = {"pairs": len(train), "digest": digest_of(train, lengths_of(examples).astype(np.int64).tobytes())}
    return found | ({"validation": digest_of(data.splits["validation"])} if "validation" in data.splits else {})


def report(
    run: Run,
    data: PairData,
    scores: Mapping[str, PairScores],
    untouched: Mapping[str, PairScores],
    source: str,
    base: str | None,
) -> RunResult:
    """Prints the metrics and writes all_results.json, predictions.jsonl, the curves and the model card.

    Args:
        scores: by split, "validation" and "test"; empty on processes other than the main one.
        untouched: the same of the model before training.
        source: what the data is, in a line.
        base: hub id or path that the weights came from; None: from scratch.
    """
    results = {f"{PREFIX[split]}_{name}": v for split, found in scores.items() for name, v in found.scalars.items()}
    for split, found in untouched.items():
        results |= {f"untouched_{PREFIX[split]}_{name}": value for name, value in found.scalars.items()}
    recipe = run.recipe_values
    task = Task(
        pipeline_tag="sentence-similarity",
        does="makes a vector of a text, near to those of texts that mean the same",
        code=(
            "from sentence_transformers import SentenceTransformer\n\n"
            'model = SentenceTransformer("path/to/this/folder")\n'
            'vectors = model.encode(["The first text.", "The second text."])\n'
            "print(model.similarity(vectors, vectors))\n"
        ),
        metrics={name: _HUB_METRICS[name] for name in (*METRIC_NAMES["retrieval"], *METRIC_NAMES["scores"], "loss")},
        library_name="sentence-transformers",
    )
    sizes = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    lines = [without_folders("train_file", source), f"{sizes} pairs", f"loss: {recipe['loss']}"]
    if any(found.ranking is not None for found in scores.values()):
        lines.append("in the retrieval, a split's positives and hard negatives are the corpus of its anchors")

    def draw(folder: Path) -> Sequence[str]:
        (folder / "predictions.jsonl").unlink(missing_ok=True)
        for split, found in scores.items():
            before = untouched[split].scalars
            print(f"\n{split} ({len(data.splits[split])} pairs), untouched model → this one")
            for name, value in found.scalars.items():
                print(f"{name:<10} {before.get(name, float('nan')):.4f} → {value:.4f}")
            write_pair_predictions(
                folder / "predictions.jsonl", split, data.splits[split], found.ranking, found.cosines
            )
        return ()

    return leave_report(run, task, results, lines, base, draw)
