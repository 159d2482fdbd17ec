"""The phantom corpus in the layouts of CheXpert and MS-CXR-T."""

import itertools
from pathlib import Path

from medvl.phantom.language.reports import compose_report
from medvl.phantom.layouts.writer import (
    Options,
    PatientRows,
    label_cells,
    truth_row,
    write_release,
    write_view,
)
from medvl.phantom.population.findings import change_of
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.scene import encode_jpeg

# The phantom corpus in the layout of CheXpert v1.0 (small).

FOLDER = "CheXpert-v1.0-small"
SPLITS = ("train", "valid", "test")
CHEXPERT_LABELS = (
    "No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion",
    "Edema", "Consolidation", "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion",
    "Pleural Other", "Fracture", "Support Devices",
)  # fmt: skip
"""Labels in CheXpert's order, which differs from that of MIMIC-CXR."""
_CHEXPERT_HEADER = ("Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *CHEXPERT_LABELS)


def write_chexpert(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 390,
    split: tuple[float, float, float] = (0.8, 0.05, 0.15),
    workers: int | None = None,
) -> Path:
    """Write a phantom CheXpert: `CheXpert-v1.0-small` with train, valid and test folders and their
    tables.

    Labels of the training table come from the reports (1, 0, -1 or blank); those of valid and test
    are the ground truth (1 or 0), like the radiologists' labels of the real release. There is no
    text.

    `out` is the parent folder of `CheXpert-v1.0-small`; `size` is 390 for most images of the real
    small release; `split` has the shares of patients in train, valid and test. The other arguments
    and the errors are those of `write_mimic_cxr`. Returns the folder `CheXpert-v1.0-small`.
    """
    options = Options(
        corpus="chexpert", patients=patients, seed=seed, size=size, split=split, reports=False
    )
    columns = {f"{name}.csv": _CHEXPERT_HEADER for name in SPLITS}
    return write_release(Path(out) / FOLDER, options, _write_chexpert_patient, columns, workers)


def _write_chexpert_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = SPLITS[options.split_index(patient.index)]
    rows: list[list[object]] = []
    truth = []
    for number, study in enumerate(patient.studies, 1):
        labels = compose_report(study).labels if split == "train" else study.labels
        for i, view in enumerate(study.views, 1):
            name = f"view{i}_{'lateral' if view.lateral else 'frontal'}.jpg"
            path = Path(split, f"patient{patient.index + 1:05d}", f"study{number}", name)
            write_view(root / path, view, options.size, encode_jpeg)
            full = Path(FOLDER, path).as_posix()
            sex = "Female" if study.sex == "F" else "Male"
            rows.append(
                [full, sex, study.age, *_projection(view), *label_cells(labels, CHEXPERT_LABELS)]
            )
            truth.append(
                truth_row(
                    view, study, options.size, path=full, subject_id=patient.subject_id, split=split
                )
            )
    return PatientRows(patient.index, {f"{split}.csv": rows}, truth)


def _projection(view: View) -> tuple[str, str]:
    """Return the columns Frontal/Lateral and AP/PA."""
    return ("Lateral", "") if view.lateral else ("Frontal", view.position)


# The phantom corpus in the layout of MS-CXR-T 1.0.0: pairs of studies, and how five findings
# changed between them.

TABLE = "MS_CXR_T_temporal_image_classification_v1.0.0.csv"
CHANGE_LABELS = ("Consolidation", "Edema", "Pleural Effusion", "Pneumonia", "Pneumothorax")
_COLUMNS = {label: label.lower().replace(" ", "_") for label in CHANGE_LABELS}
_MS_CXR_T_HEADER = (
    "subject_id",
    "study_id",
    "dicom_id",
    "previous_study_id",
    "previous_dicom_id",
    *(
        f"{column}_{kind}"
        for column in _COLUMNS.values()
        for kind in ("progression", "label_quality")
    ),
)
_PROGRESSION = {
    "new": "worsening",
    "worse": "worsening",
    "same": "stable",
    "better": "improving",
    "resolved": "improving",
}


def write_ms_cxr_t(
    out: Path | str,
    *,
    patients: int = 200,
    seed: int = 0,
    size: int = 512,
    workers: int | None = None,
) -> Path:
    """Write a phantom MS-CXR-T: its table of image pairs, and their images below `files/`.

    Each study after a patient's first is compared with the previous one, by their first frontal
    images. A finding has a label where one of the two studies has it: new and larger findings are
    worsening, smaller and resolved ones improving, others stable. There are about 1.3 pairs per
    patient. Arguments and errors are those of `write_mimic_cxr`.
    """
    options = Options(
        corpus="ms-cxr-t",
        patients=patients,
        seed=seed,
        size=size,
        split=(0.0, 0.0, 1.0),
        reports=False,
    )
    return write_release(
        Path(out), options, _write_ms_cxr_t_patient, {TABLE: _MS_CXR_T_HEADER}, workers
    )


def _write_ms_cxr_t_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    rows: list[list[object]] = []
    truth: dict[str, dict[str, object]] = {}
    for before, after in itertools.pairwise(patient.studies):
        changes = {
            label: change_of(label, before.findings, after.findings) for label in CHANGE_LABELS
        }
        if not any(changes.values()):
            continue
        names = [_name(patient, study) for study in (after, before)]
        for name, study in zip(names, (after, before), strict=True):
            path = Path("files", f"{name}.jpg")
            write_view(root / path, study.frontal, options.size, encode_jpeg)
            truth[name] = truth_row(study.frontal, study, options.size, path=path.as_posix())
        cells = [
            cell
            for change in changes.values()
            for cell in (_PROGRESSION.get(str(change), ""), "one_expert" if change else "")
        ]
        rows.append(
            [patient.subject_id, after.study_id, names[0], before.study_id, names[1], *cells]
        )
    return PatientRows(patient.index, {TABLE: rows}, list(truth.values()))


def _name(patient: Patient, study: Study) -> str:
    subject = patient.subject_id
    return f"p{subject // 10**6}/p{subject}/s{study.study_id}/{study.frontal.dicom_id}"
