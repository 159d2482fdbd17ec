"""The population: patients, their studies and the views of each study, all decided by (seed, index)."""

import dataclasses
import datetime
from collections.abc import Iterator

import numpy as np

from medvl.errors import ConfigError
from medvl.phantom.geometry import Camera
from medvl.phantom.population.findings import (
    Finding,
    Profile,
    sample_chronic,
    sample_findings,
    sample_profile,
    truth_labels,
)
from medvl.phantom.population.frontal_anatomy import Chest, sample_chest
from medvl.phantom.population.pose import posed
from medvl.phantom.rendering.film import Exposure, Marker, sample_exposure, sample_markers
from medvl.phantom.seeds import generator

MAX_STUDIES = 8
MAX_PATIENTS = 10**7 // MAX_STUDIES
"""Identifiers have seven free digits, and every study needs its own."""
LATERAL_POSITIONS = ("LATERAL", "LL")
_STEP = 7_368_787  # coprime to 10**7: multiplying by it permutes the numbers below 10**7


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One image of a study: everything that `draw` needs."""

    dicom_id: str
    """Five groups of eight hexadecimal digits."""
    position: str
    """PA, AP, LATERAL or LL, as in DICOM's ViewPosition."""
    camera: Camera
    chest: Chest
    """The patient's chest as this view shows it."""
    findings: tuple[Finding, ...]
    arms: float
    """How far the arms are spread; 1 is usual."""
    motion: float
    """Blur of the vessels by breath and heartbeat, 0 to 1."""
    exposure: Exposure
    markers: tuple[Marker, ...]
    key: tuple[int, ...]
    """Seed, patient, study and view: what its noise is drawn from."""

    @property
    def lateral(self) -> bool:
        """Whether it is taken from the side."""
        return self.position in LATERAL_POSITIONS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One examination: its findings, its views, and what a radiologist would know of the patient."""

    study_id: int
    taken: datetime.datetime
    """Shifted into the years 2100 to 2210, as de-identified dates are."""
    sex: str
    age: int
    findings: tuple[Finding, ...]
    prior: tuple[Finding, ...] | None
    """The findings of the patient's study before this one, None for the first."""
    views: tuple[View, ...]
    key: tuple[int, ...]

    @property
    def frontal(self) -> View:
        """The first view from the front; every study has one."""
        return next(view for view in self.views if not view.lateral)

    @property
    def labels(self) -> dict[str, int]:
        """All 14 labels, 1 or 0: the truth, whatever the report says."""
        return truth_labels(self.findings)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Patient:
    """One patient with all studies, oldest first."""

    index: int
    subject_id: int
    sex: str
    """F or M."""
    chest: Chest
    """At rest, before findings and breath change it."""
    studies: tuple[Study, ...]


class World:
    """All patients of one seed. `World(0).patient(7)` is always the same patient, and costs the same as any other."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._offset = int(generator(seed).integers(10**7))

    def patient(self, index: int) -> Patient:
        """The patient of that index, from 0. Raises `ConfigError` outside [0, 1,250,000)."""
        if not 0 <= index < MAX_PATIENTS:
            raise ConfigError(f"patient index must lie in [0, {MAX_PATIENTS}), not {index}")
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
            studies.append(self._study((index, number), taken, sex, age + years, chest, profile, chronic, prior))
        subject_id = 10**7 + (index * _STEP + self._offset) % 10**7
        return Patient(index=index, subject_id=subject_id, sex=sex, chest=chest, studies=tuple(studies))

    def patients(self, count: int) -> Iterator[Patient]:
        """The first `count` patients."""
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
        rng = generator(self.seed, *number)
        findings = sample_findings(rng, profile, chronic)
        key = (self.seed, *number)
        views = tuple(
            take_view((*key, i), position, chest, findings) for i, position in enumerate(_positions(rng, findings))
        )
        return Study(
            study_id=5 * 10**7 + ((number[0] * MAX_STUDIES + number[1]) * _STEP + self._offset) % 10**7,
            taken=day + datetime.timedelta(milliseconds=int(rng.integers(24 * 3600 * 1000))),
            sex=sex,
            age=age,
            findings=findings,
            prior=prior,
            views=views,
            key=key,
        )


def _positions(rng: np.random.Generator, findings: tuple[Finding, ...]) -> list[str]:
    """Portable AP for the very ill, PA with a lateral view for those who can stand."""
    kinds = {part.kind for finding in findings for part in finding.parts}
    bedside = 0.92 if kinds & {"endotracheal tube", "enteric tube", "chest tube"} else 0.32
    if rng.random() < bedside:
        return ["AP"] * (2 if rng.random() < 0.12 else 1)
    lateral = "LL" if rng.random() < 0.25 else "LATERAL"
    return [["PA"], ["PA", lateral], ["PA", "PA", lateral]][rng.choice(3, p=[0.16, 0.77, 0.07])]


def take_view(key: tuple[int, ...], position: str, chest: Chest, findings: tuple[Finding, ...]) -> View:
    """One view of a chest with findings: `key` (a seed first) decides how the patient stands and is exposed."""
    rng = generator(*key)
    kind = "LATERAL" if position in LATERAL_POSITIONS else position
    loose = 1.6 if kind == "AP" else 1.0  # how carefully the patient is placed
    shown = posed(chest, kind, float(rng.normal(0, 0.35)), findings)
    middle = (chest.apex + chest.dome_right + chest.angle_drop) / 2
    center = (float(rng.normal(1.0 if kind == "LATERAL" else 0.0, 0.5 * loose)), middle + float(rng.normal(0, 0.5)))
    width = chest.depth + 15 if kind == "LATERAL" else 2 * chest.half_width
    portrait, square, landscape = (0.75, 0.2, 0.05) if kind == "LATERAL" else (0.45, 0.12, 0.43)
    camera = Camera(
        field=float(np.clip(width + rng.uniform(5.5, 10.5), 32.5, 43.0)),
        aspect=float(rng.choice([0.82, 1.0, 1.22], p=[portrait, square, landscape])),
        center=center,
        degrees=float(rng.normal(0, 1.1 * loose)),
    )
    return View(
        dicom_id="-".join(f"{int(word):08x}" for word in rng.integers(0, 1 << 32, 5)),
        position=position,
        camera=camera,
        chest=shown,
        findings=findings,
        arms=float(rng.uniform(0.2, 2.5)),
        motion=float(rng.beta(1.2, 5.0) * loose / 1.3),
        exposure=sample_exposure(rng, kind),
        markers=sample_markers(rng, kind),
        key=key,
    )
