"""The phantom corpus in the layout of Object-CXR (MIDL 2020): JPEG files with foreign objects, and their shapes."""

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.world import Patient, Study
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.encode import encode_jpeg
from medvl.phantom.rendering.film import WHITE
from medvl.phantom.seeds import generator

SPLITS = ("train", "dev")
RECTANGLE, ELLIPSE, POLYGON = 0, 1, 2
"""Types of shapes in the tables."""
_SHARE, _MAX_OBJECTS = 0.5, 3
_MIN_RADIUS, _MAX_RADIUS = 0.02, 0.05  # of the short side
_METAL = 0.97  # brightness
_STREAM = 94

Shape = tuple[int, NDArray[np.intp]]
"""Type, and the points (N, 2): two corners, or those of a polygon."""


def write_object_cxr(
    out: Path | str, *, patients: int = 400, seed: int = 0, size: int = 1024, workers: int | None = None
) -> Path:
    """Write a phantom Object-CXR: `train.csv`, `dev.csv` and JPEG files in `train/` and `dev/`.

    There is one frontal image of each study. Half of the images have one to three foreign objects, bright shapes
    painted over the lungs: a rectangle (a clip), an ellipse (a button) or a polygon (a pendant). They are not part of
    the phantom world. Its support devices are not annotated, as in the release. A ninth of the patients is in dev.

    Each patient has 2.3 images on average. The other arguments and the errors are those of `write_mimic_cxr`; rows of
    the ground truth have `objects`, the annotation of the table. Returns the folder.
    """
    options = Options(
        corpus="object-cxr", patients=patients, seed=seed, size=size, split=(8 / 9, 0.0, 1 / 9), reports=False
    )
    columns = {f"{split}.csv": ("image_name", "annotation") for split in SPLITS}
    return write_release(Path(out), options, _write_patient, columns, workers)


def foreign_objects(study: Study, height: int, width: int) -> Iterator[Shape]:
    """Yield the foreign objects on the frontal image of a study, in pixels."""
    rng = generator(*study.key, _STREAM)
    if rng.random() >= _SHARE:
        return
    for _ in range(int(rng.integers(1, _MAX_OBJECTS + 1))):
        kind = int(rng.integers(3))
        radius_2 = np.maximum(2, rng.uniform(_MIN_RADIUS, _MAX_RADIUS, 2) * min(height, width))
        center_2 = np.array([width * (rng.uniform(0.2, 0.4) + 0.4 * rng.integers(2)), height * rng.uniform(0.25, 0.7)])
        angles = np.linspace(0, 2 * np.pi, 5, endpoint=False) + rng.uniform(0, np.pi)
        unit_N2 = (
            np.stack([np.cos(angles), np.sin(angles)], axis=1) if kind == POLYGON else np.array([[-1, -1], [1, 1]])
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


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = SPLITS[min(1, options.split_index(patient.index))]
    rows: list[list[object]] = []
    truth = []
    for study in patient.studies:
        view = study.frontal
        shapes = list(foreign_objects(study, *view.camera.shape(options.size)))
        path = Path(split, f"{study.study_id}.jpg")
        if not (root / path).exists():
            image_HW = draw(view, options.size)
            paint(image_HW, shapes)
            write_file(root / path, encode_jpeg(image_HW))
        text = ";".join(" ".join(map(str, (kind, *points_N2.ravel().tolist()))) for kind, points_N2 in shapes)
        rows.append([path.name, text])
        ids = {"path": path.as_posix(), "subject_id": patient.subject_id, "split": split, "objects": text}
        truth.append(truth_row(view, study, options.size, **ids))
    return PatientRows(patient.index, {f"{split}.csv": rows}, truth)
