"""Findings of a study, with their parts, prevalence and co-occurrence.

The rates are round numbers in the range that chest radiograph corpora report. Each patient has a clinical profile, and
findings are independent given the profile. This yields realistic co-occurrence: oedema with a large heart and
effusions, fractures with pneumothorax.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from medvl.phantom.population.finding_sites import PART_SAMPLERS, Part, sample_extent
from medvl.schema import FINDINGS

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
    """Clinical profile: its share of the population, and the probability of each finding in a study."""

    share: float
    rates: Mapping[str, float]


def _profile(share: float, *percent: float) -> Profile:
    return Profile(share, {label: value / 100 for label, value in zip(RENDERED_LABELS, percent, strict=True)})


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


def sample_findings(rng: np.random.Generator, profile: Profile, chronic: tuple[Finding, ...]) -> tuple[Finding, ...]:
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
    """Return how a finding changed between two studies: new, resolved, worse, better or same; None without it."""
    extents = [
        next((finding.extent for finding in findings if finding.label == label), None) for findings in (before, after)
    ]
    earlier, later = extents
    if earlier is None or later is None:
        return "new" if later is not None else "resolved" if earlier is not None else None
    if abs(later - earlier) < _NOTICEABLE:
        return "same"
    return "worse" if later > earlier else "better"


def truth_labels(findings: tuple[Finding, ...]) -> dict[str, int]:
    """Return the ground truth of all 14 labels (1 or 0), including the parent label Lung Opacity and No Finding."""
    present = {finding.label for finding in findings}
    if present & set(OPAQUE):
        present.add("Lung Opacity")
    if not present - {"Support Devices"}:
        present.add("No Finding")
    return {label: int(label in present) for label in FINDINGS}
