"""Axial CT and MR slices of the population: organ, modality, masses and position."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from medvl.phantom.geometry import Camera
from medvl.phantom.population.world import generator

ORGANS = ("head", "chest", "abdomen")
MODALITIES = ("CT", "MRI")
_MASS_SITES: Mapping[str, tuple[float, float, float]] = {
    "head": (3.6, 1.0, 3.4),
    "chest": (8.4, 0.6, 4.0),
    "abdomen": (7.6, -1.8, 3.0),
}
"""Location of masses: distance from the midline, y, and radius of variation."""
_FIELD = {"head": 22.0, "chest": 39.0, "abdomen": 38.0}
_DIAMETERS = (2.0, 4.0)
"""Centimetres, clearly below and above 3 cm; half as large in the head."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mass:
    """A round mass."""

    x: float
    y: float
    diameter: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A slice, with everything that `draw_slice` needs."""

    organ: str
    modality: str
    side: str
    """Side of the masses; "" if there are none."""
    masses: tuple[Mass, ...]
    camera: Camera
    stretch: tuple[float, float]
    """Scale of the body relative to the standard one, in x and y."""
    key: tuple[int, ...]

    @property
    def diameter(self) -> float:
        """Diameter of the masses in centimetres, equal for all; 0 if there are none."""
        return max((mass.diameter for mass in self.masses), default=0.0)


def sample_slice(key: tuple[int, ...]) -> Slice:
    """Return the slice of a `key` (a seed first)."""
    rng = generator(*key)
    organ = str(rng.choice(ORGANS))
    modality = str(rng.choice(MODALITIES))
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


def _masses(
    rng: np.random.Generator, organ: str, side: str, count: int, diameter: float
) -> list[Mass]:
    """Return masses on one side that do not touch, at equal angles around the middle of their
    site.
    """
    x, y, radius = _MASS_SITES[organ]
    offset = 0.0 if count == 1 else max(0.62 * diameter + 0.35, 0.55 * radius)
    angles = rng.uniform(0, 2 * np.pi) + np.arange(count) * 2 * np.pi / max(1, count)
    sign = -1 if side == "right" else 1
    return [
        Mass(
            x=sign * (x + 0.8 * offset * float(np.cos(angle))),
            y=y + offset * float(np.sin(angle)),
            diameter=diameter,
        )
        for angle in angles
    ]
