"""The image encoder of MutualInfo: published shapes, and sizes that it accepts."""

import pytest
import torch
from helpers.errors import raises

from medvl.encoders import create_image_encoder
from medvl.errors import ConfigError


def test_published_shapes() -> None:
    """768 = 2 x 2 x 192 values, a local map of 8 x 8 x 128, and one block's names of the
    released code.
    """
    encoder = create_image_encoder("resnet256", in_channels=1, patch_level=-2)
    assert (encoder.feature_dim, encoder.patch_dim, encoder.grid(256, 256)) == (768, 128, (8, 8))
    shapes = {name: tuple(p.shape) for name, p in encoder.backbone.named_parameters()}
    assert shapes["conv1.weight"] == (8, 1, 3, 3)
    assert shapes["layer6.0.downsample.0.weight"] == (192, 128, 1, 1)
    assert shapes["layer6.1.conv2.weight"] == (192, 192, 3, 3)
    # 8 channels with a downsampling shortcut also in the first stage, and 2 * 192 norm parameters
    # in the last.
    expected, width = 8 * 9 + 16, 8
    for planes in (8, 16, 32, 64, 128, 192):
        expected += 9 * planes * (width + 3 * planes) + planes * width + 5 * 2 * planes
        width = planes
    assert sum(p.numel() for p in encoder.parameters()) == expected


def test_all_cells_of_the_last_map_are_in_the_pooled_vector() -> None:
    encoder = create_image_encoder("resnet256", image_size=(128, 256)).eval()
    image_BCHW = torch.randn(2, 3, 128, 256)
    features = encoder(image_BCHW)
    last_BPD = features.patches_BPD
    cells_BcD = last_BPD.unflatten(1, (2, 4))[:, :, :2].flatten(1, 2)
    torch.testing.assert_close(
        features.pooled_BD.unflatten(1, (192, 2))[:, :, 0], cells_BcD.mean(dim=1)
    )


def test_sizes_and_arguments_are_checked() -> None:
    with raises(ConfigError, "out_of_range", "image_size"):
        create_image_encoder("resnet256", image_size=96)
    with raises(ConfigError, "out_of_range"):
        create_image_encoder("resnet256", channels=(8, 8))
    with raises(ConfigError, "mismatch", "image_size"):
        create_image_encoder("resnet256", image_size=128)(
            torch.zeros(1, 1, 256, 256, dtype=torch.uint8)
        )
    with pytest.raises(ConfigError):
        create_image_encoder("resnet256", patch_level=-7)
