"""The phantom corpus in the layout of MS-CXR-T 1.0.0: pairs of studies, and how five findings changed between them."""

import itertools
from pathlib import Path

from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.findings import change_of
from medvl.phantom.population.world import Patient, Study
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.encode import encode_jpeg

TABLE = "MS_CXR_T_temporal_image_classification_v1.0.0.csv"
LABELS = ("Consolidation", "Edema", "Pleural Effusion", "Pneumonia", "Pneumothorax")
_COLUMNS = {label: label.lower().replace(" ", "_") for label in LABELS}
_HEADER = (
    "subject_id",
    "study_id",
    "dicom_id",
    "previous_study_id",
    "previous_dicom_id",
    *(f"{column}_{kind}" for column in _COLUMNS.values() for kind in ("progression", "label_quality")),
)
_PROGRESSION = {
    "new": "worsening",
    "worse": "worsening",
    "same": "stable",
    "better": "improving",
    "resolved": "improving",
}


def write_ms_cxr_t(
    out: Path | str, *, patients: int = 200, seed: int = 0, size: int = 512, workers: int | None = None
) -> Path:
    """Write a phantom MS-CXR-T: its table of image pairs, and their images below `files/`.

    Each study after a patient's first is compared with the previous one, by their first frontal images. A finding has a
    label where one of the two studies has it: new and larger findings are worsening, smaller and resolved ones
    improving, others stable. There are about 1.3 pairs per patient. Arguments and errors are those of
    `write_mimic_cxr`.
    """
    options = Options(corpus="ms-cxr-t", patients=patients, seed=seed, size=size, split=(0.0, 0.0, 1.0), reports=False)
    return write_release(Path(out), options, _write_patient, {TABLE: _HEADER}, workers)


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    rows: list[list[object]] = []
    truth: dict[str, dict[str, object]] = {}
    for before, after in itertools.pairwise(patient.studies):
        changes = {label: change_of(label, before.findings, after.findings) for label in LABELS}
        if not any(changes.values()):
            continue
        names = [_name(patient, study) for study in (after, before)]
        for name, study in zip(names, (after, before), strict=True):
            path = Path("files", f"{name}.jpg")
            if not (root / path).exists():
                write_file(root / path, encode_jpeg(draw(study.frontal, options.size)))
            truth[name] = truth_row(study.frontal, study, options.size, path=path.as_posix())
        cells = [
            cell
            for change in changes.values()
            for cell in (_PROGRESSION.get(str(change), ""), "one_expert" if change else "")
        ]
        rows.append([patient.subject_id, after.study_id, names[0], before.study_id, names[1], *cells])
    return PatientRows(patient.index, {TABLE: rows}, list(truth.values()))


def _name(patient: Patient, study: Study) -> str:
    subject = patient.subject_id
    return f"p{subject // 10**6}/p{subject}/s{study.study_id}/{study.frontal.dicom_id}"
