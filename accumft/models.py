"""Text classifiers, small new models and vocabularies, and what the library asks of any model."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from accumft.errors import UserError
from accumft.pretrained import Pretrained, choose_padding, set_dropout, set_labels

SCRATCH_VOCABULARY = 8_000
SCRATCH_POSITIONS = 512


def load_sequence_classifier(
    model_name_or_path: str,
    *,
    id2label: dict[int, str],
    problem_type: str,
    dropout: float | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """(model, tokenizer) for `AutoModelForSequenceClassification`, in float32 whatever the dtype on disk.

    Args:
        dropout: every dropout probability of the configuration, 0 to 1; None: as the model has them.

    Padding is on the right, and the padding token is one that the model knows of, so that a text's logits do not
    depend on what it is batched with.
    """
    from transformers import AutoModelForSequenceClassification

    source = Pretrained(model_name_or_path, trust_remote_code)
    config, tokenizer = source.config(), source.tokenizer()
    set_labels(config, id2label)
    config.problem_type = problem_type
    set_dropout(config, dropout)
    choose_padding(tokenizer, config)
    outputs = f"{len(id2label)} labels"
    return source.model(AutoModelForSequenceClassification, config, outputs=outputs), tokenizer


def small_bert(vocabulary: dict[str, int], dropout: float | None, **fields: Any) -> tuple[Any, Any]:
    """(configuration, tokenizer) of a new BERT of 4 layers of 128, lower-cased, over `vocabulary` (token → id).

    Args:
        fields: of the configuration, besides.
    """
    from transformers import BertConfig, BertTokenizer

    tokenizer = BertTokenizer(vocab=vocabulary, do_lower_case=True, model_max_length=SCRATCH_POSITIONS)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=SCRATCH_POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        **fields,
    )
    set_dropout(config, dropout)
    return config, tokenizer


def build_small_bert(
    vocabulary: dict[str, int], *, id2label: dict[int, str], problem_type: str, dropout: float | None = None
) -> tuple[Any, Any]:
    """(model, tokenizer): a `small_bert` that classifies texts."""
    from transformers import BertForSequenceClassification

    label2id = {name: index for index, name in id2label.items()}
    config, tokenizer = small_bert(vocabulary, dropout, id2label=id2label, label2id=label2id, problem_type=problem_type)
    return BertForSequenceClassification(config), tokenizer


def train_vocabulary(texts: Iterable[str], size: int = SCRATCH_VOCABULARY) -> dict[str, int]:
    """A WordPiece vocabulary of at most `size` pieces from `texts`: token → id, a pure function of the texts.

    The characters that occur, then the words that occur twice or more, each by frequency; other words are spelled in
    characters, and so is Chinese, as BERT's tokenizer always does. (The trainers of `tokenizers` 0.23 break ties by the
    order of a randomly seeded hash map: two runs over the same texts get two vocabularies.)
    """
    from tokenizers import normalizers, pre_tokenizers

    normalize = normalizers.BertNormalizer(lowercase=True).normalize_str
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in split(normalize(text)))
    characters: Counter[str] = Counter()
    for word, count in words.items():
        characters[word[0]] += count
        for character in word[1:]:
            characters["##" + character] += count
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces += most_frequent(characters, size // 2)
    frequent = Counter({word: count for word, count in words.items() if count > 1 and len(word) > 1})
    pieces += most_frequent(frequent, size - len(pieces))
    return {piece: index for index, piece in enumerate(pieces)}


def most_frequent(counts: Counter[str], number: int) -> list[str]:
    """The `number` most frequent; of equally frequent ones the first by code point."""
    return sorted(counts, key=lambda piece: (-counts[piece], piece))[:number]


def enable_gradient_checkpointing(model: Any) -> None:
    """Lets a `transformers` model compute its activations again in the backward pass, in place."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(f"--gradient_checkpointing: {type(model).__name__} does not support it; leave it out")
    # Not reentrant: that one loses gradients where no input of a block requires one, and upsets DDP.
    arguments = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:  # transformers before 5.20
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    if hasattr(model.config, "use_cache"):  # decoders would warn of it at every forward
        model.config.use_cache = False


def communicates_in_forward(model: nn.Module) -> bool:
    """Whether processes talk to each other in each forward, so that all must have equally many micro-batches."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def position_embedding(model: nn.Module) -> nn.Embedding | None:
    """The model's embedding of absolute positions."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in ("position_embeddings", "wpe"):
            return module
    return None


def first_position(positions: nn.Embedding | None) -> int:
    """Position id of a row's first token: RoBERTa counts from padding_idx + 1, others from 0."""
    return 0 if positions is None or positions.padding_idx is None else positions.padding_idx + 1


def position_limit(model: nn.Module, tokenizer: Any) -> int | None:
    """Tokens that fit into the model's positions, special tokens included; None: no limit is known."""
    limits = []
    # Tokenizers without a limit say 1e30.
    if tokenizer.model_max_length < 10**9:
        limits.append(int(tokenizer.model_max_length))
    embedding = position_embedding(model)
    configured = getattr(model.config, "max_position_embeddings", None)
    if embedding is not None:
        limits.append(embedding.num_embeddings - first_position(embedding))
    elif isinstance(configured, int) and configured > 0:
        limits.append(configured)
    return min(limits, default=None)


def fitting_length(max_length: int, limit: int | None, multiple_of: int | None) -> int:
    """`max_length`, or what of it stays within the model's positions when rows are padded to a multiple."""
    length = max_length if limit is None else min(max_length, limit)
    if multiple_of is None or limit is None or -(-length // multiple_of) * multiple_of <= limit:
        return length
    if multiple_of > limit:
        raise UserError(f"--pad_to_multiple_of {multiple_of}: the model has {limit} positions; lower it")
    return limit // multiple_of * multiple_of
