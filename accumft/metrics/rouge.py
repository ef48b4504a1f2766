"""ROUGE-1, -2 and -L (Lin, 2004) of generated texts, by the package rouge-score (extra `seq2seq`), and exact matches.

Texts are compared in lower case, as words of letters and digits; Chinese, which has no blanks between words, by
characters. Words are not stemmed. Of English texts the words are those of rouge-score's own tokenizer, which leaves out
every letter that is not ASCII.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from accumft.errors import UserError

TYPES = ("rouge1", "rouge2", "rougeL")
# Ideographs, kana: each is a word. Hangul has blanks.
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")


class Words:
    """A tokenizer as rouge-score takes it."""

    def tokenize(self, text: str) -> list[str]:
        """The words of a text."""
        return _WORD.findall(text.lower())


def rouge_of(predictions: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """(texts, 3): F1 of ROUGE-1, -2 and -L of each text; 0 where one side has no words.

    Raises:
        UserError: the package is not installed.
    """
    scorer = _scorer()
    scores = [scorer.score(target, text) for target, text in zip(references, predictions, strict=True)]
    return np.array([[score[name].fmeasure for name in TYPES] for score in scores]).reshape(-1, len(TYPES))


def check_installed() -> None:
    """Raises a `UserError` unless ROUGE can be computed."""
    _scorer()


def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UserError("ROUGE needs the package rouge-score: pip install 'accumft[seq2seq]'") from error
    return RougeScorer(list(TYPES), tokenizer=Words())


def is_exact(prediction: str, reference: str) -> bool:
    """Whether two texts are the same but for white space: tokenizers such as T5's do not keep it."""
    return prediction.split() == reference.split()


def first_line(text: str) -> str:
    """The first line of a text that has anything in it: what a summary that copies would be."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
