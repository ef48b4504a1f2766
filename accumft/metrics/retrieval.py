"""Metrics of embeddings: recall@k, MRR and MAP of a retrieval, Spearman's correlation of scored pairs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

METRIC_NAMES: dict[str, tuple[str, ...]] = {
    "retrieval": ("recall@1", "recall@5", "recall@10", "mrr", "map"),
    "scores": ("spearman", "pearson"),
}
"""The metrics of each kind of data, in the order in which they are shown. More is better, for all of them."""
DEFAULT_METRIC = {"retrieval": "mrr", "scores": "spearman"}
RECALL_AT = (1, 5, 10)
_BLOCK = 256  # queries whose cosines with the whole corpus are in memory at once


@dataclass(frozen=True)
class Retrieval:
    """What a retrieval is to find: for queries, the relevant documents of a corpus."""

    queries: np.ndarray
    """(queries,) which text is the query."""
    corpus: np.ndarray
    """(documents,) which text is the document."""
    relevant: list[np.ndarray]
    """For each query the numbers of its relevant documents, at least one, ascending."""
    left_out: list[np.ndarray]
    """For each query the numbers of documents that are its own text: neither right nor wrong."""
    rows: np.ndarray
    """(queries,) the first row in the source in which the query stands."""


def retrieval_of(ids: np.ndarray, keys: np.ndarray, rows: np.ndarray) -> Retrieval:
    """The retrieval that examples make: each different anchor is a query, all positives and negatives the corpus.

    Args:
        ids, keys: (examples, texts an example) int64: which text, and equal for equal texts; -1 where there is none.
        rows: (examples,) the examples' rows in their source.
    """
    candidate_keys, candidate_ids = keys[:, 1:].ravel(), ids[:, 1:].ravel()
    there = candidate_keys >= 0
    # In the order in which they first come, which decides between equal cosines.
    _, first = np.unique(candidate_keys[there], return_index=True)
    first.sort()
    corpus_keys, corpus = candidate_keys[there][first], candidate_ids[there][first]
    document = {key: number for number, key in enumerate(corpus_keys.tolist())}
    _, first_query = np.unique(keys[:, 0], return_index=True)
    first_query.sort()
    relevant: dict[int, set[int]] = {}
    for anchor, positive in keys[:, :2].tolist():
        relevant.setdefault(anchor, set()).add(document[positive])
    query_keys = keys[first_query, 0].tolist()
    return Retrieval(
        queries=ids[first_query, 0],
        corpus=corpus,
        relevant=[np.array(sorted(relevant[key]), np.int64) for key in query_keys],
        left_out=[np.array([document[key]] if key in document else [], np.int64) for key in query_keys],
        rows=rows[first_query],
    )


def ranks_of(embeddings: np.ndarray, retrieval: Retrieval) -> list[np.ndarray]:
    """For each query the ranks, from 1 and ascending, of its relevant documents by cosine; of equal cosines the
    document that comes first in the corpus is first.

    Args:
        embeddings: (texts, dimensions), of any norm.
    """
    unit = normalized(embeddings)
    corpus = unit[retrieval.corpus]
    found = []
    for start in range(0, len(retrieval.queries), _BLOCK):
        similarity = unit[retrieval.queries[start : start + _BLOCK]] @ corpus.T
        for number, row in enumerate(similarity, start=start):
            relevant = retrieval.relevant[number]
            row[np.setdiff1d(retrieval.left_out[number], relevant)] = -np.inf
            order = np.argsort(-row, kind="stable")
            rank = np.empty(len(order), np.int64)
            rank[order] = np.arange(1, len(order) + 1)
            found.append(np.sort(rank[relevant]))
    return found


def retrieval_metrics(ranks: Sequence[np.ndarray]) -> dict[str, float]:
    """recall@1, @5 and @10, MRR and MAP, each the mean over the queries.

    recall@k is the share of a query's relevant documents that are among the first k; the reciprocal rank is of the
    first relevant document, wherever it is; average precision is the mean of the precision at each relevant one.
    """
    metrics = {f"recall@{k}": float(np.mean([np.mean(rank <= k) for rank in ranks])) for k in RECALL_AT}
    metrics["mrr"] = float(np.mean([1 / rank[0] for rank in ranks]))
    metrics["map"] = float(np.mean([np.mean(np.arange(1, len(rank) + 1) / rank) for rank in ranks]))
    return metrics


def cosines(embeddings: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """(examples,) the cosine of the anchor and the positive of each example."""
    unit = normalized(embeddings)
    products: np.ndarray = np.einsum("nd,nd->n", unit[ids[:, 0]], unit[ids[:, 1]])
    return products


def score_metrics(predicted: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Spearman's and Pearson's correlation of cosines and scores; empty where one of them does not vary."""
    from scipy import stats

    if len(predicted) < 2 or np.ptp(predicted) < 1e-12 or np.ptp(scores) == 0:
        return {}
    return {
        "spearman": float(stats.spearmanr(predicted, scores).statistic),
        "pearson": float(stats.pearsonr(predicted, scores).statistic),
    }


def normalized(embeddings: np.ndarray) -> np.ndarray:
    """Unit vectors, float64."""
    vectors = np.asarray(embeddings, np.float64)
    unit: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit
