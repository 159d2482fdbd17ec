"""The hierarchical vision Transformer against its definition, written out token by token."""

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.naive_volumes import hlip_tokens, sincos
from safetensors.torch import save_file
from torch import Tensor

from medvl.encoders import checkpoint_activations, create_volume_encoder, parameter_groups
from medvl.errors import ConfigError, WeightsError

TINY = {"size": (4, 6, 9), "patch_size": (2, 3, 3), "embed_dim": 24, "depth": 4, "num_heads": 2}
"""A grid of 2 x 2 x 3 patches."""


def tiny(seed: int = 0, **options):
    torch.manual_seed(seed)
    encoder = create_volume_encoder("vit", **{**TINY, **options})
    for parameter in encoder.parameters():  # no biases of 0, no class token of 0
        torch.nn.init.normal_(parameter, std=0.3)
    return encoder.eval()


def volumes(*shape: int, seed: int = 1) -> Tensor:
    values = np.random.default_rng(seed).integers(-1500, 800, shape)
    return torch.from_numpy(values.astype(np.int16))


def naive(encoder, study_NDHW: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The class token and the patches of one study, by the formula."""
    return hlip_tokens(
        encoder.backbone.state_dict(),
        study_NDHW,
        attention=encoder.config["attention"],
        heads=encoder.config["num_heads"],
        window=encoder.window,
    )


@pytest.mark.parametrize(
    ("attention", "scans"),
    [
        (None, 1),
        (("slice", "slice", "study", "slice"), 1),
        (("study", "slice", "scan", "slice"), 1),
        (("scan",) * 4, 1),
        (("slice", "scan", "study", "slice"), 3),
        (("study", "scan", "slice", "scan"), 2),
        (("scan", "slice", "slice", "study"), 2),
    ],
)
def test_forward_equals_its_definition(attention, scans):
    encoder = tiny(attention=attention, max_scans=0 if scans == 1 else 4)
    image_BCDHW = volumes(2, scans, 4, 6, 9)
    features = encoder(image_BCDHW)
    assert features.grid == (2 * scans, 2, 3)
    assert features.patches_BPD is not None
    with raises(ConfigError, "unsupported", "image_encoder"):
        assert features.plane
    for row in range(2):
        pooled, patches = naive(encoder, image_BCDHW[row])
        np.testing.assert_allclose(features.pooled_BD[row].detach(), pooled, atol=2e-5)
        np.testing.assert_allclose(features.patches_BPD[row].detach(), patches, atol=2e-5)


def test_default_levels_are_those_of_hlip():
    levels = tiny(depth=12).config["attention"]
    assert [index for index, level in enumerate(levels) if level == "study"] == [2, 5, 8, 11]
    assert set(levels) == {"slice", "study"}


def test_slices_do_not_see_each_other():
    encoder = tiny(attention=("slice",) * 4)
    one = volumes(1, 1, 4, 6, 9)
    other = one.clone()
    other[:, :, 2:] = 0
    before, after = encoder(one).patches_BPD, encoder(other).patches_BPD
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_scan_positions_are_drawn_in_training_only():
    encoder = tiny(max_scans=40)
    one = volumes(1, 1, 4, 6, 9).repeat(1, 2, 1, 1, 1)
    assert torch.equal(encoder(one).pooled_BD, encoder(one).pooled_BD)
    encoder.train()
    assert not torch.allclose(encoder(one).pooled_BD, encoder(one).pooled_BD)
    assert tiny(max_scans=0).train()(one[:, :1]).pooled_BD.shape == (1, 24)


def test_positions_are_frozen_and_fit_other_sizes():
    encoder = tiny()
    encoder.unfreeze()
    assert "backbone.spatial_posemb" not in dict(encoder.named_parameters())
    assert encoder(volumes(1, 1, 8, 9, 3)).grid == (4, 3, 1)
    grown = torch.nn.functional.interpolate(
        encoder.backbone.spatial_posemb.permute(0, 4, 1, 2, 3), (4, 3, 1), mode="trilinear"
    )
    other = tiny(size=(8, 9, 3))
    other.load_state_dict(
        encoder.state_dict() | {"backbone.spatial_posemb": grown.permute(0, 2, 3, 4, 1)}
    )
    assert torch.equal(
        other(volumes(1, 1, 8, 9, 3)).pooled_BD, encoder(volumes(1, 1, 8, 9, 3)).pooled_BD
    )


def test_positions_fill_other_widths_with_zeros():
    table = tiny(embed_dim=32).backbone.spatial_posemb[0, 1, 1, 2]
    expected = [*sincos(2, 10), *sincos(1, 10), *sincos(1, 10), 0, 0]
    np.testing.assert_allclose(table, expected, atol=1e-6)


def test_floats_equal_hounsfield_units_and_other_types_are_refused():
    encoder = tiny(window=(-100, 155))
    hu = volumes(1, 1, 4, 6, 9)
    expected = encoder(hu).pooled_BD
    assert torch.equal(encoder(hu.float()).pooled_BD, expected)
    for other in (torch.uint8, torch.int64):
        with raises(ConfigError, "wrong_type"):
            encoder(hu.to(other))


def test_gradients_reach_all_parameters_with_and_without_checkpointing():
    gradients = []
    for checkpoints in (False, True):
        encoder = tiny(drop_path_rate=0.5).train()
        if checkpoints:
            checkpoint_activations(encoder)
        torch.manual_seed(5)
        features = encoder(volumes(3, 1, 4, 6, 9))
        (features.pooled_BD.sum() + (features.patches_BPD**2).sum()).backward()
        gradients.append({name: p.grad for name, p in encoder.named_parameters()})
    plain, recomputed = gradients
    assert all(grad is not None and grad.abs().sum() > 0 for grad in plain.values())
    torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit", {"embed_dim": 24, "depth": 2, "num_heads": 2}),
        ("ctvit", {"embed_dim": 24, "depth": 1, "num_heads": 2, "head_dim": 8}),
    ],
)
def test_a_convolutional_stem_has_a_token_for_each_patch(name, options):
    patch = (1, 4, 2)
    shape = {"size": (2, 8, 6), "patch_size": patch, "stem": "convolutions"}
    encoder = create_volume_encoder(name, **shape, **options)
    image_BCDHW = volumes(3, 1, 2, 8, 6)
    features = encoder(image_BCDHW)
    assert features.grid == (2, 2, 3)
    (features.pooled_BD.sum() + (features.patches_BPD**2).sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())
    same = create_volume_encoder(**encoder.config)
    same.load_state_dict(encoder.state_dict())
    both = [each.eval()(image_BCDHW).pooled_BD for each in (encoder, same)]
    torch.testing.assert_close(*both)
    stem = encoder.backbone.patch_embed.layers
    strides = [layer.stride for layer in stem if isinstance(layer, torch.nn.Conv3d)]
    assert strides == [(1, 2, 1), (1, 2, 2), (1, 1, 1)]
    with raises(ConfigError, "out_of_range", "patch_size"):
        create_volume_encoder(name, **{**shape, **options, "patch_size": (1, 4, 6)})
    with raises(ConfigError, "unknown_name", "stem"):
        create_volume_encoder(name, **{**shape, **options, "stem": "none"})


def test_layers_are_grouped_by_depth():
    encoder = tiny()
    groups = encoder.parameter_layers()
    assert len(groups) == 6
    assert groups[0] == [
        f"backbone.{name}"
        for name in ("cls_token", "patch_embed.proj.weight", "patch_embed.proj.bias")
    ]
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted(dict(encoder.named_parameters()))
    rates = {group["lr"] for group in parameter_groups(encoder, 1.0, 0.1, layer_decay=0.5)}
    assert rates == {0.5**k for k in range(1, 7)}


def image_vit(path, side: int, patch: int, depth: int = 4, **more):
    """Write a vision Transformer of timm with random weights; return its state."""
    import timm

    torch.manual_seed(3)
    net = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=side,
        patch_size=patch,
        embed_dim=24,
        depth=depth,
        num_heads=2,
        num_classes=5,
        **more,
    )
    state = {name: torch.randn_like(tensor) for name, tensor in net.state_dict().items()}
    save_file(state, path)
    return state


def test_inflation_of_an_image_encoder(tmp_path):
    state = image_vit(tmp_path / "vit.safetensors", 8, 2, depth=6)
    encoder = create_volume_encoder("vit", **TINY, pretrained=tmp_path / "vit.safetensors")
    own = encoder.backbone.state_dict()
    filters = torch.nn.functional.interpolate(
        state["patch_embed.proj.weight"], (3, 3), mode="bicubic", antialias=False
    ).sum(1)
    for depth in range(2):
        torch.testing.assert_close(own["patch_embed.proj.weight"][:, 0, depth], filters / 2)
    positions = state["pos_embed"]
    torch.testing.assert_close(own["cls_token"], state["cls_token"] + positions[:, :1])
    plane = torch.nn.functional.interpolate(
        positions[:, 1:].reshape(1, 4, 4, 24).permute(0, 3, 1, 2),
        (2, 3),
        mode="bicubic",
        antialias=True,
    )
    for d in range(2):
        expected = plane[0].permute(1, 2, 0) + torch.tensor(sincos(d, 24))
        torch.testing.assert_close(own["spatial_posemb"][0, d], expected)
    for name in ("blocks.3.attn.qkv.weight", "blocks.0.norm1.bias", "norm.weight"):
        assert torch.equal(own[name], state[name])


def test_rescaled_filters_keep_the_response_to_a_constant(tmp_path):
    state = image_vit(tmp_path / "vit.safetensors", 8, 2)
    path = tmp_path / "vit.safetensors"
    flat = {"patch_embed.proj.weight": torch.ones(24, 3, 2, 2)}
    save_file(state | flat, path)
    responses = [
        create_volume_encoder("vit", **TINY, pretrained=path, rescale=rescale)
        .backbone.patch_embed.proj.weight.sum((1, 2, 3, 4))
        .mean()
        .item()
        for rescale in (False, True)
    ]
    assert responses == pytest.approx([12 * 9 / 4, 12])


def test_files_of_the_encoder_and_of_hlip_load(tmp_path):
    source = tiny(max_scans=1)
    own = {f"visual.trunk.{name}": tensor for name, tensor in source.backbone.state_dict().items()}
    more = {"visual.head.proj.weight": torch.zeros(4, 24), "logit_scale": torch.zeros(())}
    save_file(own | more | {"text.transformer.x": torch.zeros(3)}, tmp_path / "hlip.safetensors")
    loaded = create_volume_encoder(
        "vit", **TINY, max_scans=1, pretrained=tmp_path / "hlip.safetensors"
    ).eval()
    image = volumes(1, 1, 4, 6, 9)
    assert torch.equal(loaded(image).pooled_BD, source(image).pooled_BD)
    with raises(WeightsError, "mismatch", names="sequential_posemb"):
        create_volume_encoder("vit", **TINY, pretrained=tmp_path / "hlip.safetensors")
    again = create_volume_encoder(**source.config)
    again.load_state_dict(source.state_dict())
    assert torch.equal(again.eval()(image).pooled_BD, source(image).pooled_BD)


@pytest.mark.parametrize(
    ("lacking", "names"), [("norm.weight", "norm.weight"), ("cls_token", "cls_token")]
)
def test_files_that_do_not_fit_are_refused(tmp_path, lacking, names):
    state = image_vit(tmp_path / "vit.safetensors", 8, 2)
    del state[lacking]
    save_file(state, tmp_path / "vit.safetensors")
    with raises(WeightsError, "mismatch", names=names):
        create_volume_encoder("vit", **TINY, pretrained=tmp_path / "vit.safetensors")


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"size": (4, 6, 8)}, "mismatch", "size"),
        ({"size": (4, 6)}, "out_of_range", "size"),
        ({"patch_size": (0, 3, 3)}, "out_of_range", "patch_size"),
        ({"embed_dim": 27, "num_heads": 1}, "out_of_range", "embed_dim"),
        ({"embed_dim": 4}, "out_of_range", "embed_dim"),
        ({"num_heads": 5}, "out_of_range", "embed_dim"),
        ({"depth": 0}, "out_of_range", "depth"),
        ({"window": (10, 10)}, "out_of_range", "window"),
        ({"std": 0}, "out_of_range", "std"),
        ({"drop_path_rate": 1}, "out_of_range", "drop_path_rate"),
        ({"max_scans": -1}, "out_of_range", "max_scans"),
        ({"attention": ("slice",)}, "mismatch", "attention"),
        ({"attention": ("slice", "volume", "study", "study")}, "unknown_name", "attention"),
        ({"heads": 2}, "unknown_name", "heads"),
    ],
)
def test_wrong_arguments_are_refused(options, code, field):
    with raises(ConfigError, code, field):
        create_volume_encoder("vit", **{**TINY, **options})


def test_wrong_names_and_inputs_are_refused():
    with raises(ConfigError, "unknown_name", "name"):
        create_volume_encoder("resnet", **TINY)
    with raises(ConfigError, "missing", "patch_size"):
        create_volume_encoder("vit", size=(4, 6, 9))
    with raises(ConfigError, "mismatch"):
        tiny()(volumes(1, 4, 6, 9))
    with raises(ConfigError, "mismatch", "size"):
        tiny()(volumes(1, 1, 4, 6, 8))
    with raises(ConfigError, "mismatch", "max_scans"):
        tiny()(volumes(1, 2, 4, 6, 9))


def test_the_reference_notices_a_changed_token():
    encoder = tiny()
    image = volumes(1, 1, 4, 6, 9)
    expected, _ = naive(encoder, image[0])
    with torch.no_grad():
        encoder.backbone.cls_token[..., 0] += 1
    assert np.abs(encoder(image).pooled_BD[0].detach().numpy() - expected).max() > 1e-3
