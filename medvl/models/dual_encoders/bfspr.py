"""BFSPR: reports and their sentences against images (after Seibold et al., MICCAI 2022, arXiv
2205.07139).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from medvl import losses
from medvl.common.config_io import check_choice, check_within
from medvl.errors import ConfigError
from medvl.losses.common import full_precision, gather
from medvl.losses.local.gloria import gloria_contrast
from medvl.models.dual_encoders.bases.base import BertDualConfig, Positives
from medvl.models.dual_encoders.bases.local import SentenceDualEncoder, local_features
from medvl.models.dual_encoders.bases.pairs import Pairs, gather_side
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Inputs, Losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class BFSPRConfig(BertDualConfig):
    """Settings of a design variant, not of the published system, whose code was not released.

    From the paper: a global-local dual encoder, trained on reports. Recalled and not confirmed: the
    three terms. Chosen
    here: encoders, linear heads, temperature and weights.
    """

    temperature: float = 0.07
    sentence_pool: Literal["max", "mean"] = "max"
    """Pooling of the cosines of a report's sentences with an image."""
    sentence_weight: float = 1.0
    """Weight of the contrast of images with sentences; that with reports has weight 1."""
    image_weight: float = 1.0
    """Weight of the contrast of two views of an image; 0 leaves it out, and the second view is
    not made.
    """
    positives: Positives = "own"
    """Positives of whole reports."""
    former = (("report_weight", 1.0),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.sentence_pool, ("max", "mean"), "sentence_pool")
        check_within(self, "(0, inf)", "temperature")
        check_within(self, "[0, inf)", "sentence_weight", "image_weight")


@register_system("bfspr")
class BFSPR(SentenceDualEncoder):
    """InfoNCE of images with reports, with bags of sentences, and of two views of an image.

    A report's sentences are compared with every image of the batch by their cosine; the pooled
    cosines are its score. A sentence is the mean of its tokens in the report.
    """

    Config = BFSPRConfig

    def __init__(self, config: BFSPRConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.inputs = Inputs(sentences=True, second_image=config.image_weight > 0)

    @classmethod
    def encoder_arguments(cls, config: BFSPRConfig) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return {}, {"pool": "mean"}

    def embed_pairs(self, batch: Batch) -> Pairs:
        """Raises ConfigError for batches without the second view that the
        loss needs.
        """
        pairs = super().embed_pairs(batch)
        if not self.config.image_weight:
            return pairs
        if batch.second_image_BCHW is None:
            message = (
                "batches need a second view (Inputs.second_image): open the loader with "
                "model.inputs"
            )
            raise ConfigError(message, "missing", field="image_weight")
        return dataclasses.replace(
            pairs, others={"second": self.embed_images(batch.second_image_BCHW)}
        )

    def compare_pairs(self, pairs: Pairs) -> Losses:
        """Compare a rank's own images with the sentences of all ranks."""
        texts = gather_side(pairs.texts)
        scale = 1 / self.config.temperature
        config = self.config
        groups = [gather(group_B) for group_B in pairs.groups]
        image_NE = gather(pairs.images.global_NE)
        similarity_NN = gather(self.sentence_similarity(pairs.images, texts))
        has_sentences_N = local_features(texts)[1].any(dim=1)
        sentence = torch.stack(gloria_contrast(similarity_NN, has_sentences_N, scale)).mean()
        terms = {
            "report": (
                losses.clip(image_NE, texts.global_NE, scale, groups=groups),
                1.0,
            ),
            "sentence": (sentence, config.sentence_weight),
        }
        if "second" in pairs.others:
            second_NE = gather(pairs.others["second"].global_NE)
            terms["image"] = losses.clip(image_NE, second_NE, scale), config.image_weight
        return Losses.weighted(**terms)

    def sentence_similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        """Return (N, M): the pooled cosines of a text's sentences with an image; 0 for a text
        without sentences.
        """
        sentences_MSE, mask_MS = local_features(texts)
        with full_precision(images.global_NE):
            cosine_NMS = torch.einsum("ne,mse->nms", images.global_NE, sentences_MSE)
        if self.config.sentence_pool == "mean":
            return cosine_NMS.masked_fill(~mask_MS, 0.0).sum(dim=2) / mask_MS.sum(dim=1).clamp(
                min=1
            )
        return (
            cosine_NMS.masked_fill(~mask_MS, -2.0).amax(dim=2).masked_fill(~mask_MS.any(dim=1), 0.0)
        )

    def similarity(self, images: Embeddings | Tensor, texts: Embeddings | Sequence[str]) -> Tensor:
        """Return (N, M): the mean of the cosine of the whole text and the pooled cosines of its
        sentences.
        """
        images, texts = self.embedded(images, texts)
        return (super().similarity(images, texts) + self.sentence_similarity(images, texts)) / 2
