"""Drawing of a normal chest in lateral projection."""

import cv2
import numpy as np

from medvl.phantom.geometry import Points, Surface, ellipse
from medvl.phantom.population import lateral_anatomy as anatomy
from medvl.phantom.population.frontal_anatomy import Chest
from medvl.phantom.population.lateral_anatomy import LateralLung
from medvl.phantom.rendering.frontal import grow_tree, stroke_tree
from medvl.phantom.rendering.scene import Scene


def lateral_scene(chest: Chest, surface: Surface, rng: np.random.Generator) -> Scene:
    """Draw everything except findings."""
    lungs = [LateralLung(chest, side).outline() for side in ("right", "left")]
    scene = Scene(surface, lungs)
    _soft_tissue(scene, chest)
    _heart(scene, chest)
    _bones(scene, chest)
    for fan, trunks in (((-160, 20), 6), ((20, 120), 5)):
        tree = grow_tree(
            rng, anatomy.lateral_hilum(chest), fan, trunks=trunks, length=2.3, width=0.5
        )
        stroke_tree(surface, scene.detail, tree, chest.markings)
    return scene


def _soft_tissue(scene: Scene, chest: Chest) -> None:
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


def _heart(scene: Scene, chest: Chest) -> None:
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


def _bones(scene: Scene, chest: Chest) -> None:
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
