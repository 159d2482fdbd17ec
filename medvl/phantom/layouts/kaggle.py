"""The phantom corpus in the layouts of three corpora of Kaggle: RSNA (pneumonia), SIIM-ACR
(pneumothorax), and QaTa-COV19 with LViT's texts, which name the places of the masks.
"""

import dataclasses
import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian

from medvl.phantom.geometry import Surface
from medvl.phantom.layouts.dicom_writer import view_position
from medvl.phantom.layouts.writer import (
    Options,
    PatientRows,
    truth_row,
    write_file,
    write_release,
    write_view,
)
from medvl.phantom.population.anatomy import SIDES
from medvl.phantom.population.findings import PART_SAMPLERS, Finding
from medvl.phantom.population.world import Patient, Study, View, generator
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.findings import boxes, make_lung, masks
from medvl.phantom.rendering.scene import encode_png

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


INFECTIONS = ("Consolidation", "Lung Opacity")
"""Labels of the phantom whose masks are the infection."""
FOLDERS = ("Train", "Val", "Test")
_ZONES = ("upper", "middle", "lower")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_LEAST_SHARE = 0.1
"""Share of a lung's infected pixels below which a third of the lung is not named."""
_DISTRACTOR_STREAM = 0x10A1
"""Last key of the random generator of distractors."""
_TRIES = 12
"""Places that are tried for each distractor."""


def write_qata(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 224,
    workers: int | None = None,
    distractors: int = 0,
) -> Path:
    """Write a phantom QaTa-COV19 in LViT's layout: images, masks, and a workbook of descriptions of
    each split.

    There is one frontal image of each study with a consolidation or opacity; as in the release,
    none has an empty mask. A description gives sides, number of areas and thirds of each lung:
    "Bilateral pulmonary infection, two infected areas, upper left lung and middle lower right
    lung." Sides are the patient's. Splits are by patient.

    There is about one image per two patients. `size` is the height and width of the images in
    pixels. `distractors` is the largest number of opacities in each image that look like infected
    areas, but are neither in the mask nor in the text (see `sample_distractors`): the image alone
    does not show which areas are infected. Their boxes are the field `distractors` of the ground
    truth. The other arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    split = (0.62, 0.15, 0.23)
    options = Options(
        corpus="qata",
        patients=patients,
        seed=seed,
        size=size,
        split=split,
        reports=True,
        distractors=distractors,
    )
    tables = {_table(name): ("Image", "Description") for name in FOLDERS}
    return write_release(Path(out), options, _write_patient, tables, workers)


def _table(name: str) -> str:
    return f"{name}_Folder/{name}_text.xlsx"


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    name = FOLDERS[options.split_index(patient.index)]
    rows: list[list[object]] = []
    truth = []
    for study, view in square_frontal_views(patient):
        mask_HW = infection(view, options.size)
        if mask_HW is None:
            continue
        extra = sample_distractors(view, mask_HW, options.distractors)
        shown = dataclasses.replace(view, findings=(*view.findings, *extra))
        file = f"{image_uid_hex(view)}.png"
        image = Path(f"{name}_Folder", "img", file)
        mask = Path(f"{name}_Folder", "labelcol", f"mask_{file}")
        if not (root / mask).exists():
            write_file(root / image, encode_png(draw(shown, options.size)))
            write_file(
                root / mask, cv2.imencode(".png", mask_HW.astype(np.uint8) * 255)[1].tobytes()
            )
        rows.append([mask.name, describe(view, mask_HW)])
        row = truth_row(
            view,
            study,
            options.size,
            path=image.as_posix(),
            subject_id=patient.subject_id,
            split=name,
        )
        if options.distractors:
            only = dataclasses.replace(view, findings=extra)
            row["distractors"] = [dataclasses.asdict(box) for box in boxes(only, options.size)]
        truth.append(row)
    return PatientRows(patient.index, {_table(name): rows}, truth)


def infection(view: View, size: int) -> NDArray[np.bool_] | None:
    """Return the mask (H, W) of the infected areas in pixels of `draw(view, size)`, None where
    there are none.
    """
    lesions = [mask for label, mask in masks(view, size).items() if label in INFECTIONS]
    return np.logical_or.reduce(lesions) if lesions else None


def sample_distractors(view: View, mask_HW: NDArray[np.bool_], count: int) -> tuple[Finding, ...]:
    """Return up to `count` findings that are drawn as infected areas are, each of one part.

    Each has the kind and the extent of an infected area, at a random place of this kind where it
    shares no pixel with the infection or another distractor, and where its own description would
    name no third of a lung that the description of the infection names. Images with large
    infections may have no such place.
    """
    rng = generator(*view.key, _DISTRACTOR_STREAM)
    infected = [
        (each.label, part)
        for each in view.findings
        if each.label in INFECTIONS
        for part in each.parts
    ]
    named = set(named_zones(view, mask_HW))
    taken_HW = mask_HW
    distractors: list[Finding] = []
    for _ in range(count * _TRIES):
        label, part = infected[rng.integers(len(infected))]
        finding = Finding(label=label, parts=PART_SAMPLERS[label](rng, part.extent)[:1])
        other_HW = infection(dataclasses.replace(view, findings=(finding,)), len(mask_HW))
        if (
            other_HW is None
            or (other_HW & taken_HW).any()
            or named.intersection(named_zones(view, other_HW))
        ):
            continue
        taken_HW = taken_HW | other_HW
        distractors.append(finding)
        if len(distractors) == count:
            break
    return tuple(distractors)


def describe(view: View, mask_HW: NDArray[np.bool_]) -> str:
    """Return the description of an infection: sides, number of connected areas, thirds of each
    lung.
    """
    zones: dict[str, list[str]] = {}
    for side, zone in named_zones(view, mask_HW):
        zones.setdefault(side, []).append(zone)
    areas = cv2.connectedComponents(mask_HW.astype(np.uint8))[0] - 1
    number = _NUMBERS[areas] if areas < len(_NUMBERS) else "many"
    sides = "Bilateral" if len(zones) == 2 else "Unilateral"
    where = " and ".join(
        f"{'all' if len(named) == 3 else ' '.join(named)} {side} lung"
        for side, named in zones.items()
    )
    return f"{sides} pulmonary infection, {number} infected area{'s' * (areas != 1)}, {where}."


def named_zones(view: View, mask_HW: NDArray[np.bool_]) -> list[tuple[str, str]]:
    """Return side and third, by height, of the parts of the lungs that hold a share of a lung's
    infected pixels.
    """
    named = []
    for side in SIDES[::-1]:
        outline = make_lung(view.chest, view.lateral, side).outline()
        lung_HW = Surface(view.camera, (mask_HW.shape[0], mask_HW.shape[1])).fill([outline]) > 0
        infected_H = (mask_HW & lung_HW).sum(axis=1)
        if not infected_H.any():
            continue
        top, bottom = np.flatnonzero(lung_HW.any(axis=1))[[0, -1]]
        borders = np.linspace(top, bottom + 1, 4).round().astype(int)[1:3]
        shares = [part.sum() / infected_H.sum() for part in np.split(infected_H, borders)]
        named += [
            (side, zone)
            for zone, share in zip(_ZONES, shares, strict=True)
            if share >= _LEAST_SHARE
        ]
    return named
