"""Population of patients with studies and views, all determined by (seed, index)."""

import dataclasses
import datetime
from collections.abc import Iterator

import numpy as np

from medvl.errors import ConfigError
from medvl.phantom.geometry import Camera
from medvl.phantom.population.anatomy import Chest, pose_chest, sample_chest
from medvl.phantom.population.findings import (
    Finding,
    Profile,
    sample_chronic,
    sample_findings,
    sample_profile,
    truth_labels,
)

# Random generators that depend on keys, not on the order of calls.


def generator(seed: int, *key: int) -> np.random.Generator:
    """Return the random generator for a key in the world of `seed`; different keys give independent
    numbers.

    Raises ConfigError ("out_of_range") if the seed is negative.
    """
    if seed < 0:
        raise ConfigError(f"seed must be 0 or more, got {seed}", "out_of_range", field="seed")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


# Exposure settings and lead markers of a view.

_SITE_STREAM = 96


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """Exposure and development of an image."""

    penetration: float
    """Factor on optical depth; higher values brighten the image."""
    contrast: float
    """Curvature of the tone curve, 0 to 1; higher values darken the lungs."""
    equalize: float
    """Share of low-frequency variation that processing removes, 0 to 1."""
    noise: float
    """Standard deviation of noise at full brightness, relative to the full range."""
    black: float
    """Level of the unexposed background, relative to the full range."""
    collimation: tuple[float, float, float, float]
    """Shares of the image that are masked at the top, right, bottom and left."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """Lead letters in the image."""

    text: str
    x: float
    """Position of the text relative to width and height."""
    y: float
    height: float
    """Centimetres."""


def sample_exposure(rng: np.random.Generator, position: str) -> Exposure:
    """Sample an exposure; portable AP images have less contrast, more noise and more uneven
    borders than PA images.
    """
    portable = position == "AP"
    edges = rng.uniform(0.0, 0.05, 4) * (rng.random(4) < (0.45 if portable else 0.2))
    return Exposure(
        penetration=float(rng.normal(1.42 if portable else 1.5, 0.13)),
        contrast=float(np.clip(rng.normal(0.25 if portable else 0.42, 0.12), 0, 0.7)),
        equalize=float(rng.uniform(0.0, 0.22)),
        noise=float(rng.uniform(0.008, 0.022) * (1.3 if portable else 1.0)),
        black=float(rng.uniform(0.0, 0.04)),
        collimation=(float(edges[0]), float(edges[1]), float(edges[2]), float(edges[3])),
    )


def sample_markers(rng: np.random.Generator, position: str) -> tuple[Marker, ...]:
    """Sample a side marker, sometimes with AP or PORTABLE."""
    if position == "LATERAL":
        if rng.random() < 0.4:
            return ()
        return (Marker(text="L", x=rng.uniform(0.06, 0.12), y=rng.uniform(0.08, 0.2), height=1.0),)
    left = rng.random() < 0.6
    x = rng.uniform(0.86, 0.93) if left else rng.uniform(0.04, 0.1)
    markers = [
        Marker(
            text="L" if left else "R", x=x, y=rng.uniform(0.06, 0.16), height=rng.uniform(0.9, 1.4)
        )
    ]
    if position == "AP" and rng.random() < 0.6:
        word = str(rng.choice(["AP", "PORTABLE", "SUPINE", "ERECT"]))
        markers.append(
            Marker(text=word, x=0.05 if left else 0.78, y=rng.uniform(0.04, 0.1), height=0.55)
        )
    return tuple(markers)


def at_site(
    exposure: Exposure, markers: tuple[Marker, ...], site: int
) -> tuple[Exposure, tuple[Marker, ...]]:
    """Return the exposure and the markers of a view at a site; site 0 does not change them.

    A site has its own tube voltage, tone curve, processing, noise and background, and its letters
    in every image.
    """
    if site == 0:
        return exposure, markers
    rng = generator(site, _SITE_STREAM)
    sign = float(rng.choice((-1, 1)))
    changed = dataclasses.replace(
        exposure,
        penetration=exposure.penetration * (1 + sign * float(rng.uniform(0.12, 0.25))),
        contrast=float(np.clip(exposure.contrast - sign * rng.uniform(0.1, 0.25), 0, 0.7)),
        equalize=float(np.clip(exposure.equalize + rng.uniform(0.1, 0.4), 0, 0.7)),
        noise=exposure.noise * float(rng.uniform(1.5, 3)),
        black=exposure.black + float(rng.uniform(0.02, 0.1)),
    )
    x = float(rng.choice((0.04, 0.8)))
    y = float(rng.uniform(0.9, 0.96))
    return changed, (*markers, Marker(text=f"H{site}", x=x, y=y, height=0.9))


MAX_STUDIES = 8
MAX_PATIENTS = 10**7 // MAX_STUDIES
"""Limit of identifiers with seven free digits; every study needs one."""
LATERAL_POSITIONS = ("LATERAL", "LL")
_STEP = 7_368_787  # coprime to 10**7: multiplying by it permutes the numbers below 10**7


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One image of a study, with everything that `draw` needs."""

    dicom_id: str
    """Five groups of eight hexadecimal digits."""
    position: str
    """PA, AP, LATERAL or LL, as in DICOM's ViewPosition."""
    camera: Camera
    chest: Chest
    """The patient's chest in the pose of this view."""
    findings: tuple[Finding, ...]
    arms: float
    """Spread of the arms; 1 is typical."""
    motion: float
    """Motion blur of the vessels, 0 to 1."""
    exposure: Exposure
    markers: tuple[Marker, ...]
    key: tuple[int, ...]
    """Key of the random generator: seed, patient, study and view."""

    @property
    def lateral(self) -> bool:
        """Whether this is a lateral view."""
        return self.position in LATERAL_POSITIONS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One examination with its findings, its views and the patient's data."""

    study_id: int
    taken: datetime.datetime
    """Shifted into the years 2100 to 2210, as de-identified dates are."""
    sex: str
    age: int
    findings: tuple[Finding, ...]
    prior: tuple[Finding, ...] | None
    """Findings of the patient's previous study; None for the first study."""
    views: tuple[View, ...]
    key: tuple[int, ...]

    @property
    def frontal(self) -> View:
        """The first frontal view; every study has one."""
        return next(view for view in self.views if not view.lateral)

    @property
    def labels(self) -> dict[str, int]:
        """Ground truth of all 14 labels (1 or 0), independent of the report."""
        return truth_labels(self.findings)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Patient:
    """One patient with all studies, oldest first."""

    index: int
    subject_id: int
    sex: str
    """F or M."""
    chest: Chest
    """Chest at rest, before changes by findings and breathing."""
    studies: tuple[Study, ...]


class World:
    """All patients of one seed; each can be generated alone, and is always the same.

    Args:
        seed: seed of patients, studies and views.
        site: hospital whose devices took the images (`medvl.phantom.population.world.at_site`).
    """

    def __init__(self, seed: int = 0, site: int = 0) -> None:
        self.seed = seed
        self.site = site
        self._offset = int(generator(seed).integers(10**7))

    def patient(self, index: int) -> Patient:
        """Return the patient with this index in [0, 1,250,000). Raises ConfigError
        ("out_of_range") otherwise.
        """
        if not 0 <= index < MAX_PATIENTS:
            raise ConfigError(
                f"index must be in [0, {MAX_PATIENTS}), got {index}", "out_of_range", field="index"
            )
        rng = generator(self.seed, index)
        sex = str(rng.choice(["F", "M"], p=[0.48, 0.52]))
        age = int(np.clip(rng.normal(60, 17), 18, 91))
        chest = sample_chest(rng, sex, age)
        profile = sample_profile(rng)
        chronic = sample_chronic(rng, profile)
        born_days = int(rng.integers(0, 100 * 365))
        first = datetime.datetime(2100, 1, 1) + datetime.timedelta(days=born_days)
        studies: list[Study] = []
        taken = first
        for number in range(min(6, int(rng.geometric(0.42)))):
            taken += datetime.timedelta(days=int(rng.exponential(200)) + (number > 0))
            years = (taken - first).days // 365
            prior = studies[-1].findings if studies else None
            studies.append(
                self._study(
                    (index, number), taken, sex, age + years, chest, profile, chronic, prior
                )
            )
        subject_id = 10**7 + (index * _STEP + self._offset) % 10**7
        return Patient(
            index=index, subject_id=subject_id, sex=sex, chest=chest, studies=tuple(studies)
        )

    def patients(self, count: int) -> Iterator[Patient]:
        """Return the first `count` patients."""
        return (self.patient(index) for index in range(count))

    def _study(
        self,
        number: tuple[int, int],
        day: datetime.datetime,
        sex: str,
        age: int,
        chest: Chest,
        profile: Profile,
        chronic: tuple[Finding, ...],
        prior: tuple[Finding, ...] | None,
    ) -> Study:
        key = (self.seed, *number)
        rng = generator(*key)
        findings = sample_findings(rng, profile, chronic)
        positions = enumerate(_positions(rng, findings))
        views = tuple(self._view((*key, i), position, chest, findings) for i, position in positions)
        return Study(
            study_id=5 * 10**7
            + ((number[0] * MAX_STUDIES + number[1]) * _STEP + self._offset) % 10**7,
            taken=day + datetime.timedelta(milliseconds=int(rng.integers(24 * 3600 * 1000))),
            sex=sex,
            age=age,
            findings=findings,
            prior=prior,
            views=views,
            key=key,
        )

    def _view(
        self, key: tuple[int, ...], position: str, chest: Chest, findings: tuple[Finding, ...]
    ) -> View:
        view = sample_view(key, position, chest, findings)
        exposure, markers = at_site(view.exposure, view.markers, self.site)
        return dataclasses.replace(view, exposure=exposure, markers=markers)


def _positions(rng: np.random.Generator, findings: tuple[Finding, ...]) -> list[str]:
    """Return the positions of a study's views: portable AP for the very ill, else PA, mostly
    with a lateral view.
    """
    kinds = {part.kind for finding in findings for part in finding.parts}
    bedside = 0.92 if kinds & {"endotracheal tube", "enteric tube", "chest tube"} else 0.32
    if rng.random() < bedside:
        return ["AP"] * (2 if rng.random() < 0.12 else 1)
    lateral = "LL" if rng.random() < 0.25 else "LATERAL"
    return [["PA"], ["PA", lateral], ["PA", "PA", lateral]][rng.choice(3, p=[0.16, 0.77, 0.07])]


def sample_view(
    key: tuple[int, ...], position: str, chest: Chest, findings: tuple[Finding, ...]
) -> View:
    """Return a view of a chest with findings; `key` (a seed first) determines position and
    exposure.
    """
    rng = generator(*key)
    kind = "LATERAL" if position in LATERAL_POSITIONS else position
    spread = 1.6 if kind == "AP" else 1.0  # portable views are positioned less precisely
    shown = pose_chest(chest, kind, float(rng.normal(0, 0.35)), findings)
    middle = (chest.apex + chest.dome_right + chest.angle_drop) / 2
    center = (
        float(rng.normal(1.0 if kind == "LATERAL" else 0.0, 0.5 * spread)),
        middle + float(rng.normal(0, 0.5)),
    )
    width = chest.depth + 15 if kind == "LATERAL" else 2 * chest.half_width
    portrait, square, landscape = (0.75, 0.2, 0.05) if kind == "LATERAL" else (0.45, 0.12, 0.43)
    camera = Camera(
        field=float(np.clip(width + rng.uniform(5.5, 10.5), 32.5, 43.0)),
        aspect=float(rng.choice([0.82, 1.0, 1.22], p=[portrait, square, landscape])),
        center=center,
        degrees=float(rng.normal(0, 1.1 * spread)),
    )
    return View(
        dicom_id="-".join(f"{int(word):08x}" for word in rng.integers(0, 1 << 32, 5)),
        position=position,
        camera=camera,
        chest=shown,
        findings=findings,
        arms=float(rng.uniform(0.2, 2.5)),
        motion=float(rng.beta(1.2, 5.0) * spread / 1.3),
        exposure=sample_exposure(rng, kind),
        markers=sample_markers(rng, kind),
        key=key,
    )
