"""Parts of findings, and the sampling of their sites for each label."""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a finding."""

    kind: str
    side: str
    """right, left or midline."""
    zone: str
    """Name of the place in reports ("right lower lobe", "left base"), or ""."""
    extent: float
    """0 (minimal) to 1 (maximal)."""
    s: float = 0.5
    """Position from the midline (0) to the side (1)."""
    t: float = 0.5
    """Position from the apex (0) to the costophrenic angle (1)."""
    d: float = 0.5
    """Position from the sternum (0) to the back (1)."""
    size: float = 0.0
    """Diameter in centimetres, for nodules."""
    seed: int = 0
    """Seed of the irregularities of its outline."""


LOBES = {
    "right upper lobe": (0.50, 0.30, 0.45, 0.20), "right middle lobe": (0.36, 0.66, 0.22, 0.13),
    "right lower lobe": (0.52, 0.76, 0.76, 0.29), "left upper lobe": (0.52, 0.30, 0.45, 0.12),
    "lingula": (0.52, 0.64, 0.22, 0.06), "left lower lobe": (0.50, 0.76, 0.76, 0.20),
}  # fmt: skip
"""Lobe -> s, t and d of its centre, and its share of lobar disease."""


def side_of_lobe(lobe: str) -> str:
    """Return the side of a lobe, right or left."""
    return "right" if lobe.startswith("right") else "left"


def sample_extent(rng: np.random.Generator) -> float:
    """Sample an extent: mild, moderate and severe in shares of 30, 42 and 28 percent, uniform within each."""
    third = rng.choice(3, p=[0.30, 0.42, 0.28])
    return float((third + rng.random()) / 3)


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 31))


def _sides(rng: np.random.Generator, right: float, left: float) -> tuple[str, ...]:
    """Sample one side or both; `right` and `left` are the probabilities of one alone."""
    u = rng.random()
    if u < right:
        return ("right",)
    return ("left",) if u < right + left else ("right", "left")


def _other_extent(rng: np.random.Generator, extent: float) -> float:
    """Sample the extent of the less affected side."""
    return float(extent * rng.uniform(0.45, 1.0))


def _two_sided(rng: np.random.Generator, sides: tuple[str, ...], extent: float) -> list[tuple[str, float]]:
    """Return sides with their extents; one side has the full extent."""
    full = sides[rng.integers(len(sides))]
    return [(side, extent if side == full else _other_extent(rng, extent)) for side in sides]


def _central(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    return (Part(kind="shape", side="midline", zone="", extent=extent, seed=_seed(rng)),)


def _atelectasis(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    if extent > 0.66 and rng.random() < 0.55:
        lobe = str(rng.choice(["right upper lobe", "right lower lobe", "left lower lobe"], p=[0.25, 0.3, 0.45]))
        return (Part(kind="collapse", side=side_of_lobe(lobe), zone=lobe, extent=extent, seed=_seed(rng)),)
    parts = []
    for side, share in _two_sided(rng, _sides(rng, 0.28, 0.34), extent):
        t, s = rng.uniform(0.72, 0.84), rng.uniform(0.4, 0.6)
        parts.append(Part(kind="bands", side=side, zone=f"{side} base", extent=share, s=s, t=t, seed=_seed(rng)))
    return tuple(parts)


def _lobar(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    names = list(LOBES)
    probabilities = np.array([LOBES[name][3] for name in names])
    count = 1 if extent < 0.6 else int(rng.integers(1, 3))
    parts = []
    for index in rng.choice(len(names), size=count, replace=False, p=probabilities):
        s, t, d, _ = LOBES[names[index]]
        parts.append(
            Part(
                kind="lobar",
                side=side_of_lobe(names[index]),
                zone=names[index],
                extent=extent,
                s=s + rng.uniform(-0.08, 0.08),
                t=t + rng.uniform(-0.04, 0.04),
                d=d,
                seed=_seed(rng),
            )
        )
    return tuple(parts)


def _patchy(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    return tuple(dataclasses.replace(part, kind="patchy") for part in _lobar(rng, extent))


def _hazy(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    return tuple(dataclasses.replace(part, kind="hazy") for part in _lobar(rng, min(extent, 0.59)))


def _edema(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    sides = [("right", extent), ("left", extent)]
    return tuple(Part(kind="haze", side=side, zone="", extent=share, seed=_seed(rng)) for side, share in sides)


def _effusion(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    sides = _two_sided(rng, _sides(rng, 0.28, 0.27), extent)
    return tuple(Part(kind="fluid", side=side, zone="", extent=share, seed=_seed(rng)) for side, share in sides)


def _pneumothorax(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    side = str(rng.choice(["right", "left"]))
    return (Part(kind="gas", side=side, zone=f"{side} apex", extent=extent, seed=_seed(rng)),)


def _lesion(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    count = int(rng.choice([1, 2, 3, 5], p=[0.68, 0.14, 0.1, 0.08]))
    largest = 0.8 + 4.4 * extent  # centimetres; 3 cm and more is a mass
    parts = []
    for number in range(count):
        side = str(rng.choice(["right", "left"]))
        t = rng.uniform(0.14, 0.8)
        level = "upper" if t < 0.38 else "mid" if t < 0.6 else "lower"
        parts.append(
            Part(
                kind="nodule",
                side=side,
                zone=f"{side} {level} lung",
                extent=extent,
                s=rng.uniform(0.35, 0.85),
                t=t,
                d=rng.uniform(0.25, 0.85),
                size=largest if number == 0 else min(2.5, largest * rng.uniform(0.4, 0.9)),
                seed=_seed(rng),
            )
        )
    return tuple(parts)


def _fracture(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    side = str(rng.choice(["right", "left"]))
    if rng.random() < 0.15:
        return (Part(kind="clavicle", side=side, zone=f"{side} clavicle", extent=extent, s=0.55, seed=_seed(rng)),)
    first, count = int(rng.integers(3, 7)), 1 + int(extent * 3)
    s = rng.uniform(0.62, 0.84)
    parts = []
    for rib in range(first, first + count):
        place = f"{side} {ORDINALS[rib]} rib"
        parts.append(Part(kind="rib", side=side, zone=place, extent=extent, s=s, t=rib / 10, seed=_seed(rng)))
    return tuple(parts)


def _pleural(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    kind = str(rng.choice(["thickening", "apical cap", "plaque"], p=[0.4, 0.3, 0.3]))
    place = {"thickening": "lateral chest wall", "apical cap": "apex", "plaque": "hemidiaphragm"}[kind]
    sides = _two_sided(rng, _sides(rng, 0.35, 0.3), extent)
    zones = [(side, share, f"{side} {place}") for side, share in sides]
    return tuple(Part(kind=kind, side=side, zone=zone, extent=share, seed=_seed(rng)) for side, share, zone in zones)


def _devices(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    probabilities = {
        "endotracheal tube": 0.28, "enteric tube": 0.30, "central line": 0.45, "pacemaker": 0.24, "chest tube": 0.14,
        "sternotomy wires": 0.25,
    }  # fmt: skip
    kinds = [kind for kind, probability in probabilities.items() if rng.random() < probability]
    parts = []
    for kind in kinds or ["central line"]:
        side = "midline" if kind in MIDLINE_DEVICES else str(rng.choice(["right", "left"], p=[0.5, 0.5]))
        if kind == "pacemaker":
            side = str(rng.choice(["left", "right"], p=[0.85, 0.15]))
        parts.append(Part(kind=kind, side=side, zone="", extent=extent, t=rng.random(), seed=_seed(rng)))
    return tuple(parts)


MIDLINE_DEVICES = ("endotracheal tube", "enteric tube", "sternotomy wires")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")

PART_SAMPLERS: dict[str, Callable[[np.random.Generator, float], tuple[Part, ...]]] = {
    "Atelectasis": _atelectasis, "Cardiomegaly": _central, "Consolidation": _lobar, "Edema": _edema,
    "Enlarged Cardiomediastinum": _central, "Fracture": _fracture, "Lung Lesion": _lesion, "Lung Opacity": _hazy,
    "Pleural Effusion": _effusion, "Pleural Other": _pleural, "Pneumonia": _patchy, "Pneumothorax": _pneumothorax,
    "Support Devices": _devices,
}  # fmt: skip
"""Label -> function of (generator, extent) that samples its parts."""
