"""PathVQA, as its authors published it or as JSON. Layout, repairs and counts:
`data_cards/path-vqa.md`.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.annotations import Question
from medvl.data.corpora.common import questions as vqa
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, find_file
from medvl.data.corpora.figures.m3ae_arrow import read_plain_pickle
from medvl.data.corpora.registry import FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError

_PARTS = {"train": "train", "validate": "val", "test": "test"}
_FILES = ("qas/{0}/{0}_qa.pkl", "qas/{0}_vqa.pkl", "qas/{0}/{0}_qa.json", "qas/{0}_vqa.json")
"""Files with question, answer and image in each row, or in LXMERT's form: sent, label {answer:
score} and img_id.
"""


@register_corpus("path-vqa")
@dataclasses.dataclass(frozen=True, kw_only=True)
class PathVQA(vqa.QuestionCorpus):
    """Convert PathVQA, always in colour, for the stains of pathology."""

    counts: ClassVar[Mapping[str, int]] = {"images": 4_289}
    """Images with questions."""
    color: ClassVar[bool] = True

    root: Path
    """folder of qas/ and images/."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of PathVQA with their questions; no image is opened. The release splits
        by image.

        Rows that repeat image, question and answer of an earlier row are left out and counted: the
        remaining rows have the counts of the cleaned release.

        Raises CorpusError when a file or field is missing, or a pickle contains more than plain
        data.
        """
        root = self.root
        allowed = access.folders(root)
        rows = RowCounts("questions")
        warnings = Counter[str]()
        questions: dict[tuple[str, str, str], tuple[str, Question]] = {}
        images: dict[str, Path] = {}
        for split, part in _PARTS.items():
            path = find_file(root, *(name.format(part) for name in _FILES))
            for number, row in enumerate(rows.reading(_read_rows(path, allowed)), 1):
                image, text, answer = _parse_row(path, row)
                if (image, text, answer) in questions:
                    rows.exclude("duplicate")
                    continue
                warnings.update(no_answer=int(not answer))
                images[image] = root / "images" / part / f"{vqa.check_image_name(path, image)}.jpg"
                question = Question(
                    # only one of the two forms has question_id; both have the same order
                    id=f"{split}-{number}",
                    question=text,
                    answer=answer,
                    answer_type=vqa.infer_answer_type(answer),
                    kind=text.split()[0].lower()
                    if text
                    else "",  # the authors' types: what, where, is, how, ...
                    split=split,
                )
                questions[image, text, answer] = image, question
        return vqa.plan_questions(
            self.corpus, deid, images, list(questions.values()), rows, +warnings, folders=allowed
        )


def _read_rows(path: Path, allowed: InputFolders) -> list[dict[str, Any]]:
    required = (
        ("sent", "label", "img_id")
        if path.stem.endswith("_vqa")
        else ("image", "question", "answer")
    )
    if path.suffix == ".json":
        return vqa.read_rows(path, required, allowed)
    return vqa.check_rows(path, read_plain_pickle(path, allowed), required)


def _parse_row(path: Path, row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return image, question and answer of a row in either form."""
    if "sent" not in row:
        return (
            vqa.clean_text(row["image"]),
            vqa.clean_text(row["question"]),
            vqa.clean_text(row["answer"]),
        )
    label = row["label"]
    if not isinstance(label, dict) or not all(
        isinstance(score, int | float) for score in label.values()
    ):
        raise CorpusError(
            f"{path}: expected a mapping of answers to scores for label",
            "wrong_type",
            field="label",
        )
    answer = max(label, key=label.__getitem__) if label else ""
    return vqa.clean_text(row["img_id"]), vqa.clean_text(row["sent"]), vqa.clean_text(answer)
