"""What entity recognition adds to a run: checks of its fields, scores of a split, and the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from accumft.data.cache import digest_of_tokens
from accumft.data.tags import OUTSIDE, Sentence
from accumft.data.token_splits import TokenData
from accumft.data.token_text import text_of
from accumft.data.tokens import IGNORED, Tokens, sentences_again
from accumft.data.windows import lengths_of
from accumft.errors import UserError
from accumft.finishing import leave_report, without_folders
from accumft.metrics import Metrics
from accumft.metrics.entities import ENTITY_METRICS, Dictionary, entity_scores
from accumft.outputs import check_output_dir
from accumft.recipe import refuse_unused
from accumft.report.entities import entity_task, write_entities
from accumft.report.text import metrics_table, printable
from accumft.run import Run, RunResult
from accumft.tasks.classification import SPLIT_PREFIX

GREATER_IS_BETTER = {"loss": False, **dict.fromkeys(ENTITY_METRICS, True)}


@dataclass(frozen=True, slots=True)
class TokenScores:
    """A split's predictions and what they are worth."""

    loss: float
    """Mean over the labelled pieces."""
    metrics: Metrics
    tags: list[list[str]]
    """Of the words of every sentence."""
    probabilities: list[np.ndarray]
    """(words,) of each sentence: of the predicted tag."""

    @property
    def scalars(self) -> dict[str, float]:
        """The loss and the metrics by name."""
        return {"loss": self.loss, **self.metrics.scalars}


def check_fields(recipe: Any) -> None:
    """Raises a `UserError` where the fields of an entity recognition do not fit each other: none is silently ignored.

    Args:
        recipe: a checked recipe with the fields of recipes/token_cls.py.
    """
    of_files = ("encoding", "delimiter", "column_names", "text_column", "label_column", "tag_scheme", "on_bad_tags")
    refuse_unused(recipe, ("quotechar",), "tokens and tags, whose files quote nothing")
    if recipe.train_file is None and recipe.dataset_name is None:
        if recipe.validation_file or recipe.test_file:
            raise UserError("--validation_file and --test_file need --train_file or --dataset_name")
        names = (*of_files, "dataset_config_name", "validation_split", "on_bad_row")
        refuse_unused(recipe, names, "the synthetic sentences")
    else:
        refuse_unused(recipe, ("synthetic_language", "synthetic_size"), "data of your own")
    if recipe.dataset_name is not None:
        if recipe.train_file or recipe.validation_file or recipe.test_file:
            raise UserError("--dataset_name and files are both given: give one of them")
        refuse_unused(recipe, ("encoding", "delimiter", "column_names"), "--dataset_name")
    elif recipe.dataset_config_name is not None:
        refuse_unused(recipe, ("dataset_config_name",), "files")
    if recipe.from_scratch:
        refuse_unused(recipe, ("model_name_or_path", "trust_remote_code"), "--from_scratch")
    if recipe.stride < 0:
        raise UserError(f"--stride {recipe.stride}: must be at least 0")
    if not recipe.report_to:
        refuse_unused(recipe, ("run_name",), "no tracker (--report_to)")
    elif Path(recipe.run_name).is_absolute() or ".." in Path(recipe.run_name).parts:
        # Trackers that keep files join it to the output folder.
        raise UserError(f"--run_name {recipe.run_name!r}: names a folder outside --output_dir; leave out the path")
    check_output_dir(
        recipe.output_dir, (recipe.train_file, recipe.validation_file, recipe.test_file, recipe.model_name_or_path)
    )


def best_metric(name: str | None, greater_is_better: bool | None, data: TokenData) -> tuple[str, bool]:
    """(metric that picks the best model, whether larger is better), once it is sure that the data defines it."""
    metric = (name or "f1").removeprefix("eval_")
    if metric not in GREATER_IS_BETTER:
        raise UserError(f"--metric_for_best_model {name}: must be one of {', '.join(GREATER_IS_BETTER)}")
    validation = data.splits.get("validation")
    if validation is not None and metric != "loss":
        tags = [sentence.tags for sentence in validation]
        if why := entity_scores(tags, tags).undefined.get(metric):
            raise UserError(
                f"--metric_for_best_model {metric}: undefined on {validation[0].source}: {why}; give other validation "
                "data, or --metric_for_best_model loss"
            )
    return metric, GREATER_IS_BETTER[metric] if greater_is_better is None else greater_is_better


def score(logits: torch.Tensor, tokens: Tokens, sentences: Sequence[Sentence], data: TokenData) -> TokenScores:
    """Scores of a split in one computation over whole sentences.

    Args:
        logits: (labelled pieces, tags) on the CPU, as of `predict_tokens`.
    """
    labels = np.concatenate([np.asarray(row) for row in tokens.windows["labels"]])
    words = np.concatenate([np.asarray(row) for row in tokens.windows["word"]])[labels != IGNORED]
    target = torch.from_numpy(labels[labels != IGNORED])
    logits = logits.double()
    loss = float(F.cross_entropy(logits, target))
    probabilities, ids = logits.softmax(dim=1).max(dim=1)
    # A word of which the tokenizer makes nothing is no entity.
    tags, sure = np.zeros(tokens.words, np.int64), np.ones(tokens.words)
    begins = words >= 0  # the other labelled pieces continue a word
    tags[words[begins]], sure[words[begins]] = ids.numpy()[begins], probabilities.numpy()[begins]
    names = data.labels
    predictions = sentences_again([names[tag] for tag in tags.tolist()], sentences)
    ends = np.cumsum([len(tag) for tag in predictions])
    references = [sentence.tags for sentence in sentences]
    return TokenScores(
        loss,
        entity_scores(references, predictions, data.types),
        predictions,
        np.split(sure, ends[:-1]),
    )


def look_up(data: TokenData, split: str) -> float | None:
    """Entity F1 of a split where its entities are looked up in those of the training data; None: undefined."""
    train, sentences = data.splits["train"], data.splits[split]
    dictionary = Dictionary([s.words for s in train], [s.tags for s in train])
    found = entity_scores([s.tags for s in sentences], [dictionary(s.words) for s in sentences])
    return found.scalars.get("f1")


def fingerprint(tokenized: Mapping[str, Tokens], data: TokenData) -> dict[str, Any]:
    """What training data this is, by name: a run resumes with the same only, and every process must have the same.

    "validation" is of the validation data: where that is another, the best model is picked anew.
    """
    train = tokenized["train"].windows
    found = {"rows": len(train), "labels": ", ".join(data.types), "digest": digest_of_tokens(train)}
    if "validation" in tokenized:
        # Scored are the words of which the tokenizer makes nothing, too.
        tags = "\n".join(" ".join(sentence.tags) for sentence in data.splits["validation"])
        found["validation"] = digest_of_tokens(tokenized["validation"].windows, tags)
    return found


def describe(data: TokenData, tokenized: Mapping[str, Tokens], max_length: int) -> str:
    """Sentences, words, windows and entities of each split, and the notes."""
    lines = []
    for name, tokens in tokenized.items():
        sentences, lengths = data.splits[name], lengths_of(tokens.windows)
        found = sum(tag[:2] == "B-" for sentence in sentences for tag in sentence.tags)
        lines.append(
            f"{name}: {len(sentences):,} sentences, {tokens.words:,} words, {found:,} entities; tokens "
            f"{lengths.mean():.0f} mean / {np.median(lengths):.0f} median / {lengths.max()} max"
        )
        if tokens.split_sentences:
            lines.append(
                f"note: {name}: {tokens.split_sentences} sentences are longer than {max_length} tokens and make "
                f"{len(tokens.windows) - len(sentences) + tokens.split_sentences} windows; each word counts once"
            )
        if tokens.cut_words:
            lines.append(f"note: {name}: {tokens.cut_words} words alone are longer than that; their ends are left out")
        if tokens.lost_words:
            lines.append(f"note: {name}: of {tokens.lost_words} words the tokenizer makes nothing; they count as O")
    counts = {kind: sum(s.tags.count(f"B-{kind}") for s in data.splits["train"]) for kind in data.types}
    lines.append("entities in training: " + ", ".join(f"{printable(kind)} {n:,}" for kind, n in counts.items()))
    return "\n".join(lines + [f"note: {printable(note)}" for note in data.notes])


def report(run: Run, data: TokenData, scores: Mapping[str, TokenScores], source: str, base: str | None) -> RunResult:
    """Prints the metrics and writes all_results.json, predictions.jsonl, the plots and the model card.

    Args:
        scores: by split, "validation" and "test"; empty on processes other than the main one.
        source: what the data is, in a line.
        base: hub id or path that the weights came from; None: from scratch.
    """
    results: dict[str, Any] = {}
    for split, found in scores.items():
        results |= {f"{SPLIT_PREFIX[split]}_{name}": value for name, value in found.scalars.items()}
        if (f1 := look_up(data, split)) is not None:
            results[f"{SPLIT_PREFIX[split]}_dictionary_f1"] = f1

    def draw(folder: Path) -> list[str]:
        return _show_and_draw(data, scores, results, folder)

    shown = scores.get("test") or scores.get("validation")
    sizes = ", ".join(f"{len(sentences):,} {name}" for name, sentences in data.splits.items())
    about = [without_folders("train_file", source), f"{sizes} sentences", f"entities: {', '.join(data.types[:50])}"]
    texts = [text_of(sentence.words)[0] for sentence in data.splits["train"][:20]]
    task = entity_task(data.types, shown.metrics.per_class if shown else [], texts)
    return leave_report(run, task, results, about, base, draw)


def _show_and_draw(
    data: TokenData, scores: Mapping[str, TokenScores], results: Mapping[str, Any], folder: Path
) -> list[str]:
    """Prints the metrics, writes predictions.jsonl, and draws: paths of the pictures in the folder."""
    from accumft.report.plots import plot_per_label

    plots = []
    (folder / "predictions.jsonl").unlink(missing_ok=True)
    for split, found in scores.items():
        sentences = data.splits[split]
        print(f"\n{split} ({len(sentences)} sentences)\n{metrics_table(found.metrics)}")
        if not any(tag != OUTSIDE for tags in found.tags for tag in tags):
            print(f"note: no entity is found in {split}: the model has learnt nothing yet; try more steps")
        by_dictionary = results.get(f"{SPLIT_PREFIX[split]}_dictionary_f1")
        if by_dictionary is not None:
            print(f"looking up the entities of the training data: f1 {by_dictionary:.4f}")
        write_entities(folder / "predictions.jsonl", split, sentences, found.tags, found.probabilities)
        plots.append(f"plots/{split}_entities.png")
        plot_per_label(found.metrics.per_class, folder / plots[-1])
    return plots
