"""MIMIC-Ext-CXR-QBA: questions with structured answers about MIMIC-CXR. Layout, repairs and counts:
`data_cards/cxr-qba.md`.
"""

import dataclasses
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from medvl.common.untrusted import ZIP_ERRORS, InputFolders, parse_json
from medvl.data.annotations import Question
from medvl.data.corpora.common import questions as vqa
from medvl.data.corpora.common.formats import ParquetLimits, read_parquet
from medvl.data.corpora.common.rows import RowCounts, cell_text
from medvl.data.corpora.common.tables import Plan, find_file, malformed
from medvl.data.corpora.questions.mimic_cxr_vqa import read_places, read_splits
from medvl.data.corpora.registry import FileAccess, register_corpus
from medvl.data.corpora.reports.mimic_cxr import find_table
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError

_ARCHIVE = "qa.zip"
_EXPORT = "exports/A_frontal/metadata/q1M"
_QUESTIONS = "question_metadata.parquet"
_COLUMNS = ("study_id", "question_id", "question.question_type", "question.quality.rating")
_MEMBER = re.compile(r"(?:.*/)?(s\d+)\.qa\.json")
_FRONTAL = ("PA", "AP")
_MAX_BYTES = 1 << 24
_LIMITS = ParquetLimits(
    rows=1 << 10,
    memory=1 << 28,
    group=1 << 30,
    cell=1 << 12,
    advice="write the table again with a smaller row_group_size",
)


class _Chosen(NamedTuple):
    """A question of the export."""

    kind: str
    rating: str


@register_corpus("cxr-qba")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CXRQBA(vqa.QuestionCorpus):
    """Convert MIMIC-Ext-CXR-QBA: questions with structured answers about MIMIC-CXR.

    Use the salt of your MIMIC-CXR shards, so that training patients are recognized.
    """

    root: Path
    """folder of qa.zip and exports/."""
    images: Path | None = None
    """folder of MIMIC-CXR-JPG or MIMIC-CXR, with its tables; default root."""
    export: str = _EXPORT
    """folder of question_metadata.parquet, which chooses the questions."""
    ratings: tuple[str, ...] = ()
    """keep only questions of these quality ratings."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan one sample for the first frontal image of each study; no image is opened.

        The archive is read member by member. The answer is the text of the first level, joined.
        Splits are those of MIMIC-CXR. Raises CorpusError when a file is missing, or an entry does
        not match the data card.
        """
        images = self.images or self.root
        allowed = access.folders(self.root, images)
        rows = RowCounts("questions")
        warnings = Counter[str]()
        selection = self._chosen(rows, allowed)
        table = find_table(images, "metadata")
        frontal, places, splits = _frontal_images(images, table, selection, allowed)
        questions: list[tuple[str, Question]] = []
        studies = set[str]()
        for study, entries in _read_archive(find_file(self.root, _ARCHIVE), selection, allowed):
            studies.add(study)
            names = selection[study]
            image = frontal.get(study.removeprefix("s"))
            if image is None:
                rows.exclude("no_frontal_image", len(names))
                continue
            texts = {cell_text(entry.get("question_id")): entry for entry in entries}
            for name, facts in names.items():
                if name not in texts:
                    rows.exclude("not_in_archive")
                    continue
                hashed = deid.image(name)  # it has the number of the study
                question = _question(hashed, texts[name], facts, splits[image], warnings)
                questions.append((image, question))
        for study in selection.keys() - studies:
            rows.exclude("not_in_archive", len(selection[study]))
        return vqa.plan_questions(
            self.corpus, deid, places, questions, rows, +warnings, folders=allowed
        )

    def _chosen(self, rows: RowCounts, allowed: InputFolders) -> dict[str, dict[str, _Chosen]]:
        """Return study -> question -> its type and rating."""
        file = find_file(self.root, f"{self.export}/{_QUESTIONS}")
        selection: defaultdict[str, dict[str, _Chosen]] = defaultdict(dict)
        for _, row in rows.reading(read_parquet(file, _COLUMNS, allowed, _LIMITS)):
            study, name, kind, rating = (cell_text(row[column]) for column in _COLUMNS)
            if self.ratings and rating not in self.ratings:
                rows.exclude("rating")
            elif name in selection[study]:
                rows.exclude("duplicate_row")
            else:
                selection[study][name] = _Chosen(kind, rating)
        return {study: names for study, names in selection.items() if names}


def _frontal_images(
    root: Path, table: Path, selection: Mapping[str, Any], allowed: InputFolders
) -> tuple[dict[str, str], dict[str, vqa.ImagePlace], dict[str, str]]:
    """Return study -> its first frontal image, image -> its place, and image -> split."""
    study_ids = {study.removeprefix("s") for study in selection}
    places = read_places(root, table, study_ids, allowed, by="study_id")
    frontal: dict[str, str] = {}
    for image, place in places.items():
        if place.view in _FRONTAL:
            frontal.setdefault(place.study, image)
    images = set(frontal.values())
    splits = read_splits(root, images, allowed)
    return {study: image for study, image in frontal.items() if image in splits}, places, splits


def _read_archive(
    path: Path, selection: Mapping[str, Any], allowed: InputFolders
) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the studies of the archive that are chosen, with their questions."""
    studies: list[tuple[str, list[Mapping[str, Any]]]] = []
    with allowed.open(path, CorpusError) as file:
        try:
            archive = zipfile.ZipFile(file)
        except ZIP_ERRORS:
            raise malformed(path, "expected a zip archive; copy the file again") from None
        with archive:
            for member in archive.infolist():
                match = _MEMBER.fullmatch(member.filename)
                if match is None or match[1] not in selection:
                    continue
                where = f"{path}, {member.filename}"
                if member.file_size > _MAX_BYTES:
                    raise CorpusError(f"{where}: above {_MAX_BYTES >> 20} MB", "too_large")
                try:
                    content = parse_json(archive.read(member))
                except ZIP_ERRORS:
                    raise malformed(where, "expected JSON; copy the archive again") from None
                entries = content.get("questions") if isinstance(content, dict) else None
                if not isinstance(entries, list):
                    raise malformed(where, "expected a list of questions", "questions")
                studies.append((match[1], [each for each in entries if isinstance(each, dict)]))
    return studies


def _question(
    name: str, entry: Mapping[str, Any], facts: _Chosen, split: str, warnings: Counter[str]
) -> Question:
    answers = entry.get("answers")
    first = (
        [each for each in answers if isinstance(each, dict)] if isinstance(answers, list) else []
    )
    texts = [text for each in first if (text := vqa.clean_text(each.get("text")))]
    warnings["several_answers"] += len(texts) > 1
    warnings["no_answer"] += not texts
    answer = " ".join(texts)
    return Question(
        id=name,
        question=vqa.clean_text(entry.get("question")),
        answer=answer,
        answer_type=vqa.infer_answer_type(answer),
        kind=facts.kind,
        category=facts.rating,
        split=split,
    )
