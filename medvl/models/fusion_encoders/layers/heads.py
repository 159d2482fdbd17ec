"""Pretraining head of fusion-encoders for the pixels of removed patches.

Letters: B batch, N positions, P patches, K kept patches, D width, C values of a patch's pixels.
"""

import torch
from torch import Tensor, nn

from medvl.losses.mim import PatchMask
from medvl.models.bert_init import INIT_STD, init_weights


class PixelDecoder(nn.Module):
    """MAE's decoder (He et al., arXiv 2111.06377, section 3): pixels of all patches from the kept ones and mask tokens.

    Args:
        in_dim: width of the input states.
        grid: (h, w) of the patches.
        values: C, numbers of a patch.
        width, layers, heads: sizes of the pre-LN blocks (CLIP's, as in M3AE).
    """

    def __init__(self, in_dim: int, grid: tuple[int, int], values: int, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        from timm.layers import QuickGELU
        from timm.models.vision_transformer import Block

        self.embed = nn.Linear(in_dim, width)
        self.mask_token = nn.Parameter(torch.empty(width).normal_(std=INIT_STD))
        self.register_buffer("positions_ND", sinusoids(grid, width), persistent=False)
        self.positions_ND: Tensor
        self.blocks = nn.ModuleList(
            Block(width, heads, qkv_bias=True, act_layer=QuickGELU, norm_layer=nn.LayerNorm) for _ in range(layers)
        )
        self.norm, self.pixels = nn.LayerNorm(width), nn.Linear(width, values)
        init_weights(self)

    def forward(self, states_BND: Tensor, patches: PatchMask) -> Tensor:
        """(B, P, C) from the class token followed by the kept patches, N = 1 + K."""
        embedded_BND = self.embed(states_BND)
        restored_BPD = patches.restore(embedded_BND[:, 1:], self.mask_token)
        hidden_BND = torch.cat([embedded_BND[:, :1], restored_BPD], dim=1) + self.positions_ND
        for block in self.blocks:
            hidden_BND = block(hidden_BND)
        pixels_BPC: Tensor = self.pixels(self.norm(hidden_BND[:, 1:]))
        return pixels_BPC


def sinusoids(grid: tuple[int, int], width: int) -> Tensor:
    """(1 + h * w, D): fixed positions of a class token (zeros) and of a grid in row-major order.

    The first half of each vector encodes the column, the second the row: sines, then cosines, of frequencies from 1
    down to 1 / 10,000 (MAE's table). `width` must be a multiple of 4.
    """
    quarter = width // 4
    frequency_Q = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    halves = []
    for coordinate_P in (torch.arange(grid[1]).repeat(grid[0]), torch.arange(grid[0]).repeat_interleave(grid[1])):
        angle_PQ = coordinate_P.double()[:, None] * frequency_Q
        halves += [angle_PQ.sin(), angle_PQ.cos()]
    patches_PD = torch.cat(halves, dim=1)
    return torch.cat([torch.zeros_like(patches_PD[:1]), patches_PD]).float()
