"""recall@k, MRR, MAP and correlations, against loops and numbers worked out by hand."""

import numpy as np
import pytest

from accumft.metrics.retrieval import (
    cosines,
    ranks_of,
    retrieval_metrics,
    retrieval_of,
    score_metrics,
)


def test_by_hand() -> None:
    ranks = [np.array([1]), np.array([2, 6]), np.array([11])]
    found = retrieval_metrics(ranks)
    assert found["recall@1"] == pytest.approx(1 / 3)
    assert found["recall@5"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert found["recall@10"] == pytest.approx((1 + 1 + 0) / 3)
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 11) / 3)
    assert found["map"] == pytest.approx((1 + (1 / 2 + 2 / 6) / 2 + 1 / 11) / 3)


def test_queries_corpus_and_relevance() -> None:
    # Texts 0 to 6; the second example has the anchor of the first in another spelling, the third a negative that is
    # the first one's positive, and the fourth's anchor is a document too.
    ids = np.array([[0, 1, -1], [2, 3, -1], [4, 5, 1], [3, 6, -1]])
    keys = np.array([[10, 11, -1], [10, 13, -1], [14, 15, 11], [13, 16, -1]])
    found = retrieval_of(ids, keys, np.array([1, 2, 3, 4]))
    assert found.queries.tolist() == [0, 4, 3]
    assert found.corpus.tolist() == [1, 3, 5, 6]
    assert [relevant.tolist() for relevant in found.relevant] == [[0, 1], [2], [3]]
    assert [left_out.tolist() for left_out in found.left_out] == [[], [], [1]]
    assert found.rows.tolist() == [1, 3, 4]


def test_ranks_against_loops() -> None:
    random = np.random.default_rng(0)
    n = 400  # more than are looked at together
    ids = np.stack([np.arange(n), n + np.arange(n) // 2], axis=1)  # two queries a document
    vectors = random.normal(size=(2 * n, 5))
    retrieval = retrieval_of(ids, ids, np.arange(n))
    found = ranks_of(vectors, retrieval)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for query in (0, 1, 255, 256, 399):
        scores = [unit[query] @ unit[n + document] for document in range(n // 2)]
        own = scores[query // 2]
        assert found[query].tolist() == [1 + sum(score > own for score in scores)]
    # Of a random ranking of 200 documents, recall@10 is 0.05.
    assert retrieval_metrics(found)["recall@10"] == pytest.approx(0.05, abs=0.03)


def test_of_equal_cosines_the_first_document_is_first() -> None:
    ids = np.array([[0, 1], [2, 3]])
    retrieval = retrieval_of(ids, ids, np.array([1, 2]))
    assert [rank.tolist() for rank in ranks_of(np.ones((4, 3)), retrieval)] == [[1], [2]]


def test_the_querys_own_text_is_no_answer() -> None:
    ids = np.array([[0, 1], [1, 2]])  # the second query is the first one's document
    vectors = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.5]])
    found = ranks_of(vectors, retrieval_of(ids, ids, np.array([1, 2])))
    assert found[1].tolist() == [1]


def test_scored_pairs() -> None:
    ids = np.array([[0, 1], [0, 2], [0, 3]])
    vectors = np.array([[1.0, 0.0], [2.0, 0.0], [1.0, 1.0], [-3.0, 0.0]])
    predicted = cosines(vectors, ids)
    assert predicted == pytest.approx([1, 0.5**0.5, -1])
    assert score_metrics(predicted, np.array([0.9, 0.5, 0.1])) == pytest.approx(
        {"spearman": 1.0, "pearson": np.corrcoef(predicted, [0.9, 0.5, 0.1])[0, 1]}
    )
    assert score_metrics(predicted, np.array([0.5, 0.9, 0.1]))["spearman"] == pytest.approx(0.5)
    assert score_metrics(predicted, np.ones(3)) == {}
