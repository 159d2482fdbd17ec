"""LViT: a U-Net and a branch of Transformer blocks that reads the image's text (Li et al., arXiv
2206.14718).
"""

import dataclasses
import itertools
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_choice, check_labels, check_multiple, check_within
from medvl.data.loading.dense_targets import DenseBatch
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import TextEncoder, create_text_encoder
from medvl.errors import ConfigError
from medvl.losses.common import full_precision, gather, mean_over_ranks
from medvl.models.base import EncoderArguments, SystemConfig
from medvl.models.downstream.dense import MaskModel
from medvl.models.dual_encoders.bases.local import sum_by_slot, word_slots
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses

# The networks of LViT (Li et al., arXiv 2206.14718) and of its U-Net baseline, as in the released
# code.
#
# Shape letters: K channels of a level; P tokens, (size / 16) squared at every level; T words;
# others as in the schema.

PATCHES = (16, 8, 4, 2)
"""Side of a token in pixels of each level, so that all levels have the same tokens."""
_HEADS = 8
_DROPOUT = 0.1


class ConvBlock(nn.Sequential):
    """Convolution, batch normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
        )


def _two_blocks(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(ConvBlock(inputs, outputs), ConvBlock(outputs, outputs))


class PixelAttention(nn.Module):
    """Pixel-level attention (PLAM): each pixel is weighted by a function of its mean and maximum
    over channels.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mean = nn.Conv2d(channels, channels, 1, bias=False)
        self.maximum = nn.Conv2d(channels, channels, 1, bias=False)
        self.weigh = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, skip_BKHW: Tensor) -> Tensor:
        """Return the weighted skip connection."""
        mean_BHW = self.mean(skip_BKHW).relu().mean(dim=1)
        maximum_BHW = self.maximum(skip_BKHW).relu().amax(dim=1)
        weight_BHW1 = self.weigh(
            torch.stack([mean_BHW, maximum_BHW, mean_BHW + maximum_BHW], dim=3)
        )
        return weight_BHW1.permute(0, 3, 1, 2) * skip_BKHW


class Up(nn.Module):
    """Decoder level: the coarser features enlarged, the skip connection, two convolutions."""

    def __init__(self, inputs: int, outputs: int, *, attention: bool) -> None:
        super().__init__()
        half = inputs // 2
        self.attention: nn.Module = PixelAttention(half) if attention else nn.Identity()
        self.enlarge: nn.Module = (
            nn.Upsample(scale_factor=2) if attention else nn.ConvTranspose2d(half, half, 2, 2)
        )
        self.blocks = _two_blocks(inputs, outputs)

    def forward(self, coarse_BKhw: Tensor, skip_BKHW: Tensor) -> Tensor:
        """Return the features of this level."""
        both_BCHW = torch.cat([self.attention(skip_BKHW), self.enlarge(coarse_BKhw)], dim=1)
        features: Tensor = self.blocks(both_BCHW)
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
        self.up = nn.ModuleList(
            Up(2 * level, out, attention=self.attention) for level, out in pairs
        )
        self.leave = nn.Conv2d(width, labels, 1)

    def forward(self, image_BCHW: Tensor, words_BTD: Tensor | None = None) -> Tensor:
        """Return logits (B, L, H, W); `words_BTD` are for `LViTNetwork`."""
        levels = [self.enter(image_BCHW)]
        for block in self.down:
            levels.append(block(F.max_pool2d(levels[-1], 2)))
        features = levels.pop()
        for up, skip in zip(
            reversed(self.up), reversed(self.skips(levels, words_BTD)), strict=True
        ):
            features = up(features, skip)
        logits_BLHW: Tensor = self.leave(features)
        return logits_BLHW

    def skips(self, levels: list[Tensor], words_BTD: Tensor | None) -> list[Tensor]:
        """Return the skip connections from the encoder's features, finest first."""
        return levels


class LViTNetwork(UNet):
    """U-Net with pixel-level attention, and a branch of Transformer blocks that reads the text at
    the first level.

    Args:
        channels, labels, width: as `UNet`.
        size: height and width of the images.
        text: (words, width of their vectors), or None for a network without text.
    """

    attention = True

    def __init__(
        self, channels: int, labels: int, width: int, size: int, text: tuple[int, int] | None
    ) -> None:
        super().__init__(channels, labels, width)
        dims = [width * factor for factor in (1, 2, 4, 8)]
        tokens = (size // PATCHES[0]) ** 2
        self.grid = size // PATCHES[0]
        self.text = None if text is None else TextLevel(*text, dims, tokens)
        self.embed = nn.ModuleList(
            Patches(dim, patch, tokens) for dim, patch in zip(dims, PATCHES, strict=True)
        )
        self.down_blocks, self.up_blocks = (
            nn.ModuleList(Block(dim) for dim in dims) for _ in range(2)
        )
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
                tokens_BPK = torch.cat(
                    [_along_tokens(self.narrow[number - 1], tokens_BPK), down[-1]], dim=2
                )
            down.append(tokens_BPK)
        skips: list[Tensor] = []
        coarser: Tensor | None = None
        for number in (3, 2, 1, 0):
            tokens_BPK = self.up_blocks[number](down[number])
            if coarser is not None:
                tokens_BPK = tokens_BPK + _along_tokens(self.widen[number], coarser)
            coarser = tokens_BPK
            # A 1 x 1 convolution and nearest-neighbour enlargement commute; published is the
            # costlier order.
            cells_BKhw = self.reconstruct[number](
                tokens_BPK.transpose(1, 2).unflatten(2, (self.grid, self.grid))
            )
            skips.append(F.interpolate(cells_BKhw, scale_factor=PATCHES[number]) + levels[number])
        return skips[::-1]


class TextLevel(nn.Module):
    """Words as an addition to the tokens of the first level: four convolutions along the words,
    one across them.
    """

    def __init__(self, words: int, dim: int, dims: list[int], tokens: int) -> None:
        super().__init__()
        widths = [dim, *reversed(dims)]
        self.narrow = nn.Sequential(
            *(nn.Conv1d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths))
        )
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
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        enter = nn.Linear(dim, 4 * dim)
        leave = nn.Linear(4 * dim, dim)
        for layer in (enter, leave):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)
        self.mlp = nn.Sequential(
            enter, nn.GELU(), nn.Dropout(_DROPOUT), leave, nn.GELU(), nn.Dropout(_DROPOUT)
        )

    def forward(self, tokens_BPK: Tensor) -> Tensor:
        """Return the tokens after attention and MLP."""
        query, key, value = (
            self.qkv(self.norm1(tokens_BPK)).unflatten(2, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens_BPK = tokens_BPK + self.project(attended)
        return tokens_BPK + self.mlp(self.norm2(tokens_BPK))


def _conv1d(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, 3, padding=1), nn.BatchNorm1d(outputs), nn.ReLU()
    )


def _along_tokens(layers: nn.Module, tokens_BPK: Tensor) -> Tensor:
    result: Tensor = layers(tokens_BPK.transpose(1, 2)).transpose(1, 2)
    return result


# Words that LViT's network reads, and the vector by which its LV loss compares texts (arXiv
# 2206.14718).
#
# Shape letters: W words that are read; others as in the schema.


def encode_words(
    encoder: TextEncoder, tokenizer: Tokenizer, batch: Batch, words: int
) -> tuple[Tensor, Tensor]:
    """Return the first words (B, W, D), each the mean of its tokens, and the mean token of each
    text (B, D).

    Words are 0 where a text has no more, and for samples without a text. The mean tokens have no
    gradient.
    """
    tokens_BTD = encoder(batch.ids_BT, batch.mask_BT).tokens_BTD
    # the first token is not a word
    slot_BT = word_slots(tokenizer, batch.ids_BT, batch.mask_BT) - 1
    slot_BT = torch.where(slot_BT < words, slot_BT, -1)
    words_BWD, _ = sum_by_slot(tokens_BTD, slot_BT, words)
    count_BW1, _ = sum_by_slot(torch.ones_like(tokens_BTD[:, :, :1]), slot_BT, words)
    words_BWD = words_BWD / count_BW1.clamp(min=1)
    if batch.has_text_B is not None:
        words_BWD = words_BWD * batch.has_text_B[:, None, None]
    text_BD = tokens_BTD.detach().float().sum(dim=1) / batch.mask_BT.sum(dim=1, keepdim=True).clamp(
        min=1
    )
    return words_BWD, text_BD


# Unlabelled images of LViT (arXiv 2206.14718): moving averages of pseudo labels (EPI) and
# reference masks (LV).
#
# The released code has neither, so both follow the paper. Buffers are equal on all ranks: each
# rank stores the rows of all. Shape letters: B images of this rank, N of all ranks; R references;
# L labels; D width of a text vector.


class PseudoLabels(nn.Module):
    """A probability map for each unlabelled image, in the frame of the image before it is turned.

    P_t = beta P_(t-1) + (1 - beta) P, where P is the model's prediction; the first prediction is
    taken as it is. A map takes two bytes a pixel and label, in a checkpoint too.

    Args:
        images: number of unlabelled images.
        labels, size: planes, height and width of a map.
        beta: weight of the past.
    """

    same_on_all_ranks = True

    def __init__(self, images: int, labels: int, size: int, beta: float) -> None:
        super().__init__()
        self.beta = beta
        self.map_MLHW: Tensor
        self.known_M: Tensor
        self.register_buffer(
            "map_MLHW", torch.zeros(images + 1, labels, size, size, dtype=torch.float16)
        )
        # the last row is for labelled images
        self.register_buffer("known_M", torch.zeros(images + 1, dtype=torch.bool))

    @torch.no_grad()
    def update(self, prob_BLHW: Tensor, number_B: Tensor, turn_B22: Tensor | None) -> Tensor:
        """Add predictions and return the updated pseudo labels (B, L, H, W) in the frame of the
        predictions.

        Args:
            prob_BLHW: predictions for the augmented images of this rank.
            number_B: number of the unlabelled image in each row; -1 for labelled images, whose
                result is meaningless.
            turn_B22: how each image was turned (`DenseBatch.turn_B22`); None: not at all.
        """
        if turn_B22 is None:
            turn_B22 = torch.eye(2, device=prob_BLHW.device).expand(len(prob_BLHW), 2, 2)
        number_B = torch.where(number_B < 0, len(self.known_M) - 1, number_B)
        upright_BLHW, seen_BLHW = (
            turn_maps(each, turn_B22.mT)
            for each in (prob_BLHW.float(), torch.ones_like(prob_BLHW[:, :1], dtype=torch.float32))
        )
        number_N = gather(number_B)
        upright_NLHW = gather(upright_BLHW)
        seen_NLHW = gather(seen_BLHW)
        old_NLHW = self.map_MLHW[number_N].float()
        known_N = self.known_M[number_N]
        beta_N = torch.where(known_N, self.beta, 0.0)[:, None, None, None]
        new_NLHW = beta_N * old_NLHW + (1 - beta_N) * upright_NLHW
        new_NLHW = torch.where(seen_NLHW > 0.999, new_NLHW, old_NLHW)
        self.map_MLHW[number_N] = new_NLHW.half()
        self.known_M[number_N] = True
        return turn_maps(self.map_MLHW[number_B].float(), turn_B22)

    def fill(
        self, mask_BLHW: Tensor, prob_BLHW: Tensor, number_B: Tensor, turn_B22: Tensor | None
    ) -> Tensor:
        """Update the pseudo labels; return masks in which they are those of unlabelled images, 1
        from 0.5 on.
        """
        pseudo_BLHW = self.update(prob_BLHW, number_B, turn_B22)
        return torch.where(
            number_B[:, None, None, None] < 0, mask_BLHW, (pseudo_BLHW >= 0.5).float()
        )


class References(nn.Module):
    """The last labelled images that had a text: a vector of the text, and the mask.

    The paper compares with 14 fixed pairs; the newest R labelled pairs need no selection by hand.
    The LV loss uses the prediction itself, because a pseudo label passes on only a hundredth of its
    gradient.
    """

    same_on_all_ranks = True

    def __init__(self, references: int, dim: int, labels: int, size: int) -> None:
        super().__init__()
        self.text_RD: Tensor
        self.mask_RLHW: Tensor
        self.filled_R: Tensor
        self.register_buffer("text_RD", torch.zeros(references, dim))
        self.register_buffer(
            "mask_RLHW", torch.zeros(references, labels, size, size, dtype=torch.uint8)
        )
        self.register_buffer("filled_R", torch.zeros(references, dtype=torch.bool))

    @torch.no_grad()
    def enter(self, text_BD: Tensor, mask_BLHW: Tensor, chosen_B: Tensor) -> None:
        """Replace the oldest entries by the chosen rows of all ranks."""
        filled = torch.cat([gather(chosen_B), self.filled_R])
        newest_R = (~filled).int().argsort(stable=True)[: len(self.filled_R)]
        self.text_RD = torch.cat([gather(text_BD.float()), self.text_RD])[newest_R]
        self.mask_RLHW = torch.cat([gather(mask_BLHW.to(torch.uint8)), self.mask_RLHW])[newest_R]
        self.filled_R = filled[newest_R]

    def loss(self, prob_BLHW: Tensor, text_BD: Tensor, compared_B: Tensor) -> Tensor:
        """Return the LV loss, a mean over the chosen rows of all ranks; 0 while there is no
        reference.
        """
        apart_B = losses.contrastive_mask(prob_BLHW, self.nearest(text_BD))
        return mean_over_ranks(apart_B, compared_B & self.filled_R.any())

    @torch.no_grad()
    def nearest(self, text_BD: Tensor) -> Tensor:
        """Return (B, L, H, W): the mask of the reference with the most similar text; zeros while
        there is none.
        """
        with full_precision(text_BD):  # in 16 bits, most cosines of similar texts are equal
            cosine_BR = F.normalize(text_BD.float(), dim=1) @ F.normalize(self.text_RD, dim=1).T
        best_B = cosine_BR.masked_fill(~self.filled_R, -2.0).argmax(dim=1)
        return self.mask_RLHW[best_B].float()


def turn_maps(map_BLHW: Tensor, turn_B22: Tensor) -> Tensor:
    """Return square maps turned about their centres as `medvl.data.transforms.turning.turn`
    turns images.
    """
    theta_B23 = F.pad(turn_B22.to(map_BLHW.dtype), (0, 1))
    with full_precision(map_BLHW):  # in 16 bits, places are wrong by a part of a pixel
        grid_BHW2 = F.affine_grid(theta_B23, list(map_BLHW.shape), align_corners=False)
        return F.grid_sample(map_BLHW, grid_BHW2, align_corners=False)


Network = Literal["lvit", "unet"]
Text = Literal["first_level", "off"]
LV_WEIGHT = 0.1
"""Weight of the LV loss of unlabelled images, as published; it needs texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LViTConfig(SystemConfig):
    """Settings of LViT; the defaults are the published ones."""

    labels: tuple[str, ...]
    image_size: int = 224
    """A multiple of 16; images are squeezed to a square, as published."""
    network: Network = "lvit"
    """`unet` is the paper's baseline, which reads no text."""
    text: Text = "first_level"
    """`off` leaves the text out of LViT's network (the paper's ablation)."""
    text_encoder: str = "bert"
    text_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    text_weights: str | None = None
    vocab_size: int | None = None
    max_tokens: int | None = None
    frozen_text: bool = True
    """Leave the text encoder as it is, in eval mode."""
    words: int = 10
    """Words of a text that the network reads; longer texts are cut. 10 end before the places of
    long descriptions.
    """
    width: int = 64
    """Channels of the first level, a multiple of 8."""
    unlabelled: int = 0
    """Number of unlabelled training images (`DenseDataConfig.unlabelled_images`)."""
    labelled_steps: int = 0
    """Steps on labelled images alone, before the first pseudo labels."""
    beta: float = 0.99
    """Weight of the past in a pseudo label."""
    references: int = 14
    """Number of labelled images whose texts are compared with the text of an unlabelled image
    (LV).
    """

    former = (("lv_weight", LV_WEIGHT),)

    def __post_init__(self) -> None:
        check_labels(self.labels, "labels")
        check_choice(self.network, get_args(Network), "network")
        check_choice(self.text, get_args(Text), "text")
        check_within(self, "[0, 1]", "beta")
        check_within(self, "[0, inf)", "unlabelled", "labelled_steps")
        check_within(self, "[1, inf)", "words", "references", "width", "image_size", "vocab_size")
        check_multiple(self, PATCHES[0], "image_size")
        check_multiple(self, 8, "width")

    @property
    def reads_text(self) -> bool:
        """Whether the network reads the text."""
        return self.network == "lvit" and self.text != "off"


@register_system("lvit")
class LViT(MaskModel):
    """Masks from an image and its text, trained by `losses.lvit`; unlabelled images by pseudo
    labels and the LV loss.

    The text encoder is frozen, and gives one vector for each word, the mean of its tokens, as the
    library that the authors used. Differences from the released code: modules that it creates and
    never calls are left out (10,025,312 of its 39,933,345 parameters), and the 1 x 1 convolutions
    before a skip connection run on tokens instead of pixels, with equal results. Masks are 1 where
    they cover at least half of a pixel. The released code has no training on unlabelled images; see
    `lvit_unlabelled` for how the paper's is filled in.
    """

    Config = LViTConfig

    def __init__(
        self, config: LViTConfig, text_encoder: TextEncoder | None, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(
            config,
            transform=EvalTransform(size=config.image_size, fit="squash"),
            tokenizer=tokenizer,
        )
        size = config.image_size
        labels = len(config.labels)
        self.grid = (size, size)
        self.text_encoder = text_encoder
        if text_encoder is not None and config.frozen_text:
            text_encoder.freeze()
        text = None if text_encoder is None else (config.words, text_encoder.token_dim)
        is_lvit = config.network == "lvit"
        self.network = (
            LViTNetwork(3, labels, config.width, size, text)
            if is_lvit
            else UNet(3, labels, config.width)
        )
        self.pseudo_labels = (
            PseudoLabels(config.unlabelled, labels, size, config.beta)
            if config.unlabelled
            else None
        )
        self.references = (
            References(config.references, text[1], labels, size)
            if text and config.unlabelled
            else None
        )
        self._step = 0

    @classmethod
    def build(cls, config: LViTConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        if not config.reads_text:
            return cls(config, None, None)
        if tokenizer is None:
            raise ConfigError(
                "LViT reads words: give the tokenizer of its text encoder",
                "missing",
                field="tokenizer",
            )
        arguments: dict[str, Any] = {"vocab_size": config.vocab_size, **config.text_arguments}
        return cls(
            config,
            create_text_encoder(config.text_encoder, pretrained=pretrained, **arguments),
            tokenizer,
        )

    def before_step(self, step: int) -> None:
        self._step = step

    def mask_logits(self, batch: Batch) -> Tensor:
        return self._predict(batch)[0]

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a `DenseBatch` with masks."""
        assert isinstance(batch, DenseBatch)
        assert batch.masks_BLhw is not None
        logits_BLHW, text_BD = self._predict(batch)
        prob_BLHW = logits_BLHW.float().sigmoid()
        mask_BLHW = (batch.masks_BLhw > 127).float()
        if self.pseudo_labels is None or batch.unlabelled_B is None or not self.training:
            return Losses.sum(lvit=losses.lvit(prob_BLHW, mask_BLHW))
        labelled_B = batch.unlabelled_B < 0
        has_pseudo_labels = self._step >= self.config.labelled_steps
        used_B = labelled_B | has_pseudo_labels
        if has_pseudo_labels:
            mask_BLHW = self.pseudo_labels.fill(
                mask_BLHW, prob_BLHW, batch.unlabelled_B, batch.turn_B22
            )
        supervised = losses.lvit(prob_BLHW, mask_BLHW, used_B)
        if self.references is None or text_BD is None:
            return Losses.sum(lvit=supervised)
        has_text_B = True if batch.has_text_B is None else batch.has_text_B
        lv = self.references.loss(prob_BLHW, text_BD, ~labelled_B & used_B & has_text_B)
        self.references.enter(text_BD, mask_BLHW, labelled_B & has_text_B)
        return Losses.weighted(lvit=(supervised, 1.0), lv=(lv, LV_WEIGHT))

    def _predict(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return logits (B, L, H, W), and the mean token of each text (B, D) if the network
        reads text.
        """
        image_BCHW = batch.image_BCHW.float().expand(-1, 3, -1, -1) / 255
        if self.text_encoder is None or self.tokenizer is None:
            return self.network(image_BCHW), None
        words_BWD, text_BD = encode_words(
            self.text_encoder, self.tokenizer, batch, self.config.words
        )
        return self.network(image_BCHW, words_BWD), text_BD
