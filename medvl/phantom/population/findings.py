"""What is wrong with a chest: findings, their parts, and how often they occur together.

The rates are round numbers in the range that chest radiograph corpora report. Each patient has a clinical profile, and
findings are independent within a profile: that gives the co-occurrence that one expects (oedema with a big heart and
effusions, fractures with pneumothorax) without any finding deciding another one.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from medvl.phantom.population.finding_sites import PART_SAMPLERS, Part, draw_extent
from medvl.schema import FINDINGS

SEVERITIES = ("mild", "moderate", "severe")
CHRONIC = ("Cardiomegaly", "Enlarged Cardiomediastinum", "Lung Lesion", "Pleural Other")
"""Findings that a patient keeps from study to study."""
OPAQUE = ("Atelectasis", "Consolidation", "Edema", "Lung Lesion", "Pneumonia")
"""Each of these implies Lung Opacity, as in CheXpert's hierarchy of labels."""
DRAWN = tuple(label for label in FINDINGS if label != "No Finding")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One label that is present, with the places where it shows."""

    label: str
    parts: tuple[Part, ...]

    @property
    def extent(self) -> float:
        """That of the worst part, 0 to 1."""
        return max(part.extent for part in self.parts)

    @property
    def severity(self) -> str:
        """mild, moderate or severe: thirds of the extent."""
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
    """A kind of patient: its share of the population and how likely each finding is in one of its studies."""

    share: float
    rates: Mapping[str, float]


def _profile(share: float, *percent: float) -> Profile:
    return Profile(share, {label: value / 100 for label, value in zip(DRAWN, percent, strict=True)})


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
    """The profile of one patient."""
    profiles = list(PROFILES.values())
    return profiles[rng.choice(len(profiles), p=[profile.share for profile in profiles])]


def sample_chronic(rng: np.random.Generator, profile: Profile) -> tuple[Finding, ...]:
    """What the patient has in every study."""
    return tuple(_sample(rng, label) for label in CHRONIC if rng.random() < profile.rates[label])


def sample_findings(rng: np.random.Generator, profile: Profile, chronic: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings of one study, in the order of `FINDINGS`; empty means a normal chest."""
    found = {finding.label: finding for finding in chronic}
    for label in DRAWN:
        if label not in CHRONIC and rng.random() < profile.rates[label]:
            found[label] = _sample(rng, label)
    if "Consolidation" in found and "Pneumonia" in found:  # one process under two names
        found["Pneumonia"] = Finding(label="Pneumonia", parts=found["Consolidation"].parts)
    return tuple(found[label] for label in DRAWN if label in found)


def _sample(rng: np.random.Generator, label: str) -> Finding:
    return Finding(label=label, parts=PART_SAMPLERS[label](rng, draw_extent(rng)))


def truth_labels(findings: tuple[Finding, ...]) -> dict[str, int]:
    """All 14 labels, 1 or 0: what is there, with the parent Lung Opacity and with No Finding made consistent."""
    present = {finding.label for finding in findings}
    if present & set(OPAQUE):
        present.add("Lung Opacity")
    if not present - {"Support Devices"}:
        present.add("No Finding")
    return {label: int(label in present) for label in FINDINGS}
