"""Branching trees for the vessels of the lungs."""

import dataclasses
import math

import numpy as np

from medvl.phantom.geometry import Canvas, Points, Surface

_FRACTIONS = tuple(np.linspace(0, 1, steps) for steps in (4, 4, 3, 2, 2, 1))
"""Points along a branch where its direction changes, by generation; the finest branches are straight."""
_BRIGHTNESS = (120, 116, 104, 90, 74, 58)


@dataclasses.dataclass(frozen=True, slots=True)
class Branches:
    """Branches of one generation, with their width in centimetres and lines (K, N, 2)."""

    width: float
    lines_KN2: Points


def grow_tree(
    rng: np.random.Generator,
    root: tuple[float, float],
    fan: tuple[float, float],
    *,
    trunks: int = 7,
    length: float = 2.6,
    width: float = 0.46,
) -> list[Branches]:
    """Grow a tree from `root` in directions between the two angles of `fan` (degrees, 0 right, 90 down).

    It has six generations; each has twice the branches, 0.82 of the length and 0.66 of the width of the previous one.
    """
    angle = np.radians(np.linspace(*fan, trunks) + rng.normal(0, 6, trunks))
    start = np.array(root) + rng.normal(0, 0.25, (trunks, 2))
    generations = []
    for fractions in _FRACTIONS:
        count, points = len(angle), len(fractions) + 1
        lengths = length * rng.uniform(0.75, 1.25, count)
        bend = rng.normal(0, 0.22, count)
        heading = angle[:, None] + bend[:, None] * fractions
        lines = np.empty((count, points, 2))
        lines[:, 0] = start
        step = lengths[:, None] / (points - 1)
        np.cumsum(step * np.cos(heading), axis=1, out=lines[:, 1:, 0])
        np.cumsum(step * np.sin(heading), axis=1, out=lines[:, 1:, 1])
        lines[:, 1:] += start[:, None]
        generations.append(Branches(width, lines))
        angle = (heading[:, -1:] + np.radians(rng.uniform(9, 34, (count, 2))) * [-1, 1]).ravel()
        start = np.repeat(lines[:, -1], 2, axis=0)
        length, width = 0.82 * length, 0.66 * width
    return generations


def vessel_directions(side: str) -> tuple[float, float]:
    """Return the range of directions of a lung's vessels in frontal projection (see `grow_tree`)."""
    right = (-math.degrees(math.pi * 1.46), -math.degrees(math.pi * 0.52))
    return right if side == "right" else (-180 - right[1], -180 - right[0])


def stroke_tree(surface: Surface, canvas: Canvas, generations: list[Branches], strength: float) -> None:
    """Draw a tree on a canvas, the finest and faintest branches first; `strength` 1 is typical."""
    for branches, value in reversed(list(zip(generations, _BRIGHTNESS, strict=True))):
        surface.stroke(branches.lines_KN2, branches.width, round(strength * value), canvas)
