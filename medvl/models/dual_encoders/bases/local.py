"""Bases of dual-encoders that also compare the words of a text with the regions of an image, or
that have vectors of the sentences of a text.
"""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_choice, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.losses.common import full_precision, gather
from medvl.losses.local.gloria import WordPool, gloria_contrast, gloria_similarity
from medvl.losses.local.within_sample import in_chunks
from medvl.models.dual_encoders.bases.base import BertDualConfig, DualEncoder
from medvl.models.dual_encoders.parts.layers import BatchNormHead
from medvl.models.heatmaps import maps_of_cells, on_originals
from medvl.schema import Embeddings, ImageFeatures

# Scores of all pairs of two sides by a network that reads both, in exact chunks (CARZero).

_CHUNK_BYTES = 2**29
_CHUNK_TENSORS = 4
"""Memory of the network's widest states for one chunk of queries, and how many of them it holds
at once.
"""


def score_head(width: int, hidden: Sequence[int], dropout: float) -> nn.Sequential:
    """Return linear layers with ReLU and dropout down to one number."""
    widths = [width, *hidden]
    layers = [
        nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout))
        for before, after in itertools.pairwise(widths)
    ]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def unnormalized(unit_NE: Tensor) -> Tensor:
    """Return unit vectors at a norm of sqrt(E), at which a LayerNorm's epsilon is as small as for
    published ones, which are not L2-normalised.
    """
    return unit_NE * unit_NE.shape[1] ** 0.5


def with_global(global_NE: Tensor, local_NPE: Tensor, mask_NP: Tensor) -> tuple[Tensor, Tensor]:
    """Return (N, K, E) and its mask (N, K), K = 1 + P: the unit vector of each row, unnormalised,
    then its regions or words.
    """
    memory_NKE = torch.cat([unnormalized(global_NE)[:, None], local_NPE], dim=1)
    return memory_NKE, torch.cat([mask_NP.new_ones(len(mask_NP), 1), mask_NP], dim=1)


def pair_scores(
    read: Callable[[Tensor, Tensor, Tensor], Tensor],
    memory_NKE: Tensor,
    mask_NK: Tensor,
    query_ME: Tensor,
    *,
    width: int,
    chunk: int | None = None,
) -> Tensor:
    """Return (N, M) float32: the score of each query with each row.

    Args:
        read: function from queries (N, C, E), memory and its mask to scores (N, C, 1).
        memory_NKE, mask_NK: vectors of each row, and True on the real ones.
        query_ME: queries of all rows, unit vectors.
        width: width of the network's widest states.
        chunk: number of queries at a time, by default as many as fit in 512 MiB; chunks are
            recomputed backwards.
    """
    rows = len(memory_NKE)
    # a rank without pairs: attention needs a row, and DDP the gradients of all weights
    if not rows:
        memory_NKE = torch.cat([memory_NKE, memory_NKE.new_zeros(1, *memory_NKE.shape[1:])])
        mask_NK = mask_NK.new_ones(1, mask_NK.shape[1])

    def score(memory_NKE: Tensor, query_CE: Tensor, mask_NK: Tensor) -> Tensor:
        return (
            read(query_CE.expand(len(memory_NKE), -1, -1), memory_NKE, mask_NK).squeeze(2).float()
        )

    chunk = chunk or max(1, _CHUNK_BYTES // (4 * _CHUNK_TENSORS * width * max(1, rows)))
    return in_chunks(score, memory_NKE, unnormalized(query_ME), mask_NK, chunk=chunk)[:rows]


# Word features as sums of their sub-words' token features.
#
#     slot_BT = word_slots(tokenizer, ids_BT, mask_BT)
#     words_BWD, mask_BW = sum_by_slot(features.tokens_BTD, slot_BT, most_slots(slot_BT))
#
# Shape letters are those of `medvl.schema`; slot 0 is the text's first token.


def word_slots(
    tokenizer: Tokenizer, ids_BT: Tensor, mask_BT: Tensor, *, last_token: bool = False
) -> Tensor:
    """Return (B, T) int64: 0 for the text's first token, from 1 for its words, -1 for padding and
    the last token.

    With `last_token`, the last token ([SEP]) has the slot after the words.
    """
    slot_BT = tokenizer.word_ids(ids_BT, mask_BT)
    slot_BT = torch.where(slot_BT >= 0, slot_BT + 1, slot_BT)
    slot_BT[:, 0] = torch.where(mask_BT[:, 0], 0, -1)
    if last_token:
        slot_BT = torch.where(
            mask_BT & (slot_BT < 0), slot_BT.amax(dim=1, keepdim=True) + 1, slot_BT
        )
    return slot_BT


def most_slots(slot_BT: Tensor) -> int:
    """Return W, the number of slots of the longest text. Waits for the device."""
    return int(slot_BT.max()) + 1


def sum_by_slot(tokens_BTD: Tensor, slot_BT: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return (words_BWD, mask_BW): the sum of the tokens of each slot, in float32; W is `width`,
    from `most_slots`.

    Slots of a text are numbered from 0 without a gap; tokens at -1 are ignored.
    """
    count_B = slot_BT.amax(dim=1) + 1
    place_BTD = torch.where(slot_BT >= 0, slot_BT, width)[:, :, None].expand_as(tokens_BTD)
    words_BWD = tokens_BTD.new_zeros(
        len(tokens_BTD), width + 1, tokens_BTD.shape[2], dtype=torch.float32
    )
    words_BWD = words_BWD.scatter_add(1, place_BTD, tokens_BTD.float())[:, :width]
    return words_BWD, torch.arange(width, device=slot_BT.device) < count_B[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalDualConfig(BertDualConfig):
    """Settings of a dual-encoder with words and regions."""

    margin: int = 0
    """Pixels cut off on every side after the image was made square."""
    encoder_size: int | None = None
    """Side to which the image encoder stretches images on the device, bilinearly, wherever it is
    used; None is `image_size`, and images of any size are encoded as they are.
    """
    pixel_mean: float | None = None
    pixel_std: float | None = None
    """Mean and standard deviation of pixels in 0..1; None takes the image encoder's."""
    patch_level: int = -1
    """Stage of the image encoder that regions come from: -1 is the last one, the only one of
    vision Transformers.
    """
    text_layers: int = 1
    """Number of last layers of the text encoder that are combined."""
    text_reduce: Literal["sum", "mean"] = "sum"
    """How these layers are combined."""
    text_pool: Literal["mean", "cls"] = "mean"
    """A text's vector: the mean of its tokens, or its first token."""
    local_feature_norm: float | None = None
    """Norm to which regions and words are scaled; None leaves them as they are."""
    text_token: bool = True
    """Include the text's first token among its words."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "pixel_std", "local_feature_norm", "text_layers")


class LocalDualEncoder(DualEncoder):
    """A dual-encoder whose images have regions and whose texts have words, in the shared space.

    Regions come from a stage of the image encoder. A text is the combination of its encoder's last
    layers; a word is the sum of its sub-words. Regions and words are float32, also under autocast,
    and are not L2-normalised. A model without a tokenizer has no words.

    Attributes:
        region_head, word_head: maps to the shared space; by default as in GLoRIA: linear, without a
            bias, and Identity for a text encoder as wide as the shared space. A `BatchNormHead`
            gets the mask of the words.
        weighs_words: whether texts have `Embeddings.weight_NP`: the attention of the text's first
            token to each word in the last layer, averaged over heads and summed over sub-words. The
            same applies to images, from the class token to each region, where the image encoder has
            such attention (`ImageEncoder.has_attention`).
    """

    weighs_words: ClassVar[bool] = False
    attention_maps = maps_of_cells

    def __init__(
        self, config: Any, *args: Any, region_head: nn.Module, word_head: nn.Module, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.region_head = region_head
        self.word_head = word_head

    @classmethod
    def encoder_arguments(
        cls, config: LocalDualConfig
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        image = {
            "image_size": config.encoder_size or config.image_size,
            "stretch": config.encoder_size is not None,
            "patch_level": config.patch_level,
            "mean": config.pixel_mean,
            "std": config.pixel_std,
        }
        layers = range(-config.text_layers, 0)
        return image, {"layers": layers, "reduce": config.text_reduce, "pool": config.text_pool}

    @classmethod
    def make_heads(
        cls, config: LocalDualConfig, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, nn.Module]:
        """Return linear heads; a text encoder as wide as the shared space has none."""
        return {
            "image_head": nn.Linear(image_encoder.feature_dim, config.projection_dim),
            "text_head": _linear_unless_equal(text_encoder.feature_dim, config.projection_dim),
            "region_head": nn.Linear(image_encoder.patch_dim, config.projection_dim, bias=False),
            "word_head": _linear_unless_equal(text_encoder.token_dim, config.projection_dim),
        }

    @classmethod
    def make_transform(cls, config: LocalDualConfig) -> EvalTransform:
        return config.transform(margin=config.margin)

    @abc.abstractmethod
    def attend(self, regions_BPE: Tensor, words_BWE: Tensor, mask_BW: Tensor) -> Tensor:
        """Return (B, W, P) float32: attention of each word over the regions of its own image; 0
        for padding.
        """

    @abc.abstractmethod
    def weigh_words(self, match_BW: Tensor, mask_BW: Tensor) -> Tensor:
        """Return (B, W): shares of words in a text's heat map, from the cosine of each with the
        regions it attends to.

        Shares sum to 1, and to 0 for a text without words.
        """

    def unnormalized_image(self, image_BCHW: Tensor) -> Tensor:
        pooled_BD, _ = self.pool_regions(self._encode_image(image_BCHW))
        return self.image_head(pooled_BD).float()

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Return images as `similarity` takes them, with their regions."""
        return self.embed_features(self._encode_image(image_BCHW))

    def embed_features(self, features: ImageFeatures) -> Embeddings:
        """Return images as `embed_images` does, from the output of the image encoder."""
        assert features.patches_BPD is not None, "the image encoder has patches"
        pooled_BD, weight_BP = self.pool_regions(features)
        vector_BE = self.image_head(pooled_BD).float()
        local_BPE = self._project(self.region_head, features.patches_BPD)
        return Embeddings(F.normalize(vector_BE, dim=-1), local_BPE, None, weight_BP)

    def _encode_image(self, image_BCHW: Tensor) -> ImageFeatures:
        output_attention = self.weighs_words and self.image_encoder.has_attention
        features: ImageFeatures = self.image_encoder(image_BCHW, output_attention=output_attention)
        return features

    def pool_regions(self, features: ImageFeatures) -> tuple[Tensor, Tensor | None]:
        """Return (B, D), the vector of each image for `image_head`, and (B, P), weights of its
        regions, or None.
        """
        return features.pooled_BD, features.attention_BP

    def embed_ids(self, ids_BT: Tensor, mask_BT: Tensor) -> Embeddings:
        """Return texts as `similarity` takes them, with their words. Raises ConfigError without
        a tokenizer.
        """
        return self.embed_slots(ids_BT, mask_BT, self.word_slots(ids_BT, mask_BT))

    def word_slots(self, ids_BT: Tensor, mask_BT: Tensor, *, last_token: bool = False) -> Tensor:
        """Return `words.word_slots` with this model's tokenizer. Raises ConfigError without one."""
        return word_slots(
            self.require_tokenizer("finding words"), ids_BT, mask_BT, last_token=last_token
        )

    def embed_slots(self, ids_BT: Tensor, mask_BT: Tensor, slot_BT: Tensor) -> Embeddings:
        """Return texts as `similarity` takes them, with one local feature for each slot of tokens,
        such as a word.

        `slot_BT` is int64, from 0 and -1 on tokens outside of all slots.
        """
        width = most_slots(slot_BT)  # before the encoder, because it waits for the device
        features = self.text_encoder(ids_BT, mask_BT, output_attention=self.weighs_words)
        words_BWD, mask_BW = sum_by_slot(features.tokens_BTD, slot_BT, width)
        weight_BW = None
        if features.attention_BT is not None:
            weight_BW = sum_by_slot(features.attention_BT[:, :, None], slot_BT, width)[0].squeeze(2)
        if not self.config.text_token:  # before the head, whose batch norm is over words
            words_BWD = words_BWD[:, 1:]
            mask_BW = mask_BW[:, 1:]
            weight_BW = None if weight_BW is None else weight_BW[:, 1:]
        global_BE = F.normalize(self.text_head(features.pooled_BD).float(), dim=-1)
        return Embeddings(
            global_BE, self._project(self.word_head, words_BWD, mask_BW), mask_BW, weight_BW
        )

    def cell_maps(self, image_BCHW: Tensor, texts: Sequence[str]) -> Tensor:
        """Return the attention of each text's words, weighted by `weigh_words`.

        The text's first token takes part in the attention and is not shown. Over the grid of
        regions a map sums to 1, and to 0 for a text without words.
        """
        _check_pairs(image_BCHW, texts)
        return self.text_maps(self.embed_images(image_BCHW), self.embed_texts(texts))

    def text_maps(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Return (B, P): `cell_maps` of embeddings, text i in image i."""
        words_BWE, mask_BW, regions_BPE, attention_BWP = self._attended(images, texts)
        match_BW = F.cosine_similarity(
            attention_BWP @ regions_BPE.float(), words_BWE.float(), dim=2
        )
        return torch.einsum("bw,bwp->bp", self.weigh_words(match_BW, mask_BW), attention_BWP)

    @torch.no_grad()
    def word_attention(self, image_BCHW: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return (attention_BWhw, mask_BW): attention of every word of text i over the grid of
        regions of image i.

        Words are the tokenizer's, in order. Raises ConfigError unless there are as many texts as
        images.
        """
        _check_pairs(image_BCHW, texts)
        embedded = self.embed_images(image_BCHW), self.embed_texts(texts)
        _, mask_BW, _, attention_BWP = self._attended(*embedded)
        return attention_BWP.unflatten(2, self.image_encoder.grid(*image_BCHW.shape[2:])), mask_BW

    def without_first_token(self, texts: Embeddings) -> Embeddings:
        """Return texts with their words only, without the text's first token."""
        return _without_first(texts) if self.config.text_token else texts

    def _attended(
        self, images: Embeddings, texts: Embeddings
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return words_BWE, mask_BW, regions_BPE and attention_BWP, without the text's first
        token.
        """
        regions_BPE, _ = local_features(images)
        attention_BWP = self.attend(regions_BPE, *local_features(texts))
        words_BWE, mask_BW = local_features(self.without_first_token(texts))
        return (
            words_BWE,
            mask_BW,
            regions_BPE,
            attention_BWP[:, attention_BWP.shape[1] - words_BWE.shape[1] :],
        )

    def _project(
        self, head: nn.Module, features_NPD: Tensor, mask_NP: Tensor | None = None
    ) -> Tensor:
        """Return (N, P, E) float32. Autocast would round regions and words before a softmax of
        their raw products.
        """
        with full_precision(features_NPD):
            arguments = (
                (features_NPD.float(), mask_NP)
                if isinstance(head, BatchNormHead)
                else (features_NPD.float(),)
            )
            local_NPE: Tensor = head(*arguments)
        norm = self.config.local_feature_norm
        return local_NPE if norm is None else norm * F.normalize(local_NPE, dim=-1)


def _check_pairs(image_BCHW: Tensor, texts: Sequence[str]) -> None:
    if len(image_BCHW) != len(texts):
        message = f"expected as many texts as images, got {len(texts)} and {len(image_BCHW)}"
        raise ConfigError(message, "mismatch", field="texts")


def local_features(embeddings: Embeddings) -> tuple[Tensor, Tensor]:
    """Return (local_NPE, mask_NP). Raises ConfigError for embeddings without regions or words."""
    local_NPE = embeddings.local_NPE
    mask_NP = embeddings.mask_NP
    if local_NPE is None:
        message = (
            "embeddings without regions or words: use this model's embed_images and embed_texts"
        )
        raise ConfigError(message, "missing")
    return local_NPE, torch.ones_like(
        local_NPE[..., 0], dtype=torch.bool
    ) if mask_NP is None else mask_NP


def local_contrast(
    images: Embeddings,
    texts: Embeddings,
    temp1: float,
    temp2: float,
    temp3: float,
    pool: WordPool = "sum",
) -> Tensor:
    """Return the sum of both directions of `losses.gloria_local` over all ranks.

    `images` are those of this rank, whose regions stay there; `texts` are gathered already.
    """
    regions_NPE, _ = local_features(images)
    words_NWE, mask_NW = local_features(texts)
    similarity_NN = gather(
        gloria_similarity(regions_NPE, words_NWE, mask_NW, temp1, temp2, pool=pool)
    )
    return torch.stack(gloria_contrast(similarity_NN, mask_NW.any(dim=1), temp3)).sum()


def _without_first(texts: Embeddings) -> Embeddings:
    words_NWE, mask_NW = local_features(texts)
    weight_NW = None if texts.weight_NP is None else texts.weight_NP[:, 1:]
    return Embeddings(texts.global_NE, words_NWE[:, 1:], mask_NW[:, 1:], weight_NW)


def _linear_unless_equal(in_features: int, out_features: int) -> nn.Module:
    return (
        nn.Identity()
        if in_features == out_features
        else nn.Linear(in_features, out_features, bias=False)
    )


# Sentence features from the features of their tokens.
#
# width = most_slots(batch.sentence_BT)                       # waits for the device
# sentences_BSD, mask_BS = pool_sentences(features.tokens_BTD, batch.sentence_BT, width)

SentencePool = Literal["max", "mean"]


def pool_sentences(
    tokens_BTD: Tensor, sentence_BT: Tensor, width: int | None = None, pool: SentencePool = "max"
) -> tuple[Tensor, Tensor]:
    """Return (sentences_BSD, mask_BS): maximum or mean of the tokens of each sentence, in float32;
    S is `width`.

    Args:
        tokens_BTD: features of tokens.
        sentence_BT: `Batch.sentence_BT`: number of each token's sentence, from 0; -1 outside of
            sentences, where tokens are ignored.
        width: at least the number of sentences of the longest text. None: that number, for which it
            waits for the device.
        pool: "max" as in LoVT (arXiv 2112.02889, section 3.3). Tokens that share the maximum share
            its gradient.

    A sentence without tokens, also between others, has zeros and is False in the mask. Raises
    ConfigError on an unknown pool.
    """
    check_choice(pool, get_args(SentencePool), "pool")
    width = most_slots(sentence_BT) if width is None else width
    outside_BT = sentence_BT < 0
    place_BT = sentence_BT.masked_fill(outside_BT, width)
    count_BS = sentence_BT.new_zeros(len(sentence_BT), width + 1)
    count_BS = count_BS.scatter_add(1, place_BT, torch.ones_like(place_BT))[:, :width]
    mask_BS = count_BS > 0
    if pool == "mean":
        sentences_BSD, _ = sum_by_slot(tokens_BTD, sentence_BT, width)
        return sentences_BSD / count_BS.clamp(min=1)[:, :, None], mask_BS
    lowest_BSD = tokens_BTD.new_full(
        (len(tokens_BTD), width + 1, tokens_BTD.shape[2]), -torch.inf, dtype=torch.float32
    )
    tokens_BTD = tokens_BTD.float().masked_fill(outside_BT[:, :, None], 0.0)
    place_BTD = place_BT[:, :, None].expand_as(tokens_BTD)
    sentences_BSD = lowest_BSD.scatter_reduce(1, place_BTD, tokens_BTD, "amax")[:, :width]
    return sentences_BSD.masked_fill(~mask_BS[:, :, None], 0.0), mask_BS


def mean_of_sentences(tokens_BTD: Tensor, sentence_BT: Tensor | None, mask_BT: Tensor) -> Tensor:
    """Return (B, D) float32: the mean of a text's sentences, each the mean of its tokens.

    A text without a sentence, and every text if `sentence_BT` is None, is one sentence.
    """
    sentence_BT = (
        torch.full_like(mask_BT, -1, dtype=torch.long) if sentence_BT is None else sentence_BT
    )
    sentences_BSD, mask_BS = pool_sentences(
        tokens_BTD, whole_if_none(sentence_BT, mask_BT), pool="mean"
    )
    return sentences_BSD.sum(dim=1) / mask_BS.sum(dim=1, keepdim=True).clamp(min=1)


def whole_if_none(sentence_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the numbers of sentences, 0 on all tokens but the first and the last of a text that
    has no sentence.

    A text of nothing but its first and last token has these as its sentence.
    """
    inner_BT = mask_BT & F.pad(mask_BT[:, 1:], (0, 1))
    inner_BT[:, 0] = False
    whole_BT = (
        torch.where(inner_BT.any(dim=1, keepdim=True), inner_BT, mask_BT).to(sentence_BT.dtype) - 1
    )
    return torch.where((sentence_BT >= 0).any(dim=1, keepdim=True), sentence_BT, whole_BT)


class SentenceDualEncoder(DualEncoder):
    """A dual-encoder whose texts have sentences in `Embeddings.local_NPE`, if it declares
    `Inputs(sentences=True)`. They are pooled from the tokens of the whole text.

    Attributes:
        sentence_pool: pooling of the tokens of a sentence.
        normalized: whether vectors of images, texts and sentences, behind `image_head` or
            `text_head`, are L2-normalised.
        embeds_regions: whether images have the encoder's patches in `Embeddings.local_NPE`, as they
            are.
    """

    sentence_pool: ClassVar[SentencePool] = "mean"
    normalized: ClassVar[bool] = True
    embeds_regions: bool = False

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        """Return images as `similarity` takes them."""
        features = self.image_encoder(image_BCHW, self._draw_patches(image_BCHW))
        regions_BPD = features.patches_BPD.float() if self.embeds_regions else None
        return Embeddings(self._project(self.image_head, features.pooled_BD), regions_BPD)

    def embed_ids(
        self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None
    ) -> Embeddings:
        """Return texts as `similarity` takes them; without `sentence_BT`, a whole text is its
        only sentence.
        """
        if not self.inputs.sentences:
            return Embeddings(
                self._project(self.text_head, self.text_encoder(ids_BT, mask_BT).pooled_BD)
            )
        sentence_BT = torch.where(mask_BT, 0, -1) if sentence_BT is None else sentence_BT
        # before the encoder, because it waits for the device
        width = max(most_slots(sentence_BT), 1)
        features = self.text_encoder(ids_BT, mask_BT)
        sentences_BSD, mask_BS = pool_sentences(
            features.tokens_BTD, sentence_BT, width, self.sentence_pool
        )
        text_BE, sentences_BSE = (
            self._project(self.text_head, each) for each in (features.pooled_BD, sentences_BSD)
        )
        return Embeddings(text_BE, sentences_BSE, mask_BS)

    @torch.no_grad()
    def sentence_maps(
        self,
        score: Callable[[Tensor, Tensor], Tensor],
        image_BCHW: Tensor,
        texts: Sequence[str],
        original_sizes: Sequence[tuple[int, int]] | None = None,
    ) -> list[Tensor]:
        """Return one (H, W) map per pair: the softmax over regions of the mean score of the text's
        sentences.

        `score` maps regions (P, D) and sentences (S, E) to (P, S). Other arguments are those of
        `LocalDualEncoder.attention_maps`.
        """
        regions_BPD, _ = local_features(self.embed_images(image_BCHW))
        sides = zip(regions_BPD, *local_features(self.embed_texts(texts)), strict=True)
        scores = [
            score(regions_PD, text_SE[mask_S]).mean(dim=1) for regions_PD, text_SE, mask_S in sides
        ]
        map_Bhw = (
            torch.stack(scores)
            .softmax(dim=1)
            .unflatten(1, self.image_encoder.grid(*image_BCHW.shape[2:]))
        )
        return on_originals(map_Bhw, self.transform, image_BCHW, original_sizes)

    def _project(self, head: nn.Module, features: Tensor) -> Tensor:
        """Return vectors (..., E) in float32, L2-normalised if the system's are."""
        projected: Tensor = head(features).float()
        return F.normalize(projected, dim=-1) if self.normalized else projected
