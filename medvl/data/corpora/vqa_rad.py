"""VQA-RAD: the original release and the split files of MEVF. Layout, dirt and counts: `data_cards/vqa-rad.md`."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from medvl.data.annotations.questions import AnswerType, Question, plan_questions, read_rows, safe_name, text_of
from medvl.data.corpora.common.tables import Plan
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.splits import hash_split
from medvl.errors import CorpusError
from medvl.schema import Sample

NAME = "vqa-rad"
COUNTS: Mapping[str, int] = {"images": 314}
"""Images that questions refer to, in either form of the release: what `medvl verify --full` compares with."""
Split = Literal["official", "image-disjoint"]
SPLITS: tuple[Split, ...] = ("official", "image-disjoint")
IMAGE_DISJOINT: Mapping[str, float] = {"train": 0.7, "validate": 0.1, "test": 0.2}
"""Shares of the images in the image-disjoint split. It is drawn by image name alone, so it is the same everywhere."""

_PUBLIC, _TRAIN, _TEST = "VQA_RAD Dataset Public.json", "trainset.json", "testset.json"
_FOLDERS = ("VQA_RAD Image Folder", "images")
_FIELDS = ("qid", "image_name", "question", "answer", "answer_type", "question_type", "image_organ", "phrase_type")
_KINDS = {"PRSE": "PRES", "ATRIB": "ATTRIB"}
_SUFFIX = re.compile(r"\s*-\s*(?:yes\s*/\s*no|open)\s*$", re.IGNORECASE)
_BROKEN = "\ufffd"  # an apostrophe that a wrong encoding destroyed
_ANSWER_TYPES: Mapping[str, AnswerType] = {"CLOSED": "closed", "OPEN": "open"}


def plan(root: Path, deid: Deidentifier, *, split: Split = "official") -> Plan:
    """Every image with its questions; no image is opened.

    Args:
        root: folder that holds the JSON of the original release, or MEVF's `trainset.json` and `testset.json`, and
            the folder of images.
        deid: hashes the image names.
        split: "official": the release's split of the *questions*. Each test image is also in train, so its sample is
            of the split `mixed`, and the question says where it belongs. "image-disjoint": by hash of the image name.

    Raises:
        CorpusError: a file or field is missing, both forms of the release are there, or a value is not what the data
            card says.
    """
    root = Path(root)
    if split not in SPLITS:
        raise CorpusError(f"{NAME} has the splits {', '.join(SPLITS)}, not {split!r}")
    noticed: Counter[str] = Counter()
    folder = next((root / name for name in _FOLDERS if (root / name).is_dir()), None)
    if folder is None:
        raise CorpusError(f"{root} holds no folder {' or '.join(_FOLDERS)}: is it the root of the release?")
    asked = []
    for path, part in _files(root):
        for row in read_rows(path, _FIELDS):
            image = safe_name(path, text_of(row["image_name"]))
            question = _question(path, row, part, noticed)
            if split == "image-disjoint":
                question = dataclasses.replace(question, split=hash_split(image, IMAGE_DISJOINT))
            asked.append((image, question))
    images = {image: folder / image for image, _ in asked}
    return plan_questions(NAME, deid, images, asked, +noticed, {image: {"split_id": split} for image in images})


def iter_samples(root: Path, *, deid: Deidentifier, split: Split = "official") -> Iterator[Sample]:
    """Samples with their questions. Raises CorpusError."""
    for record in plan(root, deid, split=split).records:
        yield record.sample


def _files(root: Path) -> list[tuple[Path, str | None]]:
    """The question files with the split of each; None where the rows say it."""
    public, parts = root / _PUBLIC, [(root / _TRAIN, "train"), (root / _TEST, "test")]
    found = [path for path, _ in parts if path.is_file()]
    if public.is_file() and found:
        raise CorpusError(f"{root} holds {_PUBLIC} and {found[0].name}: keep the files of one form of the release")
    if public.is_file():
        return [(public, None)]
    if len(found) < len(parts):
        raise CorpusError(f"{root} holds neither {_PUBLIC} nor both of {_TRAIN} and {_TEST}: see the data card")
    return [*parts]


def _question(path: Path, row: Mapping[str, Any], part: str | None, noticed: Counter[str]) -> Question:
    kind = text_of(row["answer_type"]).upper()
    if kind not in _ANSWER_TYPES:
        raise CorpusError(f"{path}: an answer_type is neither CLOSED nor OPEN")
    phrasing = text_of(row["phrase_type"])
    text, answer = text_of(row["question"]), text_of(row["answer"])
    asked = _SUFFIX.sub("", text).replace(_BROKEN, "'")
    noticed.update(
        qid_text=isinstance(row["qid"], str),
        answer_number=not isinstance(row["answer"], str),
        answer_type_padded=str(row["answer_type"]) != kind,
        question_suffix=_SUFFIX.search(text) is not None,
        broken_character=_BROKEN in text,
        no_answer=not answer,
        question_type_misspelt=_kinds(row["question_type"]) != text_of(row["question_type"]),
    )
    return Question(
        id=text_of(row["qid"]),
        question=asked,
        answer=answer,
        answer_type=_ANSWER_TYPES[kind],
        kind=_kinds(row["question_type"]),
        organ=text_of(row["image_organ"]).upper(),
        split=part or ("test" if phrasing.startswith("test") else "train"),
        phrasing=phrasing.removeprefix("test_"),
    )


def _kinds(value: object) -> str:
    """The question types of a row, spelt and ordered alike: "POS, PRES" and "PRES, POS" are one."""
    names = {name.strip().upper() for name in text_of(value).split(",")} - {""}
    return ", ".join(sorted(_KINDS.get(name, name) for name in names))
