"""The model card of a run's checkpoint: the validation's results, and owners may edit it."""

from pathlib import Path

import pytest
from helpers.errors import raises

import medvl
from medvl.errors import CheckpointError
from medvl.train.fault_tolerance.checkpoint import Checkpoints, verify


@pytest.mark.parametrize("metrics", [{"zero_shot/auroc_macro": 0.8765}, {}])
def test_the_card_of_a_checkpoint(metrics: dict[str, float], tmp_path: Path) -> None:
    settings = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "vocab_size": 50,
    }
    model = medvl.create_model("convirt", projection_dim=4, frozen_text_layers=0, **settings)
    state = {"step": 7, "best": {"step": 7}, "metrics": metrics}
    folder = Checkpoints(tmp_path, keep_last=1, run={"recipe": "convirt_mimic"}).save(
        model, state, {}
    )
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8")
    assert ("| zero_shot/auroc_macro | 0.8765 |" in text) == bool(metrics)
    assert ("None recorded" in text) != bool(metrics)
    assert "Recipe: `convirt_mimic`" in text
    card.write_text(text.replace("license: other", "license: mit"), encoding="utf-8")
    verify(folder)
    assert medvl.load(tmp_path).provenance == {"recipe": "convirt_mimic"}
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    with raises(CheckpointError, "mismatch"):
        verify(folder)
