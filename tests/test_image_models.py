"""Image classifiers and processors as they are loaded: which weights are new, and what is said of it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from image_cases import save_model
from launching import ROOT
from safetensors.torch import load_file, save_file

from accumft.errors import UserError
from accumft.tasks.image_models import load_image_classifier

HEAD: dict[str, Any] = {
    "id2label": {0: "no", 1: "yes"},
    "problem_type": "single_label_classification",
    "image_size": 16,
}


def rename(folder: str, old: str, new: str | None) -> None:
    """Weights whose names begin with `old` begin with `new` instead; None: they are left out."""
    path = Path(folder) / "model.safetensors"
    kept = {}
    for name, tensor in load_file(path).items():
        if not name.startswith(old) or new is not None:
            kept[(new or "") + name.removeprefix(old) if name.startswith(old) else name] = tensor
    save_file(kept, path, {"format": "pt"})


@pytest.mark.parametrize("kind", ["vit", "convnext", "resnet", "efficientnet"])
def test_weights_of_other_names_are_refused(tmp_path: Path, kind: str) -> None:
    path = save_model(kind, tmp_path / "model")
    rename(path, "", "backbone.model.")
    with pytest.raises(UserError) as error:
        load_image_classifier(path, **HEAD)
    message = str(error.value)
    assert message.startswith(f'--model_name_or_path "{path}": its weights are not those of a ') and "\n" not in message
    assert "ForImageClassification" in message


def test_a_few_new_weights_besides_the_head_are_noted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model("vit", tmp_path / "model")
    load_image_classifier(path, **HEAD)
    assert capsys.readouterr().out == "", "a head for other labels"
    rename(path, "classifier.", None)
    load_image_classifier(path, **HEAD)
    assert capsys.readouterr().out == "", "a model without a head"
    rename(path, "vit.layernorm.", None)
    load_image_classifier(path, **HEAD)
    assert capsys.readouterr().out == (f"note: {path} has no vit.layernorm.bias and 1 more: these weights are new\n")
    monkeypatch.setenv("RANK", "1")
    load_image_classifier(path, **HEAD)
    assert capsys.readouterr().out == ""


def test_the_processor_of_a_new_model_is_made_without_a_word() -> None:
    """In a process of its own: `transformers` says it once."""
    code = "from accumft.data.images import load_processor; print(type(load_processor(None, image_size=16)).__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ViTImageProcessorPil\n", "")
