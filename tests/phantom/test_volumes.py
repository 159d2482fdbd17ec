"""Chest CTs of the phantom: what is drawn is what the labels, masks and reports say."""

import csv
import dataclasses
import json

import numpy as np
import pytest
from helpers.errors import raises

from medvl.data import Volume, check_hounsfield, read_dicom_series, read_nifti
from medvl.errors import ConfigError
from medvl.phantom import (
    compose_ct_report,
    draw_volume,
    finding_masks,
    sample_chest_ct,
    write_volumes,
)
from medvl.phantom.population.volumes import CT_FINDINGS, Vessel

SHAPE = (16, 32, 32)
SCANS = [sample_chest_ct((0, index)) for index in range(40)]


def test_a_scan_depends_on_its_key_alone():
    assert sample_chest_ct((0, 3)) == SCANS[3]
    one, again = (draw_volume(SCANS[3], SHAPE) for _ in range(2))
    np.testing.assert_array_equal(one, again)
    other = draw_volume(SCANS[3], SHAPE, reconstruction=1)
    assert not np.array_equal(one, other)
    assert np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.98


def test_findings_have_their_shares_and_sides():
    scans = [sample_chest_ct((1, index)) for index in range(400)]
    for name, share in CT_FINDINGS.items():
        assert np.mean([scan.labels[name] for scan in scans]) == pytest.approx(share, abs=0.08)
    nodules = [each for scan in scans for each in scan.findings if each.name == "Lung nodule"]
    assert all((each.center[2] < 0) == (each.side == "right") for each in nodules)
    assert 0.4 < np.mean([each.side == "left" for each in nodules]) < 0.6


EXPECTED = {
    "Lung nodule": (-250, 60),
    "Pleural effusion": (-60, 60),
    "Consolidation": (-60, 80),
    "Emphysema": (-980, -900),
    "Cardiomegaly": (20, 60),
    "Pericardial effusion": (-60, 60),
    "Arterial wall calcification": (250, 550),
}


@pytest.mark.parametrize("name", CT_FINDINGS)
def test_masks_have_the_density_of_their_finding(name):
    found = 0
    for scan in SCANS:
        if scan.labels[name] and found < 3:
            mask = finding_masks(scan, (32, 64, 64))[name]
            if mask.sum() < 8:
                continue
            values = draw_volume(scan, (32, 64, 64))[mask]
            low, high = EXPECTED[name]
            assert low <= np.median(values) <= high
            found += 1
    assert found >= 2


def test_values_are_hounsfield_units_in_canonical_order():
    for scan in SCANS[:5]:
        hu_DHW = draw_volume(scan, SHAPE)
        check_hounsfield(Volume(hu_DHW=hu_DHW, spacing=(1, 1, 1)))
        assert hu_DHW.min() == -1024
        bottom, top = hu_DHW[0], hu_DHW[-1]
        assert np.median(bottom[10:22, 5:12]) > -100  # the liver: at the feet, to the right
        assert np.median(bottom[10:22, 20:27]) < np.median(bottom[10:22, 5:12])
        middle = hu_DHW[8, :, 15:17].mean(1)
        assert middle[20:26].max() > 300  # the spine: at the back
        assert middle[:16].max() < 300
        assert top.shape == (32, 32)


def test_a_nodule_is_a_vessel_in_one_slice_and_not_in_others():
    (nodule,) = next(
        [each for each in scan.findings if each.name == "Lung nodule"]
        for scan in SCANS
        if scan.labels["Lung nodule"]
    )
    plain = dataclasses.replace(SCANS[0], findings=(), vessels=(), stretch=(1, 1, 1))
    tube = Vessel(y=nodule.center[1], x=nodule.center[2], radius=nodule.radii[1])
    shape = (61, 64, 64)
    with_nodule = draw_volume(dataclasses.replace(plain, findings=(nodule,)), shape)
    with_vessel = draw_volume(dataclasses.replace(plain, vessels=(tube,)), shape)
    base = draw_volume(plain, shape)
    row = int((nodule.center[0] / 30 + 0.5) * 61)
    changed = [np.abs(each - base).max((1, 2)) > 200 for each in (with_nodule, with_vessel)]
    assert changed[0][row]
    assert changed[1][row]
    assert changed[0].sum() <= 8
    assert changed[1].sum() > 25


def test_reports_name_present_findings_with_side_and_size():
    for scan in SCANS:
        report = compose_ct_report(scan)
        for finding in scan.findings:
            if finding.name == "Lung nodule":
                assert f"{round(finding.diameter_mm)} mm" in report["findings"]
                assert f"{finding.side} lung" in report["impression"]
        assert ("Normal" in report["impression"]) == (not scan.findings)
        positive = [part for part in report["findings"].split(". ") if " no " not in part]
        is_effusion = any("pleural" in sentence for sentence in positive)
        assert is_effusion == bool(scan.labels["Pleural effusion"])


def test_the_layout_reads_back_as_drawn(tmp_path):
    write_volumes(tmp_path, patients=2, shape=(8, 16, 12), reconstructions=2, dicom=True)
    with (tmp_path / "volumes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    for number, row in enumerate(rows):
        scan = sample_chest_ct((0, number // 2))
        drawn = draw_volume(scan, (8, 16, 12), reconstruction=number % 2)
        nifti = read_nifti(tmp_path / row["path"])
        series = read_dicom_series(tmp_path / row["series"])
        np.testing.assert_array_equal(nifti.hu_DHW, drawn)
        np.testing.assert_array_equal(series.hu_DHW, drawn)
        assert dict(series.dropped) == {"localizer": 1}
        assert series.is_hounsfield
        for volume in (nifti, series):
            assert volume.spacing == pytest.approx((37.5, 22.5, 30), rel=1e-6)
        assert row["findings"] == compose_ct_report(scan)["findings"]
        assert {name: int(row[name]) for name in CT_FINDINGS} == scan.labels
    truth = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text().splitlines()]
    assert [line["study"] for line in truth] == ["s00000", "s00001"]
    with raises(ConfigError, "out_of_range"):
        write_volumes(tmp_path, patients=0)
