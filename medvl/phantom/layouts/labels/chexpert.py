"""The phantom corpus in the layout of CheXpert v1.0 (small)."""

from pathlib import Path

from medvl.phantom.language.reports import compose_report
from medvl.phantom.layouts.writer import Options, PatientRows, label_cells, truth_row, write_file, write_release
from medvl.phantom.population.world import Patient, View
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.encode import encode_jpeg

FOLDER = "CheXpert-v1.0-small"
SPLITS = ("train", "valid", "test")
LABELS = (
    "No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema", "Consolidation",
    "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture", "Support Devices",
)  # fmt: skip
"""Labels in CheXpert's order, which differs from that of MIMIC-CXR."""
_HEADER = ("Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *LABELS)


def write_chexpert(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 390,
    split: tuple[float, float, float] = (0.8, 0.05, 0.15),
    workers: int | None = None,
) -> Path:
    """Write a phantom CheXpert: `CheXpert-v1.0-small` with train, valid and test folders and their tables.

    Labels of the training table come from the reports (1, 0, -1 or blank); those of valid and test are the ground truth
    (1 or 0), like the radiologists' labels of the real release. There is no text.

    `out` is the parent folder of `CheXpert-v1.0-small`; `size` is 390 for most images of the real small release;
    `split` has the shares of patients in train, valid and test. The other arguments and the errors are those of
    `write_mimic_cxr`. Returns the folder `CheXpert-v1.0-small`.
    """
    options = Options(corpus="chexpert", patients=patients, seed=seed, size=size, split=split, reports=False)
    columns = {f"{name}.csv": _HEADER for name in SPLITS}
    return write_release(Path(out) / FOLDER, options, _write_patient, columns, workers)


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = SPLITS[options.split_index(patient.index)]
    rows: list[list[object]] = []
    truth = []
    for number, study in enumerate(patient.studies, 1):
        labels = compose_report(study).labels if split == "train" else study.labels
        for i, view in enumerate(study.views, 1):
            name = f"view{i}_{'lateral' if view.lateral else 'frontal'}.jpg"
            path = Path(split, f"patient{patient.index + 1:05d}", f"study{number}", name)
            if not (root / path).exists():
                write_file(root / path, encode_jpeg(draw(view, options.size)))
            full = Path(FOLDER, path).as_posix()
            sex = "Female" if study.sex == "F" else "Male"
            rows.append([full, sex, study.age, *_projection(view), *label_cells(labels, LABELS)])
            truth.append(truth_row(view, study, options.size, path=full, subject_id=patient.subject_id, split=split))
    return PatientRows(patient.index, {f"{split}.csv": rows}, truth)


def _projection(view: View) -> tuple[str, str]:
    """Return the columns Frontal/Lateral and AP/PA."""
    return ("Lateral", "") if view.lateral else ("Frontal", view.position)
