"""What a detector and a segmenter share: a frozen image encoder, and a small decoder on its grid of patches.

The encoder gives one vector a patch, a CNN's last map and a Transformer's tokens alike, and learns nothing: what the
decoder reaches is what the vectors hold. W is the decoder's width; h, w cells of its output.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, create_image_encoder
from medvl.errors import ConfigError
from medvl.models.base import System
from medvl.models.downstream.classifier import encoder_at
from medvl.models.downstream.dense_config import DenseConfig

_GROUPS = 8
PRIOR = 0.01
"""What a cell's probability begins at: cells of findings are few, and the rest would drown them at the start."""


class Decoder(nn.Module):
    """Patches to a finer grid: convolutions between doublings of it, no batch statistics.

    Small enough to be trained on a hundredth of the labels, and the same for every encoder but for its first layer.
    """

    def __init__(self, patch_dim: int, width: int, doublings: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.LayerNorm(patch_dim), nn.Linear(patch_dim, width))
        self.steps = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(_GROUPS, width), nn.GELU())
            for _ in range(doublings + 1)
        )

    def forward(self, patches_BPD: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, W, h, w), the sides of the grid doubled after every step but the last."""
        features_BWhw = self.enter(patches_BPD).transpose(1, 2).unflatten(2, grid)
        for number, step in enumerate(self.steps):
            if number:
                features_BWhw = F.interpolate(features_BWhw, scale_factor=2, mode="bilinear", align_corners=False)
            features_BWhw = step(features_BWhw)
        return features_BWhw


class DenseModel(System):
    """A decoder on a frozen encoder, which stays in eval mode and of which no gradient is taken.

    Attributes:
        grid: (h, w) of the decoder's output for images as `transform` makes them.
    """

    config: Any

    Config: ClassVar[type[DenseConfig]]

    def __init__(self, config: DenseConfig, image_encoder: ImageEncoder, transform: EvalTransform) -> None:
        super().__init__(config, transform=transform, tokenizer=None)
        self.image_encoder = image_encoder
        image_encoder.requires_grad_(False)
        image_encoder.keep_frozen_in_eval(True)
        cells = image_encoder.grid(transform.size, transform.size)
        if cells is None or not image_encoder.patch_dim:
            raise ConfigError(f"{image_encoder.name} has no grid of patches: nothing can be located in it")
        self.grid = (cells[0] << config.doublings, cells[1] << config.doublings)
        self.decoder = Decoder(image_encoder.patch_dim, config.width, config.doublings)

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        if tokenizer is not None:
            raise ConfigError(f"a {cls.name} reads no text: leave the tokenizer out")
        encoder = create_image_encoder(pretrained=pretrained, **config.encoder)
        return cls(config, encoder, EvalTransform(**config.transform))

    @classmethod
    def on(cls, image_encoder: ImageEncoder, labels: Sequence[str], transform: EvalTransform, **settings: Any) -> Self:
        """A fresh decoder on an encoder, which is taken as it is and not copied; `settings` are those of `Config`."""
        config = cls.Config(
            encoder=image_encoder.config, transform=dataclasses.asdict(transform), labels=tuple(labels), **settings
        )
        return cls(config, image_encoder, transform)

    def decode(self, image_BCHW: Tensor) -> Tensor:
        """(B, W, h, w) of images as `transform` makes them."""
        with torch.no_grad():
            features = self.image_encoder(image_BCHW)
        decoded_BWhw: Tensor = self.decoder(features.patches_BPD, features.grid)
        return decoded_BWhw


def rare(layer: nn.Conv2d) -> nn.Conv2d:
    """A layer of logits that begins near `PRIOR` everywhere (Lin et al., arXiv 1708.02002, section 3.3)."""
    nn.init.normal_(layer.weight, std=0.01)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, -math.log((1 - PRIOR) / PRIOR))
    return layer


Model = TypeVar("Model", bound=DenseModel)


def create_dense(
    cls: type[Model],
    start: Path | str,
    labels: Sequence[str],
    *,
    size: int | None = None,
    patch_level: int | None = None,
    **settings: Any,
) -> Model:
    """A fresh decoder on the image encoder of a checkpoint of any system, or on an encoder by name.

    Args:
        cls: `Detector` or `Segmenter`.
        start: folder of a checkpoint; or the name of an image encoder, which starts from its published weights.
        labels: what is to be found.
        size: height and width of the input, for encoders that take any; None is that of the start.
        patch_level: which of the encoder's grids, -1 being its last and -2 one of finer cells; None is the start's.
        settings: of `cls.Config`.

    Raises:
        CheckpointError: the folder is no whole checkpoint.
        ConfigError: there is no image encoder that reads pixels, or it does not take that size or has no such grid.
        WeightsError: published weights cannot be had.
    """
    encoder, transform = encoder_at(start)
    changed = dict(encoder.config)
    if size is not None:
        transform = dataclasses.replace(transform, size=size)
        changed["image_size"] = (size, size)
    if patch_level is not None:
        changed["patch_level"] = patch_level
    if changed != encoder.config:
        encoder = _same_weights(encoder, changed)
    return cls.on(encoder, labels, transform, **settings)


def _same_weights(encoder: ImageEncoder, arguments: dict[str, Any]) -> ImageEncoder:
    other = create_image_encoder(pretrained=False, **arguments)
    ours, theirs = other.state_dict(), encoder.state_dict()
    if {name: tensor.shape for name, tensor in ours.items()} != {name: tensor.shape for name, tensor in theirs.items()}:
        raise ConfigError(f"{encoder.name} has learnt positions for {encoder.image_size} pixels: leave size unset")
    other.load_state_dict(theirs, strict=True)
    return other
