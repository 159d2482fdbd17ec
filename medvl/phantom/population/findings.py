"""Findings of a study, with their parts, prevalence and co-occurrence.

The rates are round numbers in the range that chest radiograph corpora report. Each patient has a
clinical profile, and findings are independent given the profile. This yields realistic
co-occurrence: oedema with a large heart and effusions, fractures with pneumothorax.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from medvl.schema import FINDINGS

# Parts of findings, and the sampling of their sites for each label.


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
    """Sample an extent: mild, moderate and severe in shares of 30, 42 and 28 percent, uniform
    within each.
    """
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


def _two_sided(
    rng: np.random.Generator, sides: tuple[str, ...], extent: float
) -> list[tuple[str, float]]:
    """Return sides with their extents; one side has the full extent."""
    full = sides[rng.integers(len(sides))]
    return [(side, extent if side == full else _other_extent(rng, extent)) for side in sides]


def _central(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    return (Part(kind="shape", side="midline", zone="", extent=extent, seed=_seed(rng)),)


def _atelectasis(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    if extent > 0.66 and rng.random() < 0.55:
        lobe = str(
            rng.choice(
                ["right upper lobe", "right lower lobe", "left lower lobe"], p=[0.25, 0.3, 0.45]
            )
        )
        return (
            Part(
                kind="collapse", side=side_of_lobe(lobe), zone=lobe, extent=extent, seed=_seed(rng)
            ),
        )
    parts = []
    for side, share in _two_sided(rng, _sides(rng, 0.28, 0.34), extent):
        t = rng.uniform(0.72, 0.84)
        s = rng.uniform(0.4, 0.6)
        parts.append(
            Part(
                kind="bands",
                side=side,
                zone=f"{side} base",
                extent=share,
                s=s,
                t=t,
                seed=_seed(rng),
            )
        )
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
    return tuple(
        Part(kind="haze", side=side, zone="", extent=share, seed=_seed(rng))
        for side, share in sides
    )


def _effusion(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    sides = _two_sided(rng, _sides(rng, 0.28, 0.27), extent)
    return tuple(
        Part(kind="fluid", side=side, zone="", extent=share, seed=_seed(rng))
        for side, share in sides
    )


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
        return (
            Part(
                kind="clavicle",
                side=side,
                zone=f"{side} clavicle",
                extent=extent,
                s=0.55,
                seed=_seed(rng),
            ),
        )
    first = int(rng.integers(3, 7))
    count = 1 + int(extent * 3)
    s = rng.uniform(0.62, 0.84)
    parts = []
    for rib in range(first, first + count):
        place = f"{side} {ORDINALS[rib]} rib"
        parts.append(
            Part(kind="rib", side=side, zone=place, extent=extent, s=s, t=rib / 10, seed=_seed(rng))
        )
    return tuple(parts)


def _pleural(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    kind = str(rng.choice(["thickening", "apical cap", "plaque"], p=[0.4, 0.3, 0.3]))
    place = {"thickening": "lateral chest wall", "apical cap": "apex", "plaque": "hemidiaphragm"}[
        kind
    ]
    sides = _two_sided(rng, _sides(rng, 0.35, 0.3), extent)
    zones = [(side, share, f"{side} {place}") for side, share in sides]
    return tuple(
        Part(kind=kind, side=side, zone=zone, extent=share, seed=_seed(rng))
        for side, share, zone in zones
    )


def _devices(rng: np.random.Generator, extent: float) -> tuple[Part, ...]:
    probabilities = {
        "endotracheal tube": 0.28, "enteric tube": 0.30, "central line": 0.45, "pacemaker": 0.24,
        "chest tube": 0.14, "sternotomy wires": 0.25,
    }  # fmt: skip
    kinds = [kind for kind, probability in probabilities.items() if rng.random() < probability]
    parts = []
    for kind in kinds or ["central line"]:
        side = (
            "midline"
            if kind in MIDLINE_DEVICES
            else str(rng.choice(["right", "left"], p=[0.5, 0.5]))
        )
        if kind == "pacemaker":
            side = str(rng.choice(["left", "right"], p=[0.85, 0.15]))
        parts.append(
            Part(kind=kind, side=side, zone="", extent=extent, t=rng.random(), seed=_seed(rng))
        )
    return tuple(parts)


MIDLINE_DEVICES = ("endotracheal tube", "enteric tube", "sternotomy wires")
ORDINALS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
)

PART_SAMPLERS: dict[str, Callable[[np.random.Generator, float], tuple[Part, ...]]] = {
    "Atelectasis": _atelectasis, "Cardiomegaly": _central, "Consolidation": _lobar, "Edema": _edema,
    "Enlarged Cardiomediastinum": _central, "Fracture": _fracture, "Lung Lesion": _lesion,
    "Lung Opacity": _hazy, "Pleural Effusion": _effusion, "Pleural Other": _pleural,
    "Pneumonia": _patchy, "Pneumothorax": _pneumothorax, "Support Devices": _devices,
}  # fmt: skip
"""Label -> function of (generator, extent) that samples its parts."""


SEVERITIES = ("mild", "moderate", "severe")
CHRONIC = ("Cardiomegaly", "Enlarged Cardiomediastinum", "Lung Lesion", "Pleural Other")
"""Findings that persist in all studies of a patient."""
OPAQUE = ("Atelectasis", "Consolidation", "Edema", "Lung Lesion", "Pneumonia")
"""Findings that imply Lung Opacity, as in CheXpert's label hierarchy."""
_NOTICEABLE = 0.2  # difference of extents that is a change
RENDERED_LABELS = tuple(label for label in FINDINGS if label != "No Finding")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A present label with the parts of which it consists."""

    label: str
    parts: tuple[Part, ...]

    @property
    def extent(self) -> float:
        """Extent of the worst part, 0 to 1."""
        return max(part.extent for part in self.parts)

    @property
    def severity(self) -> str:
        """mild, moderate or severe, by thirds of the extent."""
        return SEVERITIES[min(2, int(self.extent * 3))]

    @property
    def side(self) -> str:
        """right, left, bilateral or midline."""
        sides = {part.side for part in self.parts}
        if sides >= {"right", "left"}:
            return "bilateral"
        return min(sides - {"midline"}, default="midline")


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """Clinical profile: its share of the population, and the probability of each finding in a
    study.
    """

    share: float
    rates: Mapping[str, float]


def _profile(share: float, *percent: float) -> Profile:
    return Profile(
        share, {label: value / 100 for label, value in zip(RENDERED_LABELS, percent, strict=True)}
    )


PROFILES = {
    #                         Atel Card Cons Edem Medi Frac Lesi Opac Effu Pleu Pneu Ptx Devi
    "healthy": _profile(0.25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5),
    "heart failure": _profile(0.18, 25, 85, 5, 80, 8, 1, 2, 5, 62, 3, 5, 1, 40),
    "infection": _profile(0.18, 18, 12, 68, 6, 2, 2, 3, 25, 25, 2, 75, 1, 20),
    "postoperative": _profile(0.15, 65, 30, 10, 22, 15, 5, 2, 8, 48, 3, 5, 16, 90),
    "malignancy": _profile(0.08, 30, 10, 15, 3, 22, 3, 85, 12, 40, 12, 8, 3, 30),
    "trauma": _profile(0.07, 25, 5, 12, 2, 8, 85, 1, 8, 22, 3, 2, 40, 20),
    "chronic": _profile(0.09, 18, 45, 5, 6, 18, 8, 10, 10, 10, 30, 3, 2, 25),
}


def sample_profile(rng: np.random.Generator) -> Profile:
    """Sample the profile of a patient."""
    profiles = list(PROFILES.values())
    return profiles[rng.choice(len(profiles), p=[profile.share for profile in profiles])]


def sample_chronic(rng: np.random.Generator, profile: Profile) -> tuple[Finding, ...]:
    """Sample the findings that a patient has in every study."""
    return tuple(_sample(rng, label) for label in CHRONIC if rng.random() < profile.rates[label])


def sample_findings(
    rng: np.random.Generator, profile: Profile, chronic: tuple[Finding, ...]
) -> tuple[Finding, ...]:
    """Sample the findings of a study, in the order of `FINDINGS`; none for a normal chest."""
    by_label = {finding.label: finding for finding in chronic}
    for label in RENDERED_LABELS:
        if label not in CHRONIC and rng.random() < profile.rates[label]:
            by_label[label] = _sample(rng, label)
    if "Consolidation" in by_label and "Pneumonia" in by_label:  # one process with two labels
        by_label["Pneumonia"] = Finding(label="Pneumonia", parts=by_label["Consolidation"].parts)
    return tuple(by_label[label] for label in RENDERED_LABELS if label in by_label)


def _sample(rng: np.random.Generator, label: str) -> Finding:
    return Finding(label=label, parts=PART_SAMPLERS[label](rng, sample_extent(rng)))


def change_of(label: str, before: Iterable[Finding], after: Iterable[Finding]) -> str | None:
    """Return how a finding changed between two studies: new, resolved, worse, better or same;
    None without it.
    """
    extents = [
        next((finding.extent for finding in findings if finding.label == label), None)
        for findings in (before, after)
    ]
    earlier, later = extents
    if earlier is None or later is None:
        return "new" if later is not None else "resolved" if earlier is not None else None
    if abs(later - earlier) < _NOTICEABLE:
        return "same"
    return "worse" if later > earlier else "better"


def truth_labels(findings: tuple[Finding, ...]) -> dict[str, int]:
    """Return the ground truth of all 14 labels (1 or 0), including the parent label Lung Opacity
    and No Finding.
    """
    present = {finding.label for finding in findings}
    if present & set(OPAQUE):
        present.add("Lung Opacity")
    if not present - {"Support Devices"}:
        present.add("No Finding")
    return {label: int(label in present) for label in FINDINGS}
