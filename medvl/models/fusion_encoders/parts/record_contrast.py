"""Contrast of masked images and reports, weighted by what is visible (MaCo, Huang et al., arXiv 2309.05904)."""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.checks import check_within
from medvl.losses.gather import gather
from medvl.losses.precision import full_precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordContrastConfig:
    """Settings of the contrast, to inherit beside a system's other settings."""

    contrast_weight: float = 0.0
    """Weight of the contrast of images and whole reports. MaCo's released code reads its balance and ignores it."""
    contrast_scale: float = 1 / 0.03
    """Start of the learned factor of cosines."""

    def check_contrast(self) -> None:
        """Raise ConfigError for a value out of range."""
        check_within(self, "[0, inf)", "contrast_weight")
        check_within(self, "(0, inf)", "contrast_scale")


class WeightedContrast(nn.Module):
    """MaCo's contrast: images whose informative patches were removed weigh less (section 3.3).

    The logarithm of the factor of cosines is learned; in the released code it is the factor, which may become negative.
    Equal reports of different images are negatives of each other, as published.

    Args:
        image_dim, text_dim: widths of patches and of the text's vector.
        cells: P, number of patches of an image.
        config: has the start of the factor.
    """

    def __init__(self, image_dim: int, text_dim: int, cells: int, config: RecordContrastConfig) -> None:
        super().__init__()
        self.image_head, self.text_head = nn.Linear(image_dim, image_dim), nn.Linear(text_dim, image_dim)
        self.place = nn.Linear(cells, 1)
        nn.init.zeros_(self.place.weight)
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.contrast_scale)))

    def forward(self, visible_BKD: Tensor, text_BD: Tensor, visible_BP: Tensor, row_K: Tensor) -> Tensor:
        """Return the loss of the rows `row_K` among those of all ranks; 0 with a zero gradient without any."""
        image_BE = F.normalize(self.image_head(visible_BKD).mean(dim=1).float(), dim=1)
        text_BE = F.normalize(self.text_head(text_BD).float(), dim=1)
        weight_B = F.softplus(self.place(visible_BP.to(self.place.weight.dtype)).float()).squeeze(1)
        image_NE, text_NE, weight_N = (gather(x[row_K]) for x in (image_BE, text_BE, weight_B))
        unused = (image_BE.sum() + text_BE.sum() + weight_B.sum() + self.log_scale) * 0
        if not len(image_NE):
            return unused
        with full_precision(image_NE):
            logits_NN = self.log_scale.exp() * image_NE @ text_NE.T
        target_N = torch.arange(len(logits_NN), device=logits_NN.device)
        terms = []
        for each_NN in (logits_NN, logits_NN.T):
            terms.append(F.cross_entropy(weight_N[:, None] * each_NN, target_N))
            entropy_N = F.cross_entropy(each_NN, target_N, reduction="none")
            terms.append((weight_N.detach() * entropy_N).sum() / weight_N.detach().sum())
        return torch.stack(terms).mean() + unused
