"""Patch embedding as a matrix product: the values and gradients of the convolution."""

import pytest
import torch
from torch import Tensor, nn

from medvl.encoders import create_image_encoder
from medvl.encoders.image.adapter import PatchConv2d, speed_up_patch_embedding


def convolution(
    channels: int = 3, *, bias: bool = True, kernel: tuple[int, int] = (4, 2)
) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(channels, 8, kernel, stride=kernel, bias=bias).double()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(12, 8), (14, 9)])
def test_the_product_equals_the_convolution(
    channels: int, bias: bool, size: tuple[int, int]
) -> None:
    """With pixels behind the last whole patch too."""
    plain = convolution(channels, bias=bias)
    ours = nn.Sequential(convolution(channels, bias=bias))
    speed_up_patch_embedding(ours)
    assert isinstance(ours[0], PatchConv2d)
    image_BCHW = torch.randn(
        5, channels, *size, dtype=torch.double, generator=torch.Generator().manual_seed(1)
    )

    def outcome(form: object, module: nn.Module) -> list[Tensor]:
        assert callable(form)
        leaves = [image_BCHW.clone().requires_grad_(), *module.parameters()]
        map_BDHW = form(leaves[0])
        return [map_BDHW, *torch.autograd.grad(map_BDHW.square().sum(), leaves)]

    for mine, expected in zip(outcome(ours[0].multiply, ours), outcome(plain, plain), strict=True):
        torch.testing.assert_close(mine, expected)


def test_it_equals_the_convolution_on_a_device(device: torch.device) -> None:
    plain = convolution().to(device)
    ours = nn.Sequential(convolution().to(device))
    speed_up_patch_embedding(ours)
    image_BCHW = torch.randn(
        5, 3, 12, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1)
    ).to(device)
    torch.testing.assert_close(ours(image_BCHW), plain(image_BCHW))


def test_only_convolutions_of_separate_patches_of_images_are_replaced() -> None:
    others = nn.ModuleList(
        [
            nn.Conv2d(3, 8, 4, stride=2),
            nn.Conv2d(3, 8, 4, stride=4, padding=1),
            nn.Conv2d(3, 8, 4, stride=4, dilation=2),
            nn.Conv2d(3, 9, 4, stride=4, groups=3),
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(16, 8, 2, stride=2),
        ]
    )
    speed_up_patch_embedding(others)
    assert all(type(each) is nn.Conv2d for each in others)


@pytest.mark.parametrize("name", ["timm:test_vit", "open_clip:custom"])
def test_vision_transformers_use_it_and_keep_their_parameters(name: str) -> None:
    arguments = (
        {"layers": 1, "width": 64, "patch_size": 16, "embed_dim": 8}
        if name.startswith("open_clip")
        else {}
    )
    encoder = create_image_encoder(name, pretrained=False, image_size=32, **arguments)
    embeddings = {
        path for path, module in encoder.named_modules() if isinstance(module, PatchConv2d)
    }
    assert len(embeddings) == 1
    assert {f"{path}.weight" for path in embeddings} <= set(encoder.state_dict())
