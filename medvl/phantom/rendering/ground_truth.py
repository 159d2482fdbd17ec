"""Where the findings of a view are: masks and boxes in the pixels of an image of any size."""

import dataclasses
from collections.abc import Iterator

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.phantom.geometry import Canvas, Points, Surface, ellipse
from medvl.phantom.population.devices import DEVICES, frontal_device, lateral_device
from medvl.phantom.population.finding_sites import Part
from medvl.phantom.population.frontal_anatomy import SIDES, heart_outline, mediastinum_outline
from medvl.phantom.population.lateral_anatomy import great_vessels, lateral_heart
from medvl.phantom.population.world import View
from medvl.phantom.rendering.findings import KINDS, fractured_bone, lung_of

_LEAST_PIXELS = 4  # a part of which less is seen is out of the picture


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """The smallest upright rectangle around one part of one finding, in pixels of the image it was asked for."""

    label: str
    side: str
    zone: str
    x: int
    y: int
    width: int
    height: int


def boxes(view: View, size: int = 512) -> list[Box]:
    """One box for every part of a finding that this view shows, in an image as `draw(view, size)` makes it."""
    found = []
    for label, part, mask_HW in _parts(view, size):
        x, y, width, height = cv2.boundingRect(mask_HW)
        found.append(Box(label=label, side=part.side, zone=part.zone, x=x, y=y, width=width, height=height))
    return found


def masks(view: View, size: int = 512) -> dict[str, NDArray[np.bool_]]:
    """Label -> bool (H, W), True where this view shows the finding; findings that it does not show have no entry."""
    united: dict[str, NDArray[np.bool_]] = {}
    for label, _, mask_HW in _parts(view, size):
        shown = mask_HW > 0
        united[label] = united[label] | shown if label in united else shown
    return united


def _parts(view: View, size: int) -> Iterator[tuple[str, Part, Canvas]]:
    """Label, part and mask (H, W; 0 or 255) of everything that the view shows."""
    surface = Surface(view.camera, view.camera.shape(size))
    lungs = surface.fill([lung_of(view.chest, view.lateral, side).outline() for side in SIDES])
    for finding in view.findings:
        for part in finding.parts:
            mask_HW = surface.fill(_outlines(view, finding.label, part))
            if part.kind in KINDS and KINDS[part.kind].clipped:
                mask_HW = cv2.bitwise_and(mask_HW, lungs)
            _, mask_HW = cv2.threshold(mask_HW, 127, 255, cv2.THRESH_BINARY)
            if cv2.countNonZero(mask_HW) >= _LEAST_PIXELS:
                yield finding.label, part, mask_HW


def _outlines(view: View, label: str, part: Part) -> list[Points]:
    """Closed outlines (N, 2) in centimetres; none where this projection hides the part."""
    chest, lateral = view.chest, view.lateral
    if part.kind in KINDS:
        return KINDS[part.kind].outlines(lung_of(chest, lateral, part.side), part)
    if part.kind in DEVICES:
        return (lateral_device if lateral else frontal_device)(chest, part).outlines()
    if part.kind in ("rib", "clavicle"):
        if lateral:
            return []  # broken ribs do not show from the side
        line, cut = fractured_bone(chest, part)
        return [ellipse((line[cut, 0], line[cut, 1]), (1.4, 1.4))]
    if label == "Cardiomegaly":
        return [lateral_heart(chest) if lateral else heart_outline(chest)]
    return [great_vessels(chest) if lateral else mediastinum_outline(chest)]
