"""Alignment of words and patches (WPA) by optimal transport."""

from typing import NamedTuple

import torch
from torch import Tensor

from medvl import losses
from medvl.models.fusion_encoders.objectives.base import Encoded, Objective
from medvl.schema import Batch


class TransportedPairs(NamedTuple):
    """Distances (M,) of words and patches of sampled pairs, and whether the pairs match (M,)."""

    distance_M: Tensor
    matched_M: Tensor


class WordPatchAlignment(Objective[Encoded, None, TransportedPairs]):
    """Distance of the fused words and patches of matching pairs, minus the distance of the others (UNITER, ViLT).

    The pairs are shared with image-text matching; the model fuses them once for both objectives.

    Args:
        weight: factor of the term; 0.1 in both papers.
        text_ends: whether the first and last token of a text (CLS and SEP) take part, as in UNITER's released code.
        image_prefix: number of image tokens before the patches, which take no part: 1 for ViLT's class token.
    """

    name = "wpa"

    def __init__(self, weight: float, *, text_ends: bool, image_prefix: int = 0) -> None:
        super().__init__(weight)
        self.text_ends, self.image_prefix = text_ends, image_prefix

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing: the pairs belong to image-text matching."""

    def predict(self, encoded: Encoded, corruption: None) -> TransportedPairs:
        """Return the distances of the sampled pairs."""
        pairs, matched_M = encoded.pairs, encoded.matched_M
        assert pairs is not None, "the model fuses whole texts for matching"
        assert matched_M is not None
        real_MT, real_MP = pairs.text.real_BN(), pairs.image.real_BN()
        if not self.text_ends:
            place_T = torch.arange(real_MT.shape[1], device=real_MT.device)
            real_MT = (place_T > 0) & (place_T < real_MT.sum(dim=1, keepdim=True) - 1)
        real_MP = real_MP & (torch.arange(real_MP.shape[1], device=real_MP.device) >= self.image_prefix)
        distance_M, _ = losses.word_patch_alignment(pairs.text.states_BND, pairs.image.states_BND, ~real_MT, ~real_MP)
        return TransportedPairs(distance_M, matched_M)

    def loss(self, predictions: TransportedPairs, corruption: None) -> Tensor:
        """(sum over matching pairs - sum over the others) / number of pairs; 0 without a pair."""
        distance_M, matched_M = predictions
        return torch.where(matched_M, distance_M, -distance_M).sum() / max(len(distance_M), 1)
