"""From what an encoder returns to the tokens of a fusion-encoder, and what a sample without an image or a text gives.

A convolutional grid, the tokens of a vision Transformer and regions of a detector all come as `ImageFeatures`: the
pooled vector (a Transformer's class token) becomes the first token, the regions those behind it.

Letters: B batch, K samples that have the modality, N tokens, P regions, T text tokens, D width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from medvl.encoders import ImageEncoder, TextEncoder, create_image_encoder, create_text_encoder
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.config import FusionConfig
from medvl.models.fusion_encoders.layers.encoder import Tokens
from medvl.models.fusion_encoders.layers.transformer import INIT_STD, init_weights
from medvl.schema import ImageFeatures

_REGIONS = "regions:"


class RegionEncoder(nn.Module):
    """Stands where an image encoder does, for regions that a detector encoded beforehand. Has nothing to learn.

    Attributes:
        feature_dim, patch_dim: the width of a region's features, its box's geometry among them.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.feature_dim = self.patch_dim = width

    def forward(self, regions_BPD: Tensor) -> ImageFeatures:
        """The regions themselves; the pooled vector is the mean over those that are real.

        Raises ConfigError when they are of another width.
        """
        if regions_BPD.ndim != 3 or regions_BPD.shape[2] != self.patch_dim:
            raise ConfigError(f"regions must be (B, P, {self.patch_dim}), not {tuple(regions_BPD.shape)}")
        count_B1 = self.real(regions_BPD).sum(dim=1, keepdim=True).clamp(min=1)
        return ImageFeatures(pooled_BD=regions_BPD.sum(dim=1) / count_B1, patches_BPD=regions_BPD, grid=None)

    def real(self, regions_BPD: Tensor) -> Tensor:
        """(B, P) bool: False on rows of zeros, which pad an image with fewer regions than others."""
        return (regions_BPD != 0).any(dim=2)


ImageSource = ImageEncoder | RegionEncoder


def create_encoders(config: FusionConfig, *, pretrained: bool) -> tuple[ImageSource, TextEncoder]:
    """The encoders that a configuration names; a `RegionEncoder` for `regions:WIDTH`.

    Raises ConfigError and WeightsError as `create_image_encoder` and `create_text_encoder` do.
    """
    text_arguments: dict[str, Any] = dict(config.text_arguments)
    text_encoder = create_text_encoder(
        config.text_encoder, pretrained=pretrained, vocab_size=config.vocab_size, **text_arguments
    )
    if config.image_encoder.startswith(_REGIONS):
        width = config.image_encoder.removeprefix(_REGIONS)
        if not width.isdigit() or int(width) < 1 or config.image_arguments:
            raise ConfigError(
                f"{config.image_encoder!r}: precomputed regions are given by their width alone, as in regions:2055, "
                "and have no image_arguments"
            )
        return RegionEncoder(int(width)), text_encoder
    image_arguments: dict[str, Any] = dict(config.image_arguments)
    image_encoder = create_image_encoder(
        config.image_encoder, pretrained=pretrained, image_size=config.image_size, **image_arguments
    )
    return image_encoder, text_encoder


class ImageInput(nn.Module):
    """Image features to tokens of a fusion-encoder's width.

    Args:
        source: what makes the features.
        width: D of the tokens.
        positions: learn one for every region of the source's grid.

    Raises ConfigError when positions are wanted of a source that has no grid.
    """

    def __init__(self, source: ImageSource, width: int, *, positions: bool) -> None:
        super().__init__()
        self.project = nn.Linear(source.patch_dim, width)
        same = source.feature_dim == source.patch_dim
        self.project_pooled = None if same else nn.Linear(source.feature_dim, width)
        init_weights(self)
        self.positions: nn.Parameter | None = None
        if positions:
            if isinstance(source, RegionEncoder):
                raise ConfigError("precomputed regions have no grid: leave image_positions out, their boxes say where")
            height, columns = source.grid(*source.image_size)
            self.positions = nn.Parameter(torch.empty(height * columns, width).normal_(std=INIT_STD))

    def forward(
        self, features: ImageFeatures, *, keep_BK: Tensor | None = None, real_BP: Tensor | None = None
    ) -> Tokens:
        """The pooled vector first, then the regions.

        Args:
            features: of any image encoder.
            keep_BK: which regions of the grid they are, where some were left out.
            real_BP: bool, the regions that are no padding; None: all.

        Raises ConfigError when there are more or fewer regions than positions.
        """
        project_pooled = self.project if self.project_pooled is None else self.project_pooled
        tokens_BND: Tensor = project_pooled(features.pooled_BD)[:, None]
        if features.patches_BPD is None:
            return Tokens(tokens_BND, None)
        regions_BPD = self.project(features.patches_BPD)
        if self.positions is not None:
            regions_BPD = regions_BPD + self._positions(regions_BPD.shape[1], keep_BK)
        mask_BN = None if real_BP is None else torch.cat([torch.ones_like(real_BP[:, :1]), real_BP], dim=1)
        return Tokens(torch.cat([tokens_BND, regions_BPD], dim=1), mask_BN)

    def _positions(self, regions: int, keep_BK: Tensor | None) -> Tensor:
        assert self.positions is not None
        if keep_BK is not None:
            return self.positions[keep_BK]
        if regions != len(self.positions):
            raise ConfigError(
                f"the image has {regions} regions and the model learnt positions for {len(self.positions)}: "
                "give images of the size that it was made for"
            )
        return self.positions


def of_present(has_B: Tensor | None, width: int, encode: Callable[[Tensor | None], Tokens]) -> Tokens:
    """The tokens of a batch in which some samples lack the modality. Placeholders are never encoded: they would cost
    time, and shift the statistics of batch norms.

    A sample without it gets one token of zeros and padding behind it, which the modality's embedding then marks.

    Args:
        has_B: bool; None: all samples have it.
        width: D of the tokens.
        encode: tokens of the rows of an index (K,), or of all for None.
    """
    if has_B is None:
        return encode(None)
    index_K = has_B.nonzero().squeeze(1)
    if len(index_K) == 0:
        return Tokens(torch.zeros(len(has_B), 1, width, device=has_B.device), None)
    found = encode(index_K)
    tokens = found.states_BND.shape[1]
    states_BND = found.states_BND.new_zeros(len(has_B), tokens, width).index_copy(0, index_K, found.states_BND)
    mask_BN = torch.arange(tokens, device=has_B.device).expand(len(has_B), -1) == 0
    return Tokens(states_BND, mask_BN.index_copy(0, index_K, found.real_BN()))
