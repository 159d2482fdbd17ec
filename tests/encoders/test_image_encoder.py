"""Image encoders compared with the libraries that they wrap, and their options."""

from typing import Any

import pytest
import torch
from helpers.errors import raises
from torch import Tensor, nn

from medvl.encoders import create_image_encoder, list_image_encoders
from medvl.errors import ConfigError

TINY_VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}
SMALL_TEXT = {"layers": 1, "width": 64, "heads": 1, "vocab_size": 8}
TINY_RESNET = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}


def image(count: int = 2, channels: int = 3, side: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(seed))


def make_encoder(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return create_image_encoder(name, **options).eval()


def make_shapes(name: str, **options: Any) -> Any:
    """Return an encoder without values: drawing weights takes a second for the largest."""
    with torch.device("meta"):
        return make_encoder(name, **options)


def test_stretched_images_are_those_of_the_encoders_size() -> None:
    """Also by the configuration, which has nothing of the option where it is off: hashes of
    features cover it.
    """
    plain, stretching = (
        make_encoder("resnet_tiny", image_size=96),
        make_encoder("resnet_tiny", image_size=96, stretch=True),
    )
    pixels = image()
    enlarged = nn.functional.interpolate(pixels, (96, 96), mode="bilinear", align_corners=True)
    found, expected = stretching(pixels), plain(enlarged)
    torch.testing.assert_close(found.pooled_BD, expected.pooled_BD)
    torch.testing.assert_close(found.patches_BPD, expected.patches_BPD)
    assert found.grid == stretching.grid(64, 64) == plain.grid(96, 96) != plain.grid(64, 64)
    assert stretching.image_size == plain.image_size == (96, 96)
    torch.testing.assert_close(stretching(enlarged).pooled_BD, expected.pooled_BD, rtol=0, atol=0)
    again = make_encoder(**stretching.config)
    torch.testing.assert_close(again(pixels).pooled_BD, found.pooled_BD)
    assert "stretch" not in plain.config


def test_a_transformer_with_learnt_positions_reads_images_that_it_stretches() -> None:
    encoder = make_encoder("timm:vit_tiny_patch16_224", image_size=32, stretch=True, depth=1)
    assert encoder(image(side=48)).grid == (2, 2)


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "densenet121",
        "mobilenet_v2",
        "efficientnet_b0",
        "convnext_tiny",
        "regnet_y_400mf",
        "shufflenet_v2_x0_5",
        "swin_t",
    ],
)
def test_torchvision_pooled_vector_is_the_classifier_input(name: str) -> None:
    from torchvision import models

    torch.manual_seed(0)
    reference = models.get_model(name, weights=None).eval()
    linear = [module for module in reference.modules() if isinstance(module, nn.Linear)][-1]
    classifier_inputs: list[Tensor] = []
    linear.register_forward_pre_hook(lambda module, inputs: classifier_inputs.append(inputs[0]))
    encoder = make_encoder(f"torchvision:{name}")
    own = encoder.backbone.state_dict()
    published = reference.state_dict()
    encoder.backbone.load_state_dict(
        {key: tensor for key, tensor in published.items() if key in own}
    )
    image_BCHW = image()
    reference(image_BCHW)
    features = encoder(image_BCHW)
    torch.testing.assert_close(features.pooled_BD, classifier_inputs[0], rtol=1e-4, atol=1e-5)
    assert features.patches_BPD.shape[1] == features.grid[0] * features.grid[1]


def test_torchvision_transformer_returns_class_token_and_patches() -> None:
    from torchvision import models

    torch.manual_seed(0)
    encoder = make_encoder("torchvision:vit_b_16", image_size=64)
    with torch.device("meta"):  # without weights of its own
        reference = models.vit_b_16(weights=None, image_size=64).eval()
    reference.heads = nn.Identity()
    reference.load_state_dict(encoder.backbone.state_dict(), strict=True, assign=True)
    features = encoder(image())
    torch.testing.assert_close(features.pooled_BD, reference(image()), rtol=1e-4, atol=1e-5)
    assert features.grid == encoder.grid(64, 64) == (4, 4)
    assert features.patches_BPD.shape == (2, 16, 768)
    assert len(encoder.parameter_layers()) == 1 + 12 + 1
    with raises(ConfigError, "mismatch", "image_size"):
        encoder(image(side=32))


@pytest.mark.parametrize("name", ["resnet50", "densenet121", "resnet18"])
def test_timm_and_torchvision_agree(name: str) -> None:
    """One architecture with the same weights gives the same features in two libraries."""
    ours, theirs = make_encoder(f"timm:{name}"), make_encoder(f"torchvision:{name}")
    theirs.backbone.load_state_dict(ours.backbone.state_dict(), strict=True)
    a, b = ours(image()), theirs(image())
    torch.testing.assert_close(a.pooled_BD, b.pooled_BD, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(a.patches_BPD, b.patches_BPD, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet50", "densenet121", "swin_tiny"])
def test_cnn_pooled_vector_is_the_average_of_patches(name: str) -> None:
    encoder = make_encoder(name, image_size=64)
    features = encoder(image())
    torch.testing.assert_close(
        features.pooled_BD, features.patches_BPD.mean(dim=1), rtol=1e-4, atol=1e-5
    )
    averaged = make_encoder(name, image_size=64, pool="avg")
    torch.testing.assert_close(
        averaged(image()).pooled_BD, features.pooled_BD, rtol=1e-4, atol=1e-5
    )


def test_patches_are_in_row_major_order() -> None:
    """A bright square at the upper right changes the patches there most."""
    encoder = make_encoder("resnet18", image_size=128, patch_level=-3, **TINY_RESNET)
    blank = torch.zeros(1, 3, 128, 128)
    with_square = blank.clone()
    with_square[:, :, 8:24, 104:120] = 3.0
    features = encoder(with_square)
    height, width = features.grid
    change = (features.patches_BPD - encoder(blank).patches_BPD).norm(dim=2)[0].view(height, width)
    row, column = divmod(int(change.argmax()), width)
    assert row < height / 3
    assert column > width * 2 / 3


def test_patch_level_minus_two_gives_gloria_regions() -> None:
    """Layer 3 of a ResNet-50 at 299 pixels has 19 x 19 regions of width 1024; the pooled vector
    is of layer 4.
    """
    encoder = make_encoder("resnet50", patch_level=-2, image_size=299)
    assert encoder.grid(299, 299) == (19, 19)
    assert (encoder.feature_dim, encoder.patch_dim) == (2048, 1024)
    last = make_encoder("resnet50", image_size=299)
    features = encoder(image(1, side=299))
    maps: list[Tensor] = []
    last.backbone.layer3.register_forward_hook(lambda module, inputs, output: maps.append(output))
    torch.testing.assert_close(features.pooled_BD, last(image(1, side=299)).pooled_BD)
    torch.testing.assert_close(features.patches_BPD, maps[0].flatten(2).transpose(1, 2))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("swin_tiny", {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)}),
        ("torchvision:swin_t", {}),
        ("torchvision:densenet121", {}),
        ("open_clip:RN50", {"layers": [1, 1, 1, 1], "width": 16}),
    ],
)
def test_every_library_supports_patch_level_minus_two(name: str, arguments: dict[str, Any]) -> None:
    encoder = make_encoder(name, patch_level=-2, image_size=64, **arguments)
    last = make_encoder(name, image_size=64, **arguments)
    features, deeper = encoder(image(1)), last(image(1))
    assert features.grid == tuple(2 * side for side in deeper.grid) == encoder.grid(64, 64)
    assert features.patches_BPD.shape == (1, features.grid[0] * features.grid[1], encoder.patch_dim)
    torch.testing.assert_close(features.pooled_BD, deeper.pooled_BD, rtol=1e-4, atol=1e-5)


def test_modules_with_several_names_keep_their_weights() -> None:
    """CoaT's parallel blocks share the position encodings of its serial ones."""
    sizes = {"embed_dims": (16, 16, 16, 16), "serial_depths": (1, 1, 1, 1), "parallel_depth": 1}
    encoder = make_encoder("timm:coat_tiny", **sizes)
    assert not any(parameter.is_meta for parameter in encoder.parameters())
    assert encoder(image(1, side=224)).pooled_BD.isfinite().all()


def test_cnn_accepts_any_size() -> None:
    encoder = make_encoder("resnet18", **TINY_RESNET)
    for height, width in ((64, 64), (65, 97), (224, 160)):
        features = encoder(torch.randn(1, 3, height, width))
        assert features.grid == encoder.grid(height, width) == (-(-height // 32), -(-width // 32))


@pytest.mark.parametrize("name", ["torchvision:vgg11", "torchvision:alexnet"])
def test_images_below_the_least_side_of_a_cnn_are_refused(name: str) -> None:
    """A pooling would leave nothing of them. The least side is in the message."""
    quick = {"init_weights": False} if name.endswith("vgg11") else {}
    encoder = make_encoder(name, **quick)
    least = 32 if name.endswith("vgg11") else 63
    with raises(ConfigError, "out_of_range", "image_size", names=f"image_size of {least} or more"):
        make_encoder(name, image_size=16, **quick)
    for height, width in ((least - 1, least - 1), (64, 16), (16, 224)):
        with raises(ConfigError, "out_of_range", "image_size"):
            encoder(torch.zeros(1, 3, height, width, dtype=torch.uint8))
    with raises(ConfigError, "out_of_range", "image_size"):
        encoder.grid(16, 16)
    assert encoder(torch.zeros(1, 3, least, least, dtype=torch.uint8)).grid == (1, 1)


def test_transformer_with_dynamic_size_accepts_any_size() -> None:
    encoder = make_encoder("vit_b16", dynamic_img_size=True, **TINY_VIT)
    for height, width in ((64, 64), (96, 160)):
        features = encoder(torch.randn(1, 3, height, width))
        assert features.grid == encoder.grid(height, width) == (height // 16, width // 16)
    fixed = make_encoder("vit_b16", image_size=96, **TINY_VIT)
    torch.testing.assert_close(
        encoder(image(side=96)).pooled_BD, fixed(image(side=96)).pooled_BD, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "name", ["timm:vit_tiny_patch16_224", "clip_vit_b16", "torchvision:vit_b_16"]
)
def test_transformers_reject_another_size(name: str) -> None:
    encoder = make_shapes(name)
    with raises(ConfigError, "mismatch", "image_size"):
        encoder(image(side=96))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("timm:vit_tiny_patch16_224", {"dynamic_img_size": True, **TINY_VIT}),
        (
            "timm:swin_tiny_patch4_window7_224",
            {"dynamic_img_size": True, "embed_dim": 12, "num_heads": (1, 1, 1, 1)},
        ),
        ("timm:naflexvit_base_patch16_gap", TINY_VIT),
    ],
)
def test_transformers_with_dynamic_size_reject_partial_patches(
    name: str, arguments: dict[str, Any]
) -> None:
    encoder = make_encoder(name, **arguments)
    with raises(ConfigError, "mismatch", "image_size"):
        encoder(image(side=70))
    with raises(ConfigError, "mismatch", "image_size"):
        encoder.grid(64, 70)
    assert encoder(image(side=64)).patches_BPD.shape[0] == 2


def test_padding_accepts_partial_patches() -> None:
    encoder = make_encoder("vit_b16", dynamic_img_size=True, dynamic_img_pad=True, **TINY_VIT)
    assert encoder(image(side=70)).grid == (5, 5)


@pytest.mark.parametrize("options", [{}, {"dynamic_img_size": True}])
def test_embedding_rejects_another_size(options: dict[str, Any]) -> None:
    encoder = make_encoder("vit_b16", **options, **TINY_VIT)
    with raises(ConfigError, "mismatch", "image_size"):
        encoder.embed(image(side=70))


@pytest.mark.parametrize(
    ("name", "table", "arguments"),
    [
        ("vit_b16", "pos_embed", TINY_VIT),
        ("clip_vit_b16", "positional_embedding", {"width": 64, "layers": 1}),
    ],
)
def test_positions_are_interpolated(name: str, table: str, arguments: dict[str, Any]) -> None:
    """The table at 288 pixels is the interpolated one at 224; the class token keeps its
    position.
    """
    at_224, at_288 = (
        make_encoder(name, **arguments),
        make_encoder(name, image_size=288, **arguments),
    )
    small, large = (getattr(encoder.backbone, table).squeeze(0) for encoder in (at_224, at_288))
    assert large.shape == (18 * 18 + 1, small.shape[1])
    torch.testing.assert_close(large[0], small[0])
    grid = nn.functional.interpolate(
        small[1:].T.reshape(1, -1, 14, 14),
        size=(18, 18),
        mode="bicubic",
        antialias=True,
        align_corners=False,
    )
    torch.testing.assert_close(large[1:], grid.flatten(2)[0].T, rtol=1e-4, atol=1e-5)
    assert at_288(image(1, side=288)).grid == (18, 18)


def test_pool_selects_class_token_or_average() -> None:
    own, average, token = (
        make_encoder("vit_b16", image_size=64, pool=pool, **TINY_VIT)
        for pool in (None, "avg", "cls")
    )
    features = average(image())
    torch.testing.assert_close(features.pooled_BD, features.patches_BPD.mean(dim=1))
    assert not torch.allclose(features.pooled_BD, own(image()).pooled_BD)
    torch.testing.assert_close(token(image()).pooled_BD, own(image()).pooled_BD)
    with raises(ConfigError, "unsupported", "pool"):
        make_encoder("resnet18", pool="cls", **TINY_RESNET)


def test_open_clip_projection_matches_the_library() -> None:
    import open_clip

    torch.manual_seed(0)
    sizes = {"width": 64, "layers": 2}
    full: dict[str, Any] = {**sizes, "patch_size": 32, "image_size": 224}
    reference = open_clip.CLIP(16, full, SMALL_TEXT, quick_gelu=True).eval()
    expected = reference.encode_image(image(side=224))
    for projection in (True, False):
        encoder = make_encoder("clip_vit_b32", projection=projection, embed_dim=16, **sizes)
        own = encoder.backbone.state_dict()
        encoder.backbone.load_state_dict(
            {key: reference.visual.state_dict()[key] for key in own}, strict=True
        )
        pooled_BD = encoder(image(side=224)).pooled_BD
        projected = pooled_BD if projection else pooled_BD @ reference.visual.proj
        torch.testing.assert_close(projected, expected, rtol=1e-4, atol=1e-5)


def test_open_clip_resnet_attention_pooling_matches_the_library() -> None:
    import open_clip

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": [1, 1, 1, 1], "width": 16}
    reference = open_clip.CustomTextCLIP(32, {**sizes, "image_size": 64}, SMALL_TEXT).eval()
    encoder = make_encoder("open_clip:RN50", projection=True, image_size=64, embed_dim=32, **sizes)
    encoder.backbone.load_state_dict(reference.visual.state_dict(), strict=True)
    features = encoder(image())
    torch.testing.assert_close(
        features.pooled_BD, reference.encode_image(image()), rtol=1e-4, atol=1e-5
    )
    assert features.grid == (2, 2)
    bigger = make_encoder("open_clip:RN50", projection=True, image_size=128, embed_dim=32, **sizes)
    assert bigger(image(side=128)).grid == (4, 4)


OTHER_MODELS: dict[str, dict[str, Any]] = {
    "attentional pooler over the tokens (CoCa)": {
        "width": 64,
        "layers": 1,
        "attentional_pool": True,
    },
    "timm trunk, MLP": {"timm_model_name": "convnext_atto", "timm_pool": "avg", "timm_proj": "mlp"},
    "timm trunk whose classifier projects (EVA, MobileCLIP)": {
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_pool": "token",
        "timm_proj": None,
    },
    "timm trunk, attention over its map": {
        "timm_model_name": "resnet10t",
        "timm_pool": "abs_attn",
        "timm_proj": "",
    },
    "timm trunk that pools by attention (SigLIP)": {
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_pool": "map",
        "timm_proj": "none",
        "embed_dim": 192,
    },
}


@pytest.mark.parametrize("kind", OTHER_MODELS)
@pytest.mark.parametrize("projection", [True, False])
def test_other_open_clip_models_match_the_library(kind: str, projection: bool) -> None:
    import open_clip

    arguments = {"embed_dim": 32, "image_size": 224, **OTHER_MODELS[kind]}
    encoder = make_encoder(
        "open_clip:custom", projection=projection, **{**arguments, "image_size": 224}
    )
    features = encoder(image(1, side=224))
    assert features.patches_BPD.shape == (1, features.grid[0] * features.grid[1], encoder.patch_dim)
    assert features.pooled_BD.shape == (1, encoder.feature_dim)
    if projection:
        width = arguments.pop("embed_dim")
        assert encoder.feature_dim == width
        reference = (
            open_clip.CustomTextCLIP(width, arguments, {**SMALL_TEXT, "heads": 1}).eval().visual
        )
        reference.load_state_dict(encoder.backbone.state_dict(), strict=True)
        torch.testing.assert_close(
            features.pooled_BD, reference(image(1, side=224)), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("name", "arguments", "side"),
    [
        ("vit_b16", TINY_VIT, 64),
        ("clip_vit_b16", {"width": 64, "layers": 2}, 64),
        ("rad_dino", TINY_VIT, 56),
    ],
)
def test_keep_selects_patches_in_order(name: str, arguments: dict[str, Any], side: int) -> None:
    """Keeping all patches changes nothing; keeping some returns them in the requested order."""
    encoder = make_encoder(name, image_size=side, **arguments)
    with torch.no_grad():
        for parameter in encoder.parameters():  # DINOv2's residual branches start near zero
            parameter += 0.1 * torch.randn_like(parameter)
    image_BCHW = image(2, side=side)
    everything = torch.arange(16).expand(2, -1)
    full, kept = encoder(image_BCHW), encoder(image_BCHW, everything)
    torch.testing.assert_close(kept.patches_BPD, full.patches_BPD, rtol=1e-4, atol=1e-5)
    assert kept.grid is None
    order = torch.stack([torch.tensor([3, 0, 9]), torch.tensor([15, 1, 2])])
    some, turned = encoder(image_BCHW, order), encoder(image_BCHW, order.flip(1))
    assert some.patches_BPD.shape == (2, 3, encoder.patch_dim)
    torch.testing.assert_close(turned.patches_BPD.flip(1), some.patches_BPD, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(some.pooled_BD, full.pooled_BD, atol=1e-4)
    torch.testing.assert_close(
        encoder(image_BCHW).pooled_BD, full.pooled_BD
    )  # keep_BK does not persist
    covered = image_BCHW.clone()
    cell = side // 4
    covered[0, :, :cell, cell : 2 * cell] = 9.0  # patch 1, which the first image does not keep
    torch.testing.assert_close(
        encoder(covered, order).pooled_BD[0], some.pooled_BD[0], rtol=1e-4, atol=1e-5
    )


def test_cnn_rejects_keep() -> None:
    encoder = make_encoder("resnet18", **TINY_RESNET)
    with raises(ConfigError, "unsupported", "keep_BK"):
        encoder(image(), torch.zeros(2, 1, dtype=torch.int64))


def test_channels_are_converted() -> None:
    encoder = make_encoder("resnet18", mean=(0.5,), std=(0.5,), **TINY_RESNET)
    grey = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    torch.testing.assert_close(
        encoder.normalize(grey), encoder.normalize(grey.expand(-1, 3, -1, -1))
    )
    assert encoder.normalize(grey).min() >= -1
    assert encoder.normalize(grey).max() <= 1
    one = make_encoder("resnet18", in_channels=1, mean=(0.0,), std=(1.0,), **TINY_RESNET)
    colour = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    for channel, weight in enumerate((0.299, 0.587, 0.114)):
        only = colour.clone()
        only[:, channel] = 255
        torch.testing.assert_close(
            one.normalize(only), torch.full((1, 1, 8, 8), weight), rtol=1e-5, atol=1e-6
        )
    with raises(ConfigError, "mismatch"):
        one(image())
    with raises(ConfigError, "mismatch", names="(2, 4, 64, 64)"):
        encoder(image(channels=4))
    with raises(ConfigError, "wrong_type", names="torch.int32"):
        encoder(grey.int())


@pytest.mark.parametrize(("scale", "fits"), [(1.0, False), (255.0, False), (None, True)])
def test_first_floats_must_be_normalised(scale: float | None, fits: bool) -> None:
    """Floats in 0..1 and 0..255 used to be encoded as if they were normalised already."""
    generator = torch.Generator().manual_seed(0)
    pixels_BCHW = torch.randint(256, (2, 3, 64, 64), generator=generator, dtype=torch.uint8)
    encoder = make_encoder("resnet_tiny")
    expected_BD = encoder(pixels_BCHW).pooled_BD
    if not fits:
        with raises(ConfigError, "out_of_range", "image_BCHW"):
            encoder(pixels_BCHW.float() / 255 * scale)
        with raises(ConfigError, "out_of_range", "image_BCHW"):
            encoder.normalize(pixels_BCHW.half() / 255 * scale)
        return
    normalized_BCHW = encoder.normalize(pixels_BCHW)
    assert torch.equal(encoder(normalized_BCHW).pooled_BD, expected_BD)
    encoder(
        normalized_BCHW.clamp(0, 1)
    )  # only the first batch is checked, so that a step never waits for it


def test_floats_in_the_range_of_the_encoder_are_accepted() -> None:
    bright_BCHW = image().abs().clamp(max=1)
    make_encoder("resnet_tiny", mean=(0.0,), std=(1.0,))(bright_BCHW)
    make_encoder("resnet_tiny")(bright_BCHW, normalized=True)
    make_encoder("resnet_tiny")(torch.zeros(1, 3, 64, 64))


def test_mean_and_std_override_the_preset() -> None:
    """CheXzero normalises pixels in 0..255 with mean 101.48761 and deviation 83.43944."""
    encoder = make_encoder(
        "resnet18", mean=(101.48761 / 255,), std=(83.43944 / 255,), **TINY_RESNET
    )
    grey = torch.full((1, 1, 32, 32), 200, dtype=torch.uint8)
    torch.testing.assert_close(
        encoder.normalize(grey),
        torch.full((1, 3, 32, 32), (200 - 101.48761) / 83.43944),
        rtol=1e-5,
        atol=1e-5,
    )


def test_names_are_searched_library_by_library() -> None:
    assert type(make_encoder("resnet18", **TINY_RESNET).backbone).__module__.startswith("timm")
    assert make_encoder("timm:resnet10t.c3_in1k").feature_dim == 512
    assert "mobilenet_v2" in list_image_encoders("mobilenet*", library="torchvision")
    assert (
        make_encoder("mobilenet_v2").feature_dim == 1280
    )  # torchvision's, because it is neither a preset nor in timm
    assert "RN50" in list_image_encoders(library="open_clip")
    assert list_image_encoders("vit_b*") == ["vit_b16"]


@pytest.mark.parametrize(
    ("name", "options", "code", "field"),
    [
        ("resnet5O", {}, "unknown_name", "name"),
        ("timm:resnett18", {}, "unknown_name", "name"),
        ("tim:resnet18", {}, "unknown_name", "name"),
        ("", {}, "unknown_name", "name"),
        ("resnet18", {"in_channels": 2}, "out_of_range", "in_channels"),
        ("resnet18", {"patch_level": 0}, "out_of_range", "patch_level"),
        ("resnet18", {"patch_level": -6}, "out_of_range", "patch_level"),
        ("resnet18", {"pool": "max"}, "unknown_name", "pool"),
        ("resnet18", {"projection": True}, "unsupported", "projection"),
        ("resnet18", {"width": 3}, "out_of_range", None),
        ("resnet18", {"mean": (0.1, 0.2)}, "out_of_range", "mean"),
        ("resnet18", {"std": (0.0,)}, "out_of_range", "std"),
        ("vit_b16", {"patch_level": -2, **TINY_VIT}, "out_of_range", "patch_level"),
        ("clip_vit_b32", {"patch_level": -2, "layers": 1}, "out_of_range", "patch_level"),
        ("torchvision:vit_b_16", {"patch_level": -2}, "out_of_range", "patch_level"),
        ("clip_vit_b32", {"depth": 3}, "unknown_name", "depth"),
        ("clip_vit_b32", {"projection": True, "pool": "avg"}, "conflict", "pool"),
        ("torchvision:squeezenet1_0", {}, "unsupported", None),
        ("torchvision:resnet18", {"depth": 3}, "out_of_range", None),
        ("torchvision:vit_b_16", {"image_size": 20}, "out_of_range", None),
        ("densenet121", {"image_size": 16}, "out_of_range", "image_size"),
        ("torchvision:resnet18", {"patch_level": -5}, "out_of_range", "patch_level"),
    ],
)
def test_invalid_settings_raise(
    name: str, options: dict[str, Any], code: str, field: str | None
) -> None:
    with raises(ConfigError, code, field):
        make_shapes(name, **options)


def test_stages_without_a_norm_of_their_own() -> None:
    """Hiera's final norm follows the pooling."""
    encoder = make_encoder("timm:hiera_tiny_224", embed_dim=16, num_heads=1, stages=(1, 1, 1, 1))
    features = encoder(image(side=224))
    assert features.patches_BPD.shape == (2, 49, encoder.patch_dim)
    net = encoder.backbone
    expected = net.forward_head(net.forward_features(image(side=224)), pre_logits=True)
    torch.testing.assert_close(features.pooled_BD, expected)
    normalized = net.head.norm(features.patches_BPD.mean(dim=1))
    torch.testing.assert_close(features.pooled_BD, normalized, rtol=1e-4, atol=1e-4)


def test_unknown_name_suggests_the_nearest_ones() -> None:
    with raises(ConfigError, "unknown_name", "name", names="resnet50"):
        create_image_encoder("resnet5O")
    with raises(ConfigError, "unknown_name", "name", names="resnet18"):
        create_image_encoder("timm:resnett18")


def test_initialisation_equals_the_library_s_for_one_seed() -> None:
    import timm

    torch.manual_seed(5)
    reference = timm.create_model("resnet18", num_classes=0, **TINY_RESNET)
    torch.manual_seed(5)
    encoder = create_image_encoder("resnet18", **TINY_RESNET)
    after = torch.rand(1)
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter, encoder.backbone.get_parameter(name))
    torch.manual_seed(5)
    timm.create_model("resnet18", num_classes=0, **TINY_RESNET)
    assert torch.equal(torch.rand(1), after)  # finding the widths uses no random number


def test_encoder_compiles_to_one_graph() -> None:
    """There is no graph break; the eager backend keeps the test short."""
    encoder = make_encoder("vit_b16", image_size=64, **TINY_VIT)
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    pixels = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    torch.testing.assert_close(compiled(pixels).pooled_BD, encoder(pixels).pooled_BD)
