"""Parts that the exporters share: inputs for comparing outputs, the comparison, and the model
card.
"""

import copy
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import medvl
from medvl.common.files import write_json
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.text.adapters import CxrBertHead, MatrixHead
from medvl.encoders.text.factory import text_encoder_fields
from medvl.errors import CheckpointError, ConfigError
from medvl.export.exporters import zero_shot
from medvl.models.base import System, has_towers
from medvl.models.dual_encoders.bases.base import DualEncoder

TOLERANCE = 1e-3
"""Largest accepted difference of an output, relative to its largest value; other float32 kernels
give about 1e-6.
"""
_TEXT_TOKENS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """A model in another project's format, compared with medvl's on random inputs."""

    folder: Path
    differences: Mapping[str, float]
    """Output -> largest difference from medvl's, relative to medvl's largest value; NaN where it
    was not compared.
    """
    left_out: Mapping[str, str]
    """Part of the model -> why the format cannot hold it."""


def require_encoders(model: System) -> tuple[System, ImageEncoder]:
    """Return the model and its image encoder. Raises ConfigError unless it reads pixels and has
    a text encoder.
    """
    if has_towers(model) and isinstance(model.image_encoder, ImageEncoder):
        return model, model.image_encoder
    message = (
        f"{model.name} does not have an image and a text encoder: export the system that "
        f"it was made from"
    )
    raise ConfigError(message, "unsupported")


def random_pixels(encoder: ImageEncoder) -> Tensor:
    """Return random pixels (2, C, H, W), as after normalization."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, encoder.in_channels, *encoder.image_size, generator=generator)


def random_ids(encoder: TextEncoder, end_id: int | None) -> Tensor:
    """Return ids (2, T) without padding that end in `end_id`; no earlier id is padding or
    `end_id`.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = min(_TEXT_TOKENS, encoder.max_tokens)
    ids_BT = torch.randint(encoder.vocab_size, (2, tokens), generator=generator)
    special = {encoder.pad_id} if end_id is None else {encoder.pad_id, end_id}
    ordinary = next(number for number in range(encoder.vocab_size) if number not in special)
    for number in special:
        ids_BT = torch.where(ids_BT == number, ordinary, ids_BT)
    if end_id is not None:
        ids_BT[:, -1] = end_id
    return ids_BT


def save_text_model(model: System, net: Any, folder: Path) -> None:
    """Write a text model of transformers, with the attention dropout of its architecture.

    A medvl model with `config.attention_dropout` was trained with another, such as 0 for packed
    texts; whoever fine-tunes the export does not pack.

    Args:
        model: the medvl model.
        net: its text encoder as a model of transformers.
        folder: output folder.
    """
    net.save_pretrained(folder)
    if getattr(model.config, "attention_dropout", None) is not None:
        config = copy.deepcopy(net.config)
        given = {**text_encoder_fields(model.config.text_encoder), **model.config.text_arguments}
        default = type(config)().attention_probs_dropout_prob
        config.attention_probs_dropout_prob = given.get("attention_probs_dropout_prob", default)
        config.save_pretrained(folder)


def difference(name: str, actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected value.

    Raises CheckpointError if the shapes differ, or the difference is above `TOLERANCE`.
    """
    if actual.shape != expected.shape:
        message = f"expected {name} of shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
        raise CheckpointError(message, "mismatch")
    largest = float(
        (actual.double() - expected.double()).abs().max()
        / expected.double().abs().max().clamp(min=1e-12)
    )
    if not largest <= TOLERANCE:
        message = (
            f"{name} differs by {largest:.1e} of its largest value: this model cannot be "
            f"exported to this format"
        )
        raise CheckpointError(message, "mismatch")
    return largest


def write_card(
    folder: Path,
    model: System,
    *,
    usage: str,
    left_out: Mapping[str, str],
    library: str,
    inputs: Sequence[str] | None = None,
) -> None:
    """Write `README.md`: content, usage, inputs, missing parts and limits.

    Args:
        folder: folder of the exported model.
        model: the model.
        usage: Python code that loads and calls it.
        left_out: part of the model -> why it was not written.
        library: value of `library_name`.
        inputs: lines about the inputs; default: normalised pixels, for a model that has an image
            encoder.
    """
    if inputs is None:
        inputs = [f"Pixels: {_normalized_pixels(model)}"] if has_towers(model) else []
    missing = [f"- {part}: {why}" for part, why in left_out.items()] or ["- nothing"]
    names = (getattr(model.config, f"{side}_encoder", None) for side in ("image", "text"))
    encoders = [name.partition("{")[0] for name in names if name is not None]  # without fields
    multimodal = has_towers(model)
    tags = "medical-imaging, vision-language" if multimodal else "biomedical, fill-mask"
    lines = [
        "---",
        f"library_name: {library}",
        f"tags: [{tags}]",
        "---",
        "",
        f"# {model.name}, exported by medvl {medvl.__version__}",
        "",
        f"A `{model.name}` of medvl ({' and '.join(encoders)}).",
        "",
        "## Use",
        "",
        "```python",
        *usage.splitlines(),
        "```",
        "",
        *(line for each in inputs for line in (each, "")),
        "## Left out",
        "",
        *missing,
        "",
        "## Limits",
        "",
        "Research only; no medical device. Whoever shares these weights adds what they were "
        "trained on, under which",
        "licence and data use agreement, and how they were evaluated: medvl does not know it.",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _normalized_pixels(model: Any) -> str:
    encoder = model.image_encoder
    mean, std = (
        ", ".join(f"{value:.4f}" for value in values) for values in (encoder.mean, encoder.std)
    )
    height, width = encoder.image_size
    transform = model.transform
    kernel = f"{transform.fit}, resized by {transform.resize}"
    return (
        f"{encoder.in_channels} x {height} x {width} ({kernel}), scaled to 0..1, mean ({mean}), "
        f"standard deviation ({std})."
    )


# Writing of the heads of a dual-encoder for `zero_shot.py`, the loader in an exported folder.

LOADER = "zero_shot.py"
_IMAGE_POOLS = ("pooler", "first", "mean")
_TEXTS = ("Large left pleural effusion.", "No pneumothorax.")


def write_heads(
    model: System, folder: Path, arguments: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, float]:
    """Write heads, settings and loader beside the encoders; return the differences of the loader's
    embeddings.

    Args:
        model: the exported system.
        folder: folder that already contains `image_encoder` and `text_encoder`.
        arguments: arguments of `AutoModel.from_pretrained` for "image" and "text"; None for an
            encoder in medvl's format.

    Returns an empty mapping, and writes nothing, where one vector for each image and text does not
    make the similarity, or the loader does not compute the same.
    """
    if not _compares_vectors(model):
        return {}
    heads = {
        "image": _image_layers(model, arguments["image"]),
        "text": _text_layers(model, arguments["text"]),
    }
    layers = {side: head for side, head in heads.items() if head is not None}
    if len(layers) < 2:
        return {}
    tensors = nn.ModuleDict(
        {side: nn.Sequential(*each) for side, each in layers.items()}
    ).state_dict()
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        folder / zero_shot.HEADS,
    )
    shutil.copy(zero_shot.__file__, folder / LOADER)
    for pool in _IMAGE_POOLS if arguments["image"] is not None else ("medvl",):
        text_pool = "medvl" if arguments["text"] is None else model.text_encoder.pool
        pools = {"image": pool, "text": text_pool}
        sides = {
            side: {
                "pool": pools[side],
                "arguments": arguments[side],
                "head": [_describe(layer) for layer in each],
            }
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


def _compares_vectors(model: System) -> bool:
    names = ("encode_image", "encode_text", "similarity")
    kind = type(model)
    return isinstance(model, DualEncoder) and all(
        getattr(kind, name) is getattr(DualEncoder, name) for name in names
    )


def _image_layers(model: Any, arguments: Mapping[str, Any] | None) -> list[nn.Module] | None:
    backbone = model.image_encoder.backbone
    matrix = getattr(backbone, "proj", None)  # CLIP's, inside open_clip's module
    linear = getattr(backbone, "visual_projection", None)  # and inside that of transformers
    inside: list[nn.Module] = []
    if arguments is not None and isinstance(matrix, nn.Parameter):
        inside = [MatrixHead(matrix)]
    elif arguments is not None and isinstance(linear, nn.Linear):
        inside = [linear]
    return _flatten(nn.Sequential(*inside, model.image_head))


def _text_layers(model: Any, arguments: Mapping[str, Any] | None) -> list[nn.Module] | None:
    projection = model.text_encoder.projection
    inside = [projection] if projection is not None and arguments is not None else []
    return _flatten(nn.Sequential(*inside, model.text_head))


def _flatten(module: nn.Module) -> list[nn.Module] | None:
    """Return the layers of a head, each of a kind in `zero_shot.LAYERS`; None where one is of
    another kind.
    """
    if isinstance(module, nn.Identity | nn.Dropout):
        return []
    if isinstance(module, MatrixHead):
        width, projected = module.matrix.shape
        linear = nn.Linear(width, projected, bias=False)
        linear.weight = nn.Parameter(module.matrix.detach().T)
        return [linear]
    if isinstance(module, CxrBertHead):
        module = nn.Sequential(
            module.dense_to_hidden, nn.GELU(), module.LayerNorm, module.dense_to_output
        )
    if isinstance(module, nn.Sequential):
        parts = [_flatten(child) for child in module]
        return (
            None
            if None in parts
            else [layer for part in parts if part is not None for layer in part]
        )
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
    ids = random_ids(
        model.text_encoder, None if model.tokenizer is None else model.tokenizer.sep_id
    )
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, -3:] = False
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        "image embedding": (loaded.encode_image(pixels), model.encode_image(pixels)),
        "text embedding": (loaded.encode_text(ids, mask), model.encode_text(ids, mask)),
    }
    if model.tokenizer is not None:
        pairs["embedding of strings"] = (loaded.encode_text(_TEXTS), model.encode_text(_TEXTS))
    return {
        name: difference(f"the {name}", actual, expected)
        for name, (actual, expected) in pairs.items()
    }
