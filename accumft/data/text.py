"""Texts → token ids with lengths → padded batches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from accumft.data.cache import digest_of_texts, digest_of_tokenizer, made_once
from accumft.data.files import unmapped
from accumft.data.windows import Batch
from accumft.errors import UserError

ROWS_WITHOUT_PROGRESS = 10_000
# Measured with MiniLM's tokenizer on two cores: 2,000 synthetic notes take 0.8 s to tokenise and 0.1 to 0.3 s to find
# on disk, where the digest of the tokenizer alone takes 0.1 s. With fewer of them a second start gains less than a
# blink for the files that it leaves, and their memory is no matter.
ROWS_IN_MEMORY = 2_000
FORMAT = 3
"""Version of what `tokenize` makes: to be raised when it makes something else of the same texts."""


def tokenize(
    dataset: Any, tokenizer: Any, max_length: int, show_progress: bool = False, overlap: int | None = None
) -> Any:
    """A `datasets.Dataset` with "text" and perhaps "text_pair" → the same rows as token ids.

    What the tokenizer makes of more than ROWS_IN_MEMORY texts is kept on disk, see `accumft.data.cache`: one of the
    processes of a machine makes it, and none again until the texts, the tokenizer or `max_length` change. There is no
    communication between processes in here, so none runs into a timeout while it waits for another.

    Args:
        max_length: tokens of a row, special tokens included; longer ones are truncated (of a pair, the longer text).
        show_progress: whether a bar is shown, if there are enough rows to wait for.
        overlap: given, a longer text is not truncated but becomes several windows of `max_length` tokens, of which
            neighbours share so many; "input_ids" then holds lists of windows. Needs a fast tokenizer.

    Returns:
        The other columns, and "input_ids", what else the tokenizer makes but the attention mask (which is all ones
        before padding), "length" (tokens), "truncated" (bool) and "lost" (tokens that were left out; -1: unknown).
    """
    texts = [name for name in ("text", "text_pair") if name in dataset.column_names]

    def encode_windows(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encoded = tokenizer(
            columns["text"],
            truncation=True,
            max_length=max_length,
            stride=overlap,
            return_overflowing_tokens=True,
            return_attention_mask=False,
        )
        return _windows_of(encoded, len(columns["text"]))

    def encode(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encoded = tokenizer(
            *[columns[name] for name in texts], truncation=True, max_length=max_length, return_attention_mask=False
        )
        ids = encoded["input_ids"]
        result = dict(encoded)
        result["length"] = [len(row) for row in ids]
        if encoded.encodings is not None:
            result["truncated"] = [bool(row.overflowing) for row in encoded.encodings]
            # Special tokens are in each piece again, and are no loss.
            result["lost"] = [
                sum(len(piece) - sum(piece.special_tokens_mask) for piece in row.overflowing)
                for row in encoded.encodings
            ]
        else:
            result["truncated"] = [len(row) >= max_length for row in ids]
            result["lost"] = [-1] * len(ids)
        return result

    def encode_all(path: str | None = None) -> Any:
        """Into a file, or into memory."""
        with progress_bars(show_progress and len(dataset) > ROWS_WITHOUT_PROGRESS):
            # Not `num_proc`: the threads of fast tokenizers keep every core busy already, for four fifths of the time.
            # Two worker processes were slower than one process here (5.2 to 6.6 s against 4.1 to 5.3 s for 12,000 rows
            # on two cores), and to fork a process that holds a GPU or a process group is asking for trouble.
            return dataset.select_columns(texts).map(
                encode if overlap is None else encode_windows,
                batched=True,
                remove_columns=texts,
                desc="tokenizing",
                load_from_cache_file=False,
                keep_in_memory=path is None,
                cache_file_name=path,
                new_fingerprint=_random_fingerprint(),  # the default hashes the tokenizer
            )

    tokens = None
    identity = digest_of_tokenizer(tokenizer) if len(dataset) > ROWS_IN_MEMORY else None
    if identity is not None:
        made_from = [FORMAT, identity, max_length, overlap, texts, digest_of_texts(dataset, texts)]
        tokens = made_once("tokens", made_from, encode_all)
    if tokens is None:
        tokens = encode_all()
    return _beside(dataset, texts, tokens)


def _windows_of(encoded: Any, texts: int) -> dict[str, list[Any]]:
    """What a fast tokenizer makes of some texts with their overflow → columns, a row a text.

    Returns:
        "input_ids" (lists of windows), "length" (windows × the longest of them), "windows", "truncated" and "lost"
        (nothing is).
    """
    windows: list[list[list[int]]] = [[] for _ in range(texts)]
    for text, ids in zip(encoded["overflow_to_sample_mapping"], encoded["input_ids"], strict=True):
        windows[text].append(ids)
    return {
        "input_ids": windows,
        "length": [len(document) * max(map(len, document)) for document in windows],
        "windows": list(map(len, windows)),
        "truncated": [False] * texts,
        "lost": [0] * texts,
    }


def _beside(dataset: Any, texts: list[str], tokens: Any) -> Any:
    """The columns of `dataset` but the texts, and those of `tokens`; of equal names, those of `tokens`."""
    import datasets

    others = [name for name in dataset.column_names if name not in (*texts, *tokens.column_names)]
    if not others:
        return tokens
    rest = unmapped(dataset.select_columns(others).with_format(None))
    return datasets.concatenate_datasets([rest, tokens], axis=1)


def _random_fingerprint() -> str:
    import datasets

    return datasets.fingerprint.generate_random_fingerprint()


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Whether `datasets` shows its bars."""
    import datasets

    were_shown = not datasets.are_progress_bars_disabled()
    if not shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            datasets.enable_progress_bars()


def check_end_tokens(model: Any, tokenizer: Any, tokenized: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Raises a `UserError` for a text that holds the end-of-text token literally, where the model reads that token.

    Classifiers with a decoder (BART, T5) find the end of a text by it, and want equally many in each row.

    Args:
        tokenized: by split, with the columns "input_ids" and "row"; rows of windows are not looked at.
        names: what each split is called in the message.
    """
    if not getattr(model.config, "is_encoder_decoder", False):
        return
    end = model.config.eos_token_id
    expected = tokenizer("a")["input_ids"].count(end)
    for split, dataset in tokenized.items():
        for block in dataset.iter(1_000):
            for ids, row in zip(block["input_ids"], block["row"], strict=True):
                if isinstance(ids[0], int) and ids.count(end) != expected:
                    raise UserError(
                        f"{names[split]}, row {row}: holds {tokenizer.convert_ids_to_tokens(end)!r}, by which "
                        f"{type(model).__name__} finds the end of a text: take it out of the text"
                    )


def label_tensor(labels: list[Any]) -> torch.Tensor:
    """int64 for class ids, float32 for numbers and for lists of them."""
    tensor = torch.tensor(labels)
    return tensor if tensor.dtype == torch.int64 else tensor.float()


class TextCollator:
    """Columns of tokenised rows → a batch, padded to its longest row: input_ids, attention_mask, …, labels.

    Tensors are (rows, tokens), int64; labels (rows,) int64 or float32, or (rows, labels) float32.
    """

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, columns: dict[str, list[Any]]) -> Batch:
        inputs = {name: columns[name] for name in self.tokenizer.model_input_names if name in columns}
        batch = dict(
            self.tokenizer.pad(
                inputs, padding=True, pad_to_multiple_of=self.pad_to_multiple_of, return_tensors="pt", verbose=False
            )
        )
        if "labels" in columns:
            batch["labels"] = label_tensor(columns["labels"])
        return batch
