"""Entities of a knowledge graph in images and texts (ARL)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from medvl import losses
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.objectives.base import Encoded, Objective
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.schema import Batch


class EntityScores(NamedTuple):
    """Scores of all entities for images and texts, and which of them are there: 1, 0, or NaN in rows that lack it."""

    image_BV: Tensor
    image_target_BV: Tensor
    text_BV: Tensor
    text_target_BV: Tensor


class EntityAlignment(Objective[Encoded, None, EntityScores]):
    """Classification of the entities that an image shows and that a text mentions (ARL, section 3.3).

    Each is one binary decision for each entity. The entities of an image are those that any text of its sample
    mentions, so a sample without a text counts for neither.

    Args:
        weight: factor of the term.
        score: function from image and text tokens before fusion to the scores (B, V) of all entities.
    """

    name = "align"

    def __init__(self, weight: float, score: Callable[[Tokens, Tokens], tuple[Tensor, Tensor]]) -> None:
        super().__init__(weight)
        self.score = score

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing."""

    def predict(self, encoded: Encoded, corruption: None) -> EntityScores:
        """Score all entities for each image and each text. Raises ConfigError for a batch without entities."""
        batch = encoded.batch
        if batch.entity_BN is None or batch.image_entity_BN is None:
            raise ConfigError("expected a batch with entities (Inputs.entities)", "missing", field="entity_BN")
        image_BV, text_BV = self.score(encoded.image, encoded.text)
        has_text_B = torch.ones_like(batch.mask_BT[:, 0]) if batch.has_text_B is None else batch.has_text_B
        has_both_B = has_text_B if batch.has_image_B is None else has_text_B & batch.has_image_B
        return EntityScores(
            image_BV,
            mentioned(batch.image_entity_BN, image_BV.shape[1], has_both_B),
            text_BV,
            mentioned(batch.entity_BN, text_BV.shape[1], has_text_B),
        )

    def loss(self, predictions: EntityScores, corruption: None) -> Tensor:
        """Mean binary cross-entropy of the images' entities plus that of the texts'."""
        image_BV, image_target_BV, text_BV, text_target_BV = predictions
        return losses.multilabel_bce(image_BV, image_target_BV) + losses.multilabel_bce(text_BV, text_target_BV)


def mentioned(entity_BN: Tensor, entities: int, counted_B: Tensor) -> Tensor:
    """(B, V): 1 for the entities of each row, 0 for others; NaN in rows that do not count."""
    place_BN = torch.where(entity_BN >= 0, entity_BN, entities)  # padding goes to one more column
    target_BV = torch.zeros(len(entity_BN), entities + 1, device=entity_BN.device).scatter(1, place_BN, 1.0)
    return target_BV[:, :entities].masked_fill(~counted_B[:, None], torch.nan)
