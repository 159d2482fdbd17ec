"""BioViL-T: an image with the patient's prior image, against the report (Bannur et al., CVPR
2023).
"""

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.models.dual_encoders.biovil import BioViL, BioViLConfig
from medvl.models.dual_encoders.parts.layers import BatchNormHead, in_full_precision
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Inputs

# Images with their prior images: the protocol of systems that read both, and the pooling of
# BioViL-T.

_POSITION_EPS = 1e-6
_PERIODS = 10_000.0


@runtime_checkable
class SupportsPriors(Protocol):
    """A dual-encoder that compares an image with the patient's prior image."""

    def embed_with_prior(
        self, image_BCHW: Tensor, prior_BCHW: Tensor, has_prior_B: Tensor
    ) -> Embeddings:
        """Return embeddings for `similarity`; where has_prior_B is False, of pixels alone."""


class TemporalPooler(nn.Module):
    """Change since the prior image, for each patch: Transformer blocks over the patches of both
    images.

    As in BioViL-T's released code: sine positions of the grid and a type embedding of each image
    are added to the input of every attention; queries, keys and values have no bias.

    Args:
        dim: D, a multiple of 4 and of `heads`.
        grid: (h, w) of the patches.
        heads, blocks: 8 and 3 as released.

    Attributes:
        grid: (h, w) of the patches.
    """

    def __init__(self, dim: int, grid: tuple[int, int], heads: int = 8, blocks: int = 3) -> None:
        super().__init__()
        from timm.models.vision_transformer import Block

        norm = functools.partial(nn.LayerNorm, eps=1e-6)
        options: dict[str, Any] = {
            "mlp_ratio": 1.0,
            "proj_drop": 0.1,
            "attn_drop": 0.1,
            "drop_path": 0.25,
            "norm_layer": norm,
        }
        self.grid = grid
        self.blocks = nn.ModuleList(
            Block(dim, heads, qkv_bias=False, **options) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.type_embed = nn.Parameter(torch.empty(2, 1, dim))
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("position_PD", grid_sines(*grid, dim), persistent=False)
        self.position_PD: Tensor
        nn.init.trunc_normal_(self.type_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, current_BPD: Tensor, prior_BPD: Tensor) -> Tensor:
        """Return (B, P, D), for the patches of the current image."""
        place_ND = (self.type_embed + self.position_PD).flatten(0, 1)
        patches_BND = self.dropout(torch.cat([current_BPD, prior_BPD], dim=1))
        block: Any
        for block in self.blocks:
            patches_BND = patches_BND + block.drop_path1(
                block.attn(block.norm1(patches_BND) + place_ND)
            )
            patches_BND = patches_BND + block.drop_path2(block.mlp(block.norm2(patches_BND)))
        pooled_BPD: Tensor = self.norm(patches_BND)[:, : current_BPD.shape[1]]
        return pooled_BPD

    def check_images(self, image_BCHW: Tensor, prior_BCHW: Tensor, grid: tuple[int, int]) -> None:
        """Raise ConfigError unless each image has a prior image of its shape, and their `grid`
        is the pooler's.
        """
        if prior_BCHW.shape != image_BCHW.shape:
            message = (
                f"expected prior images {tuple(image_BCHW.shape)}, got {tuple(prior_BCHW.shape)}"
            )
        elif grid != self.grid:
            message = (
                f"expected images of {self.grid} patches with prior images, got {grid}: "
                f"use the model's transform"
            )
        else:
            return
        raise ConfigError(message, "mismatch", field="prior_BCHW")


def grid_sines(height: int, width: int, dim: int) -> Tensor:
    """Return (h * w, D): DETR's positions, rows in the first half, columns in the second; sines and
    cosines alternate.

    Rows and columns are counted from 1 and scaled to 2 pi.
    """
    half = dim // 2
    period_F = _PERIODS ** (2 * (torch.arange(half) // 2) / half)

    def coded(count: int) -> Tensor:
        place_C = torch.arange(1, count + 1) / (count + _POSITION_EPS) * 2 * torch.pi
        angle_CF = place_C[:, None] / period_F
        return torch.stack([angle_CF[:, 0::2].sin(), angle_CF[:, 1::2].cos()], dim=2).flatten(1)

    rows_HWF = coded(height)[:, None].expand(-1, width, -1)
    columns_HWF = coded(width)[None].expand(height, -1, -1)
    return torch.cat([rows_HWF, columns_HWF], dim=2).flatten(0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BioViLTConfig(BioViLConfig):
    """Settings of the released model; as for BioViL, those of its training are not confirmed.

    Masked words are predicted from the text alone; the paper's prediction with the image was not
    released.
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
            message = (
                f"pooler_dim must be a multiple of 4 and of pooler_heads, got {self.pooler_dim}"
            )
            raise ConfigError(message, "conflict", field="pooler_dim")


@register_system("biovil_t")
class BioViLT(BioViL):
    """BioViL whose regions also encode the change since the prior image; a learnt vector where
    there is none.
    """

    Config = BioViLTConfig

    def __init__(
        self, config: Any, *args: Any, pooler: TemporalPooler, patch_head: nn.Module, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.pooler = pooler
        self.patch_head = patch_head
        self.missing_prior = nn.Parameter(torch.empty(config.pooler_dim))
        nn.init.trunc_normal_(self.missing_prior, std=0.02)
        self.inputs = Inputs(second_text=config.rsm_weight > 0, prior_image=True)

    @classmethod
    def make_heads(
        cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        heads = super().make_heads(config, image_encoder, text_encoder)
        dim = config.pooler_dim
        size = heads["image_head"].outer.out_features
        grid = image_encoder.grid(config.image_size, config.image_size)
        return {
            **heads,
            "image_head": BatchNormHead(2 * dim, size, size, inner_bias=False),
            "patch_head": nn.Linear(image_encoder.patch_dim, dim, bias=False),
            "pooler": TemporalPooler(dim, grid, config.pooler_heads, config.pooler_blocks),
        }

    def encode_image(
        self, image_BCHW: Tensor, prior_BCHW: Tensor | None = None, *, normalize: bool = True
    ) -> Tensor:
        """Encode images, alone or each with a prior image of the same size.

        Raises ConfigError for prior images of another shape, and for images with them of another
        size than configured.
        """
        vector_BE = self.embed_regions(image_BCHW, prior_BCHW).mean(dim=1)
        return F.normalize(vector_BE, dim=-1) if normalize else vector_BE

    def embed_with_prior(
        self, image_BCHW: Tensor, prior_BCHW: Tensor, has_prior_B: Tensor
    ) -> Embeddings:
        """Return embeddings for `similarity`; where `has_prior_B` is False, of pixels alone."""
        regions_BPE = self.embed_regions(image_BCHW, prior_BCHW, has_prior_B)
        return Embeddings(F.normalize(regions_BPE.mean(dim=1), dim=-1))

    def embed_regions(
        self,
        image_BCHW: Tensor,
        prior_BCHW: Tensor | None = None,
        has_prior_B: Tensor | None = None,
    ) -> Tensor:
        """Return (B, P, E) float32, as BioViL; prior images are ignored where `has_prior_B` is
        False.

        Raises ConfigError as `encode_image`.
        """
        count = len(image_BCHW)
        if prior_BCHW is None:
            patches_BPD = self.patch_head(self.image_encoder(image_BCHW).patches_BPD)
            change_BPD = self.missing_prior.to(patches_BPD.dtype).expand_as(patches_BPD)
        else:
            self.pooler.check_images(
                image_BCHW, prior_BCHW, self.image_encoder.grid(*image_BCHW.shape[2:])
            )
            row_K = torch.arange(count, device=image_BCHW.device)
            row_K = row_K if has_prior_B is None else row_K[has_prior_B]
            # one pass, as released: one batch norm
            both_BCHW = torch.cat([image_BCHW, prior_BCHW[row_K]])
            patches_BPD, prior_KPD = self.patch_head(
                self.image_encoder(both_BCHW).patches_BPD
            ).tensor_split([count])
            changed_KPD = self.pooler(patches_BPD[row_K], prior_KPD)
            missing_BPD = self.missing_prior.to(changed_KPD.dtype).expand(
                count, *changed_KPD.shape[1:]
            )
            change_BPD = missing_BPD.index_copy(0, row_K, changed_KPD)
        return in_full_precision(
            self.image_head, torch.cat([patches_BPD, change_BPD.to(patches_BPD.dtype)], dim=2)
        )

    def batch_regions(self, batch: Batch) -> Tensor:
        """Raises ConfigError for a batch without prior images."""
        if batch.prior_BCHW is None:
            message = "expected Batch.prior_BCHW: open the loader with the model's inputs"
            raise ConfigError(message, "missing", field="prior_BCHW")
        return self.embed_regions(batch.image_BCHW, batch.prior_BCHW, batch.has_prior_B)
