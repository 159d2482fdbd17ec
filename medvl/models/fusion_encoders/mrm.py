"""MRM: masked records, pixels from a few patches and words from both (Zhou et al., ICLR 2023, arXiv 2301.13155)."""

import dataclasses
import functools
import math
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.losses.masked.mim import PatchMask, mask_patches, patchify, standardize
from medvl.models.base import EncoderArguments, TowersConfig, TwoTowers, complete_rows
from medvl.models.config_checks import check_choice, check_within
from medvl.models.dual_encoders.bases.build import create_encoders
from medvl.models.fusion_encoders.parts.heads import Patches, PixelDecoder, PixelDecoderConfig
from medvl.models.fusion_encoders.parts.record_contrast import WeightedContrast
from medvl.models.fusion_encoders.parts.record_words import ENTITIES, RecordWords
from medvl.models.masked_words import WordHead
from medvl.models.registry import register_system
from medvl.schema import Batch, ImageFeatures, Losses

_BERT = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MRMConfig(PixelDecoderConfig, TowersConfig):
    """Settings of the paper and the released code; options are ECAMP's (arXiv 2312.13316) and MaCo's (2309.05904).

    ECAMP: `entities_first`, `negation_weight` 0.05, `text_fusion` "attention". MaCo: `mask_ratio` 0.5, `mlm_weight` 0
    and `contrast_weight` 1. Not built: ECAMP's super-resolution head and its summaries by a language model.
    """

    image_encoder: str = "mae_vit_b16"
    text_encoder: str = "bert"
    text_arguments: EncoderArguments = dataclasses.field(default_factory=lambda: dict(_BERT))
    image_size: int = 224
    """Pixels of the encoder's images."""
    target_scale: int = 2
    """The loader's images have this many times `image_size`; patches of them are reconstructed."""
    fit: Literal["crop", "pad", "squash"] = "crop"
    """How an image is made square for inference (`medvl.data.transforms.image.EvalTransform`)."""
    pixel_mean: float = 0.4978
    pixel_std: float = 0.2449
    max_tokens: int = 100
    vocab_size: int | None = None
    mask_ratio: float = 0.75
    decoder_width: int = 768
    mlm_probability: float = 0.5
    """Share of the words that are replaced by the mask token."""
    mlm_weight: float = 1.0
    entities_first: bool = False
    """Mask words of entities and beside them before other words."""
    entities: tuple[str, ...] = ENTITIES
    negation_weight: float = 1.0
    """Weight of words between a negation ("there is no", "without") and the end of its sentence."""
    text_fusion: Literal["add", "attention"] = "add"
    """How words read the image: its mean patch is added to each; or also what each attends to among the patches."""
    contrast_weight: float = 0.0
    """Weight of the contrast of images and whole reports. MaCo's released code reads its balance and ignores it."""
    contrast_scale: float = 1 / 0.03
    """Start of the learned factor of cosines."""

    def __post_init__(self) -> None:
        self.check_decoder()
        check_within(self, "(0, 1)", "mask_ratio", "mlm_probability")
        check_within(self, "[0, inf)", "mlm_weight", "contrast_weight", "negation_weight")
        check_within(self, "[1, inf)", "target_scale", "max_tokens")
        check_within(self, "(0, inf)", "contrast_scale")
        check_choice(self, "text_fusion", ("add", "attention"))
        if not self.mlm_weight and not self.contrast_weight:
            raise ConfigError("mlm_weight or contrast_weight must be above 0", "conflict", field="mlm_weight")


@register_system("mrm")
class MRM(TwoTowers):
    """Pixels of removed patches, at twice the encoder's resolution, and masked words of the report.

    The mean of the visible patches is added to the words, so that words that the text cannot tell are read from the
    image. The loss of words is over masked words alone: the released code counts padding and visible words as well,
    36 to 42 % and about 30 % of its terms. Samples without a report have pixels only. Encoders start other systems with
    `init_from` or `load_towers`.
    """

    Config = MRMConfig
    image_encoder: ImageEncoder

    def __init__(
        self, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder, word_head: WordHead, **parts: Any
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        patches, width, text_width = Patches.of(image_encoder), image_encoder.patch_dim, text_encoder.token_dim
        self.word_head, self.image_to_words = word_head, nn.Linear(width, text_width)
        targets = dataclasses.replace(
            patches, side=patches.side * config.target_scale, values=patches.values * config.target_scale**2
        )
        self.mim_head = PixelDecoder(width, targets, config, "gelu")
        self.fusion: nn.MultiheadAttention | None = None
        self.contrast: WeightedContrast | None = None
        if config.text_fusion == "attention":
            self.fusion = nn.MultiheadAttention(text_width, max(1, text_width // 64), batch_first=True)
        if config.contrast_weight:
            self.contrast = WeightedContrast(width, text_encoder.feature_dim, math.prod(patches.grid), config)
        if not image_encoder.can_drop_patches:
            message = f"{image_encoder.name} cannot drop patches: take a vision Transformer"
            raise ConfigError(message, "unsupported", field="image_encoder")

    @functools.cached_property
    def words(self) -> RecordWords:
        """Masking of reports. Raises ConfigError without a tokenizer or a mask token."""
        return RecordWords(self, self.config)

    @classmethod
    def build(cls, config: MRMConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """See the base class. Published weights are those of the image encoder."""
        statistics = {"mean": config.pixel_mean, "std": config.pixel_std}
        encoders = create_encoders(
            config,
            {"pretrained": pretrained, "image_size": config.image_size, **statistics},
            {"pretrained": False, "vocab_size": config.vocab_size},
        )
        backbone: Any = encoders[1].backbone
        table = backbone.get_input_embeddings().embedding_dim
        head = WordHead(encoders[1].token_dim, encoders[1].vocab_size, tied=True, table_width=table)
        transform = EvalTransform(size=config.image_size, fit=config.fit)
        return cls(config, *encoders, head, transform=transform, tokenizer=tokenizer)

    def forward(self, batch: Batch) -> Losses:
        """Return the losses "mim", "mlm" and "contrast" (those with a weight).

        Raises ConfigError for images of another size than `image_size * target_scale`.
        """
        side = self.config.image_size * self.config.target_scale
        if batch.image_BCHW.shape[2:] != (side, side):
            message = f"expected images of {side} x {side}, got {tuple(batch.image_BCHW.shape[2:])}"
            raise ConfigError(f"{message}: set the size of data.image", "mismatch", field="image_size")
        pixels_BCHW = self.image_encoder.normalize(batch.image_BCHW)
        count = math.prod(self.mim_head.patches.grid)
        generator = torch.default_generator
        patches = mask_patches(len(batch), count, self.config.mask_ratio, generator, batch.image_BCHW.device)
        features = self.encode_visible(pixels_BCHW, patches)
        visible_BKD = features.patches_BPD
        assert visible_BKD is not None, "a vision Transformer has patches"
        states_BND = torch.cat([features.pooled_BD[:, None], visible_BKD], dim=1)
        terms = {"mim": (self.pixel_loss(pixels_BCHW, states_BND, patches, batch), self.config.mim_weight)}
        if self.config.mlm_weight:
            terms["mlm"] = self.word_loss(visible_BKD, batch), self.config.mlm_weight
        if self.contrast is not None:
            text = self.text_encoder(batch.ids_BT, batch.mask_BT)
            row_K = complete_rows(batch)
            contrast = self.contrast(visible_BKD, text.pooled_BD, ~patches.masked_BP, row_K)
            terms["contrast"] = contrast, self.config.contrast_weight
        return Losses.weighted(**terms)

    def encode_visible(self, pixels_BCHW: Tensor, patches: PatchMask) -> ImageFeatures:
        """Return the features of the kept patches of normalised pixels, at the encoder's resolution."""
        size = (self.config.image_size, self.config.image_size)
        if self.config.target_scale > 1:
            pixels_BCHW = F.interpolate(pixels_BCHW, size=size, mode="bicubic", antialias=True)
        features: ImageFeatures = self.image_encoder(pixels_BCHW, patches.kept_BK, normalized=True)
        return features

    def pixel_loss(self, pixels_BCHW: Tensor, states_BND: Tensor, patches: PatchMask, batch: Batch) -> Tensor:
        """Return the mean squared error of the removed patches, in units of each patch's own deviation."""
        target_BPC = standardize(patchify(pixels_BCHW, self.mim_head.patches.side))
        masked_BP = patches.masked_BP
        if batch.has_image_B is not None:
            masked_BP = masked_BP & batch.has_image_B[:, None]
        return losses.mim(self.mim_head(states_BND, patches), target_BPC, masked_BP)

    def word_loss(self, visible_BKD: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of the masked words of samples with an image and a report, weighted by word."""
        masked = self.words(batch)
        backbone: Any = self.text_encoder.backbone
        image_BKD = self.image_to_words(visible_BKD)
        hidden_BTD = self.text_encoder.embed(masked.ids_BT, batch.mask_BT)
        if self.fusion is not None:
            hidden_BTD = hidden_BTD + self.fusion(hidden_BTD, image_BKD, image_BKD, need_weights=False)[0]
        hidden_BTD = hidden_BTD + image_BKD.mean(dim=1, keepdim=True)
        states_BTD = self.text_encoder.features(hidden_BTD, batch.mask_BT).tokens_BTD
        states_ND = states_BTD.flatten(0, 1)[masked.position_N]
        logits_NV = self.word_head(states_ND, backbone.get_input_embeddings().weight)
        entropy_N = F.cross_entropy(logits_NV.float(), masked.target_N, reduction="none")
        return (entropy_N * masked.weight_N).sum() / masked.weight_N.sum().clamp(min=torch.finfo(torch.float32).tiny)
