"""Low-rank updates in training: `lora_image` and `lora_text`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import part_ranks
from helpers.errors import raises

import medvl
from medvl.errors import ConfigError
from medvl.models import DualEncoder, save
from medvl.models.checkpoint_folder import read_weights

VIT = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 8}
SETTINGS: dict[str, Any] = {
    "image_encoder": "vit_b16",
    "image_arguments": VIT,
    "text_encoder": "tiny_bert",
    "vocab_size": 40,
    "image_size": 32,
    "projection_dim": 16,
    "frozen_text_layers": 0,
}
ALONE: dict[str, Any] = {**part_ranks.UNSHARDED, "epochs": None, "checkpoint_every": 1}


def convirt(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    model = medvl.create_model("convirt", **{**SETTINGS, **settings})
    assert isinstance(model, DualEncoder)
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DualEncoder]:
    """The folder of a run of four steps, and its model, with updates that are not merged."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    model = convirt(lora_image=2, lora_text=2, frozen_text_layers=1)
    part_ranks.run(folder, model, steps=4, **ALONE)
    return folder, model.eval()


def test_only_updates_and_heads_are_trained(trained: tuple[Path, DualEncoder]) -> None:
    """Frozen layers have no update; all other weights of the encoders keep their values."""
    _, model = trained
    start = convirt().state_dict()
    weights = model.state_dict()
    changed = {
        name.replace(".base_layer", "")
        for name, tensor in weights.items()
        if ".lora_" in name or not torch.equal(tensor, start[name.replace(".base_layer", "")])
    }
    learned = {name for name, one in model.named_parameters() if one.requires_grad}
    assert changed == learned
    assert all(".lora_" in name or "_head." in name for name in learned)
    updated = {name.partition(".lora_")[0] for name in learned if ".lora_" in name}
    layers = {name.partition("layer.")[2][0] for name in updated if "text_encoder" in name}
    assert layers == {"1", "2"}
    assert sum("image_encoder" in name for name in updated) == VIT["depth"]
    for name, parameter in model.named_parameters():
        assert ".lora_B" not in name or parameter.abs().sum() > 0


def test_a_loaded_run_is_an_ordinary_model_with_merged_weights(
    trained: tuple[Path, DualEncoder], tmp_path: Path
) -> None:
    folder, model = trained
    merged = medvl.load(folder / "last")
    assert isinstance(merged, DualEncoder)
    assert merged.state_dict().keys() == convirt().state_dict().keys()
    assert (merged.config.lora_image, merged.config.lora_text) == (0, 0)
    image_BCHW = torch.randint(0, 256, (3, 1, 32, 32), dtype=torch.uint8)
    ids_BT = torch.randint(1, 40, (3, 7))
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    with torch.no_grad():
        ours, theirs = (
            (each.encode_image(image_BCHW), each.encode_text(ids_BT, mask_BT))
            for each in (merged, model)
        )
        before = convirt().eval().encode_text(ids_BT, mask_BT)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (before - ours[1]).abs().max() > 1e-3
    continued = convirt(init_from=folder / "last", lora_text=1)
    state = continued.state_dict()
    for name, tensor in merged.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        name = name if name in state else f"{layer}.base_layer.{leaf}"
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)
    (tmp_path / "saved").mkdir()
    save(merged, tmp_path / "saved")
    assert read_weights(tmp_path / "saved", merge=False).keys() == merged.state_dict().keys()


def test_a_run_with_updates_resumes_exactly(
    trained: tuple[Path, DualEncoder], tmp_path: Path
) -> None:
    model = convirt(lora_image=2, lora_text=2, frozen_text_layers=1)
    part_ranks.run(tmp_path / "run", model, steps=2, **ALONE)
    model = convirt(lora_image=2, lora_text=2, frozen_text_layers=1)
    part_ranks.run(tmp_path / "run", model, steps=4, **ALONE)
    expected = read_weights(trained[0] / "last", merge=False)
    ours = read_weights(tmp_path / "run" / "last", merge=False)
    assert any(".lora_A" in name for name in ours)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(
    ("code", "field", "settings"),
    [
        ("unknown_name", "lora_image", {"lora_image": 2, "frozen_image_layers": -1}),
        (
            "unknown_name",
            "lora_image",
            {"lora_image": 2, "image_encoder": "resnet_tiny", "image_arguments": {}},
        ),
        ("unknown_name", "lora_text", {"lora_text": 2, "frozen_text_layers": 3}),
        ("out_of_range", "lora_text", {"lora_text": -1}),
    ],
)
def test_an_encoder_without_layers_for_updates_is_refused(
    code: str, field: str, settings: dict[str, Any]
) -> None:
    with raises(ConfigError, code, field):
        convirt(**settings)
