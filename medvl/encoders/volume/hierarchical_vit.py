"""Vision Transformer for volumes, with attention within slices, scans or the whole study (HLIP,
Zhao et al., arXiv 2505.21862).

Its parameters have the names of timm's vision Transformer and of the authors' code
(github.com/Zch0414/hlip), so that their files fit. Shape letters are those of `medvl.schema`; N is
the number of scans, d, h and w that of patches along the axes, K the tokens of a part.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from medvl.common.config_io import check_choice
from medvl.encoders.base import group_by_depth
from medvl.encoders.pretrained import KeyMap, fitting_keys, unused_blocks
from medvl.encoders.volume.network import (
    ConvolutionStem,
    Sides,
    Stem,
    VolumeNetwork,
    check_argument,
    check_width,
    grid_of,
    patch_voxels,
    three_sides,
)
from medvl.errors import ConfigError, WeightsError

Level = Literal["slice", "scan", "study"]
LEVELS: tuple[Level, ...] = ("slice", "scan", "study")
_HEADS = (
    "head.",
    "fc_norm.",
    "mask_token",
    "decoder_",
    "visual.head.",
    "text.",
    "logit_scale",
    "logit_bias",
)
"""Key prefixes outside the encoder: classifiers, decoders of masked autoencoders, text encoders."""


def sinusoids(places: Tensor, width: int) -> Tensor:
    """Return (len(places), width): sines, then cosines, at frequencies from 1 to 1/10000."""
    frequencies = 10000 ** -(torch.arange(width // 2, dtype=torch.float64) / (width / 2))
    angles = places.to(torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def volume_positions(grid: Sides, width: int) -> Tensor:
    """Return sin-cos positions (1, d, h, w, width): a third of the width for each axis, in the
    order w, h, d. What a third of a sine and a cosine each leaves over is 0.
    """
    third = width // 6 * 2
    d, h, w = (sinusoids(torch.arange(side), third) for side in grid)
    parts = (
        w[None, None, :].expand(*grid, -1),
        h[None, :, None].expand(*grid, -1),
        d[:, None, None].expand(*grid, -1),
    )
    return F.pad(torch.cat(parts, dim=3), (0, width - 3 * third))[None]


def resize_positions(table_1dhwD: Tensor, grid: Sides) -> Tensor:
    """Interpolate positions (1, d, h, w, D) to another grid, trilinearly."""
    if tuple(table_1dhwD.shape[1:4]) == grid:
        return table_1dhwD
    channels_first = table_1dhwD.permute(0, 4, 1, 2, 3)
    return F.interpolate(channels_first.float(), grid, mode="trilinear").permute(0, 2, 3, 4, 1)


class _Norm(nn.LayerNorm):
    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(width, eps=1e-6, **options)


class PatchEmbedding(nn.Module):
    """Convolution whose stride is its kernel."""

    def __init__(self, patch: Sides, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv3d(1, width, patch, patch)

    def forward(self, image_MDHW: Tensor) -> Tensor:
        """Return (M, d, h, w, width)."""
        voxels = patch_voxels(image_MDHW, self.patch)
        return F.linear(voxels, self.proj.weight.flatten(1), self.proj.bias)


class HierarchicalViT(VolumeNetwork):
    """Transformer whose layers attend within parts of a study.

    Each part has its own copy of the class token. Where a layer has larger parts than the one
    before, their class tokens are averaged; where it has smaller ones, they are copied.

    Args:
        size: voxels along (z, y, x).
        patch_size: voxels of a patch along (z, y, x).
        embed_dim: width, even and a multiple of `num_heads`.
        depth: number of layers.
        num_heads: attention heads.
        attention: for each layer "slice", "scan" or "study": the tokens that attend to each other.
            Default: every third layer "study", the others "slice". With one scan, "scan" and
            "study" are the same.
        drop_path_rate: rate of stochastic depth in the last layer; it grows linearly from 0.
        max_scans: rows of the table of scan positions, for studies of several scans; in training,
            each step draws which rows scans have. 0: no table. HLIP's files for CT have 1.
        dropout: rate of dropout in attention and feed-forward layers.
        layers: earlier layers whose patches are returned too.
        stem: "patches", as published, or "convolutions" (`ConvolutionStem`).

    Raises:
        ConfigError: "unknown_name", "out_of_range" or "mismatch" for an argument.
    """

    def __init__(
        self,
        size: Sides,
        *,
        patch_size: Sequence[int],
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        attention: Sequence[Level] | None = None,
        drop_path_rate: float = 0.0,
        max_scans: int = 0,
        dropout: float = 0.0,
        layers: Sequence[int] = (),
        stem: Stem = "patches",
    ) -> None:
        super().__init__()
        from timm.models.vision_transformer import Block

        check_argument(
            0 <= drop_path_rate < 1, "drop_path_rate", "a rate in [0, 1)", drop_path_rate
        )
        check_argument(max_scans >= 0, "max_scans", "0 or more", max_scans)
        check_argument(0 <= dropout < 1, "dropout", "a rate in [0, 1)", dropout)
        is_right = list(layers) == sorted({*layers} & {*range(depth)})
        check_argument(is_right, "layers", f"layers from 0 to {depth - 1} in order", list(layers))
        check_width(embed_dim, num_heads)
        self.patch_size = three_sides(patch_size, "patch_size")
        self.width = embed_dim
        self.max_scans = max(1, max_scans)
        self.layers = tuple(layers)
        self.maps = 1 + len(self.layers)
        self.grid = grid_of(size, self.patch_size)
        self.levels = _levels(attention, depth)
        self.settings = {
            "patch_size": list(self.patch_size),
            "embed_dim": embed_dim,
            "depth": depth,
            "num_heads": num_heads,
            "attention": list(self.levels),
            "drop_path_rate": drop_path_rate,
            "max_scans": max_scans,
            "dropout": dropout,
            "layers": list(layers),
            "stem": stem,
        }
        check_choice(stem, get_args(Stem), "stem")
        make = PatchEmbedding if stem == "patches" else ConvolutionStem
        self.patch_embed = make(self.patch_size, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        rates = [drop_path_rate * layer / max(1, depth - 1) for layer in range(depth)]
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                4.0,
                qkv_bias=True,
                proj_drop=dropout,
                attn_drop=dropout,
                drop_path=rate,
                norm_layer=_Norm,
            )
            for rate in rates
        )
        self.norm = _Norm(embed_dim)
        self.register_buffer("spatial_posemb", volume_positions(self.grid, embed_dim))
        self.spatial_posemb: Tensor
        table = sinusoids(torch.arange(max_scans), embed_dim)[None] if max_scans else None
        self.register_buffer("sequential_posemb", table)
        self.sequential_posemb: Tensor | None
        self._checkpoints = False
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.cls_token, std=1e-6)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Set whether layers are recomputed in the backward pass."""
        self._checkpoints = enable

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay, as timm names them."""
        return {"cls_token"}

    def parameter_layers(self) -> list[list[str]]:
        return group_by_depth(
            [name for name, _ in self.named_parameters()],
            [f"blocks.{index}." for index in range(len(self.blocks))],
            top=("norm.",),
            stem=("cls_token", "patch_embed."),
        )

    def fit_weights(
        self, tensors: Mapping[str, Tensor], source: str, *, rescale: bool
    ) -> dict[str, Tensor]:
        names = self.state_dict()
        keys = KeyMap(
            layouts=(
                (("visual.trunk.", ""),),
                (("", ""),),
            ),
            ignored_keys=_HEADS,
            ignored_names=unused_blocks("blocks.", names),
        )
        expected = {**names, "pos_embed": None}
        tensors = fitting_keys(tensors, lambda candidate: keys.count_fitting(candidate, expected))
        mapped = keys.apply(tensors)[0]
        if "pos_embed" in mapped:
            lacking = [key for key in ("cls_token", "patch_embed.proj.weight") if key not in mapped]
            if lacking or mapped["patch_embed.proj.weight"].ndim != 4:
                raise WeightsError(
                    f"{source} is no vision Transformer for images in timm's layout: expected a "
                    "cls_token, a pos_embed and filters (D, 3, h, w)",
                    "mismatch",
                )
            mapped = inflate(mapped, self.patch_size, self.grid, rescale=rescale)
        elif "spatial_posemb" in mapped and mapped["spatial_posemb"].ndim == 5:
            mapped["spatial_posemb"] = resize_positions(mapped["spatial_posemb"], self.grid)
        if self.sequential_posemb is not None:
            mapped.setdefault("sequential_posemb", self.sequential_posemb)
        return mapped

    def forward(self, image_BNDHW: Tensor) -> Tensor:
        batch, scans = image_BNDHW.shape[:2]
        patches = self.patch_embed(image_BNDHW.flatten(0, 1)).unflatten(0, (batch, scans))
        depth, height, columns = patches.shape[2:5]
        positions = resize_positions(self.spatial_posemb, (depth, height, columns))[:, None]
        if self.sequential_posemb is not None:
            positions = positions + self._scan_positions(scans)[:, :, None, None, None]
        patches_BPD = (patches + positions.to(patches.dtype)).flatten(1, 4)
        parts = {"slice": scans * depth, "scan": scans, "study": 1}
        count = parts[self.levels[0]]
        tokens = torch.cat(
            [
                self.cls_token.expand(batch * count, -1, -1).to(patches.dtype),
                patches_BPD.reshape(batch * count, -1, patches_BPD.shape[2]),
            ],
            dim=1,
        )
        earlier = []
        for layer, (level, block) in enumerate(zip(self.levels, self.blocks, strict=True)):
            tokens = regroup(tokens, count, parts[level])
            count = parts[level]
            if self._checkpoints and self.training:
                tokens = checkpoint(block, tokens, use_reentrant=False)
            else:
                tokens = block(tokens)
            if layer in self.layers:
                earlier.append(regroup(tokens, count, 1)[:, 1:])
        normalized: Tensor = self.norm(regroup(tokens, count, 1))
        return torch.cat([normalized[:, :1], *earlier, normalized[:, 1:]], dim=1)

    def _scan_positions(self, scans: int) -> Tensor:
        """Return the rows (1, N, D) of the scans: drawn in training, else the first ones."""
        table_1ND = self.sequential_posemb
        if table_1ND is None or scans > table_1ND.shape[1]:
            raise ConfigError(
                f"expected at most max_scans scans of a study, got {scans}", "mismatch"
            )
        if not self.training:
            return table_1ND[:, :scans]
        return table_1ND[:, torch.randperm(table_1ND.shape[1], device=table_1ND.device)[:scans]]


def regroup(tokens_MKD: Tensor, old: int, new: int) -> Tensor:
    """Part each study into `new` equal parts instead of `old`, of which one divides the other.

    `tokens_MKD` has M = B * old parts with a class token each.
    """
    if new == old:
        return tokens_MKD
    prefix_M1D = tokens_MKD[:, :1]
    patches = tokens_MKD[:, 1:]
    width = tokens_MKD.shape[2]
    count = len(tokens_MKD) * new // old
    if new > old:
        prefix_M1D = prefix_M1D.repeat_interleave(new // old, dim=0)
    else:
        prefix_M1D = prefix_M1D.unflatten(0, (-1, old // new)).mean(dim=1)
    return torch.cat([prefix_M1D, patches.reshape(count, -1, width)], dim=1)


def inflate(
    tensors: dict[str, Tensor], patch: Sides, grid: Sides, *, rescale: bool
) -> dict[str, Tensor]:
    """Return the weights of a vision Transformer for RGB images (timm's names) as those of a
    `HierarchicalViT`.

    The filters are enlarged bicubically to the patch, summed over RGB, and repeated over its depth
    divided by it. The table of positions is enlarged bicubically with antialiasing, and sin-cos
    positions along z are added. The position of the class token is added to the token.

    Args:
        tensors: `patch_embed.proj.weight` (D, 3, h, w), `pos_embed`, `cls_token` and others, which
            stay.
        patch, grid: of the volume encoder.
        rescale: divide enlarged filters by the growth of their area. HLIP does not, so that its
            response to a constant grows with it.
    """
    from timm.layers import resample_abs_pos_embed

    out = dict(tensors)
    filters_D3hw = out["patch_embed.proj.weight"].float()
    sides = tuple(filters_D3hw.shape[2:])
    if sides != patch[1:]:
        filters_D3hw = F.interpolate(filters_D3hw, patch[1:], mode="bicubic")
        if rescale:
            filters_D3hw = filters_D3hw * (math.prod(sides) / math.prod(patch[1:]))
    grey_D1hw = filters_D3hw.sum(dim=1, keepdim=True)
    out["patch_embed.proj.weight"] = grey_D1hw[:, :, None].repeat(1, 1, patch[0], 1, 1) / patch[0]
    table_1PD = out.pop("pos_embed").float()
    if math.isqrt(table_1PD.shape[1]) ** 2 != table_1PD.shape[1]:
        out["cls_token"] = out["cls_token"] + table_1PD[:, :1]
        table_1PD = table_1PD[:, 1:]
    plane_1PD = resample_abs_pos_embed(table_1PD, list(grid[1:]), num_prefix_tokens=0)
    width = table_1PD.shape[2]
    along_z = sinusoids(torch.arange(grid[0]), width)[None, :, None, None]
    out["spatial_posemb"] = along_z + plane_1PD.reshape(1, 1, *grid[1:], width)
    return out


def _levels(attention: Sequence[Level] | None, depth: int) -> tuple[Level, ...]:
    check_argument(depth > 0, "depth", "1 or more", depth)
    if attention is None:
        return tuple("study" if layer % 3 == 2 else "slice" for layer in range(depth))
    for level in attention:
        check_choice(level, LEVELS, "attention")
    if len(attention) != depth:
        raise ConfigError(
            f"expected a level of attention for each of {depth} layers, got {len(attention)}",
            "mismatch",
            field="attention",
        )
    return tuple(attention)
