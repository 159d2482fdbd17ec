"""MIMIC-CXR-VQA: questions about MIMIC-CXR-JPG with lists of answers. Layout, repairs and counts:
`data_cards/mimic-cxr-vqa.md`.
"""

import dataclasses
from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from medvl.common.untrusted import InputFolders
from medvl.data.annotations import Question
from medvl.data.corpora.common import questions as vqa
from medvl.data.corpora.common.formats import read_json_list
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, find_suffix, malformed, read_table
from medvl.data.corpora.registry import FileAccess, register_corpus
from medvl.data.corpora.reports.mimic_cxr import find_table, read_orders, study_folder
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError

SPLITS = {"train": "train", "valid": "validate", "test": "test"}
"""Name of a file of the release -> split."""
_FOLDERS = ("", "dataset")
_METADATA = ("dicom_id", "subject_id", "study_id", "ViewPosition")
_GENDERS = {"m": "male", "f": "female"}


@register_corpus("mimic-cxr-vqa")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MIMICCXRVQA(vqa.QuestionCorpus):
    """Convert MIMIC-CXR-VQA: questions about MIMIC-CXR-JPG with lists of answers.

    Use the salt of your MIMIC-CXR shards, so that training patients are recognized.
    """

    root: Path
    """folder of train.json, valid.json and test.json with answers."""
    images: Path | None = None
    """folder of MIMIC-CXR-JPG or MIMIC-CXR, with its tables; default root."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan one sample for each image with questions; no image is opened.

        Several answers are joined in alphabetical order: all of them must be given. Raises
        CorpusError when a file is missing or has no answers, or an entry does not match the data
        card.
        """
        images = self.images or self.root
        allowed = access.folders(self.root, images)
        rows = RowCounts("questions")
        warnings = Counter[str]()
        asked: list[tuple[str, Question]] = []
        for name, file in _find_files(self.root).items():
            for number, entry in rows.reading(read_json_list(file, allowed)):
                where = f"{file}, entry {number}"
                image = vqa.clean_text(entry.get("image_id"))
                question = _question(f"{name}-{entry.get('idx')}", entry, name, where, warnings)
                asked.append((image, question))
        table = find_table(images, "metadata")
        places = read_places(images, table, {image for image, _ in asked}, allowed)
        questions = [(image, question) for image, question in asked if image in places]
        if missing := len(asked) - len(questions):
            rows.exclude("not_in_metadata", missing)
        return vqa.plan_questions(
            self.corpus, deid, places, questions, rows, +warnings, folders=allowed
        )


def _find_files(root: Path) -> dict[str, Path]:
    """Return the files of the release by name."""
    for folder in _FOLDERS:
        files = {name: root / folder / f"{name}.json" for name in SPLITS}
        if any(file.is_file() for file in files.values()):
            return {name: file for name, file in files.items() if file.is_file()}
    parts = sorted(path.name for folder in _FOLDERS for path in (root / folder).glob("_*.json"))
    if parts:
        message = f"{root / parts[0]} has no answers; download train.json, valid.json and test.json"
        raise CorpusError(message, "missing", field="root")
    raise CorpusError(f"{root} has no train.json, valid.json or test.json", "not_found")


def _question(
    name: str, entry: Mapping[str, Any], file: str, where: str, warnings: Counter[str]
) -> Question:
    answers = entry.get("answer")
    if not isinstance(answers, list):
        raise malformed(where, "expected a list of answers", "answer")
    texts = sorted({vqa.clean_text(answer) for answer in answers} - {""})
    kind = vqa.clean_text(entry.get("content_type"))
    if kind == "gender":
        texts = [_GENDERS.get(text.lower(), text) for text in texts]
    warnings["several_answers"] += len(texts) > 1
    warnings["no_answer"] += not texts
    answer = ", ".join(texts) or "none"
    return Question(
        id=name,
        question=vqa.clean_text(entry.get("question")),
        answer=answer,
        answer_type=vqa.infer_answer_type(answer),
        kind=kind,
        category=vqa.clean_text(entry.get("semantic_type")),
        split=SPLITS[file],
    )


def read_splits(root: Path, images: Container[str], allowed: InputFolders) -> dict[str, str]:
    """Return image -> its official split, for some images of MIMIC-CXR."""
    rows = read_table(find_table(root, "split"), ("dicom_id", "split"), allowed)
    return {row["dicom_id"]: row["split"] for row in rows if row["dicom_id"] in images}


def read_places(
    root: Path,
    table: Path,
    identifiers: Container[str],
    allowed: InputFolders,
    by: str = "dicom_id",
) -> dict[str, vqa.ImagePlace]:
    """Return the images of MIMIC-CXR's metadata by dicom_id, hashed as in its shards.

    Args:
        root: folder of the release.
        table: its metadata.
        identifiers: values of the images that are returned.
        allowed: folders of the files.
        by: column of these values: dicom_id or study_id.
    """
    orders = read_orders(table, allowed)
    places: dict[str, vqa.ImagePlace] = {}
    suffix: str | None = None
    for row in read_table(table, _METADATA, allowed):
        if row[by] not in identifiers:
            continue
        name, subject, study = (row[column] for column in _METADATA[:3])
        file = root / study_folder(table, name, subject, study) / name
        suffix = suffix or find_suffix(file, (".jpg", ".dcm"))
        places[name] = vqa.ImagePlace(
            file=file.with_suffix(suffix or ".jpg"),
            patient=subject,
            study=study,
            view=row["ViewPosition"] or None,
            order=orders.get(study),
        )
    return places
