"""Similarity of images of one prompt: multi-scale SSIM and distance of features, over pairs.

Shape letters: P pairs, H, W pixels, D feature dim.
"""

import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from medvl.errors import EvaluationError

_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2


def ms_ssim(x_PHW: Tensor, y_PHW: Tensor) -> Tensor:
    """Return the multi-scale structural similarity of pairs of grey images in [0, 1], float64 (P,); 1 if equal.

    Wang et al., 2003: Gaussian window of 11 pixels, five scales. Images below 176 pixels have fewer scales, those at
    which the window fits; their weights are scaled to the sum 1, and such values compare only with those of the same
    image size. Negative contrast terms count as 0.

    Raises EvaluationError for images below 11 pixels or of different shapes.
    """
    side = min(x_PHW.shape[1:], default=0)
    if x_PHW.shape != y_PHW.shape or x_PHW.ndim != 3 or side < _WINDOW:
        message = f"expected pairs of images (P, H, W) of {_WINDOW} pixels or more, got {tuple(x_PHW.shape)}"
        raise EvaluationError(message, "mismatch", field="images")
    weights = torch.tensor(_WEIGHTS[: int(math.log2(side / _WINDOW)) + 1], dtype=torch.float64)
    weights = weights / weights.sum()
    x, y, result_P = x_PHW.double()[:, None], y_PHW.double()[:, None], torch.ones(len(x_PHW), dtype=torch.float64)
    for scale, weight in enumerate(weights):
        luminance, contrast = _ssim_terms(x, y)
        term_P = (luminance * contrast if scale == len(weights) - 1 else contrast).flatten(1).mean(dim=1)
        result_P = result_P * term_P.clamp(min=0) ** weight
        x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
    return result_P


def _ssim_terms(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maps of luminance, and of contrast and structure, of images (P, 1, H, W)."""
    mean_x, mean_y = _blur(x), _blur(y)
    var_x, var_y, cov = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2, _blur(x * y) - mean_x * mean_y
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
    """Return (P, 2) pairs of rows of one group that differ in `apart` (seed or patient), at most `per_group` a group.

    Pairs are drawn at random where a group has more.
    """
    rng = np.random.default_rng(seed)
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    found: list[tuple[int, int]] = []
    for rows in members.values():
        rows = rng.permutation(rows)[: 4 * per_group].tolist() if len(rows) > 4 * per_group else rows
        pairs = [pair for pair in itertools.combinations(rows, 2) if apart[pair[0]] != apart[pair[1]]]
        chosen = rng.permutation(len(pairs))[:per_group].tolist() if len(pairs) > per_group else range(len(pairs))
        found += [pairs[place] for place in chosen]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def pairs_across(groups: Sequence[Hashable], apart: Sequence[Hashable], count: int, seed: int = 0) -> NDArray[np.int64]:
    """Return at most `count` random (P, 2) pairs of rows that differ in the group and in `apart`."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(groups), size=(4 * count, 2)).tolist()
    differ = [(a, b) for a, b in drawn if groups[a] != groups[b] and apart[a] != apart[b]]
    return np.array(differ[:count], dtype=np.int64).reshape(-1, 2)
