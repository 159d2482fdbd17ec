"""Appearance of each kind of finding: its outlines and its effect on a scene."""

import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np

from medvl.phantom.geometry import Points
from medvl.phantom.population.devices import DEVICES, frontal_device, lateral_device
from medvl.phantom.population.finding_sites import Part
from medvl.phantom.population.findings import Finding
from medvl.phantom.population.frontal_anatomy import Chest, FrontalLung, clavicle, hilum, posterior_ribs
from medvl.phantom.population.lateral_anatomy import LateralLung, lateral_hilum
from medvl.phantom.rendering import outlines as shape
from medvl.phantom.rendering.devices import draw_device
from medvl.phantom.rendering.frontal import FracturedBones
from medvl.phantom.rendering.outlines import Lung, part_generator
from medvl.phantom.rendering.scene import Scene
from medvl.phantom.rendering.vessels import grow_tree, vessel_directions


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
            kind, lung = FINDING_KINDS[part.kind], make_lung(chest, lateral, part.side)
            kind.draw(scene, lung, part, kind.outlines(lung, part))
        elif part.kind in DEVICES:
            draw_device(scene, (lateral_device if lateral else frontal_device)(chest, part))


def fractured_bones(chest: Chest, findings: Iterable[Finding]) -> FracturedBones:
    """Return the fractured bones, each as two lines (N, 2) with a step between them."""
    broken: FracturedBones = {}
    for part in (part for finding in findings for part in finding.parts if part.kind in ("rib", "clavicle")):
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
    scene.surface.stroke(shape.septal_lines(lung, part), 0.11, round(40 + 200 * part.extent), scene.detail)
    if part.side == "right" and isinstance(lung, FrontalLung):
        fissure = lung.point(np.linspace(0.3, 1.0, 6), 0.5 + 0.02 * np.sin(np.linspace(0, np.pi, 6)))
        scene.surface.stroke([fissure], 0.10 + 0.12 * part.extent, round(50 + 150 * part.extent), scene.detail)
    scene.blurred_vessels = max(scene.blurred_vessels, 0.1 + 0.9 * part.extent)


def _bands(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.surface.fill(outlines, round(90 + 130 * part.extent), scene.detail)
    scene.add_opacity(outlines, 0.15 + 0.75 * part.extent, 0.16, 0.2, part.seed)


def _collapse(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.add_inside_lung(scene.surface.fill(outlines), 0.20)
    scene.add_opacity(outlines, 0.90, 0.12, 0.12, part.seed)


def _fluid(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.add_fluid(outlines, 1.0 if isinstance(lung, FrontalLung) else 0.65)  # the lungs overlap in the lateral view


def _gas(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.clear_detail(outlines)
    scene.add_opacity(outlines, -0.16, 0.25, 0.0, part.seed)
    border = shape.collapsed_border(lung, part)
    collapsed = np.concatenate([border, lung.point(np.full(2, -0.1), np.array([1.0, 0.1]))])
    scene.add_opacity([collapsed], 0.08 + 0.34 * part.extent, 0.3, 0.0, part.seed)
    scene.surface.stroke([border], 0.13, 210, scene.detail)


def _nodule(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    ball = scene.surface.blank()
    middles = [outline.mean(axis=0) for outline in outlines]
    for share in (1.0, 0.92, 0.8, 0.62, 0.4):  # thickness of a sphere
        value = (70 + 110 * math.sqrt(1.02 - share**2)) * min(1.35, 0.8 + 0.15 * part.size)
        shells = [middle + share * (outline - middle) for middle, outline in zip(middles, outlines, strict=True)]
        scene.surface.fill(shells, min(255, round(value)), ball)
    scene.add_inside_lung(ball, 0.36)


def _thickening(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.add_fluid(outlines, 0.85)


def _plaque(scene: Scene, lung: Lung, part: Part, outlines: list[Points]) -> None:
    scene.add(scene.surface.fill(outlines), 0.2 + 0.12 * part.extent)


FINDING_KINDS = {
    "lobar": Kind(shape.patch, _lobar),
    "patchy": Kind(shape.patches, _patchy),
    "hazy": Kind(shape.patch, _hazy),
    "haze": Kind(shape.butterfly, _haze),
    "bands": Kind(shape.bands, _bands),
    "collapse": Kind(shape.wedge, _collapse),
    "fluid": Kind(shape.meniscus, _fluid),
    "gas": Kind(shape.free_gas, _gas),
    "nodule": Kind(shape.nodule, _nodule),
    "thickening": Kind(shape.pleural_thickening, _thickening),
    "apical cap": Kind(shape.apical_cap, _thickening),
    "plaque": Kind(shape.plaque, _plaque, clipped=False),
}
"""`Part.kind` -> appearance. Devices, bones and changes of shape are drawn elsewhere."""
