"""Models and tokenizers that label tokens: pretrained ones, and a new small BERT."""

from typing import Any

from accumft.data.tokens import check_tokenizer
from accumft.models import small_bert
from accumft.pretrained import Pretrained, choose_padding, set_dropout, set_labels


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
    from transformers import AutoModelForTokenClassification

    source = Pretrained(model_name_or_path, trust_remote_code)
    config, tokenizer = source.config(), source.tokenizer()
    if getattr(tokenizer, "add_prefix_space", True) is False:
        # It is to take words: byte-level ones (RoBERTa, GPT-2) want a blank before each.
        tokenizer = source.tokenizer(add_prefix_space=True)
    check_tokenizer(tokenizer, model_name_or_path)
    set_labels(config, id2label)
    set_dropout(config, dropout)
    choose_padding(tokenizer, config)
    return source.model(AutoModelForTokenClassification, config, outputs=f"{len(id2label)} tags"), tokenizer


def build_small_token_bert(
    vocabulary: dict[str, int], *, id2label: dict[int, str], dropout: float | None = None
) -> tuple[Any, Any]:
    """(model, tokenizer): a `small_bert` that labels tokens."""
    from transformers import BertForTokenClassification

    label2id = {name: index for index, name in id2label.items()}
    config, tokenizer = small_bert(vocabulary, dropout, id2label=id2label, label2id=label2id)
    return BertForTokenClassification(config), tokenizer
