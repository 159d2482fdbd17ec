"""The networks of LViT (Li et al., arXiv 2206.14718) and of its U-Net baseline, as in the released code.

Shape letters: K channels of a level; P tokens, (size / 16) squared at every level; T words; others as in the schema.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCHES = (16, 8, 4, 2)
"""Side of a token in pixels of each level, so that all levels have the same tokens."""
_HEADS, _DROPOUT = 8, 0.1


class ConvBlock(nn.Sequential):
    """Convolution, batch normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def _two_blocks(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(ConvBlock(inputs, outputs), ConvBlock(outputs, outputs))


class PixelAttention(nn.Module):
    """Pixel-level attention (PLAM): each pixel is weighted by a function of its mean and maximum over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mean = nn.Conv2d(channels, channels, 1, bias=False)
        self.maximum = nn.Conv2d(channels, channels, 1, bias=False)
        self.weigh = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, skip_BKHW: Tensor) -> Tensor:
        """Return the weighted skip connection."""
        mean_BHW = self.mean(skip_BKHW).relu().mean(dim=1)
        maximum_BHW = self.maximum(skip_BKHW).relu().amax(dim=1)
        weight_BHW1 = self.weigh(torch.stack([mean_BHW, maximum_BHW, mean_BHW + maximum_BHW], dim=3))
        return weight_BHW1.permute(0, 3, 1, 2) * skip_BKHW


class Up(nn.Module):
    """Decoder level: the coarser features enlarged, the skip connection, two convolutions."""

    def __init__(self, inputs: int, outputs: int, *, attention: bool) -> None:
        super().__init__()
        half = inputs // 2
        self.attention: nn.Module = PixelAttention(half) if attention else nn.Identity()
        self.enlarge: nn.Module = nn.Upsample(scale_factor=2) if attention else nn.ConvTranspose2d(half, half, 2, 2)
        self.blocks = _two_blocks(inputs, outputs)

    def forward(self, coarse_BKhw: Tensor, skip_BKHW: Tensor) -> Tensor:
        """Return the features of this level."""
        joined = torch.cat([self.attention(skip_BKHW), self.enlarge(coarse_BKhw)], dim=1)
        features: Tensor = self.blocks(joined)
        return features


class UNet(nn.Module):
    """The U-Net of LViT's comparison: five levels of `width` times 1, 2, 4, 8 and 8 channels."""

    attention = False

    def __init__(self, channels: int, labels: int, width: int) -> None:
        super().__init__()
        levels = [width * factor for factor in (1, 2, 4, 8, 8)]
        self.enter = ConvBlock(channels, width)
        self.down = nn.ModuleList(_two_blocks(a, b) for a, b in itertools.pairwise(levels))
        outputs = [width, width, *levels[1:3]]
        pairs = zip(levels[:-1], outputs, strict=True)
        self.up = nn.ModuleList(Up(2 * level, out, attention=self.attention) for level, out in pairs)
        self.leave = nn.Conv2d(width, labels, 1)

    def forward(self, image_BCHW: Tensor, words_BTD: Tensor | None = None) -> Tensor:
        """Return logits (B, L, H, W); `words_BTD` are for `LViTNetwork`."""
        levels = [self.enter(image_BCHW)]
        for block in self.down:
            levels.append(block(F.max_pool2d(levels[-1], 2)))
        features = levels.pop()
        for up, skip in zip(reversed(self.up), reversed(self.skips(levels, words_BTD)), strict=True):
            features = up(features, skip)
        logits_BLHW: Tensor = self.leave(features)
        return logits_BLHW

    def skips(self, levels: list[Tensor], words_BTD: Tensor | None) -> list[Tensor]:
        """Return the skip connections from the encoder's features, finest first."""
        return levels


class LViTNetwork(UNet):
    """U-Net with pixel-level attention, and a branch of Transformer blocks that reads the text at the first level.

    Args:
        channels, labels, width: as `UNet`.
        size: height and width of the images.
        text: (words, width of their vectors), or None for a network without text.
    """

    attention = True

    def __init__(self, channels: int, labels: int, width: int, size: int, text: tuple[int, int] | None) -> None:
        super().__init__(channels, labels, width)
        dims = [width * factor for factor in (1, 2, 4, 8)]
        tokens = (size // PATCHES[0]) ** 2
        self.grid = size // PATCHES[0]
        self.text = None if text is None else TextLevel(*text, dims, tokens)
        self.embed = nn.ModuleList(Patches(dim, patch, tokens) for dim, patch in zip(dims, PATCHES, strict=True))
        self.down_blocks, self.up_blocks = (nn.ModuleList(Block(dim) for dim in dims) for _ in range(2))
        self.narrow = nn.ModuleList(_conv1d(dim, dim // 2) for dim in dims[1:])
        self.widen = nn.ModuleList(_conv1d(2 * dim, dim) for dim in dims[:-1])
        self.reconstruct = nn.ModuleList(
            nn.Sequential(nn.Conv2d(dim, dim, 1), nn.BatchNorm2d(dim), nn.ReLU()) for dim in dims
        )

    def skips(self, levels: list[Tensor], words_BTD: Tensor | None) -> list[Tensor]:
        """Add the Transformer branch to the features of each level."""
        down: list[Tensor] = []
        for number, (embed, block) in enumerate(zip(self.embed, self.down_blocks, strict=True)):
            tokens_BPK = embed(levels[number])
            if number == 0 and self.text is not None:
                tokens_BPK = tokens_BPK + self.text(words_BTD)
            tokens_BPK = block(tokens_BPK)
            if number:
                tokens_BPK = torch.cat([_along_tokens(self.narrow[number - 1], tokens_BPK), down[-1]], dim=2)
            down.append(tokens_BPK)
        skips: list[Tensor] = []
        coarser: Tensor | None = None
        for number in (3, 2, 1, 0):
            tokens_BPK = self.up_blocks[number](down[number])
            if coarser is not None:
                tokens_BPK = tokens_BPK + _along_tokens(self.widen[number], coarser)
            coarser = tokens_BPK
            # A 1 x 1 convolution and nearest-neighbour enlargement commute; published is the costlier order.
            cells_BKhw = self.reconstruct[number](tokens_BPK.transpose(1, 2).unflatten(2, (self.grid, self.grid)))
            skips.append(F.interpolate(cells_BKhw, scale_factor=PATCHES[number]) + levels[number])
        return skips[::-1]


class TextLevel(nn.Module):
    """Words as an addition to the tokens of the first level: four convolutions along the words, one across them."""

    def __init__(self, words: int, dim: int, dims: list[int], tokens: int) -> None:
        super().__init__()
        widths = [dim, *reversed(dims)]
        self.narrow = nn.Sequential(*(nn.Conv1d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths)))
        self.spread = _conv1d(words, tokens)

    def forward(self, words_BTD: Tensor) -> Tensor:
        """Return (B, P, K) from word vectors, zeros where a text has no word."""
        tokens_BPK: Tensor = self.spread(self.narrow(words_BTD.transpose(1, 2)).transpose(1, 2))
        return tokens_BPK


class Patches(nn.Module):
    """Tokens of a feature map, with learned positions and dropout."""

    def __init__(self, channels: int, patch: int, tokens: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, channels, patch, stride=patch)
        self.position_1PK = nn.Parameter(torch.zeros(1, tokens, channels))

    def forward(self, features_BKHW: Tensor) -> Tensor:
        """Return (B, P, K)."""
        tokens_BPK = self.project(features_BKHW).flatten(2).transpose(1, 2)
        return F.dropout(tokens_BPK + self.position_1PK, _DROPOUT, self.training)


class Block(nn.Module):
    """Transformer block whose MLP has GELU and dropout after both layers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        enter, leave = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        for layer in (enter, leave):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)
        self.mlp = nn.Sequential(enter, nn.GELU(), nn.Dropout(_DROPOUT), leave, nn.GELU(), nn.Dropout(_DROPOUT))

    def forward(self, tokens_BPK: Tensor) -> Tensor:
        """Return the tokens after attention and MLP."""
        query, key, value = self.qkv(self.norm1(tokens_BPK)).unflatten(2, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens_BPK = tokens_BPK + self.project(attended)
        return tokens_BPK + self.mlp(self.norm2(tokens_BPK))


def _conv1d(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(inputs, outputs, 3, padding=1), nn.BatchNorm1d(outputs), nn.ReLU())


def _along_tokens(layers: nn.Module, tokens_BPK: Tensor) -> Tensor:
    result: Tensor = layers(tokens_BPK.transpose(1, 2)).transpose(1, 2)
    return result
