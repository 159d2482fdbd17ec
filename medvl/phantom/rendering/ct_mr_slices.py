"""Axial CT and MR slices: what gives questions about modality, plane and organ more than one answer.

A slice is a few ellipses in centimetres, each of one tissue, and round masses in it. x grows towards the patient's left
(the right of the image), y towards the back. Nothing here measures anything: it looks like the organ and no more.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.phantom.geometry import Camera, Image, Points, Surface, ellipse
from medvl.phantom.rendering.film import WHITE
from medvl.phantom.rendering.noise import cutout, grain
from medvl.phantom.seeds import generator

ORGANS = ("head", "chest", "abdomen")
MODALITIES = ("CT", "MRI")
_TISSUES = {
    "air": (0.0, 0.02),
    "lung": (0.09, 0.05),
    "fat": (0.30, 0.62),
    "fluid": (0.40, 0.96),
    "muscle": (0.52, 0.36),
    "brain": (0.50, 0.52),
    "liver": (0.58, 0.42),
    "spleen": (0.60, 0.60),
    "kidney": (0.66, 0.70),
    "blood": (0.63, 0.12),
    "bone": (1.0, 0.07),
    "mass": (0.86, 0.90),
}
"""Brightness in CT and, T2-weighted, in MR."""
Region = tuple[str, float, float, float, float]
"""Tissue, centre x and y, radii."""
_ORGANS: Mapping[str, tuple[Region, ...]] = {
    "head": (
        ("fat", 0, 0, 7.6, 9.4),
        ("bone", 0, 0, 7.2, 9.0),
        ("brain", 0, 0, 6.5, 8.3),
        ("fluid", -1.1, -1.0, 0.6, 2.4),
        ("fluid", 1.1, -1.0, 0.6, 2.4),
    ),
    "chest": (
        ("fat", 0, 0, 17.5, 12.0),
        ("muscle", 0, 0, 16.3, 10.8),
        ("lung", -8.2, -0.4, 6.2, 8.6),
        ("lung", 8.2, -0.4, 6.2, 8.6),
        ("blood", 1.6, -3.2, 4.8, 4.2),
        ("bone", 0, -10.3, 1.6, 0.6),
        ("bone", 0, 6.8, 2.0, 1.8),
        ("blood", 2.8, 5.4, 1.2, 1.2),
    ),
    "abdomen": (
        ("fat", 0, 0, 17.0, 12.5),
        ("muscle", 0, 0, 15.4, 10.9),
        ("fat", 0, -1.0, 14.0, 9.0),
        ("liver", -7.0, -1.6, 6.2, 7.2),
        ("spleen", 9.6, 1.8, 3.4, 4.4),
        ("kidney", -6.6, 6.0, 2.2, 2.6),
        ("kidney", 6.6, 6.0, 2.2, 2.6),
        ("bone", 0, 6.6, 2.2, 1.9),
        ("blood", 1.0, 3.6, 1.1, 1.1),
    ),
}
_SEATS: Mapping[str, tuple[float, float, float]] = {
    "head": (3.6, 1.0, 3.4),
    "chest": (8.4, 0.6, 4.0),
    "abdomen": (7.6, -1.8, 3.0),
}
"""Where masses sit: distance from the midline, y, and how far they stray."""
_FIELD = {"head": 22.0, "chest": 39.0, "abdomen": 38.0}
_DIAMETERS = (2.0, 4.0)
"""Centimetres: nobody has to tell 2.9 from 3.1. In the head they are half as large."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mass:
    """A round mass."""

    x: float
    y: float
    diameter: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """One slice: everything that `draw_slice` needs."""

    organ: str
    modality: str
    side: str
    """Of the masses; "" where there are none."""
    masses: tuple[Mass, ...]
    camera: Camera
    stretch: tuple[float, float]
    """Of this body against the table's, in x and y."""
    key: tuple[int, ...]

    @property
    def diameter(self) -> float:
        """Of the masses, which are all alike, in centimetres; 0 where there are none."""
        return max((mass.diameter for mass in self.masses), default=0.0)


def take_slice(key: tuple[int, ...]) -> Slice:
    """One slice, decided by `key` (a seed first)."""
    rng = generator(*key)
    organ, modality = str(rng.choice(ORGANS)), str(rng.choice(MODALITIES))
    side = str(rng.choice(["right", "left"]))
    count = int(rng.choice([0, 1, 2, 3], p=[0.4, 0.24, 0.2, 0.16]))
    diameter = float(rng.choice(_DIAMETERS)) * (0.5 if organ == "head" else 1.0)
    camera = Camera(
        field=_FIELD[organ] * float(rng.uniform(0.95, 1.1)),
        aspect=1.0,
        center=(float(rng.normal(0, 0.4)), float(rng.normal(0, 0.4))),
        degrees=float(rng.normal(0, 3.0)),
    )
    return Slice(
        organ=organ,
        modality=modality,
        side=side if count else "",
        masses=tuple(_masses(rng, organ, side, count, diameter)),
        camera=camera,
        stretch=(float(rng.uniform(0.92, 1.06)), float(rng.uniform(0.92, 1.06))),
        key=key,
    )


def draw_slice(part: Slice, size: int = 512) -> NDArray[np.uint16]:
    """The slice as a 12-bit image (size, size), 0 to 4095. The same slice at another size shows the same body."""
    surface = Surface(part.camera, part.camera.shape(size))
    rng = generator(*part.key, 1)
    masses: list[Region] = [("mass", m.x, m.y, m.diameter / 2, m.diameter / 2) for m in part.masses]
    image_HW = np.zeros(surface.shape_HW, np.float32)
    for tissue, outline in _outlines([*_ORGANS[part.organ], *masses], part.stretch):
        level = _TISSUES[tissue][MODALITIES.index(part.modality)] * float(rng.uniform(0.94, 1.06))
        cover_HW = surface.fill([outline]).astype(np.float32) / 255
        image_HW += cover_HW * (level - image_HW)
    image_HW = surface.blur(image_HW, 0.09)
    noise_HW: Image = cutout(grain(), image_HW.shape[:2], rng)
    cv2.addWeighted(image_HW, 1.0, noise_HW, 0.02, 0.0, dst=image_HW)
    return (np.clip(image_HW, 0.0, 1.0) * WHITE + 0.5).astype(np.uint16)


def _masses(rng: np.random.Generator, organ: str, side: str, count: int, diameter: float) -> list[Mass]:
    """Masses of one side that do not touch: around the middle of their seat, a third of a turn apart."""
    x, y, stray = _SEATS[organ]
    away = 0.0 if count == 1 else max(0.62 * diameter + 0.35, 0.55 * stray)
    turns = rng.uniform(0, 2 * np.pi) + np.arange(count) * 2 * np.pi / max(1, count)
    sign = -1 if side == "right" else 1
    return [
        Mass(x=sign * (x + 0.8 * away * float(np.cos(turn))), y=y + away * float(np.sin(turn)), diameter=diameter)
        for turn in turns
    ]


def _outlines(regions: Sequence[Region], stretch: tuple[float, float]) -> list[tuple[str, Points]]:
    return [(tissue, ellipse((x, y), (rx, ry), points=48) * stretch) for tissue, x, y, rx, ry in regions]
