"""VQA-RAD: the original release and the split files of MEVF. Layout, repairs and counts:
`data_cards/vqa-rad.md`.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from medvl.common.config_io import check_choice
from medvl.data.annotations import Question
from medvl.data.corpora.common import questions as vqa
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan
from medvl.data.corpora.registry import FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split
from medvl.errors import CorpusError

Split = Literal["official", "image-disjoint"]
SPLITS: tuple[Split, ...] = ("official", "image-disjoint")
IMAGE_DISJOINT: Mapping[str, float] = {"train": 0.7, "validate": 0.1, "test": 0.2}
"""Fractions of the image-disjoint split. It is a hash of the image name alone, so it is the same
on every machine.
"""

_PUBLIC = "VQA_RAD Dataset Public.json"
_TRAIN = "trainset.json"
_TEST = "testset.json"
_FOLDERS = ("VQA_RAD Image Folder", "images")
_FIELDS = (
    "qid",
    "image_name",
    "question",
    "answer",
    "answer_type",
    "question_type",
    "image_organ",
    "phrase_type",
)
_KINDS = {"PRSE": "PRES", "ATRIB": "ATTRIB"}
_SUFFIX = re.compile(r"\s*-\s*(?:yes\s*/\s*no|open)\s*$", re.IGNORECASE)
_BROKEN = "\ufffd"  # an apostrophe lost through a wrong encoding


@register_corpus("vqa-rad")
@dataclasses.dataclass(frozen=True, kw_only=True)
class VQARAD(vqa.QuestionCorpus):
    """Convert VQA-RAD, from the original release or from MEVF's split files."""

    counts: ClassVar[Mapping[str, int]] = {"images": 314}
    """Images with questions, in either form of the release.
    """

    root: Path
    """folder of the questions (VQA_RAD Dataset Public.json, or trainset.json and testset.json) and
    the images.
    """
    split: Split = "official"
    """official divides the questions, so that every test image is also in train; the output is one
    folder "mixed", and each question has its own split. image-disjoint divides the images by a
    fixed hash.
    """

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of VQA-RAD with their questions; no image is opened.

        Raises CorpusError when a file or field is missing, both forms of the release are present,
        or a value does not match the data card; ConfigError when the split is unknown.
        """
        root = self.root
        allowed = access.folders(root)
        check_choice(self.split, SPLITS, "split")
        rows = RowCounts("questions")
        warnings = Counter[str]()
        folder = next((root / name for name in _FOLDERS if (root / name).is_dir()), None)
        if folder is None:
            raise CorpusError(
                f"{root} lacks {' or '.join(_FOLDERS)}: is it the root of the release?", "not_found"
            )
        questions = []
        for path, part in _question_files(root):
            for row in rows.reading(vqa.read_rows(path, _FIELDS, allowed)):
                image = vqa.check_image_name(path, vqa.clean_text(row["image_name"]))
                question = _question(path, row, part, warnings)
                if self.split == "image-disjoint":
                    question = dataclasses.replace(
                        question, split=hash_split(image, IMAGE_DISJOINT)
                    )
                questions.append((image, question))
        images = {image: folder / image for image, _ in questions}
        extra = {image: {"split_id": self.split} for image in images}
        return vqa.plan_questions(
            self.corpus, deid, images, questions, rows, +warnings, extra, allowed
        )


def _question_files(root: Path) -> list[tuple[Path, str | None]]:
    """Return the question files with their splits; None where each row has its own."""
    public = root / _PUBLIC
    parts = [(root / _TRAIN, "train"), (root / _TEST, "test")]
    present = [path for path, _ in parts if path.is_file()]
    if public.is_file() and present:
        raise CorpusError(
            f"{root} contains {_PUBLIC} and {present[0].name}: keep one of the forms", "conflict"
        )
    if public.is_file():
        return [(public, None)]
    if len(present) < len(parts):
        raise CorpusError(
            f"{root} lacks {_PUBLIC}, or {_TRAIN} and {_TEST}: see the data card", "not_found"
        )
    return [*parts]


def _question(
    path: Path, row: Mapping[str, Any], part: str | None, warnings: Counter[str]
) -> Question:
    answer_type = vqa.parse_answer_type(row["answer_type"], path)
    phrasing = vqa.clean_text(row["phrase_type"])
    text = vqa.clean_text(row["question"])
    answer = vqa.clean_text(row["answer"])
    kinds = _kinds(row["question_type"])
    warnings.update(
        qid_text=isinstance(row["qid"], str),
        answer_number=not isinstance(row["answer"], str),
        answer_type_padded=str(row["answer_type"]) != answer_type.upper(),
        question_suffix=_SUFFIX.search(text) is not None,
        broken_character=_BROKEN in text,
        no_answer=not answer,
        question_type_misspelt=kinds != vqa.clean_text(row["question_type"]),
    )
    return Question(
        id=vqa.clean_text(row["qid"]),
        question=_SUFFIX.sub("", text).replace(_BROKEN, "'"),
        answer=answer,
        answer_type=answer_type,
        kind=kinds,
        organ=vqa.clean_text(row["image_organ"]).upper(),
        split=part or ("test" if phrasing.startswith("test") else "train"),
        phrasing=phrasing.removeprefix("test_"),
    )


def _kinds(value: object) -> str:
    """Return the question types of a row with corrected spelling, in alphabetical order."""
    names = {name.strip().upper() for name in vqa.clean_text(value).split(",")} - {""}
    return ", ".join(sorted(_KINDS.get(name, name) for name in names))
