"""MRM: masked records, pixels from a few patches and words from both (Zhou et al., ICLR 2023,
arXiv 2301.13155).
"""

import dataclasses
import functools
import math
from typing import Any, Literal, Self, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_choice, check_within
from medvl.data.knowledge.finder import EntityFinder, EntityLinker
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.operations import Kernel
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.losses.common import full_precision, gather
from medvl.losses.masked import (
    IGNORED,
    PatchMask,
    mask_patches,
    masked_positions,
    patchify,
    standardize,
)
from medvl.models.base import (
    TOWERS,
    EncoderArguments,
    Parts,
    System,
    TowersConfig,
    WordHead,
    complete_rows,
    text_masking,
)
from medvl.models.dual_encoders.bases.base import create_encoders
from medvl.models.fusion_encoders.parts.heads import Patches, PixelDecoder, PixelDecoderConfig
from medvl.models.registry import register_system
from medvl.schema import Batch, ImageFeatures, Losses

ENTITIES = (
    "effusion",
    "effusions",
    "pneumothorax",
    "edema",
    "atelectasis",
    "consolidation",
    "pneumonia",
    "cardiomegaly",
    "fracture",
    "fractures",
    "nodule",
    "nodules",
    "mass",
    "opacity",
    "opacities",
    "infiltrate",
    "emphysema",
    "hernia",
    "thickening",
    "scarring",
    "calcification",
    "granuloma",
    "congestion",
    "collapse",
    "fibrosis",
    "catheter",
    "tube",
    "pacemaker",
    "line",
    "lung",
    "lungs",
    "heart",
    "mediastinum",
    "pleura",
    "hilar",
    "cardiac",
)
"""Words that name a finding, a device or an organ; ECAMP has 44 of its own."""

CONTRAST_SCALE = 1 / 0.03
"""Start of the learned factor of cosines, as in MaCo's released code."""
_BERT = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MRMConfig(PixelDecoderConfig, TowersConfig):
    """Settings of the paper and the released code; options are ECAMP's (arXiv 2312.13316) and
    MaCo's (2309.05904).

    ECAMP: `entities_first`, `negation_weight` 0.05, `text_fusion` "attention". MaCo: `mask_ratio`
    0.5, `mlm_weight` 0
    and `contrast_weight` 1. Not built: ECAMP's super-resolution head and its summaries by a
    language model.
    """

    image_encoder: str = "mae_vit_b16"
    text_encoder: str = "bert"
    text_arguments: EncoderArguments = dataclasses.field(default_factory=lambda: dict(_BERT))
    image_size: int = 224
    """Pixels of the encoder's images."""
    target_scale: int = 2
    """The loader's images have this many times `image_size`; patches of them are reconstructed."""
    shrink_antialias: bool = True
    """Shrink these images to `image_size` with antialiasing; MRM's released code does not, nor
    do imported models.
    """
    fit: Literal["crop", "pad", "squash"] = "crop"
    """How an image is made square for inference (`medvl.data.transforms.image.EvalTransform`)."""
    resize: Kernel = "area"
    """Kernel of the resize for inference; imported models have that of their released code."""
    pixel_mean: float = 0.4978
    pixel_std: float = 0.2449
    max_tokens: int = 100
    vocab_size: int | None = None
    mask_ratio: float = 0.75
    """Share of the patches that are removed from an image."""
    decoder_width: int = 768
    mlm_probability: float = 0.5
    """Share of the words that are replaced by the mask token."""
    mlm_weight: float = 1.0
    entities_first: bool = False
    """Mask words of entities and beside them before other words."""
    entities: tuple[str, ...] = ENTITIES
    negation_weight: float = 1.0
    """Weight of the words "there is no (evidence of)". The difference is added to the weights of up
    to two words before each entity (`entities_first`), or of all words of a text without
    entities.
    """
    text_fusion: Literal["add", "attention"] = "add"
    """Image input of words: "add" adds the mean patch to each word; "attention" also adds its
    attention over the patches.
    """
    contrast_weight: float = 0.0
    """Weight of the contrast of images and whole reports. MaCo's released code reads its balance
    and ignores it.
    """
    former = (("contrast_scale", CONTRAST_SCALE),)

    def __post_init__(self) -> None:
        self.check_decoder()
        check_within(self, "(0, 1)", "mask_ratio", "mlm_probability")
        check_within(self, "[1, inf)", "target_scale", "max_tokens")
        check_within(self, "[0, inf)", "mlm_weight", "contrast_weight")
        check_within(self, "(0, 1]", "negation_weight")
        check_choice(self.text_fusion, ("add", "attention"), "text_fusion")
        if not self.mlm_weight and not self.contrast_weight:
            raise ConfigError(
                "mlm_weight or contrast_weight must be above 0", "conflict", field="mlm_weight"
            )


# Contrast of masked images and reports, weighted by what is visible (MaCo, Huang et al., arXiv
# 2309.05904).


class WeightedContrast(nn.Module):
    """MaCo's contrast: images whose informative patches were removed weigh less (section 3.3).

    The logarithm of the factor of cosines is learned; in the released code it is the factor, which
    may become negative. Equal reports of different images are negatives of each other, as
    published.

    Args:
        image_dim, text_dim: widths of patches and of the text's vector.
        cells: P, number of patches of an image.
    """

    def __init__(self, image_dim: int, text_dim: int, cells: int) -> None:
        super().__init__()
        self.image_head = nn.Linear(image_dim, image_dim)
        self.text_head = nn.Linear(text_dim, image_dim)
        self.place = nn.Linear(cells, 1)
        nn.init.zeros_(self.place.weight)
        self.log_scale = nn.Parameter(torch.tensor(math.log(CONTRAST_SCALE)))

    def forward(
        self, visible_BKD: Tensor, text_BD: Tensor, visible_BP: Tensor, row_K: Tensor
    ) -> Tensor:
        """Return the loss of the rows `row_K` among those of all ranks; 0 with a zero gradient
        without any.
        """
        image_BE = F.normalize(self.image_head(visible_BKD).mean(dim=1).float(), dim=1)
        text_BE = F.normalize(self.text_head(text_BD).float(), dim=1)
        weight_B = F.softplus(self.place(visible_BP.to(self.place.weight.dtype)).float()).squeeze(1)
        image_NE, text_NE, weight_N = (gather(x[row_K]) for x in (image_BE, text_BE, weight_B))
        unused = (image_BE.sum() + text_BE.sum() + weight_B.sum() + self.log_scale) * 0
        if not len(image_NE):
            return unused
        with full_precision(image_NE):
            logits_NN = self.log_scale.exp() * image_NE @ text_NE.T
        target_N = torch.arange(len(logits_NN), device=logits_NN.device)
        terms = []
        for each_NN in (logits_NN, logits_NN.T):
            terms.append(F.cross_entropy(weight_N[:, None] * each_NN, target_N))
            entropy_N = F.cross_entropy(each_NN, target_N, reduction="none")
            terms.append((weight_N.detach() * entropy_N).sum() / weight_N.detach().sum())
        return torch.stack(terms).mean() + unused


# Masked words of a report as MRM and ECAMP select them: always by the mask token, entities first,
# negations light.

_TEMPLATES = "there is no evidence of", "there is no"
_NEAR = 2
"""Tokens on each side of an entity that are masked with it, and before an entity that are its
context.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordMask:
    """Texts with masked words. N masked positions."""

    ids_BT: Tensor
    position_N: Tensor
    """int64: the masked positions in the flattened (B * T) batch."""
    target_N: Tensor
    weight_N: Tensor
    """float32: weight of each masked position in the loss."""


class RecordWords:
    """Masking of the words of a batch.

    Args:
        model: has the tokenizer.
        config: selection of words, and their weights.

    Raises ConfigError without a tokenizer or a mask token.
    """

    def __init__(self, model: System, config: MRMConfig) -> None:
        self.masking = text_masking(model, rate=config.mlm_probability, whole_words=True)
        assert model.tokenizer is not None, "checked by text_masking"
        self.rate = config.mlm_probability
        self.negation_weight = config.negation_weight
        self.entities = None
        if config.entities_first:
            finder = EntityFinder.of((name, number) for number, name in enumerate(config.entities))
            self.entities = EntityLinker(finder, model.tokenizer, most=64)
        finder = EntityFinder.of((name, number) for number, name in enumerate(_TEMPLATES))
        self.templates = EntityLinker(finder, model.tokenizer, most=64)
        self._stop = model.tokenizer.vocabulary.get(".", -1)

    def __call__(self, batch: Batch) -> RecordMask:
        """Mask words of the samples that have an image and a text."""
        ids_BT = batch.ids_BT
        usable_BT = torch.zeros_like(batch.mask_BT)
        row_K = complete_rows(batch)
        usable_BT[row_K] = batch.mask_BT[row_K]
        uniform_3BT = torch.rand(3, *ids_BT.shape).to(ids_BT.device)
        order_BT = self.masking.draw(ids_BT, usable_BT, uniform_3BT).order_BT
        mention_BT = None
        if self.entities is not None:
            mention_BT = self.entities(ids_BT, usable_BT).mention_BT.to(ids_BT.device)
            order_BT = _near_first(order_BT, mention_BT)
        masked_BT = order_BT < self.rate
        position_N = masked_positions(ids_BT.masked_fill(~masked_BT, IGNORED))
        weight_BT = torch.ones(ids_BT.shape, device=ids_BT.device)
        if self.negation_weight != 1:
            weight_BT = self.word_weights(ids_BT, usable_BT, mention_BT)
        return RecordMask(
            ids_BT=ids_BT.masked_fill(masked_BT, self.masking.mask_id),
            position_N=position_N,
            target_N=ids_BT.flatten()[position_N],
            weight_N=weight_BT.flatten()[position_N],
        )

    def word_weights(self, ids_BT: Tensor, mask_BT: Tensor, mention_BT: Tensor | None) -> Tensor:
        """Return (B, T) float32: weights of the words, whose sum over a text is its number of
        tokens.
        """
        template_BT = self.templates(ids_BT, mask_BT).mention_BT.to(ids_BT.device) >= 0
        light_BT = torch.where(template_BT, self.negation_weight, 1.0)
        gains_BT = torch.zeros_like(template_BT)
        if mention_BT is not None:
            first_BT = (mention_BT >= 0) & (
                mention_BT != F.pad(mention_BT, (1, 0), value=-1)[:, :-1]
            )
            for distance in range(1, _NEAR + 1):
                gains_BT |= F.pad(first_BT, (0, distance))[:, distance:]
            gains_BT &= mask_BT.bool() & (ids_BT != self._stop)
        gains_BT = torch.where(gains_BT.any(dim=1, keepdim=True), gains_BT, mask_BT.bool())
        lost_B1 = ((1 - light_BT) * mask_BT).sum(dim=1, keepdim=True)
        rate_B1 = 1 + lost_B1 / (light_BT * gains_BT).sum(dim=1, keepdim=True).clamp(
            min=torch.finfo(torch.float32).tiny
        )
        return torch.where(gains_BT, light_BT * rate_B1, light_BT)


def _near_first(order_BT: Tensor, mention_BT: Tensor) -> Tensor:
    """Return the share of a text's tokens that are selected before each one: units near a mention
    come first.

    The tokens of a unit have one number before and after; never selected ones keep infinity.
    """
    near_BT = (mention_BT >= 0).float()[:, None]
    near_BT = F.max_pool1d(near_BT, 2 * _NEAR + 1, stride=1, padding=_NEAR)[:, 0] > 0
    selectable_BT = order_BT.isfinite()
    same_BTT = (order_BT[:, :, None] == order_BT[:, None, :]) & selectable_BT[:, :, None]
    # a unit is near where one of its tokens is
    near_BT = (same_BTT & near_BT[:, None, :]).any(dim=2)
    order_BT = torch.where(near_BT, order_BT, order_BT + 1)
    before_BT = ((order_BT[:, None, :] < order_BT[:, :, None]) & selectable_BT[:, None, :]).sum(
        dim=2
    )
    share_BT = before_BT / selectable_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return share_BT.masked_fill(~selectable_BT, torch.inf)


@register_system("mrm")
class MRM(System):
    """Pixels of removed patches, at twice the encoder's resolution, and masked words of the report.

    The loss of words is over masked words alone: the released code counts padding and visible words
    as well, 36 to 42 % and about 30 % of its terms. New weights start as BERT's or torch's, where
    the released code draws those of all linear layers as MAE (Xavier, uniform). The image encoder's
    positions, which stay sines and cosines in MAE and MRM, are trained. Samples without a report
    have pixels only. Encoders start other systems with `init_from` or `load_towers`.

    The mean of the visible patches is added to the words, so that words that the text does not
    determine are read from the image. Without `mlm_weight`, what only words need is frozen.

    Attributes:
        word_head: maps states of the text encoder to its vocabulary, with its table of word
            embeddings.
        image_to_words: maps patches to the width of words.
        fusion: attention of words to patches, with `text_fusion` "attention".
        mim_head: pixels of all patches at `target_scale` times the encoder's resolution.
    """

    Config = MRMConfig
    shared_encoders = TOWERS
    image_encoder: ImageEncoder
    text_encoder: TextEncoder

    def __init__(
        self,
        config: MRMConfig,
        image_encoder: ImageEncoder,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        width = text_encoder.token_dim
        table_width = self._word_table().shape[1]
        self.word_head = WordHead(
            width, text_encoder.vocab_size, tied=True, table_width=table_width
        )
        self.image_to_words = nn.Linear(image_encoder.patch_dim, width)
        self.fusion: nn.MultiheadAttention | None = None
        if config.text_fusion == "attention":
            self.fusion = nn.MultiheadAttention(width, max(1, width // 64), batch_first=True)
        if not config.mlm_weight:
            for part in filter(None, (self.word_head, self.image_to_words, self.fusion)):
                part.requires_grad_(False)
        if not image_encoder.can_drop_patches:
            message = f"{image_encoder.name} cannot drop patches: take a vision Transformer"
            raise ConfigError(message, "unsupported", field="image_encoder")
        patches = Patches.of(image_encoder)
        scale = config.target_scale
        targets = dataclasses.replace(
            patches, side=patches.side * scale, values=patches.values * scale**2
        )
        self.mim_head = PixelDecoder(image_encoder.patch_dim, targets, config, "gelu")
        self.contrast: WeightedContrast | None = None
        if config.contrast_weight:
            cells = math.prod(self.mim_head.patches.grid)
            self.contrast = WeightedContrast(
                image_encoder.patch_dim, text_encoder.feature_dim, cells
            )

    @classmethod
    def build(cls, config: MRMConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Load weights of the image encoder only with `pretrained`."""
        statistics = {"mean": config.pixel_mean, "std": config.pixel_std}
        encoders = create_encoders(
            config,
            {"pretrained": pretrained, "image_size": config.image_size, **statistics},
            {"pretrained": False, "vocab_size": config.vocab_size},
        )
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        return cls(config, *encoders, transform=transform, tokenizer=tokenizer)

    def forward(self, batch: Batch) -> Losses:
        """Return the losses "mim", "mlm" and "contrast" (those with a weight).

        Raises ConfigError for images of another size than `image_size * target_scale`.
        """
        pixels_BCHW, patches = self.mask_images(batch)
        features = self.encode_visible(pixels_BCHW, patches)
        visible_BKD = features.patches_BPD
        assert visible_BKD is not None, "a vision Transformer has patches"
        states_BND = torch.cat([features.pooled_BD[:, None], visible_BKD], dim=1)
        terms = {
            "mim": (
                self.pixel_loss(pixels_BCHW, states_BND, patches, batch),
                self.config.mim_weight,
            )
        }
        if self.config.mlm_weight:
            terms["mlm"] = self.word_loss(visible_BKD, batch), self.config.mlm_weight
        if self.contrast is not None:
            text = self.text_encoder(batch.ids_BT, batch.mask_BT)
            row_K = complete_rows(batch)
            contrast = self.contrast(visible_BKD, text.pooled_BD, ~patches.masked_BP, row_K)
            terms["contrast"] = contrast, self.config.contrast_weight
        return Losses.weighted(**terms)

    def mask_images(self, batch: Batch) -> tuple[Tensor, PatchMask]:
        """Return the normalised pixels (B, C, H, W) of a batch, and the visible patches of each
        image.

        Raises ConfigError for images of another size than `image_size * target_scale`.
        """
        side = self.config.image_size * self.config.target_scale
        if batch.image_BCHW.shape[2:] != (side, side):
            message = f"expected images of {side} x {side}, got {tuple(batch.image_BCHW.shape[2:])}"
            raise ConfigError(
                f"{message}: set the size of data.image", "mismatch", field="image_size"
            )
        pixels_BCHW = self.image_encoder.normalize(batch.image_BCHW)
        count = math.prod(self.mim_head.patches.grid)
        ratio = self.config.mask_ratio
        return pixels_BCHW, mask_patches(
            len(batch), count, ratio, torch.default_generator, batch.image_BCHW.device
        )

    def encode_visible(self, pixels_BCHW: Tensor, patches: PatchMask) -> ImageFeatures:
        """Return the features of the kept patches of normalised pixels, at the encoder's
        resolution.
        """
        size = (self.config.image_size, self.config.image_size)
        if self.config.target_scale > 1:
            pixels_BCHW = F.interpolate(
                pixels_BCHW, size=size, mode="bicubic", antialias=self.config.shrink_antialias
            )
        features: ImageFeatures = self.image_encoder(pixels_BCHW, patches.kept_BK, normalized=True)
        return features

    def pixel_loss(
        self, pixels_BCHW: Tensor, states_BND: Tensor, patches: PatchMask, batch: Batch
    ) -> Tensor:
        """Return the mean squared error of the removed patches, in units of each patch's own
        deviation.
        """
        target_BPC = standardize(patchify(pixels_BCHW, self.mim_head.patches.side))
        masked_BP = patches.masked_BP
        if batch.has_image_B is not None:
            masked_BP = masked_BP & batch.has_image_B[:, None]
        return losses.mim(self.mim_head(states_BND, patches), target_BPC, masked_BP)

    @functools.cached_property
    def words(self) -> RecordWords:
        """Masking of reports. Raises ConfigError without a tokenizer or a mask token."""
        return RecordWords(self, self.config)

    def word_loss(self, visible_BKD: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of the masked words of samples with an image and a report,
        weighted by word.
        """
        masked = self.words(batch)
        image_BKD = self.image_to_words(visible_BKD)
        hidden_BTD = self.text_encoder.embed(masked.ids_BT, batch.mask_BT)
        if self.fusion is not None:
            hidden_BTD = (
                hidden_BTD + self.fusion(hidden_BTD, image_BKD, image_BKD, need_weights=False)[0]
            )
        hidden_BTD = hidden_BTD + image_BKD.mean(dim=1, keepdim=True)
        states_BTD = self.text_encoder.features(hidden_BTD, batch.mask_BT).tokens_BTD
        states_ND = states_BTD.flatten(0, 1)[masked.position_N]
        logits_NV = self.word_head(states_ND, self._word_table())
        entropy_N = F.cross_entropy(logits_NV.float(), masked.target_N, reduction="none")
        return (entropy_N * masked.weight_N).sum() / masked.weight_N.sum().clamp(
            min=torch.finfo(torch.float32).tiny
        )

    def _word_table(self) -> Tensor:
        backbone: Any = self.text_encoder.backbone
        table_VD: Tensor = backbone.get_input_embeddings().weight
        return table_VD
