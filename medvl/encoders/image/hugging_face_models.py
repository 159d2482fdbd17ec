"""Image encoders from transformers: the image towers of SigLIP and CLIP, DINOv2 and ViT.

The library's modules are built, and run part by part: positions, blocks, the last norm, pooling.
Images of another size than the file's get interpolated positions, by the rule of each class.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medvl.encoders.base import group_by_depth
from medvl.encoders.hugging_face import STATISTICS, check_activation, check_fields
from medvl.encoders.image.adapter import (
    PatchSelection,
    Size,
    VisionAdapter,
    VisionBackbone,
    VisionOutput,
    check_level,
)
from medvl.errors import ConfigError

_SELECTION = "patch_selection"
_VISION = "vision_model."
_PROJECTION = "visual_projection"
_MASK_TOKEN = "mask_token"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """Names of the modules of one class."""

    network: str
    """Class in transformers."""
    blocks: str
    attention: str
    """Attention in a block; its layers are `q_proj`, `k_proj`, `v_proj`."""
    last_norm: str
    interpolates: bool = False
    """Whether the embeddings always interpolate positions; others are asked to."""
    has_class_token: bool = True


_PARTS: Mapping[str, _Parts] = {
    "siglip_vision_model": _Parts(
        network="SiglipVisionModel", blocks="encoder.layers", attention="self_attn",
        last_norm="post_layernorm", has_class_token=False,
    ),
    "clip_vision_model": _Parts(
        network="CLIPVisionModel", blocks="encoder.layers", attention="self_attn",
        last_norm="post_layernorm",
    ),
    "dinov2": _Parts(
        network="Dinov2Model", blocks="encoder.layer", attention="attention",
        last_norm="layernorm", interpolates=True,
    ),
    "dinov2_with_registers": _Parts(
        network="Dinov2WithRegistersModel", blocks="encoder.layer", attention="attention",
        last_norm="layernorm", interpolates=True,
    ),
    "vit": _Parts(
        network="ViTModel", blocks="layers", attention="attention", last_norm="layernorm",
    ),
}  # fmt: skip

_OTHER_PARTS = (
    *(_PROJECTION, "text_model.", "text_projection", "logit_scale", "logit_bias"),
    *("classifier.", "decoder.", "pooler.", "lm_head.", "dino_head.", "ibot_head."),
    *("embeddings.position_ids", "embeddings.mask_token"),
)
"""Beginnings of names in published files that belong to no image encoder: texts, heads, poolers,
the counter of positions that older transformers stored, the token of masked patches.
"""


class HuggingFaceAdapter(VisionAdapter):
    """Adapter for the image towers of transformers: all patches after the last norm, and the
    attention head of SigLIP or the class token after the last norm.
    """

    def __init__(self, net: Any, kind: str, *, projection: bool) -> None:
        self._kind = kind
        self._parts = _PARTS[kind]
        self._root = _VISION if projection and kind == "clip_vision_model" else ""
        config = net.config
        self._side = _sides(config.image_size)
        self._patch = _sides(config.patch_size)
        registers = int(getattr(config, "num_register_tokens", 0))
        self.prefix = 1 + registers if self._parts.has_class_token else 0
        whole = all(side % patch == 0 for side, patch in zip(self._side, self._patch, strict=True))
        self.patch_size = self._patch if whole else (1, 1)  # So400m/14 crops 384 pixels to 378
        self.has_attention = self._parts.has_class_token
        self.keep = f"{self._root}{_SELECTION}"
        self._tower(net).add_module(_SELECTION, PatchSelection(self.prefix))

    def encode(self, net: Any, image_BCHW: Tensor, level: int) -> VisionOutput:
        """Encode pixels; there is one level, -1."""
        check_level(level, 1, type(net).__name__)
        hidden_BTD = self.embed(net, image_BCHW)
        for block in self._blocks(net):
            hidden_BTD = block(hidden_BTD, None)
        tower = self._tower(net)
        normed_BTD = getattr(tower, self._parts.last_norm)(hidden_BTD)
        pooled_BD = normed_BTD[:, 0] if self.prefix else tower.head(normed_BTD)
        if self._root:
            pooled_BD = getattr(net, _PROJECTION)(pooled_BD)
        height, width = image_BCHW.shape[2:]
        grid = height // self._patch[0], width // self._patch[1]
        is_partial = getattr(tower, _SELECTION).is_partial
        return VisionOutput(
            pooled_BD,
            normed_BTD[:, : self.prefix] if self.prefix else None,
            normed_BTD[:, self.prefix :],
            None if is_partial else grid,
        )

    def embed(self, net: Any, image_BCHW: Tensor) -> Tensor:
        """Return the input of the first block, (B, N + P, D): after CLIP's first norm."""
        tower = self._tower(net)
        options = {}
        if not self._parts.interpolates:
            options["interpolate_pos_encoding"] = tuple(image_BCHW.shape[2:]) != self._side
        tokens_BTD = getattr(tower, _SELECTION)(tower.embeddings(image_BCHW, **options))
        hidden_BTD: Tensor = (
            tower.pre_layrnorm(tokens_BTD) if hasattr(tower, "pre_layrnorm") else tokens_BTD
        )
        return hidden_BTD

    def encode_tokens(
        self, net: Any, hidden_BTD: Tensor, attend_BQT: Tensor | None
    ) -> Sequence[Tensor]:
        states = [hidden_BTD]
        mask_B1QT = None if attend_BQT is None else attend_BQT[:, None]
        for block in self._blocks(net):
            states.append(block(states[-1], mask_B1QT))
        return [*states[:-1], getattr(self._tower(net), self._parts.last_norm)(states[-1])]

    @contextlib.contextmanager
    def record_attention(self, net: Any) -> Iterator[list[Tensor]]:
        """Compute softmax(q k^T / sqrt(d)) of one query again, because fused attention returns
        no weights.
        """
        if not self.has_attention:
            super().record_attention(net)
        recorded: list[Tensor] = []

        def record(attention: Any, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> None:
            states_BTD = inputs[0] if inputs else options["hidden_states"]
            recorded.append(_class_attention(attention, states_BTD)[:, self.prefix :])

        attention = getattr(self._blocks(net)[-1], self._parts.attention)
        hook = attention.register_forward_pre_hook(record, with_kwargs=True)
        try:
            yield recorded
        finally:
            hook.remove()

    def layers(self, net: Any) -> list[list[str]]:
        """Return the parameters of the embeddings, the blocks, and the last norm with the pooling
        and the projection.
        """
        root = f"{self._root}{self._parts.blocks}"
        blocks = [f"{root}.{index}." for index in range(len(self._blocks(net)))]
        top = (f"{self._root}{self._parts.last_norm}.", f"{self._root}head.", _PROJECTION)
        stem = (f"{self._root}embeddings.", f"{self._root}pre_layrnorm.")
        return group_by_depth(
            [name for name, _ in net.named_parameters()], blocks, top=top, stem=stem
        )

    def take_grey(self, net: Any) -> None:
        super().take_grey(net)
        for module in net.modules():
            if hasattr(module, "num_channels"):
                module.num_channels = 1
        net.config.num_channels = 1

    def _tower(self, net: Any) -> Any:
        return net.vision_model if self._root else net

    def _blocks(self, net: Any) -> Sequence[nn.Module]:
        blocks: Any = self._tower(net).get_submodule(self._parts.blocks)
        return list(blocks)


def build_hugging_face(kind: str, arguments: Mapping[str, Any], projection: bool) -> VisionBackbone:
    """Build an image tower of transformers, with random weights from torch's global generator.

    Poolers and the heads of classifiers are not built. The token of masked patches, which no output
    depends on, is kept as a buffer, so that files go back whole.

    Args:
        kind: model type, one of `medvl.encoders.hugging_face.IMAGE_KINDS`.
        arguments: fields of its configuration that differ from its defaults.
        projection: whether to project CLIP's pooled vector into the shared space; SigLIP's is in
            it, and other models have none.

    Raises:
        ConfigError: "unknown_name" for the type or a field, "unsupported" for what medvl cannot
            honour, "out_of_range" if transformers rejects the values.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    name = f"hf:{kind}"
    if kind not in _PARTS:
        message = f"{name} is no image encoder: expected hf:FOLDER or hf: with {', '.join(_PARTS)}"
        raise ConfigError(message, "unknown_name", field="name")
    check_fields(name, arguments, transformers.AutoConfig.for_model(kind).to_dict())
    if "hidden_act" in arguments:
        check_activation(arguments["hidden_act"], name)
    if arguments.get("num_channels", 3) != 3:
        message = f"{name}: expected num_channels 3, got {arguments['num_channels']}"
        raise ConfigError(message, "unsupported", field="num_channels")
    if not arguments.get("vision_use_head", True):
        message = f"{name}: a SigLIP without its attention head (vision_use_head) pools nothing"
        raise ConfigError(message, "unsupported", field="vision_use_head")
    network = _PARTS[kind].network + ("WithProjection" if _projects(kind, projection) else "")
    options = {"add_pooling_layer": False} if kind == "vit" else {}
    try:
        config = transformers.AutoConfig.for_model(kind, **arguments, attn_implementation="sdpa")
        net: Any = getattr(transformers, network)(config, **options)
    except (
        *(StrictDataclassError, TypeError, ValueError, AssertionError, RuntimeError),
        ZeroDivisionError,
    ) as error:
        message = f"transformers cannot build {name} with {dict(arguments)}: {error}"
        raise ConfigError(message, "out_of_range") from error
    root = _VISION if _projects(kind, projection) else ""
    _make_buffer(net.get_submodule(f"{root}embeddings"))
    names = list(net.state_dict())
    mean, std = STATISTICS[kind]
    return VisionBackbone(
        net=net,
        adapter=HuggingFaceAdapter(net, kind, projection=projection),
        image_size=_sides(config.image_size),
        ignored_heads=[
            part for part in _OTHER_PARTS if not any(name.startswith(part) for name in names)
        ],
        mean=mean,
        std=std,
        block_prefix=f"{root}{_PARTS[kind].blocks}.",
        note="give a folder as hf:FOLDER, or 'OWNER/NAME@COMMIT' as pretrained",
        rename=lambda tensors: published_names(tensors, kind, projection=projection),
    )


def _projects(kind: str, projection: bool) -> bool:
    """Return whether a tower has a projection behind it."""
    return projection and kind == "clip_vision_model"


def _make_buffer(embeddings: Any) -> None:
    token = getattr(embeddings, _MASK_TOKEN, None)
    if token is not None:
        delattr(embeddings, _MASK_TOKEN)
        embeddings.register_buffer(_MASK_TOKEN, token.detach())


def _sides(size: int | Sequence[int]) -> Size:
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


@torch.no_grad()
def _class_attention(attention: Any, states_BTD: Tensor) -> Tensor:
    """Return (B, T) float32: the attention from the first token, averaged over heads, without
    dropout.
    """
    heads = (-1, attention.head_dim)
    query_B1hd = attention.q_proj(states_BTD[:, :1]).unflatten(2, heads)
    key_BThd = attention.k_proj(states_BTD).unflatten(2, heads)
    scores_BTh = (query_B1hd.float() * key_BThd.float()).sum(dim=3) * attention.head_dim**-0.5
    return scores_BTh.softmax(dim=1).mean(dim=2)


# Names of published files.

_ROOTS = re.compile(r"(backbone|siglip|clip|vit|dinov2|dinov2_with_registers|vision_model)\.")
"""Beginnings of names that wrap a tower: a whole model, a classifier, a teacher."""
_RENAMED: Sequence[tuple[str, str]] = (
    # DINOv2 and ViT of transformers before version 5, as all published files have them
    (r"(layer\.\d+\.attention)\.attention\.query\.", r"\1.q_proj."),
    (r"(layer\.\d+\.attention)\.attention\.key\.", r"\1.k_proj."),
    (r"(layer\.\d+\.attention)\.attention\.value\.", r"\1.v_proj."),
    (r"(layer\.\d+\.attention)\.output\.dense\.", r"\1.o_proj."),
    (r"(layer\.\d+\.mlp)\.weights_out\.", r"\1.down_proj."),
    (r"(layer\.\d+)\.intermediate\.dense\.", r"\1.mlp.fc1."),
    (r"(layer\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    # DINOv2's own code, whose blocks may be numbered inside of a shard
    (r"^(cls_token|mask_token|register_tokens)$", r"embeddings.\1"),
    (r"^pos_embed$", "embeddings.position_embeddings"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embeddings.projection."),
    (r"^norm\.", "layernorm."),
    (r"^blocks\.(?:\d+\.)?(\d+)\.", r"encoder.layer.\1."),
    (r"(layer\.\d+)\.attn\.qkv\.", r"\1.attention.qkv."),
    (r"(layer\.\d+)\.attn\.proj\.", r"\1.attention.o_proj."),
    (r"(layer\.\d+)\.ls([12])\.gamma$", r"\1.layer_scale\2.lambda1"),
    (r"(layer\.\d+\.mlp)\.w12\.", r"\1.weights_in."),
    (r"(layer\.\d+\.mlp)\.w3\.", r"\1.down_proj."),
)
"""Expression of a name in a file -> the name in the model of transformers 5."""
_FUSED: Mapping[str, Sequence[str]] = {
    ".mlp.weights_in.": (".mlp.gate_proj.", ".mlp.up_proj."),
    ".attention.qkv.": (".attention.q_proj.", ".attention.k_proj.", ".attention.v_proj."),
}
"""Part of a name -> those of equal pieces along the first axis."""


def published_names(
    tensors: Mapping[str, Tensor], kind: str, *, projection: bool
) -> dict[str, Tensor]:
    """Return the tensors of a published file by the names of the model in transformers 5.

    Files of earlier versions, of models around the tower, and of DINOv2's own code have others.
    Names that are right already stay.
    """
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key
        while (match := _ROOTS.match(name)) is not None:
            name = name[match.end() :]
        if kind in ("dinov2", "dinov2_with_registers", "vit"):
            for expression, target in _RENAMED:
                name = re.sub(expression, target, name)
            if kind == "vit":
                name = name.replace("encoder.layer.", "layers.")
        fused = next((part for part in _FUSED if part in name and tensor.ndim), None)
        if fused is None:
            renamed[name] = tensor
            continue
        names = [name.replace(fused, new) for new in _FUSED[fused]]
        renamed |= zip(names, tensor.chunk(len(names)), strict=False)
    if _projects(kind, projection):
        renamed = {
            name if name.startswith(_OTHER_PARTS) else f"{_VISION}{name}": tensor
            for name, tensor in renamed.items()
        }
    return renamed
