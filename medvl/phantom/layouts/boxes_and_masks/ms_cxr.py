"""The phantom corpus in the layout of MS-CXR 1.1.0: phrases about findings, and their boxes."""

from collections.abc import Iterator
from pathlib import Path

from medvl.phantom.language.sentences import present_sentences
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.findings import Finding
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.encode import encode_jpeg
from medvl.phantom.rendering.ground_truth import Box, boxes
from medvl.phantom.seeds import generator

TABLE = "MS_CXR_Local_Alignment_v1.1.0.csv"
LABELS = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Lung Opacity", "Pleural Effusion", "Pneumonia",
    "Pneumothorax",
)  # fmt: skip
"""Labels with phrases in MS-CXR."""
_HEADER = (
    "dicom_id", "category_name", "label_text", "path", "x", "y", "w", "h", "image_width", "image_height", "split"
)  # fmt: skip
_SPLITS = ("train", "val", "test")
_STREAM = 91  # separates the random numbers of phrases from those of reports


def write_ms_cxr(
    out: Path | str,
    *,
    patients: int = 100,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.0, 0.0, 1.0),
    workers: int | None = None,
) -> Path:
    """Write a phantom MS-CXR: its table, and the images that the real release takes from MIMIC-CXR-JPG.

    There is one frontal image of each study that has one of the findings. A phrase asserts a finding in the words of
    the phantom's reports, and its boxes are those of all parts of the finding. Mild findings are included.

    Each patient has about four phrases on average. `split` has the shares of patients in train, val and test of the
    table's column. The other arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = Options(corpus="ms-cxr", patients=patients, seed=seed, size=size, split=split, reports=False)
    return write_release(Path(out), options, _write_patient, {TABLE: _HEADER}, workers)


def phrases(study: Study, view: View, size: int) -> Iterator[tuple[Finding, str, list[Box]]]:
    """Yield visible findings with a phrase and their boxes in pixels of `draw(view, size)`."""
    all_boxes = boxes(view, size)
    rng = generator(*study.key, _STREAM)
    for finding in study.findings:
        finding_boxes = [box for box in all_boxes if box.label == finding.label]
        if finding.label in LABELS and finding_boxes:
            yield finding, present_sentences(rng, finding, None)[0].text, finding_boxes


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = _SPLITS[options.split_index(patient.index)]
    rows: list[list[object]] = []
    truth = []
    for study in patient.studies:
        view = study.frontal
        study_phrases = list(phrases(study, view, options.size))
        if not study_phrases:
            continue
        subject = patient.subject_id
        folder = Path("files", f"p{subject // 10**6}", f"p{subject}", f"s{study.study_id}")
        path = folder / f"{view.dicom_id}.jpg"
        if not (root / path).exists():
            write_file(root / path, encode_jpeg(draw(view, options.size)))
        height, width = view.camera.shape(options.size)
        for finding, text, finding_boxes in study_phrases:
            for box in finding_boxes:
                position = (box.x, box.y, box.width, box.height, width, height)
                rows.append([view.dicom_id, finding.label, text, path.as_posix(), *position, split])
        truth.append(truth_row(view, study, options.size, path=path.as_posix(), subject_id=subject, split=split))
    return PatientRows(patient.index, {TABLE: rows}, truth)
