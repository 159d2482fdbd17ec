"""open_clip's image towers as image encoders: its vision Transformer, its ResNet, and timm trunks with a head."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from medvl.encoders.image.adapter import KeepPatches, Parts, Size, Vision, VisionAdapter, by_depth, check_level, unfold
from medvl.encoders.image.timm_models import TimmAdapter
from medvl.encoders.presets import CLIP_MEAN, CLIP_STD
from medvl.errors import ConfigError

CUSTOM = "custom"
"""Name of a model that is described by its arguments alone."""

_SMALLEST_TEXT = {"layers": 1, "width": 64, "heads": 1, "vocab_size": 1, "context_length": 1}


class ClipTransformerAdapter(VisionAdapter):
    """`open_clip.VisionTransformer`: all patches after the final norm, and the class token or the average."""

    fixed_size = True

    def __init__(self, net: Any, projection: bool) -> None:
        if isinstance(net.patch_dropout, nn.Identity):
            net.patch_dropout = KeepPatches(prefix=1)
            self.keep = "patch_dropout"
        self.has_queries = net.attn_pool is not None
        net.output_tokens = not self.has_queries
        if not projection:
            net.proj = None

    def parts(self, net: Any, image_BCHW: Tensor, level: int) -> Parts:
        """See the base class."""
        check_level(level, 1, "open_clip's vision Transformer")
        if self.has_queries:  # what an attentional pooler returns are its queries' answers, not regions
            result = net.forward_intermediates(image_BCHW, indices=1, output_fmt="NLC")
            return Parts(result["image_features"], None, result["image_intermediates"][-1], net.grid_size)
        pooled_BD, patches_BPD = net(image_BCHW)
        if net.final_ln_after_pool:
            patches_BPD = net.ln_post(patches_BPD)
        kept = None if self.keep is None else getattr(net, self.keep).keep_BK
        return Parts(pooled_BD, None, patches_BPD, net.grid_size if kept is None else None)

    def layers(self, net: Any) -> list[list[str]]:
        """Patch and position embeddings, blocks, final norm with projection."""
        blocks = [f"transformer.resblocks.{index}." for index in range(len(net.transformer.resblocks))]
        names = [name for name, _ in net.named_parameters()]
        return by_depth(names, blocks, top=("ln_post", "proj", "attn_pool"), stem=("class_emb", "positional", "conv1"))

    def resize(self, net: Any, size: Size) -> None:
        """The table of learnt positions is resampled over the new grid; the class token keeps its own."""
        grid = (size[0] // net.patch_size[0], size[1] // net.patch_size[1])
        net.positional_embedding = _resample(net.positional_embedding, net.grid_size, grid)
        net.image_size, net.grid_size = size, grid


class ClipResNetAdapter(VisionAdapter):
    """`open_clip.ModifiedResNet`: four stages, and its attention pooling where the projection is wanted."""

    def __init__(self, net: Any, projection: bool) -> None:
        self.fixed_size = self.projection = projection  # only the attention pooling has positions
        if not projection:
            net.attnpool = nn.Identity()

    def parts(self, net: Any, image_BCHW: Tensor, level: int) -> Parts:
        """See the base class. Without the projection, the vector is the average of the last map."""
        check_level(level, 5, "open_clip's ResNet")
        result = net.forward_intermediates(image_BCHW, indices=sorted({5 + level, 4}))
        last = result["image_intermediates"][-1]
        pooled_BD = result["image_features"] if self.projection else last.mean(dim=(2, 3))
        return Parts(pooled_BD, None, *unfold(result["image_intermediates"][0]))

    def layers(self, net: Any) -> list[list[str]]:
        """Stem, stages, attention pooling."""
        names = [name for name, _ in net.named_parameters()]
        return by_depth(names, [f"layer{index}." for index in range(1, 5)], top=["attnpool."])

    def resize(self, net: Any, size: Size) -> None:
        """The positions of the attention pooling are resampled over the new grid."""
        pool, grid = net.attnpool, (size[0] // 32, size[1] // 32)
        side = round((pool.positional_embedding.shape[0] - 1) ** 0.5)
        pool.positional_embedding = _resample(pool.positional_embedding, (side, side), grid)


class ClipTimmAdapter(VisionAdapter):
    """`open_clip.TimmModel`: a timm trunk, and its head where the projection is wanted."""

    def __init__(self, net: Any, projection: bool) -> None:
        self.trunk = TimmAdapter(net.trunk)
        self.fixed_size = self.trunk.fixed_size
        self.keep = f"trunk.{self.trunk.keep}" if self.trunk.keep else None
        self.projection = projection
        if not projection:
            net.head = nn.Identity()

    def parts(self, net: Any, image_BCHW: Tensor, level: int) -> Parts:
        """See the base class."""
        parts = self.trunk.parts(net.trunk, image_BCHW, level)
        if not self.projection:
            return parts
        if hasattr(net.head, "pool") and parts.grid is not None:  # a head that pools the map by attention
            return parts._replace(pooled_BD=net.head(parts.patches_BPD.transpose(1, 2).unflatten(2, parts.grid)))
        return parts._replace(pooled_BD=net.head(parts.pooled_BD))

    def layers(self, net: Any) -> list[list[str]]:
        """The trunk's layers, then the head."""
        trunk = [[f"trunk.{name}" for name in group] for group in self.trunk.layers(net.trunk)]
        head = [f"head.{name}" for name, _ in net.head.named_parameters()]
        return [*trunk, head] if head else trunk

    def resize(self, net: Any, size: Size) -> None:
        """See `TimmAdapter.resize`."""
        self.trunk.resize(net.trunk, size)


def build_open_clip(name: str, arguments: Mapping[str, Any], projection: bool) -> Vision:
    """The image tower of an open_clip model, at random weights from torch's global generator.

    Args:
        name: open_clip's name of the model, or "custom" for one that `arguments` describes.
        arguments: fields of `open_clip.CLIPVisionCfg`, and `embed_dim`, that differ from the named model's.
        projection: whether the pooled vector goes through the tower's projection into the shared space.

    Raises ConfigError when the name or an argument is unknown or out of range.
    """
    import open_clip
    from open_clip.timm_model import TimmModel

    config: Any = {"embed_dim": 512, "vision_cfg": {}} if name == CUSTOM else open_clip.get_model_config(name)
    tower = config["vision_cfg"] | {key: value for key, value in arguments.items() if key != "embed_dim"}
    known = [field.name for field in dataclasses.fields(open_clip.CLIPVisionCfg)]
    unknown = sorted(set(tower) - set(known))
    if unknown:
        raise ConfigError(
            f"open_clip's image towers have no argument {', '.join(unknown)}: known are {', '.join(known)}"
        )
    embed_dim = int(arguments.get("embed_dim", config["embed_dim"]))
    tower["timm_model_pretrained"] = False
    quick_gelu = bool(config.get("quick_gelu", False))
    try:  # the whole model is the library's public way to a tower: the other one is made as small as can be
        net: Any = open_clip.CustomTextCLIP(embed_dim, tower, _SMALLEST_TEXT, quick_gelu=quick_gelu).visual
    except (TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        raise ConfigError(f"open_clip cannot build {name} with {dict(arguments)}: {error}") from error
    mean, std = _statistics(name)
    return Vision(
        net=net,
        adapter=_adapter(net, projection),
        image_size=_size(tower.get("image_size", 224)),
        heads=[] if projection else ["proj", "head.", "attnpool."],
        mean=mean,
        std=std,
        blocks="trunk.blocks." if isinstance(net, TimmModel) else "transformer.resblocks.",
        note="open_clip's are on the hub: give 'OWNER/NAME@COMMIT'",
    )


def _adapter(net: Any, projection: bool) -> VisionAdapter:
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer

    if isinstance(net, TimmModel):
        return ClipTimmAdapter(net, projection)
    if isinstance(net, VisionTransformer):
        return ClipTransformerAdapter(net, projection)
    return ClipResNetAdapter(net, projection)


def _statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that the model's first published weights were trained with."""
    import open_clip

    tags = [] if name == CUSTOM else open_clip.list_pretrained_tags_by_model(name)
    config = open_clip.get_pretrained_cfg(name, tags[0]) if tags else {}
    return tuple(config.get("mean") or CLIP_MEAN), tuple(config.get("std") or CLIP_STD)


def _resample(table_ND: nn.Parameter, old: Size, new: Size) -> nn.Parameter:
    """A table of one class position and old[0] * old[1] others over another grid, bicubic with antialiasing."""
    from timm.layers import resample_abs_pos_embed

    resampled = resample_abs_pos_embed(table_ND[None], new_size=list(new), old_size=list(old), num_prefix_tokens=1)
    return nn.Parameter(resampled[0].detach(), requires_grad=table_ND.requires_grad)


def _size(size: int | Size) -> Size:
    return (size, size) if isinstance(size, int) else size
