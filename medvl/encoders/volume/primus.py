"""Primus, the volume encoder of COLIPRI (Wald et al., arXiv 2503.01835 and 2510.15042): a
Transformer over cubes with rotary positions along three axes and no class token.

Its layers are timm's EVA blocks, and its parameters have their names. Shape letters are those of
`medvl.schema`; a, b and c are the patches along the axes that the network reads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from medvl.encoders.base import group_by_depth
from medvl.encoders.volume.hierarchical_vit import PatchEmbedding
from medvl.encoders.volume.network import (
    VolumeNetwork,
    check_argument,
    check_width,
    three_sides,
)

_AXES = {"S": (0, False), "I": (0, True), "P": (1, False), "A": (1, True)} | {
    "L": (2, False),
    "R": (2, True),
}
"""Direction -> axis of volumes here (z to the head, y to the back, x to the left), and whether it
is reversed.
"""


class Primus(VolumeNetwork):
    """Pre-norm layers with SwiGLU, layer scale, and norms inside of the attention and the MLP; the
    vector of a volume is the mean of its patches.

    Positions are numbers of patches, so that another size than that of training has the same
    distances.

    Args:
        patch_size: voxels of a patch along (z, y, x).
        embed_dim: width; the width of a head is a multiple of 6.
        depth: number of layers.
        num_heads: attention heads.
        mlp_ratio: width of the MLP, as a multiple of `embed_dim`.
        layer_scale: initial factor of each residual branch.
        drop_path_rate: rate of stochastic depth in the last layer; it grows linearly from 0.
        orientation: directions of the axes that the network reads, such as RAS. Patches are
            returned in the order z, y, x of all encoders.

    Raises:
        ConfigError: "out_of_range" for an argument.
    """

    def __init__(
        self,
        *,
        patch_size: Sequence[int],
        embed_dim: int = 864,
        depth: int = 16,
        num_heads: int = 12,
        mlp_ratio: float = 8 / 3,
        layer_scale: float = 0.1,
        drop_path_rate: float = 0.0,
        orientation: str = "RAS",
    ) -> None:
        super().__init__()
        from timm.models.eva import EvaBlock

        check_argument(depth > 0, "depth", "1 or more", depth)
        check_argument(
            0 <= drop_path_rate < 1, "drop_path_rate", "a rate in [0, 1)", drop_path_rate
        )
        check_width(embed_dim, num_heads)
        check_argument(
            embed_dim % (6 * num_heads) == 0,
            "embed_dim",
            f"a multiple of 6 x num_heads ({6 * num_heads}), for positions along three axes",
            embed_dim,
        )
        self._axes = [_AXES.get(letter, (-1, False)) for letter in orientation]
        check_argument(
            sorted(axis for axis, _ in self._axes) == [0, 1, 2],
            "orientation",
            "three directions such as RAS",
            orientation,
        )
        self.patch_size = three_sides(patch_size, "patch_size")
        self.width = embed_dim
        self.settings = {
            "patch_size": list(self.patch_size),
            "embed_dim": embed_dim,
            "depth": depth,
            "num_heads": num_heads,
            "mlp_ratio": mlp_ratio,
            "layer_scale": layer_scale,
            "drop_path_rate": drop_path_rate,
            "orientation": orientation,
        }
        turned = [self.patch_size[axis] for axis, _ in self._axes]
        self.patch_embed = PatchEmbedding((turned[0], turned[1], turned[2]), embed_dim)
        blocks: list[Any] = [
            EvaBlock(
                embed_dim,
                num_heads,
                qkv_fused=False,
                mlp_ratio=mlp_ratio,
                swiglu_mlp=True,
                scale_mlp=True,
                scale_attn_inner=True,
                num_prefix_tokens=0,
                drop_path=drop_path_rate * layer / max(1, depth - 1),
                init_values=layer_scale,
                norm_layer=nn.LayerNorm,
            )
            for layer in range(depth)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(embed_dim)
        self._head_dim = embed_dim // num_heads
        self._checkpoints = False
        self._initialize(blocks)

    def _initialize(self, blocks: Sequence[Any]) -> None:
        """Draw the weights; layers behind others start smaller."""
        nn.init.kaiming_normal_(self.patch_embed.proj.weight, a=1e-2)
        if self.patch_embed.proj.bias is not None:
            nn.init.zeros_(self.patch_embed.proj.bias)
        for number, block in enumerate(blocks, 1):
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=0.02)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
            with torch.no_grad():
                for last in (block.attn.proj, block.mlp.fc2):
                    last.weight.div_((2.0 * number) ** 0.5)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Set whether layers are recomputed in the backward pass."""
        self._checkpoints = enable

    def parameter_layers(self) -> list[list[str]]:
        return group_by_depth(
            [name for name, _ in self.named_parameters()],
            [f"blocks.{index}." for index in range(len(self.blocks))],
            top=("norm.",),
            stem=("patch_embed.",),
        )

    def forward(self, image_BNDHW: Tensor) -> Tensor:
        order = [axis for axis, _ in self._axes]
        flips = [place for place, (_, is_reversed) in enumerate(self._axes) if is_reversed]
        turned_BDHW = image_BNDHW[:, 0].permute(0, *(1 + axis for axis in order))
        turned_BDHW = turned_BDHW.flip([1 + place for place in flips])
        patches_BabcD = self.patch_embed(turned_BDHW)
        grid = patches_BabcD.shape[1:4]
        tokens_BPD = patches_BabcD.flatten(1, 3)
        rope_PD = rotary_positions(grid, self._head_dim, tokens_BPD.device)
        for block in self.blocks:
            if self._checkpoints and self.training:
                tokens_BPD = checkpoint(block, tokens_BPD, rope=rope_PD, use_reentrant=False)
            else:
                tokens_BPD = block(tokens_BPD, rope=rope_PD)
        turned = self.norm(tokens_BPD).unflatten(1, grid).flip([1 + place for place in flips])
        patches = turned.permute(0, *(1 + order.index(axis) for axis in range(3)), 4)
        patches_BPD = patches.flatten(1, 3)
        return torch.cat([patches_BPD.mean(dim=1, keepdim=True), patches_BPD], dim=1)


def rotary_positions(grid: Sequence[int], head_dim: int, device: torch.device) -> Tensor:
    """Return (a * b * c, 2 * head_dim): sines, then cosines of the angles that turn each pair of
    channels of a head. The first third of the pairs turns with the first axis, and so on, at
    frequencies from 1 to 1/10000.
    """
    count = head_dim // 6
    rate = torch.arange(count, dtype=torch.float32, device=device) / count
    frequencies = 10000.0**-rate
    sides = [torch.arange(side, dtype=torch.float32, device=device) for side in grid]
    places_abc3 = torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1)
    angles = (places_abc3[..., None] * frequencies).flatten(3).flatten(0, 2)
    angles_PD = angles.repeat_interleave(2, dim=1)
    return torch.cat([angles_PD.sin(), angles_PD.cos()], dim=1)
