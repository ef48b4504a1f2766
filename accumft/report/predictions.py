"""predictions.jsonl: what the model said of each example, without the texts."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accumft.metrics import predict_labels

_DIGITS = 6


def write_predictions(
    path: str | Path,
    *,
    split: str,
    rows: Iterable[int],
    texts: Iterable[str | Sequence[str] | bytes],
    references: np.ndarray,
    probabilities: np.ndarray,
    label_names: Sequence[str],
    problem_type: str,
    threshold: float = 0.5,
    append: bool = False,
) -> None:
    """Write one JSON object an example: split, row, text_sha256, label, prediction, probabilities (not for regression).

    The text itself is not written: text_sha256 is the first 16 hexadecimal digits of the SHA-256 of its UTF-8 bytes, a
    pair of texts joined by a zero byte. Numbers are rounded to 6 digits.

    Args:
        path: the file; its folder is made.
        split: "validation" or "test".
        rows: n row numbers in the data, as the user counts them.
        texts: n texts or pairs of texts; of images the digests, which are written as image_blake2b.
        references: (n,) class ids; (n, num_labels) zeros and ones; (n,) or (n, num_targets) numbers for regression.
        probabilities: (n, num_labels); for regression the predictions, in the form of the references.
        label_names: the num_labels names, by id. Not looked at for regression.
        problem_type: Hugging Face's name of the problem type.
        threshold: a label of a multi-label task is predicted where its probability is this or more.
        append: add to the file, for a second split, where otherwise the file begins anew.

    Raises:
        ValueError: rows, texts, references and probabilities are not of one length.
    """
    predictions = predict_labels(problem_type, probabilities, threshold)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate in a label name becomes the JSON escape that stands for it.
    with path.open("a" if append else "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for row, text, reference, prediction, scores in zip(
            rows, texts, references, predictions, probabilities, strict=True
        ):
            record = {
                "split": split,
                "row": int(row),
                **({"image_blake2b": text.hex()} if isinstance(text, bytes) else {"text_sha256": _hash(text)}),
                "label": _value(reference, label_names, problem_type),
                "prediction": _value(prediction, label_names, problem_type),
            }
            if problem_type != "regression":
                record["probabilities"] = {
                    name: round(float(score), _DIGITS) for name, score in zip(label_names, scores, strict=True)
                }
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


def _hash(text: str | Sequence[str]) -> str:
    joined = text if isinstance(text, str) else "\0".join(text)
    return hashlib.sha256(joined.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def _value(value: Any, label_names: Sequence[str], problem_type: str) -> Any:
    if problem_type == "single_label_classification":
        return label_names[int(value)]
    if problem_type == "multi_label_classification":
        return [name for name, applies in zip(label_names, value, strict=True) if applies]
    return np.round(np.asarray(value, dtype=np.float64), _DIGITS).tolist()
