"""Corpora of the phantom: exact layouts, reproducible bytes, and no overwriting."""

import csv
import gzip
import io
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pydicom
import pytest
import simplejpeg
from helpers.errors import raises
from PIL import Image
from pydicom.pixels import apply_voi_lut, get_encoder
from pydicom.uid import JPEG2000Lossless, JPEGLSLossless

from medvl.errors import ConfigError, CorpusError
from medvl.phantom import (
    World,
    boxes,
    contact_sheet,
    draw,
    split_of,
    write_chexpert,
    write_mimic_cxr,
    write_mimic_cxr_jpg,
)
from medvl.phantom.language.reports import compose_report
from medvl.phantom.layouts.dicom_writer import dicom_bytes, encoding_of
from medvl.schema import FINDINGS

PATIENTS, SEED, SIZE = 14, 3, 96
DICOM_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{8}){4}"


@pytest.fixture(scope="module")
def mimic(tmp_path_factory):
    return write_mimic_cxr(
        tmp_path_factory.mktemp("mimic"), patients=PATIENTS, seed=SEED, size=SIZE, workers=1
    )


@pytest.fixture(scope="module")
def jpg(tmp_path_factory):
    return write_mimic_cxr_jpg(
        tmp_path_factory.mktemp("jpg"), patients=PATIENTS, seed=SEED, size=SIZE, workers=1
    )


@pytest.fixture(scope="module")
def chexpert(tmp_path_factory):
    split = (0.5, 0.25, 0.25)
    out = tmp_path_factory.mktemp("chexpert")
    return write_chexpert(out, patients=PATIENTS, seed=SEED, size=SIZE, split=split, workers=1)


@pytest.fixture(scope="module")
def views():
    """Return dicom_id -> (patient, study, view)."""
    patients = World(SEED).patients(PATIENTS)
    return {
        v.dicom_id: (patient, study, v)
        for patient in patients
        for study in patient.studies
        for v in study.views
    }


def rows_of(path):
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return list(csv.DictReader(content.decode().splitlines()))


def content(root: Path):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


# MIMIC-CXR


def test_mimic_has_the_files_of_the_release(mimic, views):
    images = sorted(path.relative_to(mimic).as_posix() for path in mimic.glob("files/*/*/*/*.dcm"))
    for name in images:
        match = re.fullmatch(rf"files/p(\d\d)/p((\d\d)\d{{6}})/s(5\d{{7}})/({DICOM_ID})\.dcm", name)
        assert match
        assert match[1] == match[3]
        patient, study, _ = views[match[5]]
        assert (match[2], match[4]) == (str(patient.subject_id), str(study.study_id))
    assert len(images) == len(views)
    reports = list(mimic.glob("files/*/*/s*.txt"))
    assert {path.with_suffix("") for path in reports} == {
        path.parent for path in mimic.glob("files/*/*/*/*.dcm")
    }
    study = next(iter(views.values()))[1]
    written = next(path for path in reports if path.stem == f"s{study.study_id}")
    assert written.read_text(encoding="utf-8") == compose_report(study).text


def test_mimic_tables_have_the_columns_of_the_release(mimic):
    headers = {path.name: list(rows_of(path)[0]) for path in mimic.glob("*.csv.gz")}
    labels = ["subject_id", "study_id", *FINDINGS]
    assert headers == {
        "cxr-record-list.csv.gz": ["subject_id", "study_id", "dicom_id", "path"],
        "cxr-study-list.csv.gz": ["subject_id", "study_id", "path"],
        "mimic-cxr-2.0.0-chexpert.csv.gz": labels,
        "mimic-cxr-2.0.0-negbio.csv.gz": labels,
        "mimic-cxr-2.0.0-split.csv.gz": ["dicom_id", "study_id", "subject_id", "split"],
        "mimic-cxr-2.0.0-metadata.csv.gz": [
            "dicom_id",
            "subject_id",
            "study_id",
            "PerformedProcedureStepDescription",
            "ViewPosition",
            "Rows",
            "Columns",
            "StudyDate",
            "StudyTime",
            "ProcedureCodeSequence_CodeMeaning",
            "ViewCodeSequence_CodeMeaning",
            "PatientOrientationCodeSequence_CodeMeaning",
        ],
    }


def test_mimic_tables_agree_with_the_files(mimic, views):
    records = rows_of(mimic / "cxr-record-list.csv.gz")
    assert {row["dicom_id"] for row in records} == set(views)
    assert all((mimic / row["path"]).is_file() for row in records)
    assert all((mimic / row["path"]).is_file() for row in rows_of(mimic / "cxr-study-list.csv.gz"))
    subjects = [row["subject_id"] for row in records]
    assert subjects == sorted(subjects)
    for row in rows_of(mimic / "mimic-cxr-2.0.0-metadata.csv.gz"):
        patient, study, view = views[row["dicom_id"]]
        assert (row["subject_id"], row["study_id"]) == (
            str(patient.subject_id),
            str(study.study_id),
        )
        assert (int(row["Rows"]), int(row["Columns"])) == view.camera.shape(SIZE)
        assert row["ViewPosition"] in (view.position, "")
        assert row["StudyDate"] == f"{study.taken:%Y%m%d}"
        assert float(row["StudyTime"]) == pytest.approx(float(f"{study.taken:%H%M%S.%f}"))


def test_mimic_splits_are_by_patient(mimic, views):
    split_of_patient = {}
    for row in rows_of(mimic / "mimic-cxr-2.0.0-split.csv.gz"):
        index = views[row["dicom_id"]][0].index
        expected = ("train", "validate", "test")[split_of(index, SEED, (0.8, 0.05, 0.15))]
        assert (
            split_of_patient.setdefault(row["subject_id"], row["split"]) == row["split"] == expected
        )


def test_mimic_labels_equal_those_of_the_reports(mimic, views):
    studies = {str(study.study_id): study for _, study, _ in views.values()}
    table = {row["study_id"]: row for row in rows_of(mimic / "mimic-cxr-2.0.0-chexpert.csv.gz")}
    assert set(table) == set(studies)
    for number, study in studies.items():
        labels = compose_report(study).labels
        cells = {1: "1.0", 0: "0.0", -1: "-1.0", None: ""}
        assert [table[number][name] for name in FINDINGS] == [
            cells[labels.get(name)] for name in FINDINGS
        ]
    other = rows_of(mimic / "mimic-cxr-2.0.0-negbio.csv.gz")
    assert [row["study_id"] for row in other] == list(table)
    assert other != list(table.values())  # the two labelers differ


def test_dicom_pixels_restore_the_drawn_image(mimic, views):
    for row in rows_of(mimic / "cxr-record-list.csv.gz"):
        dataset = pydicom.dcmread(mimic / row["path"])
        assert (dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit) == (16, 12, 11)
        stored = dataset.pixel_array
        assert stored.max() <= 4095
        shown = np.asarray(apply_voi_lut(stored, dataset), dtype=float)
        if dataset.PhotometricInterpretation == "MONOCHROME1":
            shown = 4095 - shown
        image_HW = draw(views[row["dicom_id"]][2], SIZE)
        assert np.abs(shown - image_HW).max() <= 2


def test_dicom_headers_contain_an_identity(mimic, views):
    row = rows_of(mimic / "cxr-record-list.csv.gz")[0]
    dataset = pydicom.dcmread(mimic / row["path"], stop_before_pixels=True)
    assert row["subject_id"] in dataset.PatientID
    assert dataset.Modality in ("CR", "DX")
    assert str(dataset.PatientName)
    assert dataset.StudyDate == f"{views[row['dicom_id']][1].taken:%Y%m%d}"


def test_all_pixel_encodings_occur():
    encodings = [
        encoding_of(view)
        for patient in World(0).patients(150)
        for study in patient.studies
        for view in study.views
    ]
    syntaxes = Counter(encoding.syntax.keyword for encoding in encodings)
    assert set(syntaxes) == {
        "ExplicitVRLittleEndian",
        "ImplicitVRLittleEndian",
        "RLELossless",
        "JPEG2000Lossless",
        "JPEGLSLossless",
    }
    assert min(syntaxes.values()) > 0.03 * len(encodings)
    assert 0.1 < sum(encoding.inverted for encoding in encodings) / len(encodings) < 0.3
    assert 0.08 < sum(encoding.table for encoding in encodings) / len(encodings) < 0.25


def test_without_pyjpegls_jpeg_2000_holds_the_same_pixels():
    patient, study, view = next(
        (patient, study, view)
        for patient in World(0).patients(150)
        for study in patient.studies
        for view in study.views
        if encoding_of(view).syntax == JPEGLSLossless
    )
    image_HW = draw(view, SIZE)
    written = dicom_bytes(patient, study, view, image_HW)
    encoder = get_encoder(JPEGLSLossless)
    encoder.remove_plugin("pyjpegls")
    try:
        replaced = dicom_bytes(patient, study, view, image_HW)
    finally:
        encoder.add_plugin("pyjpegls", ("pydicom.pixels.encoders.pyjpegls", "_encode_frame"))
    one, other = (pydicom.dcmread(io.BytesIO(each)) for each in (written, replaced))
    assert other.file_meta.TransferSyntaxUID == JPEG2000Lossless
    assert np.array_equal(one.pixel_array, other.pixel_array)


def test_ground_truth_has_one_row_per_view(mimic, views):
    with gzip.open(mimic / "phantom_truth.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert {row["dicom_id"] for row in rows} == set(views)
    for row in rows:
        _, study, view = views[row["dicom_id"]]
        assert row["labels"] == study.labels
        assert (row["height"], row["width"]) == view.camera.shape(SIZE)
        assert [box["label"] for box in row["boxes"]] == [box.label for box in boxes(view, SIZE)]
        assert row["severity"] == {finding.label: finding.severity for finding in study.findings}


# MIMIC-CXR-JPG


def test_jpg_release_has_the_same_patients(mimic, jpg, views):
    for name in ("metadata", "split", "chexpert", "negbio"):
        table = f"mimic-cxr-2.0.0-{name}.csv.gz"
        assert (jpg / table).read_bytes() == (mimic / table).read_bytes()
    images = list(jpg.glob("files/*/*/*/*.jpg"))
    assert {path.stem for path in images} == set(views)
    decoded = simplejpeg.decode_jpeg(images[0].read_bytes(), colorspace="GRAY")[..., 0]
    drawn = draw(views[images[0].stem][2], SIZE)
    assert decoded.shape == drawn.shape
    assert np.abs(decoded.astype(float) - (drawn >> 4)).mean() < 3
    assert len(list(jpg.glob("files/*/*/*.txt"))) == len(
        {study.study_id for _, study, _ in views.values()}
    )


def test_jpg_release_without_reports(tmp_path):
    root = write_mimic_cxr_jpg(tmp_path, patients=2, size=32, reports=False, workers=1)
    assert list(root.glob("files/*/*/*/*.jpg"))
    assert not list(root.rglob("*.txt"))


# CheXpert


def test_chexpert_tables_and_files_agree(chexpert):
    assert chexpert.name == "CheXpert-v1.0-small"
    header = (
        "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Enlarged "
        "Cardiomediastinum,Cardiomegaly,Lung Opacity,"
        "Lung Lesion,Edema,Consolidation,Pneumonia,Atelectasis,Pneumothorax,Pleural "
        "Effusion,Pleural Other,Fracture,"
        "Support Devices"
    )
    seen, patients = set(), []
    for split in ("train", "valid", "test"):
        path = chexpert / f"{split}.csv"
        assert path.read_text(encoding="utf-8").splitlines()[0] == header
        for row in rows_of(path):
            form = rf"CheXpert-v1\.0-small/{split}/patient\d{{5}}/study\d+/view\d+_(frontal|lateral)\.jpg"
            match = re.fullmatch(form, row["Path"])
            assert match
            assert row["Frontal/Lateral"].lower() == match[1]
            assert row["AP/PA"] in (("",) if match[1] == "lateral" else ("AP", "PA"))
            assert row["Sex"] in ("Male", "Female")
            assert 18 <= int(row["Age"]) <= 110
            assert (chexpert.parent / row["Path"]).is_file()
            seen.add(row["Path"])
        patients.append({row["Path"].split("/")[2] for row in rows_of(path)})
    assert all(patients)
    assert not patients[0] & patients[1] | patients[0] & patients[2] | patients[1] & patients[2]
    assert seen == {
        f"CheXpert-v1.0-small/{path.relative_to(chexpert).as_posix()}"
        for path in chexpert.rglob("*.jpg")
    }


def test_chexpert_evaluation_labels_are_complete(chexpert):
    cells = {
        split: {row[name] for row in rows_of(chexpert / f"{split}.csv") for name in FINDINGS}
        for split in ("train", "valid", "test")
    }
    assert cells == {
        "train": {"1.0", "0.0", "-1.0", ""},
        "valid": {"1.0", "0.0"},
        "test": {"1.0", "0.0"},
    }
    assert {row["No Finding"] for row in rows_of(chexpert / "train.csv")} <= {"1.0", ""}


# All releases


def assert_independent_of_workers(folder, write):
    one = write(folder / "one", patients=5, seed=8, size=48, workers=1)
    two = write(folder / "two", patients=5, seed=8, size=48, workers=2)
    assert content(one) == content(two)


def test_output_is_independent_of_workers(tmp_path):
    """Workers are new interpreters, as in use."""
    assert_independent_of_workers(tmp_path, write_mimic_cxr)


@pytest.mark.usefixtures("forked_workers")
def test_output_of_chexpert_is_independent_of_workers(tmp_path):
    assert_independent_of_workers(tmp_path, write_chexpert)


def test_second_run_changes_nothing(mimic):
    before = {path: path.stat().st_mtime_ns for path in mimic.rglob("*")}
    write_mimic_cxr(mimic, patients=PATIENTS, seed=SEED, size=SIZE, workers=1)
    assert {path: path.stat().st_mtime_ns for path in mimic.rglob("*")} == before


def test_interrupted_run_is_completed(tmp_path):
    complete = write_mimic_cxr(tmp_path / "complete", patients=4, size=48, workers=1)
    cut = write_mimic_cxr(tmp_path / "cut", patients=4, size=48, workers=1)
    remaining, *removed = sorted(cut.rglob("*.dcm"))
    stamp = remaining.stat().st_mtime_ns
    for path in (*removed, cut / "cxr-record-list.csv.gz"):
        path.unlink()
    options = json.loads((cut / "phantom.json").read_text(encoding="utf-8"))
    (cut / "phantom.json").write_text(json.dumps({**options, "finished": False}), encoding="utf-8")
    write_mimic_cxr(cut, patients=4, size=48, workers=1)
    assert content(cut) == content(complete)
    assert remaining.stat().st_mtime_ns == stamp


def test_another_corpus_is_not_overwritten(mimic):
    with raises(CorpusError, "exists", "out", names="another patients, another seed"):
        write_mimic_cxr(mimic, patients=PATIENTS + 1, seed=SEED + 1, size=SIZE)
    with raises(CorpusError, "exists", "out", names="another corpus"):
        write_mimic_cxr_jpg(mimic, patients=PATIENTS, seed=SEED, size=SIZE)


@pytest.mark.parametrize("name", ["notes.txt", "phantom.json"])
def test_folder_with_other_content_raises(tmp_path, name):
    (tmp_path / name).write_text("not json", encoding="utf-8")
    with raises(CorpusError, "exists", "out", names="phantom.json"):
        write_mimic_cxr(tmp_path, patients=2)
    assert content(tmp_path) == {name: b"not json"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("patients", 0),
        ("size", 8),
        ("seed", -2),
        ("split", (0.9, 0.2, 0.1)),
        ("split", (1.2, -0.1, -0.1)),
        ("workers", 0),
    ],
)
def test_options_out_of_range_raise(tmp_path, field, value):
    with raises(ConfigError, "out_of_range", field):
        write_chexpert(tmp_path, **{field: value})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("patients", [40, 400, 4000])
def test_split_shares_hold_for_any_number_of_patients(patients):
    parts = Counter(split_of(index, 0, (0.8, 0.05, 0.15)) for index in range(patients))
    assert parts[0] / patients == pytest.approx(0.8, abs=1.5 / patients + 0.01)
    assert parts[2] / patients == pytest.approx(0.15, abs=1.5 / patients + 0.01)
    assert parts[1] >= 1


# Contact sheet


def test_contact_sheet_has_one_row_per_finding(tmp_path):
    path = contact_sheet(
        World(1),
        tmp_path / "new" / "sheet.png",
        labels=("Edema", "Pneumothorax"),
        tile=64,
        mark=True,
    )
    with Image.open(path) as image:
        assert image.size == (5 * 64, 2 * (64 + 18))
        assert np.asarray(image).std() > 30


def test_contact_sheet_of_an_unknown_finding_raises(tmp_path):
    with raises(ConfigError, "unknown_name", "labels", names="Cold"):
        contact_sheet(World(0), tmp_path / "sheet.png", labels=("Edema", "Cold"))


def test_frontal_only_leaves_out_lateral_views_and_changes_nothing_else(mimic, tmp_path):
    frontal = write_mimic_cxr(
        tmp_path, patients=PATIENTS, seed=SEED, size=SIZE, frontal_only=True, workers=1
    )
    reports = {path.relative_to(mimic): path.read_bytes() for path in mimic.rglob("*.txt")}
    assert reports == {
        path.relative_to(frontal): path.read_bytes() for path in frontal.rglob("*.txt")
    }
    images = {path.name: path.read_bytes() for path in mimic.rglob("*.dcm")}
    kept = {path.name: path.read_bytes() for path in frontal.rglob("*.dcm")}
    assert 0 < len(kept) < len(images)
    assert kept.items() <= images.items()
    with gzip.open(frontal / "mimic-cxr-2.0.0-metadata.csv.gz", "rt") as table:
        assert {row["dicom_id"] + ".dcm" for row in csv.DictReader(table)} == kept.keys()
