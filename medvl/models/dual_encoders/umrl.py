"""UMRL: frozen features of images and texts, mapped linearly to one space (Hsu et al., arXiv
1811.08615, ML4H 2018).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_choice, check_weights, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.losses import modality_confusion
from medvl.losses.common import full_precision, mean_over_ranks
from medvl.losses.pairs.blockwise import in_share
from medvl.models.base import EncoderArguments
from medvl.models.dual_encoders.bases.base import BertDualConfig, DualEncoder
from medvl.models.dual_encoders.bases.local import mean_of_sentences
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.models.dual_encoders.parts.layers import move_to_orthogonal
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Inputs, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class UMRLConfig(BertDualConfig):
    """Settings of the paper where it gives them: DenseNet-121 after average pooling, one linear map
    per modality.

    Recalled and not confirmed: the distance, the discriminator and the orthogonality. Chosen here:
    all numbers.

    Texts: `text_encoder` "static" is a table of word vectors, averaged: those of a GloVe file
    (`text_weights`), or TF-IDF with PCA (`medvl.models.fit_tfidf`, which the recipe calls). Any
    other encoder gives vectors of `text_unit`.
    """

    image_encoder: str = "densenet121"
    text_encoder: str = "static"
    text_arguments: EncoderArguments = dataclasses.field(default_factory=lambda: {"dimension": 300})
    text_unit: Literal["paragraph", "sentence"] = "paragraph"
    """Vector of a text: from the whole text, or the mean over its sentences, each the mean of
    its tokens.
    """
    projection_dim: int = 128
    distance: Literal["cosine", "squared"] = "cosine"
    """Distance of a pair's two vectors: 1 - cosine, or the squared Euclidean distance."""
    alignment_weight: float = 1.0
    """Weight of the distance of pairs (EA); 0 leaves it out."""
    adversarial_weight: float = 1.0
    """Weight of the discriminator of images and texts (Adv); 0 leaves it out."""
    paired_share: float = 1.0
    """Share of the studies whose pairs are known, always the same ones; the others are in Adv
    only.
    """
    hidden_dim: int = 512
    """Hidden width of the discriminator."""
    orthogonality: float = 0.01
    """Beta of the update W <- (1 + beta) W - beta W W^T W of both maps after a step (Lample et al.,
    arXiv 1710.04087); 0 leaves it out. Without it, the distance of pairs alone is minimal if all
    vectors have one direction.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.distance, ("cosine", "squared"), "distance")
        check_choice(self.text_unit, ("paragraph", "sentence"), "text_unit")
        check_within(self, "[0, 1]", "paired_share", "orthogonality")
        check_within(self, "[1, inf)", "hidden_dim")
        check_weights(self, "adversarial_weight", "alignment_weight")


@register_system("umrl")
class UMRL(DualEncoder):
    """EA, Adv and EA+Adv. Both encoders are frozen and in eval mode; they are run anew in every
    step, but for images whose features are stored.
    """

    Config = UMRLConfig
    reads_features = True

    def __init__(self, config: UMRLConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.inputs = Inputs(sentences=config.text_unit == "sentence")
        for encoder in (self.image_encoder, self.text_encoder):
            encoder.freeze()
        layers = (
            nn.Linear(config.projection_dim, config.hidden_dim),
            nn.LeakyReLU(0.2),
            nn.Linear(config.hidden_dim, 1),
        )
        self.discriminator = nn.Sequential(*layers) if config.adversarial_weight else None

    @classmethod
    def encoder_arguments(cls, config: UMRLConfig) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        # without a tokenizer, BERT's
        static = {"pretrained": False, "vocab_size": config.vocab_size or 30_522}
        return {}, {"pool": "mean", **(static if config.text_encoder == "static" else {})}

    @classmethod
    def make_heads(
        cls, config: UMRLConfig, image: ImageEncoder, text: TextEncoder
    ) -> dict[str, nn.Module]:
        """Return the linear maps, orthogonal at first."""
        heads = [
            nn.Linear(width, config.projection_dim, bias=False)
            for width in (image.feature_dim, text.feature_dim)
        ]
        for head in heads:
            nn.init.orthogonal_(head.weight)
        return {"image_head": heads[0], "text_head": heads[1]}

    def map_ids(self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None) -> Tensor:
        """Return (B, E) float32: texts behind `text_head`, not normalised."""
        features = self.text_encoder(ids_BT, mask_BT)
        vector_BD = features.pooled_BD
        if self.inputs.sentences:
            vector_BD = mean_of_sentences(features.tokens_BTD, sentence_BT, mask_BT)
        projected_BE: Tensor = self.text_head(vector_BD)
        return projected_BE.float()

    def unnormalized_text(
        self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None
    ) -> Tensor:
        if isinstance(texts, Tensor):
            tokens: tuple[Tensor, ...] = self.tokenize(texts, mask_BT)
        else:
            tokens = self.tokenize_inputs(texts)
        return self.map_ids(*tokens)

    def embed_ids(
        self, ids_BT: Tensor, mask_BT: Tensor, sentence_BT: Tensor | None = None
    ) -> Embeddings:
        return Embeddings(F.normalize(self.map_ids(ids_BT, mask_BT, sentence_BT), dim=-1))

    def embed_pairs(self, batch: Batch) -> Pairs:
        """Return mapped vectors, not normalised, and which pairs are known."""
        image_BE = self.image_head(self.image_features(batch).pooled_BD).float()
        text_BE = self.map_ids(*self.text_inputs(batch))
        known_B1 = in_share(batch.studies or batch.keys, self.config.paired_share)[:, None].to(
            image_BE
        )
        return Pairs(
            images=Embeddings(image_BE),
            texts=Embeddings(text_BE),
            others={"known": Embeddings(known_B1)},
        )

    def compare_pairs(self, pairs: Pairs) -> Losses:
        config = self.config
        image_BE = pairs.images.global_NE
        text_BE = pairs.texts.global_NE
        terms: dict[str, tuple[Tensor, float]] = {}
        with full_precision(image_BE):
            if config.alignment_weight:
                distance_B = (image_BE - text_BE).square().sum(dim=1)
                if config.distance == "cosine":
                    distance_B = 1 - F.cosine_similarity(image_BE, text_BE)
                known_B = pairs.others["known"].global_NE[:, 0] > 0.5
                terms["alignment"] = mean_over_ranks(distance_B, known_B), config.alignment_weight
            if self.discriminator is not None:
                confusion = modality_confusion(self.discriminator, image_BE, text_BE)
                terms["adversarial"] = confusion, config.adversarial_weight
        return Losses.weighted(**terms)

    def after_step(self, step: int) -> None:
        """Move both maps towards orthogonal rows."""
        for head in (self.image_head, self.text_head) if self.config.orthogonality else ():
            move_to_orthogonal(head.get_parameter("weight"), self.config.orthogonality)


# TF-IDF and PCA as a table of word vectors, so that the model's checkpoint holds them.

_CHUNK = 256
MAX_TERMS = 8192
"""Tokens that get a vector, the most frequent ones: the matrix of their products has this side."""


@torch.no_grad()
def fit_tfidf(
    encoder: TextEncoder, tokenizer: Tokenizer, read_texts: Callable[[], Iterable[str]]
) -> float:
    """Fit the table of a `static` encoder with mean pooling; return the share of variance that it
    keeps.

    The encoder's vector of a text is then the PCA of its TF-IDF: term frequency is a token's share
    of the text, the weight is ln((1 + N) / (1 + texts with the token)), which is 0 for [CLS] and
    [SEP], and components are centred.

    Args:
        encoder: gets as many components as its dimension.
        tokenizer: terms are its tokens.
        read_texts: returns the training texts; called twice, so that texts are never in memory
            together.

    Raises ConfigError for another encoder, fewer than two texts, or fewer terms than dimensions.
    """
    if encoder.name != "static" or encoder.pool != "mean":
        message = (
            f"TF-IDF needs text_encoder 'static' with mean pooling, got {encoder.name}, "
            f"{encoder.pool}"
        )
        raise ConfigError(message, "unsupported", field="text_encoder")
    count = 0
    found_V = torch.zeros(encoder.vocab_size, dtype=torch.float64)
    for texts in _chunks(read_texts()):
        found_V += (_shares(tokenizer, texts, encoder.vocab_size) > 0).sum(dim=0)
        count += len(texts)
    term_K = found_V.argsort(descending=True, stable=True)[
        : min(MAX_TERMS, int((found_V > 0).sum()))
    ]
    if count < 2 or len(term_K) < encoder.token_dim:
        message = (
            f"expected 2 texts and {encoder.token_dim} terms or more, got {count} and {len(term_K)}"
        )
        raise ConfigError(message, "empty", field="text_arguments")
    idf_K = ((1 + count) / (1 + found_V[term_K])).log()
    product_KK = idf_K.new_zeros(len(term_K), len(term_K))
    mean_K = torch.zeros_like(idf_K)
    for texts in _chunks(read_texts()):
        tfidf_BK = _shares(tokenizer, texts, encoder.vocab_size)[:, term_K] * idf_K
        product_KK += tfidf_BK.T @ tfidf_BK
        mean_K += tfidf_BK.sum(dim=0)
    mean_K /= count
    variance_K, axes_KK = torch.linalg.eigh(product_KK / count - torch.outer(mean_K, mean_K))
    axes_KD = axes_KK[:, -encoder.token_dim :].flip(1)
    table_VD = torch.zeros(encoder.vocab_size, encoder.token_dim, dtype=torch.float64)
    table_VD[term_K] = idf_K[:, None] * axes_KD
    encoder.backbone.get_parameter("weight").copy_(table_VD - mean_K @ axes_KD)
    return float(variance_K[-encoder.token_dim :].sum() / variance_K.sum())


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while chunk := list(itertools.islice(iterator, _CHUNK)):
        yield chunk


def _shares(tokenizer: Tokenizer, texts: list[str], vocab_size: int) -> Tensor:
    """Return (B, V) float64: the share of each token in each text."""
    ids_BT, mask_BT = tokenizer(texts)
    shares_BV = torch.zeros(len(ids_BT), vocab_size, dtype=torch.float64)
    return shares_BV.scatter_add(1, ids_BT, mask_BT.double() / mask_BT.sum(dim=1, keepdim=True))
