"""BioViL-T: an image with the patient's prior image, against the report (Bannur et al., CVPR 2023)."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.checks import check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.models.dual_encoders.biovil import BioViL, BioViLConfig
from medvl.models.dual_encoders.parts.heads import BatchNormHead, in_full_precision
from medvl.models.dual_encoders.parts.temporal import TemporalPooler
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class BioViLTConfig(BioViLConfig):
    """Settings of the released model; as for BioViL, those of its training are not confirmed.

    Masked words are predicted from the text alone; the paper's prediction with the image was not released.
    """

    image_size: int = 448
    margin: int = 32
    local_weight: float = 1.0
    rsm_weight: float = 0.0
    pooler_dim: int = 256
    """Width of patches in the pooler; regions are twice as wide: the patch, and its change."""
    pooler_heads: int = 8
    pooler_blocks: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "[1, inf)", "pooler_dim", "pooler_heads", "pooler_blocks")
        if self.pooler_dim % 4 or self.pooler_dim % self.pooler_heads:
            message = f"pooler_dim must be a multiple of 4 and of pooler_heads, got {self.pooler_dim}"
            raise ConfigError(message, "conflict", field="pooler_dim")


@register_system("biovil_t")
class BioViLT(BioViL):
    """BioViL whose regions also encode the change since the prior image; a learnt vector where there is none."""

    Config = BioViLTConfig

    def __init__(self, config: Any, *args: Any, pooler: TemporalPooler, patch_head: nn.Module, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.pooler, self.patch_head = pooler, patch_head
        self.missing_prior = nn.Parameter(torch.empty(config.pooler_dim))
        nn.init.trunc_normal_(self.missing_prior, std=0.02)
        self.inputs = Inputs(second_text=config.rsm_weight > 0, prior_image=True)

    @classmethod
    def make_heads(cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder) -> dict[str, Any]:
        """See the base class."""
        heads = super().make_heads(config, image_encoder, text_encoder)
        dim, size = config.pooler_dim, heads["image_head"].outer.out_features
        grid = image_encoder.grid(config.image_size, config.image_size)
        return {
            **heads,
            "image_head": BatchNormHead(2 * dim, size, size, inner_bias=False),
            "patch_head": nn.Linear(image_encoder.patch_dim, dim, bias=False),
            "pooler": TemporalPooler(dim, grid, config.pooler_heads, config.pooler_blocks),
        }

    def encode_image(self, image_BCHW: Tensor, prior_BCHW: Tensor | None = None, *, normalize: bool = True) -> Tensor:
        """See the base class; of images alone or with a prior image each, of the same size.

        Raises ConfigError for prior images of another shape, and for images with them of another size than configured.
        """
        vector_BE = self.embed_regions(image_BCHW, prior_BCHW).mean(dim=1)
        return F.normalize(vector_BE, dim=-1) if normalize else vector_BE

    def embed_with_prior(self, image_BCHW: Tensor, prior_BCHW: Tensor, has_prior_B: Tensor) -> Embeddings:
        """Return embeddings for `similarity`; where `has_prior_B` is False, of pixels alone."""
        regions_BPE = self.embed_regions(image_BCHW, prior_BCHW, has_prior_B)
        return Embeddings(F.normalize(regions_BPE.mean(dim=1), dim=-1))

    def embed_regions(
        self, image_BCHW: Tensor, prior_BCHW: Tensor | None = None, has_prior_B: Tensor | None = None
    ) -> Tensor:
        """Return (B, P, E) float32, as BioViL; prior images are ignored where `has_prior_B` is False.

        Raises ConfigError as `encode_image`.
        """
        count = len(image_BCHW)
        if prior_BCHW is None:
            patches_BPD = self.patch_head(self.image_encoder(image_BCHW).patches_BPD)
            change_BPD = self.missing_prior.to(patches_BPD.dtype).expand_as(patches_BPD)
        else:
            self.pooler.check_images(image_BCHW, prior_BCHW, self.image_encoder.grid(*image_BCHW.shape[2:]))
            row_K = torch.arange(count, device=image_BCHW.device)
            row_K = row_K if has_prior_B is None else row_K[has_prior_B]
            both_BCHW = torch.cat([image_BCHW, prior_BCHW[row_K]])  # one pass, as released: one batch norm
            patches_BPD, prior_KPD = self.patch_head(self.image_encoder(both_BCHW).patches_BPD).tensor_split([count])
            changed_KPD = self.pooler(patches_BPD[row_K], prior_KPD)
            missing_BPD = self.missing_prior.to(changed_KPD.dtype).expand(count, *changed_KPD.shape[1:])
            change_BPD = missing_BPD.index_copy(0, row_K, changed_KPD)
        return in_full_precision(self.image_head, torch.cat([patches_BPD, change_BPD.to(patches_BPD.dtype)], dim=2))

    def batch_regions(self, batch: Batch) -> Tensor:
        """See the base class. Raises ConfigError for a batch without prior images."""
        if batch.prior_BCHW is None:
            message = "expected Batch.prior_BCHW: open the loader with the model's inputs"
            raise ConfigError(message, "missing", field="prior_BCHW")
        return self.embed_regions(batch.image_BCHW, batch.prior_BCHW, batch.has_prior_B)
