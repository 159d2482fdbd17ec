"""GLoRIA: a report against its image, and its words against the image's regions (Huang et al., ICCV 2021)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import Box, EvalTransform
from medvl.encoders import create_image_encoder, create_text_encoder, freeze_layers
from medvl.errors import ConfigError
from medvl.losses.gather import gather, gather_padded
from medvl.losses.gloria import WordPool, gloria_attention, gloria_contrast, gloria_similarity
from medvl.models.base import SystemConfig
from medvl.models.dual_encoders.base import ContrastiveEncoder, Pairs, attention_arguments
from medvl.models.dual_encoders.words import most_slots, sum_by_slot, word_slots
from medvl.models.fusion_encoders.corruption import complete_rows
from medvl.models.heatmaps import on_image
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLoRIAConfig(SystemConfig):
    """GLoRIA (Huang et al., ICCV 2021), as its authors' configuration for CheXpert has it.

    Theirs strips the punctuation from a text before it is read; here it stays, and every mark is a word.
    """

    image_encoder: str = "resnet50"
    text_encoder: str = "bioclinicalbert"
    image_size: int = 224
    fit: Literal["crop", "pad", "squash"] = "pad"
    """How an image is made square for inference (`medvl.data.transforms.image.EvalTransform`)."""
    margin: int = 16
    """Pixels that are then cut off on every side: the center of a padded square of 256."""
    encoder_size: int | None = 299
    """Side to which the image encoder's input is stretched, bilinearly, on the device; None is `image_size` itself."""
    pixel_mean: float = 0.5
    pixel_std: float = 0.5
    """Of pixels in 0..1, whatever the image encoder was published with."""
    patch_level: int = -2
    """Stage of the image encoder that regions are from: -2 is layer3 of a ResNet-50, 19 x 19 at 299 pixels. Vision
    Transformers have -1 only."""
    projection_dim: int = 768
    """E, of the shared space. A text encoder of this width has no head."""
    text_layers: int = 4
    """So many of the last layers are combined."""
    text_reduce: Literal["sum", "mean"] = "sum"
    frozen_text_layers: int = 0
    """The embedding layer and this many layers above it are not trained; 0 trains everything."""
    attention_dropout: float | None = None
    """As for ConVIRT."""
    local_feature_norm: float | None = None
    """Length that every region and word is brought to before they are compared. None leaves them as they are, as the
    paper does: then their own length says how sharp the attention is, and where it is large from the start, one word
    has every region to itself, no gradient changes that, and all regions are attended alike."""
    text_token: bool = True
    """The text's first token stands among the words that share out the regions, as in the published training. It is
    unlike all of them, and can keep every region for itself."""
    word_pool: Literal["sum", "mean"] = "sum"
    """How the matches of a text's words become one, before the logarithm; under the sum, more words match better."""
    temp1: float = 4.0
    """Of a word's attention over regions."""
    temp2: float = 5.0
    """Of the words in a text."""
    temp3: float = 10.0
    """Of the contrast, local and global."""
    local_weight: float = 1.0
    global_weight: float = 1.0
    max_tokens: int = 97
    vocab_size: int | None = None
    """Of the text encoder; None is the preset's own, or the tokenizer's where one is given."""

    def __post_init__(self) -> None:
        for name in ("temp1", "temp2", "temp3", "pixel_std", "local_feature_norm"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if min(self.local_weight, self.global_weight) < 0 or self.local_weight + self.global_weight == 0:
            raise ConfigError("local_weight and global_weight must not be negative, and not both 0")
        if self.frozen_text_layers < 0 or min(self.projection_dim, self.text_layers) < 1:
            raise ConfigError(
                "frozen_text_layers must not be negative; projection_dim and text_layers must be positive"
            )
        for name, known in (("word_pool", ("sum", "mean")), ("text_reduce", ("sum", "mean"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: known are {' and '.join(map(repr, known))}")
        attention_arguments(self.attention_dropout)


@register_system("gloria")
class GLoRIA(ContrastiveEncoder):
    """Global and local contrast (section 3.3, equations 1 to 8).

    An image has one vector, and one for each region of an earlier stage of its encoder. A text is the sum of its
    encoder's last layers; a word is the sum of its sub-words, and the text's first token stands among the words in
    training and, unlike in the published code, everywhere. The text's vector is the mean of its tokens, which has the
    direction of GLoRIA's mean over word slots.

    A sample without an image or without a text is left out of the loss. A model without a tokenizer has no words.

    Attributes:
        region_head: to the shared space, without a bias.
        text_head, word_head: Identity where the text encoder is as wide as the shared space.
    """

    Config = GLoRIAConfig

    def __init__(
        self, config: GLoRIAConfig, *parts: Any, region_head: nn.Module, word_head: nn.Module, **prepares: Any
    ) -> None:
        super().__init__(config, *parts, **prepares)
        self.region_head, self.word_head = region_head, word_head

    @classmethod
    def build(cls, config: GLoRIAConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError and WeightsError as `create_model` says."""
        image_encoder = create_image_encoder(
            config.image_encoder,
            pretrained=pretrained,
            image_size=config.encoder_size or config.image_size,
            patch_level=config.patch_level,
            mean=(config.pixel_mean,),
            std=(config.pixel_std,),
        )
        text_encoder = create_text_encoder(
            config.text_encoder,
            pretrained=pretrained,
            vocab_size=config.vocab_size,
            layers=range(-config.text_layers, 0),
            reduce=config.text_reduce,
            pool="mean",
            **attention_arguments(config.attention_dropout),
        )
        freeze_layers(text_encoder, config.frozen_text_layers)
        return cls(
            config,
            image_encoder,
            text_encoder,
            nn.Linear(image_encoder.feature_dim, config.projection_dim),
            _to_width(text_encoder.feature_dim, config.projection_dim),
            region_head=nn.Linear(image_encoder.patch_dim, config.projection_dim, bias=False),
            word_head=_to_width(text_encoder.token_dim, config.projection_dim),
            transform=EvalTransform(size=config.image_size, fit=config.fit, margin=config.margin),
            tokenizer=tokenizer,
        )

    def encode_pairs(self, batch: Batch) -> Pairs:
        """See the base class."""
        texts = self._embed_ids(batch.ids_BT, batch.mask_BT)
        pairs = Pairs(self.embed_images(batch.image_BCHW), texts)
        if batch.has_image_B is None and batch.has_text_B is None:
            return pairs
        return pairs.rows(complete_rows(batch))

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """See the base class. A rank compares its own images with the texts of all ranks, so regions never travel."""
        images, texts = pairs.images, pairs.texts
        text_NE = gather(texts.global_NE)
        if not len(text_NE):  # not one pair on any rank: 0, with gradients of zero, so that no rank waits for one
            parts = images.global_NE, _local(images)[0], texts.global_NE, _local(texts)[0]
            nothing = 0 * torch.stack([part.sum() for part in parts]).sum()
            return Losses(total=nothing, terms={"local": nothing, "global": nothing})
        words_NWE, mask_NW = gather_padded(*_local(texts))
        similarity_NN = gather(self._compare_words(images, Embeddings(text_NE, words_NWE, mask_NW)))
        local = torch.stack(gloria_contrast(similarity_NN, mask_NW.any(dim=1), self.config.temp3)).sum()
        whole = 2 * losses.clip(gather(images.global_NE), text_NE, self.config.temp3)  # both directions, summed as well
        total = self.config.local_weight * local + self.config.global_weight * whole
        return Losses(total=total, terms={"local": local, "global": whole})

    def encode_image(self, image_BCHW: Tensor) -> Tensor:
        """(B, E), L2-normalised, float32. Takes uint8 pixels, or floats that are already normalised."""
        return self.embed_images(image_BCHW).global_NE

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Images as `similarity` takes them: with their regions, which are not normalised."""
        pixels_BCHW = self.image_encoder.normalize(image_BCHW)
        side = self.config.encoder_size
        if side is not None and tuple(pixels_BCHW.shape[2:]) != (side, side):
            pixels_BCHW = F.interpolate(pixels_BCHW, (side, side), mode="bilinear", align_corners=True)
        features = self.image_encoder(pixels_BCHW)
        global_BE = F.normalize(self.image_head(features.pooled_BD).float(), dim=-1)
        return Embeddings(global_BE, self._scaled(self.region_head(features.patches_BPD)))

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Texts as `similarity` takes them: with their words behind the text's first token, not normalised."""
        return self._embed_ids(*self.tokenize(texts))

    def similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """(N, M): the mean of cosine and word-region similarity, which is that of the logits of training over temp3.

        Takes what `DualEncoder.similarity` takes.
        """
        images, texts = self._embedded(images, texts)
        return (super().similarity(images, texts) + self._compare_words(images, texts)) / 2

    def published_similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """(N, M): the similarity of the published zero-shot code, which is not the one that it trains.

        A text's best word stands for it, temp2 times its match, beside a cosine that is not scaled; the text's first
        token is no word.
        """
        images, texts = self._embedded(images, texts)
        words_MWE, mask_MW = _local(texts)
        words = Embeddings(texts.global_NE, words_MWE[:, self._first_word :], mask_MW[:, self._first_word :])
        return (super().similarity(images, texts) + self._compare_words(images, words, "max")) / 2

    @torch.no_grad()
    def attention_maps(
        self, image_BCHW: Tensor, texts: Sequence[str], original_sizes: Sequence[tuple[int, int]] | None = None
    ) -> list[Tensor]:
        """Where each image is looked at for its text: one map (H, W) a pair, float32, in pixels of the original.

        The attention of the text's words, each counting as much as it does in the local similarity: by the softmax of
        temp2 times its match. The text's first token takes part in it and is not shown. Over the grid a map sums to 1,
        and to 0 of a text without words. NaN is what `transform` cut off before the model saw it. Call it in eval mode.

        Args:
            image_BCHW: as `transform` made them.
            texts: of each image its own.
            original_sizes: (height, width) of the images before `transform`; None gives maps over the model's input.
        """
        words, regions_BPE, attention_BWP = self._attended(image_BCHW, texts)
        words_BWE, mask_BW = words
        match_BW = F.cosine_similarity(attention_BWP @ regions_BPE.float(), words_BWE.float(), dim=2)
        weight_BW = (self.config.temp2 * match_BW).masked_fill(~mask_BW, -torch.inf).softmax(dim=1).nan_to_num()
        mean_Bhw = torch.einsum("bw,bwp->bp", weight_BW, attention_BWP).unflatten(1, self._grid(image_BCHW))
        if original_sizes is None:
            height, width = image_BCHW.shape[2:]
            return list(on_image(mean_Bhw, Box(0.0, 0.0, height, width), height, width))
        boxes = [self.transform.box(height, width) for height, width in original_sizes]
        return [
            on_image(map_hw[None], box, height, width)[0]
            for map_hw, box, (height, width) in zip(mean_Bhw, boxes, original_sizes, strict=True)
        ]

    @torch.no_grad()
    def word_attention(self, image_BCHW: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """(attention_BWhw, mask_BW): where every word of text i looks in image i, over the grid of regions.

        Words are the tokenizer's, in order. Raises ConfigError unless there are as many texts as images.
        """
        (_, mask_BW), _, attention_BWP = self._attended(image_BCHW, texts)
        return attention_BWP.unflatten(2, self._grid(image_BCHW)), mask_BW

    def _attended(self, image_BCHW: Tensor, texts: Sequence[str]) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """(words_BWE, mask_BW), regions_BPE, attention_BWP: of words, without the text's first token."""
        if len(image_BCHW) != len(texts):
            raise ConfigError(f"each image needs a text of its own: {len(image_BCHW)} images and {len(texts)} texts")
        words_BWE, mask_BW = _local(self.embed_texts(texts))
        regions_BPE, _ = _local(self.embed_images(image_BCHW))
        attention_BWP = gloria_attention(regions_BPE, words_BWE, mask_BW, self.config.temp1)
        first = self._first_word
        return (words_BWE[:, first:], mask_BW[:, first:]), regions_BPE, attention_BWP[:, first:]

    def _grid(self, image_BCHW: Tensor) -> tuple[int, int]:
        """(h, w) of the regions."""
        side = self.config.encoder_size
        return self.image_encoder.grid(*((side, side) if side is not None else image_BCHW.shape[2:]))

    def _embedded(
        self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]
    ) -> tuple[Embeddings, Embeddings]:
        return (
            images if isinstance(images, Embeddings) else self.embed_images(images),
            texts if isinstance(texts, Embeddings) else self.embed_texts(texts),
        )

    def _embed_ids(self, ids_BT: Tensor, mask_BT: Tensor) -> Embeddings:
        if self.tokenizer is None:
            raise ConfigError(
                "this model has no tokenizer, so it cannot tell words in token ids: create_model(..., tokenizer=FOLDER)"
            )
        slot_BT = word_slots(self.tokenizer, ids_BT, mask_BT)
        width = most_slots(slot_BT)  # before the encoder: it is waited for
        features = self.text_encoder(ids_BT, mask_BT)
        words_BWD, mask_BW = sum_by_slot(features.tokens_BTD, slot_BT, width)
        if not self.config.text_token:
            words_BWD, mask_BW = words_BWD[:, 1:], mask_BW[:, 1:]
        global_BE = F.normalize(self.text_head(features.pooled_BD).float(), dim=-1)
        return Embeddings(global_BE, self._scaled(self.word_head(words_BWD)), mask_BW)

    @property
    def _first_word(self) -> int:
        """Where the words of `_embed_ids` begin, behind the text's first token."""
        return int(self.config.text_token)

    def _scaled(self, local_NPE: Tensor) -> Tensor:
        length = self.config.local_feature_norm
        return local_NPE if length is None else length * F.normalize(local_NPE.float(), dim=-1)

    def _compare_words(self, images: Embeddings, texts: Embeddings, pool: WordPool | None = None) -> Tensor:
        (regions_NPE, _), (words_MWE, mask_MW) = _local(images), _local(texts)
        config = self.config
        return gloria_similarity(
            regions_NPE, words_MWE, mask_MW, config.temp1, config.temp2, pool=pool or config.word_pool
        )


def _to_width(width: int, wanted: int) -> nn.Module:
    return nn.Identity() if width == wanted else nn.Linear(width, wanted, bias=False)


def _local(embeddings: Embeddings) -> tuple[Tensor, Tensor]:
    """Regions or words, and which of them are real."""
    local_NPE, mask_NP = embeddings.local_NPE, embeddings.mask_NP
    if local_NPE is None:
        raise ConfigError(
            "GLoRIA compares regions with words: embed images and texts with its own embed_images and embed_texts"
        )
    return local_NPE, torch.ones_like(local_NPE[..., 0], dtype=torch.bool) if mask_NP is None else mask_NP
