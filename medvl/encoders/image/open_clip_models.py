"""Image encoders from open_clip: its vision Transformer, its ResNet, and timm trunks with a
head.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

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
from medvl.encoders.image.libraries import TimmAdapter, classifier_names
from medvl.encoders.presets import CLIP_MEAN, CLIP_STD, OPEN_CLIP_CUSTOM
from medvl.errors import ConfigError

_SMALLEST_TEXT = {"layers": 1, "width": 64, "heads": 1, "vocab_size": 1, "context_length": 1}


class ClipTransformerAdapter(VisionAdapter):
    """Adapter for `open_clip.VisionTransformer`: all patches after the final norm, and its own
    pooling.
    """

    fixed_size = True

    def __init__(self, net: Any, projection: bool) -> None:
        if isinstance(net.patch_dropout, nn.Identity):
            net.patch_dropout = PatchSelection(prefix=1)
            self.keep = "patch_dropout"
        self.has_queries = net.attn_pool is not None
        net.output_tokens = not self.has_queries
        if not projection:
            net.proj = None

    def encode(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        """Encode pixels; there is one level, -1."""
        check_level(level, 1, "open_clip's vision Transformer")
        if self.has_queries:  # an attentional pooler returns its queries, not patches
            result = net.forward_intermediates(image_BCHW, indices=1, output_fmt="NLC")
            return VisionOutput(
                result["image_features"], None, result["image_intermediates"][-1], net.grid_size
            )
        pooled_BD, patches_BPD = net(image_BCHW)
        if net.final_ln_after_pool:
            patches_BPD = net.ln_post(patches_BPD)
        is_partial = self.keep is not None and getattr(net, self.keep).is_partial
        return VisionOutput(pooled_BD, None, patches_BPD, None if is_partial else net.grid_size)

    def layers(self, net: Any) -> list[list[str]]:
        """Return the parameters of the embeddings, the blocks, and the final norm with the
        projection.
        """
        blocks = [
            f"transformer.resblocks.{index}." for index in range(len(net.transformer.resblocks))
        ]
        names = [name for name, _ in net.named_parameters()]
        return group_by_depth(
            names,
            blocks,
            top=("ln_post", "proj", "attn_pool"),
            stem=("class_emb", "positional", "conv1"),
        )

    def resize(self, net: Any, size: Size) -> None:
        """Interpolate the position embeddings of the patches; the class token keeps its own."""
        grid = (size[0] // net.patch_size[0], size[1] // net.patch_size[1])
        net.positional_embedding = _resample(net.positional_embedding, net.grid_size, grid)
        net.image_size = size
        net.grid_size = grid


class ClipResNetAdapter(VisionAdapter):
    """Adapter for `open_clip.ModifiedResNet`: four stages, with attention pooling if it is
    projected.
    """

    def __init__(self, net: Any, projection: bool) -> None:
        self.fixed_size = self.projection = projection  # only the attention pooling has positions
        if not projection:
            net.attnpool = nn.Identity()

    def encode(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        """Encode pixels; without the projection the vector is the average of the last map."""
        check_level(level, 5, "open_clip's ResNet")
        result = net.forward_intermediates(image_BCHW, indices=sorted({5 + level, 4}))
        last = result["image_intermediates"][-1]
        pooled_BD = result["image_features"] if self.projection else last.mean(dim=(2, 3))
        return VisionOutput(pooled_BD, None, *flatten_map(result["image_intermediates"][0]))

    def layers(self, net: Any) -> list[list[str]]:
        """Return the parameters of the stem, the stages and the attention pooling."""
        names = [name for name, _ in net.named_parameters()]
        return group_by_depth(names, [f"layer{index}." for index in range(1, 5)], top=["attnpool."])

    def resize(self, net: Any, size: Size) -> None:
        """Interpolate the position embeddings of the attention pooling."""
        pool = net.attnpool
        grid = (size[0] // 32, size[1] // 32)
        side = round((pool.positional_embedding.shape[0] - 1) ** 0.5)
        pool.positional_embedding = _resample(pool.positional_embedding, (side, side), grid)


class ClipTimmAdapter(VisionAdapter):
    """Adapter for `open_clip.TimmModel`: a timm trunk, with its head if it is projected.

    Models without a projection in their head use the trunk's classifier as one (EVA, MobileCLIP).
    """

    def __init__(self, net: Any, projection: bool) -> None:
        self.trunk = TimmAdapter(net.trunk)
        self.fixed_size = self.trunk.fixed_size
        self.patch_size = self.trunk.patch_size
        self.keep = f"trunk.{self.trunk.keep}" if self.trunk.keep else None
        self.projection = projection
        if not projection:
            net.head = nn.Identity()
            if not isinstance(net.trunk.get_classifier(), nn.Identity):
                net.trunk.reset_classifier(0)

    def encode(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        """Encode pixels; there is one level, -1."""
        output = self.trunk.encode(net.trunk, image_BCHW, level)
        if not self.projection:
            return output
        # a head with attention pooling over the map
        if hasattr(net.head, "pool") and output.grid is not None:
            return output._replace(
                pooled_BD=net.head(output.patches_BPD.transpose(1, 2).unflatten(2, output.grid))
            )
        return output._replace(pooled_BD=net.head(net.trunk.get_classifier()(output.pooled_BD)))

    def layers(self, net: Any) -> list[list[str]]:
        """Return the parameters of the trunk's layers, then of the head."""
        trunk = [[f"trunk.{name}" for name in group] for group in self.trunk.layers(net.trunk)]
        head = [f"head.{name}" for name, _ in net.head.named_parameters()]
        return [*trunk, head] if head else trunk

    def resize(self, net: Any, size: Size) -> None:
        """Change the input size of the trunk."""
        self.trunk.resize(net.trunk, size)


def build_open_clip(name: str, arguments: Mapping[str, Any], projection: bool) -> VisionBackbone:
    """Build the image encoder of an open_clip model, with random weights from torch's global
    generator.

    Args:
        name: open_clip's name of the model, or "custom" for a model that `arguments` describes.
        arguments: fields of `open_clip.CLIPVisionCfg`, and `embed_dim`, that differ from the named
            model's.
        projection: whether to project the pooled vector into the shared space.

    Raises:
        ConfigError: "unknown_name" or "out_of_range" for the name or an argument.
    """
    import open_clip
    from open_clip.timm_model import TimmModel

    config: Any = (
        {"embed_dim": 512, "vision_cfg": {}}
        if name == OPEN_CLIP_CUSTOM
        else open_clip.get_model_config(name)
    )
    tower = config["vision_cfg"] | {
        key: value for key, value in arguments.items() if key != "embed_dim"
    }
    fields = [field.name for field in dataclasses.fields(open_clip.CLIPVisionCfg)]
    unknown = sorted(set(tower) - set(fields))
    if unknown:
        message = (
            f"open_clip has no image argument {', '.join(unknown)}; choose from {', '.join(fields)}"
        )
        raise ConfigError(message, "unknown_name", field=unknown[0])
    embed_dim = int(arguments.get("embed_dim", config["embed_dim"]))
    tower["timm_model_pretrained"] = False
    quick_gelu = bool(config.get("quick_gelu", False))
    # open_clip's public interface builds whole models only, so the text encoder is as small as
    # possible
    try:
        net: Any = open_clip.CustomTextCLIP(
            embed_dim, tower, _SMALLEST_TEXT, quick_gelu=quick_gelu
        ).visual
    except (TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        raise ConfigError(
            f"open_clip cannot build {name} with {dict(arguments)}: {error}", "out_of_range"
        ) from error
    mean, std = _statistics(name)
    return VisionBackbone(
        net=net,
        adapter=_adapter(net, projection),
        image_size=_size(tower.get("image_size", 224)),
        ignored_heads=[] if projection else _projections(net),
        mean=mean,
        std=std,
        block_prefix="trunk.blocks." if isinstance(net, TimmModel) else "transformer.resblocks.",
        note="open_clip's are on the hub: pass 'OWNER/NAME@COMMIT'",
    )


def _projections(net: Any) -> list[str]:
    """Return the prefixes of the keys of projections in published files."""
    trunk = getattr(net, "trunk", None)
    classifiers = [] if trunk is None else [f"trunk.{name}." for name in classifier_names(trunk)]
    return ["proj", "head.", "attnpool.", *classifiers]


def _adapter(net: Any, projection: bool) -> VisionAdapter:
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer

    if isinstance(net, TimmModel):
        return ClipTimmAdapter(net, projection)
    if isinstance(net, VisionTransformer):
        return ClipTransformerAdapter(net, projection)
    return ClipResNetAdapter(net, projection)


def _statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of the model's first published weights."""
    import open_clip

    tags = [] if name == OPEN_CLIP_CUSTOM else open_clip.list_pretrained_tags_by_model(name)
    config = open_clip.get_pretrained_cfg(name, tags[0]) if tags else {}
    return tuple(config.get("mean") or CLIP_MEAN), tuple(config.get("std") or CLIP_STD)


def _resample(table_ND: nn.Parameter, old: Size, new: Size) -> nn.Parameter:
    """Interpolate a position table (1 + old[0] * old[1], D) to another grid, bicubic with
    antialiasing.
    """
    from timm.layers import resample_abs_pos_embed

    resampled = resample_abs_pos_embed(
        table_ND[None], new_size=list(new), old_size=list(old), num_prefix_tokens=1
    )
    return nn.Parameter(resampled[0].detach(), requires_grad=table_ND.requires_grad)


def _size(size: int | Size) -> Size:
    return (size, size) if isinstance(size, int) else size
