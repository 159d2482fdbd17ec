"""MAVL: queries of the visual aspects of each entity (Phan et al., CVPR 2024, arXiv 2403.07636)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_choice, check_within
from medvl.data.reports.statements import ASPECTS, describe_aspects
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.losses.common import gather
from medvl.losses.pairs.contrastive import multi_hot, multi_positive
from medvl.models.dual_encoders.bases.queries import QueryBook, QueryEncoder
from medvl.models.dual_encoders.medklip import (
    MedKLIPConfig,
    attended_boxes,
    place_heads,
    place_terms,
    query_inputs,
)
from medvl.models.dual_encoders.parts.layers import PositionedPool
from medvl.models.registry import register_system
from medvl.schema import Batch, Embeddings


@dataclasses.dataclass(frozen=True, kw_only=True)
class MAVLConfig(MedKLIPConfig):
    """Settings of the paper and the released code, with entities and places as in `MedKLIPConfig`.

    Published are 75 entities, whose aspects are a language model's; `describe_aspects` has those of
    the label columns.
    """

    aspects: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Name of an entity -> its seven sentences, in the order of
    `medvl.data.reports.statements.ASPECTS`; of others, those of `describe_aspects`. The definition
    is taken from `descriptions`.
    """
    pool_heads: int = 8
    """Heads of the attention that makes the image's vector of its grid."""
    temperature: float = 0.07
    """Initial temperature of each aspect's contrast; the logarithms of the inverse temperatures
    are learned.
    """
    contrast_targets: Literal["equal_shares", "multi_hot"] = "equal_shares"
    """Targets of the contrast: shares that sum to 1, or "multi_hot", 1 for every present entity,
    as released.
    """
    contrast_weight: float = 0.1
    """The published weight, which is for "multi_hot", whose mean is over images and entities. Equal
    shares make the contrast 75 / (2 * P) times as strong, 37 times with one of 75 entities present
    (P) and 4 times with ten.
    """
    unmentioned: Literal["absent", "ignored"] = "absent"
    """Entities that the report does not mention, in the contrast: negatives, as published, or left
    out as in the cross-entropy of presence.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.contrast_targets, ("equal_shares", "multi_hot"), "contrast_targets")
        check_choice(self.unmentioned, ("absent", "ignored"), "unmentioned")
        check_within(self, "(0, inf)", "temperature")
        check_within(self, "[0, inf)", "contrast_weight")
        check_within(self, "[1, inf)", "pool_heads")
        for name, sentences in self.aspects.items():
            if len(sentences) != len(ASPECTS):
                message = (
                    f"expected {len(ASPECTS)} sentences of {name}, for "
                    f"{', '.join(ASPECTS)}, got {len(sentences)}"
                )
                raise ConfigError(message, "mismatch", field="aspects")


@register_system("mavl")
class MAVL(QueryEncoder):
    """MedKLIP's losses on eight queries per entity, and a contrast of images with each aspect of
    their entities.

    The contrast's targets are the present entities of an image and the images of an entity. The
    convolution over an entity's aspects is the same function as the linear layer here. The dropout
    behind the decoder drops single numbers here, and whole states in the released code. A heat map
    is the mean over all aspects, half of them as released. With `box_weight`, it is trained on
    boxes as in MedKLIP.
    """

    Config = MAVLConfig
    # version 1: another width of the grid's projection; 2: another sentence of a place
    weights_version = 3

    def __init__(
        self,
        config: MAVLConfig,
        *args: Any,
        places: QueryBook,
        place: nn.Module,
        pool: nn.Module,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.places = places
        self.place = place.requires_grad_(config.place_weight > 0)
        self.inputs = query_inputs(config)
        self.pool = pool
        self.logit_scale = nn.Parameter(torch.full((self.aspects,), -math.log(config.temperature)))

    @classmethod
    def sentences_of(cls, config: Any) -> list[tuple[str, ...]]:
        """Return the definition and the aspects."""
        sentences = {name: describe_aspects(name) for name in config.entities}
        firsts = {name: config.descriptions.get(name, sentences[name][0]) for name in sentences}
        return [
            (firsts[name], *config.aspects.get(name, sentences[name][1:])) for name in sentences
        ]

    @classmethod
    def make_heads(
        cls, config: Any, image_encoder: ImageEncoder, text_encoder: TextEncoder
    ) -> dict[str, Any]:
        heads = super().make_heads(config, image_encoder, text_encoder)
        aspects = len(cls.sentences_of(config)[0])
        heads |= place_heads(config, text_encoder.feature_dim, aspects)
        config.init_modules(heads["text_head"])
        width = config.projection_dim
        dim = image_encoder.patch_dim
        cells = math.prod(image_encoder.grid(config.image_size, config.image_size))
        pool = PositionedPool(dim, cells, config.pool_heads, width)
        config.init_modules(pool)
        layers = nn.Linear(dim, dim), nn.PReLU(), nn.Linear(dim, width)
        return {**heads, "image_head": nn.Sequential(*layers), "pool": pool}

    def unnormalized_image(self, image_BCHW: Tensor) -> Tensor:
        """Return the encoder's grid pooled by attention, without the projection."""
        pooled_BD: Tensor = self.pool(self.image_encoder(image_BCHW).patches_BPD)
        return pooled_BD.float()

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        patches_BPD = self.image_encoder(image_BCHW).patches_BPD
        return Embeddings(
            F.normalize(self.pool(patches_BPD).float(), dim=-1), self.image_head(patches_BPD)
        )

    def more_terms(
        self, batch: Batch, images: Embeddings, states_BQD: Tensor, labels_BL: Tensor
    ) -> Mapping[str, tuple[Tensor, float]]:
        image_NE = gather(images.global_NE)
        labels_NL = gather(labels_BL)
        query_LAE = F.normalize(self.text_head(self.queries()).float(), dim=-1).unflatten(
            0, (-1, self.aspects)
        )
        logits_ANL = (
            torch.einsum("ne,lae->anl", image_NE, query_LAE) * self.logit_scale.exp()[:, None, None]
        )
        silent_NL = ~((labels_NL == 0) | (labels_NL == 1))
        # except for rows without an image or without any label
        if self.config.unmentioned == "absent":
            silent_NL = labels_NL.isnan().all(dim=1, keepdim=True).expand_as(labels_NL)
        loss = multi_hot if self.config.contrast_targets == "multi_hot" else multi_positive
        contrast = loss(logits_ANL, labels_NL == 1, silent_NL)
        terms = place_terms(self, batch, states_BQD, labels_BL)
        terms |= attended_boxes(self, batch, images)
        return {**terms, "contrast": (contrast, self.config.contrast_weight)}
