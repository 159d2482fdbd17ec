"""The phantom corpus in the layout of the RSNA Pneumonia Detection Challenge (2018), stage 2."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from medvl.phantom.layouts.kaggle import SIDE, challenge_options, frontals, hexadecimal, write_image
from medvl.phantom.layouts.writer import Options, Rows, write_release
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.ground_truth import boxes

IMAGES, MAPPING = "stage_2_train_images", "pneumonia-challenge-dataset-mappings_2018.json"
LABELS, CLASSES = "stage_2_train_labels.csv", "stage_2_detailed_class_info.csv"
OPACITIES = ("Consolidation", "Pneumonia")
"""Findings that the challenge's readers would box: pneumonia-like opacities."""
_COLUMNS = {LABELS: ("patientId", "x", "y", "width", "height", "Target"), CLASSES: ("patientId", "class")}
_PIECES = (8, 4, 4, 4, 12)


def write_rsna(
    out: Path | str, *, patients: int = 400, seed: int = 0, size: int = SIDE, workers: int | None = None
) -> Path:
    """Write the phantom as the RSNA challenge: its two tables, DICOM images, and the mapping to patients of NIH.

    One frontal image of each study, with a box around every part of a consolidation or pneumonia, in pixels of a square
    of 1024. Some seven images in ten have none.

    Args:
        out: empty or absent, or a finished or partial run of the same options.
        patients: how many; a patient has 2.3 images on average.
        seed: decides everything.
        size: height and width of the images in pixels; the real ones have 1024.
        workers: processes; None takes one a core. Their number does not change a byte.

    Returns:
        The folder written.

    Raises:
        ConfigError: an option is out of range.
        CorpusError: `out` holds something else.
    """
    options = challenge_options("rsna", patients, seed, size)
    return write_release(Path(out), options, _write_patient, {**_COLUMNS, MAPPING: None}, workers)


def _write_patient(root: Path, patient: Patient, options: Options) -> Rows:
    tables: dict[str, list[list[object]]] = {LABELS: [], CLASSES: []}
    mapping, truth = [], []
    for number, (study, view) in enumerate(frontals(patient)):
        name = _image_id(view)
        path = Path(IMAGES, f"{name}.dcm")
        truth.append(write_image(root, path, name, patient, study, view, options.size))
        found = _boxes(view)
        targets: list[list[object]] = [[*box, 1] for box in found] or [["", "", "", "", 0]]
        tables[LABELS] += [[name, *target] for target in targets]
        tables[CLASSES] += [[name, _class(study, bool(found))] for _ in targets]
        nih = f"{patient.subject_id:08d}_{number:03d}.png"
        mapping.append({"subset_img_id": name, "img_id": nih})
    lines = _json_lines(mapping, first=patient.index == 0, last=patient.index == options.patients - 1)
    return Rows(patient.index, {**tables, MAPPING: [[line] for line in lines]}, truth)


def _json_lines(rows: Sequence[Mapping[str, str]], *, first: bool, last: bool) -> list[str]:
    """A patient's part of one JSON list: patients are written apart, and their lines are joined."""
    lines = [f"{json.dumps(row)}," for row in rows]
    if last:
        lines[-1:] = [lines[-1].removesuffix(","), "]"]
    return ["[", *lines] if first else lines


def _boxes(view: View) -> list[tuple[int, int, int, int]]:
    """Each place once: a consolidation that is a pneumonia has two names."""
    shown = [(box.x, box.y, box.width, box.height) for box in boxes(view, SIDE) if box.label in OPACITIES]
    return list(dict.fromkeys(shown))


def _class(study: Study, boxed: bool) -> str:
    if boxed:
        return "Lung Opacity"
    return "Normal" if study.labels["No Finding"] else "No Lung Opacity / Not Normal"


def _image_id(view: View) -> str:
    """As the release names its images: a UUID, which it calls a patient."""
    digits = iter(hexadecimal(view))
    return "-".join("".join(next(digits) for _ in range(length)) for length in _PIECES)
