"""Drawing of a normal chest in frontal (PA and AP) and lateral projection."""

import dataclasses
import math

import cv2
import numpy as np

from medvl.phantom.geometry import Canvas, Points, Surface, ellipse
from medvl.phantom.population import anatomy
from medvl.phantom.population.anatomy import SIDES, Chest, FrontalLung, LateralLung, sign
from medvl.phantom.rendering.scene import Scene

# Drawing of a normal chest in frontal projection (PA and AP).

# Branching trees for the vessels of the lungs.

_FRACTIONS = tuple(np.linspace(0, 1, steps) for steps in (4, 4, 3, 2, 2, 1))
"""Points along a branch where its direction changes, by generation; the finest branches are
straight.
"""
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
    """Grow a tree from `root` in directions between the two angles of `fan` (degrees, 0 right, 90
    down).

    It has six generations; each has twice the branches, 0.82 of the length and 0.66 of the width of
    the previous one.
    """
    angle = np.radians(np.linspace(*fan, trunks) + rng.normal(0, 6, trunks))
    start = np.array(root) + rng.normal(0, 0.25, (trunks, 2))
    generations = []
    for fractions in _FRACTIONS:
        count = len(angle)
        points = len(fractions) + 1
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
        length = 0.82 * length
        width = 0.66 * width
    return generations


def vessel_directions(side: str) -> tuple[float, float]:
    """Return the range of directions of a lung's vessels in frontal projection (see
    `grow_tree`).
    """
    right = (-math.degrees(math.pi * 1.46), -math.degrees(math.pi * 0.52))
    return right if side == "right" else (-180 - right[1], -180 - right[0])


def stroke_tree(
    surface: Surface, canvas: Canvas, generations: list[Branches], strength: float
) -> None:
    """Draw a tree on a canvas, the finest and faintest branches first; `strength` 1 is typical."""
    for branches, value in reversed(list(zip(generations, _BRIGHTNESS, strict=True))):
        surface.stroke(branches.lines_KN2, branches.width, round(strength * value), canvas)


FracturedBones = dict[tuple[str, int], tuple[Points, ...]]
"""(side, index of a posterior rib or -1 for the clavicle) -> lines that replace the bone."""


def frontal_scene(
    chest: Chest, surface: Surface, rng: np.random.Generator, arms: float, broken: FracturedBones
) -> Scene:
    """Draw everything except findings.

    `rng` generates the vessels, `arms` is the spread of the arms (1 is beside the trunk), and the
    lines of `broken` bones replace the intact ones.
    """
    lungs = [FrontalLung(chest, side) for side in SIDES]
    scene = Scene(surface, [lung.outline() for lung in lungs])
    _frontal_soft_tissue(scene, chest, arms)
    _frontal_heart(scene, chest)
    _frontal_bones(scene, chest, broken)
    _spine(scene, chest)
    for side in SIDES:
        tree = grow_tree(rng, anatomy.hilum(chest, side), vessel_directions(side))
        stroke_tree(surface, scene.detail, tree, chest.markings)
    return scene


def _frontal_soft_tissue(scene: Scene, chest: Chest, arms: float) -> None:
    coarse = scene.coarse
    x, y = coarse.grid
    body = coarse.soft([anatomy.torso(chest)], 0.45)
    deep = coarse.blur(body, 2.2)
    thick = 0.66 + 0.03 * chest.wall
    scene.soft += thick * body * (0.25 + 0.75 * deep)
    limbs = coarse.soft([anatomy.arm(chest, side, arms) for side in SIDES], 0.4)
    scene.soft += 0.55 * limbs * (1 - 0.7 * body)
    belly = np.clip((y - (chest.dome_right - 1.0)) / 4.0, 0, 1)
    middle = np.exp(-np.square(np.square(x / (0.95 * chest.half_width))))
    scene.soft += 0.62 * body * belly * (0.35 + 0.65 * middle)
    scene.soft += 0.20 * body * np.exp(-np.square(x / 3.6))  # spine, muscles of the back, sternum
    scene.soft += 0.16 * coarse.soft([anatomy.mediastinum_outline(chest)], 0.7)
    gas = ellipse((0.42 * chest.half_width, chest.dome_left + 2.4), (2.3, 1.3), -12)
    scene.soft -= 0.26 * coarse.soft([gas], 0.35)  # gas in the stomach
    hila = [ellipse(anatomy.hilum(chest, side), (1.0, 2.3), -14 * sign(side)) for side in SIDES]
    scene.air *= 1 - 0.30 * coarse.soft(hila, 0.6)
    if chest.breast:
        outlines = [anatomy.breast(chest, side) for side in SIDES]
        fade = np.clip((y - outlines[0][:, 1].min()) / (1.3 * chest.breast), 0, 1)
        scene.soft += 0.24 * coarse.soft(outlines, 0.22) * fade


def _frontal_heart(scene: Scene, chest: Chest) -> None:
    surface = scene.surface
    coarse = scene.coarse
    heart = anatomy.heart_outline(chest)
    scene.soft += 0.26 * coarse.soft([heart], 1.2)
    organs = surface.fill([anatomy.mediastinum_outline(chest)], 190)
    surface.fill([heart], 255, organs)
    _, y = coarse.grid
    # the liver is as dense there
    below = np.clip((y - min(chest.dome_right, chest.dome_left)) / 3.0, 0, 1)
    above = np.clip((-6.0 - y) / 7.0, 0, 0.8)  # the neck is thin
    cv2.multiply(organs, surface.enlarge(1 - below - above), dst=organs, dtype=cv2.CV_8U)
    scene.add(organs, 0.33)
    scene.reduce_lung(organs, 0.66)
    trachea, bronchi = anatomy.airways(chest)
    lumen = coarse.stroke([trachea], 1.7)
    coarse.stroke(bronchi, 1.1, 190, lumen)
    scene.soft -= 0.24 * coarse.blur(lumen.astype(np.float32) / 255, 0.16)


def _frontal_bones(scene: Scene, chest: Chest, broken: FracturedBones) -> None:
    surface = scene.surface
    front = surface.blank()
    rear = surface.blank()
    for side in SIDES:
        ribs = anatomy.posterior_ribs(chest, side)
        near = anatomy.anterior_ribs(chest, side)
        intact = ribs[[(side, i) not in broken for i in range(len(ribs))]]
        pieces = [
            line
            for (bone_side, i), lines in broken.items()
            if bone_side == side and i >= 0
            for line in lines
        ]
        for width, value in ((1.0, 255), (0.7, 160)):
            surface.stroke(intact, width * chest.rib_width, value, rear)
            surface.stroke(pieces, width * chest.rib_width, value, rear)
        surface.stroke(near, 1.20 * chest.rib_width, 255, front)
        surface.stroke(near, 0.92 * chest.rib_width, 153, front)
    scene.add(front, 0.095)
    scene.add(rear, 0.16)
    girdle = surface.blank()
    for side in SIDES:
        blade = anatomy.scapula(chest, side)
        collar = broken.get((side, -1), (anatomy.clavicle(chest, side),))
        surface.fill([blade], 40, girdle)
        surface.stroke([np.concatenate([blade, blade[:1]])], 0.35, 85, girdle)
        head = np.array([sign(side) * 1.20 * (chest.half_width + chest.wall), -9.3])
        shaft = head + np.array([[0.0, 0.0], [1.0, 7.0], [1.6, 24.0]]) * [sign(side), 1.0]
        surface.stroke([shaft], 2.2, 105, girdle)
        surface.stroke([shaft], 1.3, 60, girdle)
        surface.fill([ellipse((head[0], head[1]), (2.3, 2.5))], 90, girdle)
        surface.stroke(collar, 1.25, 135, girdle)
        surface.stroke(collar, 0.85, 88, girdle)
    scene.add(girdle, 0.36)


def _spine(scene: Scene, chest: Chest) -> None:
    surface = scene.surface
    spine = surface.blank()
    centers = anatomy.vertebrae(chest)
    square = np.array(
        [
            [-1.65, -1.0],
            [0.0, -0.93],
            [1.65, -1.0],
            [1.5, 0.0],
            [1.65, 1.0],
            [0, 0.93],
            [-1.65, 1.0],
            [-1.5, 0],
        ]
    )
    surface.fill(centers[:, None] + square, 48, spine)
    for dx, dy, radii in (
        (-1.05, -0.2, (0.26, 0.45)),
        (1.05, -0.2, (0.26, 0.45)),
        (0.0, 0.7, (0.2, 0.6)),
    ):
        surface.fill(centers[:, None] + ellipse((dx, dy), radii, points=10), 82, spine)
    scene.add(spine, 0.36)


# Drawing of a normal chest in lateral projection.


def lateral_scene(chest: Chest, surface: Surface, rng: np.random.Generator) -> Scene:
    """Draw everything except findings."""
    lungs = [LateralLung(chest, side).outline() for side in ("right", "left")]
    scene = Scene(surface, lungs)
    _lateral_soft_tissue(scene, chest)
    _lateral_heart(scene, chest)
    _lateral_bones(scene, chest)
    for fan, trunks in (((-160, 20), 6), ((20, 120), 5)):
        tree = grow_tree(
            rng, anatomy.lateral_hilum(chest), fan, trunks=trunks, length=2.3, width=0.5
        )
        stroke_tree(surface, scene.detail, tree, chest.markings)
    return scene


def _lateral_soft_tissue(scene: Scene, chest: Chest) -> None:
    coarse = scene.coarse
    x, y = coarse.grid
    body = coarse.soft([anatomy.body_side(chest)], 0.45)
    deep = coarse.blur(body, 2.4)
    scene.soft += (0.86 + 0.03 * chest.wall) * body * (0.2 + 0.8 * deep)
    for outline, weight in zip(anatomy.raised_arms(chest), (0.42, 0.5), strict=True):
        scene.soft += weight * coarse.soft([outline], 1.1)
    belly = np.clip((y - (chest.dome_right - 0.5)) / 3.5, 0, 1)
    scene.soft += 0.42 * body * belly
    shoulders = np.clip((-5.0 - y) / 6.0, 0, 1)
    scene.soft += 0.30 * body * shoulders
    scene.soft += 0.14 * body * np.clip((y - 2.0) / 9.0, 0, 1) * np.clip((x + 9) / 12, 0, 1)
    gas = ellipse((-0.1 * chest.depth, chest.dome_left + 3.2), (2.6, 1.4), 12)
    scene.soft -= 0.24 * coarse.soft([gas], 0.35)
    hilum = [ellipse(anatomy.lateral_hilum(chest), (1.7, 2.1), 20)]
    scene.air *= 1 - 0.34 * coarse.soft(hilum, 0.7)


def _lateral_heart(scene: Scene, chest: Chest) -> None:
    surface = scene.surface
    coarse = scene.coarse
    heart = anatomy.lateral_heart(chest)
    vessels = anatomy.great_vessels(chest)
    scene.soft += 0.16 * coarse.soft([heart], 1.6) + 0.16 * coarse.soft([vessels], 0.7)
    organs = surface.fill([vessels], 68)
    surface.fill([heart], 255, organs)
    _, y = coarse.grid
    below = np.clip((y - min(chest.dome_right, chest.dome_left)) / 3.0, 0, 1)
    cv2.multiply(organs, surface.enlarge(1 - below), dst=organs, dtype=cv2.CV_8U)
    scene.add(organs, 0.23)
    scene.reduce_lung(organs, 0.36)
    lumen = coarse.stroke([anatomy.trachea(chest)], 1.6)
    scene.soft -= 0.26 * coarse.blur(lumen.astype(np.float32) / 255, 0.18)


def _lateral_bones(scene: Scene, chest: Chest) -> None:
    surface = scene.surface
    near = anatomy.lateral_ribs(chest)
    far = near + np.array([0.9, -0.7])  # ribs of the other side, slightly magnified
    for lines, width, depth in ((far, 1.15 * chest.rib_width, 0.07), (near, chest.rib_width, 0.09)):
        ribs = surface.stroke(lines, width)
        scene.add(surface.stroke(lines, 0.72 * width, 145, ribs), depth)
    column = surface.blank()
    bodies, processes = _vertebrae(chest)
    surface.fill(processes, 70, column)
    surface.fill(bodies, 120, column)
    middles = bodies.mean(axis=1, keepdims=True)
    surface.fill(middles + 0.82 * (bodies - middles), 84, column)
    scene.add(column, 0.36)
    plate = surface.stroke([anatomy.sternum(chest)], 1.1, 150)
    scene.add(surface.stroke([anatomy.sternum(chest)], 0.7, 95, plate), 0.36)


def _vertebrae(chest: Chest) -> tuple[Points, Points]:
    """Return the bodies and posterior elements of all vertebrae, (18, N, 2) each."""
    square = np.array(
        [
            [-1.5, -1.0],
            [0, -0.88],
            [1.4, -1.0],
            [1.3, 0],
            [1.4, 1.0],
            [0, 0.88],
            [-1.5, 1.0],
            [-1.35, 0],
        ]
    )
    process = np.array([[1.5, -0.5], [3.6, 0.7], [3.9, 1.6], [3.2, 1.5], [1.5, 0.5]])
    centers, down = anatomy.spine(chest)
    across = np.stack([down[:, 1], -down[:, 0]], axis=1)
    frames = np.stack([across, down], axis=1)  # (18, 2, 2): rows are the local axes
    return centers[:, None] + square @ frames, centers[:, None] + process @ frames
