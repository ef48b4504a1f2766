"""The recipe for images from end to end: what it leaves, its resume, its pipeline, the models, and mistakes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from image_cases import picture, save_model, small_recipe, tiny_model, write_folders
from image_cls import ImageClsRecipe, build_model, load_data, plan, run
from launching import ROOT
from runs import same_model
from small import rows_of

from accumft.cli import load_recipe, main
from accumft.errors import UserError
from accumft.tasks.image_classification import load_digits
from accumft.tasks.image_models import batch_norms, is_frozen, load_image_classifier, tokens_of_image

PNEUMONIA = Path(__file__).resolve().parents[2] / "shared/data/pneumoniamnist/pneumoniamnist.npz"
EFFICIENTNET = Path(__file__).resolve().parents[2] / "shared/models/efficientnet-lite0-hf"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 6 steps with dropout and augmentation, with a checkpoint in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("one") / "run"
    run(small_recipe(folder, dropout=0.1, save_steps=4, save_total_limit=None))
    return folder


def test_outputs(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    expected = {"config.json", "model.safetensors", "preprocessor_config.json", "recipe.yaml", "metrics.jsonl"}
    assert names >= expected | {"all_results.json", "predictions.jsonl", "README.md", "plots"}
    plots = ["test_confusion_matrix.png", "training.png", "validation_confusion_matrix.png"]
    assert sorted(path.name for path in (finished / "plots").iterdir()) == plots
    assert [row["step"] for row in rows_of(finished)] == [1, 2, 3, 4, 5, 6]
    assert [row["examples"] for row in rows_of(finished)] == [16] * 6
    assert [row["step"] for row in rows_of(finished, "eval_loss")] == [3, 6]
    card = (finished / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: image-classification" in card and "gives an image one of 10 classes" in card


def test_pipeline_says_what_the_run_has_predicted(finished: Path) -> None:
    from transformers import pipeline

    classifier = pipeline("image-classification", model=str(finished), device="cpu", top_k=10)
    lines = [json.loads(line) for line in (finished / "predictions.jsonl").read_text().splitlines()]
    assert len(lines) == 32 and set(lines[0]) == {
        "split", "row", "image_blake2b", "label", "prediction", "probabilities"
    }  # fmt: skip
    tests = [line for line in lines if line["split"] == "test"][:3]
    images = load_digits()["test"]
    for line in tests:
        (index,) = np.flatnonzero(np.asarray(images.table["__row__"]) == line["row"])
        answer = {found["label"]: found["score"] for found in classifier(images.images.load(int(index)))}
        assert answer == pytest.approx(line["probabilities"], abs=1e-5)


def test_resume_in_the_middle_of_an_epoch_is_exact(finished: Path, tmp_path: Path) -> None:
    checkpoint = finished / "checkpoints" / "step-00000004"
    assert sorted(path.name for path in checkpoint.parent.iterdir() if path.name.startswith("step")) == [
        "step-00000003", "step-00000004", "step-00000006"
    ]  # fmt: skip
    recipe = load_recipe(ImageClsRecipe, str(finished / "recipe.yaml"))
    recipe.output_dir, recipe.resume_from_checkpoint = str(tmp_path / "run"), str(checkpoint)
    run(recipe)
    assert [row["loss"] for row in rows_of(tmp_path / "run")][-2:] == [row["loss"] for row in rows_of(finished)][-2:]
    assert same_model(tmp_path / "run" / "checkpoints" / "step-00000006", checkpoint.parent / "step-00000006")
    assert same_model(tmp_path / "run", finished)


def test_resume_with_another_size_is_refused(finished: Path, tmp_path: Path) -> None:
    recipe = load_recipe(ImageClsRecipe, str(finished / "recipe.yaml"))
    recipe.output_dir, recipe.resume_from_checkpoint = str(tmp_path / "run"), str(finished)
    recipe.image_size = 32
    with pytest.raises(UserError, match=r"pixels 32 x 32 \(there 16 x 16\)"):
        run(recipe)


def test_the_cut_and_the_workers_do_not_matter(tmp_path: Path) -> None:
    whole = run(small_recipe(tmp_path / "a", max_steps=3)).history
    cut = run(
        small_recipe(tmp_path / "b", max_steps=3, per_device_train_batch_size=5, dataloader_num_workers=1)
    ).history
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (whole, cut)]
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert [row["micro_batches"] for row in cut if "loss" in row] == [4, 4, 4]


def test_class_folders_with_a_pretrained_model_with_batch_norm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folders(tmp_path / "photos")
    fields: dict[str, Any] = {
        "train_file": str(tmp_path / "photos"),
        "model_name_or_path": save_model("resnet", tmp_path / "model"),
        "max_train_samples": None,
        "max_eval_samples": None,
        "horizontal_flip": 0.5,
    }
    run(small_recipe(tmp_path / "run", max_steps=2, per_device_train_batch_size=3, **fields))
    printed = capsys.readouterr().out
    assert "BatchNorm: keeps the statistics that it has (--freeze_batch_norm False lets it learn new ones)" in printed
    assert "24 rows are held out" in printed and "count as 1 tokens" in printed
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert list(config["id2label"].values()) == ["bar", "disc", "grid", "void"]
    from transformers import pipeline

    answer = pipeline("image-classification", model=str(tmp_path / "run"), device="cpu")(picture(1, 0))
    assert {found["label"] for found in answer} == {"bar", "disc", "grid", "void"}
    run(small_recipe(tmp_path / "other", max_steps=1, freeze_batch_norm=False, **fields))
    assert "BatchNorm: learns the statistics of micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["vit", "convnext", "resnet", "efficientnet"])
def test_models_get_a_new_head_and_keep_the_rest(tmp_path: Path, kind: str) -> None:
    path = save_model(kind, tmp_path / "model")
    head = {"id2label": {0: "no", 1: "yes"}, "problem_type": "single_label_classification", "image_size": 16}
    model = load_image_classifier(path, dropout=0.0, **head)
    before, after = tiny_model(kind, {i: str(i) for i in range(7)}).state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    new = {name for name in before if before[name].shape != after[name].shape}
    assert len(new) == 2 and all("classifier" in name for name in new)
    assert all(torch.equal(before[name], after[name]) for name in before if name not in new)
    assert model.config.id2label == {0: "no", 1: "yes"} and model.config.image_size == 16
    rates = {
        name: getattr(model.config, name, None) for name in ("drop_path_rate", "drop_connect_rate", "dropout_rate")
    }
    assert set(rates.values()) <= {0.0, None}
    assert tokens_of_image(model.config, (224, 224)) == (785 if kind == "vit" else 196)


def test_batch_norm_as_the_field_says(tmp_path: Path) -> None:
    write_folders(tmp_path / "photos", 3)
    fields = {"train_file": str(tmp_path / "photos"), "model_name_or_path": save_model("resnet", tmp_path / "resnet")}
    for freeze, expected in ((None, True), (True, True), (False, False)):
        recipe = small_recipe(tmp_path / "run", freeze_batch_norm=freeze, **fields)
        model, _ = build_model(recipe, load_data(recipe)[0])
        assert len(batch_norms(model)) == 6 and is_frozen(model.train()) is expected
        assert [layer.training for layer in batch_norms(model)] == [not expected] * 6
    fields["model_name_or_path"] = save_model("vit", tmp_path / "vit")
    recipe = small_recipe(tmp_path / "run", freeze_batch_norm=True, **fields)
    with pytest.raises(UserError, match="--freeze_batch_norm: ViTForImageClassification has no BatchNorm; leave it"):
        build_model(recipe, load_data(recipe)[0])


def test_several_labels_an_image(tmp_path: Path) -> None:
    write_folders(tmp_path / "photos", 5)
    names = ("bar", "disc", "grid", "void")
    rows = [f"photos/{name}/{n}.png,{name}|{'odd' if n % 2 else ''}" for name in names for n in range(5)]
    (tmp_path / "train.csv").write_text("image,label\n" + "\n".join(rows) + "\n")
    fields: dict[str, Any] = {"train_file": str(tmp_path / "train.csv"), "label_delimiter": "|", "max_steps": 2}
    result = run(small_recipe(tmp_path / "run", threshold=0.4, pos_weight=("balanced",), **fields))
    assert {"eval_f1_micro", "eval_exact_match"} <= set(result.metrics)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification" and len(config["id2label"]) == 5


def test_dry_run(tmp_path: Path) -> None:
    found = plan(small_recipe(tmp_path / "run", max_train_samples=None))
    assert found.window_plan.plan.total_steps == 2 * 79 and not (tmp_path / "run").exists()
    assert found.steps.largest == (16, 17), "images of 16 pixels: 16 patches and one"
    assert 0 < found.memory.activations < 2**28


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_column": "file"}, "--image_column file: has no effect with the digits of scikit-learn"),
        ({"freeze_batch_norm": True}, "--freeze_batch_norm True: has no effect with a new ViT"),
        ({"padding_free": True}, "--padding_free True: has no effect with images, which all have one size"),
        ({"image_mean": (0.5,)}, "--image_mean and --image_std: give both, or neither"),
        ({"image_mean": (0.5,) * 3, "image_std": (0, 1, 1)}, "--image_std 0 1 1: three finite numbers"),
        ({"image_size": 30}, "--image_size 30: the new ViT takes multiples of 4"),
        ({"image_size": 4}, "--image_size 4: must be between 8 and 4096 pixels"),
        ({"random_crop": 0.0}, "--random_crop 0: a share of the image's area"),
        ({"horizontal_flip": 1.5}, "--horizontal_flip 1.5: must be between 0 and 1"),
        ({"random_rotation": 181}, "--random_rotation 181: must be between 0 and 180 degrees"),
        ({"test_file": "x.npz"}, "--validation_file and --test_file need --train_file"),
        ({"train_file": "x.npz", "delimiter": ";"}, "--delimiter ;: has no effect with folders of classes and .npz"),
        ({"train_file": "nowhere.npz"}, "nowhere.npz: no such file"),
        ({"train_file": "nowhere"}, "nowhere: no such file"),
        ({"model_name_or_path": "nowhere"}, '--model_name_or_path "nowhere": its image processor is not loaded'),
    ],
)
def test_mistakes_end_in_one_line(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        run(small_recipe(tmp_path / "run", **fields))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    head = {"id2label": {0: "no", 1: "yes"}, "problem_type": "single_label_classification"}
    path = save_model("vit", tmp_path / "vit")
    with pytest.raises(UserError, match=r"--image_size 32: the positions of this model are those of 16 pixels"):
        load_image_classifier(path, image_size=32, **head)
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    (tmp_path / "vit" / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(UserError, match=r"does not fit its config.json"):
        load_image_classifier(path, image_size=16, **head)
    (tmp_path / "vit" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match=r'--model_name_or_path ".*": not loaded \(.*A file in it is damaged'):
        load_image_classifier(path, image_size=16, **head)


def test_command_line_ends_with_2_on_a_broken_image(tmp_path: Path) -> None:
    folder = write_folders(tmp_path / "photos", 3)
    (folder / "disc" / "1.png").write_bytes((folder / "disc" / "1.png").read_bytes()[:50])
    script = str(ROOT / "recipes" / "image_cls.py")
    arguments = ["--train_file", str(folder), "--image_mean", "0.5", "0.5", "0.5", "--image_std", "1", "1", "1"]
    done = subprocess.run(
        [sys.executable, script, *arguments, "--output_dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{folder}, row 5: disc/1.png: a damaged image (" in done.stderr
    assert not (tmp_path / "run").exists()


def test_saved_recipe_is_the_recipe(finished: Path) -> None:
    saved = yaml.safe_load((finished / "recipe.yaml").read_text())
    assert saved["random_crop"] == 0.6 and saved["image_mean"] == [] and saved["model_name_or_path"] is None
    assert main.__name__ == "main" and load_recipe(ImageClsRecipe, str(finished / "recipe.yaml")).image_mean == ()


def test_digits_learn_in_a_few_epochs(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"max_train_samples": None, "max_eval_samples": None}
    fields |= {"effective_batch_size": 32, "eval_steps": 1000, "random_rotation": 5.0}
    result = run(small_recipe(tmp_path / "run", num_train_epochs=4, random_crop=0.9, **fields))
    assert result.metrics["eval_accuracy"] > 0.4 and result.metrics["test_accuracy"] > 0.3, "chance is 0.1"


@pytest.mark.skipif(not (PNEUMONIA.exists() and EFFICIENTNET.exists()), reason="real data are not here")
def test_pneumonia(tmp_path: Path) -> None:
    recipe = ImageClsRecipe(train_file=str(PNEUMONIA), model_name_or_path=str(EFFICIENTNET), image_size=32)
    data, _ = load_data(recipe)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 3882, "validation": 524, "test": 624}
    labels = np.asarray(data.train["labels"])
    assert np.bincount(labels).tolist() == [388, 3494] and (np.diff(labels) != 0).sum() == 1, "sorted by label"
    assert [note for note in data.notes if "flatters" in note] == [
        f"{PNEUMONIA} (val_images): 8 of 524 images are in {PNEUMONIA} (train_images) too, so its score flatters"
    ]
    model, processor = build_model(recipe, data)
    assert is_frozen(model) and len(batch_norms(model)) == 49
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_010_110
    pixels = processor(images=[data.images["train"].load(0)], return_tensors="pt")["pixel_values"]
    assert model.eval()(pixel_values=pixels).logits.shape == (1, 2)
