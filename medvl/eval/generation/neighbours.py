"""Nearest neighbours in features or pixels: precision, recall, density and coverage, and the nearest training images.

Distances are computed in blocks, so that memory is bounded by the block and not by the training data.

Shape letters: N real images, M generated images, Q queries, K neighbours, D dim.
"""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval.core.metrics import Array

_BLOCK = 2048
_ELEMENTS = 1 << 22  # distances at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifolds:
    """Values whose means over images are precision and density, and recall and coverage."""

    precision_M: Array
    """1 where a generated image is within the manifold of the real images."""
    density_M: Array
    """Number of neighbourhoods of real images that a generated image is in, divided by k; above 1 where they are
    dense."""
    recall_N: Array
    """1 where a real image is within the manifold of the generated images."""
    coverage_N: Array
    """1 where a generated image is in the neighbourhood of a real image."""

    def means(self) -> dict[str, float]:
        """Return the four metrics."""
        return {field.name[:-2]: float(getattr(self, field.name).mean()) for field in dataclasses.fields(self)}


def manifolds(real_ND: Array, generated_MD: Array, *, k: int = 5) -> Manifolds:
    """Return precision and recall (Kynkaanniemi et al., arXiv 1904.06991), density and coverage (Naeem et al.,
    arXiv 2002.09797) for each image.

    The manifold of a set is the union of balls around its images, with the distance to the k-th nearest other image of
    the set as radius. Raises EvaluationError unless both sets have more than k images.
    """
    if k < 1 or min(len(real_ND), len(generated_MD)) <= k:
        message = f"expected more than k = {k} images of each set, got {len(real_ND)} and {len(generated_MD)}"
        raise EvaluationError(message, "out_of_range", field="k")
    real, generated = (torch.from_numpy(x).double() for x in (real_ND, generated_MD))
    real_radius_N, generated_radius_M = (_radius(x, k) for x in (real, generated))
    inside_M = torch.zeros(len(generated), dtype=torch.float64)
    recall_N, coverage_N = (torch.zeros(len(real), dtype=torch.float64) for _ in range(2))
    for start in range(0, len(real), _BLOCK):
        rows = slice(start, start + _BLOCK)
        distance_NM = torch.cdist(real[rows], generated)
        within_NM = distance_NM < real_radius_N[rows, None]
        inside_M += within_NM.sum(dim=0)
        coverage_N[rows] = within_NM.any(dim=1).double()
        recall_N[rows] = (distance_NM < generated_radius_M).any(dim=1).double()
    return Manifolds(
        precision_M=(inside_M > 0).double().numpy(),
        density_M=(inside_M / k).numpy(),
        recall_N=recall_N.numpy(),
        coverage_N=coverage_N.numpy(),
    )


def _radius(x_ND: Tensor, k: int) -> Tensor:
    """Return the distance of each row to its k-th nearest other row."""
    parts = [torch.cdist(part, x_ND).kthvalue(k + 1, dim=1).values for part in x_ND.split(_BLOCK)]
    return torch.cat(parts)  # the row itself is the nearest, at 0


class NearestImages:
    """The nearest neighbours of some queries among images that are added block by block.

    Args:
        query_QD: float32 queries.
        neighbours: neighbours kept of each query.
    """

    def __init__(self, query_QD: Tensor, neighbours: int) -> None:
        self._query_QD, self._seen = query_QD.float(), 0
        self._squared_Q = self._query_QD.double().square().sum(dim=1)
        self.neighbours = neighbours
        self._distance_QK = torch.empty(len(query_QD), 0, dtype=torch.float64)
        self._position_QK = torch.empty(len(query_QD), 0, dtype=torch.int64)

    def add(self, image_ND: Tensor) -> None:
        """Compare the queries with the next images; their positions continue those of the images before."""
        rows = max(1, min(_BLOCK, _ELEMENTS // max(len(self._query_QD), 1)))
        for part_ND in image_ND.float().split(rows):
            cross_QN = (self._query_QD @ part_ND.T).double()
            squared_QN = self._squared_Q[:, None] + part_ND.double().square().sum(dim=1) - 2 * cross_QN
            position_N = torch.arange(self._seen, self._seen + len(part_ND))
            distance_QK = torch.cat([self._distance_QK, squared_QN.clamp(min=0).sqrt()], dim=1)
            position_QK = torch.cat([self._position_QK, position_N.expand(len(cross_QN), -1)], dim=1)
            kept = min(self.neighbours, distance_QK.shape[1])
            self._distance_QK, order_QK = distance_QK.topk(kept, dim=1, largest=False)
            self._position_QK = position_QK.gather(1, order_QK)
            self._seen += len(part_ND)

    @property
    def distance_QK(self) -> Array:
        """Distances to the nearest images, ascending."""
        distance_QK: Array = self._distance_QK.numpy()
        return distance_QK

    @property
    def position_QK(self) -> NDArray[np.int64]:
        """Positions of the nearest images, in the order of their addition."""
        position_QK: NDArray[np.int64] = self._position_QK.numpy()
        return position_QK
