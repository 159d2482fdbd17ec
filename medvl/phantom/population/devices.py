"""Shapes of support devices in frontal and lateral projection."""

import dataclasses

import numpy as np

from medvl.phantom.geometry import Points, ellipse, ribbon, spline
from medvl.phantom.population.anatomy import (
    Chest,
    FrontalLung,
    LateralLung,
    lateral_heart,
    sign,
    sternum,
    trachea,
)
from medvl.phantom.population.findings import MIDLINE_DEVICES, Part

DEVICES = (*MIDLINE_DEVICES, "central line", "pacemaker", "chest tube")
"""Values of `Part.kind` that are devices."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Lines and solid bodies of a device."""

    lines: tuple[Points, ...]
    width: float
    """Centimetres."""
    brightness: int
    """Brightness on the metal canvas, 0 to 255."""
    hollow: bool = False
    """Whether it is a tube with visible walls, not a wire."""
    solids: tuple[Points, ...] = ()

    def outlines(self) -> list[Points]:
        """Return the outlines (N, 2) for the ground truth, with a margin as in manual
        annotation.
        """
        return [ribbon(line, self.width + 0.5) for line in self.lines] + list(self.solids)


def frontal_device(chest: Chest, part: Part) -> Device:
    """Return the frontal projection of a device."""
    side = sign(part.side)
    shift = chest.shift
    width = chest.half_width
    if part.kind == "endotracheal tube":
        tip = -6.0 + 3.0 * part.t
        line = spline(
            [
                [0.5, -26.0],
                [0.1, -16.0],
                [0.1 + 0.6 * shift, 0.5 * tip - 6.0],
                [0.15 + 0.8 * shift, tip],
            ]
        )
        return Device(lines=(line,), width=0.85, brightness=42, hollow=True)
    if part.kind == "enteric tube":
        stomach = [0.36 * width, chest.dome_left + 5.5]
        line = spline(
            [[-0.6, -26.0], [0.3, -12.0], [-0.2 + shift, 0.0], [0.7 + shift, 10.0], stomach]
        )
        return Device(lines=(line,), width=0.40, brightness=52)
    if part.kind == "central line":
        return Device(lines=(_central_line(chest, part),), width=0.20, brightness=84)
    if part.kind == "pacemaker":
        return _pacemaker(chest, part)
    if part.kind == "chest tube":
        lung = FrontalLung(chest, part.side)
        t = np.array([0.74, 0.66, 0.45, 0.2, 0.1 + 0.1 * part.t])
        path = lung.point(np.array([1.12, 0.93, 0.86, 0.7, 0.45]), t)
        return Device(lines=(spline(path),), width=0.85, brightness=42, hollow=True)
    levels = np.linspace(-4.5, 6.5, 5 + int(2 * part.t))
    rings = tuple(
        _closed(ellipse((0.15 * side, y), (0.75, 0.42), -35 * (-1) ** i, 14))
        for i, y in enumerate(levels)
    )
    return Device(lines=rings, width=0.13, brightness=215)


def _closed(outline_N2: Points) -> Points:
    return np.concatenate([outline_N2, outline_N2[:1]])


def _central_line(chest: Chest, part: Part) -> Points:
    cava = [
        [-0.75 * chest.mediastinum, -4.0],
        [-0.8 * chest.mediastinum + chest.shift, 0.5 + 2.0 * part.t],
    ]
    if part.side == "right" and part.t > 0.5:  # from the neck
        return spline([[-4.6, -20.0], [-3.0, -12.0], [-2.2, -8.0], *cava])
    reach = chest.half_width  # through the arm or under the clavicle
    if part.side == "right":
        return spline(
            [[-1.5 * reach, 4.0], [-1.25 * reach, -6.0], [-0.8 * reach, -9.2], [-3.0, -7.8], *cava]
        )
    return spline(
        [
            [1.5 * reach, 4.0],
            [1.25 * reach, -6.0],
            [0.7 * reach, -9.2],
            [2.6, -7.6],
            [-0.2, -6.6],
            *cava,
        ]
    )


def _pacemaker(chest: Chest, part: Part) -> Device:
    side = sign(part.side)
    shift = chest.shift
    x = side * 0.70 * chest.half_width
    y = -6.3
    heart = 2 * chest.half_width * chest.heart_ratio
    # the vein and the vena cava
    vein = [[side * 3.4, -8.9], [-0.6 * chest.mediastinum + shift, -2.0]]
    apex = (0.44 * heart + shift, chest.dome_left - 1.0)
    leads = [
        spline([[x, y - 1.6], *vein, [-0.10 * heart + shift, 6.5], [0.1 * heart, 8.8], list(apex)])
    ]
    if part.t > 0.3:
        leads.append(
            spline(
                [
                    [x + 0.4, y - 1.4],
                    *vein,
                    [-0.1 * heart + shift, 5.4],
                    [-0.17 * heart + shift, 4.4],
                ]
            )
        )
    case = [
        [-2.0, -1.5],
        [0.0, -2.0],
        [2.0, -1.5],
        [2.2, 0.6],
        [1.0, 2.1],
        [-1.0, 2.1],
        [-2.2, 0.6],
    ]
    solids = (spline(case, closed=True) + np.array([x, y]), ellipse(apex, (0.35, 0.2), 20, 8))
    return Device(lines=tuple(leads), width=0.2, brightness=130, solids=solids)


def lateral_device(chest: Chest, part: Part) -> Device:
    """Return the lateral projection of a device."""
    lung = LateralLung(chest)
    front = -chest.depth / 2
    floor = chest.dome_left
    if part.kind == "endotracheal tube":
        airway = trachea(chest)
        line = airway[airway[:, 1] < -6.0 + 3.0 * part.t]
        return Device(lines=(line,), width=0.85, brightness=40, hollow=True)
    if part.kind == "enteric tube":
        line = spline([[0.6, -22.0], [1.9, -10.0], [3.4, 0.0], [3.0, 9.0], [-0.8, floor + 5.0]])
        return Device(lines=(line,), width=0.40, brightness=48)
    if part.kind == "central line":
        line = spline([[-1.5, -19.0], [-2.6, -10.0], [-1.6, -5.0], [-0.8, 0.5 + 2.0 * part.t]])
        return Device(lines=(line,), width=0.20, brightness=78)
    if part.kind == "pacemaker":
        heart = lateral_heart(chest)
        apex = [heart[:, 0].min() + 2.2, floor - 1.2]
        box = (front - 0.9, -5.0)
        leads = [spline([[box[0], -6.6], [-1.8, -7.8], [-0.8, -2.0], [-0.6, 5.0], apex])]
        if part.t > 0.3:
            leads.append(spline([[box[0], -6.4], [-1.6, -7.5], [-0.6, -2.0], [-2.6, 3.2]]))
        return Device(
            lines=tuple(leads), width=0.2, brightness=125, solids=(ellipse(box, (0.8, 2.1), -14),)
        )
    if part.kind == "chest tube":
        path = lung.point(np.array([0.35, 0.45, 0.6, 0.75]), np.array([0.72, 0.55, 0.3, 0.12]))
        return Device(lines=(spline(path),), width=0.85, brightness=40, hollow=True)
    bone = sternum(chest)
    picks = bone[np.linspace(3, len(bone) - 4, 5 + int(2 * part.t)).astype(int)]
    rings = tuple(_closed(ellipse((x, y), (0.65, 0.3), 25, 12)) for x, y in picks)
    return Device(lines=rings, width=0.13, brightness=205)
