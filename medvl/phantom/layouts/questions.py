"""The phantom's questions in the layouts of VQA-RAD (as MEVF split it) and of SLAKE."""

import csv
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from medvl.phantom.language.vqa import balanced_rows, vqa_images
from medvl.phantom.layouts.writer import Options, PatientRows, write_file, write_release
from medvl.phantom.population.world import Patient
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
