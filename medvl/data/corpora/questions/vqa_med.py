"""ImageCLEF VQA-Med 2019. Layout, scoring and counts: `data_cards/vqa-med.md`."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from medvl.common.config_io import check_choice
from medvl.common.untrusted import InputFolders
from medvl.data.annotations import Question
from medvl.data.corpora.common.questions import (
    QuestionCorpus,
    check_image_name,
    clean_text,
    infer_answer_type,
    plan_questions,
)
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, malformed, read_lines
from medvl.data.corpora.registry import FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError

Category = Literal["modality", "plane", "organ", "abnormality"]
CATEGORIES: tuple[Category, ...] = ("modality", "plane", "organ", "abnormality")

_PARTS = {"train": "train", "validate": "val"}
_REFERENCE = "VQAMed2019_Test_Questions_w_Ref_Answers.txt"
_FOLDERS = {"train": "train_images", "validate": "val_images", "test": "vqamed2019_test_images"}


@register_corpus("vqa-med")
@dataclasses.dataclass(frozen=True, kw_only=True)
class VQAMed(QuestionCorpus):
    """Convert ImageCLEF VQA-Med 2019."""

    counts: ClassVar[Mapping[str, int]] = {"train": 3_200, "validate": 500, "test": 500}
    """Images of the full release."""

    root: Path
    """folder that contains the unpacked archives."""
    categories: tuple[Category, ...] = CATEGORIES
    """keep only the questions of these; modality plane organ, as M3AE does."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of VQA-Med with their questions; no image is opened.

        Raises CorpusError when there is no split, a folder of images is missing, or a line has the
        wrong number of fields; ConfigError when a category is unknown.
        """
        root = self.root
        allowed = access.folders(root)
        for each in self.categories:
            check_choice(each, CATEGORIES, "categories")
        counts = RowCounts("questions")
        warnings = Counter[str]()
        questions: list[tuple[str, Question]] = []
        images: dict[str, Path] = {}
        for split in _FOLDERS:
            rows = list(
                _test_rows(root, allowed)
                if split == "test"
                else _category_rows(root, _PARTS[split], allowed)
            )
            if not rows:
                continue
            folder = _image_folder(root, split)
            for number, (path, image, category, text, answer) in enumerate(counts.reading(rows), 1):
                name = f"{check_image_name(path, image)}.jpg"
                if category not in self.categories:
                    counts.exclude("other_category")
                    continue
                images[name] = folder / name
                question = Question(
                    id=f"{split}-{number}",  # the release has no ids; its order is fixed
                    question=text,
                    answer=answer,
                    answer_type=infer_answer_type(answer),
                    kind=category,
                    split=split,
                )
                warnings.update(
                    {"several_answers": 1} if "#" in answer else {}, no_answer=int(not answer)
                )
                questions.append((name, question))
        if not questions:
            raise CorpusError(
                f"{root} lacks C1_Modality_train.txt or {_REFERENCE}: see the data card",
                "not_found",
            )
        return plan_questions(
            self.corpus, deid, images, questions, counts, +warnings, folders=allowed
        )


def _category_rows(
    root: Path, part: str, allowed: InputFolders
) -> Iterator[tuple[Path, str, str, str, str]]:
    """Yield (file, image, category, question, answer) of a part's files, one per category:
    `img|question|answer`.
    """
    for number, category in enumerate(CATEGORIES, 1):
        for path in sorted(root.rglob(f"C{number}_*_{part}.txt")):
            for image, question, answer in _read_lines(path, 3, allowed):
                yield path, image, category, question, answer


def _test_rows(root: Path, allowed: InputFolders) -> Iterator[tuple[Path, str, str, str, str]]:
    """Yield the same fields of the test's reference file: `img|category|question|answer`."""
    for path in sorted(root.rglob(_REFERENCE)):
        for image, category, question, answer in _read_lines(path, 4, allowed):
            if category not in CATEGORIES:
                raise malformed(path, f"expected one of {', '.join(CATEGORIES)} for the category")
            yield path, image, category, question, answer


def _read_lines(path: Path, fields: int, allowed: InputFolders) -> Iterator[list[str]]:
    for number, line in enumerate(read_lines(path, allowed), 1):
        parts = [clean_text(part) for part in line.split("|", fields - 1)]
        if line.strip() and len(parts) != fields:
            raise malformed(f"{path}, line {number}", f"expected {fields} fields, got {len(parts)}")
        if line.strip():
            yield parts


def _image_folder(root: Path, split: str) -> Path:
    """Return the folder of a split's images; its capitalisation differs between archives."""
    folders = [
        path for path in sorted(root.rglob("*_[iI]mages")) if path.name.lower() == _FOLDERS[split]
    ]
    if not folders:
        raise CorpusError(
            f"{root} lacks {_FOLDERS[split]}: unpack the images next to the questions", "not_found"
        )
    return folders[0]
