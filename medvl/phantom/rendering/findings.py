"""Appearance of each kind of finding: its outlines and its effect on a scene."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.phantom.geometry import Canvas, Points, Surface, ellipse, ribbon, spline
from medvl.phantom.population.anatomy import (
    SIDES,
    Chest,
    FrontalLung,
    LateralLung,
    clavicle,
    great_vessels,
    heart_outline,
    hilum,
    lateral_heart,
    lateral_hilum,
    mediastinum_outline,
    posterior_ribs,
)
from medvl.phantom.population.devices import DEVICES, Device, frontal_device, lateral_device
from medvl.phantom.population.findings import Finding, Part
from medvl.phantom.population.world import View
from medvl.phantom.rendering.radiographs import FracturedBones, grow_tree, vessel_directions
from medvl.phantom.rendering.scene import Scene

# Drawing of support devices.


def draw_device(scene: Scene, device: Device) -> None:
    """Add a device to the scene."""
    metal = scene.surface.stroke(device.lines, device.width, device.brightness)
    if device.hollow:
        scene.surface.stroke(device.lines, 0.62 * device.width, device.brightness // 3, metal)
        stripes = [line + np.array([0.12 * device.width, 0.0]) for line in device.lines]
        scene.surface.stroke(stripes, 0.12, 2 * device.brightness, metal)
    scene.add(scene.surface.fill(device.solids, 200, metal), 0.9)


# Outlines of findings inside a lung, for drawing and for the ground truth.
#
# A lung is a `FrontalLung` or a `LateralLung` with coordinates (u, t): u from the midline to the
# side or from the sternum to the back, t from the apex to the costophrenic angle. The functions
# return outlines (N, 2) in centimetres, which may extend beyond the lung and must be clipped.

Lung = FrontalLung | LateralLung

_FISSURES = {
    "right upper lobe": (0.0, 0.50), "right middle lobe": (0.50, 0.92), "right lower lobe": (0.42,
    1.0), "left upper lobe": (0.0, 0.56), "lingula": (0.42, 0.90), "left lower lobe": (0.42, 1.0),
}  # fmt: skip
"""Lobe -> its range of t."""


def part_generator(part: Part) -> np.random.Generator:
    """Return the random generator of a part, equal in every view and at every size."""
    return np.random.Generator(np.random.PCG64(part.seed))


def horizontal_position(lung: Lung, part: Part) -> float:
    """Return u of a part in this projection."""
    return part.s if isinstance(lung, FrontalLung) else part.d


def patch(lung: Lung, part: Part) -> list[Points]:
    """Return one irregular opacity within a lobe."""
    rng = part_generator(part)
    angle = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    radius = (0.55 + 0.55 * part.extent) * (1 + 0.22 * rng.uniform(-1, 1, 12))
    top, bottom = _FISSURES[part.zone]
    half = min(0.24, (bottom - top) / 2 + 0.02)
    u = horizontal_position(lung, part) + 0.48 * radius * np.cos(angle)
    t = part.t + half * radius * np.sin(angle)
    control = lung.point(np.clip(u, -0.1, 1.02), np.clip(t, top, bottom))
    return [spline(control, closed=True, samples=4)]


def patches(lung: Lung, part: Part) -> list[Points]:
    """Return several small foci around the centre of a lobe."""
    rng = part_generator(part)
    top, bottom = _FISSURES[part.zone]
    outlines = []
    for _ in range(4 + int(4 * part.extent)):
        u = np.clip(horizontal_position(lung, part) + rng.uniform(-0.36, 0.36), 0.05, 0.95)
        t = np.clip(part.t + rng.uniform(-0.17, 0.17), top, bottom)
        radius = rng.uniform(0.6, 1.3) * (0.7 + 0.8 * part.extent)
        x, y = lung.point(float(u), float(t))
        outlines.append(ellipse((x, y), (radius * 1.15, radius), rng.uniform(0, 90), 12))
    return outlines


def meniscus(lung: Lung, part: Part) -> list[Points]:
    """Return fluid that fills the lung from below, with a meniscus along the wall."""
    edge = 0.980 - 0.69 * part.extent
    middle = min(0.985, edge + 0.10 + 0.09 * (1 - part.extent))
    u = np.linspace(1.05, -0.15, 22)
    level = middle - (middle - edge) * np.clip(u, 0, 1) ** 3
    surface = lung.point(u, level)
    floor = lung.point(u[::-1], np.full(22, 1.12))
    return [np.concatenate([surface, floor])]


def collapsed_border(lung: Lung, part: Part) -> Points:
    """Return the visceral pleura of a collapsed lung, from the midline over the apex downwards,
    (N, 2).
    """
    gap = 0.08 + 0.46 * part.extent
    wall = _wall(lung)
    root = lung.point(0.12, 0.52)
    height = np.clip((wall[:, 1] - lung.top) / (lung.bottom - lung.top), 0, 1)
    shrink = gap * np.interp(height, [0.0, 0.3, 0.75, 1.0], [0.75, 1.0, 0.8, 0.3])
    return root + (wall - root) * (1 - shrink[:, None])


def _wall(lung: Lung) -> Points:
    """Return the parietal pleura from the midline over the apex to the costophrenic angle, (N,
    2).
    """
    t = np.linspace(0, 1, 24) ** 1.6
    return np.concatenate(
        [lung.point(np.zeros(6), np.linspace(0.12, 0.012, 6)), lung.point(np.ones(24), t)]
    )


def free_gas(lung: Lung, part: Part) -> list[Points]:
    """Return the space between the collapsed lung and the chest wall."""
    outer = _wall(lung) + (_wall(lung) - lung.point(0.12, 0.52)) * 0.06
    return [np.concatenate([collapsed_border(lung, part), outer[::-1]])]


def bands(lung: Lung, part: Part) -> list[Points]:
    """Return plate-like atelectasis: tapered bands above the diaphragm."""
    rng = part_generator(part)
    outlines = []
    dome = (lung.chest.dome(part.side) - lung.top) / (lung.bottom - lung.top)
    for number in range(1 + int(3.4 * part.extent)):
        length = rng.uniform(0.40, 0.62) + 0.2 * part.extent
        start = np.clip(
            horizontal_position(lung, part) - length / 2 + rng.uniform(-0.1, 0.1), 0.06, 0.6
        )
        t = dome - 0.045 - 0.08 * number - rng.uniform(0.0, 0.02)
        u = start + length * np.linspace(0, 1, 5)
        tilt = rng.uniform(-0.06, 0.06) * np.linspace(-1, 1, 5) + rng.normal(0, 0.006, 5)
        line = spline(lung.point(u, t + tilt), samples=4)
        width = (0.30 + 0.65 * part.extent) * rng.uniform(0.75, 1.2)
        taper = np.sin(np.linspace(0.06, np.pi - 0.06, len(line))) ** 0.6 * (
            1 + 0.25 * rng.uniform(-1, 1, len(line))
        )
        outlines.append(ribbon(line, width * taper))
    return outlines


def wedge(lung: Lung, part: Part) -> list[Points]:
    """Return a collapsed lobe: a triangle with a sharp edge that shrinks with the extent."""
    frontal = isinstance(lung, FrontalLung)
    small = 1.2 - 0.5 * part.extent
    if "upper" in part.zone:
        fissure = [(0.0, 0.42), (0.35, 0.34 * small), (0.7, 0.22 * small), (1.04, 0.14 * small)]
        border = [(1.04, -0.02), (-0.1, -0.02)]
    elif frontal:
        fissure = [(-0.1, 0.40), (0.12, 0.55), (0.38, 0.76), (0.66 * small + 0.18, 1.04)]
        border = [(-0.1, 1.04)]
    else:
        fissure = [(1.04, 0.42), (0.86, 0.58), (0.66, 0.80), (0.52, 1.05)]
        border = [(1.04, 1.05)]
    curve = spline(lung.point(*np.array(fissure).T), samples=6)
    return [np.concatenate([curve, lung.point(*np.array(border).T)])]


def butterfly(lung: Lung, part: Part) -> list[Points]:
    """Return perihilar oedema of one lung."""
    wide = 0.30 + 0.30 * part.extent
    tall = 0.20 + 0.17 * part.extent
    angle = np.linspace(0, 2 * np.pi, 14, endpoint=False)
    middle = 0.24 if isinstance(lung, FrontalLung) else 0.5
    control = lung.point(middle + wide * np.cos(angle), 0.53 + tall * np.sin(angle))
    return [spline(control, closed=True, samples=4)]


def septal_lines(lung: Lung, part: Part) -> Points:
    """Return Kerley B lines: short and horizontal at the lateral base, (K, 2, 2)."""
    rng = part_generator(part)
    count = 5 + int(6 * part.extent)
    t = np.sort(rng.uniform(0.58, 0.90, count))
    outer = lung.point(np.full(count, 0.995), t)
    inner = lung.point(0.995 - rng.uniform(0.08, 0.15, count), t - 0.004)
    return np.stack([outer, inner], axis=1)


def pleural_thickening(lung: Lung, part: Part) -> list[Points]:
    """Return pleural thickening along the lateral wall."""
    rng = part_generator(part)
    t = np.linspace(0.42 - 0.2 * part.extent, 0.90, 10)
    depth = (
        (0.055 + 0.10 * part.extent)
        * np.sin(np.linspace(0.25, np.pi - 0.05, 10))
        * rng.uniform(0.7, 1.1, 10)
    )
    return [
        np.concatenate(
            [spline(lung.point(1 - depth, t), samples=4), lung.point(np.full(10, 1.03), t)[::-1]]
        )
    ]


def apical_cap(lung: Lung, part: Part) -> list[Points]:
    """Return pleural thickening over the apex, with an uneven lower border."""
    rng = part_generator(part)
    u = np.linspace(1.05, -0.05, 9)
    depth = (0.055 + 0.10 * part.extent) * (1 + 0.35 * rng.uniform(-1, 1, 9))
    return [
        np.concatenate(
            [spline(lung.point(u, depth), samples=4), lung.point(u[::-1], np.full(9, -0.03))]
        )
    ]


def plaque(lung: Lung, part: Part) -> list[Points]:
    """Return calcified plaques on the diaphragm and the lateral wall."""
    rng = part_generator(part)
    dome = lung.diaphragm()
    first = int(rng.integers(4, 7))
    pieces = []
    for start in range(first, first + 4 + int(6 * part.extent), 4):
        piece = spline(dome[start : start + 4] - [0.0, 0.15], samples=4)
        width = (0.35 + 0.45 * part.extent) * np.sin(np.linspace(0.3, np.pi - 0.3, len(piece)))
        pieces.append(ribbon(piece, width * rng.uniform(0.6, 1.3, len(piece))))
    for _ in range(1 + int(3 * part.extent)):  # plaques on the lateral wall
        x, y = lung.point(rng.uniform(0.55, 0.9), rng.uniform(0.4, 0.7))
        angle = np.linspace(0, 2 * np.pi, 9, endpoint=False)
        radius = (0.5 + 0.7 * part.extent) * rng.uniform(0.4, 1.2, 9)
        pieces.append(
            spline(
                np.stack([x + radius * np.cos(angle), y + 0.6 * radius * np.sin(angle)], 1),
                closed=True,
            )
        )
    return pieces


def nodule(lung: Lung, part: Part) -> list[Points]:
    """Return a round lesion of `part.size` centimetres."""
    rng = part_generator(part)
    x, y = lung.point(horizontal_position(lung, part), part.t)
    angle = np.linspace(0, 2 * np.pi, 10, endpoint=False)
    radius = part.size / 2 * (1 + 0.10 * rng.uniform(-1, 1, 10))
    control = np.stack([x + radius * np.cos(angle), y + radius * np.sin(angle)], axis=1)
    return [spline(control, closed=True, samples=4)]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Outlines and drawing function of a kind of finding inside a lung."""

    outlines: Callable[[Lung, Part], list[Points]]
    draw: Callable[[Scene, Lung, Part, list[Points]], None]
    clipped: bool = True
    """Whether it is clipped at the border of the lung."""


def make_lung(chest: Chest, lateral: bool, side: str) -> Lung:
    """Return the projection of the lung on one side."""
    return LateralLung(chest, side) if lateral else FrontalLung(chest, side)


def draw_findings(scene: Scene, chest: Chest, lateral: bool, findings: Iterable[Finding]) -> None:
    """Draw every part of every finding once; findings may share parts."""
    for part in dict.fromkeys(part for finding in findings for part in finding.parts):
        if part.kind in FINDING_KINDS:
            kind = FINDING_KINDS[part.kind]
            lung = make_lung(chest, lateral, part.side)
            kind.draw(scene, lung, part, kind.outlines(lung, part))
        elif part.kind in DEVICES:
            draw_device(scene, (lateral_device if lateral else frontal_device)(chest, part))


def fractured_bones(chest: Chest, findings: Iterable[Finding]) -> FracturedBones:
    """Return the fractured bones, each as two lines (N, 2) with a step between them."""
    broken: FracturedBones = {}
    for part in (
        part for finding in findings for part in finding.parts if part.kind in ("rib", "clavicle")
    ):
        line, cut = fractured_bone(chest, part)
        step = np.array([0.0, (0.65 + 0.5 * part.extent) * (1 if part.seed % 2 else -1)])
        index = -1 if part.kind == "clavicle" else round(10 * part.t)
        broken[part.side, index] = (line[:cut], line[cut + 1 :] + step)
    return broken


def fractured_bone(chest: Chest, part: Part) -> tuple[Points, int]:
    """Return the intact bone (N, 2) and the index of its fracture."""
    ribs = posterior_ribs(chest, part.side)
    line = clavicle(chest, part.side) if part.kind == "clavicle" else ribs[round(10 * part.t)]
    return line, int(part.s * len(line))


def _lobar(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.add_opacity(outlines, 0.26 + 0.70 * part.extent, 0.35, 0.25, part.seed)
    frontal = isinstance(lung, FrontalLung)
    root = hilum(lung.chest, part.side) if frontal else lateral_hilum(lung.chest)
    fan = vessel_directions(part.side) if frontal else (-170.0, 130.0)
    tree = grow_tree(part_generator(part), root, fan, trunks=9, length=2.6)
    scene.bronchogram(outlines, [branches.lines_KN2 for branches in tree[1:4]], 0.2)
    scene.add_inside_lung(scene.surface.fill(outlines), 0.04 * part.extent)


def _patchy(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.add_opacity(outlines, 0.26 + 0.54 * part.extent, 0.42, 0.7, part.seed)


def _hazy(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.add_opacity(outlines, 0.30 + 0.35 * part.extent, 0.9, 0.3, part.seed)


def _haze(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.add_opacity(outlines, 0.05 + 0.62 * part.extent, 1.5, 0.75, part.seed)
    scene.surface.stroke(
        septal_lines(lung, part), 0.11, round(40 + 200 * part.extent), scene.detail
    )
    if part.side == "right" and isinstance(lung, FrontalLung):
        fissure = lung.point(
            np.linspace(0.3, 1.0, 6), 0.5 + 0.02 * np.sin(np.linspace(0, np.pi, 6))
        )
        scene.surface.stroke(
            [fissure], 0.10 + 0.12 * part.extent, round(50 + 150 * part.extent), scene.detail
        )
    scene.blurred_vessels = max(scene.blurred_vessels, 0.1 + 0.9 * part.extent)


def _bands(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.surface.fill(outlines, round(90 + 130 * part.extent), scene.detail)
    scene.add_opacity(outlines, 0.15 + 0.75 * part.extent, 0.16, 0.2, part.seed)


def _collapse(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.add_inside_lung(scene.surface.fill(outlines), 0.20)
    scene.add_opacity(outlines, 0.90, 0.12, 0.12, part.seed)


def _fluid(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    # the lungs overlap in the lateral view
    scene.add_fluid(outlines, 1.0 if isinstance(lung, FrontalLung) else 0.65)


def _gas(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.clear_detail(outlines)
    scene.add_opacity(outlines, -0.16, 0.25, 0.0, part.seed)
    border = collapsed_border(lung, part)
    collapsed = np.concatenate([border, lung.point(np.full(2, -0.1), np.array([1.0, 0.1]))])
    scene.add_opacity([collapsed], 0.08 + 0.34 * part.extent, 0.3, 0.0, part.seed)
    scene.surface.stroke([border], 0.13, 210, scene.detail)


def _nodule(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    ball = scene.surface.blank()
    middles = [outline.mean(axis=0) for outline in outlines]
    for share in (1.0, 0.92, 0.8, 0.62, 0.4):  # thickness of a sphere
        value = (70 + 110 * math.sqrt(1.02 - share**2)) * min(1.35, 0.8 + 0.15 * part.size)
        shells = [
            middle + share * (outline - middle)
            for middle, outline in zip(middles, outlines, strict=True)
        ]
        scene.surface.fill(shells, min(255, round(value)), ball)
    scene.add_inside_lung(ball, 0.36)


def _thickening(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.add_fluid(outlines, 0.85)


def _plaque(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.add(scene.surface.fill(outlines), 0.2 + 0.12 * part.extent)


FINDING_KINDS = {
    "lobar": Kind(patch, _lobar),
    "patchy": Kind(patches, _patchy),
    "hazy": Kind(patch, _hazy),
    "haze": Kind(butterfly, _haze),
    "bands": Kind(bands, _bands),
    "collapse": Kind(wedge, _collapse),
    "fluid": Kind(meniscus, _fluid),
    "gas": Kind(free_gas, _gas),
    "nodule": Kind(nodule, _nodule),
    "thickening": Kind(pleural_thickening, _thickening),
    "apical cap": Kind(apical_cap, _thickening),
    "plaque": Kind(plaque, _plaque, clipped=False),
}
"""`Part.kind` -> appearance. Devices, bones and changes of shape are drawn elsewhere."""


# Ground truth of a view: masks and boxes of its findings in pixels, at any image size.

_MIN_PIXELS = 4  # parts with fewer visible pixels are outside the image


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Bounding box of one part of a finding, in pixels."""

    label: str
    side: str
    zone: str
    x: int
    y: int
    width: int
    height: int


def boxes(view: View, size: int = 512) -> list[Box]:
    """Return a box for every visible part of a finding, in pixels of `draw(view, size)`."""
    result = []
    for label, part, mask_HW in part_masks(view, size):
        x, y, width, height = cv2.boundingRect(mask_HW)
        result.append(
            Box(label=label, side=part.side, zone=part.zone, x=x, y=y, width=width, height=height)
        )
    return result


def masks(view: View, size: int = 512) -> dict[str, NDArray[np.bool_]]:
    """Return label -> bool mask (H, W) of the visible findings, in pixels of `draw(view, size)`."""
    union: dict[str, NDArray[np.bool_]] = {}
    for label, _, mask_HW in part_masks(view, size):
        visible_HW = mask_HW > 0
        union[label] = union[label] | visible_HW if label in union else visible_HW
    return union


def part_masks(view: View, size: int) -> Iterator[tuple[str, Part, Canvas]]:
    """Yield label, part and mask (H, W; 0 or 255) of every visible part."""
    surface = Surface(view.camera, view.camera.shape(size))
    lungs = surface.fill([make_lung(view.chest, view.lateral, side).outline() for side in SIDES])
    for finding in view.findings:
        for part in finding.parts:
            mask_HW = surface.fill(_outlines(view, finding.label, part))
            if part.kind in FINDING_KINDS and FINDING_KINDS[part.kind].clipped:
                mask_HW = cv2.bitwise_and(mask_HW, lungs)
            _, mask_HW = cv2.threshold(mask_HW, 127, 255, cv2.THRESH_BINARY)
            if cv2.countNonZero(mask_HW) >= _MIN_PIXELS:
                yield finding.label, part, mask_HW


def _outlines(view: View, label: str, part: Part) -> list[Points]:
    """Return closed outlines (N, 2) in centimetres; none if the part is invisible in this
    projection.
    """
    chest = view.chest
    lateral = view.lateral
    if part.kind in FINDING_KINDS:
        return FINDING_KINDS[part.kind].outlines(make_lung(chest, lateral, part.side), part)
    if part.kind in DEVICES:
        return (lateral_device if lateral else frontal_device)(chest, part).outlines()
    if part.kind in ("rib", "clavicle"):
        if lateral:
            return []  # rib fractures are invisible in lateral views
        line, cut = fractured_bone(chest, part)
        return [ellipse((line[cut, 0], line[cut, 1]), (1.4, 1.4))]
    if label == "Cardiomegaly":
        return [lateral_heart(chest) if lateral else heart_outline(chest)]
    return [great_vessels(chest) if lateral else mediastinum_outline(chest)]
