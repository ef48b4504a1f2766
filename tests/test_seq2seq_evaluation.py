"""Generation in evaluation: every row once, in its place, whatever the batches and the processes; and ROUGE."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import launch
from seq2seq_cases import (
    CUTS,
    EFFECTIVE,
    EVALUATIONS,
    FAMILIES,
    SIZES,
    TAIL,
    generated,
    pairs,
    reference_loss,
    reference_run,
    speaking,
    the_plan,
    tiny,
)
from tasks import flat, relative_error

from accumft.errors import NonFiniteLossError, UserError
from accumft.launch import make_accelerator
from accumft.metrics.rouge import Words, first_line, is_exact, rouge_of
from accumft.tasks.seq2seq import Generated, copying_baseline, score_texts
from accumft.tasks.seq2seq_models import set_generation

PRECISION = {"t5": 1e-6, "bart": 1e-10}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("seq2seq")
    result = launch(Path(__file__).parent / "launched" / "launch_seq2seq.py", str(folder), timeout=280)
    assert result.returncode == 0, result.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def one_by_one(family: str, n: int) -> list[str]:
    """The text of each row, generated alone, without the package's batches."""
    model = speaking(family).eval()
    texts = []
    for ids in pairs(n)["input_ids"]:
        tokens = model.generate(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
        texts.append(" ".join(f"w{i}" for i in tokens[0].tolist() if i > 2))
    return texts


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_once_in_its_place_whatever_the_batch(family: str) -> None:
    n = SIZES[-1]
    expected = one_by_one(family, n)
    assert len(set(expected)) > 3, "texts that cannot be mistaken for each other"
    model, dataset = speaking(family), pairs(n)
    losses = [reference_loss(model, dataset, [i], 0.0).item() * len(dataset[i]["labels"]) for i in range(n)]
    accelerator = make_accelerator()
    for rows, tokens in EVALUATIONS:
        found = generated(accelerator, family, n, rows, tokens)
        assert found.texts == expected
        assert found.loss == pytest.approx(losses, rel=1e-6)
        assert found.items.tolist() == [len(row) for row in dataset["labels"]]
        assert all(1 <= size <= 6 for size in found.tokens)


def test_two_processes_find_the_same(two: list[dict[str, Any]]) -> None:
    accelerator = make_accelerator()
    for n in SIZES:
        expected = generated(accelerator, "bart", n, 64, None)
        for limits in EVALUATIONS:
            for rank in range(2):
                found = two[rank]["generated"][(n, *limits)]
                assert found["texts"] == expected.texts
                assert found["loss"] == pytest.approx(expected.loss, rel=1e-12)
                assert found["items"].tolist() == expected.items.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "tokens"), CUTS)
def test_two_processes_step_as_one_forward(
    two: list[dict[str, Any]], family: str, rows: int | None, tokens: int | None
) -> None:
    dataset, plan = pairs(EFFECTIVE + TAIL), the_plan(2, rows, tokens)
    batches = [plan.effective_batch(step) for step in range(2)]
    expected, start = reference_run(family, dataset, batches, torch.float64), flat(tiny(family, torch.float64))
    for rank in range(2):
        weights, results = two[rank]["steps"][family, rows, tokens]
        assert relative_error(weights - start, expected - start) < PRECISION[family]
        assert [items for _, items in results] == [sum(len(dataset[int(i)]["labels"]) for i in b) for b in batches]


def test_generation_settings_are_those_that_are_saved(tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = tiny("bart")
    model.generation_config.forced_bos_token_id = 7
    set_generation(model, 3, 5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    config = loaded.generation_config
    assert (config.num_beams, config.max_new_tokens, config.max_length, config.do_sample) == (3, 5, None, False)
    assert (config.decoder_start_token_id, config.eos_token_id, config.pad_token_id) == (2, 2, 1)
    tokens = loaded.generate(input_ids=torch.tensor([[4, 5, 6]]), attention_mask=torch.ones(1, 3, dtype=torch.long))
    assert tokens.shape[1] <= 6 and tokens[0, :2].tolist() == [2, 7], "BART's forced first token stays"
    model.generation_config.min_length = 9
    with pytest.raises(UserError, match=r"--max_new_tokens 5: .*min_length of 9"):
        set_generation(model, None, 5)


def test_a_compiled_model_generates_without_its_compiled_forward() -> None:
    """There is a shape for each token: nothing that it would pay to compile for."""
    from accumft.tasks.seq2seq import _not_compiled

    def compiled(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("called")

    model, ids = speaking("bart"), torch.tensor([[4, 5, 6]])
    expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    model._compiled_call_impl = compiled
    with _not_compiled(model):
        found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(found, expected) and model._compiled_call_impl is compiled


def test_divergence_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import seq2seq_cases

    broken = speaking("bart")
    with torch.no_grad():
        broken.final_logits_bias[0, 5] = math.nan
    monkeypatch.setattr(seq2seq_cases, "speaking", lambda family: broken)
    with pytest.raises(NonFiniteLossError, match="for 3 of 3 examples"):
        generated(make_accelerator(), "bart", 3, None, 64)


def test_rouge_against_counts_by_hand() -> None:
    # "the cat sat" / "the cat sat down": 3 of 3 and 3 of 4 words, 2 of 2 and 2 of 3 pairs.
    assert rouge_of(["The cat, sat!"], ["the cat sat down"])[0] == pytest.approx([6 / 7, 4 / 5, 6 / 7])
    # Another order: all words, no pair of neighbours but "b c", and the longest common subsequence is "b c".
    assert rouge_of(["b c a"], ["a b c"])[0] == pytest.approx([1, 1 / 2, 2 / 3])
    assert rouge_of(["", "x"], ["a", "."]).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert rouge_of([], []).shape == (0, 3)


def test_rouge_of_english_is_that_of_the_packages_own_tokenizer() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    texts = [
        "Denies chest pain; BP 120/80 mmHg.",
        "Reports X-ray of the left knee (2019).",
        "No chest pain, X-ray fine",
    ]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    for text in texts:
        for target in texts:
            expected = [score.fmeasure for score in scorer.score(target, text).values()]
            assert rouge_of([text], [target])[0] == pytest.approx(expected)


def test_chinese_is_compared_by_characters() -> None:
    assert Words().tokenize("患者45岁，BP高。") == ["患", "者", "45", "岁", "bp", "高"]
    assert Words().tokenize("naïve café_au") == ["naïve", "café", "au"]
    # 5 of 6 characters; 3 of 5 pairs.
    assert rouge_of(["患者头痛三天"], ["患者头痛两天"])[0] == pytest.approx([5 / 6, 3 / 5, 5 / 6])


def test_scores_are_of_all_rows_at_once() -> None:
    found = Generated(np.array([2.0, 9.0]), np.array([1, 10]), ["a  b", "c"], [3, 2])
    scores = score_texts(found, ["a\nb", "d"])
    assert scores.scalars["loss"] == pytest.approx(1.0), "a token has the same weight in any row"
    assert scores.scalars["perplexity"] == pytest.approx(math.e)
    assert (scores.scalars["exact_match"], scores.scalars["rougeL"], scores.scalars["gen_len"]) == (0.5, 0.5, 2.5)
    alone = score_texts(Generated(np.array([1.0]), np.array([2]), [], [0]), ["a"])
    assert alone.scalars == {"loss": 0.5, "perplexity": pytest.approx(math.exp(0.5))}
    assert is_exact("a b", " a\n b ") and not is_exact("a b", "ab") and not is_exact("A", "a")


def test_baseline_copies_the_first_line() -> None:
    assert first_line("\n  \n one two \nthree") == "one two"
    assert copying_baseline(["a b\nc", "x"], ["a b", "y"]) == {
        "rouge1": 0.5,
        "rouge2": 0.5,
        "rougeL": 0.5,
        "exact_match": 0.5,
    }
