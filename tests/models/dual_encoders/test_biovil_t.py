"""BioViL-T: published sizes, the role of the prior image, and the pooler against its formula."""

import dataclasses
import math

import torch
import torch.nn.functional as F
from helpers.contrastive_systems import PAIRS, biovil_t, make_batch
from helpers.errors import raises
from torch import Tensor

from medvl.errors import ConfigError
from medvl.models import BioViLT, BioViLTConfig
from medvl.models.dual_encoders.biovil_t import SupportsPriors, TemporalPooler, grid_sines
from medvl.schema import Inputs

BATCH = dataclasses.replace(make_batch("biovil_t"), has_image_B=None)


def test_sizes_are_those_of_the_released_model() -> None:
    with torch.device("meta"):
        model = BioViLT.build(BioViLTConfig(), pretrained=False, tokenizer=None)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["patch_head.weight"] == (256, 2048)
    assert shapes["image_head.inner.weight"] == (128, 512)
    assert shapes["pooler.type_embed"] == (2, 1, 256)
    assert shapes["pooler.blocks.2.attn.qkv.weight"] == (768, 256)
    assert "pooler.blocks.2.attn.qkv.bias" not in shapes
    assert (
        shapes["pooler.blocks.2.attn.proj.bias"] == shapes["pooler.blocks.2.mlp.fc1.bias"] == (256,)
    )
    assert model.image_encoder.grid(448, 448) == (14, 14)
    assert model.transform.size + 2 * model.transform.margin == 512
    assert model.inputs == Inputs(prior_image=True)


def test_the_pooler_is_the_released_one() -> None:
    """One block written out: places are added to queries, keys and values; each head scaled by
    its width.
    """
    torch.manual_seed(0)
    pooler = TemporalPooler(8, (2, 3), heads=2, blocks=1).eval()
    current_BPD, prior_BPD = torch.randn(2, 4, 6, 8)
    block = pooler.blocks[0]
    place_ND = torch.cat([grid_sines(2, 3, 8) + pooler.type_embed[number] for number in (0, 1)])
    x_BND = torch.cat([current_BPD, prior_BPD], dim=1)
    query, key, value = (
        (block.norm1(x_BND) + place_ND).matmul(block.attn.qkv.weight.T).chunk(3, dim=2)
    )
    heads: list[Tensor] = []
    for part in (slice(0, 4), slice(4, 8)):
        weight_BNN = (query[..., part] @ key[..., part].transpose(1, 2) / math.sqrt(4)).softmax(
            dim=2
        )
        heads.append(weight_BNN @ value[..., part])
    x_BND = x_BND + block.attn.proj(torch.cat(heads, dim=2))
    x_BND = x_BND + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(x_BND))))
    expected = F.layer_norm(x_BND, (8,), eps=1e-6)[:, :6]
    torch.testing.assert_close(pooler(current_BPD, prior_BPD), expected, rtol=1e-4, atol=1e-5)


def test_positions_are_sines_of_rows_and_columns() -> None:
    sines_PD = grid_sines(3, 5, 8)
    assert sines_PD.shape == (15, 8)
    for row, column in ((0, 0), (1, 3), (2, 4)):
        angles = [2 * math.pi * (row + 1) / 3, 2 * math.pi * (column + 1) / 5]
        expected = [
            f(angle / slow) for angle in angles for slow in (1, 100) for f in (math.sin, math.cos)
        ]
        torch.testing.assert_close(
            sines_PD[5 * row + column], torch.tensor(expected), rtol=1e-3, atol=1e-4
        )


def test_only_existing_priors_are_seen() -> None:
    model = biovil_t().eval()
    assert isinstance(model, SupportsPriors)
    image, prior, has = BATCH.image_BCHW, BATCH.prior_BCHW, BATCH.has_prior_B
    mixed = model.embed_with_prior(image, prior, has).global_NE
    torch.testing.assert_close(mixed[~has], model.encode_image(image[~has]))
    torch.testing.assert_close(mixed[has], model.encode_image(image[has], prior[has]))
    assert (mixed[has] - model.encode_image(image[has])).abs().amax(dim=1).min() > 1e-3
    other = torch.where(has[:, None, None, None], prior, 255 - prior)
    torch.testing.assert_close(model.embed_with_prior(image, other, has).global_NE, mixed)
    none = torch.zeros(PAIRS, dtype=torch.bool)
    torch.testing.assert_close(
        model.embed_with_prior(image, prior, none).global_NE, model.encode_image(image)
    )
    torch.testing.assert_close(model.embed_images(image).global_NE, model.encode_image(image))


def test_prior_images_of_other_shapes_are_refused() -> None:
    """More prior images than images would be compared with the wrong ones."""
    model, image, prior = biovil_t().eval(), BATCH.image_BCHW, BATCH.prior_BCHW
    assert prior is not None
    large = F.interpolate(image, size=96)
    for images, priors in (
        (image[:3], prior),
        (image, prior[:3]),
        (image, prior[..., :32]),
        (large, large),
    ):
        with raises(ConfigError, "mismatch", "prior_BCHW"):
            model.encode_image(images, priors)
    assert model.encode_image(large).shape == (PAIRS, 16)


def test_every_parameter_has_a_gradient_and_none_is_missing_without_priors() -> None:
    model = biovil_t().train()
    model(BATCH).total.backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()
    )
    model.zero_grad()
    model(
        dataclasses.replace(BATCH, has_prior_B=torch.zeros(PAIRS, dtype=torch.bool))
    ).total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with raises(ConfigError, "missing", "prior_BCHW"):
        model(dataclasses.replace(BATCH, prior_BCHW=None))
    with raises(ConfigError, "conflict", "pooler_dim"):
        BioViLTConfig(pooler_dim=18)
