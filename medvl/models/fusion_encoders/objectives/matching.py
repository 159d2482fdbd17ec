"""Image-text matching (ITM): random negatives, hard negatives, mirrored texts."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from medvl import losses
from medvl.errors import ConfigError
from medvl.losses.pairs.itm import MatchingPairs
from medvl.models.fusion_encoders.objectives.base import ContrastiveEncoded, Encoded, Objective
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.schema import Batch


class ImageTextMatching(Objective[Encoded, MatchingPairs, Tensor]):
    """Image-text matching with random negatives (ITM).

    Args:
        weight: factor of the term.
        sample_pairs: samples matching and wrong pairs of a batch.
        head: maps pooled vectors (M, D) to logits (M, 2).
    """

    name = "itm"

    def __init__(
        self,
        weight: float,
        sample_pairs: Callable[[Batch], MatchingPairs],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(weight)
        self.sample_pairs = sample_pairs
        self.head = head

    def corrupt(self, batch: Batch) -> MatchingPairs:
        """Sample matching and wrong pairs of the complete samples."""
        return self.sample_pairs(batch)

    def predict(self, encoded: Encoded, corruption: MatchingPairs) -> Tensor:
        """(M, 2): logits of "no match" and "match"."""
        return self.head(encoded.pooled_MD)

    def loss(self, predictions: Tensor, corruption: MatchingPairs) -> Tensor:
        """Mean cross-entropy of the pairs."""
        return losses.itm(predictions, corruption.matched_N)


class MatchedPairs(NamedTuple):
    """Logits (M, 2) of sampled pairs, and whether they match (M,)."""

    logits_M2: Tensor
    matched_M: Tensor


class HardNegativeMatching(Objective[ContrastiveEncoded, None, MatchedPairs]):
    """Image-text matching with negatives sampled by similarity (ALBEF, section 3.2).

    Negatives depend on the embeddings, so they are sampled in `predict`.

    Args:
        weight: factor of the term.
        sample_pairs: samples pairs from the batch, the embeddings of its complete rows and those
            rows.
        match: function from text and image tokens to logits (M, 2).
    """

    name = "itm"

    def __init__(
        self,
        weight: float,
        sample_pairs: Callable[[Batch, Tensor, Tensor, Tensor], MatchingPairs],
        match: Callable[[Tokens, Tokens], Tensor],
    ) -> None:
        super().__init__(weight)
        self.sample_pairs = sample_pairs
        self.match = match

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing before the batch is encoded."""

    def predict(self, encoded: ContrastiveEncoded, corruption: None) -> MatchedPairs:
        """Sample pairs, fuse them and score them."""
        pairs = self.sample_pairs(encoded.batch, encoded.image_KE, encoded.text_KE, encoded.row_K)
        logits_M2 = self.match(encoded.text.rows(pairs.text_N), encoded.image.rows(pairs.image_N))
        return MatchedPairs(logits_M2, pairs.matched_N)

    def loss(self, predictions: MatchedPairs, corruption: None) -> Tensor:
        """Mean cross-entropy of the pairs."""
        return losses.itm(predictions.logits_M2, predictions.matched_M)


class MirroredTexts(NamedTuple):
    """The texts of a batch with left and right exchanged."""

    ids_BT: Tensor
    mask_BT: Tensor
    counted_B: Tensor
    """bool: complete samples whose text names a side."""


class PairModel(Protocol):
    """A model that scores pairs of an image and a text."""

    def text_tokens(
        self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        """Encode texts before fusion."""

    def match(self, text: Tokens, image: Tokens) -> Tensor:
        """(B, 2): logits of "no match" and "match" of each row."""


class MirroredTextMatching(Objective[Encoded, MirroredTexts, Tensor]):
    """Matching of a text with its image against the same text with left and right exchanged.

    The text is a match and its mirror is none, so that both classes are equally frequent. Texts
    without a side, and samples without an image or a text, do not count. Both texts are encoded
    unmasked; the images are those of the other objectives.

    Args:
        weight: factor of the term.
        model: scores pairs.
    """

    name = "itm_mirror"

    def __init__(self, weight: float, model: PairModel) -> None:
        super().__init__(weight)
        self.model = model

    def corrupt(self, batch: Batch) -> MirroredTexts:
        """Return the loader's mirrored texts. Raises ConfigError for a batch without them."""
        ids_BT = batch.mirrored_ids_BT
        mask_BT = batch.mirrored_mask_BT
        counted_B = batch.has_mirror_B
        if ids_BT is None or mask_BT is None or counted_B is None:
            message = "mirror_weight needs batches with mirrored texts (Inputs.mirrored_text)"
            raise ConfigError(message, "missing", field="mirrored_ids_BT")
        for has_B in (batch.has_image_B, batch.has_text_B):
            counted_B = counted_B if has_B is None else counted_B & has_B
        return MirroredTexts(ids_BT, mask_BT, counted_B)

    def predict(self, encoded: Encoded, corruption: MirroredTexts) -> Tensor:
        """(2 B, 2): logits of the texts, then of their mirrors, each with its own image."""
        batch = encoded.batch
        ids_MT = torch.cat([batch.ids_BT, corruption.ids_BT])
        mask_MT = torch.cat([batch.mask_BT, corruption.mask_BT])
        twice_M = None if batch.has_text_B is None else batch.has_text_B.repeat(2)
        text = self.model.text_tokens(ids_MT, mask_MT, twice_M)
        return self.model.match(text, encoded.image.beside(encoded.image))

    def loss(self, predictions: Tensor, corruption: MirroredTexts) -> Tensor:
        """Mean cross-entropy of the pairs that count."""
        counted_B = corruption.counted_B
        matched_M = torch.arange(len(predictions), device=counted_B.device) < len(counted_B)
        return losses.itm(predictions, matched_M, counted_B.repeat(2))
