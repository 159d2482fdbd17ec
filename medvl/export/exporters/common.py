"""Parts that the exporters share: inputs for comparing outputs, the comparison, and the model card."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import medvl
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.text.factory import text_encoder_fields
from medvl.errors import CheckpointError, ConfigError
from medvl.models.base import System, TwoTowers

TOLERANCE = 1e-3
"""Largest accepted difference of an output, relative to its largest value; other float32 kernels give about 1e-6."""
_TEXT_TOKENS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """A model in another project's format, compared with medvl's on random inputs."""

    folder: Path
    differences: Mapping[str, float]
    """Output -> largest difference from medvl's, relative to medvl's largest value; NaN where it was not compared."""
    left_out: Mapping[str, str]
    """Part of the model -> why the format cannot hold it."""


def require_encoders(model: System) -> tuple[TwoTowers, ImageEncoder]:
    """Return the model and its image encoder. Raises ConfigError unless it reads pixels and has a text encoder."""
    if isinstance(model, TwoTowers) and isinstance(model.image_encoder, ImageEncoder):
        return model, model.image_encoder
    message = f"{model.name} does not have an image and a text encoder: export the system that it was made from"
    raise ConfigError(message, "unsupported")


def random_pixels(encoder: ImageEncoder) -> Tensor:
    """Return random pixels (2, C, H, W), as after normalization."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, encoder.in_channels, *encoder.image_size, generator=generator)


def random_ids(encoder: TextEncoder, end_id: int | None) -> Tensor:
    """Return ids (2, T) without padding that end in `end_id`; no earlier id is padding or `end_id`."""
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

    A medvl model with `config.attention_dropout` was trained with another, such as 0 for packed texts; whoever
    fine-tunes the export does not pack.

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
    largest = float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-12))
    if not largest <= TOLERANCE:
        message = f"{name} differs by {largest:.1e} of its largest value: this model cannot be exported to this format"
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
        inputs: lines about the inputs; default: normalised pixels, for a model that has an image encoder.
    """
    if inputs is None:
        inputs = [f"Pixels: {_normalized_pixels(model)}"] if isinstance(model, TwoTowers) else []
    missing = [f"- {part}: {why}" for part, why in left_out.items()] or ["- nothing"]
    names = (getattr(model.config, f"{side}_encoder", None) for side in ("image", "text"))
    encoders = [name for name in names if name is not None]
    lines = [
        "---",
        f"library_name: {library}",
        f"tags: [{'medical-imaging, vision-language' if isinstance(model, TwoTowers) else 'biomedical, fill-mask'}]",
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
        "Research only; no medical device. Whoever shares these weights adds what they were trained on, under which",
        "licence and data use agreement, and how they were evaluated: medvl does not know it.",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _normalized_pixels(model: Any) -> str:
    encoder = model.image_encoder
    mean, std = (", ".join(f"{value:.4f}" for value in values) for values in (encoder.mean, encoder.std))
    height, width = encoder.image_size
    return f"{encoder.in_channels} x {height} x {width}, scaled to 0..1, mean ({mean}), standard deviation ({std})."
