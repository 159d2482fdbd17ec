"""Parameters of a patient's chest, and the outlines of its frontal projection.

All lengths are in centimetres. Sides are the patient's: "left" is on the right of a frontal image.
Proportions are rounded textbook values for a plausible appearance; they are not measurements.
"""

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np

from medvl.phantom.geometry import Points, ellipse, spline
from medvl.phantom.population.findings import Finding

SIDES = ("right", "left")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chest:
    """Shape of a chest, at rest or in the pose of a view."""

    half_width: float
    """Maximum distance from the midline to the inner chest wall."""
    depth: float
    """Distance from the sternum to the front of the spine."""
    wall: float
    """Thickness of skin, fat and muscle over the ribs."""
    apex: float
    """y of the lung apices."""
    dome_right: float
    """y of the top of the right diaphragm."""
    dome_left: float
    angle_drop: float
    """Distance of the costophrenic angles below the domes."""
    heart_ratio: float
    """Cardiothoracic ratio: width of the heart divided by the inner width of the chest."""
    heart_right: float
    """Share of the heart's width right of the midline."""
    heart_tilt: float
    """-1 (upright heart) to 1 (horizontal heart with a raised apex)."""
    mediastinum: float
    """Half width of the upper mediastinum."""
    knob: float
    """Radius of the aortic knob."""
    rib_pitch: float
    """Distance between neighbouring ribs at the spine."""
    rib_slope: float
    """Vertical drop of a posterior rib from the spine to the side."""
    rib_width: float
    clavicle_tilt: float
    spine_bend: float
    """Sideways deviation of the spine in the middle; positive to the left."""
    breast: float
    """Radius of the breast shadows; 0 for none."""
    markings: float
    """Visibility of the vessels; 1 is typical."""
    shift: float = 0.0
    """Displacement of the mediastinum, positive to the left."""

    def dome(self, side: str) -> float:
        """Return y of the top of one diaphragm."""
        return self.dome_right if side == "right" else self.dome_left


def sample_chest(rng: np.random.Generator, sex: str, age: int) -> Chest:
    """Sample the chest of a patient of this sex ("F" or "M") and age."""
    female = sex == "F"
    half_width = rng.normal(12.6 if female else 13.8, 0.7)
    old = np.clip((age - 40) / 45, 0, 1)
    dome_right = rng.normal(9.6 if female else 10.4, 0.7)
    return Chest(
        half_width=float(np.clip(half_width, 11.0, 15.6)),
        depth=float(rng.normal(14.0 if female else 15.5, 0.9) + 1.5 * old),
        wall=float(np.clip(rng.gamma(4.0, 0.6) + 0.8, 1.2, 5.5)),
        apex=float(rng.normal(-11.3 if female else -12.0, 0.5)),
        dome_right=float(dome_right),
        dome_left=float(dome_right + rng.normal(0.9, 0.4)),
        angle_drop=float(np.clip(rng.normal(4.4, 0.9), 2.2, 6.0)),
        heart_ratio=float(np.clip(rng.normal(0.43 + 0.02 * old, 0.026), 0.37, 0.49)),
        heart_right=float(rng.normal(0.32, 0.025)),
        heart_tilt=float(rng.uniform(-1, 1)),
        mediastinum=float(rng.normal(2.7, 0.2) + 0.3 * old),
        knob=float(rng.normal(1.35, 0.12) + 0.55 * old),
        rib_pitch=float(rng.normal(2.35, 0.1)),
        rib_slope=float(rng.normal(3.2, 0.8)),
        rib_width=float(rng.normal(1.0, 0.08)),
        clavicle_tilt=float(rng.normal(1.8, 0.8)),
        spine_bend=float(rng.normal(0, 0.35) + rng.choice([-1.0, 0.0, 1.0], p=[0.06, 0.88, 0.06])),
        breast=float(np.clip(rng.normal(5.6, 0.9), 4.0, 7.5)) if female else 0.0,
        markings=float(np.clip(rng.normal(1.0, 0.16), 0.6, 1.5)),
    )


def sign(side: str) -> int:
    """Return +1 for the left side (right of the image), -1 for the right."""
    return 1 if side == "left" else -1


# Lateral and medial borders of the lung at fractions of its height, relative to the inner half
# width.
_KNOTS = np.array([0.0, 0.01, 0.03, 0.07, 0.14, 0.24, 0.4, 0.6, 0.8, 1.0])
_LEVELS, _LATERAL = spline(
    np.stack([_KNOTS, [0.42, 0.51, 0.59, 0.68, 0.785, 0.87, 0.95, 0.99, 1.0, 0.985]], 1)
).T
_MEDIAL = spline(
    np.stack([_KNOTS, [0.42, 0.33, 0.26, 0.20, 0.16, 0.14, 0.12, 0.12, 0.12, 0.12]], 1)
)[:, 1]
_DOWN = np.linspace(0, 1, 24) ** 2  # denser at the curved apex
_DOME = np.linspace(1, 0, 25)  # along the diaphragm: 1 at the angle, 0 at the midline
_DOME_OUTER = np.clip(2 * _DOME - 1, 0, 1) ** 2.4
_DOME_INNER = 7.0 * np.clip(0.5 - _DOME, 0, 1) ** 2


class FrontalLung:
    """Frontal projection of a lung; s runs from midline (0) to side (1), t from apex (0) to
    costophrenic angle (1).
    """

    def __init__(self, chest: Chest, side: str) -> None:
        self.chest = chest
        self.side = side
        self.sign = sign(side)
        self.top = chest.apex
        self.bottom = chest.dome(side) + chest.angle_drop

    def point(self, s: float | Points, t: float | Points) -> Points:
        """Convert lung coordinates to centimetres (..., 2)."""
        width = self.chest.half_width
        medial = np.interp(t, _LEVELS, _MEDIAL) * width
        lateral = np.interp(t, _LEVELS, _LATERAL) * width
        points = np.empty((*np.broadcast_shapes(np.shape(s), np.shape(t)), 2))
        points[..., 0] = self.sign * (medial + s * (lateral - medial))
        points[..., 1] = self.top + np.multiply(t, self.bottom - self.top)
        return points

    def diaphragm(self) -> Points:
        """Return the dome from the costophrenic angle to the midline, (N, 2)."""
        width = self.chest.half_width
        dome = self.chest.dome(self.side)
        rise = _DOME_OUTER * self.chest.angle_drop + _DOME_INNER
        return np.stack([self.sign * 0.97 * width * _DOME, dome + rise], axis=-1)

    def outline(self) -> Points:
        """Return the outline of the air-filled lung, (N, 2)."""
        lateral = self.point(1.0, _DOWN)
        diaphragm = self.diaphragm()
        inner = diaphragm[np.abs(diaphragm[:, 0]) > 0.12 * self.chest.half_width]
        last = (inner[-1, 1] - self.top) / (self.bottom - self.top)
        return np.concatenate([lateral, inner[1:], self.point(0.0, last * _DOWN[::-1])])


def heart_outline(chest: Chest) -> Points:
    """Return the outline of the heart with the root of the great vessels, (N, 2)."""
    width = 2 * chest.half_width * chest.heart_ratio
    right = width * chest.heart_right
    left = width * (1 - chest.heart_right)
    floor = max(chest.dome_right, chest.dome_left) + 0.9
    top = 0.3 - 9.0 * max(0.0, chest.heart_ratio - 0.5)  # an enlarged heart is also taller
    height = floor - top
    lift = 0.6 * chest.heart_tilt
    control = np.array([
        [-0.55 * right, top + 0.08 * height], [-0.86 * right, top + 0.30 * height],
        [-1.00 * right, top + 0.60 * height], [-0.86 * right, top + 0.88 * height],
        [-0.30 * right, top + 1.00 * height], [0.45 * left, top + 1.00 * height],
        [0.86 * left, top + 0.95 * height - lift], [1.00 * left, top + 0.80 * height - lift],
        [0.90 * left, top + 0.56 * height - 0.5 * lift], [0.68 * left, top + 0.30 * height],
        [0.47 * left, top + 0.10 * height], [0.38 * left, top - 0.06 * height], [0.05 * left,
        top - 0.12 * height],
    ])  # fmt: skip
    return spline(control, closed=True) + np.array([chest.shift, 0.0])


def mediastinum_outline(chest: Chest) -> Points:
    """Return the outline of the mediastinum above the heart, with the aortic knob, (N, 2)."""
    m = chest.mediastinum
    knob = chest.knob
    control = np.array([
        [-0.75 * m, -17.0], [-0.80 * m, -11.0], [-0.98 * m, -7.0], [-1.00 * m, -2.0], [-1.00 * m,
        2.5], [0.0, 5.0], [1.05 * m, 3.0], [1.12 * m, 0.8], [0.92 * m, -0.9],
        [0.85 * m + 0.55 * knob, -2.0], [0.80 * m + 0.85 * knob, -3.4], [0.80 * m + 0.45 * knob,
        -4.7], [0.85 * m, -6.2], [0.80 * m, -11.0], [0.75 * m, -17.0],
    ])  # fmt: skip
    control[:, 0] += chest.shift * np.clip((control[:, 1] + 17) / 12, 0, 1)
    return spline(control, closed=True)


def airways(chest: Chest) -> tuple[Points, list[Points]]:
    """Return the trachea as a line (N, 2) from the neck to the carina, and the two main bronchi."""
    shift = chest.shift
    trachea = spline([[0.0, -20.0], [0.1 * shift, -13.0], [0.15 + 0.7 * shift, -6.0], [shift, 0.0]])
    right = spline([[shift, -0.2], [shift - 1.5, 1.3], [shift - 3.2, 2.6]])
    left = spline([[shift, -0.2], [shift + 2.0, 1.0], [shift + 4.3, 1.7]])
    return trachea, [right, left]


def hilum(chest: Chest, side: str) -> tuple[float, float]:
    """Return (x, y) of a hilum, from which the vessels spread; the left one is higher."""
    return (sign(side) * 0.27 * chest.half_width + chest.shift, 1.9 if side == "right" else 1.0)


def posterior_ribs(chest: Chest, side: str) -> Points:
    """Return the posterior parts of ten ribs from the spine to the side, (10, N, 2)."""
    number = np.arange(10)
    start = -11.2 + chest.rib_pitch * number
    lung = FrontalLung(chest, side)
    end = start + np.linspace(1.6, 1.0, 10) * chest.rib_slope
    reach = (
        np.interp((end - lung.top) / (lung.bottom - lung.top), _LEVELS, _LATERAL) * chest.half_width
        - 0.1
    )
    fractions = np.array([0.0, 0.25, 0.55, 0.82, 1.0])
    x = 1.6 + fractions * (reach[:, None] - 1.6)
    drop = np.array([0.0, -0.16, -0.02, 0.42, 1.0])
    y = start[:, None] + drop * (end - start)[:, None]
    return spline(np.stack([sign(side) * x, y], axis=-1), samples=4)


def anterior_ribs(chest: Chest, side: str) -> Points:
    """Return the anterior parts of seven ribs, from the side down to the costal cartilage, (7,
    N, 2).
    """
    back = posterior_ribs(chest, side)[:7, -1]
    span = np.linspace(4.6, 6.4, 7)[:, None]
    fractions = np.array([0.0, 0.12, 0.4, 0.7, 1.0])
    reach = np.abs(back[:, :1])
    stop = np.linspace(3.6, 7.4, 7)[:, None]
    x = reach + fractions * (stop - reach)
    y = back[:, 1:] + span * np.array([0.0, 0.28, 0.62, 0.88, 1.0])
    return spline(np.stack([sign(side) * x, y], axis=-1), samples=4)


def clavicle(chest: Chest, side: str) -> Points:
    """Return the clavicle as a line from the sternum to the shoulder, (N, 2)."""
    s = sign(side)
    tilt = chest.clavicle_tilt
    reach = chest.half_width
    control = [
        [1.6, -7.6],
        [4.2, -8.6],
        [0.55 * reach, -9.0 - 0.5 * tilt],
        [1.15 * reach, -9.6 - 1.2 * tilt],
    ]
    return spline(np.array(control) * [s, 1.0])


def vertebrae(chest: Chest) -> Points:
    """Return the centres of the vertebral bodies from the neck down, (20, 2)."""
    y = -22.0 + 2.45 * np.arange(20)
    return np.stack(
        [chest.spine_bend * np.cos(np.clip((y - 2) / 16, -1, 1) * np.pi / 2), y], axis=1
    )


def scapula(chest: Chest, side: str) -> Points:
    """Return the outline of the scapula, mostly beside the lung, (N, 2)."""
    reach = chest.half_width
    control = [
        [0.86 * reach, -10.6], [1.22 * reach, -9.8], [1.16 * reach, -7.2], [1.00 * reach, 0.5],
        [0.93 * reach, -1.0],
    ]  # fmt: skip
    return spline(np.array(control) * [sign(side), 1.0], closed=True, samples=5)


def torso(chest: Chest) -> Points:
    """Return the outline of neck, shoulders and trunk, (N, 2)."""
    side = chest.half_width + chest.wall
    control = np.array([
        [4.9, -27.0], [5.0, -19.0], [6.6, -15.4], [0.72 * side, -13.9], [1.06 * side, -12.2],
        [1.28 * side, -8.5], [1.24 * side, -4.5], [1.04 * side, -0.5], [1.0 * side, 5.0],
        [0.985 * side, 12.0], [0.98 * side, 18.0], [1.02 * side, 30.0],
    ])  # fmt: skip
    half = spline(control)
    return np.concatenate([half, (half * [-1.0, 1.0])[::-1]])


def arm(chest: Chest, side: str, spread: float) -> Points:
    """Return the outline of the upper arm, (N, 2); `spread` moves it outwards."""
    base = chest.half_width + chest.wall
    control = np.array([
        [0.80 * base, -12.0], [1.20 * base, -11.6], [1.42 * base + 0.3 * spread, -7.0],
        [1.50 * base + 0.8 * spread, 2.0], [1.52 * base + 1.3 * spread, 16.0],
        [1.16 * base + 1.3 * spread, 16.0], [1.10 * base + 0.8 * spread, 4.0], [1.02 * base, -3.5],
    ])  # fmt: skip
    return spline(control * [sign(side), 1.0], closed=True)


def breast(chest: Chest, side: str) -> Points:
    """Return the outline of a breast shadow, whose lower edge is below the lung base, (N, 2)."""
    r = chest.breast
    return ellipse(
        (sign(side) * 0.60 * chest.half_width, chest.dome_right - 0.42 * r),
        (1.15 * r, r),
        sign(side) * 8,
    )


# Changes of a chest's shape by breathing, projection and findings.


def pose_chest(chest: Chest, position: str, breath: float, findings: Iterable[Finding]) -> Chest:
    """Return the chest, given at rest, in the pose of a view, with the shape changed by the
    findings.

    In AP views the heart is farther from the detector and magnified, and the patient inhales less.
    `breath` is the number of centimetres by which breathing lowers the diaphragms.
    """
    if position == "AP":
        chest = dataclasses.replace(chest, heart_ratio=1.06 * chest.heart_ratio)
        breath -= 0.9
    chest = dataclasses.replace(
        chest, dome_right=chest.dome_right + breath, dome_left=chest.dome_left + breath
    )
    for finding in findings:
        chest = _deform(chest, finding)
    return chest


def _deform(chest: Chest, finding: Finding) -> Chest:
    extent = finding.extent
    if finding.label == "Cardiomegaly":
        ratio = 0.498 + 0.165 * extent + (chest.heart_ratio - 0.45) / 2
        return dataclasses.replace(
            chest, heart_ratio=ratio, heart_right=chest.heart_right + 0.02 * extent
        )
    if finding.label == "Enlarged Cardiomediastinum":
        width_factor = 1.22 + 0.55 * extent
        knob = 1.15 + 0.55 * extent
        return dataclasses.replace(
            chest, mediastinum=chest.mediastinum * width_factor, knob=chest.knob * knob
        )
    for part in finding.parts:
        # volume loss pulls the diaphragm and the heart to its side
        if finding.label == "Atelectasis":
            lift, pull = (2.4, 1.5) if part.kind == "collapse" else (0.5 + 1.6 * part.extent, 0.0)
            chest = _shift_side(
                chest, part.side, lift * (0.3 if "upper" in part.zone else 1.0), pull
            )
        elif finding.label == "Pleural Effusion" and finding.side != "bilateral":
            chest = _shift_side(chest, part.side, 0.0, -1.6 * max(0.0, part.extent - 0.6) / 0.4)
        elif finding.label == "Pneumothorax":
            excess = max(0.0, part.extent - 0.5) / 0.5
            chest = _shift_side(chest, part.side, -1.2 * excess, -2.4 * excess)
    return chest


def _shift_side(chest: Chest, side: str, lift: float, pull: float) -> Chest:
    """Return the chest with one diaphragm raised by `lift` and the mediastinum moved to its side
    by `pull` cm.
    """
    shift = chest.shift + sign(side) * pull
    if side == "right":
        return dataclasses.replace(chest, dome_right=chest.dome_right - lift, shift=shift)
    return dataclasses.replace(chest, dome_left=chest.dome_left - lift, shift=shift)


# Outlines of the lateral projection of a chest; the patient faces the left edge of the image.


class LateralLung:
    """Lateral projection of a lung, with coordinates d and t.

    d runs from the sternum (0) to the back (1), t from the apex (0) to the posterior costophrenic
    angle (1).
    """

    def __init__(self, chest: Chest, side: str = "right") -> None:
        self.chest = chest
        self.front = -chest.depth / 2
        self.back = chest.depth / 2 + 3.6
        self.top = chest.apex + 0.6
        self.dome = chest.dome(side)
        self.bottom = self.dome + 1.25 * chest.angle_drop

    @functools.cached_property
    def _reach(self) -> tuple[Points, Points, Points]:
        """Heights t, and x of the front and back of the lung at these heights."""
        knots = [0.0, 0.02, 0.06, 0.14, 0.3, 0.55, 0.8, 1.0]
        middle = (self.front + self.back) / 2
        ahead = [3.4, 2.0, 1.0, *(-self.front * np.array([-0.4, -0.66, -0.97, -1.03, -1.0]))]
        behind = [
            3.4,
            4.5,
            5.3,
            *(middle + (self.back - middle) * np.array([0.64, 0.86, 0.99, 1.0, 0.93])),
        ]
        curve = spline(np.stack([np.stack([knots, ahead], 1), np.stack([knots, behind], 1)]))
        return curve[0, :, 0], curve[0, :, 1], curve[1, :, 1]

    def point(self, d: float | Points, t: float | Points) -> Points:
        """Convert lung coordinates to centimetres (..., 2)."""
        levels, ahead, behind = self._reach
        front = np.interp(t, levels, ahead)
        back = np.interp(t, levels, behind)
        points = np.empty((*np.broadcast_shapes(np.shape(d), np.shape(t)), 2))
        points[..., 0] = front + d * (back - front)
        points[..., 1] = self.top + np.multiply(t, self.bottom - self.top)
        return points

    def diaphragm(self) -> Points:
        """Return the dome from the back to the sternum, (N, 2)."""
        peak = self.front + 0.38 * (self.back - self.front)
        x = np.linspace(self.back, self.front, 25)
        behind = np.clip((x - peak) / (self.back - peak), 0, 1)
        ahead = np.clip((peak - x) / (peak - self.front), 0, 1)
        return np.stack(
            [x, self.dome + behind**2.2 * (self.bottom - self.dome) + 1.3 * ahead**2], axis=-1
        )

    def outline(self) -> Points:
        """Return the outline of the air-filled lung, (N, 2)."""
        dome = self.diaphragm()
        t = np.linspace(0, 1, 24) ** 2
        last = (dome[-1, 1] - self.top) / (self.bottom - self.top)
        behind = self.point(np.ones_like(t), t)
        ahead = self.point(np.zeros_like(t), last * t[::-1])
        return np.concatenate([behind, dome[1:], ahead])


def lateral_heart(chest: Chest) -> Points:
    """Return the outline of the heart behind the lower sternum, (N, 2)."""
    grow = chest.heart_ratio / 0.45
    front = -chest.depth / 2 + 0.7
    floor = max(chest.dome_right, chest.dome_left) + 1.2
    reach = 7.6 * grow + 0.12 * (chest.depth - 15)
    height = (floor - 0.4) * min(1.1, 0.55 + 0.45 * grow)
    top = floor - height
    control = np.array([
        [front + 0.3, floor - 0.3], [front - 0.1, floor - 0.45 * height], [front + 0.20 * reach,
        floor - 0.78 * height], [front + 0.46 * reach, top + 0.02 * height], [front + 0.76 * reach,
        top + 0.12 * height], [front + 0.98 * reach, top + 0.42 * height], [front + 0.97 * reach,
        top + 0.72 * height], [front + 0.80 * reach, floor],
    ])  # fmt: skip
    return spline(control, closed=True)


def great_vessels(chest: Chest) -> Points:
    """Return the outline of ascending aorta, arch and anterior upper mediastinum, (N, 2)."""
    wide = chest.mediastinum / 2.8
    control = [
        [-3.0 * wide, 3.5],
        [-2.7 * wide, -2.0],
        [-1.2, -4.6 * wide],
        [1.8, -5.0 * wide],
        [3.9 * wide, -3.6],
    ]
    return spline([*control, [4.2 * wide, 0.0], [3.0, 4.0]], closed=True)


def lateral_hilum(chest: Chest) -> tuple[float, float]:
    """Return (x, y) of the crossing of pulmonary arteries and bronchi."""
    return (0.06 * chest.depth, 1.4)


def trachea(chest: Chest) -> Points:
    """Return the trachea as a line down to the carina, (N, 2)."""
    return spline([[-0.6, -19.0], [0.2, -12.0], [0.7, -6.0], [0.09 * chest.depth, 0.6]])


def spine(chest: Chest) -> tuple[Points, Points]:
    """Return the centres (18, 2) of the vertebral bodies from the neck down, and their
    directions (18, 2).
    """
    y = -22.0 + 2.45 * np.arange(18)
    bow = 1.6 * np.cos((y - 1.0) / 15.0 * np.pi / 2)  # kyphosis
    line = np.stack([chest.depth / 2 + 1.1 + bow, y], axis=1)
    along = np.gradient(line, axis=0)
    return line, along / np.linalg.norm(along, axis=1, keepdims=True)


def sternum(chest: Chest) -> Points:
    """Return the sternum as a line, (N, 2)."""
    lung = LateralLung(chest)
    t = np.linspace(0.2, 0.72, 6)
    return spline(lung.point(np.zeros_like(t), t) - [0.75, 0.0])


def lateral_ribs(chest: Chest) -> Points:
    """Return ten ribs of one side, from the spine forwards and down, (10, N, 2)."""
    lung = LateralLung(chest)
    start = -11.5 + chest.rib_pitch * np.arange(10)
    back = lung.back + 0.2
    length = np.linspace(9.0, 17.0, 10)[:, None]
    fractions = np.array([0.0, 0.12, 0.4, 0.75, 1.0])
    x = back - fractions * length
    x[:, 0] -= 1.0
    y = start[:, None] + np.array([0.0, 0.9, 3.4, 6.6, 8.8]) * (0.75 + 0.08 * chest.rib_slope)
    return spline(np.stack(np.broadcast_arrays(x, y), axis=-1), samples=4)


def body_side(chest: Chest) -> Points:
    """Return the outline of the trunk, (N, 2)."""
    front = -chest.depth / 2 - 1.6 - 0.6 * chest.wall
    back = chest.depth / 2 + 5.6 + 0.6 * chest.wall
    breast = 0.62 * chest.breast
    control = [
        [-5.0, -28.0], [-4.4, -17.0], [0.66 * front, -10.5], [0.92 * front, -5.0],
        [front - 0.35 * breast, 1.0], [front - breast, 6.0], [front - 0.25 * breast, 10.5],
        [front + 0.2, 16.0], [front, 30.0], [back - 1.6, 30.0], [back - 1.0, 14.0], [back, 3.0],
        [back - 0.7, -6.0], [back - 2.8, -13.0], [7.5, -19.0], [6.0, -28.0],
    ]  # fmt: skip
    return spline(control)


def raised_arms(chest: Chest) -> list[Points]:
    """Return the outlines of shoulders and raised upper arms, (N, 2) each."""
    return [
        ellipse((1.5, -13.5), (0.48 * chest.depth + 1.5, 4.6), -18),
        ellipse((-0.35 * chest.depth, -19.5), (9.5, 3.6), 34),
    ]
