"""Reading of the VQA corpora: rows of question files, and records with the questions of each
image.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from medvl.common.untrusted import ANYWHERE, InputFolders, parse_json, read_limited
from medvl.data.annotations import LETTERS, MIXED, AnswerType, Question, questions_of
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, malformed
from medvl.data.corpora.registry import Corpus
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError
from medvl.schema import FilePart, Sample

MAX_JSON_BYTES = 1 << 26
"""Largest accepted JSON file; the largest of these corpora has 5 MB."""

_EMPTY = "NULL"  # written by VQA-RAD in empty fields; "None" is an answer
_ANSWER_TYPES: Mapping[str, AnswerType] = {"CLOSED": "closed", "OPEN": "open"}


class QuestionCorpus(Corpus):
    """A corpus of images with questions and answers: a sample is an image with its questions."""

    textless: ClassVar[bool] = True

    def notes(self, plan: Plan) -> list[str]:
        return question_notes(plan)


def question_notes(plan: Plan) -> list[str]:
    """Return a line with the number of questions in each split."""
    counts = Counter(
        question.split for record in plan.records for question in questions_of(record.sample)
    )
    return [", ".join(f"{count} questions in {split}" for split, count in counts.items())]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImagePlace:
    """An image with what is known about it."""

    file: Path | FilePart
    patient: str
    study: str
    image_id: str | None = None
    """Id that the key is the hash of; None: the image's name."""
    view: str | None = None
    sex: str | None = None
    age: int | None = None
    order: int | None = None


def plan_questions(
    corpus: str,
    deid: Deidentifier,
    images: Mapping[str, Path] | Mapping[str, FilePart] | Mapping[str, ImagePlace],
    questions: Sequence[tuple[str, Question]],
    rows: RowCounts,
    warnings: Counter[str],
    extra: Mapping[str, Mapping[str, str]] | None = None,
    folders: InputFolders = ANYWHERE,
    patients: Mapping[str, str] | None = None,
) -> Plan:
    """Return a plan with one record per image, which carries its questions in the order of the
    release.

    Args:
        corpus: its name.
        deid: hashes the image names.
        images: image name -> file, its place in a file, or an image with its patient and study.
        questions: (image name, question) pairs.
        rows: questions that were read; those that are kept are counted here.
        warnings: counts of repairs; counts of repeated and of blank questions are added.
        extra: image name -> further fields of the sample's `extra`.
        folders: folders that the images must be in.
        patients: image name -> patient. An image without one counts as a patient.

    Raises CorpusError when two questions have the same id.
    """
    ids = Counter(question.id for _, question in questions)
    repeated = [name for name, count in ids.items() if count > 1]
    if repeated:
        raise malformed(
            corpus,
            f"{len(repeated)} question ids occur more than once, the first is {min(repeated)}",
        )
    warnings.update(_count_irregular(questions))
    by_image: dict[str, list[Question]] = {}
    for image, question in questions:
        by_image.setdefault(image, []).append(question)
    mixed = any(len({question.split for question in group}) > 1 for group in by_image.values())
    records = Records()
    for image, group in by_image.items():
        place = images[image]
        if not isinstance(place, ImagePlace):
            patient = (patients or {}).get(image, image)
            place = ImagePlace(file=place, patient=patient, study=image)
        sample = Sample(
            key=deid.image(place.image_id or image),
            corpus=corpus,
            split=MIXED if mixed else group[0].split,
            patient=deid.patient(place.patient),
            study=deid.study(place.patient, place.study),
            image=place.file,
            view=place.view,
            sex=place.sex,
            age=place.age,
            order=place.order,
            extra={
                **(extra or {}).get(image, {}),
                "questions": [question.as_json() for question in group],
            },
        )
        records.append(Record(sample))
    rows.kept += len(questions)
    return Plan(corpus, records, (), rows, warnings, folders)


def _count_irregular(questions: Sequence[tuple[str, Question]]) -> Counter[str]:
    """Count blank questions, those repeated word for word within a split, and those of other
    splits also in train.
    """
    seen: Counter[tuple[str, ...]] = Counter()
    for image, question in questions:
        seen[question.split, image, _fold(question.question), _fold(question.answer)] += 1
    counts = Counter({"duplicate": sum(count - 1 for count in seen.values())})
    counts["no_question"] = sum(not question.question for _, question in questions)
    for split, *rest in seen:
        counts["also_in_train"] += split != "train" and ("train", *rest) in seen
    return +counts


def _fold(text: str) -> str:
    return " ".join(text.lower().split())


def read_rows(path: Path, required: Sequence[str], folders: InputFolders) -> list[dict[str, Any]]:
    """Read a JSON list of objects. Raises CorpusError when it is not one, or an object lacks a
    required field.
    """
    return check_rows(path, read_json(path, folders), required)


def read_json(path: Path, folders: InputFolders) -> Any:
    """Read a JSON file. Raises CorpusError when it is missing, outside of the folders, too large
    or damaged.
    """
    try:
        with folders.open(path, CorpusError) as file:
            return parse_json(read_limited(file, MAX_JSON_BYTES, CorpusError))
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist", "not_found") from None
    except (ValueError, OSError) as error:
        raise malformed(
            path, f"not readable as JSON ({type(error).__name__}): copy it again"
        ) from None


def check_rows(path: Path, rows: object, required: Sequence[str]) -> list[dict[str, Any]]:
    """Return `rows` as a list of objects with the required fields. Raises CorpusError naming the
    first wrong row.
    """
    if not isinstance(rows, list) or not rows:
        raise malformed(path, "expected a non-empty list of objects")
    for number, row in enumerate(rows, 1):
        missing = [name for name in required if not isinstance(row, dict) or name not in row]
        if missing:
            raise CorpusError(
                f"{path}, entry {number} lacks {', '.join(missing)}", "missing", field=missing[0]
            )
    return cast(list[dict[str, Any]], rows)


def clean_text(value: object) -> str:
    """Return a field as text with white space collapsed; empty for NULL and for values that are
    not text or numbers.
    """
    text = " ".join(str(value).split()) if isinstance(value, str | int | float) else ""
    return "" if text == _EMPTY else text


def parse_answer_type(value: object, path: Path) -> AnswerType:
    """Return the answer type of a field that is CLOSED or OPEN. Raises CorpusError on any other
    value.
    """
    answer_type = _ANSWER_TYPES.get(clean_text(value).upper())
    if answer_type is None:
        raise malformed(path, "expected CLOSED or OPEN for answer_type", "answer_type")
    return answer_type


_LETTER = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])\s*[.:)])\s*")

_RIGHT = re.compile(r"\(?([A-Z])\)?(?:[.:)]|$)")


def strip_letters(options: Sequence[str]) -> tuple[str, ...]:
    """Return options with white space collapsed, without the letters before them.

    Letters ("A. ", "A: ", "A) " or "(A) ") are removed where all options have them in order
    (`have_letters`), so that "A. fib" of a single option stays.
    """
    if have_letters(options):
        options = [_LETTER.sub("", option, count=1) for option in options]
    return tuple(" ".join(option.split()) for option in options)


def have_letters(options: Sequence[str]) -> bool:
    """Return whether all options begin with their letters, and not all of them end there."""
    matches = [_LETTER.match(option) for option in options]
    letters = [match and (match[1] or match[2]) for match in matches]
    only_letters = all(match and match.end() == len(match.string) for match in matches)
    return letters == [*LETTERS[: len(options)]] and not only_letters


def choose_right(
    answer: object, options: Sequence[str], *, lettered: bool = False
) -> tuple[int, ...]:
    """Return the indices of the right options; empty where the question is malformed.

    A question is malformed with fewer than two options, with equal or empty ones, or with an answer
    that is no option, or is the letter of one behind which the text of another stands.

    Args:
        answer: letter ("B", "B.", "B: text"), text of an option, or a list of them.
        options: options without letters.
        lettered: they were published behind letters. Then "B" alone is the second option, also
            where the text of another one is "B".
    """
    letters = LETTERS[: len(options)]
    folded = [_fold(option) for option in options]
    if len(options) < 2 or len(options) > len(LETTERS) or len(set(folded) - {""}) < len(options):
        return ()
    places = set()
    for one in answer if isinstance(answer, list) else [answer]:
        text = clean_text(one)
        match = _RIGHT.match(text)
        place = letters.find(match[1]) if match is not None else -1
        behind = "" if match is None else _fold(text[match.end() :])
        if _fold(text) in folded and not (lettered and place >= 0 and not behind):
            places.add(folded.index(_fold(text)))
        elif place >= 0 and (behind == folded[place] or behind not in folded):
            places.add(place)
        else:
            return ()
    return tuple(sorted(places))


def choice_fields(published: object, answer: object) -> dict[str, Any] | None:
    """Return the fields of a `Question` with options and one right one; None where it is
    malformed.

    Args:
        published: list of options, with or without letters.
        answer: see `choose_right`.
    """
    if not isinstance(published, list) or not all(isinstance(each, str) for each in published):
        return None
    options = strip_letters(published)
    right = choose_right(answer, options, lettered=have_letters(published))
    if len(right) != 1:
        return None
    text = options[right[0]]
    return {"answer": text, "answer_type": "closed", "options": options, "right": right}


def infer_answer_type(answer: str) -> AnswerType:
    """Return "closed" for yes and no, else "open": for releases without a field for the type."""
    return "closed" if answer.strip().lower() in ("yes", "no") else "open"


def check_image_name(path: Path, name: str) -> str:
    """Return an image name of a table. Raises CorpusError when it points outside the folder of
    images.
    """
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute():
        raise malformed(path, "an image name points outside the folder of images")
    return name
