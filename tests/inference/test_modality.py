"""Warnings about images of another kind than those that a model was trained on."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.fusion_samples import tiny_tokenizer

import medvl
from medvl.cli import main as cli
from medvl.data.dicom.reader import DicomHeader, read_dicom
from medvl.inference.models import Expected, describe_doubt, describe_doubts
from medvl.models import save
from medvl.models.base import System
from medvl.models.card import image_kind, image_kinds

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 30), dtype=np.uint8)


def manifest(corpus: str, **fields: Any) -> dict[str, Any]:
    return {"corpus": corpus, "split": "train", "samples": 5, "patients": [], **fields}


def model_of(*corpora: str) -> System:
    """A model whose checkpoint records these training data."""
    settings = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "projection_dim": 8,
    }
    model = medvl.create_model(
        "convirt", tokenizer=tiny_tokenizer(), frozen_text_layers=0, **settings
    )
    model.trained_on = tuple(manifest(corpus) for corpus in corpora)
    return model


@pytest.fixture
def header(tmp_path: Path) -> Any:
    """Function that returns the header of a file with this modality and part of the body."""

    def read(modality: str | None, part: str | None = None) -> DicomHeader:
        fields = {"Modality": modality} | ({} if part is None else {"BodyPartExamined": part})
        return read_dicom(
            write_dataset(tmp_path / "image.dcm", image_dataset(PIXELS, **fields))
        ).header

    return read


@pytest.mark.parametrize(
    ("corpora", "modality", "part", "doubt"),
    [
        ((), "MR", "BRAIN", "MR, BRAIN"),
        ((), "DX", "CHEST", None),
        (("mimic-cxr",), "CT", "CHEST", "CT"),
        (("mimic-cxr",), "CR", "HAND", "HAND"),
        (("mimic-cxr",), None, None, "no known modality"),
        (("mosmed",), "CT", "CHEST", None),
        (("mosmed",), "CT", "BRAIN", "BRAIN"),
        (("mosmed",), "DX", None, "DX"),
        (("mosmed", "mimic-cxr"), "DX", "CHEST", None),
        (("mosmed", "mimic-cxr"), "MR", "CHEST", "MR"),
        (("path-vqa",), "DX", "CHEST", "DX"),
        (("roco",), "MR", "BRAIN", None),
        (("mimic-cxr", "slake"), "MR", "BRAIN", None),
        (("ours",), "MR", None, "MR"),
    ],
)
def test_images_are_compared_with_the_training_data(
    header: Any, corpora: tuple[str, ...], modality: str | None, part: str | None, doubt: str | None
) -> None:
    assert Expected.by(model_of(*corpora)).doubt(header(modality, part)) == doubt


def test_unrecorded_training_images_are_assumed_and_said_to_be_so() -> None:
    states = {
        corpora: Expected.by(model_of(*corpora))
        for corpora in [(), ("ours",), ("mimic-cxr", "ours"), ("rsna",)]
    }
    assert [state.recorded for state in states.values()] == [False, False, False, True]
    assert {state.name for state in states.values()} == {"chest radiographs"}
    texts = [describe_doubts(["MR", None], state) or "" for state in states.values()]
    assert all(
        text.startswith("1 of 2 images are no chest radiographs by their header (1 MR)")
        for text in texts
    )
    assert ["does not record" in text for text in texts] == [True, True, True, False]
    assert describe_doubts([None], states["rsna",]) is None


def test_kinds_of_synthetic_images_are_those_of_their_generators() -> None:
    made = manifest("generated", generators=[{"sha256": "0", "trained_on": [manifest("mosmed")]}])
    [kind] = image_kinds([made])
    assert kind == image_kind("mosmed")
    assert image_kinds([made, manifest("mimic-cxr")]) == (image_kind("mimic-cxr"), kind)
    assert image_kinds([manifest("mimic-cxr"), manifest("ours", warnings={"no_image": 5})]) == (
        image_kind("mimic-cxr"),
    )


def test_every_corpus_of_images_has_a_kind() -> None:
    from medvl.data import list_corpora

    own = {"generated", "table", "parquet", "text", "volumes", "webdataset", "concepts"}
    assert {
        name for name in list_corpora() if name not in own and image_kind(name) is None
    } == set()


def test_the_warning_of_one_image_names_the_models_that_it_is_not_for(header: Any) -> None:
    models = {
        "chest": Expected.by(model_of("mimic-cxr")),
        "slices": Expected.by(model_of("mosmed")),
    }
    text = describe_doubt(header("CT", "CHEST"), models) or ""
    assert text.startswith("chest: The header says CT; models for chest radiographs")
    assert "slices" not in text
    both = describe_doubt(header("MR", "BRAIN"), models) or ""
    assert both.count("The header says MR, BRAIN") == 2
    same = describe_doubt(header("MR"), {"a": models["chest"], "b": models["chest"]}) or ""
    assert same.startswith("The header says MR;")
    assert same.count("The header") == 1
    unknown = describe_doubt(header("MR"), {"a": models["chest"], "b": Expected()}) or ""
    assert unknown.count("The header") == 1
    assert unknown.endswith("its training images: b.")
    assert describe_doubt(None, models) is None


@pytest.mark.parametrize(("corpus", "warns"), [("mimic-cxr", True), ("slake", False)])
def test_every_function_of_images_warns_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], corpus: str, warns: bool
) -> None:
    brain = write_dataset(tmp_path / "brain.dcm", image_dataset(PIXELS, Modality="MR"))
    (tmp_path / "model").mkdir()
    save(model_of(corpus), tmp_path / "model", {"train_manifest": manifest(corpus)})
    model = medvl.load(tmp_path / "model")
    for function in (
        lambda: medvl.infer(model, brain, ["edema"]),
        lambda: medvl.heatmap(model, brain, "edema"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
        found = [str(each.message) for each in caught if each.category is UserWarning]
        assert [text.split(" by their header")[0] for text in found] == (
            ["1 of 1 images are no chest radiographs"] if warns else []
        )
    cli.main(["infer", str(brain), "--checkpoint", str(tmp_path / "model"), "--texts", "edema"])
    assert ("no chest radiographs by their header (1 MR)" in capsys.readouterr().out) == warns
    kind = "chest radiographs" if warns else "images of several modalities"
    assert f"| {corpus} | {kind} | train | 5 |" in (tmp_path / "model" / "README.md").read_text()
