"""Interface of the pretraining objectives of fusion-encoders.

An objective has three verbs: `corrupt` samples the masks or wrong pairs of a step, `predict` scores
it from the states that the model computed once for all objectives, `loss` compares predictions and
truth. A model lists its objectives:

    self.mlm = MaskedLanguageModeling(config.mlm_weight, self.mask_words, self.score_words)
    self.itm = ImageTextMatching(config.itm_weight, self.sample_pairs, self.itm_head)
    self.objectives = (self.mlm, self.itm)

Objectives hold no parameters; heads belong to the model. Pass bound methods and modules, not
lambdas, so that a deep copy of the model uses its own heads.

In this folder: N masked positions, M pairs, K complete samples, G those of all ranks, P patches, C
values of a patch; other letters as in `medvl.schema`.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from medvl import losses
from medvl.losses.pairs.itc import Keys
from medvl.models.base import MaskedWords
from medvl.models.fusion_encoders.parts.encoder import Fused, Tokens
from medvl.schema import Batch


class MaskedRegions(NamedTuple):
    """The masked regions of a batch."""

    states_ND: Tensor
    """Fused states."""
    features_ND: Tensor
    """True features, without gradient."""
    classes_NK: Tensor | None
    """The detector's distributions over its classes; None without a detector."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The states that all objectives of a training step share."""

    batch: Batch
    image: Tokens
    """Images before fusion."""
    text: Tokens
    """Texts before fusion: unmasked, or masked in systems that encode only those."""
    word_states_ND: Tensor
    """Fused states of the masked texts at the masked positions."""
    pooled_MD: Tensor
    """Pooled vectors of the sampled pairs; of all rows in systems that sample none."""
    own: Fused | None = None
    """The masked texts fused with their own images; None in systems that match masked texts."""
    pairs: Fused | None = None
    """The sampled pairs, fused, for objectives that read their words and patches; None in systems
    that match masked texts.
    """
    matched_M: Tensor | None = None
    """bool: which of `pairs` match."""
    regions: MaskedRegions | None = None
    """The masked regions, in systems that mask some."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AlignedEncoded(Encoded):
    """The shared states of a system with contrastive embeddings."""

    image_KE: Tensor
    text_KE: Tensor
    """L2-normalised float32 embeddings of the complete samples, unmasked."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContrastiveEncoded(AlignedEncoded):
    """The shared states of a system with contrastive embeddings and a moving-average teacher."""

    row_K: Tensor
    """int64: the complete samples."""
    image_GE: Tensor
    text_GE: Tensor
    """Embeddings of the complete samples of all ranks."""
    keys: Keys
    """The teacher's embeddings of all ranks and of its queue, with which those are compared."""
    teacher_words_NV: Tensor
    """The teacher's scores of the vocabulary at the masked positions."""
    alpha: float
    """Weight of the teacher's targets at this step."""


E = TypeVar("E", bound=Encoded, contravariant=True)
C = TypeVar("C")
P = TypeVar("P")


class Objective(abc.ABC, Generic[E, C, P]):
    """One term of a pretraining loss. Generic over the shared states, the corruption and the
    predictions.

    Attributes:
        name: key of the term in `Losses.terms`.
        weight: factor of the term in the total loss.
    """

    name: ClassVar[str]

    def __init__(self, weight: float) -> None:
        self.weight = weight

    @abc.abstractmethod
    def corrupt(self, batch: Batch) -> C:
        """Sample the masks or wrong pairs of this step, from torch's CPU generator."""

    @abc.abstractmethod
    def predict(self, encoded: E, corruption: C) -> P:
        """Predict the corrupted parts."""

    @abc.abstractmethod
    def loss(self, predictions: P, corruption: C) -> Tensor:
        """Return the scalar loss, averaged over the samples that have the inputs of the
        objective.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Corruption:
    """Corruption of one batch by all objectives."""

    parts: Mapping[str, Any]
    """Objective name -> result of its `corrupt`."""

    def of(self, objective: Objective[Any, C, Any]) -> C:
        """Return the part of one objective."""
        part: C = self.parts[objective.name]
        return part


# Alignment of words and patches (WPA) by optimal transport.


class TransportedPairs(NamedTuple):
    """Distances (M,) of words and patches of sampled pairs, and whether the pairs match (M,)."""

    distance_M: Tensor
    matched_M: Tensor


WPA_WEIGHT = 0.1
"""Weight of word-patch alignment in UNITER and ViLT, as published."""


class WordPatchAlignment(Objective[Encoded, None, TransportedPairs]):
    """Distance of the fused words and patches of matching pairs, minus the distance of the others
    (UNITER, ViLT).

    The pairs are shared with image-text matching; the model fuses them once for both objectives.

    Args:
        weight: factor of the term; 0.1 in both papers.
        text_ends: whether the first and last token of a text (CLS and SEP) take part, as in
            UNITER's released code.
        image_prefix: number of image tokens before the patches, which take no part: 1 for ViLT's
            class token.
    """

    name = "wpa"

    def __init__(self, weight: float, *, text_ends: bool, image_prefix: int = 0) -> None:
        super().__init__(weight)
        self.text_ends = text_ends
        self.image_prefix = image_prefix

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing: the pairs belong to image-text matching."""

    def predict(self, encoded: Encoded, corruption: None) -> TransportedPairs:
        """Return the distances of the sampled pairs."""
        pairs = encoded.pairs
        matched_M = encoded.matched_M
        assert pairs is not None, "the model fuses whole texts for matching"
        assert matched_M is not None
        real_MT = pairs.text.real_BN()
        real_MP = pairs.image.real_BN()
        if not self.text_ends:
            place_T = torch.arange(real_MT.shape[1], device=real_MT.device)
            real_MT = (place_T > 0) & (place_T < real_MT.sum(dim=1, keepdim=True) - 1)
        real_MP = real_MP & (
            torch.arange(real_MP.shape[1], device=real_MP.device) >= self.image_prefix
        )
        distance_M, _ = losses.word_patch_alignment(
            pairs.text.states_BND, pairs.image.states_BND, ~real_MT, ~real_MP
        )
        return TransportedPairs(distance_M, matched_M)

    def loss(self, predictions: TransportedPairs, corruption: None) -> Tensor:
        """(sum over matching pairs - sum over the others) / number of pairs; 0 without a pair."""
        distance_M, matched_M = predictions
        return torch.where(matched_M, distance_M, -distance_M).sum() / max(len(distance_M), 1)


# Contrastive alignment before fusion: images with texts (ITC), and each modality with itself.


class ImageTextContrast(Objective[E, None, Any]):
    """Contrastive alignment of images and texts (ITC).

    Args:
        weight: factor of the term.
        head: the loss of the shared states, which contain the embeddings.
    """

    name = "itc"

    def __init__(self, weight: float, head: Callable[[E], Tensor]) -> None:
        super().__init__(weight)
        self.head = head

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing."""

    def predict(self, encoded: E, corruption: None) -> Any:
        """Return the embeddings, which are shared already."""
        return encoded

    def loss(self, predictions: Any, corruption: None) -> Tensor:
        """Contrast the complete samples with those of all ranks."""
        return self.head(predictions)


class UnimodalContrast(ImageTextContrast[E]):
    """Contrast of images with images and of texts with texts, as encoded by the teacher (MUMC)."""

    name = "unimodal"


# Masked words (MLM), also with soft targets of a teacher.


class WordObjective(Objective[E, MaskedWords, P]):
    """Masked words.

    Args:
        weight: factor of the term.
        mask_words: samples the masked words of a batch.
        score_words: maps states (N, D) to scores of the vocabulary (N, V).
    """

    name = "mlm"

    def __init__(
        self,
        weight: float,
        mask_words: Callable[[Batch], MaskedWords],
        score_words: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(weight)
        self.mask_words = mask_words
        self.score_words = score_words

    def corrupt(self, batch: Batch) -> MaskedWords:
        """Mask words of every text."""
        return self.mask_words(batch)


class MaskedLanguageModeling(WordObjective[Encoded, Tensor]):
    """Masked words from the text and its image (MLM)."""

    def predict(self, encoded: Encoded, corruption: MaskedWords) -> Tensor:
        """(N, V): scores of the vocabulary at the masked positions."""
        return self.score_words(encoded.word_states_ND)

    def loss(self, predictions: Tensor, corruption: MaskedWords) -> Tensor:
        """Cross-entropy with the original ids."""
        return losses.mlm(predictions, corruption.target_N)


class DistilledWords(NamedTuple):
    """Scores of the vocabulary at the masked positions by the model and by its teacher."""

    words_NV: Tensor
    teacher_NV: Tensor
    alpha: float


class DistilledLanguageModeling(WordObjective[ContrastiveEncoded, DistilledWords]):
    """Masked words with soft targets of a moving-average teacher (ALBEF, equation 7)."""

    def predict(self, encoded: ContrastiveEncoded, corruption: MaskedWords) -> DistilledWords:
        """Score the vocabulary at the masked positions."""
        return DistilledWords(
            self.score_words(encoded.word_states_ND), encoded.teacher_words_NV, encoded.alpha
        )

    def loss(self, predictions: DistilledWords, corruption: MaskedWords) -> Tensor:
        """Cross-entropy with the original ids and the teacher's distribution."""
        words_NV, teacher_NV, alpha = predictions
        return losses.mlm_distilled(words_NV, corruption.target_N, teacher_NV, alpha)
