"""Questions about images: what the VQA corpora have in common.

A sample is an image; its questions lie in `Sample.extra["questions"]` as JSON objects. A question says its own split,
because some releases split questions and not images (VQA-RAD). Where an image has questions of several splits, all
samples of that release are of the split `MIXED`, and whoever reads them must choose questions by their split.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record, open_text
from medvl.data.privacy.deidentify import Deidentifier
from medvl.errors import CorpusError
from medvl.schema import Sample

AnswerType = Literal["closed", "open"]
MIXED = "mixed"
"""The split of every sample of a release that divides the questions about one image among splits."""

_NOTHING = "NULL"  # the text that VQA-RAD writes where a field is empty; "None" is an answer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question about an image and its answer, as the corpus gives them (mended, not normalised)."""

    id: str
    """Unique in its corpus."""
    question: str
    answer: str
    """Empty where the release has none: such a question stays in every denominator and nothing answers it."""
    answer_type: AnswerType
    """By the dataset's own field; inferred from yes/no where it has none (the data card says which)."""
    kind: str = ""
    """The dataset's question type; several are joined by ", " in alphabetical order."""
    organ: str = ""
    split: str
    phrasing: str = ""
    """freeform, para or frame in VQA-RAD; vqa or kvqa in SLAKE."""

    def as_json(self) -> dict[str, str]:
        """For `Sample.extra["questions"]`; fields that are empty are absent, but for the answer."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value or name == "answer"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Question":
        """Raises CorpusError when a field is missing or is no text; unknown fields are left alone."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in data]
        try:
            found = cls(**{name: data[name] for name in names})
        except TypeError:
            raise CorpusError(
                f"a question has only the fields {', '.join(names)}: id, question, ... are missing"
            ) from None
        if not all(isinstance(getattr(found, name), str) for name in names):
            raise CorpusError(f"question {found.id}: every field must be a text")
        if found.answer_type not in ("closed", "open"):
            raise CorpusError(f"question {found.id}: answer_type must be closed or open, not {found.answer_type!r}")
        return found


def questions_of(sample: Sample) -> tuple[Question, ...]:
    """The questions of a sample, empty where it has none. Raises CorpusError when they are not as written."""
    found = sample.extra.get("questions", [])
    if not isinstance(found, list):
        raise CorpusError("a sample's questions must be a list")
    return tuple(Question.from_json(entry) for entry in found)


def plan_questions(
    corpus: str,
    deid: Deidentifier,
    images: Mapping[str, Path],
    asked: Sequence[tuple[str, Question]],
    noticed: Counter[str],
    extra: Mapping[str, Mapping[str, str]] | None = None,
) -> Plan:
    """One record an image, with its questions in the order of the release.

    Args:
        corpus: its name.
        deid: hashes the image names; none of these corpora tells patients apart, so an image stands for its patient.
        images: name -> file.
        asked: (image name, question) pairs.
        noticed: what was mended or left out; completed here by what only shows in the whole.
        extra: image name -> further fields of the sample's `extra`.

    Raises:
        CorpusError: two questions have one id.
    """
    ids = Counter(question.id for _, question in asked)
    twice = [name for name, count in ids.items() if count > 1]
    if twice:
        raise CorpusError(f"{corpus}: {len(twice)} question ids stand more than once, first {min(twice)}")
    noticed.update(_count_repeats(asked))
    by_image: dict[str, list[Question]] = {}
    for image, question in asked:
        by_image.setdefault(image, []).append(question)
    splits = {image: {question.split for question in questions} for image, questions in by_image.items()}
    mixed = any(len(found) > 1 for found in splits.values())
    records = Records()
    for image, questions in by_image.items():
        sample = Sample(
            key=deid.image(image),
            corpus=corpus,
            split=MIXED if mixed else questions[0].split,
            patient=deid.patient(image),
            study=deid.study(image, image),
            image=images[image],
            extra={**(extra or {}).get(image, {}), "questions": [question.as_json() for question in questions]},
        )
        records.append(Record(sample))
    return Plan(corpus, records, (), Counter(), noticed)


def _count_repeats(asked: Iterable[tuple[str, Question]]) -> Counter[str]:
    """Questions that repeat another one of their split word for word, and those of other splits that are in train."""
    seen: Counter[tuple[str, ...]] = Counter()
    for image, question in asked:
        seen[question.split, image, _plain(question.question), _plain(question.answer)] += 1
    found = Counter({"duplicate": sum(count - 1 for count in seen.values())})
    for split, *rest in seen:
        found["also_in_train"] += split != "train" and ("train", *rest) in seen
    return +found


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def read_rows(path: Path, required: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a JSON list. Raises CorpusError when it is none, or an object lacks a required field."""
    try:
        with open_text(path) as file:
            rows = json.load(file)
    except (UnicodeDecodeError, ValueError) as error:
        raise CorpusError(f"{path} cannot be read as JSON ({type(error).__name__}): copy it again") from None
    return check_rows(path, rows, required)


def check_rows(path: Path, rows: object, required: Sequence[str]) -> list[dict[str, Any]]:
    """`rows` as a list of objects with the required fields. Raises CorpusError that names the first wrong one."""
    if not isinstance(rows, list) or not rows:
        raise CorpusError(f"{path} must hold a list of questions, and holds none")
    for number, row in enumerate(rows, 1):
        missing = [name for name in required if not isinstance(row, dict) or name not in row]
        if missing:
            raise CorpusError(f"{path}, question {number} lacks {', '.join(missing)}")
    return cast(list[dict[str, Any]], rows)


def text_of(value: object) -> str:
    """A field as text, with single spaces and none around it; numbers as written; empty for NULL and for no value."""
    text = " ".join(str(value).split()) if isinstance(value, str | int | float) else ""
    return "" if text == _NOTHING else text


def inferred_type(answer: str) -> AnswerType:
    """Closed for yes and no, open for all else: for releases without a field of their own."""
    return "closed" if answer.strip().lower() in ("yes", "no") else "open"


def safe_name(path: Path, name: str) -> str:
    """A file name out of a table. Raises CorpusError when it would lead out of the folder of images."""
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute():
        raise CorpusError(f"{path} names an image that does not lie in the folder of images")
    return name
