"""The losses on embeddings, the readers of pairs, the synthetic pairs, and the encoder with its files."""

import csv
import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from contrastive import ContrastiveRecipe
from contrastive_cases import LOSSES, contrast_of, embed, make_encoder, make_pairs, plain_loss

from accumft.data.pair_batches import PairCollator, examples_of, tokenize_texts
from accumft.data.pairs import PairData, groups, key_of, load_pair_data, read_pair_tables
from accumft.errors import UserError
from accumft.models import train_vocabulary
from accumft.plan import Plan, resolve_batch_sizes
from accumft.recipe import checked
from accumft.synthetic.pairs import INTENTS, entities, generate_pairs
from accumft.tasks.contrastive import Contrast, false_negatives
from accumft.tasks.embeddings import (
    build_small_encoder,
    load_encoder,
    pool,
    pooling_of,
    write_sentence_transformer_files,
)
from accumft.tasks.embeddings import embed as embed_batch
from accumft.tasks.packed_encoder import pack_encoder
from accumft.tasks.pair_scores import describe_pairs

RQE = Path(__file__).resolve().parents[2] / "shared/data/rqe/RQE_Train_8588_AMIA2016.xml"


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_against_loops(loss: str) -> None:
    data = make_pairs()
    vectors = embed(make_encoder(), data).detach().requires_grad_()
    contrast = contrast_of(data, loss)
    found = contrast.loss_sum(vectors, data["labels"]) / contrast.num_items(data["labels"])
    expected = plain_loss(vectors, data, loss)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(found, vectors)
    (other,) = torch.autograd.grad(expected, vectors)
    assert (gradient - other).norm() < 1e-10 * other.norm()


def test_false_negatives_by_hand() -> None:
    pairs, hard = false_negatives(torch.tensor([1, 1, 2, 5]), torch.tensor([11, 12, 11, 2]), torch.tensor([11, 5, 9]))
    # The 0th shares its anchor with the 1st and its positive with the 2nd; the 3rd's positive is the 2nd's anchor.
    assert pairs.int().tolist() == [[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]]
    assert hard.int().tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 1, 0]]


def test_the_same_text_twice_is_no_negative() -> None:
    """Two equal pairs: the loss is that of each among the others, and not log 2 at best."""
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    same = Contrast("infonce", torch.tensor([[1, 2], [1, 2], [3, 4]]))
    different = Contrast("infonce", torch.tensor([[1, 2], [5, 6], [3, 4]]))
    assert float(same.loss_sum(vectors, torch.arange(6))) < 1e-6
    assert float(different.loss_sum(vectors, torch.arange(6))) == pytest.approx(2 * np.log(2), rel=1e-5)


def test_pooling_leaves_padding_out() -> None:
    states, mask = torch.arange(12.0).view(2, 3, 2), torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert pool("mean", states, mask).tolist() == [[1.0, 2.0], [8.0, 9.0]]
    assert pool("cls", states, mask).tolist() == [[0.0, 1.0], [6.0, 7.0]]


def table(path: Path, header: list[str], rows: list[list[Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def data_of(**fields: Any) -> PairData:
    recipe = checked(ContrastiveRecipe(**{"validation_split": 0.0, **fields}))
    notes: list[str] = []
    return load_pair_data(read_pair_tables(recipe, notes), recipe, notes)


def test_pairs_with_negatives(tmp_path: Path) -> None:
    rows = [["Fever?", "High temperature", "Cough"], ["  cough ", "Tussis", ""], ["Same  Text", "same text", "x"]]
    file = table(tmp_path / "pairs.csv", ["q", "a", "n"], rows)
    data = data_of(train_file=file, text_column=("q", "a"), negative_column=("n",))
    train = data.splits["train"]
    assert data.notes == [f"{file}: 1 pairs of two equal texts are dropped"]
    assert train.rows.tolist() == [1, 2]
    assert train.texts == ["Fever?", "High temperature", "Cough", "cough", "Tussis"]
    assert train.ids.tolist() == [[0, 1, 2], [3, 4, -1]]
    assert train.keys[0, 2] == train.keys[1, 0], "equal but for case"
    assert key_of(" A\tb ") == "a b"


def test_pairs_of_which_no_triplet_can_be_made_are_left_out(tmp_path: Path) -> None:
    rows = [["a", "b", "c"], ["d", "e", ""], ["f", "g", "G"], ["h", "i", "h "], ["j", "k", "l"]]
    file = table(tmp_path / "pairs.csv", ["q", "a", "n"], rows)
    columns = {"train_file": file, "text_column": ("q", "a"), "negative_column": ("n",)}
    data = data_of(**columns, loss="triplet")
    assert data.splits["train"].rows.tolist() == [1, 5]
    assert data.notes == ["train: 3 of 5 pairs have no hard negative and are left out (triplet)"]
    assert len(data_of(**columns).splits["train"]) == 5


def test_a_rest_of_one_pair_is_said(tmp_path: Path) -> None:
    rows = [[f"a{i}", f"b{i}"] for i in range(9)]
    data = data_of(train_file=table(tmp_path / "pairs.csv", ["anchor", "positive"], rows))
    lengths = {"train": datasets.Dataset.from_dict({"length": [3] * 18, "truncated": [False] * 18})}
    for size, said in ((8, True), (3, False), (1, True)):
        plan = Plan.of(9, resolve_batch_sizes(size, None, None, 1, 64), 0, 1, -1)
        assert ("a single pair, which has no negatives" in describe_pairs(data, lengths, 16, plan, "infonce")) == said
        assert "single pair" not in describe_pairs(data, lengths, 16, plan, "cosine")


def test_what_is_held_out_shares_no_text(tmp_path: Path) -> None:
    rows = [[f"question {i // 3}", f"answer {i}"] for i in range(300)]
    file = table(tmp_path / "pairs.csv", ["anchor", "positive"], rows)
    data = data_of(train_file=file, validation_split=0.1, test_split=0.2)
    sizes = {name: len(split) for name, split in data.splits.items()}
    assert sizes == {"train": 216, "validation": 24, "test": 60}
    texts = {name: set(split.texts) for name, split in data.splits.items()}
    assert not texts["train"] & texts["validation"] and not (texts["train"] | texts["validation"]) & texts["test"]
    assert len(set(groups(data.splits["train"]))) == 72
    again = data_of(train_file=file, validation_split=0.1, test_split=0.2)
    assert again.splits["test"].rows.tolist() == data.splits["test"].rows.tolist()


def test_chains_of_shared_texts_are_one_group(tmp_path: Path) -> None:
    rows = [["a", "b"], ["c", "b"], ["c", "D"], ["d", "e"], ["f", "g"]]
    train = data_of(train_file=table(tmp_path / "p.csv", ["anchor", "positive"], rows)).splits["train"]
    first, *rest = groups(train)
    assert [group == first for group in rest] == [True, True, True, False]


def test_scored_pairs(tmp_path: Path) -> None:
    rows = [["a", "b", "0.5"], ["c", "C", "1"], ["d", "e", "-1"]]
    file = table(tmp_path / "p.csv", ["anchor", "positive", "s"], rows)
    train = data_of(train_file=file, score_column="s", loss="cosine").splits["train"]
    assert train.scores is not None and train.scores.tolist() == [0.5, 1, -1], "equal texts with a score stay"


XML = """<?xml version="1.0"?><RQE-med-train>
<pair pid="1" value="true"><chq>
 What is
 fever? </chq><faq>Define fever &amp; chills</faq></pair>
<pair pid="2" value="false"><chq>What is fever?</chq><faq>Other</faq></pair>
<pair pid="3" value="true"><chq>Cough?</chq><faq>What helps coughs?</faq></pair></RQE-med-train>"""


def test_rqe(tmp_path: Path) -> None:
    path = tmp_path / "rqe.xml"
    path.write_text(XML)
    data = data_of(train_file=str(path))
    assert data.splits["train"].texts == ["What is fever?", "Define fever & chills", "Cough?", "What helps coughs?"]
    assert data.splits["train"].rows.tolist() == [1, 3]
    assert data.notes == [f"{path}: 1 of 3 pairs are false ones, left out"]


@pytest.mark.skipif(not RQE.exists(), reason="the real data are not here")
def test_real_rqe() -> None:
    with pytest.raises(UserError, match=r"an empty text in 'positive': row 5860; fill"):
        data_of(train_file=str(RQE))
    data = data_of(train_file=str(RQE), on_bad_row="skip", validation_split=0.1, test_split=0.2)
    assert sum(map(len, data.splits.values())) == 3195
    assert data.notes[2] == f"{RQE}: 1459 pairs of two equal texts are dropped"
    texts = {name: set(map(key_of, split.texts)) for name, split in data.splits.items()}
    assert not texts["train"] & texts["validation"] and not (texts["train"] | texts["validation"]) & texts["test"]


BAD: list[tuple[str, str, dict[str, Any], str]] = [
    ("rqe.xml", "<a><pair>", {}, "not valid XML"),
    ("rqe.xml", "<a><b/></a>", {}, 'holds no <pair value="true">'),
    ("rqe.xml", '<a><pair value="maybe"/></a>', {}, "row 1: its value is 'maybe'"),
    ("rqe.xml", '<!DOCTYPE a [<!ENTITY x "y">]><a/>', {}, "document type or entities"),
    ("rqe.xml", XML, {"delimiter": ","}, "--delimiter"),
    ("p.csv", "anchor,positive\na,b\nc,\n", {}, "an empty text in 'positive': row 2; fill them in, or --on_bad_row"),
    ("p.csv", "anchor,positive\na,A\n", {}, "no pair of two different texts"),
    ("p.csv", "anchor,answer\na,b\n", {}, "has no column 'positive' (--text_column)"),
    ("p.csv", "anchor,positive\na,b\n", {"negative_column": ("n",)}, "has no column 'n' (--negative_column)"),
    ("p.csv", "anchor,positive,s\na,b,4\n", {"score_column": "s"}, "row 1: 's' is 4; a cosine is -1 to 1"),
    ("p.csv", "anchor,positive,s\na,b,x\n", {"score_column": "s"}, "row 1: no number in 's' (--score_column)"),
    ("p.csv", "anchor,positive\na,b\n", {"score_column": "s"}, "has no column 's' (--score_column)"),
    ("p.csv", "anchor,positive\na,b\nc,d\n", {"validation_split": 0.2}, "--validation_split 0.2: of the 2 pairs"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_files_are_named(tmp_path: Path, number: int) -> None:
    name, content, fields, message = BAD[number]
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        data_of(train_file=str(tmp_path / name), **fields)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert name in str(error.value) or "--" in str(error.value)


def test_synthetic_pairs() -> None:
    of_split = {split: {x for _, x in entities(split)} for split in ("train", "validation", "test")}
    assert [len(found) for found in of_split.values()] == [182, 61, 60]
    assert len(set.union(*of_split.values())) == 303, "no entity is in two splits"
    pairs = list(generate_pairs(400, split="test"))
    assert len({pair["positive"] for pair in pairs}) == 360, "each entity with each of six intents, and then again"
    assert all(len(intents) == 6 for intents in INTENTS.values())
    assert all(len({*pair.values()}) == 3 for pair in pairs)
    heads = {pair["positive"] for pair in pairs}
    assert all(pair["negative"] in heads for pair in pairs), "one heading for an intent of an entity"
    digest = hashlib.sha256("\n".join(text for pair in pairs for text in pair.values()).encode()).hexdigest()
    assert digest[:12] == "1e084b123c90"
    assert list(generate_pairs(10, split="test")) == pairs[:10]
    with pytest.raises(UserError, match="dev"):
        generate_pairs(1, split="dev")


@pytest.fixture(scope="module")
def encoder() -> tuple[Any, Any]:
    texts = [text for pair in generate_pairs(200) for text in pair.values()]
    torch.manual_seed(0)
    return build_small_encoder(train_vocabulary(texts), dropout=0.0)


@pytest.fixture(scope="module")
def examples(encoder: tuple[Any, Any]) -> Any:
    """(split, its texts' tokens, examples of a packed run)."""
    from accumft.synthetic.pairs import load_synthetic_pairs

    notes: list[str] = []
    recipe = ContrastiveRecipe(negative_column=("negative",))
    split = load_pair_data(load_synthetic_pairs(64, 8), recipe, notes).splits["train"]
    tokens = tokenize_texts(split, encoder[1], 24)
    return split, tokens, examples_of(split, tokens, packed=True)


def test_examples_hold_the_texts(encoder: tuple[Any, Any], examples: Any) -> None:
    split, tokens, packed = examples
    padded = examples_of(split, tokens, packed=False)
    for i in (0, 17, 63):
        own = [encoder[1](split.texts[text])["input_ids"] for text in split.ids[i]]
        assert [packed[i][f"input_ids_{position}"] for position in range(3)] == own
        assert packed[i]["length"] == sum(map(len, own)) and padded[i]["length"] == 3 * max(map(len, own))
    batch = PairCollator(encoder[1])(padded[[5, 9]])
    assert batch["labels"].tolist() == [15, 16, 17, 27, 28, 29]
    assert batch["input_ids"].shape[1] * 3 == max(padded[5]["length"], padded[9]["length"])


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_packed_and_padded_embeddings_are_the_same(encoder: tuple[Any, Any], examples: Any, pooling: Any) -> None:
    model, tokenizer = encoder
    model.eval().set_attn_implementation("sdpa")
    collate = pack_encoder(model, tokenizer, examples[2], ContrastiveRecipe(), pooling, "cpu")
    assert collate is not None
    columns = examples[2][list(range(40))]
    packed, padded = collate(columns), PairCollator(tokenizer)(columns)
    tokens = int(padded["attention_mask"].sum())
    assert tokens <= packed["input_ids"].numel() < 1.1 * tokens < padded["input_ids"].numel()
    found = embed_batch(pooling, model, packed)[packed["labels"].argsort()]
    expected = embed_batch(pooling, model, padded)
    assert torch.allclose(found, expected, atol=1e-5)
    assert (expected[0] - expected[1]).abs().max().item() > 1e-2


def test_padding_free_cannot_be_had_with_compilation(encoder: tuple[Any, Any], examples: Any) -> None:
    recipe = ContrastiveRecipe(padding_free=True, torch_compile=True)
    with pytest.raises(UserError, match="--padding_free: not possible together with --torch_compile"):
        pack_encoder(*encoder, examples[2], recipe, "mean", "cpu")
    assert pack_encoder(*encoder, examples[2], ContrastiveRecipe(padding_free=False), "mean", "cpu") is None


def test_pooling_is_read_from_the_models_files(tmp_path: Path) -> None:
    assert pooling_of(str(tmp_path)) == "mean"
    write_sentence_transformer_files(tmp_path, pooling="cls", dimensions=8, max_length=16, normalize=False)
    assert pooling_of(str(tmp_path)) == "cls"
    assert [module["path"] for module in json.loads((tmp_path / "modules.json").read_text())] == ["", "1_Pooling"]
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(UserError, match="pooling max_tokens is not supported: give --pooling mean or cls"):
        pooling_of(str(tmp_path))


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False)])
def test_sentence_transformers_gives_the_same_vectors(
    encoder: tuple[Any, Any], tmp_path: Path, pooling: Any, normalize: bool
) -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    model, tokenizer = encoder
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    write_sentence_transformer_files(tmp_path, pooling=pooling, dimensions=128, max_length=12, normalize=normalize)
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    texts = ["what is bisoprolol good for?", "management of asthma", "who is given it? " * 9]
    found = torch.from_numpy(loaded.encode(texts))
    batch = tokenizer(texts, padding=True, truncation=True, max_length=12, return_tensors="pt")
    reloaded, _ = load_encoder(str(tmp_path), dropout=0.0)
    with torch.no_grad():
        expected = partial(embed_batch, pooling, reloaded.eval())(batch)
    expected = torch.nn.functional.normalize(expected, dim=1) if normalize else expected
    assert torch.allclose(found, expected, atol=1e-5)
