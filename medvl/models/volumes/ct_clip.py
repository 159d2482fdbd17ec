"""CT-CLIP: CLIP of chest CTs and reports on CT-ViT (Hamamci et al., arXiv 2403.17834)."""

import dataclasses
import math
from collections.abc import Mapping
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
class CTCLIPConfig(VolumeDualConfig, TemperatureConfig):
    """Settings of the released model: 240 x 480 x 480 voxels of 1.5 x 0.75 x 0.75 mm.

    The released code compares eight pairs of one rank; here they are those of all ranks. Its scale
    starts at e, at which aligned pairs still have a loss of 0.38 among eight.
    """

    image_encoder: str = "ctvit"
    image_arguments: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {
            "patch_size": (10, 20, 20),
            "window": (-1000.0, 1000.0),
            "mean": 0.5,
            "std": 0.5,
            "codes": 8192,
            "transposed": True,
        }
    )
    volume_size: tuple[int, int, int] = (240, 480, 480)
    text_encoder: str = "cxrbert"
    max_tokens: int = 512
    temperature: float = math.exp(-1)
    max_scale: float | None = None
    positives: Positives = "study"
    """Reconstructions of a scan share its report and are positives. Published: own."""


@register_system("ct_clip")
class CTCLIP(VolumeDualEncoder):
    """CLIP's loss between the class token of a report and the patches of a volume, averaged over z
    and laid side by side.

    The layer behind them has a weight for each place of the plane, so that a model has one field
    of view; published, 151 million parameters.
    """

    Config = CTCLIPConfig
    learns_scale = True
    image_head: nn.Linear

    @classmethod
    def make_heads(
        cls, config: CTCLIPConfig, image_encoder: Any, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        places = image_encoder.grid[1] * image_encoder.grid[2]
        size = config.projection_dim
        return {
            "image_head": nn.Linear(places * image_encoder.patch_dim, size, bias=False),
            "text_head": nn.Linear(text_encoder.feature_dim, size, bias=False),
        }

    def unnormalized_image(self, image_BCDHW: Tensor) -> Tensor:
        """Return (B, E) float32: `encode_image` before the normalisation."""
        features = self.image_encoder(image_BCDHW)
        depth = features.grid[0]
        plane_BX = features.patches_BPD.unflatten(1, (depth, -1)).mean(dim=1).flatten(1)
        projected_BE: Tensor = self.image_head(plane_BX)
        return projected_BE.float()

    def embed_regions(self, image_BCDHW: Tensor) -> Tensor:
        """Return (B, P, E) float32: the share of each patch in `unnormalized_image`, their sum."""
        features = self.image_encoder(image_BCDHW)
        depth = features.grid[0]
        patches_BdQD = features.patches_BPD.unflatten(1, (depth, -1))
        weight_EQD = self.image_head.weight.unflatten(1, (patches_BdQD.shape[2], -1))
        share_BdQE = torch.einsum("bdqk,eqk->bdqe", patches_BdQD, weight_EQD) / depth
        return share_BdQE.flatten(1, 2).float()

    def compare_pairs(self, pairs: Pairs) -> Losses:
        images_NE, texts_NE, groups = gather_global(pairs)
        return Losses.sum(contrastive=losses.clip(images_NE, texts_NE, self.scale(), groups=groups))
