"""Input tokens of a fusion-encoder, also for samples without an image or a text.

The grid of a CNN, the tokens of a vision Transformer and the regions of a detector all come as `ImageFeatures`. The
pooled vector (a Transformer's class token) becomes the first token; the regions follow.

Letters: B batch, K samples that have the modality, N tokens, P regions, T text tokens, D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from medvl.encoders import ImageEncoder
from medvl.errors import ConfigError
from medvl.models.bert_init import INIT_STD, init_weights
from medvl.models.fusion_encoders.layers.encoder import Tokens
from medvl.schema import ImageFeatures


class RegionEncoder(nn.Module):
    """An image encoder without parameters for regions that a detector has encoded.

    Attributes:
        feature_dim, patch_dim: width of a region's features, including the geometry of its box.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.feature_dim = self.patch_dim = width

    def forward(self, regions_BPD: Tensor) -> ImageFeatures:
        """Return the regions; the pooled vector is the mean of the real ones.

        Raises ConfigError if they have another width.
        """
        if regions_BPD.ndim != 3 or regions_BPD.shape[2] != self.patch_dim:
            message = f"regions must be (B, P, {self.patch_dim}), got {tuple(regions_BPD.shape)}"
            raise ConfigError(message, "mismatch", field="regions_BPD")
        count_B1 = self.real(regions_BPD).sum(dim=1, keepdim=True).clamp(min=1)
        return ImageFeatures(pooled_BD=regions_BPD.sum(dim=1) / count_B1, patches_BPD=regions_BPD, grid=None)

    def real(self, regions_BPD: Tensor) -> Tensor:
        """(B, P) bool: False for rows of zeros, which pad images with fewer regions than others."""
        return (regions_BPD != 0).any(dim=2)


ImageSource = ImageEncoder | RegionEncoder


class ImageInput(nn.Module):
    """Projection of image features to tokens of the fusion-encoder's width.

    Args:
        source: the encoder of the features.
        width: D of the tokens.
        positions: learn one for every region of the source's grid.

    Raises ConfigError for positions of a source without a grid.
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
                message = "precomputed regions have no grid and contain the boxes; leave image_positions off"
                raise ConfigError(message, "conflict", field="image_positions")
            height, columns = source.grid(*source.image_size)
            self.positions = nn.Parameter(torch.empty(height * columns, width).normal_(std=INIT_STD))

    def forward(
        self, features: ImageFeatures, *, keep_BK: Tensor | None = None, real_BP: Tensor | None = None
    ) -> Tokens:
        """Return the pooled vector, then the regions.

        Args:
            features: from any image encoder.
            keep_BK: indices of the regions in the grid, if some were removed.
            real_BP: bool, False for padding; None: all are real.

        Raises ConfigError if the number of regions differs from that of positions.
        """
        project_pooled = self.project if self.project_pooled is None else self.project_pooled
        tokens_BND: Tensor = project_pooled(features.pooled_BD)[:, None]
        if features.patches_BPD is None:
            return Tokens(tokens_BND, None)
        regions_BPD = self.project(features.patches_BPD)
        if self.positions is not None:
            regions_BPD = regions_BPD + _select_positions(self.positions, regions_BPD.shape[1], keep_BK)
        mask_BN = None if real_BP is None else torch.cat([torch.ones_like(real_BP[:, :1]), real_BP], dim=1)
        return Tokens(torch.cat([tokens_BND, regions_BPD], dim=1), mask_BN)


def _select_positions(positions_PD: Tensor, regions: int, keep_BK: Tensor | None) -> Tensor:
    if keep_BK is not None:
        return positions_PD[keep_BK]
    if regions != len(positions_PD):
        message = f"expected images of image_size, with {len(positions_PD)} regions; got {regions} regions"
        raise ConfigError(message, "mismatch", field="image_size")
    return positions_PD


def encode_present(has_B: Tensor | None, width: int, encode: Callable[..., Tokens], *inputs_B: Tensor | None) -> Tokens:
    """Encode the samples that have the modality.

    Placeholders are never encoded: they would cost time and change batch-norm statistics. A sample without the
    modality gets one token of zeros, to which the modality embedding is added later, and padding.

    Args:
        has_B: bool; None: all samples have it.
        width: D of the tokens.
        encode: from `inputs_B` to tokens.
        inputs_B: one row for each sample; None stays None.
    """
    if has_B is None:
        return encode(*inputs_B)
    index_K = has_B.nonzero().squeeze(1)
    if len(index_K) == 0:
        return Tokens(torch.zeros(len(has_B), 1, width, device=has_B.device), None)
    present = encode(*(None if input_B is None else input_B[index_K] for input_B in inputs_B))
    tokens = present.states_BND.shape[1]
    states_BND = present.states_BND.new_zeros(len(has_B), tokens, width).index_copy(0, index_K, present.states_BND)
    mask_BN = torch.arange(tokens, device=has_B.device).expand(len(has_B), -1) == 0
    return Tokens(states_BND, mask_BN.index_copy(0, index_K, present.real_BN()))
