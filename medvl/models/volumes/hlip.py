"""HLIP: CLIP of volumes and reports on a Transformer with attention within slices, scans and
studies (Zhao et al., arXiv 2505.21862).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.encoders import TextEncoder
from medvl.models.dual_encoders.bases.base import Positives, TemperatureConfig
from medvl.models.dual_encoders.bases.pairs import Pairs, gather_global
from medvl.models.registry import register_system
from medvl.models.volumes.base import VolumeDualConfig, VolumeDualEncoder
from medvl.schema import Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class HLIPConfig(VolumeDualConfig, TemperatureConfig):
    """Settings of the released model for chest CT: 112 x 336 x 336 voxels of 3 x 1 x 1 mm.

    The released code trains one reconstruction of a scan in an epoch, and draws positions of scans
    in evaluation too where a batch has several rows; here they are drawn in training alone.
    """

    image_arguments: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {
            "patch_size": (8, 24, 24),
            "drop_path_rate": 0.2,
            "max_scans": 1,
        }
    )
    text_encoder: str = "cxrbert"
    max_tokens: int = 512
    bias: float | None = None
    """Initial bias of the pairwise sigmoid loss (SigLIP), which then replaces CLIP's; None:
    CLIP's.
    """
    batch_norm: bool = False
    """Normalise class tokens of volumes over the batch, before their linear layer. Encoders from
    scratch need it, because the tokens of any two volumes start with a cosine near 1. Published:
    False.
    """
    positives: Positives = "study"
    """Reconstructions of a scan share its report and are positives. Published: own."""


class NormalizedHead(nn.Module):
    """Batch norm without weights, then a linear layer without a bias.

    In training, statistics are those of the volumes of one rank; a batch needs two.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.proj = nn.Linear(width, dim, bias=False)

    def forward(self, vectors_XD: Tensor) -> Tensor:
        """Return (..., E) of vectors (..., D)."""
        normalized_ND = self.norm(vectors_XD.flatten(0, -2))
        projected_XE: Tensor = self.proj(normalized_ND).view(*vectors_XD.shape[:-1], -1)
        return projected_XE


@register_system("hlip")
class HLIP(VolumeDualEncoder):
    """Class tokens of a volume and of its report, each behind a linear layer without a bias, under
    CLIP's loss or SigLIP's.

    Attributes:
        logit_bias: added to all logits, under the sigmoid loss.
    """

    Config = HLIPConfig
    learns_scale = True

    def __init__(self, config: HLIPConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.bias is not None:
            self.logit_bias = nn.Parameter(torch.tensor(config.bias))

    @classmethod
    def make_heads(
        cls, config: HLIPConfig, image_encoder: Any, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        heads = super().make_heads(config, image_encoder, text_encoder)
        if config.batch_norm:
            heads["image_head"] = NormalizedHead(image_encoder.feature_dim, config.projection_dim)
        return heads

    def embed_regions(self, image_BCDHW: Tensor) -> Tensor:
        """Return (B, P, E) float32: patches behind the layer of the class token, not normalised."""
        patches_BPE: Tensor = self.image_head(self.image_encoder(image_BCDHW).patches_BPD)
        return patches_BPE.float()

    def compare_pairs(self, pairs: Pairs) -> Losses:
        return Losses.sum(contrastive=self.contrast(*gather_global(pairs)))

    def contrast(self, image_NE: Tensor, text_NE: Tensor, groups: Sequence[Tensor] = ()) -> Tensor:
        """Return the loss of pairs of unit vectors, a scalar."""
        if self.config.bias is None:
            return losses.clip(image_NE, text_NE, self.scale(), groups=groups)
        return losses.siglip(image_NE, text_NE, self.scale(), self.logit_bias, groups=groups)
