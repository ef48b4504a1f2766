"""Encoder-decoder models (T5, BART, …) and their tokenizers: loaded, or a small T5 made from scratch."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from accumft.errors import UserError
from accumft.models import SCRATCH_VOCABULARY, most_frequent
from accumft.pretrained import Pretrained, choose_padding, set_dropout

# What Metaspace puts for a blank. Words keep it; ideographs and signs are pieces of their own.
_BLANK = "\u2581"
_PIECE = re.compile(rf"{_BLANK}?[^\W\u3040-\u30ff\u3400-\u9fff]+|.")
_SPECIAL = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
# A text gets the pieces with the largest sum of these: whole words where there are such, else characters.
_WORD_SCORE, _CHARACTER_SCORE = -1.0, -4.0


def load_seq2seq(
    model_name_or_path: str, *, dropout: float | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """(model, tokenizer) for `AutoModelForSeq2SeqLM`, in float32 whatever the dtype on disk, padding on the right.

    Args:
        dropout: every dropout probability of the configuration, 0 to 1; at 0 no layer is dropped either. None: as the
            model has them.

    Raises:
        UserError: no such model, or one that is no encoder-decoder or cannot shift its labels itself.
    """
    from transformers import AutoModelForSeq2SeqLM

    source = Pretrained(model_name_or_path, trust_remote_code, new="left out, a small new T5 is trained")
    config, tokenizer = source.config(), source.tokenizer()
    if not getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f'--model_name_or_path "{model_name_or_path}": {config.model_type} has no encoder and decoder; give a T5, '
            "BART or their like"
        )
    set_dropout(config, dropout)
    choose_padding(tokenizer, config)
    model = source.model(AutoModelForSeq2SeqLM, config)
    if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise UserError(
            f'--model_name_or_path "{model_name_or_path}": {type(model).__name__} cannot make decoder inputs of labels '
            "(prepare_decoder_input_ids_from_labels); give another model"
        )
    return model, tokenizer


def build_small_t5(
    pieces: list[tuple[str, float]], *, d_model: int = 64, num_layers: int = 2, dropout: float | None = None
) -> tuple[Any, Any]:
    """(model, tokenizer): a new T5 1.1 over `train_pieces`, with tied embeddings and four heads.

    Args:
        d_model: a multiple of 4.
        num_layers: of the encoder, and as many of the decoder.
    """
    from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

    tokenizer = T5Tokenizer(vocab=[(piece, score) for piece, score in pieces], extra_ids=0)
    config = T5Config(
        vocab_size=len(pieces),
        d_model=d_model,
        d_kv=d_model // 4,
        d_ff=2 * d_model,
        num_layers=num_layers,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    set_dropout(config, dropout)
    return T5ForConditionalGeneration(config), tokenizer


def train_pieces(texts: Iterable[str], size: int = SCRATCH_VOCABULARY) -> list[tuple[str, float]]:
    """Pieces for T5's tokenizer, (piece, score) by id: the words that occur twice or more, and all characters.

    At most `size` of them, a pure function of the texts. A text is cut into as few pieces as it can be. (The trainers
    of `tokenizers` 0.23 break ties by the order of a randomly seeded hash map.)
    """
    words: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    for text in texts:
        for word in text.split():
            words.update(_PIECE.findall(_BLANK + word))
            characters.update(_BLANK + word)
    kept = most_frequent(characters, size // 2)
    frequent = Counter({word: count for word, count in words.items() if count > 1 and len(word) > 1})
    found = [(word, _WORD_SCORE) for word in most_frequent(frequent, size - len(kept) - len(_SPECIAL))]
    return [*_SPECIAL, *found, *((character, _CHARACTER_SCORE) for character in kept)]


def set_generation(model: Any, num_beams: int | None, max_new_tokens: int) -> None:
    """Writes into the model's generation_config, which is saved with it, how texts are generated; in place.

    Without sampling, so that a text is a function of the weights. What else the model has (a forced first token as in
    BART, a length penalty) stays as it is.

    Args:
        num_beams: None: as the model has it.
    """
    config = model.generation_config
    config.max_length = None
    config.max_new_tokens = max_new_tokens
    config.do_sample = False
    config.temperature = config.top_k = config.top_p = None
    if num_beams is not None:
        config.num_beams = num_beams
    if (config.num_beams or 1) == 1:  # what belongs to beams would warn
        config.early_stopping, config.length_penalty = None, None
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, name) is None:
            setattr(config, name, getattr(model.config, name, None))
    if config.min_length and config.min_length > max_new_tokens:
        raise UserError(
            f"--max_new_tokens {max_new_tokens}: the model's generation_config has a min_length of {config.min_length}"
        )


def side_limits(config: Any) -> tuple[int | None, int | None]:
    """Tokens that fit into the positions of encoder and decoder; None: relative positions, as in T5, have no limit."""

    def limit(side: str) -> int | None:
        inner = getattr(config, side, None)  # of two models put together
        places = [(config, f"max_{side}_position_embeddings"), (config, "max_position_embeddings")]
        values = [getattr(place, name, None) for place, name in [*places, (inner, "max_position_embeddings")]]
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    return limit("encoder"), limit("decoder")
