"""Rows of fidelity and diversity: distances of features, manifolds, and similarity within a prompt.

Shape letters: N images, D feature dim, P pairs.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from medvl.common.config_io import check_within
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricRow, mean_metrics
from medvl.eval.core.metrics import Array
from medvl.eval.generation import distances
from medvl.eval.generation.distances import manifolds
from medvl.eval.generation.findings import Resampling
from medvl.eval.generation.inputs import ImageSet

# Similarity of images of one prompt: multi-scale SSIM and distance of features, over pairs.
#
# Shape letters: P pairs, H, W pixels, D feature dim.

_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
_WINDOW = 11
_SIGMA = 1.5
_C1 = 0.01**2
_C2 = 0.03**2


def ms_ssim(x_PHW: Tensor, y_PHW: Tensor) -> Tensor:
    """Return the multi-scale structural similarity of pairs of grey images in [0, 1], float64 (P,);
    1 if equal.

    Wang et al., 2003: Gaussian window of 11 pixels, five scales. Images below 176 pixels have fewer
    scales, those at which the window fits; their weights are scaled to the sum 1, and such values
    compare only with those of the same image size. Negative contrast terms count as 0.

    Raises EvaluationError for images below 11 pixels or of different shapes.
    """
    side = min(x_PHW.shape[1:], default=0)
    if x_PHW.shape != y_PHW.shape or x_PHW.ndim != 3 or side < _WINDOW:
        message = (
            f"expected pairs of images (P, H, W) of {_WINDOW} pixels or more, got "
            f"{tuple(x_PHW.shape)}"
        )
        raise EvaluationError(message, "mismatch", field="images")
    weights = torch.tensor(_WEIGHTS[: int(math.log2(side / _WINDOW)) + 1], dtype=torch.float64)
    weights = weights / weights.sum()
    x = x_PHW.double()[:, None]
    y = y_PHW.double()[:, None]
    result_P = torch.ones(len(x_PHW), dtype=torch.float64)
    for scale, weight in enumerate(weights):
        luminance, contrast = _ssim_terms(x, y)
        term_P = (
            (luminance * contrast if scale == len(weights) - 1 else contrast).flatten(1).mean(dim=1)
        )
        result_P = result_P * term_P.clamp(min=0) ** weight
        x = F.avg_pool2d(x, 2)
        y = F.avg_pool2d(y, 2)
    return result_P


def _ssim_terms(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maps of luminance, and of contrast and structure, of images (P, 1, H, W)."""
    mean_x = _blur(x)
    mean_y = _blur(y)
    var_x = _blur(x * x) - mean_x**2
    var_y = _blur(y * y) - mean_y**2
    cov = _blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)
    return luminance, (2 * cov + _C2) / (var_x + var_y + _C2)


def _blur(x: Tensor) -> Tensor:
    offset = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    window = torch.exp(-(offset**2) / (2 * _SIGMA**2))
    window = window / window.sum()
    return F.conv2d(F.conv2d(x, window[None, None, :, None]), window[None, None, None, :])


def pairs_within(
    groups: Sequence[Hashable], apart: Sequence[Hashable], *, per_group: int = 6, seed: int = 0
) -> NDArray[np.int64]:
    """Return (P, 2) pairs of rows of one group that differ in `apart` (seed or patient), at most
    `per_group` a group.

    Pairs are drawn at random where a group has more.
    """
    rng = np.random.default_rng(seed)
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    all_pairs: list[tuple[int, int]] = []
    for rows in members.values():
        rows = (
            rng.permutation(rows)[: 4 * per_group].tolist() if len(rows) > 4 * per_group else rows
        )
        pairs = [
            pair for pair in itertools.combinations(rows, 2) if apart[pair[0]] != apart[pair[1]]
        ]
        indices = (
            rng.permutation(len(pairs))[:per_group].tolist()
            if len(pairs) > per_group
            else range(len(pairs))
        )
        all_pairs += [pairs[place] for place in indices]
    return np.array(all_pairs, dtype=np.int64).reshape(-1, 2)


def pairs_across(
    groups: Sequence[Hashable], apart: Sequence[Hashable], count: int, seed: int = 0
) -> NDArray[np.int64]:
    """Return at most `count` random (P, 2) pairs of rows that differ in the group and in
    `apart`.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(groups), size=(4 * count, 2)).tolist()
    differ = [(a, b) for a, b in drawn if groups[a] != groups[b] and apart[a] != apart[b]]
    return np.array(differ[:count], dtype=np.int64).reshape(-1, 2)


ALL = "all images"
_MATCHED = ("frechet_distance", "kernel_distance", "precision", "recall", "density", "coverage")
_SIDE = 128
_PAIRS = 500


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FidelityOptions:
    """Settings of the distances."""

    k: int = 5
    """Neighbours of precision, recall, density and coverage."""
    draws: int = 20
    """Divisions of the real images into halves."""
    subset_size: int = 1000
    """Images of a subset of the kernel distance; at most half of the smaller set."""
    subsets: int = 100
    """Subsets of the kernel distance."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_within(self, "[1, inf)", "k", "draws", "subsets", error=EvaluationError)


_DISTANCES: Mapping[str, Callable[[Array, Array], float]] = {
    "frechet_distance": distances.frechet_distance,
    "kernel_distance": distances.kernel_distance,
}


def distance_rows(
    sets: Sequence[ImageSet], real: ImageSet, options: FidelityOptions
) -> tuple[MetricRow, ...]:
    """Return Frechet and kernel distance of each set from the real test images, with intervals of
    the jackknife.

    "kernel_distance_subsets" is the mean over subsets, with the 2.5th and 97.5th percentile of the
    subsets.
    """
    rows = []
    for images in sets:
        row = MetricRow(metric="", target=ALL, subgroup=images.name, n=len(images.prompts))
        for name, distance in _DISTANCES.items():
            value, low, high = distances.jackknife(
                distance, images.feature_set, real.feature_set, seed=options.seed
            )
            low = (
                float(np.fmax(low, 0)) if name == "frechet_distance" and not np.isnan(low) else low
            )
            rows.append(dataclasses.replace(row, metric=name, value=value, low=low, high=high))
        values_S = distances.kernel_distance_subsets(
            images.feature_set.x_ND,
            real.feature_set.x_ND,
            subsets=options.subsets,
            size=options.subset_size,
            seed=options.seed,
        )
        low, high = np.quantile(values_S, (0.025, 0.975)).tolist()
        mean = float(values_S.mean())
        rows.append(
            dataclasses.replace(
                row, metric="kernel_distance_subsets", value=mean, low=low, high=high
            )
        )
    return tuple(rows)


def manifold_rows(
    sets: Sequence[ImageSet], real: ImageSet, options: FidelityOptions, resampling: Resampling
) -> tuple[MetricRow, ...]:
    """Return precision, density, recall and coverage of each set, all images used.

    Intervals resample the images that each is a mean over: the generated ones, or the real ones for
    recall and coverage; the manifolds stay as they are.
    """
    rows: list[MetricRow] = []
    for images in sets:
        measures = manifolds(real.feature_set.x_ND, images.feature_set.x_ND, k=options.k)
        parts = {
            "precision": (measures.precision_M, images),
            "density": (measures.density_M, images),
            "recall": (measures.recall_N, real),
            "coverage": (measures.coverage_N, real),
        }
        for name, (value_N, of) in parts.items():
            group = mean_metrics(name, value_N[:, None], [ALL], subgroup=images.name)
            rows += resampling.measure([group], of.patients)
    return tuple(rows)


def matched_rows(
    sets: Sequence[ImageSet], real: ImageSet, options: FidelityOptions
) -> tuple[MetricRow, ...]:
    """Return all distances at one number of images, with that of real images from other real ones
    beside.

    Values are means over the draws of `distances.matched_draws`; intervals are the 2.5th and 97.5th
    percentile of the draws, which share images.
    """
    features = {images.name: images.feature_set for images in sets}
    count, draws = distances.matched_draws(
        features, real.feature_set, draws=options.draws, seed=options.seed
    )
    if count <= options.k:
        message = (
            f"expected more than {2 * options.k} real and {options.k} generated images, "
            f"got halves of {count}"
        )
        raise EvaluationError(message, "empty", field="data")
    values: dict[tuple[str, str], list[float]] = {}
    for draw in draws:
        for name, (x_ND, reference_ND) in draw.items():
            means = manifolds(reference_ND, x_ND, k=options.k).means()
            means |= {
                metric: distance(x_ND, reference_ND) for metric, distance in _DISTANCES.items()
            }
            for metric in _MATCHED:
                values.setdefault((metric, name), []).append(means[metric])
    return tuple(
        MetricRow(
            metric=metric,
            target=f"{count} images",
            subgroup=name,
            value=float(np.mean(of_draws)),
            low=float(np.quantile(of_draws, 0.025)),
            high=float(np.quantile(of_draws, 0.975)),
            n=count,
        )
        for (metric, name), of_draws in values.items()
    )


def diversity_rows(images: ImageSet, resampling: Resampling) -> tuple[MetricRow, ...]:
    """Return MS-SSIM and feature distance of pairs of images with one text, and of pairs with
    different texts.

    Pairs of generated images differ in the seed, those of real images in the patient. A high
    MS-SSIM, or a small distance, within a prompt means little diversity; real images with equal
    texts are the reference. Empty where no text has two images.
    """
    texts = [prompt.lower() for prompt in images.prompts]
    generated = all("seed" in sample.extra for sample in images.scored.samples)
    apart = list(range(len(texts))) if generated else images.patients
    kinds = {
        "same text": pairs_within(texts, apart, seed=resampling.seed),
        "other text": pairs_across(texts, apart, _PAIRS, seed=resampling.seed),
    }
    if not len(kinds["same text"]):
        return ()
    rows: list[MetricRow] = []
    for kind, pairs_P2 in kinds.items():
        if not len(pairs_P2):
            continue
        groups = [
            mean_metrics(metric, value_P[:, None], [kind], subgroup=images.name)
            for metric, value_P in (
                ("ms_ssim", _structural(images, pairs_P2)),
                ("feature_distance", _distance(images, pairs_P2)),
            )
        ]
        rows += resampling.measure(groups, [texts[row] for row in pairs_P2[:, 0].tolist()])
    return tuple(rows)


def _structural(images: ImageSet, pairs_P2: NDArray[np.int64]) -> Array:
    """Return MS-SSIM of pairs, of images shrunk to at most 128 pixels."""
    import cv2

    def read(row: int) -> NDArray[np.uint8]:
        pixels = images.source.pixels(images.scored.positions[row])
        side = min(_SIDE, *pixels.shape[:2])
        grey = pixels if pixels.ndim == 2 else pixels.mean(axis=2).astype(np.uint8)
        square: NDArray[np.uint8] = cv2.resize(grey, (side, side), interpolation=cv2.INTER_AREA)
        return square

    values = []
    for start in range(0, len(pairs_P2), 64):
        chosen = [[read(row) for row in pair] for pair in pairs_P2[start : start + 64].tolist()]
        side = min(len(square) for pair in chosen for square in pair)
        first, second = (
            np.stack(
                [
                    cv2.resize(square, (side, side), interpolation=cv2.INTER_AREA)
                    for square in column
                ]
            )
            for column in zip(*chosen, strict=True)
        )
        values.append(
            ms_ssim(torch.from_numpy(first) / 255, torch.from_numpy(second) / 255).numpy()
        )
    return np.concatenate(values)


def _distance(images: ImageSet, pairs_P2: NDArray[np.int64]) -> Array:
    x_ND = images.features.x_ND.double().numpy()
    distance_P: Array = np.linalg.norm(x_ND[pairs_P2[:, 0]] - x_ND[pairs_P2[:, 1]], axis=1)
    return distance_P
