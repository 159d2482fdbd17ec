"""The phantom corpus in the layout of VinDr-CXR 1.0.0: DICOM files, labels, and boxes of three readers."""

from collections.abc import Iterator
from pathlib import Path

from medvl.phantom.layouts.boxes_and_masks.kaggle import image_uid_hex
from medvl.phantom.layouts.dicom_writer import dicom_bytes
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.ground_truth import Box, boxes

LOCAL = (
    "Aortic enlargement", "Atelectasis", "Calcification", "Cardiomegaly", "Clavicle fracture", "Consolidation", "Edema",
    "Emphysema", "Enlarged PA", "ILD", "Infiltration", "Lung Opacity", "Lung cavity", "Lung cyst", "Mediastinal shift",
    "Nodule/Mass", "Pleural effusion", "Pleural thickening", "Pneumothorax", "Pulmonary fibrosis", "Rib fracture",
    "Other lesion",
)  # fmt: skip
_GLOBAL = ("COPD", "Lung tumor", "Pneumonia", "Tuberculosis")
_NAMES = {
    "Atelectasis": "Atelectasis", "Cardiomegaly": "Cardiomegaly", "Consolidation": "Consolidation", "Edema": "Edema",
    "Enlarged Cardiomediastinum": "Other lesion", "Lung Lesion": "Nodule/Mass", "Lung Opacity": "Lung Opacity",
    "Pleural Effusion": "Pleural effusion", "Pleural Other": "Pleural thickening", "Pneumothorax": "Pneumothorax",
}  # fmt: skip
"""Label of the phantom -> finding of the release; fractures are of a rib or a clavicle."""
_READERS = {"R8": -0.5, "R9": 0.5, "R10": 0.0}
"""Reader -> shift of the boxes in pixels. Their mean is the truth, also without R10, who omits mild findings."""
_BOX = ("class_name", "x_min", "y_min", "x_max", "y_max")


def _tables() -> dict[str, tuple[str, ...]]:
    columns = {}
    for split, ids, other in (("train", ("image_id", "rad_id"), "diseases"), ("test", ("image_id",), "disease")):
        columns[f"annotations/annotations_{split}.csv"] = (*ids, *_BOX)
        columns[f"annotations/image_labels_{split}.csv"] = (*ids, *LOCAL, *_GLOBAL, f"Other {other}", "No finding")
    return columns


def write_vindr_cxr(
    out: Path | str, *, patients: int = 400, seed: int = 0, size: int = 1024, workers: int | None = None
) -> Path:
    """Write a phantom VinDr-CXR: its four tables and DICOM images of 12 bits, in the encodings of `write_mimic_cxr`.

    There is one frontal image of each study, with a box around every part of a finding that VinDr-CXR has. Three
    readers annotate a training image: two draw all boxes, shifted by half a pixel to the left and to the right, the
    third leaves out mild findings; the mean of the boxes is the truth. A fifth of the patients is in the test split,
    with one set of boxes. Pneumonia is a diagnosis without boxes; support devices are not annotated.

    Each patient has 2.3 images on average. The other arguments and the errors are those of `write_mimic_cxr`. Returns
    the folder.
    """
    options = Options(corpus="vindr-cxr", patients=patients, seed=seed, size=size, split=(0.8, 0.0, 0.2), reports=False)
    return write_release(Path(out), options, _write_patient, _tables(), workers)


def findings(view: View, size: int) -> Iterator[tuple[str, Box]]:
    """Yield the finding of the release and the box of every visible part, in pixels of `draw(view, size)`."""
    for box in boxes(view, size):
        if box.label == "Fracture":
            yield "Clavicle fracture" if box.zone.endswith("clavicle") else "Rib fracture", box
        elif box.label in _NAMES:
            yield _NAMES[box.label], box


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = "test" if options.split_index(patient.index) else "train"
    tables: dict[str, list[list[object]]] = {name: [] for name in _tables() if split in name}
    annotations, labels = tables.values()
    truth = []
    for study in patient.studies:
        view = study.frontal
        name = image_uid_hex(view)
        path = Path(split, f"{name}.dicom")
        if not (root / path).exists():
            write_file(root / path, dicom_bytes(patient, study, view, draw(view, options.size)))
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
            truth_row(view, study, options.size, path=path.as_posix(), subject_id=patient.subject_id, split=split)
        )
    return PatientRows(patient.index, tables, truth)


def _readings(name: str, split: str, study: Study, view: View) -> Iterator[tuple[list[str], float, set[str]]]:
    """Yield the first columns of a reader's rows, the shift of the boxes, and the labels that the reader gives."""
    present = {finding.label for finding in view.findings}
    if split == "test":
        yield [name], 0.0, present
        return
    mild = {finding.label for finding in study.findings if finding.severity == "mild"}
    for reader, shift in _READERS.items():
        yield [name, reader], shift, present - mild if reader == "R10" else present
