"""Chest CTs as volumes in Hounsfield units, and masks of their findings.

Axes of arrays are (z, y, x): z to the head, y to the back, x to the patient's left.
"""

import dataclasses

import numpy as np
from scipy import ndimage

from medvl.phantom.population.volumes import (
    HEART,
    LUNG_CENTER,
    LUNG_RADII,
    ChestCT,
    CTFinding,
    Point,
)
from medvl.phantom.population.world import generator

_STREAM = 71
_OUTSIDE = -1024
_AIR = -1000
_FAT = -100
_LUNG = -850
_EMPHYSEMA = -950
_MUSCLE = 50
_BLOOD = 45
_FLUID = 10
_LIVER = 60
_MASS = 40
_BONE = 700
_CALCIUM = 500
_BODY = (0.0, 16.0, 16.5)
"""Half axes of the trunk in cm; the first is not used."""
FIELD = (30.0, 36.0, 36.0)
"""Centimetres along (z, y, x)."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Grid:
    """Coordinates of voxel centres in cm, each to be broadcast to (D, H, W)."""

    z: np.ndarray
    y: np.ndarray
    x: np.ndarray
    voxel: Point

    @classmethod
    def of(cls, chest: ChestCT, shape: tuple[int, int, int]) -> "_Grid":
        sides = []
        for axis, (count, field) in enumerate(zip(shape, FIELD, strict=True)):
            place = ((np.arange(count) + 0.5) / count - 0.5) * field / chest.stretch[axis]
            sides.append(place.astype(np.float32))
        voxel = tuple(field / count for field, count in zip(FIELD, shape, strict=True))
        return cls(
            sides[0][:, None, None],
            sides[1][:, None],
            sides[2],
            (voxel[0], voxel[1], voxel[2]),
        )

    def ellipsoid(self, center: Point, radii: Point) -> np.ndarray:
        """Return the share of each voxel inside, with an edge of about one voxel."""
        distance = np.sqrt(
            ((self.z - center[0]) / radii[0]) ** 2
            + ((self.y - center[1]) / radii[1]) ** 2
            + ((self.x - center[2]) / radii[2]) ** 2
        )
        return _share((1 - distance) * min(radii), max(self.voxel[1:]))

    def tube(self, y: float, x: float, radii: tuple[float, float]) -> np.ndarray:
        """Return the share of each voxel inside an elliptic cylinder along z."""
        distance = np.sqrt(((self.y - y) / radii[0]) ** 2 + ((self.x - x) / radii[1]) ** 2)
        return _share((1 - distance) * min(radii), max(self.voxel[1:]))


def _share(depth: np.ndarray, edge: float) -> np.ndarray:
    """Return 0..1 for the distance below a surface in cm."""
    return np.clip(depth / edge + 0.5, 0, 1)


def draw_volume(
    chest: ChestCT, shape: tuple[int, int, int], *, reconstruction: int = 0
) -> np.ndarray:
    """Return int16 Hounsfield units (D, H, W) of the field of 30 x 36 x 36 cm.

    Args:
        chest: from `sample_chest_ct`.
        shape: voxels along (z, y, x).
        reconstruction: 0 is a smooth kernel; others are sharper, with other and stronger noise.
    """
    grid = _Grid.of(chest, shape)
    hu = np.full(shape, float(_AIR), np.float32)
    body = grid.tube(0, 0, (_BODY[1] * 0.66, _BODY[2]))
    _paint(hu, body, _FAT)
    _paint(hu, grid.tube(0, 0, (_BODY[1] * 0.66 - 0.9, _BODY[2] - 0.9)), _MUSCLE)
    rings = np.sqrt((grid.y / (_BODY[1] * 0.62)) ** 2 + (grid.x / (_BODY[2] * 0.94)) ** 2)
    spaces = np.cos(2 * np.pi * (grid.z + 0.35 * grid.y) / 3.2) > 0.2  # tilted down to the front
    _paint(hu, ((abs(rings - 0.95) < 0.04) & spaces).astype(np.float32), _BONE)
    lungs = _lungs(grid)
    _paint(hu, lungs, _LUNG)
    for vessel in chest.vessels:
        _paint(hu, np.minimum(grid.tube(vessel.y, vessel.x, (vessel.radius,) * 2), lungs), _MASS)
    _paint(hu, grid.ellipsoid((-16.0, 0.0, -6.5), (8.0, 8.5, 8.5)), _LIVER)
    _paint(hu, grid.tube(8.2, 0, (1.9, 2.2)), _BONE)
    _paint(hu, grid.tube(5.2, 2.4, (1.4, 1.4)), _BLOOD)
    heart = next((each.radii for each in chest.findings if each.name == "Cardiomegaly"), HEART[1])
    for finding in chest.findings:  # around the heart, so before it
        if finding.name == "Pericardial effusion":
            _paint(hu, _around_heart(grid, heart, finding), _FLUID)
    _paint(hu, grid.ellipsoid(HEART[0], heart), _BLOOD)
    present = {finding.name: finding for finding in chest.findings}
    for name, value in _TISSUES.items():
        if name in present:
            _paint(hu, _region(grid, present[name], lungs), value)
    return _reconstruct(hu, chest, grid, reconstruction)


_TISSUES = {
    "Emphysema": _EMPHYSEMA,
    "Consolidation": 20,
    "Pleural effusion": _FLUID,
    "Lung nodule": _MASS,
    "Arterial wall calcification": _CALCIUM,
}
"""Findings inside of organs, in the order in which they are painted."""


def finding_masks(chest: ChestCT, shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Return the bool mask (D, H, W) of each finding; of an enlarged heart, the heart."""
    grid = _Grid.of(chest, shape)
    lungs = _lungs(grid)
    heart = next((each.radii for each in chest.findings if each.name == "Cardiomegaly"), HEART[1])
    masks = {}
    for finding in chest.findings:
        if finding.name == "Cardiomegaly":
            share = grid.ellipsoid(HEART[0], heart)
        elif finding.name == "Pericardial effusion":
            share = _around_heart(grid, heart, finding) - grid.ellipsoid(HEART[0], heart)
        else:
            share = _region(grid, finding, lungs)
        masks[finding.name] = share > 0.5
    return masks


def organ_numbers(chest: ChestCT, shape: tuple[int, int, int]) -> np.ndarray:
    """Return the structures of a volume, uint8 (D, H, W), with the numbers of TotalSegmentator 2.

    They are lobes of the lungs, the liver, the heart, the aorta, and the esophagus, which has the
    density of the tissue around it; the last two end within the volume.
    """
    grid = _Grid.of(chest, shape)
    out_DHW = np.zeros(shape, np.uint8)

    def draw(share: np.ndarray, number: int) -> None:
        out_DHW[np.broadcast_to(share, shape) > 0.5] = number

    z, y, x = LUNG_CENTER
    for side, lobes in ((1, (10, 11)), (-1, (12, 13, 14))):
        lung = grid.ellipsoid((z, y, side * x), LUNG_RADII)
        for place, number in enumerate(lobes):  # from the head down
            draw(lung * (grid.z < LUNG_RADII[0] * (1 - 2 * place / len(lobes))), number)
    draw(grid.ellipsoid((-16.0, 0.0, -6.5), (8.0, 8.5, 8.5)), 5)
    thorax = abs(grid.z) < 0.8 * FIELD[0] / 2
    draw(grid.tube(3.4, -0.2, (0.9, 0.9)) * thorax, 15)
    draw(grid.tube(5.2, 2.4, (1.4, 1.4)) * thorax, 52)
    heart = next((each.radii for each in chest.findings if each.name == "Cardiomegaly"), HEART[1])
    draw(grid.ellipsoid(HEART[0], heart), 51)
    return out_DHW


def _paint(hu: np.ndarray, share: np.ndarray, value: float) -> None:
    hu += (value - hu) * share


def _lungs(grid: _Grid) -> np.ndarray:
    z, y, x = LUNG_CENTER
    return np.maximum(grid.ellipsoid((z, y, x), LUNG_RADII), grid.ellipsoid((z, y, -x), LUNG_RADII))


def _around_heart(grid: _Grid, heart: Point, finding: CTFinding) -> np.ndarray:
    z, y, x = (side + more for side, more in zip(heart, finding.radii, strict=True))
    return grid.ellipsoid(HEART[0], (z, y, x))


def _region(grid: _Grid, finding: CTFinding, lungs: np.ndarray) -> np.ndarray:
    z, y, x = finding.center
    if finding.name == "Pleural effusion":  # of a patient on the back: fluid lies behind
        side = grid.ellipsoid((0.0, 0.0, x), LUNG_RADII)
        level = _share(z + finding.radii[0] - grid.z, grid.voxel[0])
        behind = _share(grid.y - (y - finding.radii[1]), grid.voxel[1])
        return side * level * behind
    if finding.name == "Arterial wall calcification":
        wall = grid.tube(y, x, (1.5, 1.5)) - grid.tube(y, x, (0.9, 0.9))
        plaques = (abs(grid.z) < finding.radii[0]) & (np.cos(2 * np.pi * grid.z / 4) > 0)
        return wall * plaques
    return np.minimum(grid.ellipsoid(finding.center, finding.radii), lungs)


def _reconstruct(hu: np.ndarray, chest: ChestCT, grid: _Grid, reconstruction: int) -> np.ndarray:
    """Add correlated noise, sharpen, and cut the scanner's circle."""
    rng = generator(*chest.key, _STREAM, reconstruction)
    noise = rng.standard_normal(hu.shape, np.float32)
    if reconstruction == 0:
        noise = ndimage.gaussian_filter(noise, 0.8)
        noise /= noise.std()
    else:
        hu = hu + 0.5 * (hu - ndimage.gaussian_filter(hu, 0.8))
    hu = hu + noise * chest.noise * (1 + reconstruction)
    place = np.hypot(grid.y * chest.stretch[1], grid.x * chest.stretch[2])
    hu = np.where(place > FIELD[1] / 2, _OUTSIDE, np.maximum(hu, _OUTSIDE))
    return np.rint(hu).astype(np.int16)
