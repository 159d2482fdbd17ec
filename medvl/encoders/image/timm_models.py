"""Image encoders from timm."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
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
        rename=_rename_eva if type(net).__name__ == "Eva" else None,
        note=f"timm's are in the repository {repository}: pass '{repository}@COMMIT'"
        if repository
        else "",
    )


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
