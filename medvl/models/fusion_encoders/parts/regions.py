"""Regions as UNITER and LXMERT read them: features and box codes, of a detector or of the cells of a grid.

P regions, F features with their box code after them, C numbers of a box code; the other letters as in `medvl.schema`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from medvl.encoders.box_codes import BoxCode, box_code
from medvl.encoders.regions import RegionEncoder
from medvl.errors import ConfigError
from medvl.models.bert_init import LAYER_NORM_EPS
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.inputs import ImageSource, encode_present
from medvl.schema import Batch


class RegionMask(NamedTuple):
    """Regions to predict, and the regions whose features the model reads in their place."""

    masked_BP: Tensor
    """bool."""
    source_BP: Tensor
    """int64: place in the flattened (B * P) regions of the features that are read; -1: zeros."""


def sample_region_mask(real_BP: Tensor, rate: float, *, zeros: float = 1.0, replaced: float = 0.0) -> RegionMask:
    """Mask each real region with a probability of `rate`, and at least one of each image (UNITER).

    Sampled from torch's CPU generator. Of the masked regions, a share of `zeros` has zeros as features, a share of
    `replaced` those of a random region of the batch, the rest its own (LXMERT: 0.8 and 0.1).
    """
    rank_BP, kind_BP = torch.rand(2, *real_BP.shape, generator=torch.default_generator).to(real_BP.device)
    first_B1 = rank_BP.masked_fill(~real_BP, 2.0).argmin(dim=1, keepdim=True)
    masked_BP = real_BP & (rank_BP < rate).scatter(1, first_B1, True)
    own_BP = torch.arange(real_BP.numel(), device=real_BP.device).view_as(real_BP)
    other = torch.randint(max(real_BP.numel(), 1), tuple(real_BP.shape), generator=torch.default_generator)
    kept_BP = torch.where(kind_BP < zeros + replaced, other.to(real_BP.device), own_BP)
    return RegionMask(masked_BP, torch.where(masked_BP, kept_BP.masked_fill(kind_BP < zeros, -1), own_BP))


class RegionInput(nn.Module):
    """Projections of features and of box codes, each normalised, and their sum (UNITER, 3.1; LXMERT, equation 1).

    Args:
        source: detector's regions with a box code of `numbers`, or an image encoder, whose cells have boxes.
        numbers: length of a box code.
        width: D of the tokens.

    Attributes:
        features: width of a region's features.

    Raises ConfigError for regions without that box code.
    """

    def __init__(self, source: ImageSource, numbers: BoxCode, width: int) -> None:
        super().__init__()
        if isinstance(source, RegionEncoder) and source.code != numbers:
            message = f"expected regions with a box code, regions:WIDTH+{numbers}"
            raise ConfigError(message, "mismatch", field="image_encoder")
        self.numbers: BoxCode = numbers
        self.features = source.patch_dim - (numbers if isinstance(source, RegionEncoder) else 0)
        self.project, self.project_boxes = nn.Linear(self.features, width), nn.Linear(numbers, width)
        self.norm, self.norm_boxes = (nn.LayerNorm(width, eps=LAYER_NORM_EPS) for _ in range(2))

    def read(self, source: ImageSource, image: Tensor, has_image_B: Tensor | None) -> Tokens:
        """Encode images, or take the regions of a detector: (B, P, F), padding where there is no image."""

        def encode(image: Tensor) -> Tokens:
            features = source(image)
            if isinstance(source, RegionEncoder):
                return Tokens(features.patches_BPD, source.real(image))
            codes_PC = box_code(grid_boxes(*features.grid), self.numbers).to(features.patches_BPD)
            codes_BPC = codes_PC.expand(len(features.patches_BPD), -1, -1)
            return Tokens(torch.cat([features.patches_BPD, codes_BPC], dim=2), None)

        tokens = encode_present(has_image_B, self.features + self.numbers, encode, image)
        if has_image_B is None:
            return tokens
        return Tokens(tokens.states_BND, tokens.real_BN() & has_image_B[:, None])

    def sample_mask(self, source: ImageSource, batch: Batch, rate: float, **shares: float) -> RegionMask:
        """Sample masked regions of a batch, see `sample_region_mask`."""
        if isinstance(source, RegionEncoder):
            real_BP = source.real(source.read(batch))
        else:
            height, width = source.grid(*batch.image_BCHW.shape[2:])
            real_BP = torch.ones(len(batch), height * width, dtype=torch.bool, device=batch.image_BCHW.device)
        if batch.has_image_B is not None:
            real_BP = real_BP & batch.has_image_B[:, None]
        return sample_region_mask(real_BP, rate, **shares)

    def forward(self, regions_BPF: Tensor, mask: RegionMask | None = None, added_D: Tensor | None = None) -> Tensor:
        """(B, P, D): embed regions, some of them masked; `added_D` is added to the features of those."""
        features_BPD, codes_BPC = regions_BPF.split([self.features, self.numbers], dim=2)
        if mask is not None and mask.source_BP.shape == features_BPD.shape[:2]:  # else no sample has an image
            source_BP1 = mask.source_BP[:, :, None]
            read_BPD = features_BPD.flatten(0, 1)[mask.source_BP.clamp(min=0)]
            features_BPD = read_BPD.masked_fill(source_BP1 < 0, 0.0)
            if added_D is not None:
                features_BPD = features_BPD + added_D * mask.masked_BP[:, :, None]
        states_BPD: Tensor = self.norm(self.project(features_BPD)) + self.norm_boxes(self.project_boxes(codes_BPC))
        return states_BPD


def grid_boxes(height: int, width: int) -> Tensor:
    """(P, 4): relative boxes (left, top, right, bottom) of the cells of a grid, in row-major order."""
    row_P, column_P = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    places = (column_P / width, row_P / height, (column_P + 1) / width, (row_P + 1) / height)
    return torch.stack(places, dim=1)
