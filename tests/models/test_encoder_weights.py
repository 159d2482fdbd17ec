"""Encoders that start from weights of the user's own, by file or folder, in every kind of
system.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.errors import raises
from helpers.fusion_samples import TINY, tiny_tokenizer
from helpers.script_modules import load_script

import medvl
from medvl.encoders import create_image_encoder, create_text_encoder
from medvl.errors import ConfigError, WeightsError
from medvl.eval import RunOptions, Setup
from medvl.eval.probing.evaluation import EncoderOptions
from medvl.models import VQA, Detector, create_classifier, create_dense, factory, load, save
from medvl.models.base import System, has_towers
from medvl.train.recipe_files import choose

RECIPES = Path(__file__).parents[2] / "recipes"
VIT = {
    "image_encoder": "timm:test_vit",
    "image_size": 64,
    "image_arguments": {"depth": 2, "mean": 0.4, "std": (0.2,)},
}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
DUAL: dict[str, Any] = {
    **VIT,
    "text_encoder": "tiny_bert",
    "text_arguments": TEXT,
    "projection_dim": 8,
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "convirt": {**DUAL, "frozen_text_layers": 0},
    "gloria": {**DUAL, "encoder_size": None, "margin": 0, "patch_level": -1, "text_layers": 1,
    "pixel_mean": None,
               "pixel_std": None},
    "clip": DUAL,
    **{
        name: {**TINY[name], **VIT, "text_arguments": TEXT}
        for name in ("dual_stream", "medvill", "albef")
    },
}  # fmt: skip


def image_file(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a file with timm's names, and return it with the encoder's state."""
    torch.manual_seed(5)
    encoder = create_image_encoder("timm:test_vit", image_size=64, depth=2)
    path = folder / "vit.safetensors"
    safetensors.torch.save_file(encoder.backbone.state_dict(), path)
    return path, encoder.state_dict()


def text_folder(folder: Path, layers: int = 2) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a folder with weights and tokenizer, and return it with the encoder's state."""
    torch.manual_seed(6)
    tokenizer, sizes = tiny_tokenizer(), {**TEXT, "num_hidden_layers": layers}
    encoder = create_text_encoder("tiny_bert", vocab_size=tokenizer.vocab_size, **sizes)
    tokenizer.save(folder)
    safetensors.torch.save_file(encoder.backbone.state_dict(), folder / "model.safetensors")
    return folder, encoder.state_dict()


def same(module: Any, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_each_tower_starts_from_its_own_file(name: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    file, image_state = image_file(tmp_path)
    settings = {**SYSTEMS[name], "vocab_size": tokenizer.vocab_size}
    model = medvl.create_model(name, **settings, image_weights=str(file))
    assert has_towers(model)
    assert same(model.image_encoder, image_state)
    assert model.image_encoder.mean == (0.4, 0.4, 0.4)
    assert model.image_encoder.std == (0.2, 0.2, 0.2)
    assert model.tokenizer is None
    (tmp_path / "text").mkdir()
    folder, text_state = text_folder(tmp_path / "text", layers=4 if name == "albef" else 2)
    both = medvl.create_model(name, **settings, image_weights=str(file), text_weights=str(folder))
    assert has_towers(both)
    assert same(both.image_encoder, image_state)
    assert same(both.text_encoder, text_state)
    assert both.tokenizer is not None
    assert both.tokenizer.vocabulary == tokenizer.vocabulary
    if name == "albef":  # the fusion-encoder is the upper half of the same BERT
        query = text_state["backbone.encoder.layer.2.attention.self.query.weight"]
        fusion: Any = both.fusion
        assert torch.equal(fusion[0].attention.query.weight, query)
    file.unlink()
    (tmp_path / "saved").mkdir()
    save(both, tmp_path / "saved")
    assert same(load(tmp_path / "saved"), both.state_dict())


def test_a_head_loads_without_the_files_of_its_fusion_encoder(tmp_path: Path) -> None:
    file, _ = image_file(tmp_path)
    fusion: Any = medvl.create_model(
        "dual_stream", tokenizer=tiny_tokenizer(), **SYSTEMS["dual_stream"], image_weights=str(file)
    )
    model = VQA.on(fusion, ("yes", "no"))
    file.unlink()
    (tmp_path / "saved").mkdir()
    save(model, tmp_path / "saved")
    assert same(load(tmp_path / "saved"), model.state_dict())


def test_heads_on_an_encoder_by_name(tmp_path: Path) -> None:
    file, state = image_file(tmp_path)
    arguments = {"image_size": 64, "depth": 2, "mean": 0.5}
    options: dict[str, Any] = {"image_weights": str(file), "image_arguments": arguments}
    classifier = create_classifier("timm:test_vit", ["Edema"], **options)
    assert same(classifier.image_encoder, state)
    assert classifier.image_encoder.mean == (0.5, 0.5, 0.5)
    assert same(create_dense(Detector, "timm:test_vit", ["Edema"], **options).image_encoder, state)
    encoder = {"name": "timm:test_vit", "image_size": 64, "depth": 2}
    built: Any = medvl.create_model(
        "classifier", encoder=encoder, labels=["Edema"], image_weights=str(file)
    )
    assert same(built.image_encoder, state)
    setup = Setup(RunOptions(device="cpu"))
    probed = EncoderOptions(encoder="timm:test_vit", **options).probed_encoder(setup)
    assert same(probed.module, state)
    assert "vit.safetensors" in probed.name
    save(built, tmp_path)
    with raises(ConfigError, "conflict", "image_weights"):
        create_classifier(tmp_path, ["Edema"], **options)
    with raises(ConfigError, "conflict", "image_weights"):
        EncoderOptions(encoder="timm:test_vit", pretrained=True, **options).probed_encoder(setup)


def test_recipes_name_weights_and_arguments_on_the_command_line() -> None:
    recipe = load_script("convirt_mimic", RECIPES)
    given = (
        "--model.image-weights F.safetensors --model.text-weights DIR "
        "--model.image-arguments mean 0.5 pad_type same"
    )
    model = choose(recipe.PRESETS, ["tiny", *given.split()]).model
    assert (model.image_weights, model.text_weights) == ("F.safetensors", "DIR")
    assert model.image_arguments == {"mean": 0.5, "pad_type": "same"}
    probe = choose(
        load_script("linear_probe", RECIPES).PRESETS,
        ["tiny", "--init-from", "resnet50", "--image-weights", "F.pt"],
    )
    assert (str(probe.init_from), probe.image_weights) == ("resnet50", "F.pt")


def test_command_lines_add_to_the_arguments_of_a_preset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    presets = load_script("colipri_ct_rate", RECIPES).PRESETS
    before = presets["tiny"].model.image_arguments
    assert "depth" in before
    assert "drop_path_rate" not in before
    arguments = ["tiny", "--model.image-arguments", "depth", "1", "drop_path_rate", "0.1"]
    model = choose(presets, arguments).model
    assert model.image_arguments == {**before, "depth": 1, "drop_path_rate": 0.1}
    assert type(model.image_arguments["depth"]) is int
    assert choose(presets, ["tiny"]) == presets["tiny"]
    window = ["tiny", "--model.image-arguments", "window", "(-1000, 1000)", "stem", "linear"]
    given = choose(presets, window).model.image_arguments
    assert given == {**before, "window": (-1000, 1000), "stem": "linear"}
    with pytest.raises(SystemExit):
        choose(presets, ["tiny", "--model.image-arguments", "window", "-1000", "1000"])
    assert "write a tuple as one word" in " ".join(capsys.readouterr().err.split())
    albef = load_script("albef_roco_medicat", RECIPES).PRESETS
    text = choose(
        albef, ["tiny", "--model.text-arguments", "hidden_size", "1"]
    ).model.text_arguments
    assert text == {**albef["tiny"].model.text_arguments, "hidden_size": 1}
    assert text["hidden_size"] is not True
    rewards = load_script("cxrmate_mimic", RECIPES).PRESETS
    weights = choose(rewards, ["rewards-tiny", "--rewards.weights.sentences", "1"]).rewards.weights
    assert weights == {**rewards["rewards-tiny"].rewards.weights, "sentences": 1.0}


def test_errors_name_the_setting(tmp_path: Path) -> None:
    path: Any = "file.safetensors"
    with raises(ConfigError, "wrong_type", "pretrained", names="image_weights"):
        medvl.create_model("convirt", pretrained=path)
    with raises(WeightsError, "not_found", "image_weights", names="nowhere.pt"):
        medvl.create_model("convirt", **SYSTEMS["convirt"], image_weights="nowhere.pt")
    with raises(ConfigError, "conflict", "weights"):
        medvl.create_model("clip", weights="model.bin", image_weights="image.bin")
    with raises(ConfigError, "conflict", "image_arguments"):
        medvl.create_model(
            "convirt", image_encoder="resnet_tiny", image_arguments={"image_size": 64}
        )
    with raises(ConfigError, "unsupported", "image_weights"):
        medvl.create_model("dual_stream", **{**TINY["dual_stream"], "image_encoder": "regions:8",
            "image_arguments": {}},
                           image_weights="f.pt")  # fmt: skip


@pytest.mark.real
def test_the_real_mobilenets_start_a_convirt() -> None:
    folder = Path(os.environ.get("MEDVL_REAL_DATA", "")) / "weights_imagenet_mobilenet"
    if not folder.is_dir():
        pytest.skip("MEDVL_REAL_DATA has no weights_imagenet_mobilenet")
    arguments = {"mean": 0.5, "std": 0.5, "pad_type": "same"}
    for name, file in (("100", "mobilenetv2_100_in1k"), ("035", "mobilenetv2_035_in1k_backbone")):
        path = folder / f"{file}.safetensors"
        model: Any = medvl.create_model(
            "convirt", image_encoder=f"timm:mobilenetv2_{name}", image_arguments=arguments,
            image_weights=str(path), text_encoder="tiny_bert", frozen_text_layers=0,
        )  # fmt: skip
        stored = safetensors.torch.load_file(path)["conv_stem.weight"]
        assert torch.equal(model.image_encoder.backbone.conv_stem.weight, stored)
        assert model.image_encoder.mean == (0.5, 0.5, 0.5)
        classifier = create_classifier(
            f"timm:mobilenetv2_{name}",
            ["Edema"],
            image_weights=str(path),
            image_arguments=arguments,
        )
        assert torch.equal(classifier.image_encoder.backbone.conv_stem.weight, stored)


def test_text_weights_on_the_hub_bring_their_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without `pretrained`, as in MedKLIP's recipe, whose image encoder starts at random."""
    asked: list[Any] = []

    def fetched(source: str, **options: Any) -> Any:
        asked.append((source, options["revision"]))
        return tiny_tokenizer()

    monkeypatch.setattr(factory, "load_tokenizer", fetched)
    monkeypatch.setattr(System, "load_encoders", lambda *_: None)
    settings = {**DUAL, "text_arguments": {"num_hidden_layers": 1}, "frozen_text_layers": 0}
    commit = "d5892b39a4adaed74b92212a44081509db72f87b"
    model = medvl.create_model(
        "convirt", **settings, text_weights=f"emilyalsentzer/Bio_ClinicalBERT@{commit}"
    )
    assert asked == [("emilyalsentzer/Bio_ClinicalBERT", commit)]
    assert model.tokenizer is not None
