"""Tables, pictures, predictions and the model card: what they hold, and that no name from the data breaks them."""

import hashlib
import json
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
import yaml

from accumft.metrics import Metrics
from accumft.report import (
    card,
    fonts,
    metrics_table,
    model_card,
    plot_confusion_matrix,
    plot_per_label,
    plot_regression,
    plot_training,
    write_predictions,
)
from accumft.report.text import display_width, format_number, printable, shorten

CHINESE = ["心血管内科", "皮肤科", "骨科"]
HOSTILE = [
    "a | b",
    "`code` ```",
    "<script>alert(1)</script>",
    "$x$ and $y",
    "line\nbreak\r\n---\n# title",
    "\x1b[31mred\x00",
    "[link](http://example.org) ![](x)",
    "a\\|b*c_d~e&amp;",
    "reversed \u202e text",
    "",
]


def per_class(names):
    return [
        {"name": name, "precision": 0.5, "recall": 0.25, "f1": 1 / 3, "support": 4 + i} for i, name in enumerate(names)
    ]


# ---------------------------------------------------------------- text


def test_metrics_table_is_aligned_for_wide_names():
    metrics = Metrics(
        scalars={"accuracy": 0.93125, "f1_macro": 1.0},
        per_class=per_class([*CHINESE, "Neurology"]),
        undefined={"auroc": "why"},
    )
    lines = metrics_table(metrics).splitlines()
    assert lines[:4] == ["accuracy  0.9313", "f1_macro  1.0000", "auroc     undefined: why", ""]
    assert lines[4].split() == ["class", "precision", "recall", "f1", "support"]
    assert lines[5].split() == ["心血管内科", "0.5000", "0.2500", "0.3333", "4"]
    assert len(lines) == 9
    assert len({display_width(line) for line in lines[4:]}) == 1
    assert metrics_table({"loss": 0.5, "rmse": 123456.0}) == "loss  0.5000\nrmse  1.235e+05"


def test_metrics_table_stays_one_line_a_class_whatever_the_names():
    lines = metrics_table(Metrics(scalars={}, per_class=per_class(HOSTILE))).splitlines()
    assert len(lines) == 2 + len(HOSTILE)
    assert all(line.isprintable() for line in lines)


def test_widths_and_numbers():
    assert display_width("骨科 a") == 6
    assert display_width("e\u0301") == 1
    assert shorten("心血管内科", 10) == "心血管内科"
    assert shorten("心血管内科", 9) == "心血管内…"
    assert shorten("abcdef", 4) == "abc…"
    assert printable("a\nb\x1b\u202e骨") == r"a\nb\x1b\u202e骨"
    assert [format_number(v) for v in (0.0, 0.5, 0.00012345, -7, 12.0)] == [
        "0.0000",
        "0.5000",
        "0.0001234",
        "-7",
        "12.0000",
    ]


# ---------------------------------------------------------------- pictures


@pytest.fixture
def figures(monkeypatch):
    """The figures saved in a test, beside the files."""
    from matplotlib.figure import Figure

    saved, save = [], Figure.savefig

    def record(self, *arguments, **keywords):
        saved.append(self)
        return save(self, *arguments, **keywords)

    monkeypatch.setattr(Figure, "savefig", record)
    return saved


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def training_rows(n):
    rows = []
    for step in range(1, n + 1):
        rows.append(
            {"step": step, "epoch": step / n, "loss": 2 / step, "learning_rate": 1e-4 * step / n, "stepped": True}
        )
        if step % 4 == 0:
            rows.append({"step": step, "epoch": step / n, "eval_loss": 3 / step, "eval_f1_macro": 0.5})
    return rows


def test_plot_training_draws_what_the_rows_say(tmp_path, figures):
    rows = training_rows(12)
    rows.insert(6, {"step": 5, "epoch": 0.4, "loss": float("inf"), "learning_rate": float("nan"), "stepped": True})
    rows.insert(3, {"step": 3, "epoch": 0.2, "loss": float("inf"), "learning_rate": 9.0, "stepped": False})
    plot_training(rows, tmp_path / "plots" / "training.png")
    loss_axes, rate_axes = figures[0].axes
    training, validation = loss_axes.lines
    assert training.get_xdata().tolist() == list(range(1, 13))
    assert training.get_ydata().tolist() == [2 / step for step in range(1, 13)]
    assert list(validation.get_xdata()) == [4, 8, 12]
    assert list(validation.get_ydata()) == [3 / 4, 3 / 8, 3 / 12]
    assert list(rate_axes.lines[0].get_ydata()) == [1e-4 * step / 12 for step in range(1, 13)]
    assert rate_axes.get_xlabel() == "Optimizer step"
    assert png_size(tmp_path / "plots" / "training.png") == (1200, 900)


def test_plot_training_smooths_many_steps(tmp_path, figures):
    rows = [{"step": step, "loss": float(step), "learning_rate": 1e-4} for step in range(100)]
    rows[50]["loss"] = 150.0
    plot_training(rows, tmp_path / "a.png")
    each, mean = figures[0].axes[0].lines
    assert each.get_ydata()[50] == 150.0
    assert mean.get_ydata()[50] == pytest.approx((48 + 49 + 150 + 51 + 52) / 5)
    assert mean.get_ydata()[0] == pytest.approx((0 + 1 + 2) / 3)


@pytest.mark.parametrize("rows", [[], training_rows(1), [{"step": 1, "loss": float("nan"), "learning_rate": 0.0}]])
def test_plot_training_of_hardly_anything(tmp_path, rows):
    plot_training(rows, tmp_path / "a.png")
    assert png_size(tmp_path / "a.png") == (1200, 900)


def test_pictures_depend_on_the_data_alone(tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path, losses in zip(paths, ([2.0, 1.0], [2.0, 1.0], [2.0, 1.5]), strict=True):
        plot_training([{"step": i, "loss": loss, "learning_rate": 1e-4} for i, loss in enumerate(losses)], path)
    same, again, other = (path.read_bytes() for path in paths)
    assert same == again != other


def test_confusion_matrix_has_a_row_for_each_true_class(tmp_path, figures):
    true, predicted = np.array([0, 0, 0, 1, 1]), np.array([0, 1, 1, 1, 1])
    plot_confusion_matrix(true, predicted, ["benign", "malignant", "absent"], tmp_path / "a.png")
    axes = figures[0].axes[0]
    assert axes.images[0].get_array().tolist() == [
        pytest.approx([1 / 3, 2 / 3, 0]),
        [0, 1, 0],
        [0, 0, 0],
    ]
    assert {(t.get_position(), t.get_text()) for t in axes.texts} == {((0, 0), "1"), ((1, 0), "2"), ((1, 1), "2")}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["benign", "malignant", "absent"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Predicted class", "True class")


@pytest.mark.parametrize(
    ("num_labels", "counted", "named"), [(1, True, True), (20, True, True), (44, False, True), (70, False, False)]
)
def test_confusion_matrix_of_many_classes(tmp_path, figures, num_labels, counted, named):
    classes = np.arange(num_labels)
    plot_confusion_matrix(classes, classes, [f"a longer name {i}" for i in classes], tmp_path / "a.png")
    axes = figures[0].axes[0]
    assert len(axes.texts) == (num_labels if counted else 0)
    assert [label.get_text() for label in axes.get_yticklabels()].count("a longer name 0") == (1 if named else 0)
    assert axes.get_ylabel() == ("True class" if named else "True class (id)")
    width, height = png_size(tmp_path / "a.png")
    assert 500 <= height <= width <= 3200
    # The matrix itself, of which a class takes at least 30 pixels as long as the names are written.
    if named:
        assert axes.get_window_extent().width / num_labels >= 30


def test_per_label_bars(tmp_path, figures):
    plot_per_label(per_class(["fever", "cough"]), tmp_path / "a.png")
    plot_per_label(per_class([f"label {i}" for i in range(44)]), tmp_path / "b.png")
    axes = figures[0].axes[0]
    assert [[bar.get_width() for bar in bars] for bars in axes.containers] == [[0.5] * 2, [0.25] * 2, [1 / 3] * 2]
    assert [bars.get_label() for bars in axes.containers] == ["Precision", "Recall", "F1"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fever", "cough"]
    assert axes.yaxis_inverted()
    assert png_size(tmp_path / "a.png")[0] == png_size(tmp_path / "b.png")[0] == 1200
    assert png_size(tmp_path / "a.png")[1] < 500 < 2500 < png_size(tmp_path / "b.png")[1] < 3500


@pytest.mark.parametrize("shape", [(1,), (50,), (50, 4)])
def test_regression_scatter(tmp_path, figures, shape):
    values = np.arange(np.prod(shape), dtype=float).reshape(shape)
    plot_regression(values, -values, tmp_path / "a.png")
    panels = figures[0].axes
    assert len(panels) == (shape[1] if len(shape) == 2 else 1)
    points = panels[0].collections[0].get_offsets()
    first = values.reshape(len(values), -1)[:, 0]
    assert points.tolist() == [[x, -x] for x in first]
    assert panels[0].get_xlabel() == "True value"
    assert min(png_size(tmp_path / "a.png")) >= 700


def test_names_without_a_font_become_ids(tmp_path, figures, monkeypatch):
    monkeypatch.setattr(fonts, "_CJK_FAMILIES", ())
    plot_confusion_matrix([0, 1, 2], [0, 1, 2], CHINESE, tmp_path / "a.png")
    axes = figures[0].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]
    assert axes.get_ylabel() == "True class (id)"
    plot_per_label(per_class(CHINESE), tmp_path / "b.png")
    assert figures[1].axes[0].get_ylabel() == "Label (id)"


def test_names_are_drawn_where_an_installed_font_has_them(tmp_path, figures, monkeypatch):
    # A letter that DejaVu Sans lacks and STIX, which comes with matplotlib too, has.
    monkeypatch.setattr(fonts, "_CJK_FAMILIES", ("No Such Font", "STIXGeneral"))
    assert fonts.drawable_names(["\u1d81"]) == (["\u1d81"], ["DejaVu Sans", "STIXGeneral"], False)
    assert fonts.drawable_names(["\u1d81骨"]) == (["0"], ["DejaVu Sans"], True)
    plot_confusion_matrix([0, 1], [0, 1], ["\u1d81", "plain"], tmp_path / "a.png")
    assert figures[0].axes[0].get_ylabel() == "True class"


def test_hostile_names_are_drawn_as_they_are(tmp_path, figures):
    classes = list(range(len(HOSTILE)))
    plot_confusion_matrix(classes, classes, HOSTILE, tmp_path / "a.png")
    plot_per_label(per_class(HOSTILE), tmp_path / "b.png")
    drawn = [label.get_text() for label in figures[0].axes[0].get_yticklabels()]
    assert drawn[3] == r"\$x\$ and \$y"  # dollars, not a formula
    assert drawn[4].startswith(r"line\nbreak")


def test_a_notebook_is_left_alone(tmp_path):
    code = (
        "import sys, matplotlib, numpy as np; from pathlib import Path; from accumft.report import *\n"
        "before = matplotlib.rcParams.copy(); folder = Path(sys.argv[1])\n"
        "plot_training([{'step': 1, 'loss': 1.0, 'learning_rate': 0.1}], folder / 'a.png')\n"
        "plot_confusion_matrix([0], [0], ['a'], folder / 'b.png')\n"
        "plot_regression(np.zeros(2), np.zeros(2), folder / 'c.png')\n"
        "assert dict.__eq__(matplotlib.rcParams, before)\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], check=True)
    assert len(list(tmp_path.glob("*.png"))) == 3


# ---------------------------------------------------------------- predictions


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_predictions_of_single_label(tmp_path):
    path = tmp_path / "new" / "predictions.jsonl"
    texts = ["胸痛三天", "a rash"]
    common = {"label_names": ["骨科", "b"], "problem_type": "single_label_classification"}
    probabilities = np.array([[0.1234567, 0.8765433], [1.0, 0.0]])
    validation = {"rows": [2, 5], "texts": iter(texts), "references": np.array([0, 0]), "probabilities": probabilities}
    write_predictions(path, split="validation", **validation, **common)
    first, second = read(path)
    assert first == {
        "split": "validation",
        "row": 2,
        "text_sha256": hashlib.sha256("胸痛三天".encode()).hexdigest()[:16],
        "label": "骨科",
        "prediction": "b",
        "probabilities": {"骨科": 0.123457, "b": 0.876543},
    }
    assert (second["row"], second["prediction"]) == (5, "骨科")
    content = path.read_text(encoding="utf-8")
    assert "骨科" in content
    assert not any(text in content for text in texts)

    test = {"rows": [1], "texts": [("a", "b")], "references": [1], "probabilities": probabilities[:1]}
    write_predictions(path, split="test", append=True, **test, **common)
    assert [row["split"] for row in read(path)] == ["validation", "validation", "test"]
    assert read(path)[2]["text_sha256"] == hashlib.sha256(b"a\0b").hexdigest()[:16]
    write_predictions(path, split="test", **test, **common)
    assert len(read(path)) == 1


def test_predictions_of_multi_label_and_regression(tmp_path):
    path = tmp_path / "predictions.jsonl"
    write_predictions(
        path,
        split="test",
        rows=[1],
        texts=["t"],
        references=np.array([[1.0, 0.0, 1.0]]),
        probabilities=np.array([[0.3, 0.2, 0.9]], dtype=np.float32),
        label_names=["a", "b", "c"],
        problem_type="multi_label_classification",
        threshold=0.25,
    )
    (row,) = read(path)
    assert (row["label"], row["prediction"]) == (["a", "c"], ["a", "c"])
    assert row["probabilities"] == {"a": 0.3, "b": 0.2, "c": 0.9}
    for references, predictions, label, prediction in (
        (np.array([1.5]), np.array([1.23456789]), 1.5, 1.234568),
        (np.array([[1.5, 2.0]]), np.array([[1.0, 2.5]]), [1.5, 2.0], [1.0, 2.5]),
    ):
        write_predictions(
            path,
            split="test",
            rows=[1],
            texts=["t"],
            references=references,
            probabilities=predictions,
            label_names=[],
            problem_type="regression",
        )
        (row,) = read(path)
        assert (row["label"], row["prediction"]) == (label, prediction)
        assert "probabilities" not in row


def test_predictions_stay_one_line_an_example_and_of_one_length(tmp_path):
    path = tmp_path / "predictions.jsonl"
    arguments = {"split": "test", "references": [0, 1], "probabilities": np.eye(2)}
    arguments["problem_type"] = "single_label_classification"
    write_predictions(path, rows=[1, 2], texts=["\ud800", "\n"], label_names=["a\n\u2028b", "\ud800"], **arguments)
    assert [json.loads(line)["label"] for line in path.read_bytes().splitlines()] == ["a\n\u2028b", "\ud800"]
    with pytest.raises(ValueError, match="zip"):
        write_predictions(path, rows=[1, 2], texts=["one"], label_names=["a", "b"], **arguments)


# ---------------------------------------------------------------- model card

RESULTS = {
    "eval_accuracy": 0.9123456789,
    "eval_f1_macro": 0.9,
    "eval_loss": 0.3,
    "test_f1_macro": 0.875,
    "eval_auroc": None,
    "steps": 120,
    "tokens_per_second": 1234.5,
    "best": "step 100",
}


def make_card(**changes):
    arguments = {
        "model_name": "my-run",
        "problem_type": "single_label_classification",
        "recipe": {"learning_rate": 5e-5, "report_to": ("wandb",), "max_length": 256, "text_column": ["text"]},
        "results": RESULTS,
        "per_class": per_class(CHINESE),
        "labels": CHINESE,
        "data": "notes.csv: 100 rows",
        "base_model": "google-bert/bert-base-chinese",
        "language": "zh",
        "tags": ["medical"],
        "plots": ["plots/training.png"],
    }
    return model_card(**{**arguments, **changes})


def table_cells(text, name):
    """The cells of the one row of a table of the page that begins with the name."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_model_card_header_is_the_hubs():
    from huggingface_hub import ModelCard

    content = make_card()
    header = yaml.safe_load(content.split("---\n")[1])
    assert header["pipeline_tag"] == "text-classification"
    assert header["library_name"] == "transformers"
    assert header["base_model"] == "google-bert/bert-base-chinese"
    assert header["language"] == "zh"
    assert header["tags"] == ["accumft", "text-classification", "medical"]
    assert header["metrics"] == ["accuracy", "f1"]
    assert "datasets" not in header and "license" not in header
    results = header["model-index"][0]["results"]
    assert [(r["dataset"]["split"], [(m["type"], m["name"], m["value"]) for m in r["metrics"]]) for r in results] == [
        ("validation", [("accuracy", "Accuracy", 0.912346), ("f1", "Macro F1", 0.9)]),
        ("test", [("f1", "Macro F1", 0.875)]),
    ]
    assert results[0]["dataset"] == {"name": "notes.csv: 100 rows", "type": "custom", "split": "validation"}
    loaded = ModelCard(content)
    assert loaded.data.to_dict() == header
    assert str(loaded) == content
    assert {(r.dataset_split, r.metric_name, r.metric_value) for r in loaded.data.eval_results} == {
        ("validation", "Accuracy", 0.912346),
        ("validation", "Macro F1", 0.9),
        ("test", "Macro F1", 0.875),
    }


def test_model_card_page():
    content = make_card()
    assert table_cells(content, "Accuracy") == ["Accuracy", "0.9123", "–"]
    assert table_cells(content, "Macro F1") == ["Macro F1", "0.9000", "0.8750"]
    assert table_cells(content, "Loss") == ["Loss", "0.3000", "–"]
    assert table_cells(content, "steps") == ["steps", "120"]
    assert table_cells(content, "1") == ["1", "皮肤科", "0.5000", "0.2500", "0.3333", "5"]
    assert "auroc" not in content and "step 100" not in content
    assert "gives a text one of 3 classes, fine-tuned from [google-bert/bert-base-chinese](https://hugg" in content
    assert "- notes.csv: 100 rows\n" in content
    assert "![Training](plots/training.png)" in content
    assert 'classifier("The text to classify.", truncation=True, max_length=256)' in content
    recipe = yaml.safe_load(content.split("```yaml\n")[1].split("\n```")[0])
    assert recipe == {"learning_rate": 5e-5, "report_to": ["wandb"], "max_length": 256, "text_column": ["text"]}
    assert re.search(r"^- torch \d", content, re.MULTILINE)


def test_model_card_code_is_python_and_fits_the_task():
    for problem_type, recipe, expected in (
        ("multi_label_classification", {"threshold": 0.3}, "truncation=True, top_k=None)"),
        ("regression", {"text_column": ["question", "answer"]}, '{"text": "The first text.", "text_pair": "The '),
    ):
        content = make_card(problem_type=problem_type, recipe=recipe, results={"eval_rmse": 0.5, "eval_f1_micro": 0.25})
        code = content.split("```python\n")[1].split("```")[0]
        compile(code, "README.md", "exec")
        assert expected in code
        assert ("A label applies where its score is 0.3 or more." in content) == ("threshold" in recipe)
    assert table_cells(content, "RMSE") == ["RMSE", "0.5000"]


def test_base_model_is_named_in_the_header_only_where_the_hub_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "bert").mkdir(parents=True)
    for name in ("models/bert", "./bert", "/data/bert", str(tmp_path), "C:\\models\\bert", "a/b/c", "中文/模型", None):
        assert "base_model:" not in make_card(base_model=name).split("---\n")[1], name
    assert "fine-tuned from models/bert with" in make_card(base_model="models/bert")
    assert "trained from scratch" in make_card(base_model=None)
    assert "base_model: bert-base-uncased\n" in make_card(base_model="bert-base-uncased")


def test_a_data_set_of_the_hub_is_named_in_the_header():
    header = yaml.safe_load(make_card(recipe={"dataset_name": "owner/notes"}).split("---\n")[1])
    assert header["datasets"] == "owner/notes"
    assert header["model-index"][0]["results"][0]["dataset"]["type"] == "owner/notes"


def test_nothing_from_the_data_breaks_the_card():
    from huggingface_hub import ModelCard

    content = make_card(
        model_name="---\n<b>run</b>",
        labels=HOSTILE,
        per_class=per_class(HOSTILE),
        data="\n".join(["x: {y}", "# heading", "1. item", *HOSTILE]),
        base_model="<img src=x>`|",
        recipe={"train_file": "``` \n```\n<script>", "text_column": HOSTILE},
        plots=["plots/a b](x) <c>.png"],
    )
    card_ = ModelCard(content)
    assert card_.data.model_name == r"---\n<b>run</b>"
    body, fenced = card_.text.split("## Recipe")
    assert "<" not in body.replace("```", "")
    fence = re.search(r"^(`+)yaml$", fenced, re.MULTILINE)[1]
    assert len(fence) == 4
    recipe = fenced.split(f"{fence}yaml\n")[1].split(f"\n{fence}\n")[0]
    assert yaml.safe_load(recipe) == {"train_file": "``` \n```\n<script>", "text_column": HOSTILE}
    # A table row a label, each with the six cells of its header.
    table = body.split("### By class\n\n")[1].split("\n\n")[0].splitlines()
    assert len(table) == 2 + len(HOSTILE)
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in table} == {7}
    headings = [line for line in card_.text.splitlines() if line.startswith("#")]
    assert headings[1:] == ["## How to use it", "## Data", "## Results", "### By class", "## Recipe", "## Versions"]
    assert "](plots/a%20b%5D%28x%29%20%3Cc%3E.png)" in body


def test_markdown_escapes_what_would_be_markup_and_nothing_else():
    assert card.markdown("Type 2 diabetes (E11.9), 50%") == "Type 2 diabetes (E11.9), 50%"
    assert card.markdown("a|b`c`*d*_e_[f]") == r"a\|b\`c\`\*d\*\_e\_\[f\]"
    assert card.markdown("<b> & $x$ ~~y~~") == r"&lt;b&gt; &amp; \$x\$ \~\~y\~\~"
    assert [card.markdown(text) for text in ("# a", "- a", "+ a", "1. a", "12) a", "= a")] == [
        r"\# a", r"\- a", r"\+ a", r"1\. a", r"12\) a", r"\= a"
    ]  # fmt: skip


def test_the_card_of_an_empty_run():
    from huggingface_hub import ModelCard

    data = ModelCard(make_card(results={}, per_class=[], plots=[], language=None, tags=[])).data.to_dict()
    assert "model-index" not in data and "metrics" not in data
