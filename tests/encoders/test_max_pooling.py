"""Max pooling in channels-last format: the values and gradients of `nn.MaxPool2d`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medvl.encoders import create_image_encoder
from medvl.encoders.image.adapter import InferenceMaxPool2d

SETTINGS = [(3, 2, 1, 1, False), (2, 2, 0, 1, True), (3, 1, 1, 2, False)]
"""Kernel, stride, padding, dilation and ceil_mode."""


def feature_map(height: int = 13) -> Tensor:
    map_BCHW = torch.randn(3, 5, height, 11, generator=torch.Generator().manual_seed(0))
    map_BCHW[0, 1, 2, 3], map_BCHW[1, 2], map_BCHW[2, 0, 0, 0] = torch.nan, -torch.inf, torch.inf
    return map_BCHW


def pools(setting: tuple[Any, ...]) -> tuple[nn.MaxPool2d, InferenceMaxPool2d]:
    *sizes, ceil_mode = setting
    return nn.MaxPool2d(*sizes, ceil_mode=ceil_mode), InferenceMaxPool2d(
        *sizes, ceil_mode=ceil_mode
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_values_and_format_are_those_of_torch(setting: tuple[Any, ...]) -> None:
    plain, ours = pools(setting)
    whole_BCHW = feature_map(26)
    with torch.no_grad():
        for map_BCHW in (
            feature_map(),
            whole_BCHW[:, :, ::2],
            whole_BCHW.contiguous(memory_format=torch.channels_last),
        ):
            expected, result = plain(map_BCHW), ours(map_BCHW)
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
            assert result.stride() == expected.stride()
        torch.testing.assert_close(
            ours(map_BCHW[0]), plain(map_BCHW[0]), rtol=0, atol=0, equal_nan=True
        )


def test_inference_runs_in_channels_last_format(monkeypatch: pytest.MonkeyPatch) -> None:
    original, formats = nn.MaxPool2d.forward, list[bool]()

    def record(self: nn.MaxPool2d, input: Tensor) -> Any:
        formats.append(input.is_contiguous(memory_format=torch.channels_last))
        return original(self, input)

    monkeypatch.setattr(nn.MaxPool2d, "forward", record)
    ours = InferenceMaxPool2d(3, 2, 1)
    ours(feature_map())
    with torch.no_grad():
        ours(feature_map())
    assert formats == [False, True]


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_are_those_of_torch(setting: tuple[Any, ...]) -> None:
    gradients = []
    for pool in pools(setting):
        map_BCHW = torch.randn(
            2, 4, 9, 9, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        pool(map_BCHW).square().sum().backward()
        gradients.append(map_BCHW.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_image_encoders_pool_with_it_and_keep_their_features() -> None:
    torch.manual_seed(0)
    encoder = create_image_encoder("timm:resnet18", pretrained=False, image_size=64).eval()
    pool = encoder.backbone.maxpool
    assert type(pool) is InferenceMaxPool2d
    image_BCHW = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        fast = encoder(image_BCHW)
        encoder.backbone.maxpool = nn.MaxPool2d(pool.kernel_size, pool.stride, pool.padding)
        plain = encoder(image_BCHW)
    assert torch.equal(fast.pooled_BD, plain.pooled_BD)
    assert torch.equal(fast.patches_BPD, plain.patches_BPD)
