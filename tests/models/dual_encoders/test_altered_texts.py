"""Each text against the same text altered: value, gradient and the samples that count."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from helpers.contrastive_systems import clip, convirt, make_batch, siglip
from helpers.errors import raises

from medvl import losses
from medvl.errors import ConfigError
from medvl.models import ConVIRTConfig
from medvl.schema import Batch, Inputs

SYSTEMS = {"siglip": siglip, "clip": clip, "convirt": convirt}


def altered_batch(**fields: Any) -> Batch:
    """The first and the fifth text have no altered one, and the fourth pair no image."""
    batch = make_batch("siglip")
    mirrored = {
        "mirrored_ids_BT": batch.denied_ids_BT,
        "mirrored_mask_BT": batch.denied_mask_BT,
        "has_mirror_B": batch.has_denial_B,
    }
    return dataclasses.replace(batch, **{**mirrored, **fields})


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(
    ("setting", "term", "needed"),
    [
        ("mirror_weight", "mirrored", Inputs(mirrored_text=True)),
        ("denial_weight", "denied", Inputs(denied_text=True)),
    ],
)
def test_term_is_the_cross_entropy_of_own_and_altered_text(
    name: str, setting: str, term: str, needed: Inputs
) -> None:
    weights = {"denial_weight": 0.0, setting: 0.5}
    model = SYSTEMS[name](**weights).eval()
    without = SYSTEMS[name](denial_weight=0.0).eval()
    batch = altered_batch()
    assert (model.inputs, without.inputs) == (needed, Inputs())
    result = model(batch)
    image_BE = model.encode_image(batch.image_BCHW)
    own_BE = model.encode_text(batch.ids_BT, batch.mask_BT)
    other_BE = model.encode_text(batch.denied_ids_BT, batch.denied_mask_BT)
    scale = model.scale() if model.learns_scale else 1 / model.config.temperature
    expected = torch.zeros(())
    for row in (1, 2, 5, 6):
        logits = torch.stack([image_BE[row] @ own_BE[row], image_BE[row] @ other_BE[row]])
        expected = expected - (scale * logits).log_softmax(0)[0] / 4
    torch.testing.assert_close(result.terms[term], expected)
    torch.testing.assert_close(result.total, without(batch).total + 0.5 * expected)
    parameters = [each for each in model.parameters() if each.requires_grad]
    actual, wanted = (
        torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        for value in (result.terms[term], expected)
    )
    for one, other in zip(actual, wanted, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert sum(one is not None and bool(one.any()) for one in actual) > 10


def test_batches_without_an_altered_text_have_a_term_of_zero() -> None:
    model = siglip().eval()
    result = model(altered_batch(has_denial_B=torch.zeros(7, dtype=torch.bool)))
    assert result.terms["denied"].item() == 0
    result.total.backward()
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


def test_equal_texts_have_a_loss_of_the_logarithm_of_two() -> None:
    image_KE, text_KE = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    loss_K = losses.altered_texts(image_KE, text_KE, text_KE, 10.0)
    torch.testing.assert_close(loss_K, torch.full((3,), math.log(2)))
    with pytest.raises(ValueError, match="equal shapes"):
        losses.altered_texts(image_KE, text_KE, text_KE[:2], 10.0)


def test_wrong_settings_and_batches_are_refused() -> None:
    with raises(ConfigError, "out_of_range", "denial_weight"):
        ConVIRTConfig(denial_weight=-1.0)
    with raises(ConfigError, "missing", "denied_ids_BT"):
        siglip()(make_batch("clip"))
