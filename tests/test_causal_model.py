"""Which models are taken as causal: no token's logits may depend on a later token."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from causal_cases import MODELS, SIZES, WITHOUT_GROUPS, model_of, tiny_tokenizer

from accumft.errors import UserError
from accumft.tasks.causal_model import build_small_llama, load_causal_lm, sees_later_tokens

BERT = {**WITHOUT_GROUPS, "eos_token_id": None}
ROBERTA = {**WITHOUT_GROUPS, "max_position_embeddings": 42, "pad_token_id": 1}
GPT2_OF_TWO_TOKENS = {"vocab_size": 2, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
XLNET = {"vocab_size": 40, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}
MAMBA = {"vocab_size": 40, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
MIXTRAL = {**SIZES, "num_local_experts": 4}
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "BERT": ("BertLMHeadModel", BERT, True),
    "BERT as a decoder": ("BertLMHeadModel", {**BERT, "is_decoder": True}, False),
    "RoBERTa": ("RobertaForCausalLM", ROBERTA, True),
    "RoBERTa as a decoder": ("RobertaForCausalLM", {**ROBERTA, "is_decoder": True}, False),
    "XLNet": ("XLNetLMHeadModel", XLNET, True),
    "experts": ("MixtralForCausalLM", MIXTRAL, False),
    "GPT-2 of two tokens": ("GPT2LMHeadModel", {**GPT2_OF_TWO_TOKENS, "bos_token_id": 0, "eos_token_id": 1}, False),
    "Mamba": ("MambaForCausalLM", MAMBA, False),
}


def made(kind: str) -> Any:
    """A new model as `transformers` initialises it."""
    architecture, values, _ = KINDS[kind]
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    return model_class(model_class.config_class(**values))


@pytest.mark.parametrize("kind", KINDS)
def test_what_sees_later_tokens(kind: str) -> None:
    assert sees_later_tokens(made(kind)) is KINDS[kind][2]


@pytest.mark.parametrize("name", MODELS)
def test_decoders_do_not_and_are_left_as_they_were(name: str) -> None:
    model = model_of(name).train()
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    assert sees_later_tokens(model) is False
    assert torch.rand(2).tolist() == expected, "draws that come after it are the same"
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_a_forward_of_another_kind_is_not_judged() -> None:
    class Other(torch.nn.Module):
        def get_input_embeddings(self) -> Any:
            return torch.nn.Embedding(40, 4)

        def forward(self, pictures: Any) -> Any:
            return pictures

    assert sees_later_tokens(Other()) is False


def test_an_encoder_is_refused_as_it_is_loaded(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    for name, values in (("encoder", {}), ("decoder", {"is_decoder": True})):
        config = transformers.RobertaConfig(**ROBERTA | {"vocab_size": len(tokenizer)} | values)
        transformers.RobertaForCausalLM(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    with pytest.raises(UserError) as error:
        load_causal_lm(str(tmp_path / "encoder"))
    assert str(error.value) == (
        f'--model_name_or_path "{tmp_path}/encoder": sees later tokens, so that it would learn to copy what it is to '
        "predict (RobertaForCausalLM is an encoder here); give a decoder such as HuggingFaceTB/SmolLM2-135M, or train "
        "this one with recipes/masked_lm.py"
    )
    model, _ = load_causal_lm(str(tmp_path / "decoder"))
    assert type(model).__name__ == "RobertaForCausalLM"


def test_the_small_llama_is_one() -> None:
    assert sees_later_tokens(build_small_llama(tiny_tokenizer())) is False
