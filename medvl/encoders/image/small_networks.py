"""Image encoders of medvl: a residual network of six stages, and raw patches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from medvl.encoders.base import group_by_depth
from medvl.encoders.image.adapter import (
    PatchSelection,
    Size,
    VisionAdapter,
    VisionBackbone,
    VisionOutput,
    check_level,
    flatten_map,
)
from medvl.errors import ConfigError

# Residual network with six stages for grey radiographs of 256 pixels (Liao et al., arXiv
# 2103.04537).


class SixStageResNet(nn.Module):
    """`resnet256_6_2_1` of the authors' code, under its parameter names, without the classifier.

    A 3x3 convolution, then stages of basic blocks that halve the side each; there is no max
    pooling.

    Args:
        channels: width of each stage; the stem has that of the first.
        layers: number of blocks of each stage.
    """

    def __init__(
        self,
        channels: Sequence[int] = (8, 16, 32, 64, 128, 192),
        layers: Sequence[int] = (2, 2, 2, 2, 2, 2),
    ) -> None:
        super().__init__()
        from torchvision.models.resnet import BasicBlock

        self.conv1 = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.stages = [f"layer{number}" for number in range(1, len(channels) + 1)]
        width = channels[0]
        for stage, planes, depth in zip(self.stages, channels, layers, strict=True):
            shortcut = nn.Sequential(
                nn.Conv2d(width, planes, 1, stride=2, bias=False), nn.BatchNorm2d(planes)
            )
            blocks = [
                BasicBlock(width, planes, 2, shortcut),
                *(BasicBlock(planes, planes) for _ in range(1, depth)),
            ]
            self.add_module(stage, nn.Sequential(*blocks))
            width = planes
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image_BCHW: Tensor) -> list[Tensor]:
        """Return the map (B, D, H, W) of each stage."""
        map_BDHW = F.relu(self.bn1(self.conv1(image_BCHW)), inplace=True)
        maps = []
        for stage in self.stages:
            map_BDHW = self.get_submodule(stage)(map_BDHW)
            maps.append(map_BDHW)
        return maps


class SixStageResNetAdapter(VisionAdapter):
    """Adapter whose pooled vector has all cells of the last map's 2x2 averages: its width
    depends on the image size.
    """

    fixed_size = True

    def encode(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        """Encode pixels; level -2 is the published local map, 8x8x128 at 256 pixels."""
        check_level(level, len(net.stages), "resnet256")
        maps = net(image_BCHW)
        return VisionOutput(F.avg_pool2d(maps[-1], 2).flatten(1), None, *flatten_map(maps[level]))

    def layers(self, net: Any) -> list[list[str]]:
        """Return the parameters of the stem and of each stage."""
        return group_by_depth(
            [name for name, _ in net.named_parameters()], [f"{stage}." for stage in net.stages]
        )

    def resize(self, net: Any, size: Size) -> None:
        """Accept any size that leaves the last map with 2x2 cells; ConfigError ("out_of_range")
        for smaller ones.
        """
        least = 2 ** (len(net.stages) + 1)
        if min(size) < least:
            message = f"image_size of resnet256 must be at least {least}, got {size}"
            raise ConfigError(message, "out_of_range", field="image_size")


def build_six_stage_resnet(arguments: Mapping[str, Any]) -> VisionBackbone:
    """Build the network with random weights from torch's global generator, as the authors
    initialise it.

    Raises:
        ConfigError: "out_of_range" for an unknown argument, or for unequal numbers of channels and
            layers.
    """
    try:
        net = SixStageResNet(**arguments)
    except (TypeError, ValueError) as error:
        message = f"resnet256 cannot be built with {dict(arguments)}: {error}"
        raise ConfigError(message, "out_of_range") from error
    return VisionBackbone(
        net=net, adapter=SixStageResNetAdapter(), image_size=(256, 256), ignored_heads=("fc1.",)
    )


# The pixels of square patches as local features, without parameters.
#
# `patches:32` is the image source of ViLT (Kim et al., arXiv 2102.03334): the projection that
# follows it in a fusion-encoder is ViLT's patch embedding, a convolution with the patch's side as
# kernel and stride.

_STATISTICS = (0.5, 0.5, 0.5)
"""Mean and standard deviation of ViLT: pixels from -1 to 1."""


class RawPatches(nn.Module):
    """Cut images into patches; the numbers of a patch are in the order channel, row, column.

    A linear layer on them equals a convolution whose weight is `linear.weight.view(D, C, side,
    side)`.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.patch_drop = PatchSelection(prefix=0)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, P, C * side * side). Raises ConfigError ("mismatch") unless whole patches
        cover the image.
        """
        height, width = image_BCHW.shape[2:]
        if height % self.side or width % self.side:
            message = (
                f"image_size must be a multiple of {self.side}, the side of a patch; got "
                f"{(height, width)}"
            )
            raise ConfigError(message, "mismatch", field="image_size")
        cells = image_BCHW.unflatten(3, (-1, self.side)).unflatten(2, (-1, self.side))
        patches_BPC: Tensor = self.patch_drop(
            cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        )
        return patches_BPC


class RawPatchesAdapter(VisionAdapter):
    """Adapter whose pooled vector is the mean patch."""

    keep = "patch_drop"

    def encode(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        """Return the only level."""
        check_level(level, 1, "patches")
        patches_BPD = net(image_BCHW)
        grid = (image_BCHW.shape[2] // net.side, image_BCHW.shape[3] // net.side)
        whole = net.patch_drop.keep_BK is None
        return VisionOutput(patches_BPD.mean(dim=1), None, patches_BPD, grid if whole else None)

    def layers(self, net: Any) -> list[list[str]]:
        """Return no layer: there are no parameters."""
        return []


def build_raw_patches(side: str, arguments: Mapping[str, Any]) -> VisionBackbone:
    """Build the source of `patches:SIDE`.

    Raises:
        ConfigError: "wrong_type" unless SIDE is a positive integer; "out_of_range" for any
            argument.
    """
    if not side.isdigit() or int(side) < 1:
        message = (
            f"expected patches:SIDE with the side in pixels, as in patches:32; got 'patches:{side}'"
        )
        raise ConfigError(message, "wrong_type", field="name")
    if arguments:
        raise ConfigError(
            f"patches:{side} takes no arguments, got {dict(arguments)}", "out_of_range"
        )
    size = 224 // int(side) * int(side) or int(side)
    return VisionBackbone(
        net=RawPatches(int(side)),
        adapter=RawPatchesAdapter(),
        image_size=(size, size),
        mean=_STATISTICS,
        std=_STATISTICS,
    )
