"""Masked words (MLM), also with soft targets of a teacher."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from medvl import losses
from medvl.models.fusion_encoders.objectives.base import ContrastiveEncoded, E, Encoded, Objective, P
from medvl.models.masked_words import MaskedWords
from medvl.schema import Batch


class WordObjective(Objective[E, MaskedWords, P]):
    """Masked words.

    Args:
        weight: factor of the term.
        mask_words: samples the masked words of a batch.
        score_words: maps states (N, D) to scores of the vocabulary (N, V).
    """

    name = "mlm"

    def __init__(
        self, weight: float, mask_words: Callable[[Batch], MaskedWords], score_words: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(weight)
        self.mask_words, self.score_words = mask_words, score_words

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
        return DistilledWords(self.score_words(encoded.word_states_ND), encoded.teacher_words_NV, encoded.alpha)

    def loss(self, predictions: DistilledWords, corruption: MaskedWords) -> Tensor:
        """Cross-entropy with the original ids and the teacher's distribution."""
        words_NV, teacher_NV, alpha = predictions
        return losses.mlm_distilled(words_NV, corruption.target_N, teacher_NV, alpha)
