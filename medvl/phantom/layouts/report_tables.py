"""The phantom corpus in the layouts of CheXpert Plus and ReXGradient-160K."""

import json
from collections.abc import Sequence
from pathlib import Path

from medvl.phantom.language.reports import compose_report
from medvl.phantom.layouts.labels import CHEXPERT_LABELS
from medvl.phantom.layouts.writer import (
    Form,
    Options,
    PatientRows,
    truth_row,
    write_file,
    write_release,
    write_view,
)
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.scene import encode_deep_png, encode_png

# The phantom corpus in the layout of CheXpert Plus (2024).

PLUS_TABLE = "df_chexpert_plus_240401.csv"
PLUS_COLUMNS = (
    "path_to_image", "path_to_dcm", "frontal_lateral", "ap_pa", "deid_patient_id",
    "patient_report_date_order", "report", "section_narrative", "section_clinical_history",
    "section_history", "section_comparison", "section_technique", "section_procedure_comments",
    "section_findings", "section_impression", "section_end_of_impression", "section_summary",
    "section_accession_number", "age", "sex", "race", "ethnicity", "interpreter_needed",
    "insurance_type", "recent_bmi", "deceased", "split",
)  # fmt: skip
PLUS_LABELS = tuple(f"{part}_fixed.json" for part in ("report", "findings", "impression"))
PLUS_LIST = "chexpert_5x200.csv"
_LEFTOVER = Path("PNG", "PNG", ".azDownload-0-view1_frontal.png")
_SIGNATURE = "Signed by A. Nobody, M.D."


def write_chexpert_plus(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 390,
    split: tuple[float, float, float] = (0.95, 0.05, 0.0),
    workers: int | None = None,
) -> Path:
    """Write a phantom CheXpert Plus: its table, three files of labels and a tree of PNG files.

    The patients are those of `write_chexpert` with the same seed. The report of a study is
    anonymised once for each image: those after the first have a blank for the size of the heart
    (`___`) and lack the labels No Finding and Support Devices. Each tenth patient has no age. Each
    fifth patient's first image is in `chexpert_5x200.csv`. A download that was not finished lies
    beside the images.

    `split` has the shares of patients in train and valid, and 0. The other arguments and the errors
    are those of `write_mimic_cxr`. Returns the folder.
    """
    options = Options(
        corpus="chexpert-plus", patients=patients, seed=seed, size=size, split=split, reports=True
    )
    files: dict[str, Sequence[str] | Form] = {PLUS_TABLE: PLUS_COLUMNS, PLUS_LIST: ("Path",)}
    files |= dict.fromkeys(PLUS_LABELS, Form.LINES)
    return write_release(Path(out), options, _write_chexpert_plus_patient, files, workers)


def _write_chexpert_plus_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = ("train", "valid", "valid")[options.split_index(patient.index)]
    tables: dict[str, list[list[object]]] = {PLUS_TABLE: [], PLUS_LIST: []}
    tables |= {name: [] for name in PLUS_LABELS}
    truth = []
    write_file(root / _LEFTOVER, b"")
    for number, study in enumerate(patient.studies, 1):
        report = compose_report(study)
        for i, view in enumerate(study.views, 1):
            name = f"view{i}_{'lateral' if view.lateral else 'frontal'}.png"
            path = Path(split, f"patient{patient.index + 1:05d}", f"study{number}", name)
            write_view(root / "PNG/PNG" / path, view, options.size, encode_png)
            listed = path.with_suffix(".jpg").as_posix()
            tables[PLUS_TABLE].append(_plus_row(listed, patient, number, study, view))
            hidden = () if i == 1 else ("No Finding", "Support Devices")
            values = {
                label: None if label in hidden else report.labels.get(label)
                for label in CHEXPERT_LABELS
            }
            line = json.dumps({"path_to_image": listed, **values})
            for file in PLUS_LABELS:
                tables[file].append([line])
            if not patient.index % 5 and not tables[PLUS_LIST]:
                tables[PLUS_LIST].append([f"CheXpert-v1.0-small/{listed}"])
            truth.append(truth_row(view, study, options.size, path=path.as_posix(), split=split))
    return PatientRows(patient.index, tables, truth)


def _plus_row(path: str, patient: Patient, number: int, study: Study, view: View) -> list[object]:
    report = compose_report(study)
    first = "/view1_" in path
    cells: dict[str, object] = {
        "path_to_image": path,
        "path_to_dcm": path.replace(".jpg", ".dcm"),
        "frontal_lateral": "Lateral" if view.lateral else "Frontal",
        "ap_pa": "" if view.lateral else view.position,
        "deid_patient_id": path.split("/")[1],
        "patient_report_date_order": number,
        "report": f"{report.text} {_SIGNATURE}",
        "section_comparison": "None." if number == 1 else "Study before this one.",
        "section_findings": report.findings if first else report.findings.replace("heart", "___"),
        "section_impression": f"{report.impression}{'' if first else ' ___'}",
        "section_end_of_impression": _SIGNATURE,
        "age": "" if not patient.index % 10 else float(min(study.age, 89)),
        "sex": "Female" if study.sex == "F" else "Male",
        "split": path.split("/")[0],
    }
    return [cells.get(column, "") for column in PLUS_COLUMNS]


# The phantom corpus in the layout of ReXGradient-160K (2025).

REX_SPLITS = ("train", "valid", "test")
REX_FILES = {
    f"metadata/{name}_metadata_view_position.json": Form.JSON_OBJECT for name in REX_SPLITS
}
"""Files of metadata."""
_REX_SPELLINGS = {"PA": "POSTERO_ANTERIOR", "AP": "AP AXIAL", "LATERAL": "LAT", "LL": "LL"}
_MONTHS_OF_YOUNGEST = "011M"


def write_rexgradient(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.1, 0.1),
    workers: int | None = None,
) -> Path:
    """Write a phantom ReXGradient-160K: three files of metadata, and PNG files in `deid_png/`.

    A quarter of the patients has views in other spellings, another quarter UNKNOWN. Each seventh
    patient is 11 months old and has an image of the abdomen (KUB), whose file is missing. Each
    fifth patient's first image has 16 bits.

    `split` has the shares of patients in train, valid and test. The other arguments and the errors
    are those of `write_mimic_cxr`. Returns the folder.
    """
    options = Options(
        corpus="rexgradient", patients=patients, seed=seed, size=size, split=split, reports=True
    )
    return write_release(Path(out), options, write_rexgradient_patient, REX_FILES, workers)


def write_rexgradient_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    """Write the images of a patient, and return the rows of the metadata."""
    split = REX_SPLITS[options.split_index(patient.index)]
    rows: list[list[object]] = []
    truth = []
    special = patient.index % 7 == 6
    for number, study in enumerate(patient.studies):
        folder = f"deid_png/P{patient.index}/A{study.study_id}/studies/{study.study_id}/series/1"
        paths = []
        spellings = []
        for i, view in enumerate(study.views):
            path = f"{folder}/instances/{int(view.dicom_id[:8], 16)}.{i}.png"
            deep = not patient.index % 5 and number == i == 0
            write_view(root / path, view, options.size, encode_deep_png if deep else encode_png)
            paths.append(f"../{path}")
            spellings.append(_spelling(patient.index, view.position))
            row = truth_row(view, study, options.size, path=path, split=split)
            truth.append({**row, "age": 0} if special else row)
        if special and number == 0:
            spellings += ["KUB"]
            paths += [f"../{folder}/instances/{study.study_id}.kub.png"]
        entry = _rexgradient_entry(patient, study, paths, spellings, young=special)
        rows.append([f"{patient.index}_{study.study_id}", json.dumps(entry)])
    return PatientRows(
        patient.index, {f"metadata/{split}_metadata_view_position.json": rows}, truth
    )


def _spelling(index: int, view: str) -> str:
    return {1: _REX_SPELLINGS[view], 2: "UNKNOWN"}.get(index % 4, view)


def _rexgradient_entry(
    patient: Patient, study: Study, paths: list[str], spellings: list[str], *, young: bool
) -> dict[str, object]:
    report = compose_report(study)
    return {
        "StudyInstanceUid": str(study.study_id),
        "PatientID": f"P{patient.index}",
        "AccessionNumber": f"A{study.study_id}",
        "PatientSex": study.sex,
        "PatientAge": _MONTHS_OF_YOUNGEST if young else f"{study.age:03d}Y",
        "StudyDate": study.taken.strftime("%Y%m%d"),
        "Indication": "Cough.",
        "Comparison": "None",
        "Findings": report.findings,
        "Impression": report.impression,
        "ImagePath": paths,
        "ImageViewPosition": spellings,
        "ImageShape": [[0, 0]] * len(paths),
        "ImageModality": ["DX"] * len(paths),
        "ImageBodyPart": ["CHEST"] * len(paths),
    }
