"""The phantom corpus in the layout of PadChest (2019): 16-bit PNG files and one table of 36 columns."""

from pathlib import Path

import cv2

from medvl.phantom.layouts.boxes_and_masks.kaggle import image_uid_hex
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.findings import Finding
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.draw import draw
from medvl.phantom.seeds import generator

TABLE = "PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv"
COLUMNS = (
    "", "ImageID", "ImageDir", "StudyDate_DICOM", "StudyID", "PatientID", "PatientBirth", "PatientSex_DICOM",
    "ViewPosition_DICOM", "Projection", "MethodProjection", "Pediatric", "Modality_DICOM", "Manufacturer_DICOM",
    "PhotometricInterpretation_DICOM", "PixelRepresentation_DICOM", "PixelAspectRatio_DICOM",
    "SpatialResolution_DICOM", "BitsStored_DICOM", "WindowCenter_DICOM", "WindowWidth_DICOM", "Rows_DICOM",
    "Columns_DICOM", "XRayTubeCurrent_DICOM", "Exposure_DICOM", "ExposureInuAs_DICOM", "ExposureTime",
    "RelativeXRayExposure_DICOM", "ReportID", "Report", "MethodLabel", "Labels", "Localizations",
    "LabelsLocalizationsBySentence", "labelCUIS", "LocalizationsCUIS",
)  # fmt: skip
NAMES = {
    "Atelectasis": ("atelectasis", "C0004144", "atelectasi"),
    "Cardiomegaly": ("cardiomegaly", "C0018800", "cardiomegali"),
    "Consolidation": ("consolidation", "C0521530", "consolid"),
    "Edema": ("pulmonary edema", "C0034063", "edem pulmonar"),
    "Enlarged Cardiomediastinum": ("mediastinal enlargement", "", "ensanch mediastin"),
    "Lung Lesion": ("nodule", "C0028259", "nodul"), "Lung Opacity": ("increased density", "", "aument densid"),
    "Pleural Effusion": ("pleural effusion", "C0032227", "derram pleural"),
    "Pleural Other": ("pleural thickening", "", "engros pleural"), "Pneumonia": ("pneumonia", "C0032285", "neumoni"),
    "Pneumothorax": ("pneumothorax", "C0032326", "neumotorax"),
    "rib": ("rib fracture", "C0035522", "fractur costal"), "clavicle": ("clavicle fracture", "", "fractur clavicul"),
    "endotracheal tube": ("endotracheal tube", "", "tub endotraqueal"),
    "enteric tube": ("NSG tube", "", "sond nasogastr"),
    "sternotomy wires": ("sternotomy", "", "esternotomi"),
    "central line": ("central venous catheter", "", "via central"),
    "pacemaker": ("pacemaker", "C0030163", "marcapas"), "chest tube": ("chest drain tube", "", "tub drenaj"),
}  # fmt: skip
"""Label of the phantom, or kind of a fracture's or device's part -> label, CUI (where it has one here), word stems."""
_NORMAL = ("normal", "C0205307", "sin hallazg patolog")
_SIDES = {"right": "derech", "left": "izquierd", "bilateral": "bilateral"}
_PROJECTIONS = {"LATERAL": "L", "LL": "L"}
_FOLDERS = 55
_PHYSICIAN_SHARE = 0.27
_STREAM = 93

Sentence = tuple[list[tuple[str, str, str]], str]
"""Names of a finding, as in `NAMES`, and its side."""


def write_padchest(
    out: Path | str, *, patients: int = 400, seed: int = 0, size: int = 512, workers: int | None = None
) -> Path:
    """Write a phantom PadChest: its table, and PNG files with 12-bit values in 16 bits in the folders `0/` to `54/`.

    All views of each study are written. Labels are the ground truth in PadChest's words, one sentence per finding with
    its side as place; fractures and devices are named by their kind. Where there is nothing but devices, the label
    normal is added, like the phantom's No Finding. The reports are the same in Spanish word stems. A share of 27% of
    the studies is labelled by physicians, as in the release. UMLS codes are given for a part of the labels.

    The other arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = Options(corpus="padchest", patients=patients, seed=seed, size=size, split=(1.0, 0.0, 0.0), reports=True)
    return write_release(Path(out), options, _write_patient, {TABLE: COLUMNS}, workers)


def sentences(study: Study) -> list[Sentence]:
    """Return the sentences of a study's report."""
    result = [_sentence(finding) for finding in study.findings]
    return result if study.labels["No Finding"] == 0 else [*result, ([_NORMAL], "midline")]


def _sentence(finding: Finding) -> Sentence:
    kinds = [finding.label] if finding.label in NAMES else dict.fromkeys(part.kind for part in finding.parts)
    return [NAMES[kind] for kind in kinds], finding.side


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    rows: list[list[object]] = []
    truth = []
    for study in patient.studies:
        for view in study.views:
            number = int(image_uid_hex(view), 16)
            path = Path(str(patient.index % _FOLDERS), f"{number}_{number % 100:02d}-{number % 199:03d}-000.png")
            if not (root / path).exists():
                write_file(root / path, cv2.imencode(".png", draw(view, options.size))[1].tobytes())
            rows.append(_row(path, patient, study, view, options.size))
            truth.append(truth_row(view, study, options.size, path=path.as_posix(), subject_id=patient.subject_id))
    return PatientRows(patient.index, {TABLE: rows}, truth)


def _row(path: Path, patient: Patient, study: Study, view: View, size: int) -> list[object]:
    height, width = view.camera.shape(size)
    parts = sentences(study)
    places = [[f"loc {side}"] if side in _SIDES else [] for _, side in parts]
    stems = [" ".join([*(stem for _, _, stem in names), _SIDES.get(side, "")]).strip() for names, side in parts]
    by_sentence = [[*(name for name, _, _ in names), *place] for (names, _), place in zip(parts, places, strict=True)]
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
        "Report": "".join(f"{stem} . " for stem in stems),
        "MethodLabel": "Physician" if physician else "RNN_model",
        "Labels": [name for names, _ in parts for name, _, _ in names],
        "Localizations": [name for place in places for name in place],
        "LabelsLocalizationsBySentence": by_sentence,
        "labelCUIS": f"[{codes}]",
        "LocalizationsCUIS": "[]",
    }
    return [cells.get(column, "") for column in COLUMNS]
