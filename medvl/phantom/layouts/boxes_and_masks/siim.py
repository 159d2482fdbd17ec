"""The phantom corpus in the layout of SIIM-ACR Pneumothorax Segmentation (2019), stage 2."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.phantom.layouts.boxes_and_masks.kaggle import (
    REFERENCE_SIZE,
    challenge_options,
    square_frontal_views,
    uid,
    write_image,
)
from medvl.phantom.layouts.writer import Options, PatientRows, write_release
from medvl.phantom.population.world import Patient
from medvl.phantom.rendering.ground_truth import masks
from medvl.phantom.seeds import generator

TABLE, IMAGES = "stage_2_train.csv", "dicom-images-train"
LABEL = "Pneumothorax"
_NEGATIVE_SHARE = 0.25
"""Share of studies without a pneumothorax that are kept; 20% of the images then have one, as in the release."""
_STREAM = 92


def write_siim(
    out: Path | str, *, patients: int = 400, seed: int = 0, size: int = REFERENCE_SIZE, workers: int | None = None
) -> Path:
    """Write a phantom SIIM-ACR challenge: DICOM images, and a table of run-length encoded masks.

    There is one frontal image of each study with a pneumothorax, and of a quarter of the others, whose mask is "-1".
    Masks refer to images of 1024 x 1024 pixels.

    There is one image per 1.4 patients. `size` is the height and width of the images in pixels, 1024 in the real
    release. The other arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = challenge_options("siim", patients, seed, size)
    return write_release(Path(out), options, _write_patient, {TABLE: ("ImageId", "EncodedPixels")}, workers)


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    rows: list[list[object]] = []
    truth = []
    for study, view in square_frontal_views(patient):
        mask_HW = masks(view, REFERENCE_SIZE).get(LABEL)
        if mask_HW is None and generator(*study.key, _STREAM).random() >= _NEGATIVE_SHARE:
            continue
        name = str(uid(view))
        path = Path(IMAGES, f"2.25.{study.study_id}", f"2.25.{study.study_id}1", f"{name}.dcm")
        truth.append(write_image(root, path, name, patient, study, view, options.size))
        rows.append([name, "-1" if mask_HW is None else encode_run_lengths(mask_HW)])
    return PatientRows(patient.index, {TABLE: rows}, truth)


def encode_run_lengths(mask_HW: NDArray[np.bool_]) -> str:
    """Return gap (from the previous run) and length of every run of a non-empty mask, column by column."""
    inside_P = np.pad(mask_HW.ravel(order="F"), 1)
    border = np.flatnonzero(np.diff(inside_P.astype(np.int8)))
    return " ".join(map(str, np.ediff1d(border, to_begin=border[:1]).tolist()))
