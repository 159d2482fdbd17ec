"""Phantom mammograms in the layouts of VinDr-Mammo and EMBED: breasts with masses and
calcifications of known places, not part of the phantom chest world.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from pydicom.uid import UID

from medvl.phantom.layouts.kaggle import challenge_options, dataset_bytes, plain_dataset
from medvl.phantom.layouts.writer import Options, PatientRows, write_file, write_release
from medvl.phantom.population.world import Patient, generator

SIDES = ("L", "R")
VIEWS = ("CC", "MLO")
KINDS = {"mass": "Mass", "calcification": "Suspicious Calcification"}
"""Kind of a lesion -> category of VinDr-Mammo."""

_STREAM = 97
_ASPECT = 0.8
_LESION_SHARE = 0.5
_BACKGROUND = 2
_MARKER = 230

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lesion:
    """A lesion; its place is relative to the breast."""

    kind: str
    along: float
    """From the chest wall to the nipple, 0 to 1."""
    across: float
    """From the upper to the lower end of the breast, -1 to 1."""
    radius: float
    """Relative to the height of the image."""


@dataclasses.dataclass(frozen=True, slots=True)
class Breast:
    """A breast of an exam."""

    side: str
    depth: float
    """From the chest wall to the nipple, relative to the width of the image."""
    density: int
    """1 to 4, the same in both breasts of an exam."""
    birads: int
    """1, 2, 4 or 5."""
    lesions: tuple[Lesion, ...]


def sample_breast(patient: Patient, seed: int, exam: int, side: str) -> Breast:
    """Return a breast of an exam; always the same for the same seed."""
    rng = generator(seed, patient.index, exam, SIDES.index(side), _STREAM)
    lesions = tuple(
        Lesion(
            kind=str(rng.choice(list(KINDS))),
            along=float(rng.uniform(0.25, 0.7)),
            across=float(rng.uniform(-0.5, 0.5)),
            radius=float(rng.uniform(0.02, 0.05)),
        )
        for _ in range(int(rng.integers(1, 3)) if rng.random() < _LESION_SHARE else 0)
    )
    mass = any(lesion.kind == "mass" for lesion in lesions)
    birads = (5 if mass else 4) if lesions else int(rng.integers(1, 3))
    density = int(generator(seed, patient.index, exam, _STREAM).integers(1, 5))
    return Breast(side, float(rng.uniform(0.5, 0.7)), density, birads, lesions)


def draw_breast(breast: Breast, view: str, size: int) -> tuple[NDArray[np.uint8], list[Box]]:
    """Return an 8-bit image (H, W) of `size` pixels in height, and the box of each lesion.

    The background is nearly black, and has a bright marker. A left breast is at the left edge.
    """
    height, width = size, round(size * _ASPECT)
    image_HW = np.full((height, width), _BACKGROUND, np.uint8)
    depth, half = breast.depth * width, 0.35 * height
    middle = height / 2 if view == "CC" else 0.45 * height
    y_H1, x_1W = np.mgrid[:height, :width]
    breast_HW = (x_1W / depth) ** 2 + ((y_H1 - middle) / half) ** 2 <= 1
    image_HW[breast_HW] = 60 + 15 * breast.density
    if view == "MLO":  # the pectoral muscle
        image_HW[(x_1W / (0.3 * depth) + y_H1 / (0.4 * height) <= 1) & breast_HW] = 170
    boxes = []
    for lesion in breast.lesions:
        center = (round(lesion.along * depth), round(middle + lesion.across * half))
        radius = max(2, round(lesion.radius * height))
        boxes.append(_draw_lesion(image_HW, lesion.kind, center, radius))
    mark = max(2, height // 16)
    image_HW[mark : 2 * mark, width - 2 * mark : width - mark] = _MARKER
    if breast.side == "R":
        image_HW = np.ascontiguousarray(image_HW[:, ::-1])
        boxes = [(width - right, top, width - left, bottom) for left, top, right, bottom in boxes]
    return image_HW, boxes


def _draw_lesion(
    image_HW: NDArray[np.uint8], kind: str, center: tuple[int, int], radius: int
) -> Box:
    x, y = center
    if kind == "mass":
        cv2.circle(image_HW, center, radius, (210,), -1)
    else:
        for dx, dy in ((-1, -1), (1, -1), (-1, 1), (1, 1)):
            image_HW[y + dy * (radius - 1), x + dx * (radius - 1)] = 250
    return x - radius, y - radius, x + radius + 1, y + radius + 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Image:
    """A mammogram of an exam, with the id of its file."""

    exam: int
    view: str
    breast: Breast
    name: str
    pixels_HW: NDArray[np.uint8]
    boxes: Sequence[Box]


def _images(patient: Patient, options: Options, exams: int) -> Iterator[_Image]:
    """Yield the four images of each of a patient's first exams."""
    for exam in range(min(exams, len(patient.studies))):
        for side in SIDES:
            breast = sample_breast(patient, options.seed, exam, side)
            for view in VIEWS:
                name = _digest(options.seed, patient.index, exam, side, view)
                yield _Image(exam, view, breast, name, *draw_breast(breast, view, options.size))


def _digest(*key: object) -> str:
    return hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).hexdigest()


def _write_image(path: Path, image: _Image, *, inverted: bool) -> None:
    """Write a DICOM file, in MONOCHROME1 with low values bright if inverted."""
    if path.exists():
        return
    stored_HW = 255 - image.pixels_HW if inverted else image.pixels_HW
    dataset = plain_dataset(UID(f"2.25.{int(image.name, 16)}"), stored_HW)
    dataset.Modality = "MG"
    dataset.BodyPartExamined = "BREAST"
    dataset.ViewPosition = image.view
    dataset.ImageLaterality = image.breast.side
    dataset.PhotometricInterpretation = "MONOCHROME1" if inverted else "MONOCHROME2"
    write_file(path, dataset_bytes(dataset))


def _truth(image: _Image, path: Path, **more: object) -> dict[str, object]:
    height, width = image.pixels_HW.shape
    kinds = {lesion.kind for lesion in image.breast.lesions}
    return {
        "path": path.as_posix(),
        "sex": "F",
        "view": image.view,
        "side": image.breast.side,
        "height": height,
        "width": width,
        "labels": {
            **{name: int(kind in kinds) for kind, name in KINDS.items()},
            "No Finding": int(not kinds),
            **{
                f"Breast BI-RADS {number}": int(number == image.breast.birads)
                for number in range(7)
            },
        },
        "boxes": [list(box) for box in image.boxes],
        **more,
    }


# The phantom mammograms in the layout of VinDr-Mammo 1.0.0.

MAMMO_TABLE = "breast-level_annotations.csv"
MAMMO_FINDINGS = "finding_annotations.csv"
_MAMMO_COLUMNS = (
    "study_id", "series_id", "image_id", "laterality", "view_position", "height", "width",
    "breast_birads", "breast_density", "split",
)  # fmt: skip
_FINDING_COLUMNS = (
    *_MAMMO_COLUMNS, "finding_categories", "finding_birads", "xmin", "ymin", "xmax", "ymax",
)  # fmt: skip


def write_vindr_mammo(
    out: Path | str,
    *,
    patients: int = 100,
    seed: int = 0,
    size: int = 512,
    workers: int | None = None,
) -> Path:
    """Write phantom mammograms in the layout of VinDr-Mammo: two tables and DICOM images.

    Each patient has one exam of four images. Half of the breasts have one or two lesions with
    boxes. Each second image is MONOCHROME1. A fifth of the patients is in the test split. `size` is
    the height of the images. The other arguments and the errors are those of `write_mimic_cxr`.
    Returns the folder.
    """
    options = challenge_options("vindr-mammo", patients, seed, size, test=0.2)
    columns = {MAMMO_TABLE: _MAMMO_COLUMNS, MAMMO_FINDINGS: _FINDING_COLUMNS}
    return write_release(Path(out), options, _write_vindr_mammo_patient, columns, workers)


def _write_vindr_mammo_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = "test" if options.split_index(patient.index) else "training"
    breasts: list[list[object]] = []
    findings: list[list[object]] = []
    truth = []
    exam = _digest(options.seed, patient.index)
    for image in _images(patient, options, 1):
        path = Path("images", exam, f"{image.name}.dicom")
        _write_image(root / path, image, inverted=image.view == "MLO")
        height, width = image.pixels_HW.shape
        row = [exam, exam[::-1], image.name, image.breast.side, image.view, height, width]
        row += [f"BI-RADS {image.breast.birads}", f"DENSITY {'ABCD'[image.breast.density - 1]}"]
        row.append(split)
        breasts.append(row)
        for lesion, box in zip(image.breast.lesions, image.boxes, strict=True):
            findings.append([*row, f"['{KINDS[lesion.kind]}']", row[7], *box])
        if not image.boxes:
            findings.append([*row, "['No Finding']", "", "", "", "", ""])
        truth.append(_truth(image, path))
    tables = {MAMMO_TABLE: breasts, MAMMO_FINDINGS: findings}
    return PatientRows(patient.index, tables, truth)


# The phantom mammograms in the layout of EMBED's open part.

EMBED_METADATA = "tables/EMBED_OpenData_metadata.csv"
EMBED_CLINICAL = "tables/EMBED_OpenData_clinical.csv"
_EMBED_COLUMNS = (
    "empi_anon", "acc_anon", "study_date_anon", "anon_dicom_path", "FinalImageType", "ViewPosition",
    "ImageLateralityFinal", "num_roi", "ROI_coords",
)  # fmt: skip
_CLINICAL_COLUMNS = (
    "empi_anon", "acc_anon", "side", "numfind", "asses", "tissueden", "massshape", "massmargin",
    "calcfind", "calcdistri", "path_severity", "age_at_study", "RACE_DESC", "ETHNIC_GROUP_DESC",
)  # fmt: skip
_LETTERS = {1: "N", 2: "B", 4: "S", 5: "M"}
_STORAGE = "/mnt/storage/anon_dicom/cohort_1"


def write_embed_mammo(
    out: Path | str,
    *,
    patients: int = 100,
    seed: int = 0,
    size: int = 512,
    workers: int | None = None,
) -> Path:
    """Write phantom mammograms in the layout of EMBED: two tables and DICOM images.

    Each patient has one or two exams of four 2D images and one synthetic image (cview). A breast
    has a row for each lesion; where both breasts have none and the same assessment, they share a
    row of side B. A second, less suspicious finding is added to each third lesion. Masses have a
    pathology. `size` is the height of the images. The other arguments and the errors are those of
    `write_mimic_cxr`. Returns the folder.
    """
    options = challenge_options("embed-mammo", patients, seed, size)
    columns = {EMBED_METADATA: _EMBED_COLUMNS, EMBED_CLINICAL: _CLINICAL_COLUMNS}
    return write_release(Path(out), options, _write_embed_patient, columns, workers)


def _write_embed_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    metadata: list[list[object]] = []
    clinical: list[list[object]] = []
    truth = []
    ids = (10_000_000 + patient.index, 5_000_000_000_000_000 + 10 * patient.index)
    for image in _images(patient, options, 2):
        accession = ids[1] + image.exam
        study = patient.studies[image.exam]
        below = Path(str(ids[0]), str(accession), "series", f"{image.name}.dcm")
        path = Path("images", "cohort_1", below)
        _write_image(root / path, image, inverted=False)
        regions = [[top, left, bottom, right] for left, top, right, bottom in image.boxes]
        row: list[object] = [ids[0], accession, f"{study.taken:%Y-%m-%d}", f"{_STORAGE}/{below}"]
        row += ["2D", image.view, image.breast.side, len(regions), regions]
        metadata.append(row)
        if image.view == "MLO" and image.breast.side == "L":
            synthetic = f"{_STORAGE}/{below.with_name(f'{image.name}-cview.dcm')}"
            metadata.append([*row[:3], synthetic, "cview", *row[5:]])
        truth.append(_truth(image, path, age=study.age))
    for exam in range(min(2, len(patient.studies))):
        left, right = (sample_breast(patient, options.seed, exam, side) for side in SIDES)
        shared = not left.lesions and not right.lesions and left.birads == right.birads
        breasts = [dataclasses.replace(left, side="B")] if shared else [left, right]
        for breast in breasts:
            for number, cells in enumerate(_clinical_rows(breast), 1):
                age = patient.studies[exam].age
                clinical.append([ids[0], ids[1] + exam, breast.side, number, *cells, age, "", ""])
    return PatientRows(patient.index, {EMBED_METADATA: metadata, EMBED_CLINICAL: clinical}, truth)


def _clinical_rows(breast: Breast) -> Iterator[list[object]]:
    """Yield the cells of a breast's findings from `asses` to `path_severity`."""
    if not breast.lesions:
        yield [_LETTERS[breast.birads], breast.density, "", "", "", "", ""]
    for lesion in breast.lesions:
        mass = lesion.kind == "mass"
        shape = ["R", "D", "", "", 0] if mass else ["", "", "P", "C", ""]
        yield [_LETTERS[5 if mass else 4], breast.density, *shape]
        if round(lesion.radius * 1000) % 3 == 0:
            yield ["B", breast.density, "", "", "", "", ""]
