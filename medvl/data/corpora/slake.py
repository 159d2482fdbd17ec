"""SLAKE 1.0, English or Chinese. Layout, dirt and counts: `data_cards/slake.md`."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from medvl.data.annotations.questions import AnswerType, Question, plan_questions, read_rows, safe_name, text_of
from medvl.data.corpora.common.tables import Plan, find_file
from medvl.data.privacy.deidentify import Deidentifier
from medvl.errors import CorpusError
from medvl.schema import Sample

NAME = "slake"
COUNTS: Mapping[str, int] = {"images": 642}
"""Of the full release: what `medvl verify --full` compares with."""
LANGUAGES = ("en", "zh")

_FILES = {"train": ("train.json",), "validate": ("validate.json", "validation.json"), "test": ("test.json",)}
_FIELDS = ("qid", "img_name", "question", "answer", "q_lang", "location", "modality", "answer_type", "content_type")
_ANSWER_TYPES: Mapping[str, AnswerType] = {"CLOSED": "closed", "OPEN": "open"}


def plan(root: Path, deid: Deidentifier, *, language: str = "en") -> Plan:
    """Every image with its questions in one language; no image is opened. The release's split is by image.

    Args:
        root: folder that holds `train.json`, `validate.json` (or `validation.json`), `test.json` and `imgs/`.
        deid: hashes the image names.
        language: "en" or "zh"; questions in the other one are left out and counted.

    Raises:
        CorpusError: a file or field is missing, or a value is not what the data card says.
    """
    root = Path(root)
    if language not in LANGUAGES:
        raise CorpusError(f"{NAME} has the languages {', '.join(LANGUAGES)}, not {language!r}")
    noticed: Counter[str] = Counter()
    asked, extra = [], {}
    for split, names in _FILES.items():
        path = find_file(root, *names)
        for row in read_rows(path, _FIELDS):
            if text_of(row["q_lang"]) != language:
                noticed["other_language"] += 1
                continue
            image = safe_name(path, text_of(row["img_name"]))
            kind = text_of(row["answer_type"]).upper()
            if kind not in _ANSWER_TYPES:
                raise CorpusError(f"{path}: an answer_type is neither CLOSED nor OPEN")
            question = Question(
                id=text_of(row["qid"]),
                question=text_of(row["question"]),
                answer=text_of(row["answer"]),
                answer_type=_ANSWER_TYPES[kind],
                kind=text_of(row["content_type"]),
                organ=text_of(row["location"]),
                split=split,
                phrasing=text_of(row.get("base_type")),
            )
            if not question.answer:
                noticed["no_answer"] += 1
            asked.append((image, question))
            extra[image] = {"modality": text_of(row["modality"])}
    images = {image: root / "imgs" / image for image, _ in asked}
    return plan_questions(NAME, deid, images, asked, noticed, extra)


def iter_samples(root: Path, *, deid: Deidentifier, language: str = "en") -> Iterator[Sample]:
    """Samples with their questions. Raises CorpusError."""
    for record in plan(root, deid, language=language).records:
        yield record.sample
