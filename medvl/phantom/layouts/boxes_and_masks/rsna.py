"""The phantom corpus in the layout of the RSNA Pneumonia Detection Challenge (2018), stage 2."""

import json
from pathlib import Path

from medvl.phantom.layouts.boxes_and_masks import kaggle
from medvl.phantom.layouts.boxes_and_masks.kaggle import REFERENCE_SIZE
from medvl.phantom.layouts.writer import Options, PatientRows, write_release
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.ground_truth import boxes

IMAGES, MAPPING = "stage_2_train_images", "pneumonia-challenge-dataset-mappings_2018.json"
LABELS, CLASSES = "stage_2_train_labels.csv", "stage_2_detailed_class_info.csv"
BOXED_LABELS = ("Consolidation", "Pneumonia")
"""Findings with boxes: pneumonia-like opacities."""
_COLUMNS = {LABELS: ("patientId", "x", "y", "width", "height", "Target"), CLASSES: ("patientId", "class")}
_PIECES = (8, 4, 4, 4, 12)


def write_rsna(
    out: Path | str, *, patients: int = 400, seed: int = 0, size: int = REFERENCE_SIZE, workers: int | None = None
) -> Path:
    """Write a phantom RSNA challenge: its two tables, DICOM images, and the mapping to patients of NIH.

    There is one frontal image of each study, with a box around every part of a consolidation or pneumonia, in pixels of
    an image of 1024 x 1024. About 70% of the images have no box.

    Each patient has 2.3 images on average. `size` is the height and width of the images in pixels, 1024 in the real
    release. The other arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = kaggle.challenge_options("rsna", patients, seed, size)
    return write_release(Path(out), options, _write_patient, {**_COLUMNS, MAPPING: None}, workers)


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    tables: dict[str, list[list[object]]] = {LABELS: [], CLASSES: []}
    mapping, truth = [], []
    for number, (study, view) in enumerate(kaggle.square_frontal_views(patient)):
        name = _image_id(view)
        path = Path(IMAGES, f"{name}.dcm")
        truth.append(kaggle.write_image(root, path, name, patient, study, view, options.size))
        view_boxes = _boxes(view)
        targets: list[list[object]] = [[*box, 1] for box in view_boxes] or [["", "", "", "", 0]]
        tables[LABELS] += [[name, *target] for target in targets]
        tables[CLASSES] += [[name, _class(study, bool(view_boxes))] for _ in targets]
        nih = f"{patient.subject_id:08d}_{number:03d}.png"
        mapping.append([json.dumps({"subset_img_id": name, "img_id": nih})])
    return PatientRows(patient.index, {**tables, MAPPING: mapping}, truth)


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
    digits = iter(kaggle.image_uid_hex(view))
    return "-".join("".join(next(digits) for _ in range(length)) for length in _PIECES)
