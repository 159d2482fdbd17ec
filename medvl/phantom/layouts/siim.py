"""The phantom corpus in the layout of SIIM-ACR Pneumothorax Segmentation (2019), stage 2."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.phantom.layouts.kaggle import SIDE, challenge_options, frontals, uid, write_image
from medvl.phantom.layouts.writer import Options, Rows, write_release
from medvl.phantom.population.world import Patient
from medvl.phantom.rendering.ground_truth import masks
from medvl.phantom.seeds import generator

TABLE, IMAGES = "stage_2_train.csv", "dicom-images-train"
LABEL = "Pneumothorax"
_KEPT = 0.25
"""Of the studies without a pneumothorax: one image in five then has one, as in the release."""
_STREAM = 92


def write_siim(
    out: Path | str, *, patients: int = 400, seed: int = 0, size: int = SIDE, workers: int | None = None
) -> Path:
    """Write the phantom as the SIIM-ACR challenge: DICOM images, and a table of run-length encoded masks.

    One frontal image of each study that has a pneumothorax, and of a quarter of the others, whose row says -1. Masks
    are of squares of 1024 pixels.

    Args:
        out: empty or absent, or a finished or partial run of the same options.
        patients: how many; there is an image for every 1.4 of them.
        seed: decides everything.
        size: height and width of the images in pixels; the real ones have 1024.
        workers: processes; None takes one a core. Their number does not change a byte.

    Returns:
        The folder written.

    Raises:
        ConfigError: an option is out of range.
        CorpusError: `out` holds something else.
    """
    options = challenge_options("siim", patients, seed, size)
    return write_release(Path(out), options, _write_patient, {TABLE: ("ImageId", "EncodedPixels")}, workers)


def _write_patient(root: Path, patient: Patient, options: Options) -> Rows:
    rows: list[list[object]] = []
    truth = []
    for study, view in frontals(patient):
        mask_HW = masks(view, SIDE).get(LABEL)
        if mask_HW is None and generator(*study.key, _STREAM).random() >= _KEPT:
            continue
        name = str(uid(view))
        path = Path(IMAGES, f"2.25.{study.study_id}", f"2.25.{study.study_id}1", f"{name}.dcm")
        truth.append(write_image(root, path, name, patient, study, view, options.size))
        rows.append([name, "-1" if mask_HW is None else runs(mask_HW)])
    return Rows(patient.index, {TABLE: rows}, truth)


def runs(mask_HW: NDArray[np.bool_]) -> str:
    """Gap and length of every run of a mask with a pixel, down its columns; each gap is counted from the run before."""
    inside_P = np.pad(mask_HW.ravel(order="F"), 1)
    border = np.flatnonzero(np.diff(inside_P.astype(np.int8)))
    return " ".join(map(str, np.ediff1d(border, to_begin=border[:1]).tolist()))
