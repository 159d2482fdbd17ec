"""UMRL: frozen features of images and texts, mapped linearly to one space (Hsu et al., arXiv 1811.08615, ML4H 2018)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.checks import check_choice, check_weights, check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.losses import modality_confusion
from medvl.losses.gather import mean_over_ranks
from medvl.losses.pairs.positives import in_share
from medvl.losses.precision import full_precision
from medvl.models.base import EncoderArguments
from medvl.models.dual_encoders.bases.bert import BertDualConfig
from medvl.models.dual_encoders.bases.pairs import Pairs
from medvl.models.dual_encoders.bases.sentences import SentenceMeanEncoder
from medvl.models.dual_encoders.parts.heads import move_to_orthogonal
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Inputs, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class UMRLConfig(BertDualConfig):
    """Settings of the paper where it gives them: DenseNet-121 after average pooling, one linear map per modality.

    Recalled and not confirmed: the distance, the discriminator and the orthogonality. Chosen here: all numbers.

    Texts: `text_encoder` "static" is a table of word vectors, averaged: those of a GloVe file (`text_weights`), or
    TF-IDF with PCA (`medvl.models.fit_tfidf`, which the recipe calls). Any other encoder gives vectors of `text_unit`.
    """

    image_encoder: str = "densenet121"
    text_encoder: str = "static"
    text_arguments: EncoderArguments = dataclasses.field(default_factory=lambda: {"dimension": 300})
    text_unit: Literal["paragraph", "sentence"] = "paragraph"
    """Vector of a text: from the whole text, or the mean over its sentences, each the mean of its tokens."""
    projection_dim: int = 128
    distance: Literal["cosine", "squared"] = "cosine"
    """Distance of a pair's two vectors: 1 - cosine, or the squared Euclidean distance."""
    alignment_weight: float = 1.0
    """Weight of the distance of pairs (EA); 0 leaves it out."""
    adversarial_weight: float = 1.0
    """Weight of the discriminator of images and texts (Adv); 0 leaves it out."""
    paired_share: float = 1.0
    """Share of the studies whose pairs are known, always the same ones; the others are in Adv only."""
    hidden_dim: int = 512
    """Hidden width of the discriminator."""
    orthogonality: float = 0.01
    """Beta of the update W <- (1 + beta) W - beta W W^T W of both maps after a step (Lample et al., arXiv 1710.04087);
    0 leaves it out. Without it, the distance of pairs alone is minimal if all vectors have one direction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.distance, ("cosine", "squared"), "distance")
        check_choice(self.text_unit, ("paragraph", "sentence"), "text_unit")
        check_within(self, "[0, 1]", "paired_share", "orthogonality")
        check_within(self, "[1, inf)", "hidden_dim")
        check_weights(self, "adversarial_weight", "alignment_weight")


@register_system("umrl")
class UMRL(SentenceMeanEncoder):
    """EA, Adv and EA+Adv. Both encoders are frozen and in eval mode; they are run anew in every step, but for images
    whose features are stored."""

    Config = UMRLConfig
    reads_features = True

    def __init__(self, config: UMRLConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.inputs = Inputs(sentences=config.text_unit == "sentence")
        for encoder in (self.image_encoder, self.text_encoder):
            encoder.freeze()
        layers = nn.Linear(config.projection_dim, config.hidden_dim), nn.LeakyReLU(0.2), nn.Linear(config.hidden_dim, 1)
        self.discriminator = nn.Sequential(*layers) if config.adversarial_weight else None

    @classmethod
    def encoder_arguments(cls, config: UMRLConfig) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """See the base class."""
        static = {"pretrained": False, "vocab_size": config.vocab_size or 30_522}  # without a tokenizer, BERT's
        return {}, {"pool": "mean", **(static if config.text_encoder == "static" else {})}

    @classmethod
    def make_heads(cls, config: UMRLConfig, image: ImageEncoder, text: TextEncoder) -> dict[str, nn.Module]:
        """Return the linear maps, orthogonal at first."""
        heads = [nn.Linear(width, config.projection_dim, bias=False) for width in (image.feature_dim, text.feature_dim)]
        for head in heads:
            nn.init.orthogonal_(head.weight)
        return {"image_head": heads[0], "text_head": heads[1]}

    def embed_pairs(self, batch: Batch) -> Pairs:
        """Return mapped vectors, not normalised, and which pairs are known."""
        image_BE, text_BE = self.image_head(self.image_features(batch).pooled_BD).float(), self.map_texts(batch)
        known_B1 = in_share(batch.studies or batch.keys, self.config.paired_share)[:, None].to(image_BE)
        return Pairs(images=Embeddings(image_BE), texts=Embeddings(text_BE), others={"known": Embeddings(known_B1)})

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """See the base class."""
        config, image_BE, text_BE = self.config, pairs.images.global_NE, pairs.texts.global_NE
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
