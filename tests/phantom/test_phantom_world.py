"""Population of the phantom: reproducible, plausible and consistent."""

import dataclasses
import re
from collections import Counter

import pytest
from helpers.errors import raises

from medvl.errors import ConfigError
from medvl.phantom import World
from medvl.phantom.layouts.writer import Options
from medvl.phantom.population.findings import CHRONIC, OPAQUE
from medvl.phantom.population.world import MAX_PATIENTS
from medvl.schema import COMPETITION_FINDINGS, FINDINGS


@pytest.fixture(scope="module")
def patients():
    return list(World(11).patients(1200))


@pytest.fixture(scope="module")
def studies(patients):
    return [study for patient in patients for study in patient.studies]


def test_patient_depends_on_seed_and_index_only():
    alone = World(3).patient(41)
    among_others = list(World(3).patients(43))[41]
    assert alone == among_others
    assert alone != World(4).patient(41)
    assert alone.studies != World(3).patient(42).studies


def test_sites_differ_in_devices_alone():
    here, there, elsewhere = (World(3, site=site).patient(41) for site in (0, 1, 2))
    assert here == World(3).patient(41)
    assert here != there != elsewhere
    views = [
        [view for study in patient.studies for view in study.views]
        for patient in (here, there, elsewhere)
    ]
    for one, other, third in zip(*views, strict=True):
        assert len({view.exposure for view in (one, other, third)}) == 3
        assert [marker.text for marker in other.markers] == [
            *(marker.text for marker in one.markers),
            "H1",
        ]
        same = {"exposure": one.exposure, "markers": one.markers}
        assert dataclasses.replace(other, **same) == dataclasses.replace(third, **same) == one
    for study, shifted in zip(here.studies, there.studies, strict=True):
        assert study.labels == shifted.labels


def test_options_of_releases_name_a_site_only_where_there_is_one():
    options = Options(
        corpus="mimic-cxr", patients=1, seed=0, size=64, split=(1.0, 0.0, 0.0), reports=True
    )
    assert "site" not in options.as_json()
    assert dataclasses.replace(options, site=2).as_json()["site"] == 2
    with raises(ConfigError, "out_of_range", "site"):
        dataclasses.replace(options, site=-1)


def test_last_patient_exists():
    assert World(0).patient(MAX_PATIENTS - 1).studies


@pytest.mark.parametrize("index", [-1, MAX_PATIENTS])
def test_index_out_of_range_raises(index):
    with raises(ConfigError, "out_of_range", "index"):
        World(0).patient(index)


def test_negative_seed_raises():
    with raises(ConfigError, "out_of_range", "seed"):
        World(-1)


def test_identifiers_have_the_form_of_mimic_and_are_unique(patients, studies):
    views = [view for study in studies for view in study.views]
    subject_ids = [patient.subject_id for patient in patients]
    study_ids = [study.study_id for study in studies]
    dicom_ids = [view.dicom_id for view in views]
    assert all(re.fullmatch(r"1\d{7}", str(number)) for number in subject_ids)
    assert all(re.fullmatch(r"5\d{7}", str(number)) for number in study_ids)
    assert all(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{8}){4}", name) for name in dicom_ids)
    for names in (subject_ids, study_ids, dicom_ids):
        assert len(set(names)) == len(names)


def test_prevalence_is_in_the_range_that_recipes_need(studies):
    share = {
        label: sum(study.labels[label] for study in studies) / len(studies) for label in FINDINGS
    }
    for label in COMPETITION_FINDINGS:
        assert 0.15 <= share[label] <= 0.35, label
    assert 0.2 <= share["No Finding"] <= 0.4
    assert all(share[label] > 0.03 for label in FINDINGS)


def test_findings_have_realistic_co_occurrence(studies):
    def conditional(label, given):
        cases = [study for study in studies if study.labels[given]]
        return sum(study.labels[label] for study in cases) / len(cases)

    def overall(label):
        return sum(study.labels[label] for study in studies) / len(studies)

    assert conditional("Edema", "Cardiomegaly") > 1.5 * overall("Edema")
    assert conditional("Pneumothorax", "Fracture") > 1.5 * overall("Pneumothorax")
    assert conditional("Consolidation", "Pneumonia") > 1.5 * overall("Consolidation")


def test_labels_are_complete_and_consistent(studies):
    for study in studies:
        labels = study.labels
        assert tuple(labels) == FINDINGS
        has_finding = any(
            labels[name] for name in FINDINGS if name not in ("No Finding", "Support Devices")
        )
        assert labels["No Finding"] == int(not has_finding)
        if any(labels[name] for name in OPAQUE):
            assert labels["Lung Opacity"] == 1


def test_chronic_findings_persist_and_dates_increase(patients):
    for patient in patients:
        chronic = [{f for f in study.findings if f.label in CHRONIC} for study in patient.studies]
        assert all(findings == chronic[0] for findings in chronic)
        days = [study.taken.date() for study in patient.studies]
        assert days == sorted(days)
        assert [study.prior for study in patient.studies] == [
            None,
            *(s.findings for s in patient.studies[:-1]),
        ]


def test_every_study_has_up_to_three_views_and_a_frontal_first(studies):
    positions = Counter()
    for study in studies:
        assert not study.views[0].lateral
        assert 1 <= len(study.views) <= 3
        positions.update(view.position for view in study.views)
    assert set(positions) == {"PA", "AP", "LATERAL", "LL"}
    assert all(0.05 < count / sum(positions.values()) < 0.5 for count in positions.values())


def test_severity_and_side_follow_from_the_parts(studies):
    sides, severities = Counter(), Counter()
    for finding in (finding for study in studies for finding in study.findings):
        assert finding.extent == max(part.extent for part in finding.parts)
        assert finding.severity == (
            "mild" if finding.extent < 1 / 3 else "moderate" if finding.extent < 2 / 3 else "severe"
        )
        named = {part.side for part in finding.parts} - {"midline"}
        assert finding.side == ("bilateral" if len(named) == 2 else next(iter(named), "midline"))
        sides[finding.side] += 1
        severities[finding.severity] += 1
    assert min(sides.values()) > 100
    assert min(severities.values()) > 500
