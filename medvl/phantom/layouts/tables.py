"""The phantom corpus in the layouts of CheXpert, MS-CXR-T, CheXpert Plus, ReXGradient-160K, BRAX,
CANDID-PTX and BIMCV-COVID19+.
"""

import functools
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.phantom.language.reports import compose_report
from medvl.phantom.layouts.kaggle import REFERENCE_SIZE, plain_dicom, square_frontal_views, uid
from medvl.phantom.layouts.reports import spanish_report, tokens
from medvl.phantom.layouts.writer import (
    Form,
    Options,
    PatientRows,
    label_cells,
    truth_row,
    write_file,
    write_release,
    write_view,
)
from medvl.phantom.population.findings import change_of
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.findings import part_masks
from medvl.phantom.rendering.scene import encode_deep_png, encode_jpeg, encode_png

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


# The phantom corpus in the layout of BRAX 1.1.0: PNG files and one table.

BRAX_TABLE = "master_spreadsheet_update.csv"
BRAX_COLUMNS = (
    "DicomPath", "PngPath", "PatientID", "PatientSex", "PatientAge", "AccessionNumber", "StudyDate",
    *CHEXPERT_LABELS, "ViewPosition", "Rows", "Columns", "Manufacturer",
)  # fmt: skip
_BRAX_VIEWS = {"LATERAL": "L", "LL": "L"}
_BIN = 5
"""Years of a bin of ages."""


def write_brax(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    workers: int | None = None,
) -> Path:
    """Write a phantom BRAX: its table, and PNG files in `images/`.

    All views of each study are written; labels come from the reports, as in `write_chexpert`. Ages
    are in bins of five years. Accession numbers count a patient's studies, so patients share them.
    Each fifth patient has no view.

    The arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = _options("brax", patients, seed, size)
    return write_release(
        Path(out), options, _write_brax_patient, {BRAX_TABLE: BRAX_COLUMNS}, workers
    )


def _options(corpus: str, patients: int, seed: int, size: int) -> Options:
    """Return the options of a release without splits."""
    shares = (1.0, 0.0, 0.0)
    return Options(
        corpus=corpus, patients=patients, seed=seed, size=size, split=shares, reports=True
    )


def _write_brax_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    rows: list[list[object]] = []
    truth = []
    for number, study in enumerate(patient.studies, 1):
        labels = compose_report(study).labels
        for view in study.views:
            name = f"id_{patient.subject_id}/Study_{number}/Series_1/image-{view.dicom_id}"
            path = Path("images", f"{name}.png")
            write_view(root / path, view, options.size, encode_png)
            low = study.age // _BIN * _BIN
            cells: dict[str, object] = {
                "DicomPath": f"Anonymized_DICOMs/{name}.dcm",
                "PngPath": path.as_posix(),
                "PatientID": f"id_{patient.subject_id}",
                "PatientSex": study.sex,
                "PatientAge": f"{low}-{low + _BIN - 1}",
                "AccessionNumber": number,
                "StudyDate": study.taken.strftime("%Y%m%d"),
                "ViewPosition": _BRAX_VIEWS.get(view.position, view.position)
                if patient.index % 5
                else "",
                **dict(zip(CHEXPERT_LABELS, label_cells(labels, CHEXPERT_LABELS), strict=True)),
            }
            rows.append([cells.get(column, "") for column in BRAX_COLUMNS])
            truth.append(truth_row(view, study, options.size, path=path.as_posix()))
    return PatientRows(patient.index, {BRAX_TABLE: rows}, truth)


# The phantom corpus in the layout of CANDID-PTX (2021): reports and run-length masks.

CANDID_TABLES = {
    "Pneumothorax_reports.csv": ("SOPInstanceUID", "StudyInstanceUID", "Report", "EncodedPixels"),
    "chest_tube.csv": ("anon_SOPUID", "annotation_ref", "mask_rle"),
    "Rib_fracture_mask_rle.csv": ("anon_SOPUID", "annotation_ref", "mask_rle"),
}
CANDID_KINDS = {"chest tube": "chest_tube.csv", "rib": "Rib_fracture_mask_rle.csv"}
"""Kind of a part -> table of its masks."""


def write_candid_ptx(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    workers: int | None = None,
) -> Path:
    """Write a phantom CANDID-PTX: its three tables, and JPEG or DICOM images in `dataset/`.

    There is one frontal image of each study, with a row for the upper and the lower half of every
    part of a pneumothorax, or one row without a mask. Chest tubes and rib fractures have masks in
    tables of their own. Masks are starts and lengths in images of 1024 x 1024 pixels, by column and
    counted from 1. The images of each fourth patient are DICOM files without a suffix.

    Each patient has 2.3 images on average. The arguments and the errors are those of
    `write_mimic_cxr`. Returns the folder.
    """
    options = _options("candid-ptx", patients, seed, size)
    return write_release(Path(out), options, _write_candid_patient, CANDID_TABLES, workers)


def _write_candid_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    tables: dict[str, list[list[object]]] = {name: [] for name in CANDID_TABLES}
    truth = []
    for study, view in square_frontal_views(patient):
        name = str(uid(view))
        as_dicom = not patient.index % 4
        path = Path("dataset", name if as_dicom else f"{name}.jpg")
        encode = functools.partial(plain_dicom, name, study, view) if as_dicom else encode_jpeg
        write_view(root / path, view, options.size, encode)
        ids = [name, f"2.25.{study.study_id}", compose_report(study).text]
        masks = []
        for label, part, mask_HW in part_masks(view, REFERENCE_SIZE):
            if label == "Pneumothorax":
                masks += [encode_starts(piece_HW) for piece_HW in _halves(mask_HW > 0)]
            elif part.kind in CANDID_KINDS:
                runs = encode_starts(mask_HW > 0)
                tables[CANDID_KINDS[part.kind]].append([name, "A1", runs])
        tables["Pneumothorax_reports.csv"] += [[*ids, runs] for runs in masks or ["-1"]]
        truth.append(truth_row(view, study, REFERENCE_SIZE, path=path.as_posix()))
    return PatientRows(patient.index, tables, truth)


def _halves(mask_HW: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """Return the upper and the lower half of a mask, of those that have pixels."""
    rows_N = np.flatnonzero(mask_HW.any(axis=1))
    upper_H1 = (np.arange(len(mask_HW)) <= rows_N.mean())[:, None]
    return [half_HW for half_HW in (mask_HW & upper_H1, mask_HW & ~upper_H1) if half_HW.any()]


def encode_starts(mask_HW: NDArray[np.bool_]) -> str:
    """Return start, counted from 1, and length of every run of a mask, column by column."""
    inside_P = np.pad(mask_HW.ravel(order="F"), 1)
    border_2N = np.flatnonzero(np.diff(inside_P.astype(np.int8))).reshape(-1, 2)
    starts_N, ends_N = border_2N.T
    return " ".join(map(str, np.stack([starts_N + 1, ends_N - starts_N], axis=1).ravel().tolist()))


# The phantom corpus in the layout of BIMCV-COVID19+ (2020): 16-bit PNG files with names as in BIDS.

BIMCV_TABLE = "final_annotations.csv"
BIMCV_ENGLISH = ("test.image.en.tok", "test.report.en.tok")
_BIMCV_VIEWS = {"PA": "pa", "AP": "ap", "LATERAL": "ll", "LL": "ll"}


def write_bimcv_covid19(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    workers: int | None = None,
) -> Path:
    """Write a phantom BIMCV-COVID19+: a table with reports in Spanish, their translations in
    tokens, and PNG files with 12-bit values in 16 bits.

    All views of each study are written, with one report for each session. The view of each third
    patient is in the names of files only. Each seventh patient has a CT in the table. The sessions
    of each second patient are translated.

    The arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = _options("bimcv-covid19", patients, seed, size)
    columns: dict[str, Sequence[str] | Form] = {BIMCV_TABLE: ("file_path", "view", "report")}
    columns |= dict.fromkeys(BIMCV_ENGLISH, Form.LINES)
    return write_release(Path(out), options, _write_bimcv_patient, columns, workers)


def _write_bimcv_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    tables: dict[str, list[list[object]]] = {name: [] for name in (BIMCV_TABLE, *BIMCV_ENGLISH)}
    truth = []
    for study in patient.studies:
        report = spanish_report(study)
        paths = [_bimcv_path(patient, study, view) for view in study.views]
        for path, view in zip(paths, study.views, strict=True):
            write_view(root / path, view, options.size, encode_deep_png)
            shown = _BIMCV_VIEWS[view.position] if patient.index % 3 else ""
            tables[BIMCV_TABLE].append([path.as_posix(), shown, report])
            truth.append(truth_row(view, study, options.size, path=path.as_posix()))
        if not patient.index % 7:
            ct = re.sub("mod-rx|_dx", "mod-ct", paths[0].as_posix())
            tables[BIMCV_TABLE].append([ct, "", report])
        if not patient.index % 2:
            images, reports = (tables[name] for name in BIMCV_ENGLISH)
            images.append([",".join(path.as_posix() for path in paths)])
            reports.append([tokens(compose_report(study).impression)])
    return PatientRows(patient.index, tables, truth)


def _bimcv_path(patient: Patient, study: Study, view: View) -> Path:
    ids = (f"sub-S{patient.subject_id}", f"ses-E{study.study_id}")
    number = view.key[-1] + 1
    name = f"{'_'.join(ids)}_run-{number}_bp-chest_vp-{_BIMCV_VIEWS[view.position]}_dx.png"
    return Path(*ids, "mod-rx", name)
