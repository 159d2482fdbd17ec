"""CT-ViT, the volume encoder of CT-CLIP (Hamamci et al., arXiv 2403.17834): attention within slices
of patches, then along z, and vector quantisation.

Shape letters are those of `medvl.schema`; d, h and w are the patches along the axes, M the parts
that attend within themselves, K their tokens.
"""

from collections.abc import Sequence
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from medvl.common.config_io import check_choice
from medvl.encoders.base import group_by_depth
from medvl.encoders.volume.network import (
    ConvolutionStem,
    Sides,
    Stem,
    VolumeNetwork,
    check_argument,
    grid_of,
    patch_voxels,
    three_sides,
)

_SCALE = 8.0
"""Factor of the cosines of queries and keys, beside the learned ones of each channel."""


class CTViT(VolumeNetwork):
    """Factorised Transformer; the vector of a volume is the mean of its patches.

    Args:
        size: voxels along (z, y, x).
        patch_size: voxels of a patch along (z, y, x).
        embed_dim: width.
        depth: layers within slices of patches, and then along z.
        num_heads: attention heads.
        head_dim: width of a head.
        codes: rows of the codebook that replace patches; 0 for none. The codebook is that of the
            weights and does not change in training, where the released code moves it to the mean
            of its patches.
        transposed: exchange y and x of the input, as the released loader does.
        stem: "patches", as published, or "convolutions" (`ConvolutionStem`).

    Raises:
        ConfigError: "out_of_range" or "mismatch" for an argument.
    """

    def __init__(
        self,
        size: Sides,
        *,
        patch_size: Sequence[int],
        embed_dim: int = 512,
        depth: int = 4,
        num_heads: int = 8,
        head_dim: int = 32,
        codes: int = 0,
        transposed: bool = False,
        stem: Stem = "patches",
    ) -> None:
        super().__init__()
        for field, value in (("depth", depth), ("num_heads", num_heads), ("head_dim", head_dim)):
            check_argument(value > 0, field, "1 or more", value)
        check_argument(embed_dim > 0, "embed_dim", "1 or more", embed_dim)
        check_argument(codes >= 0, "codes", "0 or more", codes)
        self.patch_size = three_sides(patch_size, "patch_size")
        self.width = embed_dim
        grid_of(size, self.patch_size)
        self.transposed = transposed
        self.settings = {
            "patch_size": list(self.patch_size),
            "embed_dim": embed_dim,
            "depth": depth,
            "num_heads": num_heads,
            "head_dim": head_dim,
            "codes": codes,
            "transposed": transposed,
            "stem": stem,
        }
        check_choice(stem, get_args(Stem), "stem")
        make = _PatchEmbedding if stem == "patches" else ConvolutionStem
        self.patch_embed = make(self.patch_size, embed_dim)
        self.position_bias = nn.Sequential(
            nn.Linear(2, embed_dim),
            nn.LeakyReLU(0.1),
            nn.Linear(embed_dim, embed_dim),
            nn.LeakyReLU(0.1),
            nn.Linear(embed_dim, num_heads),
        )
        self.spatial, self.axial = (
            nn.ModuleList(_Layer(embed_dim, num_heads, head_dim) for _ in range(depth))
            for _ in range(2)
        )
        self.spatial_norm, self.axial_norm = (nn.LayerNorm(embed_dim, bias=False) for _ in range(2))
        table = F.normalize(torch.randn(codes, embed_dim), dim=1) if codes else None
        self.register_buffer("codebook", table)
        self.codebook: Tensor | None
        self._checkpoints = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Set whether layers are recomputed in the backward pass."""
        self._checkpoints = enable

    def parameter_layers(self) -> list[list[str]]:
        blocks = [f"{name}.{i}." for name in ("spatial", "axial") for i in range(len(self.spatial))]
        return group_by_depth(
            [name for name, _ in self.named_parameters()],
            blocks,
            top=("axial_norm.",),
            stem=("patch_embed.", "position_bias."),
        )

    def forward(self, image_BNDHW: Tensor) -> Tensor:
        volume_BDHW = image_BNDHW[:, 0]
        if self.transposed:
            volume_BDHW = volume_BDHW.transpose(2, 3)
        tokens_BdhwD = self.patch_embed(volume_BDHW)
        batch, *grid = tokens_BdhwD.shape[:4]
        shape = (batch, grid[0], grid[1], grid[2])
        slices_MKD = tokens_BdhwD.flatten(2, 3).flatten(0, 1)
        bias_HKK = self._biases(grid[1], grid[2]).to(slices_MKD.dtype)
        slices_MKD = self.spatial_norm(self._run(self.spatial, slices_MKD, shape, bias_HKK))
        rows = slices_MKD.unflatten(0, (batch, grid[0])).transpose(1, 2)
        rows_MKD = self.axial_norm(self._run(self.axial, rows.flatten(0, 1), shape, None))
        patches_BPD = rows_MKD.unflatten(0, (batch, -1)).transpose(1, 2).flatten(1, 2)
        patches_BPD = self._quantize(patches_BPD)
        if self.transposed:
            patches = patches_BPD.unflatten(1, grid).transpose(2, 3)
            patches_BPD = patches.flatten(1, 3)
        return torch.cat([patches_BPD.mean(dim=1, keepdim=True), patches_BPD], dim=1)

    def _run(
        self,
        layers: nn.ModuleList,
        tokens_MKD: Tensor,
        shape: tuple[int, int, int, int],
        bias_HKK: Tensor | None,
    ) -> Tensor:
        for layer in layers:
            if self._checkpoints and self.training:
                tokens_MKD = checkpoint(layer, tokens_MKD, shape, bias_HKK, use_reentrant=False)
            else:
                tokens_MKD = layer(tokens_MKD, shape, bias_HKK)
        return tokens_MKD

    def _biases(self, height: int, width: int) -> Tensor:
        """Return (H, K, K), a bias for each pair of patches of a slice, from their distances."""
        device = next(self.position_bias.parameters()).device
        place_KC = torch.cartesian_prod(
            torch.arange(height, device=device), torch.arange(width, device=device)
        ).reshape(-1, 2)
        away_KKC = (place_KC[:, None] - place_KC).float()
        biases_KKH: Tensor = self.position_bias(away_KKC.sign() * away_KKC.abs().log1p())
        return biases_KKH.permute(2, 0, 1)

    def _quantize(self, patches_BPD: Tensor) -> Tensor:
        """Return the codes nearest to patches by cosine; gradients pass through unchanged."""
        if self.codebook is None:
            return patches_BPD
        unit_BPD = F.normalize(patches_BPD.float(), dim=2)
        nearest_BP = (unit_BPD @ F.normalize(self.codebook, dim=1).T).argmax(dim=2)
        codes_BPD = self.codebook[nearest_BP].to(patches_BPD.dtype)
        return patches_BPD + (codes_BPD - patches_BPD).detach()


class _PatchEmbedding(nn.Sequential):
    """Linear map of the voxels of a patch, between two norms."""

    def __init__(self, patch: Sides, width: int) -> None:
        voxels = patch[0] * patch[1] * patch[2]
        super().__init__(nn.LayerNorm(voxels), nn.Linear(voxels, width), nn.LayerNorm(width))
        self.patch = patch

    def forward(self, image_MDHW: Tensor) -> Tensor:
        """Return (M, d, h, w, width)."""
        tokens: Tensor = super().forward(patch_voxels(image_MDHW, self.patch))
        return tokens


class _Layer(nn.Module):
    """Depthwise convolution, attention over cosines, and a gated feed-forward layer, each added to
    its input. Keys and values are of the input before its norm, as in the released code.
    """

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        inside = heads * head_dim
        hidden = int(4 * (2 / 3) * width)
        self.conv = nn.Conv3d(width, width, 3, groups=width)
        self.norm = nn.LayerNorm(width, bias=False)
        self.query = nn.Linear(width, inside, bias=False)
        self.key_value = nn.Linear(width, 2 * inside, bias=False)
        self.query_scale = nn.Parameter(torch.ones(head_dim))
        self.key_scale = nn.Parameter(torch.ones(head_dim))
        self.out = nn.Linear(inside, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 2 * hidden, bias=False)
        self.mlp_out = nn.Linear(hidden, width, bias=False)

    def forward(
        self, tokens_MKD: Tensor, shape: tuple[int, int, int, int], bias_HKK: Tensor | None
    ) -> Tensor:
        tokens_MKD = tokens_MKD + self._convolve(tokens_MKD, shape)
        tokens_MKD = tokens_MKD + self._attend(tokens_MKD, bias_HKK)
        value, gate = self.mlp_in(self.mlp_norm(tokens_MKD)).chunk(2, dim=2)
        output: Tensor = self.mlp_out(F.gelu(gate) * value)
        return tokens_MKD + output

    def _convolve(self, tokens_MKD: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
        """Convolve over (z, y, x), with zeros below the first slice.

        The released code reads the tokens in the order of parts as if it were b, d, h, w, which in
        the layers along z it is not; its weights depend on it.
        """
        cells_BDdhw = tokens_MKD.reshape(*shape, -1).movedim(4, 1)
        mixed: Tensor = self.conv(F.pad(cells_BDdhw, (1, 1, 1, 1, 2, 0)))
        return mixed.movedim(1, 4).reshape(tokens_MKD.shape)

    def _attend(self, tokens_MKD: Tensor, bias_HKK: Tensor | None) -> Tensor:
        query, key, value = (
            each.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for each in (
                self.query(self.norm(tokens_MKD)),
                *self.key_value(tokens_MKD).chunk(2, dim=2),
            )
        )
        query = F.normalize(query, dim=3) * self.query_scale
        key = F.normalize(key, dim=3) * self.key_scale
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=bias_HKK, scale=_SCALE)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out
