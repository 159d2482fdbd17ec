"""The phantom's questions in the layouts of VQA-RAD (as MEVF split it) and of SLAKE; and about
MIMIC-CXR in those of MIMIC-CXR-VQA, MIMIC-Ext-CXR-QBA, Medical-Diff-VQA and GEMeX.
"""

import csv
import functools
import itertools
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.phantom.language.lexicon import NAMES
from medvl.phantom.language.vqa import balanced_rows, vqa_images
from medvl.phantom.layouts.boxes import phrases
from medvl.phantom.layouts.reports import MIMIC_TABLES, SPLITS, write_mimic_cxr_patient
from medvl.phantom.layouts.writer import Form, Options, PatientRows, write_file, write_release
from medvl.phantom.population.findings import change_of
from medvl.phantom.population.world import Patient, Study
from medvl.phantom.rendering.draw import draw_image
from medvl.phantom.rendering.scene import encode_jpeg

CANDIDATES = "phantom_questions.csv"
"""Table of all questions before balancing."""
_COLUMNS = ("image", "split", "question", "answer", "answer_type", "kind", "organ", "modality")
_SPLITS = ("train", "validate", "test")
_RAD_KINDS = {
    "modality": "MODALITY", "plane": "PLANE", "organ": "ORGAN", "presence": "PRES",
    "laterality": "POS", "severity": "ATTRIB", "count": "COUNT", "size": "SIZE",
}  # fmt: skip
_RAD_ORGANS = {"head": "HEAD", "chest": "CHEST", "abdomen": "ABD"}
_SLAKE_KINDS = {
    "modality": "Modality", "plane": "Plane", "organ": "Organ", "presence": "Abnormality",
    "laterality": "Position", "severity": "Abnormality", "count": "Quantity", "size": "Size",
}  # fmt: skip
_SLAKE_ORGANS = {"head": "Brain", "chest": "Lung", "abdomen": "Abdomen"}

Candidate = Mapping[str, str]
"""A row of `CANDIDATES`."""


def write_vqa_rad(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.0, 0.2),
    workers: int | None = None,
) -> Path:
    """Write a phantom VQA-RAD in MEVF's files: `trainset.json`, `testset.json` and `images/`.

    Unlike in the real release, train and test share no image and no patient.

    Each patient has two to three images and about 18 questions. `split` has the shares of patients
    in train, validation and test; the layout has no validation split, so the first two are in
    `trainset.json`. The other arguments and the errors are those of `write_mimic_cxr`. Returns the
    folder.
    """
    options = Options(
        corpus="vqa-rad", patients=patients, seed=seed, size=size, split=split, reports=False
    )
    write_patient = functools.partial(_write_patient, path_format="images/synpic{}.jpg")
    root = write_release(Path(out), options, write_patient, {CANDIDATES: _COLUMNS}, workers)
    kept = _balanced(root, lambda row: "test" if row["split"] == "test" else "train")
    numbered = [(row, number) for number, row in enumerate(kept, 1)]
    for name, splits in (("trainset.json", ("train", "validate")), ("testset.json", ("test",))):
        _write_json(
            root / name,
            [_rad_row(row, number) for row, number in numbered if row["split"] in splits],
        )
    return root


def write_slake(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.7, 0.15, 0.15),
    workers: int | None = None,
) -> Path:
    """Write a phantom SLAKE: `train.json`, `validate.json`, `test.json` and
    `imgs/xmlabN/source.jpg`.

    Questions are English; there are no masks, detections or knowledge graph. The arguments are
    those of `write_vqa_rad`.
    """
    options = Options(
        corpus="slake", patients=patients, seed=seed, size=size, split=split, reports=False
    )
    write_patient = functools.partial(_write_patient, path_format="imgs/xmlab{}/source.jpg")
    root = write_release(Path(out), options, write_patient, {CANDIDATES: _COLUMNS}, workers)
    numbered = list(enumerate(_balanced(root, lambda row: row["split"])))
    for name in _SPLITS:
        rows = [_slake_row(row, number) for number, row in numbered if row["split"] == name]
        _write_json(root / f"{name}.json", rows)
    return root


def _write_patient(root: Path, patient: Patient, options: Options, path_format: str) -> PatientRows:
    split = _SPLITS[options.split_index(patient.index)]
    rows: list[list[object]] = []
    truth = []
    for image in vqa_images(patient):
        path = path_format.format(image.number)
        if not (root / path).exists():
            write_file(root / path, encode_jpeg(draw_image(image.source, options.size)))
        for question in image.questions:
            kind = "CLOSED" if question.closed else "OPEN"
            facts = (kind, question.kind, image.organ, image.modality)
            rows.append([path, split, question.question, question.answer, *facts])
        truth.append({"path": path, "split": split, "subject_id": patient.subject_id,
            "organ": image.organ,
                      "modality": image.modality, "plane": image.plane})  # fmt: skip
    return PatientRows(patient.index, {CANDIDATES: rows}, truth)


def _balanced(root: Path, split_of_row: Callable[[Candidate], str]) -> list[Candidate]:
    """Return the candidates that remain after balancing the answers of every wording in each
    split.
    """
    with (root / CANDIDATES).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    keys = [
        (
            f"{split_of_row(row)} {row['question']}",
            row["answer"],
            f"{row['image']} {row['question']}",
        )
        for row in rows
    ]
    return [row for row, kept in zip(rows, balanced_rows(keys), strict=True) if kept]


def _rad_row(row: Candidate, number: int) -> dict[str, object]:
    return {
        "qid": number,
        "image_name": Path(row["image"]).name,
        "image_organ": _RAD_ORGANS[row["organ"]],
        "answer": row["answer"],
        "answer_type": row["answer_type"],
        "question_type": _RAD_KINDS[row["kind"]],
        "question": row["question"],
        "phrase_type": "freeform",
    }


def _slake_row(row: Candidate, number: int) -> dict[str, object]:
    name = row["image"].removeprefix("imgs/")
    return {
        "img_id": int(name.split("/")[0].removeprefix("xmlab")),
        "img_name": name,
        "question": row["question"],
        "answer": row["answer"],
        "q_lang": "en",
        "location": _SLAKE_ORGANS[row["organ"]],
        "modality": row["modality"],
        "answer_type": row["answer_type"],
        "base_type": "vqa",
        "content_type": _SLAKE_KINDS[row["kind"]],
        "triple": ["vhead", "_", "_"],
        "qid": number,
    }


def _write_json(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    content = (json.dumps(rows, indent=1) + "\n").encode()
    if not path.is_file() or path.read_bytes() != content:
        write_file(path, content)


VQA_FILES = {"train": "train.json", "validate": "valid.json", "test": "test.json"}
"""Split -> file of MIMIC-CXR-VQA."""
QBA_ARCHIVE = "qa.zip"
QBA_TABLE = Path("exports/A_frontal/metadata/q1M/question_metadata.parquet")
_ASKED = ("Pleural Effusion", "Pneumothorax", "Cardiomegaly", "Support Devices")
_RATINGS = ("A++", "A", "C")
_WITHOUT_ARCHIVE = 11  # each eleventh patient's studies are not in the archive


def _beside_images(
    root: Path, patient: Patient, options: Options, questions: Mapping[str, Any]
) -> PatientRows:
    """Write the images of a patient; return the rows of their tables and those of questions."""
    rows = write_mimic_cxr_patient(root, patient, options, ".jpg")
    return PatientRows(rows.order, {**rows.tables, **questions}, rows.truth)


def write_mimic_cxr_vqa(
    out: Path | str,
    *,
    patients: int = 100,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.05, 0.15),
    workers: int | None = None,
) -> Path:
    """Write a phantom MIMIC-CXR-VQA: questions with lists of answers, beside the images and tables
    of `write_mimic_cxr_jpg` with the same arguments, without reports.

    Each frontal image has a question about the presence of a finding, about all findings, which
    may be none, and about the gender, whose answer is a letter. Returns the folder.
    """
    options = Options(
        corpus="mimic-cxr-vqa", patients=patients, seed=seed, size=size, split=split, reports=False
    )
    tables = {**MIMIC_TABLES, **dict.fromkeys(VQA_FILES.values())}
    return write_release(Path(out), options, _write_vqa_patient, tables, workers)


def _write_vqa_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = SPLITS[options.split_index(patient.index)]
    lines = [
        [json.dumps({**fields, "idx": 100 * patient.index + 10 * place + number, **entry})]
        for place, study in enumerate(patient.studies)
        for fields in [_image_fields(study, patient, split)]
        for number, entry in enumerate(_entries(study))
    ]
    return _beside_images(root, patient, options, {VQA_FILES[split]: lines})


def _image_fields(study: Study, patient: Patient, split: str) -> dict[str, object]:
    folder = f"p{patient.subject_id // 10**6}/p{patient.subject_id}/s{study.study_id}"
    return {
        "split": VQA_FILES[split].removesuffix(".json"),
        "subject_id": str(patient.subject_id),
        "study_id": str(study.study_id),
        "image_id": study.frontal.dicom_id,
        "image_path": f"{folder}/{study.frontal.dicom_id}.jpg",
    }


def _entries(study: Study) -> Iterator[dict[str, object]]:
    positives = [label for label in _ASKED if study.labels[label]]
    label = _ASKED[study.study_id % len(_ASKED)]
    yield {
        "question": f"Is there any {NAMES[label]}?",
        "content_type": "presence",
        "semantic_type": "verify",
        "answer": ["yes" if label in positives else "no"],
    }
    yield {
        "question": "List all the abnormalities that are shown.",
        "content_type": "abnormality",
        "semantic_type": "query",
        "answer": [NAMES[each] for each in positives],
    }
    yield {
        "question": "What is the gender of the patient?",
        "content_type": "gender",
        "semantic_type": "query",
        "answer": [study.sex.lower()],
    }


def write_cxr_qba(
    out: Path | str,
    *,
    patients: int = 100,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.05, 0.15),
    workers: int | None = None,
) -> Path:
    """Write a phantom MIMIC-Ext-CXR-QBA: an archive of questions with structured answers and a
    table that chooses some, beside the images and tables of `write_mimic_cxr_jpg`.

    The studies of each eleventh patient are in the table and not in the archive. Returns the
    folder.
    """
    import pyarrow
    import pyarrow.parquet

    options = Options(
        corpus="cxr-qba", patients=patients, seed=seed, size=size, split=split, reports=False
    )
    tables: dict[str, Sequence[str] | Form] = {**MIMIC_TABLES, QBA_ARCHIVE: Form.ZIP}
    root = write_release(Path(out), options, _write_qba_patient, tables, workers)
    rows = list(_qba_rows(root / QBA_ARCHIVE))
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    content = sink.getvalue().to_pybytes()
    if not (root / QBA_TABLE).is_file() or (root / QBA_TABLE).read_bytes() != content:
        write_file(root / QBA_TABLE, content)
    return root


def _write_qba_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    folder = f"qa/p{patient.subject_id // 10**6}/p{patient.subject_id}"
    lost = patient.index % _WITHOUT_ARCHIVE == _WITHOUT_ARCHIVE - 1
    members = [
        [
            f"{folder}/s{study.study_id}.{'lost' if lost else 'qa'}.json",
            json.dumps({"questions": [*map(functools.partial(_qba_question, study), _ASKED)]}),
        ]
        for study in patient.studies
    ]
    return _beside_images(root, patient, options, {QBA_ARCHIVE: members})


def _qba_question(study: Study, label: str) -> Mapping[str, Any]:
    name = NAMES[label]
    sides = [finding.side for finding in study.findings if finding.label == label]
    answers = [{"text": f"There is {'' if sides else 'no '}{name}.", "regions": []}]
    answers += [{"text": f"It is {side}.", "regions": [side]} for side in sides]
    place = _ASKED.index(label)
    return {
        "question_id": f"s{study.study_id}_{place}",
        "question": f"Is there evidence of {name}?",
        "answers": answers,
    }


def _qba_rows(archive: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of the table: all questions of the archive."""
    with zipfile.ZipFile(archive) as file:
        for name in file.namelist():
            patient, study = Path(name).parts[-2:]
            for number, question in enumerate(json.loads(file.read(name))["questions"]):
                yield {
                    "patient_id": patient,
                    "study_id": study.split(".")[0],
                    "question_id": question["question_id"],
                    "question.question_type": "finding",
                    "question.quality.rating": _RATINGS[number % len(_RATINGS)],
                }


DIFF_QUESTIONS = "mimic_pair_questions.csv"
DIFF_IMAGES = "mimic_all.csv"
_DIFF_COLUMNS = (
    "study_id", "subject_id", "ref_id", "question_type", "question", "answer", "split",
)  # fmt: skip
_DIFF_SPLITS = {"train": "train", "validate": "val", "test": "test"}
_CHANGED = {"new": "added", "resolved": "gone", "worse": "larger", "better": "smaller"}


def write_diff_vqa(
    out: Path | str,
    *,
    patients: int = 100,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.05, 0.15),
    workers: int | None = None,
) -> Path:
    """Write a phantom Medical-Diff-VQA: questions about each pair of a patient's dates, beside the
    images and tables of `write_mimic_cxr_jpg` with the same arguments, without reports.

    The answer to "What has changed?" names each finding that is new, gone, larger or smaller, which
    neither image alone shows. There is a question about presence as well. Returns the folder.
    """
    options = Options(
        corpus="diff-vqa", patients=patients, seed=seed, size=size, split=split, reports=False
    )
    tables = {
        **MIMIC_TABLES,
        DIFF_QUESTIONS: _DIFF_COLUMNS,
        DIFF_IMAGES: ("study_id", "dicom_id", "study_order", "view"),
    }
    return write_release(Path(out), options, _write_diff_patient, tables, workers)


def _write_diff_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = _DIFF_SPLITS[SPLITS[options.split_index(patient.index)]]
    asked: list[list[object]] = []
    for before, after in itertools.pairwise(patient.studies):
        ids = [after.study_id, patient.subject_id, before.study_id]
        label = _ASKED[after.study_id % len(_ASKED)]
        present = "yes" if after.labels[label] else "no"
        asked.append([*ids, "presence", f"Is there {NAMES[label]}?", present, split])
        question = "What has changed compared to the reference image?"
        asked.append([*ids, "difference", question, _difference(before, after), split])
    images: list[list[object]] = [
        [study.study_id, view.dicom_id, order, view.position]
        for order, study in enumerate(patient.studies)
        for view in reversed(study.views)  # laterals first: readers choose by the view
    ]
    tables = {DIFF_QUESTIONS: asked, DIFF_IMAGES: images}
    return _beside_images(root, patient, options, tables)


def _difference(before: Study, after: Study) -> str:
    changes = {
        label: _CHANGED.get(str(change_of(label, before.findings, after.findings)))
        for label in _ASKED
    }
    texts = [f"{NAMES[label]} is {change}" for label, change in changes.items() if change]
    return "; ".join(texts) or "nothing has changed"


GEMEX_FORMS = ("open_ended", "closed_ended", "single_choice", "multi_choice")


def write_gemex(
    out: Path | str,
    *,
    patients: int = 100,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.05, 0.15),
    workers: int | None = None,
) -> Path:
    """Write a phantom GEMeX: four files of questions whose answers have boxes, beside the images
    and tables of `write_mimic_cxr_jpg` with the same arguments.

    Numbers of questions are unique only inside a file. Returns the folder.
    """
    options = Options(
        corpus="gemex", patients=patients, seed=seed, size=size, split=split, reports=False
    )
    tables = {**MIMIC_TABLES, **{f"{form}_question.jsonl": None for form in GEMEX_FORMS}}
    return write_release(Path(out), options, _write_gemex_patient, tables, workers)


def _write_gemex_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    tables: dict[str, list[list[object]]] = {f"{form}_question.jsonl": [] for form in GEMEX_FORMS}
    for number, study in enumerate(patient.studies):
        image = _image_fields(study, patient, "train")["image_path"]
        boxes = {
            finding.label: [[box.x, box.y, box.width, box.height] for box in found]
            for finding, _, found in phrases(study, study.frontal, options.size)
        }
        for form, entry in zip(GEMEX_FORMS, _gemex_entries(study), strict=True):
            places = [
                (NAMES[label], box) for label in _ASKED if label in boxes for box in boxes[label]
            ]
            entry |= {
                "q_id": 100 * patient.index + number,
                "image_path": f"files/{image}",
                "reason": "The phantom's truth.",
                "ori_report": "Not for the model.",
                "visual_regions": [name for name, _ in places],
                "visual_locations": [box for _, box in places],
            }
            tables[f"{form}_question.jsonl"].append([json.dumps(entry)])
    return _beside_images(root, patient, options, tables)


def _gemex_entries(study: Study) -> Iterator[dict[str, object]]:
    """Yield an open, a closed, a single-choice and a multi-choice question."""
    positives = [label for label in _ASKED if study.labels[label]]
    listed = [*(NAMES[label] for label in _ASKED), "none of these"]
    choices = [f"{letter}: {name}" for letter, name in zip("ABCDE", listed, strict=True)]
    right = ["ABCD"[_ASKED.index(label)] for label in positives] or ["E"]
    names = ", ".join(NAMES[label] for label in positives) or "nothing"
    yield {"question": "What is abnormal?", "answer": names, "type": "abnormality"}
    answer = "yes" if positives else "no"
    yield {"question": "Is anything abnormal?", "answer": answer, "type": "presence"}
    one = positives[0] if positives else _ASKED[0]
    options = [f"A: {NAMES[one]} is {'there' if positives else 'absent'}", "B: neither is true"]
    yield {"question": "Which is true?", "answer": "A", "choices": options, "type": "presence"}
    yield {
        "question": "Which of these are there?",
        "answer": right,
        "choices": choices,
        "type": "abnormality",
    }
