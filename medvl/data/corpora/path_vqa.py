"""PathVQA, as its authors published it or as JSON. Layout, dirt and counts: `data_cards/path-vqa.md`."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from medvl.data.annotations.questions import (
    Question,
    check_rows,
    inferred_type,
    plan_questions,
    read_rows,
    safe_name,
    text_of,
)
from medvl.data.corpora.common.pickle_reader import read_plain_pickle
from medvl.data.corpora.common.tables import Plan
from medvl.data.privacy.deidentify import Deidentifier
from medvl.errors import CorpusError
from medvl.schema import Sample

NAME = "path-vqa"
COUNTS: Mapping[str, int] = {"images": 4_289}
"""Images that questions refer to: what `medvl verify --full` compares with."""

_PARTS = {"train": "train", "validate": "val", "test": "test"}
_FILES = ("qas/{0}/{0}_qa.pkl", "qas/{0}_vqa.pkl", "qas/{0}/{0}_qa.json", "qas/{0}_vqa.json")
"""Question, answer and image a row; or LXMERT's form: sent, label {answer: score} and img_id."""


def plan(root: Path, deid: Deidentifier) -> Plan:
    """Every image with its questions; no image is opened. The release's split is by image.

    Questions that repeat another one about the same image word for word, answer included, are left out and counted:
    what is left has the counts of the cleaned release.

    Args:
        root: folder that holds `images/` and `qas/`.
        deid: hashes the image names.

    Raises:
        CorpusError: a file or field is missing, or a pickle holds more than plain data.
    """
    root = Path(root)
    noticed: Counter[str] = Counter()
    asked: dict[tuple[str, str, str], tuple[str, Question]] = {}
    images: dict[str, Path] = {}
    for split, part in _PARTS.items():
        path = _file(root, part)
        for number, row in enumerate(_rows(path), 1):
            image, text, answer = _fields(path, row)
            if (image, text, answer) in asked:
                noticed["duplicate"] += 1
                continue
            noticed.update(no_answer=int(not answer))
            images[image] = root / "images" / part / f"{safe_name(path, image)}.jpg"
            question = Question(
                id=f"{split}-{number}",  # question_id is in one of the two forms only; the order is the same in both
                question=text,
                answer=answer,
                answer_type=inferred_type(answer),
                kind=text.split()[0].lower() if text else "",  # as its authors sort them: what, where, is, how, ...
                split=split,
            )
            asked[image, text, answer] = image, question
    return plan_questions(NAME, deid, images, list(asked.values()), +noticed)


def iter_samples(root: Path, *, deid: Deidentifier) -> Iterator[Sample]:
    """Samples with their questions. Raises CorpusError."""
    for record in plan(root, deid).records:
        yield record.sample


def _file(root: Path, part: str) -> Path:
    names = [name.format(part) for name in _FILES]
    found = next((root / name for name in names if (root / name).is_file()), None)
    if found is None:
        raise CorpusError(f"{root} holds none of {', '.join(names)}: is it the root of the release? See the data card")
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    required = ("sent", "label", "img_id") if path.stem.endswith("_vqa") else ("image", "question", "answer")
    if path.suffix == ".json":
        return read_rows(path, required)
    return check_rows(path, read_plain_pickle(path), required)


def _fields(path: Path, row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Image, question and answer of a row of either form."""
    if "sent" not in row:
        return text_of(row["image"]), text_of(row["question"]), text_of(row["answer"])
    label = row["label"]
    if not isinstance(label, dict):
        raise CorpusError(f"{path}: a label must map answers to scores")
    answer = max(label, key=label.__getitem__) if label else ""
    return text_of(row["img_id"]), text_of(row["sent"]), text_of(answer)
