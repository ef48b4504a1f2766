"""Causal language models and their tokenizers: pretrained, or a small new Llama with a vocabulary from the texts."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from accumft.data.conversations import Example
from accumft.errors import UserError
from accumft.pretrained import Pretrained, choose_padding, set_dropout

SCRATCH_VOCABULARY = 8_000
SCRATCH_POSITIONS = 1_024
START, END = "<|im_start|>", "<|im_end|>"
SCRATCH_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, with marks around what the assistant says."""
UNMARKED_TEMPLATE = SCRATCH_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same without the marks, as most models have it."""
_TRIED_TOKENS = 8
# Change of an earlier token's logits when the last token changes, as a share of how far the logits of different tokens
# lie apart. A decoder has 0, or below 1e-6 where experts that get another number of tokens round differently; a new
# encoder of two layers has 1e-4, a trained one far more.
_ROUNDING = 1e-5


def load_causal_lm(
    model_name_or_path: str,
    *,
    dropout: float | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """(model, tokenizer) for `AutoModelForCausalLM`, in float32 whatever the dtype on disk, padded on the right.

    Args:
        dropout: every dropout probability of the configuration, 0 to 1; None: as the model has them.
        chat_template: file of a Jinja template that replaces the tokenizer's own.

    Raises:
        UserError: besides what loading raises: the model is an encoder, which would learn to copy.
    """
    from transformers import AutoModelForCausalLM

    source = Pretrained(model_name_or_path, trust_remote_code, new="left out, a small new model is trained")
    config, tokenizer = source.config(), source.tokenizer(keep_chat_template=True)
    set_dropout(config, dropout)
    choose_padding(tokenizer, config)
    model = source.model(AutoModelForCausalLM, config)
    if sees_later_tokens(model):
        raise UserError(
            f'--model_name_or_path "{model_name_or_path}": sees later tokens, so that it would learn to copy what it '
            f"is to predict ({type(model).__name__} is an encoder here); give a decoder such as "
            "HuggingFaceTB/SmolLM2-135M, or train this one with recipes/masked_lm.py"
        )
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return model, tokenizer


@torch.no_grad()
def sees_later_tokens(model: Any) -> bool:
    """Whether an earlier token's logits change when the last token does. False where it cannot be tried: what a model
    makes of an input that it was not written for is its own affair."""
    was_training = model.training
    model.eval()
    try:
        size = model.get_input_embeddings().weight.shape[0]
        # From all over the vocabulary: tokens at its ends may be special, or never used.
        row = torch.arange(1, _TRIED_TOKENS + 1) * size // (_TRIED_TOKENS + 2)
        other = row.clone()
        other[-1] = (row[-1] + (size + 1) // 2) % size
        logits = []
        # One by one: in a batch, experts with a limit of tokens would let rows see each other.
        for ids in (row, other):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # Reformer hashes at random
                found = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits
            logits.append(found[0, : _TRIED_TOKENS - 1])
        spread = (logits[0].max(dim=0).values - logits[0].min(dim=0).values).max()
        return bool((logits[0] - logits[1]).abs().max() > _ROUNDING * spread)
    except Exception:
        return False
    finally:
        model.train(was_training)


def read_template(path: str) -> str:
    """The text of a file that holds a chat template."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        template = Path(path).expanduser().read_text(encoding="utf-8")
        _compile_jinja_template(template)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat_template {path}: not read ({error})") from error
    except TemplateError as error:
        raise UserError(f"--chat_template {path}: not a Jinja template ({error})") from error
    return template


def texts_of(examples: Iterable[Example]) -> Iterable[str]:
    """All texts of the examples."""
    for example in examples:
        for message in example.messages:
            yield message["content"]
        yield from filter(None, (example.prompt, example.completion, example.text))


def word_counts(texts: Iterable[str]) -> Counter[str]:
    """How often each word stands in the texts, spelled as byte-level tokenizers do; a blank before it belongs to it."""
    split = _splitter().pre_tokenize_str
    return Counter(word for text in texts for word, _ in split(text))


def build_tokenizer(words: Counter[str]) -> Any:
    """A tokenizer whose tokens are the 256 bytes and the words that occur twice or more, most frequent first.

    It loses nothing: other words are spelled in bytes. A pure function of the counts, which the trainers of
    `tokenizers` 0.23 are not (they break ties by the order of a randomly seeded hash map).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    frequent = [word for word, count in words.items() if count > 1 and word not in set(pieces)]
    pieces += sorted(frequent, key=lambda word: (-words[word], word))[: SCRATCH_VOCABULARY - len(pieces) - 2]
    vocabulary = {piece: index for index, piece in enumerate([START, END, *pieces])}
    # Words that are tokens are looked up whole; of the others, without merges, each byte stays alone.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        model_max_length=SCRATCH_POSITIONS,
        chat_template=SCRATCH_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _splitter() -> Any:
    """Words with the blank before them, digits, punctuation; Chinese in characters."""
    from tokenizers import Regex, pre_tokenizers

    characters = pre_tokenizers.Split(Regex(r"[\u3400-\u9fff]|\p{N}"), "isolated")
    return pre_tokenizers.Sequence([characters, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def build_small_llama(tokenizer: Any, dropout: float | None = None) -> Any:
    """A new Llama of 3 layers of 128 over the tokenizer's vocabulary, input and output embedding tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=SCRATCH_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    set_dropout(config, dropout)
    return LlamaForCausalLM(config)
