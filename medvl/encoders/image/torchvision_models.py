"""torchvision's classification models as image encoders, through torchvision's own feature extractor."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from medvl.encoders.image.adapter import Parts, Size, Vision, VisionAdapter, by_depth, check_level, unfold
from medvl.errors import ConfigError

_PATCHES, _POOLED, _LEVEL = "patches", "pooled", "level"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Where the models of one class keep their features: names of nodes in the traced graph."""

    patches: str
    """The last feature map (NCHW), or the tokens after the final norm."""
    pooled: str | None = "flatten"
    """The vector of an image; None: the average of the last map, where the model's own head needs more than that."""
    levels: Sequence[str] | None = None
    """The stages; None: every child of `features`."""
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
    "ConvNeXt": Family(patches="features", pooled="classifier.1", levels=_STAGES, head="classifier.2."),
    "DenseNet": Family(patches="relu", levels=[f"features.denseblock{index}" for index in range(1, 5)]),
    "ResNet": Family(patches="layer4", levels=_RESNET_STAGES, head="fc."),
    "RegNet": Family(
        patches="trunk_output", levels=[f"trunk_output.block{index}" for index in range(1, 5)], head="fc."
    ),
    "ShuffleNetV2": Family(patches="conv5", pooled="mean", levels=("stage2", "stage3", "stage4", "conv5"), head="fc."),
    "SwinTransformer": Family(patches="permute", levels=_STAGES, channels_last=True, head="head."),
    "VisionTransformer": Family(patches="encoder.ln", pooled=None, levels=(), head="heads."),
}
"""By the name of the class. timm has what is missing here."""


class TorchvisionAdapter(VisionAdapter):
    """A traced model that returns its named nodes."""

    def __init__(self, family: Family, levels: Sequence[str], transformer_grid: Size | None) -> None:
        self.family, self.levels = family, levels
        self.transformer_grid = transformer_grid
        self.fixed_size = transformer_grid is not None

    def parts(self, net: Any, image_BCHW: Tensor, level: int) -> Parts:
        """See the base class. Every level is computed with the last one, in one pass."""
        if level != -1:
            check_level(level, len(self.levels) or 1, "this model")
        nodes = net(image_BCHW)
        last = nodes[_PATCHES]
        if self.transformer_grid is not None:
            return Parts(last[:, 0], last[:, :1], last[:, 1:], self.transformer_grid)
        pooled_BD = nodes[_POOLED] if _POOLED in nodes else last.mean(dim=(2, 3))
        if level == -1:
            return Parts(pooled_BD, None, *unfold(last))
        stage = nodes[f"{_LEVEL}{level}"]
        return Parts(pooled_BD, None, *unfold(stage.permute(0, 3, 1, 2) if self.family.channels_last else stage))

    def layers(self, net: Any) -> list[list[str]]:
        """Stem, stages, and what lies above them."""
        names = [name for name, _ in net.named_parameters()]
        if self.transformer_grid is None:
            return by_depth(names, [f"{level}." for level in self.levels])
        count = len({name.split(".")[2] for name in names if name.startswith("encoder.layers.")})
        blocks = [f"encoder.layers.encoder_layer_{index}." for index in range(count)]
        return by_depth(names, blocks, top=["encoder.ln."])


def build_torchvision(name: str, arguments: Mapping[str, Any], level: int, image_size: Size | None) -> Vision:
    """A torchvision model without its classifier, at random weights from torch's global generator.

    Its vision Transformers are built for `image_size` at once: their traced graph holds the size.

    Raises ConfigError when torchvision refuses an argument, or the class of the model is none of `FAMILIES`.
    """
    from torchvision import models

    if name.startswith("vit_") and image_size is not None:
        if image_size[0] != image_size[1]:
            raise ConfigError(f"torchvision's {name} takes square images only: image_size is {image_size}")
        arguments = {**arguments, "image_size": image_size[0]}
    try:
        net = models.get_model(name, weights=None, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"torchvision cannot build {name} with {dict(arguments)}: {error}") from error
    family = FAMILIES.get(type(net).__name__)
    if family is None:
        raise ConfigError(f"torchvision's {name} has no adapter here (known are {', '.join(FAMILIES)}): see timm's")
    grid = (net.image_size // net.patch_size,) * 2 if isinstance(net, models.VisionTransformer) else None
    levels = family.levels
    if levels is None:
        levels = [f"features.{child}" for child, _ in net.features.named_children()]
    size = int(getattr(net, "image_size", 224))
    return Vision(
        net=_extractor(net, family, levels, level),
        adapter=TorchvisionAdapter(family, levels, grid),
        image_size=(size, size),
        heads=[family.head],
        blocks="encoder.layers.encoder_layer_" if grid else None,
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
