"""Pretraining on pairs, images alone and texts alone (Wang et al., arXiv 2103.16022)."""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from medvl import losses
from medvl.common.config_io import check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.losses.masked import blank, mask_blocks, patchify
from medvl.models.base import EncoderArguments, Parts
from medvl.models.fusion_encoders.bases.base import check_pixels
from medvl.models.fusion_encoders.bases.objectives import (
    Corruption,
    Encoded,
    Objective,
    PatchPredictions,
)
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.heads import BlockHead, Patches
from medvl.models.fusion_encoders.parts.inputs import ImageSource
from medvl.models.fusion_encoders.streams import DualStreamConfig, StreamModel
from medvl.models.registry import register_system
from medvl.schema import Batch

# P cells of the image's grid, Q blocks of a scale; the other letters as in `medvl.schema`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedConfig(DualStreamConfig):
    """Settings of pretraining on mixed data; the paper has no code, and these are medvl's."""

    image_encoder: str = "resnet50"
    image_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    text_encoder: str = "bert"
    image_size: int = 256
    image_positions: bool = True
    max_tokens: int = 128
    mim_weight: float = 1.0
    mask_ratio: float = 0.25
    """Share of the image's cells that are masked, in whole blocks."""
    scales: tuple[int, ...] = (1, 2, 4)
    """Sides of the blocks that are masked and regenerated, in cells; each must divide the grid."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, 1)", "mask_ratio")
        check_within(self, "(0, inf)", "mim_weight")


class MultiScaleMaskedImageModeling(Objective[Encoded, Tensor, list[PatchPredictions]]):
    """Pixels of masked blocks of cells, at several scales.

    Args:
        weight: factor of the term.
        model: has the heads.
        ratio: share of the cells that are masked.
        scales: sides of the blocks in cells.

    Raises ConfigError unless every scale divides the model's grid.
    """

    name = "mim"

    def __init__(
        self, weight: float, model: "MixedModel", ratio: float, scales: Sequence[int]
    ) -> None:
        super().__init__(weight)
        self.model = model
        self.ratio = ratio
        self.scales = tuple(scales)
        grid = model.patches.grid
        if not self.scales or any(
            scale < 1 or grid[0] % scale or grid[1] % scale for scale in self.scales
        ):
            message = f"scales must divide the image encoder's grid {grid}, got {self.scales}"
            raise ConfigError(message, "conflict", field="scales")

    def corrupt(self, batch: Batch) -> Tensor:
        """(B, P) bool: sample a scale for each image, and mask blocks of it."""
        generator = torch.default_generator
        device = batch.image_BCHW.device
        return mask_blocks(
            len(batch), self.model.patches.grid, self.scales, self.ratio, generator
        ).to(device)

    def predict(self, encoded: Encoded, corruption: Tensor) -> list[PatchPredictions]:
        """Regenerate all blocks of each scale, for the samples that have an image."""
        assert encoded.own is not None
        batch = encoded.batch
        image = encoded.own.image
        masked_BP = corruption
        image_BCHW = batch.image_BCHW
        grid = self.model.patches.grid
        side = self.model.patches.side
        if batch.has_image_B is not None:
            index_K = batch.has_image_B.nonzero().squeeze(1)
            image = image.rows(index_K)
            image_BCHW = image_BCHW[index_K]
            masked_BP = masked_BP[index_K]
        pixels_BCHW = self.model.image_encoder.normalize(image_BCHW)
        if len(image_BCHW) == 0:
            blank_BPC = pixels_BCHW.new_zeros(0, 0, self.model.patches.values)
            return [PatchPredictions(blank_BPC, blank_BPC, masked_BP[:, :0]) for _ in self.scales]
        states_BDhw = image.states_BND[:, 1:].transpose(1, 2).unflatten(2, grid)
        visible_B1hw = (~masked_BP).float().unflatten(1, grid)[:, None]
        predictions = []
        for scale, head in zip(self.scales, self.model.mim_head.scales, strict=True):
            blocks_BQD = F.avg_pool2d(states_BDhw, scale).flatten(2).transpose(1, 2)
            true_BQC = patchify(F.avg_pool2d(pixels_BCHW, scale), side)
            masked_BQ = F.max_pool2d(visible_B1hw, scale).flatten(1) == 0
            predictions.append(PatchPredictions(head(blocks_BQD), true_BQC, masked_BQ))
        return predictions

    def loss(self, predictions: list[PatchPredictions], corruption: Tensor) -> Tensor:
        """Return the mean squared error over the masked blocks of each scale, then the mean over
        scales.
        """
        return torch.stack([losses.mim(*prediction) for prediction in predictions]).mean()


@register_system("mixed")
class MixedModel(StreamModel):
    """Masked words of all texts, masked cells of all images at several scales, and matching of the
    pairs.

    The abstract describes a Transformer for paired data and for a mixture of paired and unpaired
    data, also of several institutions; masked words; and masked vision modelling at several scales,
    which regenerates patches of the image. No code is published; the other details are choices of
    medvl:

    - Layout: the grid of a CNN and the states of a BERT, each projected and with its modality's
      embedding, in two streams with co-attention.
    - A missing modality is one null token, which holds the learned embedding of its modality; the
      other stream attends to it, and attention to padding is masked.
    - Cells and words are masked in one pass. For each image a scale is drawn, and whole blocks of s
      x s cells are masked: their pixels are the mean before the image encoder, and their tokens a
      learned vector behind it. Batch-norm statistics are thus those of masked images.
    - Every scale has a linear head that regenerates each masked block, averaged over its cells, at
      the resolution of one cell: s times smaller, in the units of the image encoder's input. The
      loss is the mean squared error over the masked blocks of a scale, then the mean over scales.
    - Matching (ITM) compares whole texts with masked images and counts complete samples only; a
      word or block counts wherever its own text or image exists.
    """

    Config = MixedConfig

    def __init__(
        self,
        config: MixedConfig,
        image_encoder: ImageSource,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        self.patches = Patches.of(check_pixels(image_encoder, "mixed"))
        self.mim_head = BlockHead(config.width, self.patches.values, len(config.scales))
        self.mim = MultiScaleMaskedImageModeling(
            config.mim_weight, self, config.mask_ratio, config.scales
        )
        self.objectives = (*self.objectives, self.mim)

    image_encoder: ImageEncoder

    def encode(self, batch: Batch, corruption: Corruption) -> Encoded:
        """Mask all images."""
        return self.encode_apart(
            batch, corruption, self.masked_image_tokens(batch, corruption.of(self.mim))
        )

    def masked_image_tokens(self, batch: Batch, masked_BP: Tensor) -> Tokens:
        """Encode images without information about the masked cells."""
        pixels_BCHW = self.image_encoder.normalize(batch.image_BCHW)
        image = self.image_tokens(
            blank(pixels_BCHW, masked_BP, self.patches.side), batch.has_image_B
        )
        cells_BPD = image.states_BND[:, 1:]
        if cells_BPD.shape[1] == 0:  # no sample has an image
            return image
        token = self.mim_head.mask_token
        positions_PD = self.image_input.positions
        hidden = token if positions_PD is None else token + positions_PD
        cells_BPD = torch.where(masked_BP[:, :, None], hidden.to(cells_BPD.dtype), cells_BPD)
        return Tokens(torch.cat([image.states_BND[:, :1], cells_BPD], dim=1), image.mask_BN)
