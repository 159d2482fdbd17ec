"""Interface of the pretraining objectives of fusion-encoders.

An objective has three verbs: `corrupt` samples the masks or wrong pairs of a step, `predict` scores it from the states
that the model computed once for all objectives, `loss` compares predictions and truth. A model lists its objectives:

    self.mlm = MaskedLanguageModeling(config.mlm_weight, self.mask_words, self.score_words)
    self.itm = ImageTextMatching(config.itm_weight, self.sample_pairs, self.itm_head)
    self.objectives = (self.mlm, self.itm)

Objectives hold no parameters; heads belong to the model. Pass bound methods and modules, not lambdas, so that a deep
copy of the model uses its own heads.

In this folder: N masked positions, M pairs, K complete samples, G those of all ranks, P patches, C values of a patch;
other letters as in `medvl.schema`.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from medvl.losses.pairs.itc import Keys
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
    """The sampled pairs, fused, for objectives that read their words and patches; None in systems that match masked
    texts."""
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
    """One term of a pretraining loss. Generic over the shared states, the corruption and the predictions.

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
        """Return the scalar loss, averaged over the samples that have the inputs of the objective."""


@dataclasses.dataclass(frozen=True, slots=True)
class Corruption:
    """Corruption of one batch by all objectives."""

    parts: Mapping[str, Any]
    """Objective name -> result of its `corrupt`."""

    def of(self, objective: Objective[Any, C, Any]) -> C:
        """Return the part of one objective."""
        part: C = self.parts[objective.name]
        return part
