"""Documents in several windows: nothing lost, one prediction each, the same step however they are cut."""

import ast
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from small import rows_of, small_recipe
from tasks import flat, relative_error
from text_cls import run

from accumft.cut import Limits
from accumft.data.long_text import DocumentCollator, Documents
from accumft.data.text import tokenize
from accumft.data.windows import Window, count, shape_of, split
from accumft.errors import UserError
from accumft.evaluation import logits_of, predict
from accumft.launch import make_accelerator
from accumft.losses import ClassificationLoss
from accumft.models import build_small_bert
from accumft.step import train_step

WORDS = [f"w{number}" for number in range(40)]
VOCABULARY = {token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
LENGTHS = (3, 10, 11, 25, 40, 8, 17, 33)  # words; a window of 12 tokens has room for 10


@pytest.fixture(scope="module")
def made() -> tuple[Any, Any, Any]:
    """(model in float64, tokenizer, tokenised documents)."""
    torch.manual_seed(0)
    model, tokenizer = build_small_bert(
        VOCABULARY, id2label={0: "x", 1: "y", 2: "z"}, problem_type="single_label_classification", dropout=0.0
    )
    texts = [" ".join(WORDS[:length]) for length in LENGTHS]
    dataset = datasets.Dataset.from_dict({"text": texts, "labels": [0, 1, 2, 0, 1, 2, 0, 1]})
    return model.double(), tokenizer, tokenize(dataset, tokenizer, 12, overlap=4)


def test_every_word_is_in_a_window_and_neighbours_share_four(made: tuple[Any, Any, Any]) -> None:
    for length, windows in zip(LENGTHS, made[2]["input_ids"], strict=True):
        inner = [ids[1:-1] for ids in windows]
        assert all(len(ids) <= 10 for ids in inner)
        assert all(a[-4:] == b[:4] for a, b in itertools.pairwise(inner))
        assert [*inner[0], *(word for ids in inner[1:] for word in ids[4:])] == list(range(5, 5 + length))
        assert len(windows) == max(1, -(-(length - 4) // 6))


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_pooling(pooling: Any) -> None:
    logits = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    pooled = Documents(torch.tensor([0, 1, 1, 1, 2, 2]), 3, pooling).pool(logits)
    by_hand = [getattr(part, "amax" if pooling == "max" else "mean")(0) for part in logits.split([1, 3, 2])]
    assert torch.allclose(pooled, torch.stack(by_hand), rtol=1e-14)
    weights = torch.arange(9.0).view(3, 3).double()
    (found,) = torch.autograd.grad((pooled * weights).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((torch.stack(by_hand) * weights).sum(), logits)
    assert torch.allclose(found, expected, rtol=1e-14)


def batch_of(made: tuple[Any, Any, Any], rows: list[int], pooling: Any = "mean") -> Any:
    return DocumentCollator(made[1], pooling)(made[2][rows])


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("cut", [[8], [4, 4], [1, 3, 4], [1] * 8])
def test_the_gradient_does_not_depend_on_the_cut(made: tuple[Any, Any, Any], pooling: Any, cut: list[int]) -> None:
    model, _, _ = made
    criterion = ClassificationLoss("single_label_classification", class_weights=[1.0, 2.0, 0.5])
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def gradient(sizes: list[int]) -> torch.Tensor:
        accelerator = make_accelerator()
        model.load_state_dict(start)
        before = flat(model)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        parts = torch.arange(8).split(sizes)
        window = Window([batch_of(made, part.tolist(), pooling) for part in parts])
        losses = lambda model, batch: criterion(logits_of(model, batch), batch["labels"])  # noqa: E731
        result = train_step(
            accelerator, prepared, optimizer, window, losses, lambda batch: criterion.num_items(batch["labels"])
        )
        assert result.examples == 8
        return before - flat(model)

    # One forward of each document's windows alone, in plain PyTorch.
    model.load_state_dict(start)
    model.zero_grad()
    model.train()
    pooled = []
    for windows in made[2]["input_ids"]:
        logits = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in windows])
        pooled.append(logits.mean(0) if pooling == "mean" else logits.amax(0))
    labels, weight = torch.tensor(made[2]["labels"]), torch.tensor([1.0, 2.0, 0.5]).double()
    torch.nn.functional.cross_entropy(torch.stack(pooled), labels, weight=weight).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    used = torch.cat([torch.full((p.numel(),), p.grad is not None) for p in model.parameters()])
    model.zero_grad()
    assert relative_error(gradient(cut)[used], expected) < 1e-10
    model.load_state_dict(start)


def test_a_batch_that_does_not_fit_is_divided_between_documents(made: tuple[Any, Any, Any]) -> None:
    batch = batch_of(made, list(range(8)))
    rows, length, tokens = shape_of(batch)
    assert (rows, length) == (8, 12) and tokens == 12 * sum(len(windows) for windows in made[2]["input_ids"])
    parts = split(batch, tokens // 2)
    assert [shape_of(part)[0] for part in parts] == [4, 4]
    assert count(parts)[0] == 8 and count(parts)[1] == count([batch])[1]
    together = torch.cat([logits_of(made[0], part) for part in parts])
    assert torch.allclose(together, logits_of(made[0], batch), atol=1e-12)
    assert [shape_of(part)[0] for part in split(batch, 1)] == [1] * 8


def test_predictions_are_one_a_document_in_order(made: tuple[Any, Any, Any]) -> None:
    accelerator = make_accelerator()
    collate = DocumentCollator(made[1], "mean")
    found = [predict(accelerator, made[0], made[2], collate, Limits(max_tokens=budget)) for budget in (12, 60, 999)]
    alone = torch.cat([logits_of(made[0], batch_of(made, [row])) for row in range(8)]).float()
    for logits in found:
        assert torch.allclose(logits, alone, atol=1e-6)


def test_the_recipe_with_windows_on_two_cuts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"long_text": "windows", "window_overlap": 4, "max_length": 16, "num_train_epochs": 1.0}
    for name, budget in (("a", 2000), ("b", 100)):
        run(small_recipe(tmp_path / name, max_tokens_per_micro_batch=budget, **fields))
    assert re.search(r"tokens of windows \d+ mean .* windows of up to 16 on average", capsys.readouterr().out)
    a, b = (rows_of(tmp_path / name) for name in ("a", "b"))
    assert [row["loss"] for row in a] == pytest.approx([row["loss"] for row in b], rel=1e-5)
    assert [row["micro_batches"] for row in a] != [row["micro_batches"] for row in b]
    # The model card's code pools the windows of a text as the run has.
    text = "no fever, cough since monday, denies chest pain and dyspnea, lungs clear, heart regular, " * 3
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "a" / "README.md").read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    folder = str(tmp_path / "a")
    exec(code.replace("path/to/this/folder", folder).replace("The text to classify.", text), found)
    tokenizer = found["tokenizer"]
    columns = tokenize(datasets.Dataset.from_dict({"text": [text]}), tokenizer, 16, overlap=4)[:]
    assert len(columns["input_ids"][0]) == len(found["windows"]["input_ids"]) > 3
    with torch.no_grad():
        (logits,) = logits_of(found["model"], DocumentCollator(tokenizer, "mean")(columns))
    assert torch.allclose(found["pooled"], logits, atol=1e-6)
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    assert list(ast.literal_eval(printed).values()) == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)


def test_truncation_says_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("text,label\n" + f"{'word ' * 20},x\nword,y\n" * 10)
    run(small_recipe(tmp_path / "run", train_file=str(tmp_path / "a.csv"), max_length=12, max_steps=1))
    # 20 words, of which 10 are kept beside two special tokens; the other rows have 3 tokens.
    assert "truncated at 12, which loses 40.0% of all tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window_overlap": 4}, "--window_overlap 4: has no effect with --long_text truncate"),
        ({"long_text": "windows", "window_overlap": 22}, "--window_overlap 22: must be below the 22 tokens"),
        ({"long_text": "windows", "padding_free": True}, "--padding_free: not possible with --long_text windows"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(small_recipe(tmp_path / "run", **fields))


def test_pairs_are_refused(tmp_path: Path) -> None:
    from accumft.data.long_text import overlap_of

    recipe = SimpleNamespace(long_text="windows", window_overlap=4, padding_free=None)
    data = SimpleNamespace(train=SimpleNamespace(column_names=["text", "text_pair"]))
    with pytest.raises(UserError, match="for single texts"):
        overlap_of(recipe, None, 12, data)
