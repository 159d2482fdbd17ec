"""Input tokens of a fusion-encoder, also for samples without an image or a text.

The grid of a CNN, the tokens of a vision Transformer and the regions of a detector all come as `ImageFeatures`. The
pooled vector (a Transformer's class token) becomes the first token; the regions follow.

Letters: B batch, K samples that have the modality, N tokens, P regions, T text tokens, D width.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from medvl.encoders import ImageEncoder
from medvl.encoders.regions import RegionEncoder
from medvl.errors import ConfigError
from medvl.losses.masked.mim import blank
from medvl.models.bert_init import INIT_STD, init_weights
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.schema import ImageFeatures

FirstToken = Literal["pooled", "learned", "none"]


ImageSource = ImageEncoder | RegionEncoder


def encode_visible(encoder: ImageEncoder, image_BCHW: Tensor, keep_BK: Tensor) -> ImageFeatures:
    """Encode some patches of each image without information about the others.

    A vision Transformer encodes the kept patches only. A CNN has no tokens to remove: the pixels of the others (a patch
    is a cell of its last grid) are replaced by the mean, and their features are dropped.
    """
    if encoder.can_drop_patches:
        return encoder(image_BCHW, keep_BK)
    height, width = image_BCHW.shape[2:]
    grid = encoder.grid(height, width)
    masked_BP = torch.ones(len(keep_BK), grid[0] * grid[1], dtype=torch.bool, device=keep_BK.device)
    blanked = blank(encoder.normalize(image_BCHW), masked_BP.scatter(1, keep_BK, False), height // grid[0])
    features = encoder(blanked)
    patches_BPD = features.patches_BPD
    kept_BKD = patches_BPD.gather(1, keep_BK[:, :, None].expand(-1, -1, patches_BPD.shape[2]))
    return ImageFeatures(features.pooled_BD, kept_BKD, None)


class ImageInput(nn.Module):
    """Projection of image features to tokens of the fusion-encoder's width.

    Args:
        source: the encoder of the features.
        width: D of the tokens.
        positions: learn one for every region of the source's grid.
        sampled: number of grid cells that are sampled for each image in training; None, or a grid with no more: all.
        first: token before the regions: the pooled vector, a learned one (a class token with its position), or none.

    Raises ConfigError for positions or samples of a source without a grid.
    """

    def __init__(
        self,
        source: ImageSource,
        width: int,
        *,
        positions: bool,
        sampled: int | None = None,
        first: FirstToken = "pooled",
    ) -> None:
        super().__init__()
        self.sampled, self.first = sampled, first
        self.project = nn.Linear(source.patch_dim, width)
        same = first != "pooled" or source.feature_dim == source.patch_dim
        self.project_pooled = None if same else nn.Linear(source.feature_dim, width)
        init_weights(self)
        for field, wanted in (("image_positions", positions), ("image_tokens", sampled)):
            if wanted and isinstance(source, RegionEncoder):
                message = f"precomputed regions have no grid: leave {field} out"
                raise ConfigError(message, "conflict", field=field)
        self.positions: nn.Parameter | None = None
        if positions and not isinstance(source, RegionEncoder):
            height, columns = source.grid(*source.image_size)
            self.positions = nn.Parameter(torch.empty(height * columns, width).normal_(std=INIT_STD))
        self.class_token: nn.Parameter | None = None
        if first == "learned":
            self.class_token = nn.Parameter(torch.empty(width).normal_(std=INIT_STD))

    def forward(
        self, features: ImageFeatures, *, keep_BK: Tensor | None = None, real_BP: Tensor | None = None
    ) -> Tokens:
        """Return the first token, if any, then the regions.

        Args:
            features: output of any image encoder.
            keep_BK: indices of the regions in the grid, if some were removed.
            real_BP: bool, False for padding; None: all are real.

        Raises ConfigError if the numbers of regions and positions differ, and for an encoder without regions
        where no pooled vector is read.
        """
        first_B1D = self._first_token(features.pooled_BD)
        if features.patches_BPD is None:
            if self.first != "pooled":
                raise ConfigError("the image encoder has no local features", "unsupported", field="image_encoder")
            return Tokens(first_B1D, None)
        cells_BPD, count = features.patches_BPD, features.patches_BPD.shape[1]
        if keep_BK is None and self.positions is not None and count != len(self.positions):
            message = f"expected images of image_size, with {len(self.positions)} regions; got {count} regions"
            raise ConfigError(message, "mismatch", field="image_size")
        if keep_BK is None and self.training and self.sampled is not None and self.sampled < count:
            keep_BK = sample_cells(count, self.sampled, len(cells_BPD)).to(cells_BPD.device)
            cells_BPD = cells_BPD.gather(1, keep_BK[:, :, None].expand(-1, -1, cells_BPD.shape[2]))
        regions_BPD = self.project(cells_BPD)
        if self.positions is not None:
            regions_BPD = regions_BPD + (self.positions if keep_BK is None else self.positions[keep_BK])
        states_BND = torch.cat([first_B1D, regions_BPD], dim=1)
        if real_BP is None:
            return Tokens(states_BND, None)
        return Tokens(states_BND, torch.cat([real_BP.new_ones(first_B1D.shape[:2]), real_BP], dim=1))

    def _first_token(self, pooled_BD: Tensor) -> Tensor:
        """(B, 1, D), or (B, 0, D) without a first token."""
        if self.class_token is not None:
            return self.class_token.expand(len(pooled_BD), 1, -1)
        if self.first == "none":
            return self.project.weight.new_empty(len(pooled_BD), 0, self.project.out_features)
        project_pooled = self.project if self.project_pooled is None else self.project_pooled
        first_B1D: Tensor = project_pooled(pooled_BD)[:, None]
        return first_B1D


def sample_cells(cells: int, count: int, rows: int) -> Tensor:
    """Sample cells of a grid without replacement, from torch's CPU generator.

    Returns:
        (rows, count) int64 on the CPU, sorted in each row.
    """
    order_RP = torch.rand(rows, cells, generator=torch.default_generator).argsort(dim=1)
    return order_RP[:, :count].sort(dim=1).values


def sample_tokens(tokens_BPD: Tensor, count: int | None, leading: int = 0) -> Tensor:
    """(B, leading + count, D): a random part of each row's tokens, in order, after the first `leading` ones.

    All of them if there are no more than `count`, or if it is None.
    """
    cells = tokens_BPD.shape[1] - leading
    if count is None or count >= cells:
        return tokens_BPD
    keep_BK = leading + sample_cells(cells, count, len(tokens_BPD)).to(tokens_BPD.device)
    sampled_BKD = tokens_BPD.gather(1, keep_BK[:, :, None].expand(-1, -1, tokens_BPD.shape[2]))
    return torch.cat([tokens_BPD[:, :leading], sampled_BKD], dim=1)


def encode_present(has_B: Tensor | None, width: int, encode: Callable[..., Tokens], *inputs_B: Tensor | None) -> Tokens:
    """Encode the samples that have the modality.

    Placeholders are never encoded: they would cost time and change batch-norm statistics. A sample without the
    modality gets one token of zeros, to which the modality embedding is added later, and padding.

    Args:
        has_B: bool; None: all samples have it.
        width: D of the tokens.
        encode: function from `inputs_B` to tokens.
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
