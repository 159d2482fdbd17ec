"""CT-CLIP: its loss against the formula, and its settings."""

import math

import pytest
import torch
from helpers.contrastive_systems import assert_contrast_of_pairs, ct_clip, make_batch

from medvl.models import CTCLIPConfig


def test_the_loss_is_the_formula() -> None:
    """In value and gradient, of the batch's complete rows, with vectors laid side by side."""
    model = ct_clip().eval()
    batch = make_batch("ct_clip").rows([0, 1, 2, 4, 5, 6])
    patches = model.image_encoder(batch.image_BCDHW).patches_BPD  # of 2 x 2 x 2
    plane = torch.cat([(patches[:, place] + patches[:, place + 4]) / 2 for place in range(4)], 1)
    image = plane @ model.image_head.weight.T
    text = model.text_encoder(batch.ids_BT, batch.mask_BT).pooled_BD @ model.text_head.weight.T
    image, text = (each / each.norm(dim=1, keepdim=True) for each in (image, text))
    logits = model.logit_scale.exp() * image @ text.T
    assert_contrast_of_pairs(model, model(make_batch("ct_clip")).total, logits)


def test_the_first_loss_is_that_of_chance_and_the_scale_that_of_the_release() -> None:
    model = ct_clip()
    assert model(make_batch("ct_clip")).total.item() == pytest.approx(math.log(6), abs=0.2)
    assert model.logit_scale.item() == pytest.approx(1)
    aligned = torch.eye(8)
    floor = torch.nn.functional.cross_entropy(model.scale() * aligned, torch.arange(8))
    assert floor.item() == pytest.approx(0.38, abs=0.01)


def test_settings_are_the_published_ones() -> None:
    config = CTCLIPConfig()
    assert config.positives == "study", "reconstructions of a scan are never negatives"
    assert config.volume_size == (240, 480, 480)
    assert config.image_arguments["patch_size"] == (10, 20, 20)
    assert config.max_scale is None
    places = (480 // 20) ** 2
    assert places * 512 * config.projection_dim == pytest.approx(151e6, rel=0.01)


def test_the_shares_of_patches_add_up_to_the_vector_of_the_volume() -> None:
    model = ct_clip().eval()
    volumes = make_batch("ct_clip").image_BCDHW
    regions = model.embed_regions(volumes)
    assert regions.shape[1] == 2 * 2 * 2
    torch.testing.assert_close(regions.sum(dim=1), model.unnormalized_image(volumes))
