"""Contrastive alignment of images and texts before fusion (ITC)."""

from collections.abc import Callable

from torch import Tensor

from medvl.models.fusion_encoders.objectives.base import ContrastiveEncoded, Objective
from medvl.schema import Batch


class ImageTextContrast(Objective[ContrastiveEncoded, None, ContrastiveEncoded]):
    """Contrastive alignment of images and texts before fusion (ITC).

    Args:
        weight: factor of the term.
        head: the loss over embeddings of model and teacher, with what it keeps between steps.
    """

    name = "itc"

    def __init__(self, weight: float, head: Callable[[ContrastiveEncoded], Tensor]) -> None:
        super().__init__(weight)
        self.head = head

    def corrupt(self, batch: Batch) -> None:
        """Sample nothing."""

    def predict(self, encoded: ContrastiveEncoded, corruption: None) -> ContrastiveEncoded:
        """Return the embeddings, which are shared already."""
        return encoded

    def loss(self, predictions: ContrastiveEncoded, corruption: None) -> Tensor:
        """Contrast the complete samples with those of all ranks."""
        return self.head(predictions)
