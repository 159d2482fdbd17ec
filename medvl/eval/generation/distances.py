"""Distances between two sets of features: Frechet distance and kernel distance, with intervals.

Both depend on the features and, the Frechet distance strongly, on the number of images: its bias
falls with 1 / N and is positive, so that it compares only with distances of equal counts.
`matched_draws` therefore compares generated with real images, and real with other real images, at
the same counts.

Shape letters: N, M images, D feature dim, B blocks.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.errors import EvaluationError
from medvl.eval.core.metrics import Array

BLOCKS = 20
"""Blocks of the jackknife."""
_ROWS = 2048
_Z = 1.959964  # 97.5 % quantile of the normal distribution


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSet:
    """Features of images, and the patient (or prompt) of each."""

    x_ND: Array
    groups: Sequence[Hashable]

    def __len__(self) -> int:
        return len(self.x_ND)

    def rows(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> "FeatureSet":
        """Return some of the images."""
        return FeatureSet(
            x_ND=self.x_ND[index], groups=[self.groups[i] for i in np.arange(len(self))[index]]
        )


def frechet_distance(x_ND: Array, y_MD: Array) -> float:
    """Return |mean x - mean y|^2 + tr(Cx + Cy - 2 (Cx Cy)^1/2), the squared Frechet distance of two
    Gaussians.

    The covariances have the denominator N - 1. With QR decompositions Rx, Ry of the centred
    features, the trace of the root is the sum of the singular values of Rx Ry^T: no root of a
    matrix is taken, also with fewer images than features. Heusel et al., arXiv 1706.08500, equation
    6 ("FID" with Inception's features).

    Features of any precision are computed in float64. Raises EvaluationError with fewer than two
    images, or other than equal feature dims.
    """
    x_ND, y_MD = _in_float64(x_ND, y_MD)
    parts: list[Array] = []
    for z_ND in (x_ND, y_MD):
        centred_ND: Array = (z_ND - z_ND.mean(axis=0)) / np.sqrt(len(z_ND) - 1)
        parts.append(np.asarray(np.linalg.qr(centred_ND, mode="r")))
    root = np.linalg.svd(parts[0] @ parts[1].T, compute_uv=False).sum()
    means = ((x_ND.mean(axis=0) - y_MD.mean(axis=0)) ** 2).sum()
    return float(max(means + (parts[0] ** 2).sum() + (parts[1] ** 2).sum() - 2 * root, 0.0))


def kernel_distance(x_ND: Array, y_MD: Array) -> float:
    """Return the unbiased estimate of the squared maximum mean discrepancy over all pairs; it may
    be below 0.

    The kernel is (x . y / D + 1)^3, as in Binkowski et al., arXiv 1801.01401, section 3.1 ("KID"
    with Inception's features); the estimator is that of Gretton et al., JMLR 2012, equation 3.
    Precision and errors as for `frechet_distance`.
    """
    x_ND, y_MD = _in_float64(x_ND, y_MD)
    within = 0.0
    for z_ND in (x_ND, y_MD):
        diagonal = ((z_ND * z_ND).sum(axis=1) / z_ND.shape[1] + 1) ** 3
        within += (_kernel_sum(z_ND, z_ND) - float(diagonal.sum())) / (len(z_ND) * (len(z_ND) - 1))
    return within - 2 * _kernel_sum(x_ND, y_MD) / (len(x_ND) * len(y_MD))


def kernel_distance_subsets(
    x_ND: Array, y_MD: Array, *, subsets: int = 100, size: int = 1000, seed: int = 0
) -> Array:
    """Return `kernel_distance` of random subsets of `size` images of both sets, as it is usually
    reported.

    A subset has at most half of the smaller set: subsets that are the whole set would all be the
    same.
    """
    size = subset_size(len(x_ND), len(y_MD), size)
    rng = np.random.default_rng(seed)
    return np.array([kernel_distance(*_subsets(rng, size, x_ND, y_MD)) for _ in range(subsets)])


def subset_size(n: int, m: int, size: int) -> int:
    """Return the size of the subsets of a kernel distance: `size`, or half of the smaller set.
    Raises EvaluationError below four images.
    """
    if min(n, m) < 4:
        message = f"expected four or more images of each set for a kernel distance, got {n} and {m}"
        raise EvaluationError(message, "empty", field="generated" if n < m else "data")
    return min(size, min(n, m) // 2)


def jackknife(
    statistic: Callable[[Array, Array], float],
    x: FeatureSet,
    y: FeatureSet,
    *,
    seed: int = 0,
    blocks: int = BLOCKS,
) -> Interval:
    """Return a distance of two sets with a 95 % interval by the delete-a-group jackknife.

    Patients are divided into blocks at random; those in both sets are left out of both at once.
    Unlike the bootstrap, nothing is drawn twice, which would move these distances. Efron and
    Tibshirani, 1993, section 11.5.
    """
    value = statistic(x.x_ND, y.x_ND)
    block_of = _blocks([*x.groups, *y.groups], blocks, seed)
    in_x, in_y = (np.array([block_of[group] for group in each.groups]) for each in (x, y))
    count = max(block_of.values()) + 1
    kept = [(in_x != block, in_y != block) for block in range(count)]
    kept = [(a, b) for a, b in kept if min(a.sum(), b.sum()) >= 4]
    if len(kept) < 2:
        return Interval(value, np.nan, np.nan)
    values_B = np.array([statistic(x.x_ND[a], y.x_ND[b]) for a, b in kept])
    error = np.sqrt((len(kept) - 1) / len(kept) * ((values_B - values_B.mean()) ** 2).sum())
    return Interval(value, value - _Z * error, value + _Z * error)


def matched_draws(
    sets: Mapping[str, FeatureSet], real: FeatureSet, *, draws: int = 20, seed: int = 0
) -> tuple[int, Iterator[dict[str, tuple[Array, Array]]]]:
    """Return a number of images, and draws of that many images of each set together with as many
    real ones.

    In each draw the patients of the real images are divided into two halves at random. The second
    half is the reference of every set, and the first half is the set "real": what a perfect
    generator would get at this number. The number is the size of the smallest set or half.
    """
    halves = [_halves(real.groups, np.random.default_rng((seed, draw))) for draw in range(draws)]
    count = min([*map(len, sets.values()), *(len(part) for pair in halves for part in pair)])

    def generate() -> Iterator[dict[str, tuple[Array, Array]]]:
        for draw, (first, second) in enumerate(halves):
            rng = np.random.default_rng((seed, draw, 1))
            reference_ND = real.x_ND[rng.permutation(second)[:count]]
            drawn = {
                name: each.x_ND[rng.permutation(len(each))[:count]] for name, each in sets.items()
            }
            yield {
                name: (x_ND, reference_ND)
                for name, x_ND in {
                    **drawn,
                    "real": real.x_ND[rng.permutation(first)[:count]],
                }.items()
            }

    return count, generate()


def _halves(
    groups: Sequence[Hashable], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    block_of = _blocks(groups, 2, int(rng.integers(2**31)))
    side_N = np.array([block_of[group] for group in groups])
    return np.flatnonzero(side_N == 0), np.flatnonzero(side_N == 1)


def _blocks(groups: Sequence[Hashable], blocks: int, seed: int) -> dict[Hashable, int]:
    """Return the block of each group: random blocks of nearly equal numbers of groups."""
    distinct = list(dict.fromkeys(groups))
    order = np.random.default_rng(seed).permutation(len(distinct)).tolist()
    return {distinct[place]: number % blocks for number, place in enumerate(order)}


def _subsets(rng: np.random.Generator, size: int, *parts: Array) -> list[Array]:
    return [part[rng.permutation(len(part))[:size]] for part in parts]


def _kernel_sum(x_ND: Array, y_MD: Array) -> float:
    """Return the sum of the kernel over all pairs, in blocks of rows."""
    starts = range(0, len(x_ND), _ROWS)
    return sum(
        float(((x_ND[i : i + _ROWS] @ y_MD.T / x_ND.shape[1] + 1) ** 3).sum()) for i in starts
    )


def _in_float64(x_ND: Array, y_MD: Array) -> tuple[Array, Array]:
    """Return the features in float64: the kernel distance is a small difference of large sums."""
    if min(len(x_ND), len(y_MD)) < 2 or x_ND.shape[1] != y_MD.shape[1]:
        message = (
            f"expected two or more images of each set and equal features, got "
            f"{x_ND.shape} and {y_MD.shape}"
        )
        raise EvaluationError(message, "mismatch", field="features")
    return np.asarray(x_ND, np.float64), np.asarray(y_MD, np.float64)


# Nearest neighbours in features or pixels: precision, recall, density and coverage, and the
# nearest training images.
#
# Distances are computed in blocks, so that memory is bounded by the block and not by the training
# data.
#
# Shape letters: N real images, M generated images, Q queries, K neighbours, D dim.

_BLOCK = 2048
_ELEMENTS = 1 << 22  # distances at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifolds:
    """Values whose means over images are precision and density, and recall and coverage."""

    precision_M: Array
    """1 where a generated image is within the manifold of the real images."""
    density_M: Array
    """Number of neighbourhoods of real images that a generated image is in, divided by k; above 1
    where they are dense.
    """
    recall_N: Array
    """1 where a real image is within the manifold of the generated images."""
    coverage_N: Array
    """1 where a generated image is in the neighbourhood of a real image."""

    def means(self) -> dict[str, float]:
        """Return the four metrics."""
        return {
            field.name[:-2]: float(getattr(self, field.name).mean())
            for field in dataclasses.fields(self)
        }


def manifolds(real_ND: Array, generated_MD: Array, *, k: int = 5) -> Manifolds:
    """Return precision and recall (Kynkaanniemi et al., arXiv 1904.06991), density and coverage
    (Naeem et al., arXiv 2002.09797) for each image.

    The manifold of a set is the union of balls around its images, with the distance to the k-th
    nearest other image of the set as radius. Raises EvaluationError unless both sets have more than
    k images.
    """
    if k < 1 or min(len(real_ND), len(generated_MD)) <= k:
        message = (
            f"expected more than k = {k} images of each set, got {len(real_ND)} and "
            f"{len(generated_MD)}"
        )
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
        self._query_QD = query_QD.float()
        self._seen = 0
        self._squared_Q = self._query_QD.double().square().sum(dim=1)
        self.neighbours = neighbours
        self._distance_QK = torch.empty(len(query_QD), 0, dtype=torch.float64)
        self._position_QK = torch.empty(len(query_QD), 0, dtype=torch.int64)

    def add(self, image_ND: Tensor) -> None:
        """Compare the queries with the next images; their positions continue those of the images
        before.
        """
        rows = max(1, min(_BLOCK, _ELEMENTS // max(len(self._query_QD), 1)))
        for part_ND in image_ND.float().split(rows):
            cross_QN = (self._query_QD @ part_ND.T).double()
            squared_QN = (
                self._squared_Q[:, None] + part_ND.double().square().sum(dim=1) - 2 * cross_QN
            )
            position_N = torch.arange(self._seen, self._seen + len(part_ND))
            distance_QK = torch.cat([self._distance_QK, squared_QN.clamp(min=0).sqrt()], dim=1)
            position_QK = torch.cat(
                [self._position_QK, position_N.expand(len(cross_QN), -1)], dim=1
            )
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
