"""Models in folders and on the hub, their cards, and the names of other libraries."""

import dataclasses
import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import TEXTS, tiny_tokenizer
from helpers.hub_server import serve_hub
from huggingface_hub import ModelCard

import medvl
from medvl.data.shards.format import Manifest
from medvl.errors import CheckpointError, ConfigError, WeightsError
from medvl.models import ConVIRT, System, save
from medvl.models.card import add_results, model_card
from medvl.models.dual_encoders.gloria import GLoRIA

TINY = {
    "image_encoder": "resnet_tiny",
    "text_encoder": "tiny_bert",
    "image_size": 32,
    "projection_dim": 8,
}
MANIFEST = Manifest(
    corpus="mimic-cxr", split="train", samples=9, shards=(), label_names=(), patients=("0a1b2c" * 3,
    "ffee00" * 3), salt="s", planned=9, excluded_from_corpus={}, excluded={}, skipped={},
    skipped_keys=(), warnings={}, options={"short_side": 64, "image_format": "jpg", "quality": 95,
    "color": False}, packages={},
)  # fmt: skip


@pytest.fixture
def trained(tmp_path: Path) -> System:
    """A loaded checkpoint of a training run."""
    (tmp_path / "run").mkdir()
    model = medvl.create_model("convirt", tokenizer=tiny_tokenizer(), frozen_text_layers=0, **TINY)
    save(
        model,
        tmp_path / "run",
        {"recipe": "convirt_mimic", "train_manifest": dataclasses.asdict(MANIFEST)},
    )
    return medvl.load(tmp_path / "run")


def same(first: System, second: System) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_a_saved_model_is_the_same(trained: System, tmp_path: Path) -> None:
    folder = trained.save_pretrained(tmp_path / "saved")
    again = ConVIRT.from_pretrained(folder)
    assert same(again, trained)
    assert type(again.transform) is type(trained.transform)
    assert again.provenance == trained.provenance == {"recipe": "convirt_mimic"}
    assert medvl.models.train_manifests(folder) == [MANIFEST]
    with raises(ConfigError, "exists", "folder"):
        trained.save_pretrained(folder)
    with raises(ConfigError, "wrong_type", "name"):
        GLoRIA.from_pretrained(folder)
    with raises(ConfigError, "conflict", "revision"):
        medvl.from_pretrained(folder, revision="main")


def test_a_model_without_an_encoder_is_saved_with_its_training_data(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    model = medvl.create_model(
        "lvit", network="unet", labels=("Infection",), image_size=32, width=8
    )
    save(model, tmp_path / "run", {"train_manifest": dataclasses.asdict(MANIFEST)})
    folder = medvl.load(tmp_path / "run").save_pretrained(tmp_path / "saved")
    assert medvl.models.train_manifests(folder) == [MANIFEST]
    assert not (folder / "ancestor_manifests.json").exists()


def test_the_card_has_data_results_and_licence(trained: System, tmp_path: Path) -> None:
    plain = ModelCard.load(tmp_path / "run" / "README.md")
    assert plain.data.library_name == "medvl"
    assert plain.data.pipeline_tag == "zero-shot-image-classification"
    assert (plain.data.license, plain.data.license_name) == ("other", "not-stated")
    assert "| mimic-cxr | chest radiographs | train | 9 | 2 | this training |" in plain.content
    assert "None recorded" in plain.content
    assert not any(patient in plain.content for patient in MANIFEST.patients)
    folder = trained.save_pretrained(
        tmp_path / "saved", licence="cc-by-nc-4.0", results={"auroc": 0.8765}
    )
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "cc-by-nc-4.0"
    assert "| auroc | 0.8765 |" in card.content
    assert "terms of the training data apply as well (mimic-cxr" in card.content
    add_results(folder, {"loss": 1.5})
    text = (folder / "README.md").read_text()
    assert "| loss | 1.5 |" in text
    assert "0.8765" not in text
    assert text.count("## Licence") == text.count("## Results") == 1


def test_a_model_goes_to_the_hub_and_back(
    trained: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serve_hub(tmp_path / "cache", monkeypatch) as hub:
        name = trained.push_to_hub("someone/convirt", results={"auroc": 0.9})
        assert name == f"hf-hub:someone/convirt@{list(hub.repos['someone/convirt'])[-1]}"
        assert hub.private == {"someone/convirt"}
        files = hub.repos["someone/convirt"][name.partition("@")[2]]
        assert {
            "config.json",
            "model.safetensors",
            "README.md",
            "train_manifest.json",
        } <= files.keys()
        for source in (name, "hf-hub:someone/convirt"):
            assert same(medvl.load(source), trained)
        assert same(
            medvl.from_pretrained("someone/convirt", revision=name.partition("@")[2]), trained
        )
        assert (
            medvl.get_tokenizer("hf-hub:someone/convirt").vocabulary == tiny_tokenizer().vocabulary
        )
        with torch.no_grad():
            trained.image_head[0].weight += 1
        trained.push_to_hub("someone/convirt", private=False)  # a second commit
        assert same(medvl.load("hf-hub:someone/convirt"), trained)
        assert not same(medvl.load(name), trained)
        with raises(CheckpointError, "not_found", names="someone/nothing"):
            medvl.load("hf-hub:someone/nothing")
        with raises(CheckpointError, "not_found"):
            medvl.load("hf-hub:someone/convirt@v9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert not same(medvl.load(name), trained)  # from the cache


def test_uploads_that_the_hub_refuses(
    trained: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serve_hub(tmp_path / "cache", monkeypatch, token=None),
        raises(WeightsError, "not_found", names="hf auth"),
    ):
        trained.push_to_hub("someone/convirt", token="hf_wrong")
    with raises(ConfigError, "malformed", "hub_id"):
        trained.push_to_hub("convirt")


def test_names_of_open_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**TINY, "tokenizer": tiny_tokenizer(), "frozen_text_layers": 0}
    model, transform, tokenizer = medvl.create_model_and_transforms("convirt", **settings)
    model.eval()
    assert tokenizer is model.tokenizer
    assert model.encode_image(transform(torch.zeros(40, 40, dtype=torch.uint8))).shape == (1, 8)
    assert model.encode_text(TEXTS[:2]).shape == (2, 8)
    assert medvl.get_tokenizer("clip").vocab_size == 49408
    with raises(ConfigError, "unknown_name"):
        medvl.get_tokenizer("nothing")
    with raises(ConfigError, "unsupported", "name"):
        medvl.get_tokenizer("classifier")
    assert (
        "bioclinicalbert",
        "emilyalsentzer/Bio_ClinicalBERT@d5892b39a4adaed74b92212a44081509db72f87b",
    ) in (medvl.list_pretrained("bio*"))
    plain = medvl.create_model(
        "convirt", **TINY, vocab_size=50, frozen_text_layers=0
    ).save_pretrained(tmp_path / "plain")
    assert json.loads((plain / "config.json").read_text())["run"] == {}
    with raises(CheckpointError, "not_found"):
        medvl.get_tokenizer(plain)


def test_the_card_says_what_counts_as_a_patient() -> None:
    manifest = {"corpus": "vindr-pcxr", "split": "train", "samples": 3, "patients": ["a", "b"]}
    assert "| 3 | 2 | this training |" in model_card("convirt", {}, [manifest], {})
    for unit in ("rows", "studies"):
        declared = manifest | {"warnings": {f"{unit}_are_patients": 3}}
        expected = f"| 3 | 2 ({unit}: the release names no patient) | this training |"
        assert expected in model_card("convirt", {}, [declared], {})
