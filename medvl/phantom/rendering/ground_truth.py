"""Ground truth of a view: masks and boxes of its findings in pixels, at any image size."""

import dataclasses
from collections.abc import Iterator

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.phantom.geometry import Canvas, Points, Surface, ellipse
from medvl.phantom.population.devices import DEVICES, frontal_device, lateral_device
from medvl.phantom.population.findings import Part
from medvl.phantom.population.frontal_anatomy import SIDES, heart_outline, mediastinum_outline
from medvl.phantom.population.lateral_anatomy import great_vessels, lateral_heart
from medvl.phantom.population.world import View
from medvl.phantom.rendering.findings import FINDING_KINDS, fractured_bone, make_lung

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
    for label, part, mask_HW in _parts(view, size):
        x, y, width, height = cv2.boundingRect(mask_HW)
        result.append(
            Box(label=label, side=part.side, zone=part.zone, x=x, y=y, width=width, height=height)
        )
    return result


def masks(view: View, size: int = 512) -> dict[str, NDArray[np.bool_]]:
    """Return label -> bool mask (H, W) of the visible findings, in pixels of `draw(view, size)`."""
    union: dict[str, NDArray[np.bool_]] = {}
    for label, _, mask_HW in _parts(view, size):
        visible_HW = mask_HW > 0
        union[label] = union[label] | visible_HW if label in union else visible_HW
    return union


def _parts(view: View, size: int) -> Iterator[tuple[str, Part, Canvas]]:
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
