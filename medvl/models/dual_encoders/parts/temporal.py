"""Images with their prior images: the protocol of systems that read both, and the pooling of BioViL-T."""

import functools
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from medvl.errors import ConfigError
from medvl.schema import Embeddings

_POSITION_EPS, _PERIODS = 1e-6, 10_000.0


@runtime_checkable
class SupportsPriors(Protocol):
    """A dual-encoder that compares an image with the patient's prior image."""

    def embed_with_prior(self, image_BCHW: Tensor, prior_BCHW: Tensor, has_prior_B: Tensor) -> Embeddings:
        """Return embeddings for `similarity`; where has_prior_B is False, of pixels alone."""


class TemporalPooler(nn.Module):
    """Change since the prior image, for each patch: Transformer blocks over the patches of both images.

    As in BioViL-T's released code: sine positions of the grid and a type embedding of each image are added to the input
    of every attention; queries, keys and values have no bias.

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
        self.blocks = nn.ModuleList(Block(dim, heads, qkv_bias=False, **options) for _ in range(blocks))
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
            patches_BND = patches_BND + block.drop_path1(block.attn(block.norm1(patches_BND) + place_ND))
            patches_BND = patches_BND + block.drop_path2(block.mlp(block.norm2(patches_BND)))
        pooled_BPD: Tensor = self.norm(patches_BND)[:, : current_BPD.shape[1]]
        return pooled_BPD

    def check_images(self, image_BCHW: Tensor, prior_BCHW: Tensor, grid: tuple[int, int]) -> None:
        """Raise ConfigError unless each image has a prior image of its shape, and their `grid` is the pooler's."""
        if prior_BCHW.shape != image_BCHW.shape:
            message = f"expected prior images {tuple(image_BCHW.shape)}, got {tuple(prior_BCHW.shape)}"
        elif grid != self.grid:
            message = f"expected images of {self.grid} patches with prior images, got {grid}: use the model's transform"
        else:
            return
        raise ConfigError(message, "mismatch", field="prior_BCHW")


def grid_sines(height: int, width: int, dim: int) -> Tensor:
    """Return (h * w, D): DETR's positions, rows in the first half, columns in the second; sines and cosines alternate.

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
