"""Adapters through peft: what is trained, saved, loaded and merged."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from causal_cases import SIZES, model_of, tiny_tokenizer
from safetensors import safe_open

from accumft.adapters import add_adapter, base_of, check_adapter_fields, is_adapted, write_merged
from accumft.errors import UserError
from accumft.optim import parameter_groups
from accumft.outputs import load_weights, write_model
from accumft.pretrained import PACKAGED_MODELS, resolve_model_path

FIELDS: dict[str, Any] = {
    "model_name_or_path": None,
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": ("all-linear",),
    "lora_modules_to_save": (),
    "use_rslora": False,
    "use_dora": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "with the head": {"lora_modules_to_save": ("lm_head",), "lora_target_modules": ("q_proj", "v_proj")},
}
IDS = torch.arange(1, 13).view(2, 6)


def fields(**changed: Any) -> Any:
    return SimpleNamespace(**{**FIELDS, **changed})


def shaken(model: Any, seed: int = 1) -> Any:
    """Its trained weights moved, so that the adapter changes something."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_saved_loaded_and_merged(kind: str, tmp_path: Path) -> None:
    base = model_of("Llama").eval()
    before = base(IDS).logits.detach()
    model = add_adapter(base, fields(**KINDS[kind])).eval()
    assert is_adapted(model) and base_of(model) is base
    assert torch.allclose(model(IDS).logits, before, atol=1e-6), "it begins as a change of nothing"
    expected = shaken(model)(IDS).logits.detach()
    assert (expected - before).abs().max() > 0.1

    write_model(model, tiny_tokenizer(), tmp_path / "adapter")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {"README.md", "model.safetensors"} & names
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", framework="pt") as file:
        saved = set(file.keys())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(saved) == len(trained)
    assert any("lm_head" in name for name in saved) is (kind == "with the head")
    assert any("magnitude" in name for name in saved) is (kind == "DoRA")

    other = shaken(add_adapter(model_of("Llama"), fields(**KINDS[kind])), seed=2)
    load_weights(other, tmp_path / "adapter")
    assert torch.equal(other(IDS).logits, expected)

    write_merged(model, tiny_tokenizer(), tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert type(merged) is type(base)
    assert torch.allclose(merged(IDS).logits, expected, atol=1e-4)
    assert torch.equal(model(IDS).logits, expected), "the one in memory is as it was"


def written_base(model: Any, name: str, folder: Path) -> str | None:
    """What adapter_config.json says of the base."""
    write_model(add_adapter(model, fields(model_name_or_path=name)), tiny_tokenizer(), folder)
    found: str | None = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    return found


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_base_folder_is_found_from_any_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(tmp_path)
    model_of("Llama", vocab_size=len(tiny_tokenizer())).save_pretrained("out/base")
    base = transformers.AutoModelForCausalLM.from_pretrained("out/base").eval()
    expected = base(IDS).logits.detach()
    assert written_base(base, "out/base", tmp_path / "adapter") == str((tmp_path / "out" / "base").resolve())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert torch.allclose(again(IDS).logits, expected, atol=1e-6)


def test_a_hub_id_stays_one_also_where_a_package_carries_it(tmp_path: Path) -> None:
    for number, name in enumerate([*PACKAGED_MODELS, "HuggingFaceTB/SmolLM2-135M"]):
        model = model_of("Llama")
        model.name_or_path = model.config._name_or_path = resolve_model_path(name)
        assert written_base(model, name, tmp_path / str(number)) == name


def test_only_the_adapter_is_trained() -> None:
    model = add_adapter(model_of("Llama"), fields())
    decayed, others = parameter_groups(model, 0.01)
    linear = 2 * (4 + 3)
    assert (len(decayed["params"]), len(others["params"])) == (2 * linear, 0)  # type: ignore[arg-type]
    assert {p.shape[0] == 4 or p.shape[1] == 4 for p in decayed["params"]} == {True}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 8 / 4), (True, 8 / 4**0.5)])
def test_scale(use_rslora: bool, scale: float) -> None:
    model = add_adapter(model_of("Llama"), fields(use_rslora=use_rslora))
    scales = {module.scaling["default"] for module in model.modules() if hasattr(module, "lora_A")}
    assert scales == {scale}


def test_a_classification_head_is_trained_and_saved_with_it(tmp_path: Path) -> None:
    sizes = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "bos_token_id", "eos_token_id")}
    config = transformers.BertConfig(**sizes, num_labels=3)
    made = []
    for seed in (0, 1):
        torch.manual_seed(0)
        base = transformers.BertForSequenceClassification(config)
        adapted = add_adapter(base, fields(lora_target_modules=("query", "value")), "SEQ_CLS")
        made.append(shaken(adapted, seed))
    write_model(made[0], tiny_tokenizer(), tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as file:
        assert sum("classifier" in name for name in file.keys()) == 2  # noqa: SIM118
    assert not torch.equal(made[1](IDS).logits, made[0](IDS).logits)
    load_weights(made[1], tmp_path)
    assert torch.equal(made[1](IDS).logits, made[0](IDS).logits)


def test_another_adapter_is_refused(tmp_path: Path) -> None:
    write_model(add_adapter(model_of("Llama"), fields(lora_target_modules=("q_proj",))), tiny_tokenizer(), tmp_path)
    with pytest.raises(UserError, match=r"its adapter is another one, without .*lora_A"):
        load_weights(add_adapter(model_of("Llama"), fields()), tmp_path)


def test_gpt2_whose_matrices_lie_the_other_way_round() -> None:
    model = add_adapter(model_of("GPT2"), fields(lora_target_modules=("c_attn",)))
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 2 * 2


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"lora_r": 0}, "--lora_r 0: must be at least 1"),
        ({"lora_alpha": 0}, "--lora_alpha 0: must be at least 1"),
        ({"lora_dropout": 1.0}, "--lora_dropout 1.0: must be at least 0 and below 1"),
        ({"lora_target_modules": ()}, "--lora_target_modules: name at least one layer"),
        ({"lora_target_modules": ("nothing",)}, "--lora_target_modules nothing: .*q_proj"),
        ({"lora_modules_to_save": ("nothing",)}, "--lora_modules_to_save nothing: LlamaForCausalLM has no such layer"),
    ],
)
def test_mistakes_name_the_flag(changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=f"^{expected}"):
        check_adapter_fields(fields(**changed))
        add_adapter(model_of("Llama"), fields(**changed))
