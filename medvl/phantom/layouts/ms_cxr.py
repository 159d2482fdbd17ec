"""The phantom corpus in the layout of MS-CXR 1.1.0: phrases about findings, and the boxes of what they are about."""

from collections.abc import Iterator
from pathlib import Path

from medvl.phantom.language.sentences import state_present
from medvl.phantom.layouts.mimic_cxr import encode_jpeg
from medvl.phantom.layouts.writer import Options, Rows, truth_row, write_file, write_release
from medvl.phantom.population.findings import Finding
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.ground_truth import Box, boxes
from medvl.phantom.seeds import generator

TABLE = "MS_CXR_Local_Alignment_v1.1.0.csv"
LABELS = (
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Lung Opacity",
    "Pleural Effusion",
    "Pneumonia",
    "Pneumothorax",
)
"""What MS-CXR has phrases about."""
_HEADER = (
    "dicom_id", "category_name", "label_text", "path", "x", "y", "w", "h", "image_width", "image_height", "split"
)  # fmt: skip
_SPLITS = ("train", "val", "test")
_STREAM = 91  # keeps the wording apart from that of the report


def write_ms_cxr(
    out: Path | str,
    *,
    patients: int = 100,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.0, 0.0, 1.0),
    workers: int | None = None,
) -> Path:
    """Write the phantom as MS-CXR: its table, and beside it the images that the real release takes from MIMIC-CXR-JPG.

    One frontal image of each study that has one of the findings; a phrase says that a finding is there, in the words of
    the phantom's reports, and its boxes are those of all parts of the finding. Mild ones are among them.

    Args:
        out: empty or absent, or a finished or partial run of the same options.
        patients: how many; a patient has some four phrases on average.
        seed: decides everything.
        size: pixels of the longer side of every image.
        split: shares of the patients in train, val and test of the table's column.
        workers: processes; None takes one a core. Their number does not change a byte.

    Returns:
        The folder written.

    Raises:
        ConfigError: an option is out of range.
        CorpusError: `out` holds something else.
    """
    options = Options(corpus="ms-cxr", patients=patients, seed=seed, size=size, split=split, reports=False)
    return write_release(Path(out), options, _write_patient, {TABLE: _HEADER}, workers)


def phrases(study: Study, view: View, size: int) -> Iterator[tuple[Finding, str, list[Box]]]:
    """A finding that the view shows, a phrase about it, and its boxes in an image as `draw(view, size)` makes it."""
    shown = boxes(view, size)
    rng = generator(*study.key, _STREAM)
    for finding in study.findings:
        found = [box for box in shown if box.label == finding.label]
        if finding.label in LABELS and found:
            yield finding, state_present(rng, finding, None)[0].text, found


def _write_patient(root: Path, patient: Patient, options: Options) -> Rows:
    split = _SPLITS[options.part(patient.index)]
    rows: list[list[object]] = []
    truth = []
    for study in patient.studies:
        view = study.frontal
        said = list(phrases(study, view, options.size))
        if not said:
            continue
        subject = patient.subject_id
        folder = Path("files", f"p{subject // 10**6}", f"p{subject}", f"s{study.study_id}")
        path = folder / f"{view.dicom_id}.jpg"
        if not (root / path).exists():
            write_file(root / path, encode_jpeg(draw(view, options.size)))
        height, width = view.camera.shape(options.size)
        for finding, text, found in said:
            for box in found:
                place = (box.x, box.y, box.width, box.height, width, height)
                rows.append([view.dicom_id, finding.label, text, path.as_posix(), *place, split])
        truth.append(truth_row(view, study, options.size, path=path.as_posix(), subject_id=subject, split=split))
    return Rows(patient.index, {TABLE: rows}, truth)
