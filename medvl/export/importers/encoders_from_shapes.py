"""Encoders that fit the tensors of a file: sizes are read off the shapes, the rest is the published system's."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from medvl.encoders import ImageEncoder, TextEncoder, create_image_encoder, create_text_encoder
from medvl.encoders.presets import TEXT_PRESETS
from medvl.errors import WeightsError
from medvl.export.importers.backbones import IMAGE, TEXT, TEXT_PROJECTION
from medvl.export.importers.key_map import Shapes

Options = Mapping[str, Any]
"""Arguments of `create_image_encoder` or `create_text_encoder`."""

_HEAD_WIDTH = 64  # of every BERT, vision Transformer and CLIP of the published sizes; no file says it
_RESNETS: Mapping[tuple[bool, tuple[int, ...]], str] = {
    (True, (3, 4, 6, 3)): "resnet50",
    (True, (3, 4, 23, 3)): "timm:resnet101",
    (False, (2, 2, 2, 2)): "resnet18",
    (False, (3, 4, 6, 3)): "timm:resnet34",
}
"""(bottlenecks, blocks a stage) -> name."""
_RESNET_CHANNELS = (64, 128, 256, 512)


class Towers(nn.Module):
    """An image encoder, a text encoder, or both, where a file has no more that medvl knows."""

    def __init__(self, image_encoder: ImageEncoder | None, text_encoder: TextEncoder | None) -> None:
        super().__init__()
        self.image_encoder, self.text_encoder = image_encoder, text_encoder


def build_towers(shapes: Shapes, image: Options | None, text: Options | None) -> Towers:
    """Both encoders, at random weights, of the sizes that these tensors (by our names) have.

    Args:
        shapes: of the tensors.
        image, text: what the shapes do not say; None where the file has no such tower.

    Raises:
        WeightsError: the tensors are of no architecture that is known here.
    """
    image_encoder = None if image is None else create_image_encoder(**image_arguments(shapes, image))
    if text is None:
        return Towers(image_encoder, None)
    projected = any(name.startswith(TEXT_PROJECTION) for name in shapes)
    arguments = text_arguments(shapes, {"projection": projected, **text})
    return Towers(image_encoder, create_text_encoder(**arguments))


def below(shapes: Shapes, prefix: str) -> Shapes:
    """Those of one child, by its own names."""
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def image_arguments(shapes: Shapes, options: Options) -> dict[str, Any]:
    """Arguments of `create_image_encoder`. Raises WeightsError where the tensors are of no known architecture."""
    if "name" in options:
        return dict(options)
    shapes = below(shapes, IMAGE)
    if "patch_embed.norm.weight" in shapes:
        return _swin(shapes) | dict(options)
    if "class_embedding" in shapes:
        return _clip_image(shapes) | dict(options)
    if "cls_token" in shapes and "pos_embed" in shapes:
        return _vision_transformer(shapes) | dict(options)
    if "conv1.weight" in shapes and "layer1.0.conv1.weight" in shapes:
        return _resnet(shapes) | dict(options)
    raise WeightsError(f"the image tower is of no architecture that is known here: it has {_some(shapes)}")


def text_arguments(shapes: Shapes, options: Options) -> dict[str, Any]:
    """Arguments of `create_text_encoder`; `name` in `options` is a preset, but for CLIP's tower.

    Raises WeightsError as `image_arguments` does.
    """
    tower = below(shapes, TEXT)
    if "embeddings.word_embeddings.weight" in tower:
        return _bert(tower, str(options["name"])) | dict(options)
    if "token_embedding.weight" not in tower:
        raise WeightsError(f"the text tower is of no architecture that is known here: it has {_some(tower)}")
    return _clip_text(tower, shapes.get(f"{TEXT_PROJECTION}matrix", (0, 512))[1]) | dict(options)


def count(shapes: Shapes, beginning: str) -> int:
    """How many numbered children there are behind a beginning, as in `blocks.11.norm1.weight`."""
    numbers = (re.match(rf"{re.escape(beginning)}(\d+)\.", name) for name in shapes)
    return max((int(number[1]) + 1 for number in numbers if number), default=0)


def heads(width: int) -> int:
    """Of attention, in a Transformer of this width."""
    return max(1, width // _HEAD_WIDTH)


def _resnet(shapes: Shapes) -> dict[str, Any]:
    layers = tuple(count(shapes, f"layer{stage}.") for stage in range(1, 5))
    bottleneck = "layer1.0.conv3.weight" in shapes
    channels = tuple(
        shapes.get(f"layer{stage + 1}.0.conv1.weight", (published,))[0]
        for stage, published in enumerate(_RESNET_CHANNELS)
    )
    name = _RESNETS.get((bottleneck, layers))
    arguments: dict[str, Any] = {"name": name or ("resnet50" if bottleneck else "resnet18")}
    if name is None:
        arguments["layers"] = layers
    if channels != _RESNET_CHANNELS:
        arguments["channels"] = channels
    grey = shapes["conv1.weight"][1] == 1
    return arguments | ({"in_channels": 1} if grey else {})


def _vision_transformer(shapes: Shapes) -> dict[str, Any]:
    width, _, patch, _ = shapes["patch_embed.proj.weight"]
    side = round((shapes["pos_embed"][1] - 1) ** 0.5) * patch
    depth, inside = count(shapes, "blocks."), shapes["blocks.0.mlp.fc1.weight"][0]
    found = {
        "patch_size": patch,
        "embed_dim": width,
        "depth": depth,
        "num_heads": heads(width),
        "mlp_ratio": inside / width,
    }
    base = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12, "mlp_ratio": 4.0}
    return {"name": "vit_b16", "image_size": side, **_differing(found, base)}


def _clip_image(shapes: Shapes) -> dict[str, Any]:
    width, _, patch, _ = shapes["conv1.weight"]
    side = round((shapes["positional_embedding"][0] - 1) ** 0.5) * patch
    embed_dim = shapes.get("proj", (0, 512))[1]
    found = {
        "patch_size": patch,
        "width": width,
        "layers": count(shapes, "transformer.resblocks."),
        "embed_dim": embed_dim,
    }
    base = {"patch_size": 16 if patch == 16 else 32, "width": 768, "layers": 12, "embed_dim": 512}
    name = f"clip_vit_b{base['patch_size']}"
    return {"name": name, "image_size": side, "projection": "proj" in shapes, **_differing(found, base)}


def _clip_text(shapes: Shapes, embed_dim: int) -> dict[str, Any]:
    words, width = shapes["token_embedding.weight"]
    found = {
        "vocab_size": words,
        "hidden_size": width,
        "num_hidden_layers": count(shapes, "transformer.resblocks."),
        "num_attention_heads": heads(width),
        "max_position_embeddings": shapes["positional_embedding"][0],
        "embed_dim": embed_dim,
    }
    base = {
        "vocab_size": 49408,
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "embed_dim": 512,
    }
    return {"name": "clip_text", **_differing(found, base)}


def _swin(shapes: Shapes) -> dict[str, Any]:
    depths = tuple(count(shapes, f"layers.{stage}.blocks.") for stage in range(count(shapes, "layers.")))
    tables = [shapes[f"layers.{stage}.blocks.0.attn.relative_position_bias_table"] for stage in range(len(depths))]
    found = {
        "embed_dim": shapes["patch_embed.proj.weight"][0],
        "depths": depths,
        "num_heads": tuple(table[1] for table in tables),
        "window_size": (round(tables[0][0] ** 0.5) + 1) // 2,
    }
    base = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24), "window_size": 7}
    return {"name": "swin_tiny", **_differing(found, base)}


def _bert(shapes: Shapes, preset: str) -> dict[str, Any]:
    words, width = shapes["embeddings.word_embeddings.weight"]
    found = {
        "vocab_size": words,
        "hidden_size": width,
        "num_hidden_layers": count(shapes, "encoder.layer."),
        "num_attention_heads": heads(width),
        "intermediate_size": shapes["encoder.layer.0.intermediate.dense.weight"][0],
        "max_position_embeddings": shapes["embeddings.position_embeddings.weight"][0],
    }
    return _differing(found, TEXT_PRESETS[preset].arguments)


def _differing(found: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if base.get(key) != value}


def _some(shapes: Shapes) -> str:
    return ", ".join(list(shapes)[:3]) or "no tensors"
