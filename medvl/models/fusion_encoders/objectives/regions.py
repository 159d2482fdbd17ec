"""Masked regions: their features, and the detector's distribution over its classes.

N masked regions, D width, K classes.
"""

from collections.abc import Callable

from torch import Tensor

from medvl import losses
from medvl.errors import ConfigError
from medvl.models.fusion_encoders.objectives.base import Encoded, MaskedRegions, Objective
from medvl.models.fusion_encoders.parts.regions import RegionMask
from medvl.schema import Batch

RegionPredictions = tuple[Tensor, MaskedRegions]
"""Predictions of the head for the masked regions, and the truth."""


class RegionObjective(Objective[Encoded, RegionMask, RegionPredictions]):
    """Prediction of masked regions from their fused states.

    The regions that one pass masks serve all such objectives of a step; the first of them samples.

    Args:
        weight: factor of the term.
        sample_mask: samples the masked regions of a batch.
        head: maps states (N, D) to predictions.
    """

    def __init__(
        self, weight: float, sample_mask: Callable[[Batch], RegionMask], head: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(weight)
        self.sample_mask, self.head = sample_mask, head

    def corrupt(self, batch: Batch) -> RegionMask:
        """Sample masked regions of every image."""
        return self.sample_mask(batch)

    def predict(self, encoded: Encoded, corruption: RegionMask) -> RegionPredictions:
        """Predict the masked regions."""
        assert encoded.regions is not None, "the model fuses masked regions"
        return self.head(encoded.regions.states_ND), encoded.regions


class MaskedRegionRegression(RegionObjective):
    """Squared error of the masked regions' features (UNITER's MRFR)."""

    name = "mrfr"

    def loss(self, predictions: RegionPredictions, corruption: RegionMask) -> Tensor:
        """Mean over masked regions and their features."""
        return losses.region_regression(predictions[0], predictions[1].features_ND)


class MaskedRegionFeatures(RegionObjective):
    """Smooth L1 error of the masked regions' features (LXMERT)."""

    name = "region_features"

    def loss(self, predictions: RegionPredictions, corruption: RegionMask) -> Tensor:
        """Mean over masked regions and their features."""
        return losses.region_regression(predictions[0], predictions[1].features_ND, smooth=True)


class MaskedRegionClassification(RegionObjective):
    """Divergence from the detector's distribution over its classes (UNITER's MRC-kl)."""

    name = "mrc"

    def loss(self, predictions: RegionPredictions, corruption: RegionMask) -> Tensor:
        """Mean over masked regions."""
        return losses.region_kl(predictions[0], classes_of(predictions[1]))


class MaskedObjectLabels(RegionObjective):
    """The detector's best class of the masked regions, weighted by its confidence (LXMERT)."""

    name = "object_labels"

    def loss(self, predictions: RegionPredictions, corruption: RegionMask) -> Tensor:
        """Mean over masked regions."""
        return losses.region_labels(predictions[0], classes_of(predictions[1]))


def classes_of(regions: MaskedRegions) -> Tensor:
    """(N, K). Raises ConfigError for a batch without the detector's distributions."""
    if regions.classes_NK is None:
        message = "region_classes needs regions of a detector with its distributions (Inputs.region_classes)"
        raise ConfigError(message, "missing", field="region_classes_BPK")
    return regions.classes_NK
