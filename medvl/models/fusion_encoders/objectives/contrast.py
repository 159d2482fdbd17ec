"""Contrastive alignment before fusion: images with texts (ITC), and each modality with itself."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from medvl.models.fusion_encoders.objectives.base import E, Objective
from medvl.schema import Batch


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
