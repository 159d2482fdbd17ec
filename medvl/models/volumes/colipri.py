"""COLIPRI: contrast of chest CTs and reports on Primus (Wald et al., arXiv 2510.15042)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_within
from medvl.encoders import TextEncoder
from medvl.errors import ConfigError
from medvl.models.dual_encoders.bases.base import Positives, TemperatureConfig
from medvl.models.dual_encoders.bases.pairs import Pairs, gather_global
from medvl.models.dual_encoders.parts.layers import AttentionPool
from medvl.models.registry import register_system
from medvl.models.volumes.base import VolumeDualConfig, VolumeDualEncoder
from medvl.schema import Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class COLIPRIConfig(VolumeDualConfig, TemperatureConfig):
    """Settings of the released model: 192 x 192 x 192 voxels of 2 mm, turned to `orientation` of
    `image_arguments`.

    Releases 0.1.0 and 0.1.1 of its code turn volumes to SAR, later ones to RAS.
    """

    image_encoder: str = "primus"
    image_arguments: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {
            "patch_size": (8, 8, 8),
            "window": (-1000.0, 1000.0),
            "mean": 0.5,
            "std": 0.5,
            "drop_path_rate": 0.2,
        }
    )
    volume_size: tuple[int, int, int] = (192, 192, 192)
    text_encoder: str = "cxrbert"
    max_tokens: int = 512
    projection_dim: int = 768
    """Dimension of the shared space: the width of the text encoder, which has no projection."""
    pool_heads: int = 12
    """Heads of both attention pools."""
    positives: Positives = "study"
    """Reconstructions of a scan share its report and are positives. Published: own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "[1, inf)", "pool_heads")


class PatchPool(nn.Module):
    """Linear projection of patches, then attention of their mean to them."""

    def __init__(self, width: int, dim: int, heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, dim)
        self.pool = AttentionPool(dim, heads)

    def forward(self, patches_BPD: Tensor) -> Tensor:
        """Return (B, E)."""
        pooled_BE: Tensor = self.pool(self.proj(patches_BPD))[0]
        return pooled_BE

    def each(self, patches_BPD: Tensor) -> Tensor:
        """Return (B, P, E): what the pool returns where it attends to one patch alone."""
        attention = self.pool.attention
        value_BPE = F.linear(
            self.proj(patches_BPD),
            attention.in_proj_weight.chunk(3)[2],
            attention.in_proj_bias.chunk(3)[2],
        )
        vectors_BPE: Tensor = attention.out_proj(value_BPE)
        return vectors_BPE


@register_system("colipri")
class COLIPRI(VolumeDualEncoder):
    """CLIP's loss between the attention-pooled patches of a volume and tokens of a report.

    The paper's other objectives (report generation, masked volumes, opposite sentences) are not
    part of this system: a model trained here is its contrastive baseline.
    """

    Config = COLIPRIConfig
    learns_scale = True
    image_head: PatchPool

    @classmethod
    def make_heads(
        cls, config: COLIPRIConfig, image_encoder: Any, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        size = config.projection_dim
        if text_encoder.token_dim != size or size % config.pool_heads:
            raise ConfigError(
                f"expected projection_dim as the width of the text encoder "
                f"({text_encoder.token_dim}) and a multiple of pool_heads ({config.pool_heads}), "
                f"got {size}",
                "mismatch",
                field="projection_dim",
            )
        return {
            "image_head": PatchPool(image_encoder.patch_dim, size, config.pool_heads),
            "text_head": AttentionPool(size, config.pool_heads),
        }

    def unnormalized_image(self, image_BCDHW: Tensor) -> Tensor:
        """Return (B, E) float32: `encode_image` before the normalisation."""
        pooled_BE: Tensor = self.image_head(self.image_encoder(image_BCDHW).patches_BPD)
        return pooled_BE.float()

    def unnormalized_text(self, texts: Any, mask_BT: Tensor | None = None) -> Tensor:
        """Return (B, E) float32: `encode_text` before the normalisation."""
        ids_BT, mask_BT = self.tokenize(texts, mask_BT)
        features = self.text_encoder(ids_BT, mask_BT)
        pooled_BE: Tensor = self.text_head(features.tokens_BTD, features.mask_BT)[0]
        return pooled_BE.float()

    def embed_regions(self, image_BCDHW: Tensor) -> Tensor:
        """Return (B, P, E): the vector of each patch in the space of texts, not normalised."""
        vectors_BPE: Tensor = self.image_head.each(self.image_encoder(image_BCDHW).patches_BPD)
        return vectors_BPE.float()

    def compare_pairs(self, pairs: Pairs) -> Losses:
        images_NE, texts_NE, groups = gather_global(pairs)
        return Losses.sum(contrastive=losses.clip(images_NE, texts_NE, self.scale(), groups=groups))
