"""Image encoders from torchvision's classification models, with torchvision's feature extractor."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from medvl.encoders.base import group_by_depth
from medvl.encoders.image.adapter import (
    Size,
    VisionAdapter,
    VisionBackbone,
    VisionOutput,
    check_level,
    flatten_map,
)
from medvl.errors import ConfigError

_PATCHES = "patches"
_POOLED = "pooled"
_LEVEL = "level"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names of the feature nodes in the traced graph of one class of models."""

    patches: str
    """The last feature map (NCHW), or the tokens after the final norm."""
    pooled: str | None = "flatten"
    """Pooled vector; None for the average of the last map, where the pooled node is missing."""
    levels: Sequence[str] | None = None
    """Stages; None for every child of `features`."""
    channels_last: bool = False
    """Whether the stages (not the last map) are NHWC."""
    head: str = "classifier."


_STAGES = ("features.1", "features.3", "features.5", "features.7")
_RESNET_STAGES = ("layer1", "layer2", "layer3", "layer4")

FAMILIES: Mapping[str, Family] = {
    "AlexNet": Family(patches="features", pooled=None),
    "VGG": Family(patches="features", pooled=None),
    "MobileNetV2": Family(patches="features"),
    "MobileNetV3": Family(patches="features"),
    "EfficientNet": Family(patches="features"),
    "ConvNeXt": Family(
        patches="features", pooled="classifier.1", levels=_STAGES, head="classifier.2."
    ),
    "DenseNet": Family(
        patches="relu", levels=[f"features.denseblock{index}" for index in range(1, 5)]
    ),
    "ResNet": Family(patches="layer4", levels=_RESNET_STAGES, head="fc."),
    "RegNet": Family(
        patches="trunk_output",
        levels=[f"trunk_output.block{index}" for index in range(1, 5)],
        head="fc.",
    ),
    "ShuffleNetV2": Family(
        patches="conv5", pooled="mean", levels=("stage2", "stage3", "stage4", "conv5"), head="fc."
    ),
    "SwinTransformer": Family(patches="permute", levels=_STAGES, channels_last=True, head="head."),
    "VisionTransformer": Family(patches="encoder.ln", pooled=None, levels=(), head="heads."),
}
"""Families by class name. Use timm for other models."""


class TorchvisionAdapter(VisionAdapter):
    """Adapter for a traced model that returns its named nodes."""

    def __init__(
        self, family: Family, levels: Sequence[str], transformer_grid: Size | None
    ) -> None:
        self.family = family
        self.levels = levels
        self.transformer_grid = transformer_grid
        self.fixed_size = transformer_grid is not None

    def encode(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        """Encode pixels; the level and the last map are computed in one forward pass."""
        if level != -1:
            check_level(level, len(self.levels) or 1, "this model")
        nodes = net(image_BCHW)
        last = nodes[_PATCHES]
        if self.transformer_grid is not None:
            return VisionOutput(last[:, 0], last[:, :1], last[:, 1:], self.transformer_grid)
        pooled_BD = nodes[_POOLED] if _POOLED in nodes else last.mean(dim=(2, 3))
        if level == -1:
            return VisionOutput(pooled_BD, None, *flatten_map(last))
        stage = nodes[f"{_LEVEL}{level}"]
        return VisionOutput(
            pooled_BD,
            None,
            *flatten_map(stage.permute(0, 3, 1, 2) if self.family.channels_last else stage),
        )

    def layers(self, net: Any) -> list[list[str]]:
        """Return the parameters of the stem, the stages and the layers after them."""
        names = [name for name, _ in net.named_parameters()]
        if self.transformer_grid is None:
            return group_by_depth(names, [f"{level}." for level in self.levels])
        count = len({name.split(".")[2] for name in names if name.startswith("encoder.layers.")})
        blocks = [f"encoder.layers.encoder_layer_{index}." for index in range(count)]
        return group_by_depth(names, blocks, top=["encoder.ln."])


def build_torchvision(
    name: str, arguments: Mapping[str, Any], level: int, image_size: Size | None
) -> VisionBackbone:
    """Build a torchvision model without its classifier, with random weights from torch's global
    generator.

    Vision Transformers are built for `image_size`, because their traced graph contains the size.

    Raises:
        ConfigError: "out_of_range" if torchvision rejects an argument, "unsupported" if the model's
            class is not one of `FAMILIES` or `image_size` is not square for a vision Transformer.
    """
    from torchvision import models

    if name.startswith("vit_") and image_size is not None:
        if image_size[0] != image_size[1]:
            raise ConfigError(
                f"{name} needs square images, got {image_size}", "unsupported", field="image_size"
            )
        arguments = {**arguments, "image_size": image_size[0]}
    try:
        net = models.get_model(name, weights=None, **arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"torchvision cannot build {name} with {dict(arguments)}: {error}", "out_of_range"
        ) from error
    family = FAMILIES.get(type(net).__name__)
    if family is None:
        raise ConfigError(
            f"unsupported {name}: use timm's, or one of {', '.join(FAMILIES)}", "unsupported"
        )
    grid = (
        (net.image_size // net.patch_size,) * 2
        if isinstance(net, models.VisionTransformer)
        else None
    )
    levels = family.levels
    if levels is None:
        levels = [f"features.{child}" for child, _ in net.features.named_children()]
    size = int(getattr(net, "image_size", 224))
    return VisionBackbone(
        net=_extractor(net, family, levels, level),
        adapter=TorchvisionAdapter(family, levels, grid),
        image_size=(size, size),
        ignored_heads=[family.head],
        block_prefix="encoder.layers.encoder_layer_" if grid else None,
        url=models.get_model_weights(name).DEFAULT.url,
    )


def _extractor(net: nn.Module, family: Family, levels: Sequence[str], level: int) -> nn.Module:
    from torchvision.models.feature_extraction import create_feature_extractor

    nodes = {family.patches: _PATCHES}
    if family.pooled is not None:
        nodes[family.pooled] = _POOLED
    if -len(levels) <= level < -1:
        nodes[levels[level]] = f"{_LEVEL}{level}"
    extractor: nn.Module = create_feature_extractor(net, nodes)
    return extractor
