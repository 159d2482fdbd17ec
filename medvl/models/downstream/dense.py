"""Base of detectors and segmenters: an image encoder, and a small decoder on its grid of patches.

The encoder gives one vector for each patch, from a CNN's last feature map or a Transformer's
tokens. By default it is frozen, so that results measure what the vectors contain. W is the
decoder's width; h, w cells of its output.

An encoder that stretches its images (GLoRIA and MGCA, from 224 to 299 pixels) does so here too,
because its vectors are those of that scale; boxes and masks stay in pixels of the transform's
image, over which the grid is spread. With a size of one's own the encoder is the backbone alone and
reads the images at that size, as the U-Nets of these systems do.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_choice, check_labels, check_multiple, check_within
from medvl.data.loading.dense_targets import DenseBatch
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, create_image_encoder, parameter_groups
from medvl.encoders.regions import RegionEncoder
from medvl.errors import ConfigError
from medvl.models.base import EncoderArguments, ImageConfig, System
from medvl.models.checkpoint_folder import copy_training
from medvl.models.downstream.classifier import check_encoder, encoder_at
from medvl.models.factory import create_model
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.heatmaps import on_image
from medvl.models.registry import register_system
from medvl.schema import Batch, ImageFeatures, Losses

_GROUPS = 8
PRIOR = 0.01
"""Initial probability of a cell: few cells contain a finding, and negatives would dominate the
first steps.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig(ImageConfig):
    """Settings of an image encoder with a small decoder on its grid of patches."""

    encoder: Mapping[str, Any]
    """Arguments of `create_image_encoder`, including its name."""
    transform: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `EvalTransform`."""
    labels: tuple[str, ...]
    width: int = 128
    """Channels of the decoder."""
    doublings: int = 2
    """Number of times that the decoder doubles the encoder's grid: 7 x 7 cells become 28 x 28."""
    frozen_encoder: bool = True
    """Train the decoder only, with the encoder in eval mode."""
    head_lr_mult: float = 1.0
    """Learning rate of decoder and heads, as a multiple of the encoder's; unused if the encoder
    is frozen.
    """

    def __post_init__(self) -> None:
        check_labels(self.labels, "labels")
        check_within(self, "(0, inf)", "width", "head_lr_mult")
        check_within(self, "[0, 5]", "doublings")
        check_multiple(self, 8, "width")
        check_encoder(self.encoder)


class Decoder(nn.Module):
    """Convolutions on a grid that doubles between them, without batch statistics.

    Small enough for a hundredth of the labels, and the same for every encoder except its first
    layer.
    """

    def __init__(self, patch_dim: int, width: int, doublings: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.LayerNorm(patch_dim), nn.Linear(patch_dim, width))
        self.steps = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.GroupNorm(_GROUPS, width),
                nn.GELU(),
            )
            for _ in range(doublings + 1)
        )

    def forward(self, patches_BPD: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, W, h, w): the grid's sides are doubled after every step but the last."""
        features_BWhw = self.enter(patches_BPD).transpose(1, 2).unflatten(2, grid)
        for number, step in enumerate(self.steps):
            if number:
                features_BWhw = F.interpolate(
                    features_BWhw, scale_factor=2, mode="bilinear", align_corners=False
                )
            features_BWhw = step(features_BWhw)
        return features_BWhw


class DenseModel(System):
    """A decoder on an image encoder. A frozen encoder stays in eval mode and gets no gradient; one
    that is not is trained as a whole, also what its system's pretraining froze.

    A system that reads text too sets `reads_text` and overrides `patch_features`.

    Attributes:
        grid: (h, w) of the decoder's output for images of `transform`.
    """

    config: Any
    image_encoder: ImageEncoder
    Config: ClassVar[type[DenseConfig]]
    reads_text: ClassVar[bool] = False
    """Whether `patch_features` uses the texts of a batch, and the model needs a tokenizer."""

    def __init__(
        self,
        config: DenseConfig,
        image_encoder: ImageEncoder,
        transform: EvalTransform,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(config, transform=transform, tokenizer=tokenizer)
        self.image_encoder = image_encoder
        if config.frozen_encoder:
            image_encoder.freeze()
        else:
            image_encoder.unfreeze()
        cells = image_encoder.grid(transform.size, transform.size)
        if cells is None or not image_encoder.patch_dim:
            raise ConfigError(
                f"{image_encoder.name} has no grid of patches", "unsupported", field="encoder"
            )
        self.grid = (cells[0] << config.doublings, cells[1] << config.doublings)
        self.decoder = self.make_decoder(config, image_encoder.patch_dim)

    @staticmethod
    def make_decoder(config: Any, patch_dim: int) -> nn.Module:
        """Return the module that maps patches (B, P, D) and their grid to the features of
        `decode`.
        """
        return Decoder(patch_dim, config.width, config.doublings)

    @classmethod
    def build(cls, config: Any, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        if tokenizer is not None and not cls.reads_text:
            raise ConfigError(
                f"{cls.name} does not read text; leave tokenizer out",
                "unsupported",
                field="tokenizer",
            )
        encoder = create_image_encoder(pretrained=pretrained, **config.encoder)
        return cls(
            config,
            encoder,
            EvalTransform(**config.transform),
            *(() if tokenizer is None else (tokenizer,)),
        )

    @classmethod
    def on(
        cls,
        image_encoder: ImageEncoder,
        labels: Sequence[str],
        transform: EvalTransform,
        **settings: Any,
    ) -> Self:
        """Put a new decoder on an encoder, which is not copied; `settings` are fields of
        `Config`.
        """
        config = cls.Config(
            encoder=image_encoder.config,
            transform=transform.settings(),
            labels=tuple(labels),
            **settings,
        )
        return cls(config, image_encoder, transform)

    def patch_features(self, batch: Batch) -> ImageFeatures:
        """Encode the images of a batch, of the size of `transform`."""
        features: ImageFeatures = self.image_encoder(batch.image_BCHW)
        return features

    def decode(self, batch: Batch) -> Tensor:
        """(B, W, h, w): features of the decoder's cells."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.config.frozen_encoder):
            features = self.patch_features(batch)
        decoded_BWhw: Tensor = self.decoder(features.patches_BPD, features.plane)
        return decoded_BWhw

    def parameter_groups(
        self, lr: float, weight_decay: float, layer_decay: float = 1.0
    ) -> list[dict[str, Any]]:
        """Return optimiser groups: the encoder at `lr`, decreasing by `layer_decay` towards its
        stem, the rest at `head_lr_mult` times `lr`. With a frozen encoder, the rest at `lr`.
        """
        if self.config.frozen_encoder:
            return parameter_groups(self, lr, weight_decay, layer_decay=layer_decay)
        groups = parameter_groups(self.image_encoder, lr, weight_decay, layer_decay=layer_decay)
        named = [{**group, "name": f"image_encoder: {group['name']}"} for group in groups]
        for name, child in self.named_children():
            if name != "image_encoder":
                groups = parameter_groups(child, lr * self.config.head_lr_mult, weight_decay)
                named += [{**group, "name": f"{name}: {group['name']}"} for group in groups]
        return named


def init_prior(layer: nn.Conv2d) -> nn.Conv2d:
    """Initialise logits so that probabilities are near `PRIOR` (Lin et al., arXiv 1708.02002,
    section 3.3).
    """
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
    image_weights: str | None = None,
    image_arguments: EncoderArguments | None = None,
    size: int | None = None,
    patch_level: int | None = None,
    **settings: Any,
) -> Model:
    """Put a new decoder on the image encoder of any system's checkpoint, or on a pretrained encoder
    by name.

    Args:
        cls: `Detector` or `Segmenter`.
        start: folder of a checkpoint, or name of an image encoder.
        labels: labels to learn.
        image_weights, image_arguments: weights and arguments of an encoder by name, see
            `create_classifier`.
        size: height and width of the input, for encoders that accept any; None: as in `start`.
            Images of a size that is given are not stretched (see the module's docstring).
        patch_level: the encoder's grid, -1 for the last and -2 for one with finer cells; None: as
            in `start`.
        settings: fields of `cls.Config`.

    Raises:
        CheckpointError: the folder is not a complete checkpoint.
        ConfigError: there is no image encoder for pixels, or it does not support the size or the
            grid.
        WeightsError: weights cannot be loaded.
    """
    encoder, transform = encoder_at(start, image_weights, image_arguments)
    arguments = dict(encoder.config)
    if size is not None:
        transform = dataclasses.replace(transform, size=size)
        arguments["image_size"] = (size, size)
        arguments.pop("stretch", None)
    if patch_level is not None:
        arguments["patch_level"] = patch_level
    if arguments != encoder.config:
        encoder = _rebuild(encoder, arguments)
    return cls.on(encoder, labels, transform, **settings)


def _rebuild(encoder: ImageEncoder, arguments: dict[str, Any]) -> ImageEncoder:
    """Create an encoder with other arguments and the same weights."""
    other = create_image_encoder(pretrained=False, **arguments)
    new = other.state_dict()
    old = encoder.state_dict()
    if {name: tensor.shape for name, tensor in new.items()} != {
        name: tensor.shape for name, tensor in old.items()
    }:
        message = (
            f"{encoder.name} has learned positions for {encoder.image_size} pixels; leave "
            f"size unset"
        )
        raise ConfigError(message, "unsupported", field="size")
    other.load_state_dict(old, strict=True)
    copy_training(encoder, other)
    return other


# Base of models that predict masks: a probability map for each label, at the pixels of the
# original image.


class MaskModel(System):
    """A system with a plane of logits for each label. A model that reads text has a tokenizer.

    Attributes:
        grid: (h, w) of the logits for images of `transform`.
    """

    config: Any
    """Settings with `labels`."""
    grid: tuple[int, int]

    @abc.abstractmethod
    def mask_logits(self, batch: Batch) -> Tensor:
        """(B, L, h, w), labels in the order of `config.labels`."""

    @torch.no_grad()
    def maps(self, batch: Batch, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return probabilities (L, H, W) for each image at the pixels of the original, NaN where it
        was cropped.

        Args:
            batch: images prepared by `transform`, with their texts for a model that reads text.
            sizes: (height, width) of the original images.
        """
        probability_BLhw = torch.sigmoid(self.mask_logits(batch.to(self.device)).float())
        boxes = [self.transform.box(*size) for size in sizes]
        return [
            on_image(map_Lhw, box, *size)
            for map_Lhw, box, size in zip(probability_BLhw, boxes, sizes, strict=True)
        ]


# Fine-tuning of a fusion-encoder at another image size than its pretraining.


def at_image_size(model: FusionModel, size: int) -> FusionModel:
    """Return the model for images of `size` pixels, with the same weights.

    Learned positions of image patches, and those of a moving-average teacher, are interpolated to
    the new grid; tables that are computed, such as the pixel decoder's, belong to the new grid.
    Where the cells of a convolutional encoder cover another number of pixels, the head that
    predicts these has new weights: fine-tuning does not read it.

    Raises:
        ConfigError: the model does not support the size, numbers the cells of its images by rows of
            a table that words have too, or has a tensor that depends on the image's size and is not
            such a table.
    """
    if size == model.config.image_size or isinstance(model.image_encoder, RegionEncoder):
        return model
    changes: dict[str, Any] = {"image_size": size, "image_weights": None, "text_weights": None}
    arguments = model.config.image_arguments  # without a stretch to the former size
    changes["image_arguments"] = {
        name: arguments[name] for name in arguments if name not in ("image_size", "stretch")
    }
    config = dataclasses.replace(model.config, **changes)
    other = create_model(config, tokenizer=model.tokenizer)
    assert isinstance(other, FusionModel)
    encoders = [each.image_encoder for each in (model, other)]
    old, new = (each.grid(*each.image_size) for each in encoders if isinstance(each, ImageEncoder))
    if model.numbers_cells and old != new:
        raise _unsupported(f"positions of cells in {model.name} belong", model, size)
    tensors = model.state_dict()
    expected = other.state_dict()
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            is_of_pixels = name.startswith("mim_head.pixels.")
            tensors[name] = expected[name] if is_of_pixels else resize_positions(tensor, old, new)
            if tensors[name].shape != expected[name].shape:
                raise _unsupported(f"{name} of {model.name} belongs", model, size)
    other.load_state_dict(tensors, strict=True)
    copy_training(model, other)
    return other.train(model.training)


def _unsupported(subject: str, model: FusionModel, size: int) -> ConfigError:
    message = (
        f"{subject} to images of {model.config.image_size} pixels, got {size}; fine-tune "
        f"at the former size"
    )
    return ConfigError(message, "unsupported", field="image_size")


def resize_positions(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Interpolate a position table (..., N + h * w, D) to another grid; the N vectors before the
    grid stay.

    Bicubic without antialiasing, as M3AE's, METER's and ALBEF's released code. A table of another
    form is returned unchanged.
    """
    prefix = table.shape[-2] - math.prod(old) if table.ndim in (2, 3) else -1
    if prefix < 0 or table[..., 0, 0].numel() != 1:
        return table
    table_ND = table.reshape(table.shape[-2:])
    grid_1Dhw = table_ND[prefix:].unflatten(0, old).permute(2, 0, 1)[None].float()
    resized_1Dhw = F.interpolate(grid_1Dhw, new, mode="bicubic", align_corners=False)
    patches_PD = resized_1Dhw[0].flatten(1).T.to(table.dtype)
    positions = torch.cat([table_ND[:prefix], patches_PD])
    return positions.reshape(*table.shape[:-2], *positions.shape)


# Segmentation by a small decoder on an image encoder.

Decoding = Literal["conv", "linear"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmenterConfig(DenseConfig):
    """Settings of a segmenter."""

    decoder: Decoding = "conv"
    """`linear` is one 1x1 layer on the encoder's patches, and its logits are enlarged bilinearly to
    the input's pixels (linear segmentation of LoVT, arXiv 2112.02889); it has no `width` and no
    `doublings`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.decoder, get_args(Decoding), "decoder")


class PatchGrid(nn.Module):
    """Patches as a feature map, unchanged."""

    def forward(self, patches_BPD: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, D, h, w)."""
        return patches_BPD.transpose(1, 2).unflatten(2, grid)


@register_system("segmenter")
class Segmenter(DenseModel, MaskModel):
    """Logits of labels for each cell of the decoder's grid, trained by cross-entropy and soft Dice.

    Attributes:
        grid: (h, w) of the logits: the decoder's grid, or the input's pixels for the linear
            decoder.
    """

    Config = SegmenterConfig

    def __init__(
        self,
        config: SegmenterConfig,
        image_encoder: ImageEncoder,
        transform: EvalTransform,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(config, image_encoder, transform, tokenizer)
        if config.decoder == "linear":
            self.grid = (transform.size, transform.size)
        width = config.width if config.decoder == "conv" else image_encoder.patch_dim
        self.mask_head = init_prior(nn.Conv2d(width, len(config.labels), 1))

    @staticmethod
    def make_decoder(config: Any, patch_dim: int) -> nn.Module:
        return (
            PatchGrid()
            if config.decoder == "linear"
            else DenseModel.make_decoder(config, patch_dim)
        )

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a `DenseBatch` with masks at the model's grid."""
        assert isinstance(batch, DenseBatch)
        assert batch.masks_BLhw is not None
        entropy, dice = losses.bce_dice(self.mask_logits(batch), batch.masks_BLhw / 255)
        return Losses.sum(cross_entropy=entropy, dice=dice)

    def mask_logits(self, batch: Batch) -> Tensor:
        """(B, L, h, w), labels in the order of `config.labels`."""
        logits_BLhw: Tensor = self.mask_head(self.decode(batch))
        if self.config.decoder == "linear":
            return F.interpolate(logits_BLhw, size=self.grid, mode="bilinear", align_corners=False)
        return logits_BLhw
