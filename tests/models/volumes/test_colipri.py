"""COLIPRI: its loss against the formula, its settings, and a saved model."""

import math
from pathlib import Path

import pytest
import torch
from helpers import gloria_ranks
from helpers.contrastive_systems import assert_contrast_of_pairs, colipri, make_batch
from helpers.errors import raises

import medvl
from medvl.errors import ConfigError
from medvl.models import COLIPRIConfig


def test_the_loss_is_the_formula() -> None:
    """In value and gradient, of the batch's complete rows."""
    model = colipri().eval()
    batch = make_batch("colipri").rows([0, 1, 2, 4, 5, 6])
    image = model.encode_image(batch.image_BCDHW)
    text = model.encode_text(batch.ids_BT, batch.mask_BT)
    logits = model.logit_scale.exp() * image @ text.T
    assert_contrast_of_pairs(model, model(make_batch("colipri")).total, logits)


def test_the_first_loss_is_that_of_chance() -> None:
    model = colipri()
    with torch.no_grad():
        model.logit_scale.zero_()
    assert model(make_batch("colipri")).total.item() == pytest.approx(math.log(6), abs=0.2)


def test_settings_are_the_published_ones() -> None:
    config = COLIPRIConfig()
    assert config.positives == "study", "reconstructions of a scan are never negatives"
    assert config.volume_size == (192, 192, 192)
    assert (config.projection_dim, config.pool_heads, config.max_tokens) == (768, 12, 512)
    with torch.device("meta"):
        model = medvl.create_model("colipri", pretrained=False)
    net = model.image_encoder.backbone
    assert (net.width, len(net.blocks), net.blocks[0].attn.num_heads) == (864, 16, 12)
    assert model.image_encoder.grid == (24, 24, 24)
    with raises(ConfigError, "mismatch", "projection_dim"):
        colipri(projection_dim=16)
    with raises(ConfigError, "out_of_range", "orientation"):
        colipri(image_arguments={"patch_size": (2, 6, 6), "orientation": "RAR"})


def test_a_saved_model_is_the_same_and_another_size_has_the_same_distances(tmp_path: Path) -> None:
    model = colipri(tokenizer=gloria_ranks.tiny_tokenizer(), vocab_size=None).eval()
    medvl.models.save(model, tmp_path)
    again = medvl.models.load(tmp_path)
    volumes = make_batch("colipri").image_BCDHW
    cosines = model.similarity(volumes, ["edema", "left effusion"])
    torch.testing.assert_close(again.similarity(volumes, ["edema", "left effusion"]), cosines)
    encoder = model.image_encoder
    wide = torch.cat([volumes, volumes.new_full(volumes.shape, -1024)], dim=2)
    assert encoder(wide).grid == (4, 2, 2)


def test_patches_stay_at_their_places_in_every_orientation() -> None:
    """Without attention between patches, a turned network sees the same cubes turned."""
    volume = make_batch("colipri").image_BCDHW[:1]
    found = {}
    for orientation in ("SPL", "RAS", "SAR"):
        arguments = {"patch_size": (2, 6, 6), "embed_dim": 24, "depth": 1, "num_heads": 2}
        model = colipri(image_arguments={**arguments, "orientation": orientation}).eval()
        block = model.image_encoder.backbone.blocks[0]
        torch.nn.init.zeros_(block.gamma_1)
        filters = model.image_encoder.backbone.patch_embed.proj.weight
        torch.nn.init.constant_(filters, 0.01)
        found[orientation] = model.image_encoder(volume).patches_BPD
    torch.testing.assert_close(found["RAS"], found["SPL"])
    torch.testing.assert_close(found["SAR"], found["SPL"])
