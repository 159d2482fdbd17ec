"""Writing of the heads of a dual-encoder for `zero_shot.py`, the loader in an exported folder."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from medvl.common.folders import write_json
from medvl.encoders.text.projections import CxrBertHead, MatrixHead
from medvl.errors import CheckpointError
from medvl.export.exporters import zero_shot
from medvl.export.exporters.common import difference, random_ids, random_pixels
from medvl.models.base import TwoTowers
from medvl.models.dual_encoders.bases.base import DualEncoder

LOADER = "zero_shot.py"
_IMAGE_POOLS = ("pooler", "first", "mean")
_TEXTS = ("Large left pleural effusion.", "No pneumothorax.")


def write_heads(model: TwoTowers, folder: Path, arguments: Mapping[str, Mapping[str, Any] | None]) -> dict[str, float]:
    """Write heads, settings and loader beside the encoders; return the differences of the loader's embeddings.

    Args:
        model: the exported system.
        folder: folder that already contains `image_encoder` and `text_encoder`.
        arguments: arguments of `AutoModel.from_pretrained` for "image" and "text"; None for an encoder in medvl's
            format.

    Returns an empty mapping, and writes nothing, where one vector for each image and text does not make the similarity,
    or the loader does not compute the same.
    """
    if not _compares_vectors(model):
        return {}
    heads = {"image": _image_layers(model, arguments["image"]), "text": _text_layers(model, arguments["text"])}
    layers = {side: head for side, head in heads.items() if head is not None}
    if len(layers) < 2:
        return {}
    tensors = nn.ModuleDict({side: nn.Sequential(*each) for side, each in layers.items()}).state_dict()
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / zero_shot.HEADS)
    shutil.copy(zero_shot.__file__, folder / LOADER)
    for pool in _IMAGE_POOLS if arguments["image"] is not None else ("medvl",):
        text_pool = "medvl" if arguments["text"] is None else model.text_encoder.pool
        pools = {"image": pool, "text": text_pool}
        sides = {
            side: {"pool": pools[side], "arguments": arguments[side], "head": [_describe(layer) for layer in each]}
            for side, each in layers.items()
        }
        max_tokens = None if model.tokenizer is None else model.config.max_tokens
        write_json(folder / zero_shot.SETTINGS, {**sides, "max_tokens": max_tokens})
        try:
            return _compare(model, folder)
        except (CheckpointError, RuntimeError, AttributeError, TypeError):  # another pool, perhaps
            continue
    for name in (zero_shot.HEADS, zero_shot.SETTINGS, LOADER):
        (folder / name).unlink()
    return {}


def _compares_vectors(model: TwoTowers) -> bool:
    names = ("encode_image", "encode_text", "similarity")
    kind = type(model)
    return isinstance(model, DualEncoder) and all(getattr(kind, name) is getattr(DualEncoder, name) for name in names)


def _image_layers(model: Any, arguments: Mapping[str, Any] | None) -> list[nn.Module] | None:
    matrix = getattr(model.image_encoder.backbone, "proj", None)  # CLIP's, inside open_clip's module
    inside = [MatrixHead(matrix)] if isinstance(matrix, nn.Parameter) and arguments is not None else []
    return _flatten(nn.Sequential(*inside, model.image_head))


def _text_layers(model: Any, arguments: Mapping[str, Any] | None) -> list[nn.Module] | None:
    projection = model.text_encoder.projection
    inside = [projection] if projection is not None and arguments is not None else []
    return _flatten(nn.Sequential(*inside, model.text_head))


def _flatten(module: nn.Module) -> list[nn.Module] | None:
    """Return the layers of a head, each of a kind in `zero_shot.LAYERS`; None where one is of another kind."""
    if isinstance(module, nn.Identity | nn.Dropout):
        return []
    if isinstance(module, MatrixHead):
        width, projected = module.matrix.shape
        linear = nn.Linear(width, projected, bias=False)
        linear.weight = nn.Parameter(module.matrix.detach().T)
        return [linear]
    if isinstance(module, CxrBertHead):
        module = nn.Sequential(module.dense_to_hidden, nn.GELU(), module.LayerNorm, module.dense_to_output)
    if isinstance(module, nn.Sequential):
        parts = [_flatten(child) for child in module]
        return None if None in parts else [layer for part in parts if part is not None for layer in part]
    return [module] if type(module).__name__ in zero_shot.LAYERS else None


def _describe(layer: nn.Module) -> list[Any]:
    """Return the name of a layer and its arguments."""
    arguments: list[Any] = []
    if isinstance(layer, nn.Linear):
        arguments = [layer.in_features, layer.out_features, layer.bias is not None]
    elif isinstance(layer, nn.LayerNorm):
        arguments = [list(layer.normalized_shape), layer.eps]
    return [type(layer).__name__, *arguments]


def _compare(model: Any, folder: Path) -> dict[str, float]:
    loaded = zero_shot.load(folder)
    pixels = random_pixels(model.image_encoder)
    ids = random_ids(model.text_encoder, None if model.tokenizer is None else model.tokenizer.sep_id)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, -3:] = False
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        "image embedding": (loaded.encode_image(pixels), model.encode_image(pixels)),
        "text embedding": (loaded.encode_text(ids, mask), model.encode_text(ids, mask)),
    }
    if model.tokenizer is not None:
        pairs["embedding of strings"] = (loaded.encode_text(_TEXTS), model.encode_text(_TEXTS))
    return {name: difference(f"the {name}", actual, expected) for name, (actual, expected) in pairs.items()}
