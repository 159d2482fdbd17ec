"""BioViL: radiographs and reports with CXR-BERT, text contrast and masked words (Boecking et
al., ECCV 2022).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_within
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.masked_text import TextMasking
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.text.adapters import CxrBertHead
from medvl.encoders.text.factory import text_has_projection
from medvl.errors import ConfigError
from medvl.models.base import WordHead, sample_masked_words, text_masking
from medvl.models.dual_encoders.bases.base import BertDualConfig, DualEncoder
from medvl.models.dual_encoders.bases.local import local_contrast
from medvl.models.dual_encoders.bases.pairs import Pairs, gather_side, take
from medvl.models.dual_encoders.parts.layers import BatchNormHead, in_full_precision
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Inputs, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class BioViLConfig(BertDualConfig):
    """Settings of the paper. BioViL-L is `BioViLConfig(local_weight=1.0)`.

    Encoders, heads and sizes match the released model. The training code was not released:
    temperatures, weights of the losses, masking and `max_tokens` are not confirmed. The released
    loader stretches the pixels of each image to 0..255 first; here they are taken as they are
    stored.
    """

    temperature: float = 0.5
    """Temperature of the contrast of two texts; that of images and texts is the same."""
    rsm_weight: float = 1.0
    """Weight of radiology section matching: the two texts of a sample (`Inputs.second_text`)
    against each other.
    """
    mlm_weight: float = 1.0
    mlm_probability: float = 0.15
    whole_words: bool = True
    """Mask whole words, not single tokens."""
    text_encoder: str = "cxrbert"
    image_size: int = 480
    margin: int = 16
    """Pixels cut off on every side after the image was made square, from 512."""
    projection_dim: int = 128
    """E; a text encoder with a projection of its own, such as CXR-BERT's 128, sets it."""
    max_tokens: int = 256
    global_weight: float = 1.0
    local_weight: float = 0.0
    """Weight of GLoRIA's local loss, with tokens for words: above 0 in BioViL-L."""
    temp1: float = 4.0
    temp2: float = 5.0
    temp3: float = 10.0
    """Temperatures of the local loss, as in `GLoRIAConfig`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "temperature", "temp1", "temp2", "temp3", "global_weight")
        check_within(self, "[0, inf)", "rsm_weight", "mlm_weight", "local_weight")
        check_within(self, "(0, 1)", "mlm_probability")


@register_system("biovil")
class BioViL(DualEncoder):
    """Symmetric InfoNCE of image and text and of two texts, and masked words (section 3).

    An image is the mean of its projected regions, which are in the space of texts
    (`embed_regions`). Section matching and masked words, the text encoder's own objectives, compare
    further sides of `Pairs`, so that they work in parts (GradCache) and over ranks.

    Attributes:
        word_head: scores of the vocabulary, tied to the table of word embeddings; None where
            `mlm_weight` is 0.
    """

    Config = BioViLConfig

    def __init__(self, config: Any, *args: Any, word_head: WordHead | None, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.word_head = word_head
        self.inputs = Inputs(second_text=config.rsm_weight > 0)

    @classmethod
    def encoder_arguments(cls, config: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Leave pixels in 0..1."""
        return {"mean": 0.0, "std": 1.0}, {
            "pool": "cls",
            "projection": text_has_projection(config.text_encoder),
        }

    @classmethod
    def make_heads(
        cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        """Give a text encoder without a projection one as CXR-BERT's."""
        own = text_encoder.projection is not None
        size = text_encoder.feature_dim if own else config.projection_dim
        return {
            "image_head": BatchNormHead(image_encoder.patch_dim, size, size, inner_bias=False),
            "text_head": nn.Identity() if own else CxrBertHead(text_encoder.token_dim, size),
            "word_head": cls.make_word_head(config, text_encoder),
        }

    @classmethod
    def make_transform(cls, config: Any) -> EvalTransform:
        transform: EvalTransform = config.transform(margin=config.margin)
        return transform

    def unnormalized_image(self, image_BCHW: Tensor) -> Tensor:
        return self.embed_regions(image_BCHW).mean(dim=1)

    def embed_regions(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, P, E) float32: the projected cells of the image encoder's last grid in
        row-major order.
        """
        return in_full_precision(self.image_head, self.image_encoder(image_BCHW).patches_BPD)

    def batch_regions(self, batch: Batch) -> Tensor:
        """Return the regions of a training batch."""
        return self.embed_regions(batch.image_BCHW)

    def embed_pairs(self, batch: Batch) -> Pairs:
        features = self.text_encoder(batch.ids_BT, batch.mask_BT)
        regions_BPE = self.batch_regions(batch)
        images = Embeddings(F.normalize(regions_BPE.mean(dim=1), dim=-1))
        texts = Embeddings(F.normalize(self.text_head(features.pooled_BD).float(), dim=-1))
        if self.config.local_weight:
            head = (
                self.text_head
                if self.text_encoder.projection is None
                else self.text_encoder.projection
            )
            tokens_BTE = in_full_precision(head, features.tokens_BTD)
            inner_BT = F.pad(batch.mask_BT[:, 2:], (1, 1))  # without the first and the last token
            images = Embeddings(images.global_NE, regions_BPE)
            texts = Embeddings(texts.global_NE, tokens_BTE, inner_BT)
        return Pairs(images=images, texts=texts, others=self.text_sides(batch))

    def compare_pairs(self, pairs: Pairs) -> Losses:
        every = pairs.gather(local=False)
        config = self.config
        whole = losses.convirt(
            every.images.global_NE, every.texts.global_NE, config.temperature, 0.5
        )
        terms = {"global": (whole, config.global_weight)}
        if config.local_weight:
            local = local_contrast(
                pairs.images, gather_side(pairs.texts), config.temp1, config.temp2, config.temp3
            )
            terms["local"] = local, config.local_weight
        return Losses.weighted(**terms, **self.text_terms(every))

    @classmethod
    def make_word_head(cls, config: Any, text_encoder: TextEncoder) -> WordHead | None:
        """Return `word_head`. Raises ConfigError for a text encoder without a table of word
        embeddings.
        """
        if not config.mlm_weight:
            return None
        if not hasattr(text_encoder.backbone, "get_input_embeddings"):
            message = (
                f"{text_encoder.name} has no table of words to predict: use a BERT, or mlm_weight 0"
            )
            raise ConfigError(message, "unsupported", field="mlm_weight")
        return WordHead(text_encoder.token_dim, text_encoder.vocab_size, tied=True)

    @functools.cached_property
    def masking(self) -> TextMasking:
        """Masking of words in training. Raises ConfigError without a tokenizer, or without a
        mask token in it.
        """
        return text_masking(
            self, rate=self.config.mlm_probability, whole_words=self.config.whole_words
        )

    def text_sides(self, batch: Batch) -> dict[str, Embeddings]:
        """Return the sides that the objectives of weight above 0 compare.

        Raises ConfigError for a batch without second texts, and as `masking` does.
        """
        sides = {"sections": self._sections(batch)} if self.config.rsm_weight else {}
        return (
            sides
            if self.word_head is None
            else {**sides, "masked": self._masked_words(batch, self.word_head)}
        )

    def text_terms(self, every: Pairs) -> dict[str, tuple[Tensor, float]]:
        """Return the objectives' losses and weights, from the pairs of all ranks.

        "rsm" is the symmetric InfoNCE of samples with two texts, 0 without any; "mlm" is
        `losses.mlm`.
        """
        terms: dict[str, tuple[Tensor, float]] = {}
        if self.config.rsm_weight:
            second = every.others["sections"]
            first_KE = every.texts.global_NE[second.pair_N]
            scores = (
                losses.convirt(first_KE, second.global_NE, self.config.temperature, 0.5)
                if len(second)
                else None
            )
            terms["rsm"] = (
                second.global_NE.sum() if scores is None else scores,
                self.config.rsm_weight,
            )
        if self.word_head is not None:
            entropy, count = every.others["masked"].global_NE.sum(dim=0)
            terms["mlm"] = entropy / count.clamp(min=1), self.config.mlm_weight
        return terms

    def _sections(self, batch: Batch) -> Embeddings:
        """Return the second texts that exist, with the numbers of their samples."""
        if batch.second_ids_BT is None or batch.second_mask_BT is None:
            message = (
                "section matching needs Batch.second_ids_BT: open the loader with the "
                "model's inputs"
            )
            raise ConfigError(message, "missing", field="second_ids_BT")
        has_B = (
            batch.mask_BT.new_ones(len(batch))
            if batch.has_second_text_B is None
            else batch.has_second_text_B
        )
        row_K = has_B.nonzero().squeeze(1)
        side = take(self.embed_ids(batch.second_ids_BT, batch.second_mask_BT), row_K)
        return dataclasses.replace(side, pair_N=row_K)

    def _masked_words(self, batch: Batch, head: WordHead) -> Embeddings:
        """Return the rows of `losses.mlm_by_text`: the texts are masked and encoded again."""
        words = sample_masked_words(batch, self.masking)
        states_BTD = self.text_encoder(words.ids_BT, batch.mask_BT).tokens_BTD
        backbone: Any = self.text_encoder.backbone
        logits_NV = head(
            states_BTD.flatten(0, 1)[words.position_N], backbone.get_input_embeddings().weight
        )
        text_N = words.position_N // words.ids_BT.shape[1]
        return Embeddings(losses.mlm_by_text(logits_NV, words.target_N, text_N, len(batch)))
