"""The phantom corpus in the layouts of MIMIC-CXR 2.0.0 (DICOM) and MIMIC-CXR-JPG 2.0.0."""

import functools
from collections.abc import Mapping
from pathlib import Path

from medvl.phantom.language.reports import compose_report
from medvl.phantom.layouts.dicom_writer import dicom_bytes, orientation, procedure, view_code, view_position
from medvl.phantom.layouts.writer import Options, PatientRows, label_cells, truth_row, write_file, write_release
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.encode import encode_jpeg
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
_LISTS = {_RECORDS: ("subject_id", "study_id", "dicom_id", "path"), _STUDIES: ("subject_id", "study_id", "path")}


def write_mimic_cxr(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.05, 0.15),
    frontal_only: bool = False,
    site: int = 0,
    workers: int | None = None,
) -> Path:
    """Write a phantom MIMIC-CXR: 12-bit DICOM files, reports beside the study folders, and the tables of the release.

    Args:
        out: folder of `files/` and the tables: empty or absent, or a finished or partial corpus with the same options.
            A finished one is not changed.
        patients: number of patients, with 2.3 studies and 3.7 images on average.
        seed: seed of the world.
        size: pixels of the longer side of every image.
        split: shares of patients in train, validate and test.
        frontal_only: leave out lateral views, which saves 40 % of the time; the frontal ones are the same.
        site: hospital whose devices took the images: 0, or 1, 2, ... with other exposure, processing, noise and letters
            in the image. Patients, findings and reports of a seed are the same at all sites.
        workers: number of processes; None for one per core. The output does not depend on it. With more than one, a
            script must call this below `if __name__ == "__main__":`.

    Returns the folder. Raises ConfigError ("out_of_range") for an option, and CorpusError ("exists") if `out` contains
    anything else.
    """
    options = Options(
        corpus="mimic-cxr",
        patients=patients,
        seed=seed,
        size=size,
        split=split,
        reports=True,
        frontal_only=frontal_only,
        site=site,
    )
    write_patient = functools.partial(_write_patient, suffix=".dcm")
    return write_release(Path(out), options, write_patient, {**_TABLES, **_LISTS}, workers)


def write_mimic_cxr_jpg(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.05, 0.15),
    reports: bool = True,
    frontal_only: bool = False,
    site: int = 0,
    workers: int | None = None,
) -> Path:
    """Write a phantom MIMIC-CXR-JPG: the patients of `write_mimic_cxr` as 8-bit JPEG.

    The real release has no reports; users add those of MIMIC-CXR, as `reports=True` does. The other arguments are those
    of `write_mimic_cxr`.
    """
    options = Options(
        corpus="mimic-cxr-jpg",
        patients=patients,
        seed=seed,
        size=size,
        split=split,
        reports=reports,
        frontal_only=frontal_only,
        site=site,
    )
    return write_release(Path(out), options, functools.partial(_write_patient, suffix=".jpg"), _TABLES, workers)


def _write_patient(root: Path, patient: Patient, options: Options, suffix: str) -> PatientRows:
    split = SPLITS[options.split_index(patient.index)]
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
            if options.frontal_only and view.lateral:
                continue
            path = folder / f"{view.dicom_id}{suffix}"
            if not (root / path).exists():
                image_HW = draw(view, options.size)
                content = dicom_bytes(patient, study, view, image_HW) if suffix == ".dcm" else encode_jpeg(image_HW)
                write_file(root / path, content)
            tables[_METADATA].append([view.dicom_id, *ids, *_metadata(study, view, options.size)])
            tables[_SPLIT].append([view.dicom_id, study.study_id, patient.subject_id, split])
            tables[_RECORDS].append([*ids, view.dicom_id, path.as_posix()])
            row_ids = {"dicom_id": view.dicom_id, "subject_id": ids[0], "study_id": ids[1], "path": path.as_posix()}
            truth.append(truth_row(view, study, options.size, **row_ids, split=split))
    return PatientRows(patient.subject_id, tables, truth)


def _metadata(study: Study, view: View, size: int) -> list[object]:
    """Return the columns of the metadata table after the ids; StudyTime is a number without leading zeros."""
    name = procedure(study)
    time = round(float(study.taken.strftime("%H%M%S.%f")), 3)
    date = study.taken.strftime("%Y%m%d")
    return [name, view_position(view), *view.camera.shape(size), date, time, name, view_code(view), orientation(view)]


def _other_labeler(study: Study, labels: Mapping[str, int]) -> dict[str, int]:
    """Return the labels of a second labeler, which differs in some hedges and misses some negations."""
    rng = generator(*study.key, _NEGBIO_STREAM)
    result = {}
    for label, value in labels.items():
        u = rng.random()
        if value == UNCERTAIN and u < 0.15:
            result[label] = 1
        elif not (value == NEGATIVE and u < 0.05):
            result[label] = value
    return result
