"""Outlines of the lateral projection of a chest; the patient faces the left edge of the image."""

import functools

import numpy as np

from medvl.phantom.geometry import Points, ellipse, spline
from medvl.phantom.population.frontal_anatomy import Chest


class LateralLung:
    """Lateral projection of a lung, with coordinates d and t.

    d runs from the sternum (0) to the back (1), t from the apex (0) to the posterior costophrenic
    angle (1).
    """

    def __init__(self, chest: Chest, side: str = "right") -> None:
        self.chest = chest
        self.front = -chest.depth / 2
        self.back = chest.depth / 2 + 3.6
        self.top = chest.apex + 0.6
        self.dome = chest.dome(side)
        self.bottom = self.dome + 1.25 * chest.angle_drop

    @functools.cached_property
    def _reach(self) -> tuple[Points, Points, Points]:
        """Heights t, and x of the front and back of the lung at these heights."""
        knots = [0.0, 0.02, 0.06, 0.14, 0.3, 0.55, 0.8, 1.0]
        middle = (self.front + self.back) / 2
        ahead = [3.4, 2.0, 1.0, *(-self.front * np.array([-0.4, -0.66, -0.97, -1.03, -1.0]))]
        behind = [
            3.4,
            4.5,
            5.3,
            *(middle + (self.back - middle) * np.array([0.64, 0.86, 0.99, 1.0, 0.93])),
        ]
        curve = spline(np.stack([np.stack([knots, ahead], 1), np.stack([knots, behind], 1)]))
        return curve[0, :, 0], curve[0, :, 1], curve[1, :, 1]

    def point(self, d: float | Points, t: float | Points) -> Points:
        """Convert lung coordinates to centimetres (..., 2)."""
        levels, ahead, behind = self._reach
        front = np.interp(t, levels, ahead)
        back = np.interp(t, levels, behind)
        points = np.empty((*np.broadcast_shapes(np.shape(d), np.shape(t)), 2))
        points[..., 0] = front + d * (back - front)
        points[..., 1] = self.top + np.multiply(t, self.bottom - self.top)
        return points

    def diaphragm(self) -> Points:
        """Return the dome from the back to the sternum, (N, 2)."""
        peak = self.front + 0.38 * (self.back - self.front)
        x = np.linspace(self.back, self.front, 25)
        behind = np.clip((x - peak) / (self.back - peak), 0, 1)
        ahead = np.clip((peak - x) / (peak - self.front), 0, 1)
        return np.stack(
            [x, self.dome + behind**2.2 * (self.bottom - self.dome) + 1.3 * ahead**2], axis=-1
        )

    def outline(self) -> Points:
        """Return the outline of the air-filled lung, (N, 2)."""
        dome = self.diaphragm()
        t = np.linspace(0, 1, 24) ** 2
        last = (dome[-1, 1] - self.top) / (self.bottom - self.top)
        behind = self.point(np.ones_like(t), t)
        ahead = self.point(np.zeros_like(t), last * t[::-1])
        return np.concatenate([behind, dome[1:], ahead])


def lateral_heart(chest: Chest) -> Points:
    """Return the outline of the heart behind the lower sternum, (N, 2)."""
    grow = chest.heart_ratio / 0.45
    front = -chest.depth / 2 + 0.7
    floor = max(chest.dome_right, chest.dome_left) + 1.2
    reach = 7.6 * grow + 0.12 * (chest.depth - 15)
    height = (floor - 0.4) * min(1.1, 0.55 + 0.45 * grow)
    top = floor - height
    control = np.array([
        [front + 0.3, floor - 0.3], [front - 0.1, floor - 0.45 * height], [front + 0.20 * reach,
        floor - 0.78 * height], [front + 0.46 * reach, top + 0.02 * height], [front + 0.76 * reach,
        top + 0.12 * height], [front + 0.98 * reach, top + 0.42 * height], [front + 0.97 * reach,
        top + 0.72 * height], [front + 0.80 * reach, floor],
    ])  # fmt: skip
    return spline(control, closed=True)


def great_vessels(chest: Chest) -> Points:
    """Return the outline of ascending aorta, arch and anterior upper mediastinum, (N, 2)."""
    wide = chest.mediastinum / 2.8
    control = [
        [-3.0 * wide, 3.5],
        [-2.7 * wide, -2.0],
        [-1.2, -4.6 * wide],
        [1.8, -5.0 * wide],
        [3.9 * wide, -3.6],
    ]
    return spline([*control, [4.2 * wide, 0.0], [3.0, 4.0]], closed=True)


def lateral_hilum(chest: Chest) -> tuple[float, float]:
    """Return (x, y) of the crossing of pulmonary arteries and bronchi."""
    return (0.06 * chest.depth, 1.4)


def trachea(chest: Chest) -> Points:
    """Return the trachea as a line down to the carina, (N, 2)."""
    return spline([[-0.6, -19.0], [0.2, -12.0], [0.7, -6.0], [0.09 * chest.depth, 0.6]])


def spine(chest: Chest) -> tuple[Points, Points]:
    """Return the centres (18, 2) of the vertebral bodies from the neck down, and their
    directions (18, 2).
    """
    y = -22.0 + 2.45 * np.arange(18)
    bow = 1.6 * np.cos((y - 1.0) / 15.0 * np.pi / 2)  # kyphosis
    line = np.stack([chest.depth / 2 + 1.1 + bow, y], axis=1)
    along = np.gradient(line, axis=0)
    return line, along / np.linalg.norm(along, axis=1, keepdims=True)


def sternum(chest: Chest) -> Points:
    """Return the sternum as a line, (N, 2)."""
    lung = LateralLung(chest)
    t = np.linspace(0.2, 0.72, 6)
    return spline(lung.point(np.zeros_like(t), t) - [0.75, 0.0])


def lateral_ribs(chest: Chest) -> Points:
    """Return ten ribs of one side, from the spine forwards and down, (10, N, 2)."""
    lung = LateralLung(chest)
    start = -11.5 + chest.rib_pitch * np.arange(10)
    back = lung.back + 0.2
    length = np.linspace(9.0, 17.0, 10)[:, None]
    fractions = np.array([0.0, 0.12, 0.4, 0.75, 1.0])
    x = back - fractions * length
    x[:, 0] -= 1.0
    y = start[:, None] + np.array([0.0, 0.9, 3.4, 6.6, 8.8]) * (0.75 + 0.08 * chest.rib_slope)
    return spline(np.stack(np.broadcast_arrays(x, y), axis=-1), samples=4)


def body_side(chest: Chest) -> Points:
    """Return the outline of the trunk, (N, 2)."""
    front = -chest.depth / 2 - 1.6 - 0.6 * chest.wall
    back = chest.depth / 2 + 5.6 + 0.6 * chest.wall
    breast = 0.62 * chest.breast
    control = [
        [-5.0, -28.0], [-4.4, -17.0], [0.66 * front, -10.5], [0.92 * front, -5.0],
        [front - 0.35 * breast, 1.0], [front - breast, 6.0], [front - 0.25 * breast, 10.5],
        [front + 0.2, 16.0], [front, 30.0], [back - 1.6, 30.0], [back - 1.0, 14.0], [back, 3.0],
        [back - 0.7, -6.0], [back - 2.8, -13.0], [7.5, -19.0], [6.0, -28.0],
    ]  # fmt: skip
    return spline(control)


def raised_arms(chest: Chest) -> list[Points]:
    """Return the outlines of shoulders and raised upper arms, (N, 2) each."""
    return [
        ellipse((1.5, -13.5), (0.48 * chest.depth + 1.5, 4.6), -18),
        ellipse((-0.35 * chest.depth, -19.5), (9.5, 3.6), 34),
    ]
