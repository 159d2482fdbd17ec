"""The phantom's questions in the layouts of VQA-RAD (as MEVF split it) and of SLAKE."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from medvl.phantom.language.vqa import VQAImage, balance, vqa_images
from medvl.phantom.layouts.mimic_cxr import encode_jpeg
from medvl.phantom.layouts.writer import Options, Rows, write_file, write_release
from medvl.phantom.population.world import Patient

CANDIDATES = "phantom_questions.csv"
"""All questions, before they are thinned: the truth behind the release."""
_COLUMNS = ("image", "split", "question", "answer", "answer_type", "kind", "organ", "modality")
_SPLITS = ("train", "validate", "test")
_RAD_KINDS = {
    "modality": "MODALITY",
    "plane": "PLANE",
    "organ": "ORGAN",
    "presence": "PRES",
    "laterality": "POS",
    "severity": "ATTRIB",
    "count": "COUNT",
    "size": "SIZE",
}
_RAD_ORGANS = {"head": "HEAD", "chest": "CHEST", "abdomen": "ABD"}
_SLAKE_KINDS = {
    "modality": "Modality",
    "plane": "Plane",
    "organ": "Organ",
    "presence": "Abnormality",
    "laterality": "Position",
    "severity": "Abnormality",
    "count": "Quantity",
    "size": "Size",
}
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
    """Write the phantom as VQA-RAD in MEVF's files: `trainset.json`, `testset.json` and `images/`.

    Unlike the real ones, train and test share no image and no patient.

    Args:
        out: empty or absent, or a finished or partial run of the same options.
        patients: how many; each has two to three images with some 18 questions in all.
        seed: decides everything.
        size: pixels of the longer side of every image.
        split: shares of the patients in train, validation and test; the layout has no validation of its own, so those
            of the first two are in `trainset.json`.
        workers: processes; None takes one a core. Their number does not change a byte.

    Returns:
        The folder written.

    Raises:
        ConfigError: an option is out of range.
        CorpusError: `out` holds something else.
    """
    options = Options(corpus="vqa-rad", patients=patients, seed=seed, size=size, split=split, reports=False)
    root = write_release(Path(out), options, _write_rad_patient, {CANDIDATES: _COLUMNS}, workers)
    kept = _thin(root, lambda row: "test" if row["split"] == "test" else "train")
    numbered = [(row, number) for number, row in enumerate(kept, 1)]
    for name, splits in (("trainset.json", ("train", "validate")), ("testset.json", ("test",))):
        _write_json(root / name, [_rad_row(row, number) for row, number in numbered if row["split"] in splits])
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
    """Write the phantom as SLAKE: `train.json`, `validate.json`, `test.json` and `imgs/xmlabN/source.jpg`.

    Questions are English; masks, detections and the knowledge graph of the real release are left out. Everything else
    is as in `write_vqa_rad`.
    """
    options = Options(corpus="slake", patients=patients, seed=seed, size=size, split=split, reports=False)
    root = write_release(Path(out), options, _write_slake_patient, {CANDIDATES: _COLUMNS}, workers)
    numbered = list(enumerate(_thin(root, lambda row: row["split"])))
    for name in _SPLITS:
        rows = [_slake_row(row, number) for number, row in numbered if row["split"] == name]
        _write_json(root / f"{name}.json", rows)
    return root


def _write_rad_patient(root: Path, patient: Patient, options: Options) -> Rows:
    return _write_patient(root, patient, options, lambda image: f"images/synpic{image.number}.jpg")


def _write_slake_patient(root: Path, patient: Patient, options: Options) -> Rows:
    return _write_patient(root, patient, options, lambda image: f"imgs/xmlab{image.number}/source.jpg")


def _write_patient(root: Path, patient: Patient, options: Options, path_of: Callable[[VQAImage], str]) -> Rows:
    split = _SPLITS[options.part(patient.index)]
    rows: list[list[object]] = []
    truth = []
    for image in vqa_images(patient):
        path = path_of(image)
        if not (root / path).exists():
            write_file(root / path, encode_jpeg(image.draw(options.size)))
        for asked in image.asked:
            kind = "CLOSED" if asked.closed else "OPEN"
            rows.append([path, split, asked.question, asked.answer, kind, asked.kind, image.organ, image.modality])
        truth.append({"path": path, "split": split, "subject_id": patient.subject_id, "organ": image.organ,
                      "modality": image.modality, "plane": image.plane})  # fmt: skip
    return Rows(patient.index, {CANDIDATES: rows}, truth)


def _thin(root: Path, part_of: Callable[[Candidate], str]) -> list[Candidate]:
    """The candidates that are left when every wording of a part has its answers balanced."""
    with (root / CANDIDATES).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    keys = [(f"{part_of(row)} {row['question']}", row["answer"], f"{row['image']} {row['question']}") for row in rows]
    return [row for row, kept in zip(rows, balance(keys), strict=True) if kept]


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
