"""predictions.jsonl of a run on pairs of texts: what became of each query, or scored pair, without the texts."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from accumft.data.pairs import PairSplit
from accumft.metrics.retrieval import Retrieval

Ranking = tuple[Retrieval, list[np.ndarray]]
"""What was to be found, and for each query the ranks of its relevant documents, ascending."""


def write_pair_predictions(
    path: Path, split: str, data: PairSplit, ranking: Ranking | None, cosines: np.ndarray
) -> None:
    """Adds a line for each query: the rank of its first relevant document; or for each scored pair: score and cosine.

    Args:
        split: "validation" or "test".
        ranking: None for scored pairs.
        cosines: (examples,) of anchor and positive.
    """
    with path.open("a", encoding="utf-8", newline="\n") as file:

        def write(row: int, text: int, **values: Any) -> None:
            digest = hashlib.sha256(data.texts[text].encode("utf-8", errors="surrogatepass")).hexdigest()[:16]
            file.write(json.dumps({"split": split, "row": row, "text_sha256": digest, **values}) + "\n")

        if ranking is not None:
            retrieval, ranks = ranking
            for row, text, found in zip(retrieval.rows.tolist(), retrieval.queries.tolist(), ranks, strict=True):
                write(row, text, rank=int(found[0]), relevant=len(found))
            return
        assert data.scores is not None
        for row, ids, wanted, cosine in zip(
            data.rows.tolist(), data.ids.tolist(), data.scores.tolist(), cosines.tolist(), strict=True
        ):
            write(row, ids[0], score=wanted, cosine=round(cosine, 6))
