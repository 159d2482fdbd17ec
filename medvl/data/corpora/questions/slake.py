"""SLAKE 1.0, English or Chinese. Layout, repairs and counts: `data_cards/slake.md`."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.data.annotations import Question
from medvl.data.corpora.common import questions as vqa
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, find_file
from medvl.data.corpora.registry import FileAccess, register_corpus
from medvl.data.privacy import Deidentifier

Language = Literal["en", "zh"]
LANGUAGES = get_args(Language)

_FILES = {
    "train": ("train.json",),
    "validate": ("validate.json", "validation.json"),
    "test": ("test.json",),
}
_FIELDS = (
    "qid",
    "img_name",
    "question",
    "answer",
    "q_lang",
    "location",
    "modality",
    "answer_type",
    "content_type",
)


@register_corpus("slake")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SLAKE(vqa.QuestionCorpus):
    """Convert SLAKE, with the questions of one language."""

    counts: ClassVar[Mapping[str, int]] = {"images": 642}
    """Images of the full release."""

    root: Path
    """folder of train.json, validate.json, test.json and imgs/."""
    language: Language = "en"
    """language of the questions."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of SLAKE with their questions in one language; no image is opened. It
        splits by image.

        Raises CorpusError when a file or field is missing, or a value does not match the data card;
        ConfigError when the language is unknown.
        """
        root = self.root
        allowed = access.folders(root)
        check_choice(self.language, LANGUAGES, "language")
        rows = RowCounts("questions")
        warnings = Counter[str]()
        questions = []
        extra = {}
        for split, names in _FILES.items():
            path = find_file(root, *names)
            for row in rows.reading(vqa.read_rows(path, _FIELDS, allowed)):
                if vqa.clean_text(row["q_lang"]) != self.language:
                    rows.exclude("other_language")
                    continue
                image = vqa.check_image_name(path, vqa.clean_text(row["img_name"]))
                question = Question(
                    id=vqa.clean_text(row["qid"]),
                    question=vqa.clean_text(row["question"]),
                    answer=vqa.clean_text(row["answer"]),
                    answer_type=vqa.parse_answer_type(row["answer_type"], path),
                    kind=vqa.clean_text(row["content_type"]),
                    organ=vqa.clean_text(row["location"]),
                    split=split,
                    phrasing=vqa.clean_text(row.get("base_type")),
                )
                if not question.answer:
                    warnings["no_answer"] += 1
                questions.append((image, question))
                extra[image] = {"modality": vqa.clean_text(row["modality"])}
        images = {image: root / "imgs" / image for image, _ in questions}
        return vqa.plan_questions(
            self.corpus, deid, images, questions, rows, warnings, extra, allowed
        )
