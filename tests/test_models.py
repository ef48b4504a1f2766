"""Models and tokenizers: where they come from, and that a text's logits do not depend on its batch."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from causal_lm import CausalLmRecipe
from contrastive import ContrastiveRecipe
from image_cls import ImageClsRecipe
from masked_lm import MaskedLmRecipe
from safetensors.torch import load_file, save_file
from seq2seq import Seq2SeqRecipe
from text_cls import TextClsRecipe
from token_cls import TokenClsRecipe
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BertConfig,
    BertTokenizer,
    DebertaV2Config,
    DistilBertConfig,
    EncoderDecoderConfig,
    GPT2Config,
    LlamaConfig,
    ModernBertConfig,
    RobertaConfig,
)

from accumft.data.text import TextCollator, check_end_tokens
from accumft.errors import UserError
from accumft.evaluation import inputs_of
from accumft.models import (
    build_small_bert,
    fitting_length,
    load_sequence_classifier,
    position_limit,
    train_vocabulary,
)
from accumft.pretrained import resolve_model_path, set_dropout
from accumft.recipe import TrainingRecipe
from accumft.synthetic import generate_notes
from accumft.tasks.causal_model import load_causal_lm
from accumft.tasks.embeddings import load_encoder
from accumft.tasks.image_models import load_image_classifier
from accumft.tasks.masked_models import load_masked_lm
from accumft.tasks.seq2seq_models import load_seq2seq
from accumft.tasks.token_models import load_token_classifier

TEXTS = ["chest pain on exertion", "no fever", "cough and fever since monday", "胸痛三天，无发热", "胸痛"] * 3
LABELS = {0: "a", 1: "b", 2: "c"}
SINGLE = "single_label_classification"
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}

CONFIGS = {
    "roberta": RobertaConfig(vocab_size=200, max_position_embeddings=66, pad_token_id=1, **SIZES),
    "distilbert": DistilBertConfig(vocab_size=200, dim=16, n_layers=2, n_heads=2, hidden_dim=16, pad_token_id=0),
    "deberta-v2": DebertaV2Config(vocab_size=200, pad_token_id=0, **SIZES),
    "modernbert": ModernBertConfig(
        vocab_size=200, pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3, **SIZES
    ),
    "gpt2": GPT2Config(vocab_size=200, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=3, eos_token_id=3),
    "llama": LlamaConfig(vocab_size=200, num_key_value_heads=2, bos_token_id=2, eos_token_id=3, **SIZES),
}
DECODERS = ("gpt2", "llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random model of each family in float16, saved; the decoders' tokenizer has no padding token."""
    found = {}
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(name)
        config.num_labels = 3
        config.initializer_range = 0.5  # else the logits of all texts are nearly the same
        AutoModelForSequenceClassification.from_config(config).half().save_pretrained(folder)
        tokenizer = BertTokenizer(vocab=train_vocabulary(TEXTS, 200), model_max_length=10**30)
        if name in DECODERS:
            tokenizer.pad_token = None
            tokenizer.eos_token = "[SEP]"
        tokenizer.save_pretrained(folder)
        found[name] = folder
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_labels_and_logits_that_do_not_depend_on_the_batch(folders: dict[str, Path], name: str) -> None:
    model, tokenizer = load_sequence_classifier(str(folders[name]), id2label=LABELS, problem_type=SINGLE)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model.config.id2label, model.config.label2id) == (LABELS, {"a": 0, "b": 1, "c": 2})
    assert model.config.problem_type == SINGLE
    model.eval()
    columns: dict[str, list[Any]] = dict(tokenizer(TEXTS[:5], return_attention_mask=False))
    collate = TextCollator(tokenizer)
    with torch.no_grad():
        together = model(**inputs_of(collate(columns))).logits
        for index in range(5):
            alone = model(**inputs_of(collate({key: [value[index]] for key, value in columns.items()}))).logits
            assert torch.allclose(together[index], alone[0], atol=1e-5), index
    assert (together[0] - together[1]).abs().max() > 1e-4, "the texts differ"


@pytest.mark.parametrize(("name", "limit"), [("roberta", 64), ("gpt2", 64), ("distilbert", 512), ("modernbert", 8192)])
def test_position_limit(folders: dict[str, Path], name: str, limit: int) -> None:
    model, tokenizer = load_sequence_classifier(str(folders[name]), id2label=LABELS, problem_type=SINGLE)
    assert position_limit(model, tokenizer) == limit
    tokenizer.model_max_length = 20
    assert position_limit(model, tokenizer) == 20


@pytest.mark.parametrize("name", CONFIGS)
def test_dropout_zero_makes_training_mode_deterministic(folders: dict[str, Path], name: str) -> None:
    def spread(dropout: float | None) -> float:
        model, tokenizer = load_sequence_classifier(
            str(folders[name]), id2label=LABELS, problem_type=SINGLE, dropout=dropout
        )
        batch = inputs_of(TextCollator(tokenizer)(dict(tokenizer(TEXTS[:4], return_attention_mask=False))))
        model.train()
        return (model(**batch).logits - model(**batch).logits).abs().max().item()

    assert spread(0.0) == 0.0
    assert spread(0.5) > 0.0


def test_dropout_of_configurations_inside() -> None:
    parts = [BertConfig(hidden_dropout_prob=0.1), BertConfig(attention_probs_dropout_prob=0.2)]
    config = EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    set_dropout(config, 0.0)
    for part in (config.encoder, config.decoder):
        assert (part.hidden_dropout_prob, part.attention_probs_dropout_prob) == (0.0, 0.0)
    bart = BartConfig(encoder_layerdrop=0.3)
    set_dropout(bart, 0.1)
    assert (bart.dropout, bart.encoder_layerdrop) == (0.1, 0.3)
    set_dropout(bart, 0.0)
    assert (bart.dropout, bart.encoder_layerdrop) == (0.0, 0.0)


def test_dropout_out_of_range(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"--dropout 1\.0: must be at least 0 and below 1"):
        load_sequence_classifier(str(folders["llama"]), id2label=LABELS, problem_type=SINGLE, dropout=1.0)


def test_packaged_hub_id_is_read_from_its_package() -> None:
    path = Path(resolve_model_path("sentence-transformers/all-MiniLM-L6-v2"))
    assert (path / "model.safetensors").stat().st_size > 80_000_000
    assert resolve_model_path("bert-base-uncased") == "bert-base-uncased"


LOADERS: dict[type[TrainingRecipe], Callable[[str], Any]] = {
    TextClsRecipe: lambda name: load_sequence_classifier(name, id2label=LABELS, problem_type=SINGLE),
    TokenClsRecipe: lambda name: load_token_classifier(name, id2label=LABELS),
    MaskedLmRecipe: load_masked_lm,
    CausalLmRecipe: load_causal_lm,
    ImageClsRecipe: lambda name: load_image_classifier(name, id2label=LABELS, problem_type=SINGLE, image_size=16),
    ContrastiveRecipe: load_encoder,
    Seq2SeqRecipe: load_seq2seq,
}


@pytest.mark.parametrize("recipe_class", LOADERS)
def test_absent_model_is_one_line_with_the_remedy(recipe_class: type[TrainingRecipe]) -> None:
    with pytest.raises(UserError) as error:
        LOADERS[recipe_class]("nobody/no-such-model")
    message = str(error.value)
    assert message.startswith('--model_name_or_path "nobody/no-such-model": not loaded') and "\n" not in message
    names = {field.name for field in fields(recipe_class)}
    flags = re.findall(r"--(\w+)", message)
    assert set(flags) <= names, "a flag of another recipe"
    assert ("from_scratch" in flags) == ("from_scratch" in names)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UserError, match=r"a file; give the folder that holds config\.json"):
        load_sequence_classifier(str(file), id2label=LABELS, problem_type=SINGLE)


def test_model_fine_tuned_for_other_labels(tmp_path: Path) -> None:
    model, tokenizer = build_small_bert(train_vocabulary(TEXTS), id2label=LABELS, problem_type=SINGLE)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="with 2 labels; it was probably fine-tuned for others"):
        load_sequence_classifier(str(tmp_path), id2label={0: "x", 1: "y"}, problem_type=SINGLE)


def test_new_weights_are_named_in_a_line_and_others_refused(
    tmp_path: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = build_small_bert(train_vocabulary(TEXTS), id2label=LABELS, problem_type=SINGLE)
    tokenizer.save_pretrained(tmp_path)
    model.bert.save_pretrained(tmp_path)
    load_sequence_classifier(str(tmp_path), id2label=LABELS, problem_type=SINGLE)
    note = f"note: {tmp_path} has no classifier.bias and 1 more: these weights are new\n"
    shown = capsys.readouterr()
    assert shown.out == note and "LOAD REPORT" not in shown.err
    load_sequence_classifier(str(folders["roberta"]), id2label=LABELS, problem_type=SINGLE)
    assert capsys.readouterr().out == "", "nothing is new"
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"backbone.{name}": tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"weights are not those of a BertForSequenceClassification: \d+ are missing"):
        load_sequence_classifier(str(tmp_path), id2label=LABELS, problem_type=SINGLE)


def test_a_text_that_holds_the_end_token_is_named_where_the_model_reads_it(folders: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders["roberta"])
    end = tokenizer.sep_token_id
    rows = {"train": datasets.Dataset.from_dict({"input_ids": [[2, 7, end], [2, 7, end, 8, end]], "row": [4, 9]})}
    decoder = SimpleNamespace(config=BartConfig(eos_token_id=end))
    message = r"notes.csv, row 9: holds '\[SEP\]', by which SimpleNamespace finds the end of a text: take it out"
    with pytest.raises(UserError, match=message):
        check_end_tokens(decoder, tokenizer, rows, {"train": "notes.csv"})
    check_end_tokens(SimpleNamespace(config=RobertaConfig()), tokenizer, rows, {"train": "notes.csv"})


def test_vocabulary_cuts_chinese_into_characters() -> None:
    vocabulary = train_vocabulary(TEXTS)
    assert list(vocabulary.values()) == list(range(len(vocabulary)))
    assert list(vocabulary)[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert {"胸", "痛", "fever"} <= vocabulary.keys()
    assert not any(len(token) > 1 and "一" <= token[0] <= "鿿" for token in vocabulary)


def test_vocabulary_is_a_function_of_the_texts() -> None:
    texts = [note["text"] for note in generate_notes(200)]
    first = train_vocabulary(texts, 500)
    assert len(first) == 500
    assert all(list(train_vocabulary(iter(texts), 500)) == list(first) for _ in range(3))
    assert list(train_vocabulary(reversed(texts), 500)) == list(first), "the order of texts does not matter"
    assert list(train_vocabulary(["ab ab b", "b abc"])) == [
        *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        *("##b", "a", "b", "##c"),
        "ab",
    ]


def test_small_bert_loads_again_with_its_tokenizer(tmp_path: Path) -> None:
    model, tokenizer = build_small_bert(train_vocabulary(TEXTS), id2label=LABELS, problem_type=SINGLE, dropout=0.0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    batch = tokenizer(TEXTS[3], return_tensors="pt")
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXTS[3])["input_ids"] == batch["input_ids"][0].tolist()
    assert tokenizer.convert_ids_to_tokens(batch["input_ids"][0])[1:5] == ["胸", "痛", "三", "天"]
    with torch.no_grad():
        assert torch.allclose(again.eval()(**batch).logits, model.eval()(**batch).logits, atol=1e-6)


@pytest.mark.parametrize(
    ("max_length", "limit", "multiple", "length"),
    [(100, 512, None, 100), (900, 512, None, 512), (900, None, 8, 900), (512, 512, 96, 480), (100, 512, 96, 100)],
)
def test_fitting_length(max_length: int, limit: int | None, multiple: int | None, length: int) -> None:
    assert fitting_length(max_length, limit, multiple) == length


def test_multiple_beyond_the_positions() -> None:
    with pytest.raises(UserError, match="--pad_to_multiple_of 700: the model has 512 positions"):
        fitting_length(100, 512, 700)
