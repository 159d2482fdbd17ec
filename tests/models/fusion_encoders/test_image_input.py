"""Image sources of fusion-encoders: raw patches, box codes of regions, sampled cells, the first
token.
"""

import dataclasses
from typing import Any, cast

import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import SIDE, make_batch, tiny_model, tiny_tokenizer
from torch import nn

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import create_image_encoder
from medvl.encoders.regions import RegionEncoder, box_code, relative_boxes
from medvl.errors import ConfigError
from medvl.models.downstream.dense import at_image_size
from medvl.models.fusion_encoders.parts.inputs import ImageInput, sample_cells
from medvl.schema import ImageFeatures


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.mark.parametrize("channels", [1, 3])
def test_projected_patches_equal_a_convolution(channels: int) -> None:
    """ViLT's patch embedding, in value and in the gradient of its weight."""
    source = create_image_encoder("patches:8", image_size=(32, 16), in_channels=channels)
    layer = ImageInput(source, 12, positions=False, first="none")
    conv = nn.Conv2d(channels, 12, 8, stride=8)
    with torch.no_grad():
        conv.weight.copy_(layer.project.weight.view_as(conv.weight))
        conv.bias.copy_(layer.project.bias)
    image_BCHW = torch.randint(0, 256, (2, 3, 32, 16), dtype=torch.uint8)
    features = source(image_BCHW)
    assert features.grid == source.grid(32, 16) == (4, 2)
    states_BPD = layer(features).states_BND
    expected_BPD = conv(source.normalize(image_BCHW)).flatten(2).transpose(1, 2)
    torch.testing.assert_close(states_BPD, expected_BPD)
    for output in (states_BPD, expected_BPD):
        (output * torch.arange(12)).sum().backward()
    torch.testing.assert_close(layer.project.weight.grad, conv.weight.grad.flatten(1))
    assert source.normalize(
        torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)
    ).unique().tolist() == [-1, 1]


def test_patches_have_no_weights_and_can_be_dropped() -> None:
    source = create_image_encoder("patches:16", pretrained=True, image_size=48)
    assert not source.state_dict()
    assert (source.patch_dim, source.feature_dim) == (768, 768)
    keep_BK = torch.tensor([[8, 0], [3, 4]])
    image_BCHW = torch.randint(0, 256, (2, 1, 48, 48), dtype=torch.uint8)
    whole, kept = source(image_BCHW), source(image_BCHW, keep_BK)
    assert kept.grid is None
    torch.testing.assert_close(
        kept.patches_BPD, whole.patches_BPD[torch.arange(2)[:, None], keep_BK]
    )
    with raises(ConfigError, "mismatch", "image_size"):
        source(image_BCHW[..., 2:])
    for name, code in (("patches:0", "wrong_type"), ("patches:big", "wrong_type")):
        with raises(ConfigError, code, "name"):
            create_image_encoder(name)
    with raises(ConfigError, "out_of_range"):
        create_image_encoder("patches:16", depth=2)


@pytest.mark.parametrize("name", ["single_stream", "dual_stream", "m3ae"])
def test_every_stream_model_reads_patches(name: str, tokenizer: Tokenizer) -> None:
    settings: dict[str, Any] = {
        "image_encoder": "patches:16",
        "image_arguments": {},
        "image_positions": True,
    }
    model = tiny_model(name, tokenizer, **settings)
    model(make_batch(tokenizer, 4)).total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if name != "m3ae":  # whose pixel decoder keeps its image size
        larger = at_image_size(model, 2 * SIDE)
        positions: Any = larger.image_input.positions
        assert positions.shape == (64, model.config.width)
        torch.testing.assert_close(
            positions.mean(dim=0), model.image_input.positions.mean(dim=0), rtol=0, atol=0.01
        )


def test_cells_are_sampled_for_each_image_with_their_positions(tokenizer: Tokenizer) -> None:
    model = tiny_model("single_stream", tokenizer, image_tokens=5, image_positions=True)
    batch = make_batch(tokenizer, 3)
    model.image_encoder.eval()
    whole_BPD = model.image_tokens(batch.image_BCHW).states_BND
    assert model.training
    assert whole_BPD.shape[1] == 6
    model.eval()
    whole_BPD = model.image_tokens(batch.image_BCHW).states_BND[:, 1:]
    assert whole_BPD.shape[1] == 16
    model.image_input.train()
    torch.manual_seed(3)
    sampled_BPD = model.image_tokens(batch.image_BCHW).states_BND[:, 1:]
    torch.manual_seed(3)
    keep_BK = sample_cells(16, 5, 3)
    torch.testing.assert_close(sampled_BPD, whole_BPD[torch.arange(3)[:, None], keep_BK])
    assert len({tuple(row) for row in keep_BK.tolist()}) > 1
    model.train()(batch).total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with raises(ConfigError, "out_of_range", "image_tokens"):
        dataclasses.replace(model.config, image_tokens=0)


def test_sampled_cells_are_uniform_sorted_and_without_repetition() -> None:
    torch.manual_seed(0)
    cells_RK = sample_cells(10, 4, 4000)
    assert (cells_RK.diff(dim=1) > 0).all()
    share_P = torch.bincount(cells_RK.flatten(), minlength=10) / 4000
    assert (share_P - 0.4).abs().max() < 0.04
    assert sample_cells(3, 5, 2).tolist() == [[0, 1, 2]] * 2


def test_first_token() -> None:
    """A class token is one vector for all images; without a first token only the regions are
    left.
    """
    source = RegionEncoder(6)
    features = ImageFeatures(torch.randn(2, 6), torch.randn(2, 3, 6), None)
    real_BP = torch.tensor([[True, True, False], [True, False, False]])
    learned = ImageInput(source, 4, positions=False, first="learned")
    tokens = learned(features, real_BP=real_BP)
    assert tokens.states_BND.shape == (2, 4, 4)
    torch.testing.assert_close(tokens.states_BND[0, 0], tokens.states_BND[1, 0])
    assert tokens.mask_BN.tolist() == [[True, True, True, False], [True, True, False, False]]
    bare = ImageInput(source, 4, positions=False, first="none")
    assert bare(features, real_BP=real_BP).mask_BN.tolist() == real_BP.tolist()
    with raises(ConfigError, "unsupported", "image_encoder"):
        bare(dataclasses.replace(features, patches_BPD=None))
    for field, options in (
        ("image_positions", {"positions": True}),
        ("image_tokens", {"sampled": 2}),
    ):
        with raises(ConfigError, "conflict", field):
            ImageInput(source, 4, **{"positions": False, **options})


def test_box_codes_equal_the_papers() -> None:
    boxes_P4 = torch.tensor([[0.1, 0.2, 0.5, 0.9], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(box_code(boxes_P4, 4), boxes_P4)
    expected = [
        (*box, box[2] - box[0], box[3] - box[1], (box[2] - box[0]) * (box[3] - box[1]))
        for box in boxes_P4.tolist()
    ]
    torch.testing.assert_close(box_code(boxes_P4, 7), torch.tensor(expected))
    assert not box_code(boxes_P4, 7)[2].any()  # padding
    with raises(ConfigError, "mismatch", "region_boxes_BP4"):
        box_code(boxes_P4[:, :3], 7)
    for numbers in (0, 5):
        with raises(ConfigError, "out_of_range", "numbers"):
            box_code(boxes_P4, cast(Any, numbers))


def test_boxes_are_never_changed_in_place() -> None:
    """A peer divides its cached boxes by the image's size again in every epoch."""
    pixels_P4 = torch.tensor([[32.0, 16.0, 64.0, 48.0], [-1.0, 0.0, 128.5, 64.0]])
    stored_P4 = pixels_P4.clone()
    relative_P4 = relative_boxes(pixels_P4, height=64, width=128)
    for _ in range(3):  # epochs
        torch.testing.assert_close(relative_boxes(pixels_P4, height=64, width=128), relative_P4)
        code = box_code(relative_P4, 4)
        code /= 2
        box_code(relative_P4, 7).zero_()
    torch.testing.assert_close(pixels_P4, stored_P4, rtol=0, atol=0)
    torch.testing.assert_close(
        relative_P4, torch.tensor([[0.25, 0.25, 0.5, 0.75], [0.0, 0.0, 1.0, 1.0]])
    )


@pytest.mark.parametrize("code", [4, 7])
def test_regions_with_box_codes(code: int, tokenizer: Tokenizer) -> None:
    """`regions:11+7` puts the codes after the features; padding and the batch stay as they are."""
    settings: dict[str, Any] = {
        "image_encoder": f"regions:11+{code}",
        "image_arguments": {},
        "image_positions": False,
    }
    model = tiny_model("single_stream", tokenizer, **settings)
    assert model.inputs.regions
    assert not model.inputs.region_classes
    generator = torch.Generator().manual_seed(0)
    regions_BPD, boxes_BP4 = (
        torch.randn(4, 5, 11, generator=generator),
        torch.rand(4, 5, 4, generator=generator),
    )
    regions_BPD[1, 3:], boxes_BP4[1, 3:] = 0, 0
    batch = make_batch(tokenizer, 4, regions_BPD=regions_BPD, region_boxes_BP4=boxes_BP4)
    given = model.image_input_of(batch)
    assert given.shape == (4, 5, 11 + code)
    torch.testing.assert_close(given[..., :11], regions_BPD)
    torch.testing.assert_close(given[..., 11:], box_code(boxes_BP4, 4 if code == 4 else 7))
    assert model.image_encoder.real(given).tolist()[1] == [True] * 3 + [False] * 2
    model(batch).total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with raises(ConfigError, "missing", "region_boxes_BP4"):
        model.features(dataclasses.replace(batch, region_boxes_BP4=None))
    for wrong in ("regions:11+5", "regions:0", "regions:11+"):
        with raises(ConfigError, "wrong_type", "image_encoder"):
            tiny_model("single_stream", tokenizer, **{**settings, "image_encoder": wrong})
