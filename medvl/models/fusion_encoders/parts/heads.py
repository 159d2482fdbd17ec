"""Pretraining heads of fusion-encoders: pixels of removed patches, a space that images and texts
share.

Letters: B batch, E shared embedding dim, N positions, P patches, K kept patches, D width, C values
of a patch's pixels.
"""

import dataclasses
import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_within
from medvl.encoders import ImageEncoder
from medvl.errors import ConfigError
from medvl.losses.masked import PatchMask
from medvl.models.base import INIT_STD, init_weights


@dataclasses.dataclass(frozen=True, slots=True)
class Patches:
    """The patches of an encoder's images, one for each cell of its grid."""

    grid: tuple[int, int]
    """(h, w) of the patches."""
    side: int
    """Side of a patch in pixels."""
    values: int
    """C, numbers of a patch."""

    @classmethod
    def of(cls, encoder: ImageEncoder) -> "Patches":
        """Return the patches of an encoder. Raises ConfigError unless they are squares that
        cover its images.
        """
        grid = encoder.grid(*encoder.image_size)
        side = encoder.image_size[0] // grid[0]
        if encoder.image_size != (side * grid[0], side * grid[1]):
            message = (
                f"image_size must be a multiple of the encoder's grid {grid}, got "
                f"{encoder.image_size}"
            )
            raise ConfigError(message, "mismatch", field="image_size")
        return cls(grid, side, side**2 * encoder.in_channels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelDecoderConfig:
    """Settings of masked image modelling, to inherit beside a system's other settings; M3AE's by
    default.
    """

    mim_weight: float = 1.0
    decoder_width: int = 384
    decoder_layers: int = 4
    decoder_heads: int = 6
    stored_positions: bool = False
    """Keep the positions of the pixel decoder in the checkpoint: imported ones that are not
    MAE's (MRM).
    """

    def check_decoder(self) -> None:
        """Raise ConfigError for a value out of range."""
        check_within(
            self, "(0, inf)", "mim_weight", "decoder_width", "decoder_layers", "decoder_heads"
        )
        if self.decoder_width % self.decoder_heads or self.decoder_width % 4:
            message = (
                f"decoder_width must be a multiple of 4 and of decoder_heads, got "
                f"{self.decoder_width}"
            )
            raise ConfigError(message, "conflict", field="decoder_width")


class PixelDecoder(nn.Module):
    """MAE's decoder (He et al., arXiv 2111.06377, section 3): pixels of all patches from the kept
    ones and mask tokens.

    Args:
        in_dim: width of the input states.
        patches: patches of the encoder; also an attribute.
        config: sizes of the pre-LN blocks.
        activation: "quick_gelu" as in CLIP and M3AE, or "gelu" as in MAE and M2I2, whose norms have
            an epsilon of 1e-6.
    """

    def __init__(
        self,
        in_dim: int,
        patches: Patches,
        config: PixelDecoderConfig,
        activation: Literal["quick_gelu", "gelu"] = "quick_gelu",
    ) -> None:
        super().__init__()
        from timm.layers import QuickGELU
        from timm.models.vision_transformer import Block

        width = config.decoder_width
        act_layer = QuickGELU if activation == "quick_gelu" else nn.GELU
        norm_layer: Any = functools.partial(
            nn.LayerNorm, eps=1e-5 if activation == "quick_gelu" else 1e-6
        )
        self.patches = patches
        self.embed = nn.Linear(in_dim, width)
        self.mask_token = nn.Parameter(torch.empty(width).normal_(std=INIT_STD))
        self.register_buffer(
            "positions_ND", sinusoids(patches.grid, width), persistent=config.stored_positions
        )
        self.positions_ND: Tensor
        self.blocks = nn.ModuleList(
            Block(
                width,
                config.decoder_heads,
                qkv_bias=True,
                act_layer=act_layer,
                norm_layer=norm_layer,
            )
            for _ in range(config.decoder_layers)
        )
        self.norm = norm_layer(width)
        self.pixels = nn.Linear(width, patches.values)
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

    The first half of each vector encodes the column, the second the row: sines, then cosines, of
    frequencies from 1 down to 1 / 10,000 (MAE's table). `width` must be a multiple of 4.
    """
    quarter = width // 4
    frequency_Q = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    halves = []
    for coordinate_P in (
        torch.arange(grid[1]).repeat(grid[0]),
        torch.arange(grid[0]).repeat_interleave(grid[1]),
    ):
        angle_PQ = coordinate_P.double()[:, None] * frequency_Q
        halves += [angle_PQ.sin(), angle_PQ.cos()]
    patches_PD = torch.cat(halves, dim=1)
    return torch.cat([torch.zeros_like(patches_PD[:1]), patches_PD]).float()


class ContrastHead(nn.Module):
    """Projections of images and texts to a shared space (PTUnifier): LayerNorm and a linear
    layer without a bias.
    """

    def __init__(self, pooled_dim: int, width: int) -> None:
        super().__init__()
        self.image, self.text = (
            nn.Sequential(nn.LayerNorm(pooled_dim), nn.Linear(pooled_dim, width, bias=False))
            for _ in range(2)
        )
        init_weights(self)

    def forward(self, image_BD: Tensor, text_BD: Tensor) -> tuple[Tensor, Tensor]:
        """(B, E) twice, L2-normalised float32."""
        return F.normalize(self.image(image_BD).float(), dim=-1), F.normalize(
            self.text(text_BD).float(), dim=-1
        )


class BlockHead(nn.Module):
    """Linear heads for the pixels of masked blocks, one for each scale, and the token of a
    masked cell.
    """

    def __init__(self, width: int, values: int, scales: int) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.empty(width).normal_(std=INIT_STD))
        self.scales = nn.ModuleList(nn.Linear(width, values) for _ in range(scales))
        init_weights(self)
