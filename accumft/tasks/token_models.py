"""Models and tokenizers that label tokens: pretrained ones, and a new small BERT."""

import os
from pathlib import Path
from typing import Any

import torch

from accumft.data.tokens import check_tokenizer
from accumft.errors import UserError
from accumft.models import (
    choose_padding,
    load_error,
    resolve_model_path,
    set_dropout,
    small_bert,
    without_progress_bars,
)


def load_token_classifier(
    model_name_or_path: str,
    *,
    id2label: dict[int, str],
    dropout: float | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """(model, tokenizer) for `AutoModelForTokenClassification`, in float32 whatever the dtype on disk.

    Args:
        dropout: every dropout probability of the configuration, 0 to 1; None: as the model has them.

    Raises:
        UserError: not to be loaded, or with a tokenizer that does not say from which word a piece comes.
    """
    from transformers import AutoConfig, AutoModelForTokenClassification
    from transformers.utils import logging

    if int(os.environ.get("RANK", "0")) > 0:
        # What it says of newly made weights, the first process says for all.
        logging.set_verbosity_error()
    path = resolve_model_path(model_name_or_path)
    if Path(path).is_file():
        raise UserError(f'--model_name_or_path "{path}": a file; give the folder that holds config.json')
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer = _tokenizer_of_words(path, trust_remote_code)
    except Exception as error:  # at files that are damaged or of another kind, it raises whatever comes
        raise load_error(model_name_or_path, error) from error
    check_tokenizer(tokenizer, model_name_or_path)
    # Of no use here, and their names, which the model folder chooses, would become file names.
    tokenizer.chat_template = None
    config.num_labels = len(id2label)
    config.id2label = id2label
    config.label2id = {name: index for index, name in id2label.items()}
    set_dropout(config, dropout)
    choose_padding(tokenizer, config)
    try:
        with without_progress_bars():
            model = AutoModelForTokenClassification.from_pretrained(
                path, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
    except Exception as error:
        if "size mismatch" not in str(error) and "mismatched" not in str(error):
            raise load_error(model_name_or_path, error) from error
        raise UserError(
            f'--model_name_or_path "{model_name_or_path}": its weights do not fit its config.json with '
            f"{len(id2label)} tags; it was probably fine-tuned for other entities: give the model it came from"
        ) from error
    return model, tokenizer


def _tokenizer_of_words(path: str, trust_remote_code: bool) -> Any:
    """The tokenizer, one that takes words: byte-level ones (RoBERTa, GPT-2) want a blank before each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if getattr(tokenizer, "add_prefix_space", True) is False:
        again = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, add_prefix_space=True)
        return again
    return tokenizer


def build_small_token_bert(
    vocabulary: dict[str, int], *, id2label: dict[int, str], dropout: float | None = None
) -> tuple[Any, Any]:
    """(model, tokenizer): a `small_bert` that labels tokens."""
    from transformers import BertForTokenClassification

    label2id = {name: index for index, name in id2label.items()}
    config, tokenizer = small_bert(vocabulary, dropout, id2label=id2label, label2id=label2id)
    return BertForTokenClassification(config), tokenizer
