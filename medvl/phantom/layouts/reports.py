"""The phantom corpus in the layouts of corpora with reports: MIMIC-CXR, Open-i and PadChest."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from medvl.phantom.language.reports import compose_report
from medvl.phantom.layouts.dicom_writer import (
    dicom_bytes,
    orientation,
    procedure,
    view_code,
    view_position,
)
from medvl.phantom.layouts.kaggle import image_uid_hex
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
from medvl.phantom.population.findings import Finding
from medvl.phantom.population.world import Patient, Study, View, generator
from medvl.phantom.rendering.scene import encode_deep_png, encode_jpeg, encode_png
from medvl.schema import FINDINGS, NEGATIVE, UNCERTAIN

# The phantom corpus in the layouts of MIMIC-CXR 2.0.0 (DICOM) and MIMIC-CXR-JPG 2.0.0.

SPLITS = ("train", "validate", "test")
_NEGBIO_STREAM = 95
_METADATA = "mimic-cxr-2.0.0-metadata.csv.gz"
_SPLIT = "mimic-cxr-2.0.0-split.csv.gz"
_CHEXPERT = "mimic-cxr-2.0.0-chexpert.csv.gz"
_NEGBIO = "mimic-cxr-2.0.0-negbio.csv.gz"
_RECORDS = "cxr-record-list.csv.gz"
_STUDIES = "cxr-study-list.csv.gz"
MIMIC_TABLES = {
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
    frontal_only: bool = False,
    site: int = 0,
    workers: int | None = None,
) -> Path:
    """Write a phantom MIMIC-CXR: 12-bit DICOM files, reports beside the study folders, and the
    tables of the release.

    Args:
        out: folder of `files/` and the tables: empty or absent, or a finished or partial corpus
            with the same options. A finished one is not changed.
        patients: number of patients, with 2.3 studies and 3.7 images on average.
        seed: seed of the world.
        size: pixels of the longer side of every image.
        split: shares of patients in train, validate and test.
        frontal_only: leave out lateral views, which saves 40 % of the time; the frontal ones are
            the same.
        site: hospital whose devices took the images: 0, or 1, 2, ... with other exposure,
            processing, noise and letters in the image. Patients, findings and reports of a seed are
            the same at all sites.
        workers: number of processes; None for one per core. The output does not depend on it. With
            more than one, a script must call this below `if __name__ == "__main__":`.

    Returns the folder. Raises ConfigError ("out_of_range") for an option, and CorpusError
    ("exists") if `out` contains anything else.
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
    write_patient = functools.partial(write_mimic_cxr_patient, suffix=".dcm")
    return write_release(Path(out), options, write_patient, {**MIMIC_TABLES, **_LISTS}, workers)


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

    The real release has no reports; users add those of MIMIC-CXR, as `reports=True` does. The other
    arguments are those of `write_mimic_cxr`.
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
    return write_release(
        Path(out),
        options,
        functools.partial(write_mimic_cxr_patient, suffix=".jpg"),
        MIMIC_TABLES,
        workers,
    )


def write_mimic_cxr_patient(
    root: Path, patient: Patient, options: Options, suffix: str
) -> PatientRows:
    """Write the images and reports of a patient, and return the rows of MIMIC-CXR's tables."""
    split = SPLITS[options.split_index(patient.index)]
    tables: dict[str, list[list[object]]] = {name: [] for name in (*MIMIC_TABLES, *_LISTS)}
    truth = []
    for study in patient.studies:
        ids = (patient.subject_id, study.study_id)
        folder = Path(
            "files",
            f"p{patient.subject_id // 10**6}",
            f"p{patient.subject_id}",
            f"s{study.study_id}",
        )
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
            as_dicom = functools.partial(dicom_bytes, patient, study, view)
            encode = as_dicom if suffix == ".dcm" else encode_jpeg
            write_view(root / path, view, options.size, encode)
            tables[_METADATA].append([view.dicom_id, *ids, *_metadata(study, view, options.size)])
            tables[_SPLIT].append([view.dicom_id, study.study_id, patient.subject_id, split])
            tables[_RECORDS].append([*ids, view.dicom_id, path.as_posix()])
            row_ids = {
                "dicom_id": view.dicom_id,
                "subject_id": ids[0],
                "study_id": ids[1],
                "path": path.as_posix(),
            }
            truth.append(truth_row(view, study, options.size, **row_ids, split=split))
    return PatientRows(patient.subject_id, tables, truth)


def _metadata(study: Study, view: View, size: int) -> list[object]:
    """Return the columns of the metadata table after the ids; StudyTime is a number without
    leading zeros.
    """
    name = procedure(study)
    time = round(float(study.taken.strftime("%H%M%S.%f")), 3)
    date = study.taken.strftime("%Y%m%d")
    return [
        name,
        view_position(view),
        *view.camera.shape(size),
        date,
        time,
        name,
        view_code(view),
        orientation(view),
    ]


def _other_labeler(study: Study, labels: Mapping[str, int]) -> dict[str, int]:
    """Return the labels of a second labeler, which differs in some hedges and misses some
    negations.
    """
    rng = generator(*study.key, _NEGBIO_STREAM)
    result = {}
    for label, value in labels.items():
        u = rng.random()
        if value == UNCERTAIN and u < 0.15:
            result[label] = 1
        elif not (value == NEGATIVE and u < 0.05):
            result[label] = value
    return result


# The phantom corpus in the layout of Open-i: one XML report for each study, PNG files and a table
# of projections.

PROJECTIONS = "indiana_projections.csv"
_TERMS = {
    "Atelectasis": "Pulmonary Atelectasis", "Cardiomegaly": "Cardiomegaly",
    "Consolidation": "Consolidation/lung", "Edema": "Pulmonary Edema",
    "Enlarged Cardiomediastinum": "Mediastinum/enlarged", "Fracture": "Fractures, Bone",
    "Lung Lesion": "Nodule/lung", "Lung Opacity": "Opacity/lung",
    "Pleural Effusion": "Pleural Effusion", "Pleural Other": "Thickening/pleura",
    "Pneumonia": "Pneumonia", "Pneumothorax": "Pneumothorax",
    "Support Devices": "Implanted Medical Device",
}  # fmt: skip
_OPENI_NORMAL = "normal"
_OPENI_SIDES = ("right", "left", "bilateral")


def write_openi(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    workers: int | None = None,
) -> Path:
    """Write a phantom Open-i: `ecgen-radiology/`, `NLMCXR_png/` and the table of projections.

    Each patient has one report, that of the first study, because the collection has no patient ids.
    MeSH terms are the ground truth, with side and severity, also of findings that the report omits.

    The other arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = Options(
        corpus="openi", patients=patients, seed=seed, size=size, split=(1.0, 0.0, 0.0), reports=True
    )
    return write_release(
        Path(out),
        options,
        _write_openi_patient,
        {PROJECTIONS: ("uid", "filename", "projection")},
        workers,
    )


def mesh_terms(study: Study) -> list[str]:
    """Return the MeSH terms of a study."""
    return [_term(finding) for finding in study.findings] or [_OPENI_NORMAL]


def _term(finding: Finding) -> str:
    side = [finding.side] if finding.side in _OPENI_SIDES else []
    return "/".join([_TERMS[finding.label], *side, finding.severity])


def _write_openi_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    study = patient.studies[0]
    uid = patient.index + 1
    rows: list[list[object]] = []
    truth = []
    for number, view in enumerate(study.views, start=1):
        image = f"CXR{uid}_IM-{uid:04d}-{number}001"
        path = Path("NLMCXR_png", f"{image}.png")
        write_view(root / path, view, options.size, encode_png)
        rows.append([uid, path.name, "Lateral" if view.lateral else "Frontal"])
        truth.append(truth_row(view, study, options.size, path=path.as_posix(), uid=uid))
    write_file(root / "ecgen-radiology" / f"{uid}.xml", _xml(uid, study).encode())
    return PatientRows(patient.index, {PROJECTIONS: rows}, truth)


def _xml(uid: int, study: Study) -> str:
    report = compose_report(study)
    sections = {
        "COMPARISON": "None.",
        "INDICATION": "",
        "FINDINGS": report.findings,
        "IMPRESSION": report.impression,
    }
    texts = [
        f'<AbstractText Label="{name}">{escape(text)}</AbstractText>'
        for name, text in sections.items()
    ]
    terms = [f"<major>{escape(term)}</major>" for term in mesh_terms(study)]
    images = [
        f'<parentImage id="CXR{uid}_IM-{uid:04d}-{number}001"><caption>Xray '
        f"Chest</caption></parentImage>"
        for number in range(1, len(study.views) + 1)
    ]
    return "\n".join(
        [
            '<?xml version="1.0" encoding="utf-8"?>',
            f'<eCitation><uId id="CXR{uid}"/><MedlineCitation><Article><Abstract>',
            *texts,
            "</Abstract></Article></MedlineCitation><MeSH>",
            *terms,
            "</MeSH>",
            *images,
            "</eCitation>\n",
        ]
    )


# The phantom corpus in the layout of PadChest (2019): 16-bit PNG files and one table of 36
# columns.

TABLE = "PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv"
COLUMNS = (
    "", "ImageID", "ImageDir", "StudyDate_DICOM", "StudyID", "PatientID", "PatientBirth",
    "PatientSex_DICOM", "ViewPosition_DICOM", "Projection", "MethodProjection", "Pediatric",
    "Modality_DICOM", "Manufacturer_DICOM", "PhotometricInterpretation_DICOM",
    "PixelRepresentation_DICOM", "PixelAspectRatio_DICOM", "SpatialResolution_DICOM",
    "BitsStored_DICOM", "WindowCenter_DICOM", "WindowWidth_DICOM", "Rows_DICOM", "Columns_DICOM",
    "XRayTubeCurrent_DICOM", "Exposure_DICOM", "ExposureInuAs_DICOM", "ExposureTime",
    "RelativeXRayExposure_DICOM", "ReportID", "Report", "MethodLabel", "Labels", "Localizations",
    "LabelsLocalizationsBySentence", "labelCUIS", "LocalizationsCUIS",
)  # fmt: skip
NAMES = {
    "Atelectasis": ("atelectasis", "C0004144", "atelectasi"),
    "Cardiomegaly": ("cardiomegaly", "C0018800", "cardiomegali"),
    "Consolidation": ("consolidation", "C0521530", "consolid"),
    "Edema": ("pulmonary edema", "C0034063", "edem pulmonar"),
    "Enlarged Cardiomediastinum": ("mediastinal enlargement", "", "ensanch mediastin"),
    "Lung Lesion": ("nodule", "C0028259", "nodul"), "Lung Opacity": ("increased density", "",
    "aument densid"), "Pleural Effusion": ("pleural effusion", "C0032227", "derram pleural"),
    "Pleural Other": ("pleural thickening", "", "engros pleural"), "Pneumonia": ("pneumonia",
    "C0032285", "neumoni"), "Pneumothorax": ("pneumothorax", "C0032326", "neumotorax"),
    "rib": ("rib fracture", "C0035522", "fractur costal"), "clavicle": ("clavicle fracture", "",
    "fractur clavicul"), "endotracheal tube": ("endotracheal tube", "", "tub endotraqueal"),
    "enteric tube": ("NSG tube", "", "sond nasogastr"),
    "sternotomy wires": ("sternotomy", "", "esternotomi"),
    "central line": ("central venous catheter", "", "via central"),
    "pacemaker": ("pacemaker", "C0030163", "marcapas"), "chest tube": ("chest drain tube", "",
    "tub drenaj"),
}  # fmt: skip
"""Label of the phantom, or kind of a fracture's or device's part -> label, CUI (where it has one
here), word stems.
"""
ENGLISH = ("image.tok", "report.en.tok")
"""Files of the translations of RRG24."""
_PADCHEST_NORMAL = ("normal", "C0205307", "sin hallazg patolog")
_PADCHEST_SIDES = {"right": "derech", "left": "izquierd", "bilateral": "bilateral"}
_PROJECTIONS = {"LATERAL": "L", "LL": "L"}
_FOLDERS = 55
_PHYSICIAN_SHARE = 0.27
_STREAM = 93

Sentence = tuple[list[tuple[str, str, str]], str]
"""Names of a finding, as in `NAMES`, and its side."""


def write_padchest(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    workers: int | None = None,
) -> Path:
    """Write a phantom PadChest: its table, and PNG files with 12-bit values in 16 bits in the
    folders `0/` to `54/`.

    All views of each study are written. Labels are the ground truth in PadChest's words, one
    sentence per finding with its side as place; fractures and devices are named by their kind.
    Where there is nothing but devices, the label normal is added, like the phantom's No Finding.
    The reports are the same in Spanish word stems; their translations, in tokens, are impressions
    of the phantom. A share of 27% of the studies is labelled by physicians, as in the release. UMLS
    codes are given for a part of the labels.

    The other arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = Options(
        corpus="padchest",
        patients=patients,
        seed=seed,
        size=size,
        split=(1.0, 0.0, 0.0),
        reports=True,
    )
    columns: dict[str, Sequence[str] | Form] = {
        TABLE: COLUMNS,
        **dict.fromkeys(ENGLISH, Form.LINES),
    }
    return write_release(Path(out), options, _write_padchest_patient, columns, workers)


def tokens(text: str) -> str:
    """Return a text as RRG24 tokenised it: lower case, with blanks around marks."""
    return " ".join(re.sub(r"([.,;:()?!])", r" \1 ", text.lower()).split())


def spanish_report(study: Study) -> str:
    """Return the report of a study in Spanish word stems."""
    return "".join(f"{stem} . " for stem in _stems(sentences(study)))


def _stems(parts: list[Sentence]) -> list[str]:
    return [
        " ".join([*(stem for _, _, stem in names), _PADCHEST_SIDES.get(side, "")]).strip()
        for names, side in parts
    ]


def sentences(study: Study) -> list[Sentence]:
    """Return the sentences of a study's report."""
    result = [_sentence(finding) for finding in study.findings]
    return result if study.labels["No Finding"] == 0 else [*result, ([_PADCHEST_NORMAL], "midline")]


def _sentence(finding: Finding) -> Sentence:
    kinds = (
        [finding.label]
        if finding.label in NAMES
        else dict.fromkeys(part.kind for part in finding.parts)
    )
    return [NAMES[kind] for kind in kinds], finding.side


def _write_padchest_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    rows: list[list[object]] = []
    images: list[list[object]] = []
    reports: list[list[object]] = []
    truth = []
    for study in patient.studies:
        names = []
        for view in study.views:
            number = int(image_uid_hex(view), 16)
            path = Path(
                str(patient.index % _FOLDERS),
                f"{number}_{number % 100:02d}-{number % 199:03d}-000.png",
            )
            write_view(root / path, view, options.size, encode_deep_png)
            rows.append(_row(path, patient, study, view, options.size))
            truth.append(
                truth_row(
                    view, study, options.size, path=path.as_posix(), subject_id=patient.subject_id
                )
            )
            names.append(path.name)
        images.append([",".join(names)])
        reports.append([tokens(compose_report(study).impression)])
    tables = {TABLE: rows, **dict(zip(ENGLISH, (images, reports), strict=True))}
    return PatientRows(patient.index, tables, truth)


def _row(path: Path, patient: Patient, study: Study, view: View, size: int) -> list[object]:
    height, width = view.camera.shape(size)
    parts = sentences(study)
    places = [[f"loc {side}"] if side in _PADCHEST_SIDES else [] for _, side in parts]
    by_sentence = [
        [*(name for name, _, _ in names), *place]
        for (names, _), place in zip(parts, places, strict=True)
    ]
    codes = " ".join(repr(code) for names, _ in parts for _, code, _ in names)
    physician = generator(*study.key, _STREAM).random() < _PHYSICIAN_SHARE
    cells: dict[str, object] = {
        "": view.key[1],
        "ImageID": path.name,
        "ImageDir": path.parent,
        "StudyDate_DICOM": study.taken.strftime("%Y%m%d"),
        "StudyID": study.study_id,
        "PatientID": patient.subject_id,
        "PatientBirth": float(study.taken.year - study.age),
        "PatientSex_DICOM": study.sex,
        "ViewPosition_DICOM": view.position,
        "Projection": _PROJECTIONS.get(view.position, view.position),
        "MethodProjection": "Manual review of DICOM fields",
        "Pediatric": "No",
        "Modality_DICOM": "DX",
        "Manufacturer_DICOM": "Phantom Works",
        "PhotometricInterpretation_DICOM": "MONOCHROME2",
        "PixelRepresentation_DICOM": 0,
        "BitsStored_DICOM": 12,
        "Rows_DICOM": height,
        "Columns_DICOM": width,
        "ReportID": study.study_id,
        "Report": spanish_report(study),
        "MethodLabel": "Physician" if physician else "RNN_model",
        "Labels": [name for names, _ in parts for name, _, _ in names],
        "Localizations": [name for place in places for name in place],
        "LabelsLocalizationsBySentence": by_sentence,
        "labelCUIS": f"[{codes}]",
        "LocalizationsCUIS": "[]",
    }
    return [cells.get(column, "") for column in COLUMNS]
