"""The phantom corpus in the layout of ChestX-Det10 (2020): PNG files, and boxes in JSON."""

import json
from pathlib import Path

from medvl.phantom.layouts.boxes_and_masks.kaggle import REFERENCE_SIZE, square_frontal_views
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.world import Patient
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.encode import encode_png
from medvl.phantom.rendering.ground_truth import boxes

NAMES = {
    "Atelectasis": "Atelectasis", "Consolidation": "Consolidation", "Fracture": "Fracture", "Lung Lesion": "Nodule",
    "Pleural Effusion": "Effusion", "Pneumothorax": "Pneumothorax",
}  # fmt: skip
"""Label of the phantom -> category of the release; the phantom has no calcification, emphysema, fibrosis or mass."""


def write_chestxdet10(
    out: Path | str, *, patients: int = 400, seed: int = 0, size: int = REFERENCE_SIZE, workers: int | None = None
) -> Path:
    """Write a phantom ChestX-Det10: `train.json`, `test.json`, and PNG files in `train_data/` and `test_data/`.

    There is one frontal image of each study, with a box around every part of six of the ten findings, in pixels of an
    image of 1024 x 1024. A seventh of the patients is in the test split.

    Each patient has 2.3 images on average. `size` is the height and width of the images in pixels, 1024 in the real
    release. The other arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = Options(
        corpus="chestxdet10", patients=patients, seed=seed, size=size, split=(6 / 7, 0.0, 1 / 7), reports=False
    )
    return write_release(Path(out), options, _write_patient, {"train.json": None, "test.json": None}, workers)


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = "test" if options.split_index(patient.index) else "train"
    rows: list[list[object]] = []
    truth = []
    for study, view in square_frontal_views(patient):
        path = Path(f"{split}_data", f"{study.study_id}.png")
        if not (root / path).exists():
            write_file(root / path, encode_png(draw(view, options.size)))
        found = [box for box in boxes(view, REFERENCE_SIZE) if box.label in NAMES]
        row = {
            "file_name": path.name,
            "syms": [NAMES[box.label] for box in found],
            "boxes": [[box.x, box.y, box.x + box.width, box.y + box.height] for box in found],
        }
        rows.append([json.dumps(row)])
        ids = {"path": path.as_posix(), "subject_id": patient.subject_id, "split": split}
        truth.append(truth_row(view, study, REFERENCE_SIZE, **ids))
    return PatientRows(patient.index, {f"{split}.json": rows}, truth)
