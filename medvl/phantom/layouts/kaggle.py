"""The phantom corpus in the layouts of two Kaggle challenges: RSNA (pneumonia) and SIIM-ACR
(pneumothorax).
"""

import dataclasses
import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian

from medvl.phantom.layouts.dicom_writer import view_position
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_release, write_view
from medvl.phantom.population.world import Patient, Study, View, generator
from medvl.phantom.rendering.findings import boxes, masks

# Shared code of the Kaggle challenges' layouts: square 8-bit frontal images.
#
# Tables refer to images of 1024 pixels, independent of the size at which the phantom's images are
# drawn.

REFERENCE_SIZE = 1024
"""Side of the images to which boxes and masks refer: that of every image of the real releases."""
_SECONDARY_CAPTURE = UID("1.2.840.10008.5.1.4.1.1.7")


def square_frontal_views(patient: Patient) -> Iterator[tuple[Study, View]]:
    """Yield one frontal view of each study, with a square field."""
    for study in patient.studies:
        view = study.frontal
        yield study, dataclasses.replace(view, camera=dataclasses.replace(view.camera, aspect=1.0))


def challenge_options(
    corpus: str, patients: int, seed: int, size: int, *, test: float = 0.0
) -> Options:
    """Return the options of a release without reports, with a share of patients in the test split.

    Raises ConfigError ("out_of_range").
    """
    shares = (1 - test, 0.0, test)
    return Options(
        corpus=corpus, patients=patients, seed=seed, size=size, split=shares, reports=False
    )


def write_image(
    root: Path, path: Path, name: str, patient: Patient, study: Study, view: View, size: int
) -> dict[str, object]:
    """Write the DICOM file of a view to `path` below `root` if it is missing; return its ground
    truth row.
    """
    write_view(root / path, view, size, functools.partial(plain_dicom, name, study, view))
    return truth_row(
        view, study, REFERENCE_SIZE, path=path.as_posix(), subject_id=patient.subject_id
    )


def image_uid_hex(view: View) -> str:
    """Return the 32 hexadecimal digits of a view's UID."""
    return view.dicom_id.replace("-", "")[:32]


def uid(view: View) -> UID:
    """Return the UID of a view, below the root 2.25 for 128-bit numbers."""
    return UID(f"2.25.{int(image_uid_hex(view), 16)}")


def plain_dicom(
    name: str, study: Study, view: View, image_HW: NDArray[np.uint16], *, age: str = ""
) -> bytes:
    """Return an uncompressed 8-bit DICOM file of a 12-bit image; `name` becomes name and id of the
    patient. `age` is PatientAge, by default the study's in years.
    """
    dataset = plain_dataset(uid(view), (image_HW >> 4).astype("u1"))
    dataset.Modality = "CR"
    dataset.BodyPartExamined = "CHEST"
    dataset.ViewPosition = view_position(view)
    dataset.PatientID = dataset.PatientName = name
    dataset.PatientSex = study.sex
    dataset.PatientAge = age or f"{study.age:03d}Y"
    return dataset_bytes(dataset)


def plain_dataset(number: UID, grey_HW: NDArray[np.uint8]) -> FileDataset:
    """Return a dataset with a grey image and its UID, to which a layout adds its fields."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPClassUID = meta.MediaStorageSOPClassUID = _SECONDARY_CAPTURE
    dataset.SOPInstanceUID = meta.MediaStorageSOPInstanceUID = number
    dataset.Rows, dataset.Columns = grey_HW.shape
    dataset.SamplesPerPixel = 1
    dataset.PixelRepresentation = 0
    dataset.BitsAllocated = 8
    dataset.BitsStored = 8
    dataset.HighBit = 7
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.PixelData = grey_HW.tobytes()
    dataset["PixelData"].VR = "OB"
    return dataset


def dataset_bytes(dataset: FileDataset) -> bytes:
    """Return the content of a DICOM file."""
    buffer = io.BytesIO()
    dataset.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


# The phantom corpus in the layout of the RSNA Pneumonia Detection Challenge (2018), stage 2.

RSNA_IMAGES = "stage_2_train_images"
RSNA_MAPPING = "pneumonia-challenge-dataset-mappings_2018.json"
LABELS = "stage_2_train_labels.csv"
CLASSES = "stage_2_detailed_class_info.csv"
BOXED_LABELS = ("Consolidation", "Pneumonia")
"""Findings with boxes: pneumonia-like opacities."""
_COLUMNS = {
    LABELS: ("patientId", "x", "y", "width", "height", "Target"),
    CLASSES: ("patientId", "class"),
}
_PIECES = (8, 4, 4, 4, 12)


def write_rsna(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = REFERENCE_SIZE,
    workers: int | None = None,
) -> Path:
    """Write a phantom RSNA challenge: its two tables, DICOM images, and the mapping to patients of
    NIH.

    There is one frontal image of each study, with a box around every part of a consolidation or
    pneumonia, in pixels of an image of 1024 x 1024. About 70% of the images have no box.

    Each patient has 2.3 images on average. `size` is the height and width of the images in pixels,
    1024 in the real release. The other arguments and the errors are those of `write_mimic_cxr`.
    Returns the folder.
    """
    options = challenge_options("rsna", patients, seed, size)
    return write_release(
        Path(out), options, _write_rsna_patient, {**_COLUMNS, RSNA_MAPPING: None}, workers
    )


def _write_rsna_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    tables: dict[str, list[list[object]]] = {LABELS: [], CLASSES: []}
    mapping = []
    truth = []
    for number, (study, view) in enumerate(square_frontal_views(patient)):
        name = _image_id(view)
        path = Path(RSNA_IMAGES, f"{name}.dcm")
        truth.append(write_image(root, path, name, patient, study, view, options.size))
        view_boxes = _boxes(view)
        targets: list[list[object]] = [[*box, 1] for box in view_boxes] or [["", "", "", "", 0]]
        tables[LABELS] += [[name, *target] for target in targets]
        tables[CLASSES] += [[name, _class(study, bool(view_boxes))] for _ in targets]
        nih = f"{patient.subject_id:08d}_{number:03d}.png"
        mapping.append([json.dumps({"subset_img_id": name, "img_id": nih})])
    return PatientRows(patient.index, {**tables, RSNA_MAPPING: mapping}, truth)


def _boxes(view: View) -> list[tuple[int, int, int, int]]:
    """Return the distinct boxes; a consolidation that is a pneumonia has two labels."""
    boxed = [box for box in boxes(view, REFERENCE_SIZE) if box.label in BOXED_LABELS]
    return list(dict.fromkeys((box.x, box.y, box.width, box.height) for box in boxed))


def _class(study: Study, boxed: bool) -> str:
    if boxed:
        return "Lung Opacity"
    return "Normal" if study.labels["No Finding"] else "No Lung Opacity / Not Normal"


def _image_id(view: View) -> str:
    """Return the image name of the release: a UUID, which it calls a patient."""
    digits = iter(image_uid_hex(view))
    return "-".join("".join(next(digits) for _ in range(length)) for length in _PIECES)


# The phantom corpus in the layout of SIIM-ACR Pneumothorax Segmentation (2019), stage 2.

SIIM_TABLE = "stage_2_train.csv"
SIIM_IMAGES = "dicom-images-train"
LABEL = "Pneumothorax"
_NEGATIVE_SHARE = 0.25
"""Share of studies without a pneumothorax that are kept; 20% of the images then have one, as in
the release.
"""
_STREAM = 92


def write_siim(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = REFERENCE_SIZE,
    workers: int | None = None,
) -> Path:
    """Write a phantom SIIM-ACR challenge: DICOM images, and a table of run-length encoded masks.

    There is one frontal image of each study with a pneumothorax, and of a quarter of the others,
    whose mask is "-1". Masks refer to images of 1024 x 1024 pixels.

    There is one image per 1.4 patients. `size` is the height and width of the images in pixels,
    1024 in the real release. The other arguments and the errors are those of `write_mimic_cxr`.
    Returns the folder.
    """
    options = challenge_options("siim", patients, seed, size)
    return write_release(
        Path(out), options, _write_siim_patient, {SIIM_TABLE: ("ImageId", "EncodedPixels")}, workers
    )


def _write_siim_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    rows: list[list[object]] = []
    truth = []
    for study, view in square_frontal_views(patient):
        mask_HW = masks(view, REFERENCE_SIZE).get(LABEL)
        if mask_HW is None and generator(*study.key, _STREAM).random() >= _NEGATIVE_SHARE:
            continue
        name = str(uid(view))
        path = Path(SIIM_IMAGES, f"2.25.{study.study_id}", f"2.25.{study.study_id}1", f"{name}.dcm")
        truth.append(write_image(root, path, name, patient, study, view, options.size))
        rows.append([name, "-1" if mask_HW is None else encode_run_lengths(mask_HW)])
    return PatientRows(patient.index, {SIIM_TABLE: rows}, truth)


def encode_run_lengths(mask_HW: NDArray[np.bool_]) -> str:
    """Return gap (from the previous run) and length of every run of a non-empty mask, column by
    column.
    """
    inside_P = np.pad(mask_HW.ravel(order="F"), 1)
    border = np.flatnonzero(np.diff(inside_P.astype(np.int8)))
    return " ".join(map(str, np.ediff1d(border, to_begin=border[:1]).tolist()))
