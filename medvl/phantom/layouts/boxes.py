"""The phantom corpus in the layouts of corpora with boxes: ChestX-Det10 and ChestX-Det, MS-CXR,
Object-CXR, VinDr-CXR and VinDr-PCXR.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.phantom.language.reports import present_sentences
from medvl.phantom.layouts.dicom_writer import dicom_bytes
from medvl.phantom.layouts.kaggle import (
    REFERENCE_SIZE,
    challenge_options,
    image_uid_hex,
    plain_dicom,
    square_frontal_views,
)
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_release, write_view
from medvl.phantom.population.findings import Finding
from medvl.phantom.population.world import Patient, Study, View, generator
from medvl.phantom.rendering.findings import Box, boxes, part_masks
from medvl.phantom.rendering.scene import WHITE, encode_jpeg, encode_png

# The phantom corpus in the layout of ChestX-Det10 (2020): PNG files, and boxes in JSON.

NAMES = {
    "Atelectasis": "Atelectasis", "Consolidation": "Consolidation", "Fracture": "Fracture",
    "Lung Lesion": "Nodule", "Pleural Effusion": "Effusion", "Pneumothorax": "Pneumothorax",
}  # fmt: skip
"""Label of the phantom -> category of the release; the phantom has no calcification, emphysema,
fibrosis or mass.
"""
NAMES_13 = {**NAMES, "Cardiomegaly": "Cardiomegaly", "Pleural Other": "Pleural Thickening"}


def write_chestxdet10(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = REFERENCE_SIZE,
    workers: int | None = None,
) -> Path:
    """Write a phantom ChestX-Det10: `train.json`, `test.json`, and PNG files in `train_data/` and
    `test_data/`.

    There is one frontal image of each study, with a box around every part of six of the ten
    findings, in pixels of an image of 1024 x 1024. A seventh of the patients is in the test split.

    Each patient has 2.3 images on average. `size` is the height and width of the images in pixels,
    1024 in the real release. The other arguments and the errors are those of `write_mimic_cxr`.
    Returns the folder.
    """
    options = challenge_options("chestxdet10", patients, seed, size, test=1 / 7)
    columns = {"train.json": None, "test.json": None}
    return write_release(Path(out), options, _write_chestxdet10_patient, columns, workers)


def write_chestxdet(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = REFERENCE_SIZE,
    workers: int | None = None,
) -> Path:
    """Write a phantom ChestX-Det: as `write_chestxdet10`, with eight of thirteen findings and the
    outline of every box's mask. Nodules of each third patient are Diffuse Nodule.
    """
    options = challenge_options("chestxdet", patients, seed, size, test=1 / 7)
    columns = {f"ChestX_Det_{split}.json": None for split in ("train", "test")}
    return write_release(Path(out), options, _write_chestxdet_patient, columns, workers)


def _write_chestxdet10_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    return _write_detections(root, patient, options, "", NAMES)


def _write_chestxdet_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    nodule = "Nodule" if patient.index % 3 else "Diffuse Nodule"
    return _write_detections(
        root, patient, options, "ChestX_Det_", NAMES_13 | {"Lung Lesion": nodule}
    )


def _outline(mask_HW: NDArray[np.uint8]) -> list[list[int]]:
    """Return the points of the largest contour of a mask."""
    contours, _ = cv2.findContours(mask_HW, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    return [[int(x), int(y)] for x, y in max(contours, key=len).reshape(-1, 2)]


def _write_detections(
    root: Path, patient: Patient, options: Options, prefix: str, names: Mapping[str, str]
) -> PatientRows:
    """Write the images of a patient, and rows of boxes of the findings in `names`, with outlines
    where the files have a `prefix`.
    """
    split = "test" if options.split_index(patient.index) else "train"
    rows: list[list[object]] = []
    truth = []
    for study, view in square_frontal_views(patient):
        path = Path(f"{split}_data", f"{study.study_id}.png")
        write_view(root / path, view, options.size, encode_png)
        row: dict[str, object] = {"file_name": path.name}
        objects = [box for box in boxes(view, REFERENCE_SIZE) if box.label in names]
        row["syms"] = [names[box.label] for box in objects]
        row["boxes"] = [_corners(box) for box in objects]
        if prefix:
            parts = part_masks(view, REFERENCE_SIZE)
            row["polygons"] = [_outline(mask_HW) for label, _, mask_HW in parts if label in names]
        rows.append([json.dumps(row)])
        ids = {"path": path.as_posix(), "subject_id": patient.subject_id, "split": split}
        truth.append(truth_row(view, study, REFERENCE_SIZE, **ids))
    return PatientRows(patient.index, {f"{prefix}{split}.json": rows}, truth)


# The phantom corpus in the layout of MS-CXR 1.1.0: phrases about findings, and their boxes.

TABLE = "MS_CXR_Local_Alignment_v1.1.0.csv"
LABELS = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Lung Opacity", "Pleural Effusion",
    "Pneumonia", "Pneumothorax",
)  # fmt: skip
"""Labels with phrases in MS-CXR."""
_HEADER = (
    "dicom_id", "category_name", "label_text", "path", "x", "y", "w", "h", "image_width",
    "image_height", "split"
)  # fmt: skip
_SPLITS = ("train", "val", "test")
_MS_CXR_STREAM = 91  # separates the random numbers of phrases from those of reports


def write_ms_cxr(
    out: Path | str,
    *,
    patients: int = 100,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.0, 0.0, 1.0),
    workers: int | None = None,
) -> Path:
    """Write a phantom MS-CXR: its table, and the images that the real release takes from
    MIMIC-CXR-JPG.

    There is one frontal image of each study that has one of the findings. A phrase asserts a
    finding in the words of the phantom's reports, and its boxes are those of all parts of the
    finding. Mild findings are included.

    Each patient has about four phrases on average. `split` has the shares of patients in train, val
    and test of the table's column. The other arguments and the errors are those of
    `write_mimic_cxr`. Returns the folder.
    """
    options = Options(
        corpus="ms-cxr", patients=patients, seed=seed, size=size, split=split, reports=False
    )
    return write_release(Path(out), options, _write_ms_cxr_patient, {TABLE: _HEADER}, workers)


def phrases(study: Study, view: View, size: int) -> Iterator[tuple[Finding, str, list[Box]]]:
    """Yield visible findings with a phrase and their boxes in pixels of `draw(view, size)`."""
    all_boxes = boxes(view, size)
    rng = generator(*study.key, _MS_CXR_STREAM)
    for finding in study.findings:
        finding_boxes = [box for box in all_boxes if box.label == finding.label]
        if finding.label in LABELS and finding_boxes:
            yield finding, present_sentences(rng, finding, None)[0].text, finding_boxes


def _write_ms_cxr_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = _SPLITS[options.split_index(patient.index)]
    rows: list[list[object]] = []
    truth = []
    for study in patient.studies:
        view = study.frontal
        study_phrases = list(phrases(study, view, options.size))
        if not study_phrases:
            continue
        subject = patient.subject_id
        folder = Path("files", f"p{subject // 10**6}", f"p{subject}", f"s{study.study_id}")
        path = folder / f"{view.dicom_id}.jpg"
        write_view(root / path, view, options.size, encode_jpeg)
        height, width = view.camera.shape(options.size)
        for finding, text, finding_boxes in study_phrases:
            for box in finding_boxes:
                position = (box.x, box.y, box.width, box.height, width, height)
                rows.append([view.dicom_id, finding.label, text, path.as_posix(), *position, split])
        truth.append(
            truth_row(
                view, study, options.size, path=path.as_posix(), subject_id=subject, split=split
            )
        )
    return PatientRows(patient.index, {TABLE: rows}, truth)


# The phantom corpus in the layout of Object-CXR (MIDL 2020): JPEG files with foreign objects, and
# their shapes.

SPLITS = ("train", "dev")
RECTANGLE = 0
POLYGON = 2
"""Types of shapes in the tables; 1 is an ellipse."""
_SHARE = 0.5
_MAX_OBJECTS = 3
# of the short side
_MIN_RADIUS = 0.02
_MAX_RADIUS = 0.05
_METAL = 0.97  # brightness
_OBJECT_CXR_STREAM = 94

Shape = tuple[int, NDArray[np.intp]]
"""Type, and the points (N, 2): two corners, or those of a polygon."""


def write_object_cxr(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 1024,
    workers: int | None = None,
) -> Path:
    """Write a phantom Object-CXR: `train.csv`, `dev.csv` and JPEG files in `train/` and `dev/`.

    There is one frontal image of each study. Half of the images have one to three foreign objects,
    bright shapes painted over the lungs: a rectangle (a clip), an ellipse (a button) or a polygon
    (a pendant). They are not part of the phantom world. Its support devices are not annotated, as
    in the release. A ninth of the patients is in dev.

    Each patient has 2.3 images on average. The other arguments and the errors are those of
    `write_mimic_cxr`; rows of the ground truth have `objects`, the annotation of the table. Returns
    the folder.
    """
    options = challenge_options("object-cxr", patients, seed, size, test=1 / 9)
    columns = {f"{split}.csv": ("image_name", "annotation") for split in SPLITS}
    return write_release(Path(out), options, _write_object_cxr_patient, columns, workers)


def foreign_objects(study: Study, height: int, width: int) -> Iterator[Shape]:
    """Yield the foreign objects on the frontal image of a study, in pixels."""
    rng = generator(*study.key, _OBJECT_CXR_STREAM)
    if rng.random() >= _SHARE:
        return
    for _ in range(int(rng.integers(1, _MAX_OBJECTS + 1))):
        kind = int(rng.integers(3))
        radius_2 = np.maximum(2, rng.uniform(_MIN_RADIUS, _MAX_RADIUS, 2) * min(height, width))
        center_2 = np.array(
            [
                width * (rng.uniform(0.2, 0.4) + 0.4 * rng.integers(2)),
                height * rng.uniform(0.25, 0.7),
            ]
        )
        angles = np.linspace(0, 2 * np.pi, 5, endpoint=False) + rng.uniform(0, np.pi)
        unit_N2 = (
            np.stack([np.cos(angles), np.sin(angles)], axis=1)
            if kind == POLYGON
            else np.array([[-1, -1], [1, 1]])
        )
        yield kind, np.rint(center_2 + radius_2 * unit_N2).astype(np.intp)


def paint(image_HW: NDArray[np.uint16], shapes: list[Shape]) -> None:
    """Paint shapes into a 12-bit image."""
    mask_HW = np.zeros(image_HW.shape, np.uint8)
    for kind, points_N2 in shapes:
        points = points_N2.astype(np.int32)
        if kind == POLYGON:
            cv2.fillPoly(mask_HW, [points], (1,))
            continue
        (left, top), (right, bottom) = points.tolist()
        if kind == RECTANGLE:
            mask_HW[top:bottom, left:right] = 1
        else:
            y_H1, x_1W = np.ogrid[: image_HW.shape[0], : image_HW.shape[1]]
            across = (2 * x_1W + 1 - left - right) / (right - left)
            down = (2 * y_H1 + 1 - top - bottom) / (bottom - top)
            mask_HW[across**2 + down**2 <= 1] = 1
    image_HW[mask_HW > 0] = int(_METAL * WHITE)


def _encode_painted(image_HW: NDArray[np.uint16], shapes: list[Shape]) -> bytes:
    paint(image_HW, shapes)
    return encode_jpeg(image_HW)


def _write_object_cxr_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = SPLITS[min(1, options.split_index(patient.index))]
    rows: list[list[object]] = []
    truth = []
    for study in patient.studies:
        view = study.frontal
        shapes = list(foreign_objects(study, *view.camera.shape(options.size)))
        path = Path(split, f"{study.study_id}.jpg")
        encode = partial(_encode_painted, shapes=shapes)
        write_view(root / path, view, options.size, encode)
        text = ";".join(
            " ".join(map(str, (kind, *points_N2.ravel().tolist()))) for kind, points_N2 in shapes
        )
        rows.append([path.name, text])
        ids = {
            "path": path.as_posix(),
            "subject_id": patient.subject_id,
            "split": split,
            "objects": text,
        }
        truth.append(truth_row(view, study, options.size, **ids))
    return PatientRows(patient.index, {f"{split}.csv": rows}, truth)


# The phantom corpus in the layout of VinDr-CXR 1.0.0: DICOM files, labels, and boxes of three
# readers.

LOCAL = (
    "Aortic enlargement", "Atelectasis", "Calcification", "Cardiomegaly", "Clavicle fracture",
    "Consolidation", "Edema", "Emphysema", "Enlarged PA", "ILD", "Infiltration", "Lung Opacity",
    "Lung cavity", "Lung cyst", "Mediastinal shift", "Nodule/Mass", "Pleural effusion",
    "Pleural thickening", "Pneumothorax", "Pulmonary fibrosis", "Rib fracture", "Other lesion",
)  # fmt: skip
_GLOBAL = ("COPD", "Lung tumor", "Pneumonia", "Tuberculosis")
_NAMES = {
    "Atelectasis": "Atelectasis", "Cardiomegaly": "Cardiomegaly", "Consolidation": "Consolidation",
    "Edema": "Edema", "Enlarged Cardiomediastinum": "Other lesion", "Lung Lesion": "Nodule/Mass",
    "Lung Opacity": "Lung Opacity", "Pleural Effusion": "Pleural effusion",
    "Pleural Other": "Pleural thickening", "Pneumothorax": "Pneumothorax",
}  # fmt: skip
"""Label of the phantom -> finding of the release; fractures are of a rib or a clavicle."""
_READERS = {"R8": -0.5, "R9": 0.5, "R10": 0.0}
"""Reader -> shift of the boxes in pixels. Their mean is the truth, also without R10, who omits
mild findings.
"""
_BOX = ("class_name", "x_min", "y_min", "x_max", "y_max")


def _tables() -> dict[str, tuple[str, ...]]:
    columns = {}
    for split, ids, other in (
        ("train", ("image_id", "rad_id"), "diseases"),
        ("test", ("image_id",), "disease"),
    ):
        columns[f"annotations/annotations_{split}.csv"] = (*ids, *_BOX)
        columns[f"annotations/image_labels_{split}.csv"] = (
            *ids,
            *LOCAL,
            *_GLOBAL,
            f"Other {other}",
            "No finding",
        )
    return columns


def write_vindr_cxr(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 1024,
    workers: int | None = None,
) -> Path:
    """Write a phantom VinDr-CXR: its four tables and DICOM images of 12 bits, in the encodings of
    `write_mimic_cxr`.

    There is one frontal image of each study, with a box around every part of a finding that
    VinDr-CXR has. Three readers annotate a training image: two draw all boxes, shifted by half a
    pixel to the left and to the right, the third leaves out mild findings; the mean of the boxes is
    the truth. A fifth of the patients is in the test split, with one set of boxes. Pneumonia is a
    diagnosis without boxes; support devices are not annotated.

    Each patient has 2.3 images on average. The other arguments and the errors are those of
    `write_mimic_cxr`. Returns the folder.
    """
    options = challenge_options("vindr-cxr", patients, seed, size, test=0.2)
    return write_release(Path(out), options, _write_vindr_cxr_patient, _tables(), workers)


def findings(view: View, size: int) -> Iterator[tuple[str, Box]]:
    """Yield the finding of the release and the box of every visible part, in pixels of
    `draw(view, size)`.
    """
    for box in boxes(view, size):
        if box.label == "Fracture":
            yield "Clavicle fracture" if box.zone.endswith("clavicle") else "Rib fracture", box
        elif box.label in _NAMES:
            yield _NAMES[box.label], box


def _write_vindr_cxr_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = "test" if options.split_index(patient.index) else "train"
    tables: dict[str, list[list[object]]] = {name: [] for name in _tables() if split in name}
    annotations, labels = tables.values()
    truth = []
    for study in patient.studies:
        view = study.frontal
        name = image_uid_hex(view)
        path = Path(split, f"{name}.dicom")
        write_view(root / path, view, options.size, partial(dicom_bytes, patient, study, view))
        for ids, shift, seen in _readings(name, split, study, view):
            rows = [
                [*ids, finding, box.x + shift, box.y, box.x + box.width + shift, box.y + box.height]
                for finding, box in findings(view, options.size)
                if box.label in seen
            ]
            named = {str(row[len(ids)]) for row in rows} | (seen & {"Pneumonia"})
            annotations += rows or [[*ids, "No finding", "", "", "", ""]]
            cells = [int(finding in named) for finding in (*LOCAL, *_GLOBAL)]
            labels.append([*ids, *cells, 0, int(not named)])
        truth.append(
            truth_row(
                view,
                study,
                options.size,
                path=path.as_posix(),
                subject_id=patient.subject_id,
                split=split,
            )
        )
    return PatientRows(patient.index, tables, truth)


def _readings(
    name: str, split: str, study: Study, view: View
) -> Iterator[tuple[list[str], float, set[str]]]:
    """Yield the first columns of a reader's rows, the shift of the boxes, and the labels that
    the reader gives.
    """
    present = {finding.label for finding in view.findings}
    if split == "test":
        yield [name], 0.0, present
        return
    mild = {finding.label for finding in study.findings if finding.severity == "mild"}
    for reader, shift in _READERS.items():
        yield [name, reader], shift, present - mild if reader == "R10" else present


# The phantom corpus in the layout of VinDr-PCXR 1.0.0: DICOM files of children, labels and boxes.

PCXR_DISEASES = (
    "No finding", "Bronchitis", "Brocho-pneumonia", "Other disease", "Bronchiolitis",
    "Situs inversus", "Pneumonia", "Pleuro-pneumonia", "Diagphramatic hernia", "Tuberculosis",
    "Congenital emphysema", "CPAM", "Hyaline membrane disease", "Mediastinal tumor", "Lung tumor",
)  # fmt: skip
PCXR_FINDINGS = {
    "Atelectasis": "Atelectasis", "Cardiomegaly": "Cardiomegaly", "Consolidation": "Consolidation",
    "Edema": "Edema", "Lung Lesion": "Other nodule/mass", "Lung Opacity": "Diffuse aveolar opacity",
    "Pleural Effusion": "Pleural effusion", "Pleural Other": "Pleural thickening",
    "Pneumothorax": "Pneumothorax",
}  # fmt: skip
"""Label of the phantom -> finding of the release, in its spelling."""


def write_vindr_pcxr(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 1024,
    workers: int | None = None,
) -> Path:
    """Write a phantom VinDr-PCXR: its four tables and DICOM images of 8 bits.

    There is one frontal image of each study, with a box around every part of nine findings. A
    pneumonia is a Brocho-pneumonia (the release's spelling) in each second patient; images with
    findings and without pneumonia have Other disease. Ages are in months. A sixth of the patients
    is in the test split.

    Each patient has 2.3 images on average. The other arguments and the errors are those of
    `write_mimic_cxr`. Returns the folder.
    """
    options = challenge_options("vindr-pcxr", patients, seed, size, test=1 / 6)
    ids = ("image_id", "rad_ID")
    columns: dict[str, tuple[str, ...]] = {}
    columns |= {f"annotations_{split}.csv": (*ids, *_BOX) for split in ("train", "test")}
    columns |= {f"image_labels_{split}.csv": (*ids, *PCXR_DISEASES) for split in ("train", "test")}
    return write_release(Path(out), options, _write_vindr_pcxr_patient, columns, workers)


def _write_vindr_pcxr_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = "test" if options.split_index(patient.index) else "train"
    annotations: list[list[object]] = []
    labels: list[list[object]] = []
    truth = []
    pneumonia = "Pneumonia" if patient.index % 2 else "Brocho-pneumonia"
    for study in patient.studies:
        view = study.frontal
        name = image_uid_hex(view)
        path = Path(split, f"{name}.dicom")
        months = study.age
        encode = partial(plain_dicom, name, study, view, age=f"{months:03d}M")
        write_view(root / path, view, options.size, encode)
        rows = [
            [name, "R1", PCXR_FINDINGS[box.label], *_corners(box)]
            for box in boxes(view, options.size)
            if box.label in PCXR_FINDINGS
        ]
        annotations += rows or [[name, "R1", "No finding", "", "", "", ""]]
        disease = pneumonia if study.labels["Pneumonia"] else "Other disease" if rows else ""
        given = disease or "No finding"
        labels.append([name, "R1", *(int(each == given) for each in PCXR_DISEASES)])
        row = truth_row(view, study, options.size, path=path.as_posix(), split=split)
        truth.append({**row, "age": months // 12})
    tables = {f"annotations_{split}.csv": annotations, f"image_labels_{split}.csv": labels}
    return PatientRows(patient.index, tables, truth)


def _corners(box: Box) -> tuple[int, int, int, int]:
    return box.x, box.y, box.x + box.width, box.y + box.height
