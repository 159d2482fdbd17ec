"""Probabilities of texts in images: the evaluators' pixels and numbers, and the choice of
prompts.
"""

import dataclasses
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import tiny_model, tiny_tokenizer
from helpers.label_shards import NAMES, make_shards
from PIL import Image

import medvl
from medvl.data import ShardSource
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import open_for_evaluation, zero_shot
from medvl.inference import Scorer, prompts_for
from medvl.models import System, create_classifier, save
from medvl.schema import Inputs

TINY = {
    "image_encoder": "resnet_tiny",
    "text_encoder": "tiny_bert",
    "image_size": 32,
    "projection_dim": 8,
}
TEXTS = ["fracture", "EDEMA", "left apical nodule"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("bright"))


@pytest.fixture(scope="module")
def checkpoint(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dual-encoder that was trained on these shards."""
    folder = tmp_path_factory.mktemp("convirt")
    model = medvl.create_model("convirt", tokenizer=tiny_tokenizer(), frozen_text_layers=0, **TINY)
    save(
        model,
        folder,
        {"train_manifest": dataclasses.asdict(ShardSource(shards / "train").manifest)},
    )
    return folder


def originals(shards: Path, source: ShardSource) -> list[Path]:
    return [
        shards.parent / f"{int(source.sample(row).key.removeprefix('k-'))}.png"
        for row in range(len(source))
    ]


def test_original_files_give_the_pixels_of_an_evaluation_on_shards(
    shards: Path, checkpoint: Path
) -> None:
    """40 x 40 PNG files, which the shards hold as JPEG of 32 x 32."""
    model, source = medvl.load(checkpoint), ShardSource(shards / "test")
    loader = open_for_evaluation(source, model.transform, model.tokenizer, batch=5, workers=0)
    of_shards = torch.cat([batch.image_BCHW for batch in loader])
    paths = originals(shards, source)
    assert torch.equal(model.transform(paths), of_shards)
    for read in (
        Path.read_bytes,
        Image.open,
        lambda path: cv2.imread(str(path), cv2.IMREAD_GRAYSCALE),
    ):
        assert torch.equal(model.transform([read(path) for path in paths]), of_shards)
    stored = [source.pixels(row) for row in range(len(source))]
    assert torch.equal(model.transform(stored), of_shards)
    plain = medvl.create_model("convirt", tokenizer=tiny_tokenizer(), frozen_text_layers=0, **TINY)
    assert torch.equal(plain.transform(stored), of_shards)
    assert plain.transform == model.transform
    assert not torch.equal(
        plain.transform(paths), of_shards
    )  # it does not know how images were stored


def test_probabilities_are_those_of_the_evaluation(shards: Path, checkpoint: Path) -> None:
    model, source = medvl.load(checkpoint), ShardSource(shards / "test")
    loader = open_for_evaluation(source, model.transform, model.tokenizer, batch=5, workers=0)
    prompts = prompts_for(["Edema", "Fracture"], "chexpert_pairs")
    expected = list(zero_shot(model, loader, prompts, resamples=0).predictions())
    rows = medvl.infer(
        model, originals(shards, source), ["edema", "fracture"], prompts="chexpert_pairs"
    )
    for row, line in zip(rows, expected, strict=True):
        assert list(row) == ["edema", "fracture"]
        np.testing.assert_allclose(list(row.values()), list(line["scores"].values()), rtol=1e-5)


def test_one_image_and_lists(shards: Path, checkpoint: Path) -> None:
    path = shards.parent / "0.png"
    one = medvl.infer(checkpoint, path, TEXTS)
    assert list(one) == TEXTS
    assert all(0 < value < 1 for value in one.values())
    model = medvl.load(checkpoint)
    assert medvl.infer(model, [path], TEXTS)[0] == pytest.approx(one)
    assert medvl.infer(model, str(path), "fracture") == pytest.approx({"fracture": one["fracture"]})
    assert set(medvl.infer(model, path)) == set(prompts_for(None).classes)
    model.train()
    assert medvl.infer(model, path, TEXTS) == pytest.approx(one)  # in eval mode, and back
    assert model.training
    with raises(ConfigError, "empty", "images"):
        medvl.infer(model, [], TEXTS)


def test_classifiers_give_their_labels(shards: Path, checkpoint: Path) -> None:
    model = create_classifier(checkpoint, NAMES).eval()
    torch.nn.init.normal_(model.label_head.weight)
    path = shards.parent / "1.png"
    expected = model.predict(model.transform(path))
    assert medvl.infer(model, path) == pytest.approx(
        {name: value.item() for name, value in expected.items()}
    )
    assert list(medvl.infer(model, path, ["fracture"])) == ["fracture"]
    with raises(ConfigError, "unknown_name", "texts", names="Edema, Fracture"):
        medvl.infer(model, path, ["mass"])


def test_other_models_are_refused() -> None:
    model: System = tiny_model("m3ae", tiny_tokenizer())
    with raises(ConfigError, "unsupported", "model", names="dual-encoder"):
        Scorer(model, TEXTS)
    model.inputs = Inputs(regions=True)
    with raises(ConfigError, "unsupported", "model", names="regions"):
        Scorer(model, TEXTS)


def test_phrases_become_pairs() -> None:
    prompts = prompts_for(
        ["EDEMA", "Left apical nodule.", "There is a mass", "PICC line", ("A.", "B.")]
    )
    assert list(prompts.classes) == [
        "EDEMA",
        "Left apical nodule.",
        "There is a mass",
        "PICC line",
        "A.",
    ]
    assert prompts.classes["EDEMA"] == prompts_for(None).classes["Edema"]
    sentences = {
        name: (*sides.positive, *sides.negative) for name, sides in prompts.classes.items()
    }
    assert sentences["Left apical nodule."] == (
        "There is left apical nodule.",
        "There is no left apical nodule.",
    )
    assert sentences["There is a mass"] == ("There is mass.", "There is no mass.")
    assert sentences["PICC line"][1] == "There is no PICC line."
    assert sentences["A."] == ("A.", "B.")
    assert prompts_for({"fluid": ("Fluid.", "Dry.")}).classes["fluid"].negative == ("Dry.",)
    assert prompts_for(["Edema"], temperature=0.5).temperature == 0.5


@pytest.mark.parametrize(
    ("texts", "prompts", "code", "field"),
    [
        ([], "chexpert_pairs", "empty", "texts"),
        ([" "], "chexpert_pairs", "empty", "texts"),
        (["No edema"], "chexpert_pairs", "unsupported", "texts"),
        (["There is no edema."], "chexpert_pairs", "unsupported", "texts"),
        (["mass", "mass"], "chexpert_pairs", "conflict", "texts"),
        ([("a", "b", "c")], "chexpert_pairs", "malformed", "texts"),
        (["mass"], "gloria_published", "unsupported", "prompts"),
        (["mass"], "chexpert_classes", "unknown_name", "texts"),
        (["Edema"], "chexpert_classes", "empty", "texts"),
        (["Edema"], "chexpert", "unknown_name", "prompts"),
    ],
)
def test_texts_that_cannot_be_scored(texts: list[str], prompts: str, code: str, field: str) -> None:
    with raises(EvaluationError, code, field):
        prompts_for(texts, prompts)
