"""The phantom corpus in the layouts of MIMIC-CXR 2.0.0 (DICOM) and MIMIC-CXR-JPG 2.0.0."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from medvl.phantom.language.reports import compose_report
from medvl.phantom.layouts.dicom_writer import dicom_bytes, orientation, procedure, view_code, view_position
from medvl.phantom.layouts.writer import Options, Rows, label_cells, truth_row, write_file, write_release
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.draw import draw
from medvl.phantom.seeds import generator
from medvl.schema import FINDINGS, NEGATIVE, UNCERTAIN

SPLITS = ("train", "validate", "test")
_NEGBIO_STREAM = 95
_METADATA = "mimic-cxr-2.0.0-metadata.csv.gz"
_SPLIT = "mimic-cxr-2.0.0-split.csv.gz"
_CHEXPERT = "mimic-cxr-2.0.0-chexpert.csv.gz"
_NEGBIO = "mimic-cxr-2.0.0-negbio.csv.gz"
_RECORDS, _STUDIES = "cxr-record-list.csv.gz", "cxr-study-list.csv.gz"
_TABLES = {
    _METADATA: (
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
    ),
    _SPLIT: ("dicom_id", "study_id", "subject_id", "split"),
    _CHEXPERT: ("subject_id", "study_id", *FINDINGS),
    _NEGBIO: ("subject_id", "study_id", *FINDINGS),
}
_LISTS = {
    _RECORDS: ("subject_id", "study_id", "dicom_id", "path"),
    _STUDIES: ("subject_id", "study_id", "path"),
}


def write_mimic_cxr(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.05, 0.15),
    workers: int | None = None,
) -> Path:
    """Write the phantom as MIMIC-CXR: 12-bit DICOM, reports beside the study folders, the tables of the release.

    Args:
        out: the folder that will hold `files/` and the tables: empty or absent, or a finished or partial run of the
            same options. A finished one is left as it is.
        patients: how many; a patient has 2.3 studies and 3.7 images on average.
        seed: decides everything.
        size: pixels of the longer side of every image.
        split: shares of the patients in train, validate and test.
        workers: processes; None takes one a core. Their number does not change a byte. With more than one, a script
            must call this below `if __name__ == "__main__":`.

    Returns:
        The folder written.

    Raises:
        ConfigError: an option is out of range.
        CorpusError: `out` holds something else.
    """
    options = Options(corpus="mimic-cxr", patients=patients, seed=seed, size=size, split=split, reports=True)
    return write_release(Path(out), options, _write_dicom_patient, {**_TABLES, **_LISTS}, workers)


def write_mimic_cxr_jpg(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.05, 0.15),
    reports: bool = True,
    workers: int | None = None,
) -> Path:
    """Write the phantom as MIMIC-CXR-JPG: the same patients as `write_mimic_cxr` as 8-bit JPEG.

    The real release holds no reports: users lay those of MIMIC-CXR beside it, as `reports=True` does. Everything else
    is as in `write_mimic_cxr`.
    """
    options = Options(corpus="mimic-cxr-jpg", patients=patients, seed=seed, size=size, split=split, reports=reports)
    return write_release(Path(out), options, _write_jpg_patient, _TABLES, workers)


def encode_jpeg(image_HW: NDArray[np.uint16]) -> bytes:
    """A 12-bit image as an 8-bit grey JPEG of quality 95."""
    grey_HW1 = np.ascontiguousarray((image_HW >> 4).astype(np.uint8)[..., None])
    return simplejpeg.encode_jpeg(grey_HW1, quality=95, colorspace="GRAY")


def _write_dicom_patient(root: Path, patient: Patient, options: Options) -> Rows:
    return _write_patient(root, patient, options, ".dcm")


def _write_jpg_patient(root: Path, patient: Patient, options: Options) -> Rows:
    return _write_patient(root, patient, options, ".jpg")


def _write_patient(root: Path, patient: Patient, options: Options, suffix: str) -> Rows:
    split = SPLITS[options.part(patient.index)]
    tables: dict[str, list[list[object]]] = {name: [] for name in (*_TABLES, *_LISTS)}
    truth = []
    for study in patient.studies:
        ids = (patient.subject_id, study.study_id)
        folder = Path("files", f"p{patient.subject_id // 10**6}", f"p{patient.subject_id}", f"s{study.study_id}")
        report = compose_report(study)
        if options.reports:
            write_file((root / folder).with_suffix(".txt"), report.text.encode())
        tables[_STUDIES].append([*ids, folder.with_suffix(".txt").as_posix()])
        tables[_CHEXPERT].append([*ids, *label_cells(report.labels, FINDINGS)])
        tables[_NEGBIO].append([*ids, *label_cells(_other_labeler(study, report.labels), FINDINGS)])
        for view in study.views:
            path = folder / f"{view.dicom_id}{suffix}"
            if not (root / path).exists():
                image_HW = draw(view, options.size)
                content = dicom_bytes(patient, study, view, image_HW) if suffix == ".dcm" else encode_jpeg(image_HW)
                write_file(root / path, content)
            tables[_METADATA].append([view.dicom_id, *ids, *_metadata(study, view, options.size)])
            tables[_SPLIT].append([view.dicom_id, study.study_id, patient.subject_id, split])
            tables[_RECORDS].append([*ids, view.dicom_id, path.as_posix()])
            named = {"dicom_id": view.dicom_id, "subject_id": ids[0], "study_id": ids[1], "path": path.as_posix()}
            truth.append(truth_row(view, study, options.size, **named, split=split))
    return Rows(patient.subject_id, tables, truth)


def _metadata(study: Study, view: View, size: int) -> list[object]:
    """The columns of the metadata table after the ids. StudyTime is a number, so it has lost its leading zeros."""
    name = procedure(study)
    time = round(float(study.taken.strftime("%H%M%S.%f")), 3)
    date = study.taken.strftime("%Y%m%d")
    return [name, view_position(view), *view.camera.shape(size), date, time, name, view_code(view), orientation(view)]


def _other_labeler(study: Study, labels: Mapping[str, int]) -> dict[str, int]:
    """The labels as a second labeler reads them: it differs about some hedges and misses some negations."""
    rng = generator(*study.key, _NEGBIO_STREAM)
    read = {}
    for label, value in labels.items():
        u = rng.random()
        if value == UNCERTAIN and u < 0.15:
            read[label] = 1
        elif not (value == NEGATIVE and u < 0.05):
            read[label] = value
    return read
