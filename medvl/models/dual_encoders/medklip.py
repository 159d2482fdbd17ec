"""MedKLIP: queries of described entities, and their places (Wu et al., ICCV 2023, arXiv
2301.02228).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_within
from medvl.data.reports.statements import PLACES
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.losses.common import full_precision, mean_over_ranks
from medvl.losses.local.within_sample import place_divergence
from medvl.models.base import EncoderArguments
from medvl.models.dual_encoders.bases.local import local_features
from medvl.models.dual_encoders.bases.pairs import BoxConfig, mean_box_loss, phrases_of_batch, take
from medvl.models.dual_encoders.bases.queries import QueryBook, QueryConfig, QueryEncoder
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings, Inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedKLIPConfig(QueryConfig, BoxConfig):
    """Settings of the paper and the released code, with the entities and places that the library's
    labeler reads.

    Published are 75 entities and 51 places from RadGraph. Here the entities are the label columns,
    and the places those of `medvl.data.reports.statements.PLACES`.
    """

    image_arguments: EncoderArguments = dataclasses.field(
        default_factory=lambda: {"layers": (3, 4, 6, 0)}
    )
    """The first three stages of a ResNet-50, which the paper trains from scratch; 14 x 14 cells."""
    projection_dim: int = 256
    negative_places: int | None = 7
    """Places drawn at random that a present entity's place is compared with; None: all others. Only
    entities whose place the report names count. As published, "unspecified" is a place as well, so
    that a report without the place counts as an error.
    """
    place_weight: float = 1.0
    """0 leaves places out, and their layer untrained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, f"[1, {len(PLACES) - 1}]", "negative_places")
        check_within(self, "[0, inf)", "place_weight", "box_weight")


@register_system("medklip")
class MedKLIP(QueryEncoder):
    """Cross-entropy of each mentioned entity's presence, and of the place of each present one
    (section 3).

    With `box_weight`, the decoder's attention of a phrase, which names an entity or is a query
    beside the book, is trained on the boxes of the phrase.
    """

    Config = MedKLIPConfig
    weights_version = 2  # the sentence of the place "both sides" was another one

    def __init__(
        self, config: MedKLIPConfig, *args: Any, places: QueryBook, place: nn.Module, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.places = places
        self.place = place.requires_grad_(config.place_weight > 0)
        self.inputs = query_inputs(config)

    @classmethod
    def make_heads(
        cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        heads = super().make_heads(config, image_encoder, text_encoder)
        heads |= place_heads(config, text_encoder.feature_dim, aspects=1)
        config.init_modules(*(heads[name] for name in ("text_head", "image_head", "place")))
        return heads

    def more_terms(
        self, batch: Batch, images: Embeddings, states_BQD: Tensor, labels_BL: Tensor
    ) -> Mapping[str, tuple[Tensor, float]]:
        boxes = attended_boxes(self, batch, images)
        return {**place_terms(self, batch, states_BQD, labels_BL), **boxes}


# Places of entities, for MedKLIP and MAVL.


def place_heads(config: MedKLIPConfig, text_dim: int, aspects: int) -> dict[str, nn.Module]:
    """Return `places`, the vectors of the places' sentences, and `place`, which maps the states of
    an entity's queries to the text encoder's space.
    """
    sentences = [
        f"It is located {'on' if name == 'both sides' else 'at the'} {name}." for name in PLACES
    ]
    return {
        "places": QueryBook(sentences, text_dim),
        "place": nn.Linear(config.projection_dim * aspects, text_dim),
    }


def query_inputs(config: MedKLIPConfig) -> Inputs:
    """Return the parts of a batch that MedKLIP and MAVL read."""
    return Inputs(
        labels=True, positions=config.place_weight > 0, boxed_phrases=config.box_weight > 0
    )


def attended_boxes(
    model: QueryEncoder, batch: Batch, images: Embeddings
) -> dict[str, tuple[Tensor, float]]:
    """Return the divergence of the attention of each phrase from its boxes, and its weight; nothing
    at weight 0. Raises ConfigError for a batch without phrases.
    """
    weight = model.config.box_weight
    if not weight:
        return {}
    texts, row_N, cells_NP = phrases_of_batch(model, batch)
    if not texts:
        return mean_box_loss(cells_NP[:, 0], weight)
    grid_NPD, _ = local_features(take(images, row_N))
    attention_NP = model.attend_texts(grid_NPD, texts)
    return mean_box_loss(place_divergence(attention_NP, cells_NP), weight)


def place_terms(
    model: Any, batch: Batch, states_BQD: Tensor, labels_BL: Tensor
) -> dict[str, tuple[Tensor, float]]:
    """Return the loss of the place of each present entity against others, by products with their
    vectors, and its weight; nothing at weight 0.

    Raises ConfigError for a batch without places.
    """
    config = model.config
    if not config.place_weight:
        return {}
    if batch.position_BL is None:
        message = "expected Batch.position_BL: open the loader with inputs=model.inputs"
        raise ConfigError(message, "missing", field="position_BL")
    model.places.fill(model.sentence_vectors)
    counted_BL = (labels_BL == 1) & (batch.position_BL >= 0)
    target_N = batch.position_BL.clamp(min=0).flatten()
    with full_precision(states_BQD):
        places_PD = model.places.vectors_QD.float()
        logits_NP = (model.place(states_BQD.float()) @ places_PD.T).flatten(0, 1)
    logits_NP = _with_negatives(logits_NP, target_N, config.negative_places)
    entropy_N = F.cross_entropy(logits_NP, target_N, reduction="none")
    return {"place": (mean_over_ranks(entropy_N, counted_BL.flatten()), config.place_weight)}


def _with_negatives(logits_NP: Tensor, target_N: Tensor, count: int | None) -> Tensor:
    """Return the logits of the true place and of `count` that are drawn; others are lowest."""
    if count is None:
        return logits_NP
    draw_NP = torch.rand_like(logits_NP).scatter(1, target_N[:, None], 2.0)
    candidate_NP = torch.zeros_like(logits_NP, dtype=torch.bool).scatter(
        1, draw_NP.topk(count + 1).indices, value=True
    )
    return logits_NP.masked_fill(~candidate_NP, torch.finfo(torch.float32).min)
