"""A model folder is read and not run: no pickle, no code that it brings along, no path that it names."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from text_cls import TextClsRecipe, run
from transformers import AutoModelForSequenceClassification, BertConfig, BertTokenizer

from accumft.errors import UserError
from accumft.models import load_sequence_classifier


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A BERT and its tokenizer, without weights."""
    folder = tmp_path / "model"
    config = BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=2
    )
    made = AutoModelForSequenceClassification.from_config(config)
    config.save_pretrained(folder)
    BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5}).save_pretrained(folder)
    torch.save(made.state_dict(), folder / "pytorch_model.bin")
    return folder


def load(folder: Path, **options: Any) -> Any:
    return load_sequence_classifier(
        str(folder), id2label={0: "x", 1: "y"}, problem_type="single_label_classification", **options
    )


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_weights_in_an_honest_pickle_are_read(model):
    saved = torch.load(model / "pytorch_model.bin", weights_only=True)
    loaded, _ = load(model)
    assert all(torch.equal(value, saved[name]) for name, value in loaded.state_dict().items())


def write_code_into_the_pickle(folder: Path, ran: Path, zipped: bool) -> None:
    weights = {"bert.embeddings.word_embeddings.weight": Touch(ran)}
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_does_not_run(model, tmp_path, zipped):
    ran = tmp_path / "ran"
    write_code_into_the_pickle(model, ran, zipped)
    with pytest.raises(Exception, match=r"Weights only|more than weights"):
        load(model)
    assert not ran.exists()
    torch.load(model / "pytorch_model.bin", weights_only=False)
    assert ran.exists(), "the pickle would have run"


@pytest.mark.parametrize("damaged", ["code", "cut short", "safetensors"])
def test_damaged_weights_end_in_one_line(model, tmp_path, damaged):
    weights = model / "pytorch_model.bin"
    if damaged == "code":
        write_code_into_the_pickle(model, tmp_path / "ran", zipped=True)
    elif damaged == "cut short":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        weights.rename(model / "model.safetensors")
    with pytest.raises(UserError) as raised:
        load(model)
    message = str(raised.value)
    assert message.startswith(f'--model_name_or_path "{model}": not loaded (') and len(message.splitlines()) == 1
    assert message.endswith("give another folder")


CODE = """
import os
from transformers import BertConfig, BertTokenizer
os.mkdir({ran!r})
class Config(BertConfig):
    model_type = "wicked"
"""


@pytest.fixture
def with_code(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model folder with code of its own, which makes the folder `ran`."""
    import transformers.dynamic_module_utils as modules

    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (model / "wicked.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    edit(model / "config.json", auto_map={"AutoConfig": "wicked.Config"}, model_type="wicked")
    return model


def test_code_of_a_model_does_not_run_unless_asked_for(with_code, tmp_path):
    with pytest.raises(UserError) as raised:
        load(with_code)
    assert len(str(raised.value).splitlines()) == 1 and "custom code" in str(raised.value)
    assert not (tmp_path / "ran").exists()
    edit(with_code / "config.json", model_type="bert")  # where transformers has the architecture too
    edit(with_code / "tokenizer_config.json", auto_map={"AutoTokenizer": ["wicked.Tokenizer", None]})
    load(with_code)
    assert not (tmp_path / "ran").exists()


def test_code_of_a_model_runs_when_asked_for(with_code, tmp_path):
    edit(with_code / "config.json", model_type="wicked")
    with pytest.raises(Exception):  # noqa: B017 (whatever comes of a configuration without a model)
        load(with_code, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_a_chat_template_leads_out_of_no_folder(model, tmp_path):
    edit(model / "tokenizer_config.json", chat_template=[{"name": "../../../out", "template": "x"}])
    (tmp_path / "a.csv").write_text("text,label\n" + "a a,x\na,y\n" * 20)
    before = files_of(tmp_path)
    recipe = TextClsRecipe(model_name_or_path=str(model), output_dir=str(tmp_path / "run"), max_steps=1)
    recipe.train_file = str(tmp_path / "a.csv")
    run(recipe)
    assert {name.split("/")[0] for name in files_of(tmp_path) - before} == {"run"}
    assert not any("jinja" in name for name in files_of(tmp_path / "run"))
