"""Pretraining on pairs, images alone and texts alone: masked cells at several scales, and losses
of mixtures.
"""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.fusion_samples import TINY, flags, make_batch, shaken, tiny_model, tiny_tokenizer
from torch import Tensor

from medvl.errors import ConfigError
from medvl.losses.masked import mask_blocks, patchify
from medvl.models import MixedModel
from medvl.schema import Batch

TOKENIZER = tiny_tokenizer()


def make(**settings: Any) -> MixedModel:
    model = tiny_model("mixed", TOKENIZER, **settings)
    assert isinstance(model, MixedModel)
    return model


def mixture(has_image: str, has_text: str) -> Batch:
    size = len(has_image)
    return make_batch(
        TOKENIZER,
        size,
        has_image_B=flags(*map(int, has_image)),
        has_text_B=flags(*map(int, has_text)),
    )


def test_whole_blocks_are_masked() -> None:
    """A quarter of 8 x 8 cells: 16 blocks of 1, 4 of 2 x 2, or 1 of 4 x 4, each scale about
    equally often.
    """
    masked_BP = mask_blocks(300, (8, 8), (1, 2, 4), 0.25, torch.Generator().manual_seed(0))
    assert masked_BP.sum(dim=1).tolist() == [16] * 300
    visible_B1hw = (~masked_BP).float().unflatten(1, (8, 8))[:, None]
    whole = [(F.max_pool2d(visible_B1hw, scale) == 0).sum(dim=(1, 2, 3)) for scale in (2, 4)]
    drawn = [int((blocks == wanted).sum()) for blocks, wanted in zip(whole, (4, 1), strict=True)]
    assert all(count > 70 for count in (drawn[0] - drawn[1], drawn[1], 300 - drawn[0]))
    assert mask_blocks(50, (2, 2), (1, 2), 0.25, torch.Generator()).sum(
        dim=1
    ).unique().tolist() == [1, 4]


def test_loss_equals_its_formula_for_the_images_of_a_mixture() -> None:
    """Squared error of every masked block with the reduced pixels, mean over blocks, then over
    scales.
    """
    model, batch = shaken(make(mask_ratio=0.5)).eval(), mixture("11011", "10101")
    torch.manual_seed(0)
    corruption = model.corrupt(batch)
    masked_BP: Tensor = corruption.of(model.mim)
    encoded = model.encode(batch, corruption)
    assert encoded.own is not None
    own_image = encoded.own.image
    pixels_BCHW = model.image_encoder.normalize(batch.image_BCHW)
    side, by_scale = model.patches.side, []
    for scale, head in zip((1, 2), model.mim_head.scales, strict=True):
        errors = []
        for row in (0, 1, 3, 4):
            for top in range(0, 4, scale):
                for left in range(0, 4, scale):
                    cells = [4 * (top + i) + left + j for i in range(scale) for j in range(scale)]
                    if not masked_BP[row, cells].all():
                        continue
                    state_D = own_image.states_BND[row, 1:][cells].mean(dim=0)
                    block = pixels_BCHW[row : row + 1, :, top * side :, left * side :][
                        ..., : scale * side, : scale * side
                    ]
                    true_C = patchify(F.avg_pool2d(block, scale), side)[0, 0]
                    errors.append((head(state_D) - true_C).square().mean())
        assert errors
        by_scale.append(torch.stack(errors).mean())
    expected = torch.stack(by_scale).mean()
    loss = model.mim.loss(model.mim.predict(encoded, masked_BP), masked_BP)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    states_BND = own_image.states_BND
    gradients = [
        torch.autograd.grad(value, states_BND, retain_graph=True)[0] for value in (loss, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    loss.backward()
    assert model.mim_head.mask_token.grad is not None
    assert model.mim_head.mask_token.grad.any()


@pytest.mark.parametrize(
    "encoder", [{}, {"image_encoder": "resnet_tiny", "image_arguments": {"output_stride": 16}}]
)
def test_masked_pixels_change_no_prediction(encoder: dict[str, Any]) -> None:
    model, batch = shaken(make(**encoder)).eval(), make_batch(TOKENIZER, 4)
    torch.manual_seed(0)
    corruption = model.corrupt(batch)
    side = model.patches.side
    hidden_BCHW = corruption.of(model.mim).view(4, 1, *model.patches.grid)
    hidden_BCHW = hidden_BCHW.repeat_interleave(side, 2).repeat_interleave(side, 3)
    noisy = dataclasses.replace(
        batch, image_BCHW=torch.where(hidden_BCHW, 255 - batch.image_BCHW, batch.image_BCHW)
    )
    before, after = (model.encode(images, corruption) for images in (batch, noisy))
    assert before.own is not None
    assert after.own is not None
    assert torch.equal(before.own.image.states_BND, after.own.image.states_BND)
    assert not torch.equal(before.own.image.states_BND[0], before.own.image.states_BND[1])


def test_scales_that_do_not_divide_the_grid_are_rejected() -> None:
    with raises(ConfigError, "conflict", "scales"):
        make(scales=(1, 3))
    with raises(ConfigError, "unsupported", "image_encoder"):
        make(image_encoder="regions:11", image_arguments={}, image_positions=False)


SYSTEMS = [name for name in sorted(TINY) if name not in ("medvill",)]
"""MedViLL's masked texts are also those that are matched: its words depend on the pairs that
were sampled.
"""


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_loss_averages_over_the_samples_that_have_what_it_needs(name: str) -> None:
    """A mixture has the losses of its parts, put together by their numbers of words, patches and
    pairs.
    """
    model: Any = shaken(tiny_model(name, TOKENIZER)).eval()
    batch = mixture("111010", "110101")  # two pairs, two images alone, two texts alone
    torch.manual_seed(0)
    corruption = model.corrupt(batch)
    predictions = model.predict(batch, corruption)
    losses = model.losses(predictions, corruption).terms
    words = corruption.of(model.mlm)
    rows = (words.position_N // batch.ids_BT.shape[1]).unique().tolist()
    assert set(rows) <= {0, 1, 3, 5}
    logits_NV = (
        predictions["mlm"]
        if isinstance(predictions["mlm"], Tensor)
        else predictions["mlm"].words_NV
    )
    if name not in ("albef", "m2i2", "mumc"):  # the teacher's targets have a test of their own
        torch.testing.assert_close(losses["mlm"], F.cross_entropy(logits_NV, words.target_N))
    matched = predictions["itm"]
    logits_M2 = matched if isinstance(matched, Tensor) else matched.logits_M2
    target_M = (
        corruption.of(model.itm).matched_N if isinstance(matched, Tensor) else matched.matched_M
    )
    assert 2 <= len(logits_M2) <= 6  # of two pairs
    torch.testing.assert_close(losses["itm"], F.cross_entropy(logits_M2, target_M.long()))
    if name in ("m3ae", "m2i2"):
        assert len(predictions["mim"].pixels_BPC) == 4
