"""CANDID-PTX: the converter on fixtures in the published layout, and its run-length masks."""

import csv
from pathlib import Path

import numpy as np
import pytest
from helpers.box_corpora import convert, samples_of, write_phantom
from helpers.errors import raises

from medvl.data.annotations import decode_runs, encode_runs, read_starts
from medvl.data.corpora.reports.candid_ptx import CandidPTX
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest, split_folders
from medvl.data.shards.verify import compare_counts
from medvl.errors import CorpusError
from medvl.phantom import World, masks, read_truth
from medvl.phantom.layouts.kaggle import REFERENCE_SIZE, square_frontal_views, uid
from medvl.phantom.layouts.tables import encode_starts

ONE, TWO = "1.2.840.1", "1.2.840.2"
REPORTS = f"""SOPInstanceUID,StudyInstanceUID,Report,EncodedPixels
{ONE},1.2.3.45678,"FINDINGS: A pneumothorax.
COMMENT: Small.",1 2 1025 3
{ONE},1.2.3.45678,"FINDINGS: A pneumothorax.
COMMENT: Small.",4097 2
{ONE},1.2.3.45678,Another text.,4097 2
{TWO},1.2.3.45679,No pneumothorax.,-1
"""
TUBES = f"anon_SOPUID,annotation_ref,mask_rle\n{ONE},A,5 1\n1.2.840.9,A,5 1\n"


def write(root: Path, reports: str = REPORTS, tubes: str | None = TUBES) -> Path:
    (root / "Pneumothorax_reports.csv").write_text(reports)
    if tubes is not None:
        (root / "chest_tube.csv").write_text(tubes)
    return root


def test_starts_become_runs_by_column() -> None:
    mask_HW = np.zeros((4, 3), bool)
    mask_HW[1:3, 0] = mask_HW[0, 2] = True
    assert encode_starts(mask_HW) == "2 2 9 1"
    assert read_starts("2 2 9 1", 4, 3) == encode_runs(mask_HW) == "1 2 5 1"
    assert (decode_runs(read_starts("2 2 9 1", 4, 3), 4, 3) == mask_HW).all()
    assert read_starts("1 12", 4, 3) == "0 12"
    assert read_starts("-1", 4, 3) == read_starts(" ", 4, 3) == "-1"
    for text, code in (
        ("2 2 3 1", "malformed"), ("9 1 2 2", "malformed"), ("2", "malformed"), ("a b", "malformed"),
        ("0 1", "out_of_range"), ("12 2", "out_of_range"), ("2 0", "out_of_range"),
        ("1 99999999999999999999", "malformed"),
    ):  # fmt: skip
        with raises(CorpusError, code, "masks"):
            read_starts(text, 4, 3)


@pytest.mark.parametrize("seed", range(8))
def test_starts_of_any_mask_are_its_runs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 12, 2)
    mask_HW = rng.random((height, width)) < rng.uniform(0.1, 1.0)
    mask_HW[rng.integers(height), rng.integers(width)] = True
    runs = read_starts(encode_starts(mask_HW), int(height), int(width))
    assert runs == encode_runs(mask_HW)
    assert (decode_runs(runs, int(height), int(width)) == mask_HW).all()


def test_rows_of_an_image_are_one_sample(tmp_path: Path, deid: Deidentifier) -> None:
    (tmp_path / "deep").mkdir()
    for name in (f"{ONE}.jpg", TWO):
        (tmp_path / "deep" / name).write_bytes(b"")
    plan = CandidPTX(root=write(tmp_path)).plan(deid)
    first, second = plan.iter_samples()
    assert (plan.rows.unit, plan.rows.read, plan.rows.kept) == ("rows", 4, 4)
    assert plan.label_names == ("Pneumothorax", "Chest tube")
    assert first.labels == {"Pneumothorax": 1, "Chest tube": 1}
    assert second.labels == {"Pneumothorax": 0, "Chest tube": 0}
    assert first.extra["masks"] == [
        {"label": "Pneumothorax", "runs": "0 2 1022 3"},
        {"label": "Pneumothorax", "runs": "4096 2"},
        {"label": "Chest tube", "runs": "4 1"},
    ]
    assert first.sections["findings"].startswith("A pneumothorax.")
    assert second.sections == {"report": "No pneumothorax."}
    assert (first.image, second.image) == (tmp_path / f"deep/{ONE}.jpg", tmp_path / f"deep/{TWO}")
    assert first.patient == deid.patient("1.2.3.45678")
    counted = ("studies_are_patients", "mask_without_report", "repeated_mask",
               "reports_of_image_differ")  # fmt: skip
    assert [plan.warnings[name] for name in counted] == [2, 1, 1, 1]
    write(tmp_path, tubes=None)
    (tmp_path / "chest_tube.csv").unlink()
    assert CandidPTX(root=tmp_path).plan(deid).label_names == ("Pneumothorax",)


@pytest.mark.parametrize(
    ("reports", "tubes", "expected"),
    [
        (REPORTS.replace("4097 2\n", "4 2 3 1\n"), TUBES, ("malformed", "masks")),
        (REPORTS.replace("45678,Another", "99999,Another"), TUBES, ("malformed", "StudyInstanceUID")),
        (REPORTS.replace(TWO, "../x"), TUBES, ("malformed", "SOPInstanceUID")),
        (REPORTS, TUBES.replace("mask_rle", "runs"), ("missing", "mask_rle")),
        (REPORTS, TUBES.replace("5 1", "5"), ("malformed", "masks")),
    ],
)  # fmt: skip
def test_damaged_tables_raise(
    reports: str, tubes: str, expected: tuple[str, ...], tmp_path: Path, deid: Deidentifier
) -> None:
    with raises(CorpusError, *expected):
        CandidPTX(root=write(tmp_path, reports, tubes)).plan(deid)


def test_verify_compares_the_rows_of_the_release(tmp_path: Path) -> None:
    write_phantom("candid-ptx", tmp_path / "corpus", 2, 64, 50)
    convert(tmp_path / "corpus", "candid-ptx", tmp_path / "shards")
    table = (tmp_path / "corpus/Pneumothorax_reports.csv").read_text()
    folders = split_folders(tmp_path / "shards")
    manifests = {folder.name: Manifest.read(folder) for folder in folders}
    rows = len(list(csv.DictReader(table.splitlines(keepends=True))))
    assert compare_counts(manifests, CandidPTX.counts) == {"rows": (rows, 19_640)}
    assert compare_counts(manifests, {"rows": rows}) == {}


def test_phantom_masks_are_those_of_the_world(tmp_path: Path, deid: Deidentifier) -> None:
    write_phantom("candid-ptx", tmp_path / "corpus", 12, 64, 50)
    convert(tmp_path / "corpus", "candid-ptx", tmp_path / "shards")
    samples = {one.key: one for one in samples_of(tmp_path / "shards", "train", "validate", "test")}
    assert len(samples) == len(list(read_truth(tmp_path / "corpus")))
    several = 0
    for patient in World(50).patients(12):
        for _, view in square_frontal_views(patient):
            sample = samples[deid.image(str(uid(view)))]
            expected_HW = masks(view, REFERENCE_SIZE).get("Pneumothorax")
            runs = [
                each["runs"] for each in sample.extra["masks"] if each["label"] == "Pneumothorax"
            ]
            parts_HW = [decode_runs(text, REFERENCE_SIZE, REFERENCE_SIZE) for text in runs]
            several += len(runs) > 1
            assert bool(runs) == (expected_HW is not None) == bool(sample.labels["Pneumothorax"])
            if expected_HW is not None:
                assert (np.any(parts_HW, axis=0) == expected_HW).all()
    assert several
