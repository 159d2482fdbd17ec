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
    contradict = {1: [0, 2], 2: [1, 4, 6], 5: [1, 6], 6: [0, 2, 4]}  # the fourth has no image
    rows = [1, 2, 5, 6]
    for row in rows:
        margin_N = scale * image_BE @ (own_BE[row] - other_BE[row])
        loss = torch.log1p((-margin_N[row]).exp())
        if term == "denied":
            loss = (loss + torch.log1p(margin_N[contradict[row]].exp()).mean()) / 2
        expected = expected + loss / len(rows)
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
    image_NE, text_KE = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    own_K, nobody_KN = torch.arange(3), torch.zeros(3, 3, dtype=torch.bool)
    for other_KN in (nobody_KN, ~torch.eye(3, dtype=torch.bool)):
        loss_K = losses.altered_texts(image_NE, text_KE, text_KE, own_K, other_KN, 10.0)
        torch.testing.assert_close(loss_K, torch.full((3,), math.log(2)))
    alone_K = losses.altered_texts(image_NE, text_KE, -text_KE, own_K, nobody_KN, 10.0)
    cosine_K = torch.cosine_similarity(image_NE, text_KE)
    torch.testing.assert_close(alone_K, torch.log1p((-20 * cosine_K).exp()))
    with pytest.raises(ValueError, match="expected"):
        losses.altered_texts(image_NE, text_KE, text_KE[:2], own_K, nobody_KN, 10.0)


def test_images_that_contradict_a_text() -> None:
    turned_KL = torch.tensor([[1, 1, 0], [0, -1, -1], [0, 0, 0]])
    found_NL = torch.tensor([[0, 0, 1], [0, 1, 0], [0, -1, 0], [1, 1, 1]])
    holds = losses.denial_holds(turned_KL, found_NL).tolist()
    assert holds[0] == [True, False, False, False]  # none of both, not even with doubt
    assert holds[1] == [True, True, False, True]  # one of them


def test_texts_that_no_image_contradicts_do_not_count() -> None:
    batch = altered_batch()
    assert batch.found_BL is not None
    result = siglip().eval()(dataclasses.replace(batch, found_BL=-torch.ones_like(batch.found_BL)))
    assert result.terms["denied"].item() == 0


def test_wrong_settings_and_batches_are_refused() -> None:
    with raises(ConfigError, "out_of_range", "denial_weight"):
        ConVIRTConfig(denial_weight=-1.0)
    with raises(ConfigError, "missing", "denied_ids_BT"):
        siglip()(make_batch("clip"))
