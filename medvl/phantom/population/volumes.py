"""Axial CT and MR slices of the population (organ, modality, masses and position), and chest CTs
(vessels, and findings with known place, size and side).

Coordinates of chest CTs are (z, y, x) in centimetres from the middle of the chest: z to the head, y
to the back, x to the patient's left.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from medvl.phantom.geometry import Camera
from medvl.phantom.population.world import generator

CT_FINDINGS: Mapping[str, float] = {
    "Lung nodule": 0.4,
    "Pleural effusion": 0.35,
    "Consolidation": 0.3,
    "Emphysema": 0.3,
    "Cardiomegaly": 0.3,
    "Pericardial effusion": 0.25,
    "Arterial wall calcification": 0.3,
}
"""Labels, named as in CT-RATE, and their shares of scans."""

_STREAM = 70
_SIDES = ("right", "left")
LUNG_CENTER = (0.0, 0.0, 7.5)
"""Center of the left lung; the right lung is its mirror image."""
LUNG_RADII = (11.0, 8.5, 5.8)
Point = tuple[float, float, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CTFinding:
    """A finding, and what draws it."""

    name: str
    side: str
    """right or left; "" where it has none."""
    center: Point
    radii: Point
    """Half axes. Of a pleural effusion, the first is the height of its level above the base of the
    lung; of an enlarged heart, all are those of the heart.
    """

    @property
    def diameter_mm(self) -> float:
        """Largest diameter in millimetres."""
        return 20 * max(self.radii)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Vessel:
    """A tube along z with the radii of nodules: in one slice, the two look alike.

    Nodules are 12 to 28 mm wide. At 16 x 32 x 32 voxels, half of them fill at most two voxels to
    half, and a fifth fill none; at 32 x 64 x 64, the median is 14 voxels. The largest brightness in
    the upper lungs above that of the same place 37.5 mm (28 mm) higher and lower finds the scans
    with a nodule with an AUROC of 0.963 (0.990), the largest brightness alone with 0.507 (0.510). A
    model has to learn this comparison: logistic regression on the 256 voxels of a patch of 4 x 8 x
    8 has 0.592 with 900 scans and 0.751 with 4,400, but 0.878 and 0.896 on the rectified difference
    between the inner and the outer slices of the patch. Encoders that are trained with labels do
    not find it in 400 steps of 64 scans: 0.524 with patches of 4 x 8 x 8 on 1,100 scans; on 4,400,
    0.521 with a convolutional stem alone, and 0.497 with patches of 4 x 4 x 4 after 450 steps.
    """

    y: float
    x: float
    radius: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChestCT:
    """A scan, with everything that `draw_volume` needs."""

    key: tuple[int, ...]
    findings: tuple[CTFinding, ...]
    vessels: tuple[Vessel, ...]
    stretch: Point
    """Scale of the body relative to the standard one."""
    noise: float
    """Standard deviation in Hounsfield units."""

    @property
    def labels(self) -> dict[str, int]:
        """1 or 0 for each of `CT_FINDINGS`."""
        present = {finding.name for finding in self.findings}
        return {name: int(name in present) for name in CT_FINDINGS}


def sample_chest_ct(key: tuple[int, ...]) -> ChestCT:
    """Return the chest CT of a `key` (a seed first)."""
    rng = generator(*key, _STREAM)
    findings = [_finding(rng, name) for name, share in CT_FINDINGS.items() if rng.random() < share]
    vessels = [_vessel(rng) for _ in range(int(rng.integers(2, 5)))]
    scales = rng.uniform(0.94, 1.06, 3).tolist()
    return ChestCT(
        key=key,
        findings=tuple(findings),
        vessels=tuple(vessels),
        stretch=(scales[0], scales[1], scales[2]),
        noise=float(rng.uniform(10, 30)),
    )


def _finding(rng: np.random.Generator, name: str) -> CTFinding:
    side = str(rng.choice(_SIDES)) if name not in _MIDDLE else ""
    sign = -1 if side == "right" else 1
    z, y, x = _in_upper_lung(rng)
    center = (z, y, sign * x)
    if name == "Lung nodule":
        radius = float(rng.uniform(0.6, 1.4))
        radii = (radius, radius, radius)
    elif name == "Consolidation":
        center = (float(rng.uniform(-6.0, -4.0)), 2.0, sign * LUNG_CENTER[2])
        radii = tuple(rng.uniform(2.2, 3.4, 3).tolist())
    elif name == "Emphysema":
        center = (0.6 * LUNG_RADII[0], 0.0, sign * LUNG_CENTER[2])
        radii = tuple(rng.uniform((4.0, 3.5, 3.0), (5.0, 5.0, 4.0)).tolist())
    elif name == "Pleural effusion":
        center = (-LUNG_RADII[0], LUNG_RADII[1], sign * LUNG_CENTER[2])
        radii = (float(rng.uniform(7, 12)), 6.0, LUNG_RADII[2])
    else:
        center, radii = _MIDDLE[name]
    return CTFinding(name=name, side=side, center=center, radii=(radii[0], radii[1], radii[2]))


HEART = ((-3.0, -3.0, 2.4), (4.8, 4.2, 5.0))
"""Center and half axes."""
_MIDDLE: Mapping[str, tuple[Point, Point]] = {
    "Cardiomegaly": (HEART[0], (6.0, 5.6, 7.4)),
    "Pericardial effusion": (HEART[0], (1.2, 1.2, 1.2)),
    "Arterial wall calcification": ((0.0, 5.2, 2.4), (8.0, 1.4, 1.4)),
}
"""Findings without a side."""


def _vessel(rng: np.random.Generator) -> Vessel:
    _, y, x = _in_upper_lung(rng)
    sign = float(rng.choice([-1, 1]))
    return Vessel(y=y, x=sign * x, radius=float(rng.uniform(0.6, 1.4)))


def _in_upper_lung(rng: np.random.Generator) -> Point:
    """Return a point in the upper half of the left lung, above an enlarged heart."""
    z, y, x = rng.uniform((0.3, -0.4, -0.3), (0.55, 0.4, 0.3))
    return (
        float(z) * LUNG_RADII[0],
        float(y) * LUNG_RADII[1],
        LUNG_CENTER[2] + float(x) * LUNG_RADII[2],
    )


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
