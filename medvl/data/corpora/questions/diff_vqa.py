"""Medical-Diff-VQA: questions about a radiograph of MIMIC-CXR and an earlier one. Layout, repairs
and counts: `data_cards/diff-vqa.md`.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from medvl.common.config_io import check_choice
from medvl.common.untrusted import InputFolders
from medvl.data.annotations import Question
from medvl.data.corpora.common import questions as vqa
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, find_file, malformed, read_table
from medvl.data.corpora.questions.mimic_cxr_vqa import read_places, read_splits
from medvl.data.corpora.registry import FileAccess, register_corpus
from medvl.data.corpora.reports.mimic_cxr import find_table
from medvl.data.privacy import Deidentifier
from medvl.schema import Sample

QUESTIONS = "mimic_pair_questions.csv"
IMAGES = "mimic_all.csv"
KINDS = ("abnormality", "location", "level", "view", "type", "presence", "difference")
_SPLITS = {"train": "train", "val": "validate", "valid": "validate", "test": "test"}
_COLUMNS = ("study_id", "subject_id", "ref_id", "question_type", "question", "answer", "split")
_FRONTAL = ("PA", "AP", "postero-anterior", "antero-posterior")

Splits = Literal["mimic", "release"]


class _Pair(NamedTuple):
    """A study and the earlier one that its questions compare it with."""

    study: str
    earlier: str


@register_corpus("diff-vqa")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffVQA(vqa.QuestionCorpus):
    """Convert Medical-Diff-VQA: questions about a radiograph and its change since an earlier one.

    Use the salt of your MIMIC-CXR shards, so that training patients are recognized.
    """

    root: Path
    """folder of mimic_pair_questions.csv and mimic_all.csv."""
    images: Path | None = None
    """folder of MIMIC-CXR-JPG or MIMIC-CXR, with its tables; default root."""
    splits: Splits = "mimic"
    """mimic: the official split of the images; release: the table's own, which is another one."""
    kinds: tuple[str, ...] = ()
    """keep only these types of questions, such as difference."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan one sample for each pair of studies with questions; no image is opened.

        The image of a study is its first frontal one. `extra["prior"]` is the key of the earlier
        image, which is a sample too. A study that is compared with several gives one sample for
        each. Ids are hashed as in MIMIC-CXR.

        Raises CorpusError when a file is missing, an entry does not match the data card, or
        patients are in two splits; ConfigError for an unknown option.
        """
        check_choice(self.splits, get_args(Splits), "splits")
        for kind in self.kinds:
            check_choice(kind, KINDS, "kinds")
        images = self.images or self.root
        allowed = access.folders(self.root, images)
        rows = RowCounts("questions")
        image_of = _choose_images(find_file(self.root, IMAGES), allowed)
        table = find_table(images, "metadata")
        places = read_places(images, table, {*image_of.values()}, allowed)
        official = read_splits(images, places, allowed) if self.splits == "mimic" else {}
        questions: list[tuple[_Pair, Question]] = []
        patients: dict[str, str] = {}
        file = find_file(self.root, QUESTIONS)
        for number, row in enumerate(rows.reading(read_table(file, _COLUMNS, allowed)), 1):
            kind = row["question_type"].strip().lower()
            if self.kinds and kind not in self.kinds:
                rows.exclude("other_kind")
                continue
            pair = _Pair(_number(row["study_id"]), _number(row["ref_id"]))
            reason = _missing(pair, kind, image_of, places)
            if reason is not None:
                rows.exclude(reason)
                continue
            split = official.get(image_of[pair.study]) or _split(row["split"], file)
            patient = places[image_of[pair.study]].patient
            if patients.setdefault(patient, split) != split:
                message = "a patient is in two splits; take splits mimic"
                raise malformed(file, message, "split")
            # Rows are numbered anew in each table: the studies make ids of two conversions differ.
            name = f"{deid.study(patient, '/'.join(pair))}-{number}"
            questions.append((pair, _question(name, row, kind, split)))
        plan = _plan_pairs(self.corpus, deid, questions, image_of, places, rows, allowed)
        earlier = _earlier(self.corpus, deid, questions, image_of, places)
        return dataclasses.replace(plan, records=Records([*plan.records, *earlier]))


def _number(cell: str) -> str:
    """Return an id of digits; tables written with floats have ".0" behind it."""
    return cell.strip().removesuffix(".0")


def _split(cell: str, file: Path) -> str:
    split = _SPLITS.get(cell.strip().lower())
    if split is None:
        raise malformed(file, f"expected one of {', '.join(_SPLITS)}", "split")
    return split


def _choose_images(file: Path, allowed: InputFolders) -> dict[str, str]:
    """Return study -> its first frontal image, or its first one."""
    first: dict[str, str] = {}
    frontal: dict[str, str] = {}
    for row in read_table(file, ("study_id", "dicom_id", "view"), allowed):
        study = _number(row["study_id"])
        first.setdefault(study, row["dicom_id"])
        if row["view"].strip() in _FRONTAL:
            frontal.setdefault(study, row["dicom_id"])
    return {**first, **frontal}


def _missing(
    pair: _Pair, kind: str, image_of: Mapping[str, str], places: Mapping[str, object]
) -> str | None:
    """Return why a question has no images; None where it has all."""
    studies = (pair.study, pair.earlier) if kind == "difference" else (pair.study,)
    if not all(studies):
        return "no_reference"
    if any(study not in image_of for study in studies):
        return "not_in_images"
    return None if all(image_of[study] in places for study in studies) else "not_in_metadata"


def _question(name: str, row: Mapping[str, str], kind: str, split: str) -> Question:
    answer = vqa.clean_text(row["answer"])
    return Question(
        id=name,
        question=vqa.clean_text(row["question"]),
        answer=answer,
        answer_type=vqa.infer_answer_type(answer),
        kind=kind,
        split=split,
    )


def _plan_pairs(
    corpus: str,
    deid: Deidentifier,
    questions: Sequence[tuple[_Pair, Question]],
    image_of: Mapping[str, str],
    places: Mapping[str, vqa.ImagePlace],
    rows: RowCounts,
    allowed: InputFolders,
) -> Plan:
    named: dict[str, vqa.ImagePlace] = {}
    extra: dict[str, dict[str, str]] = {}
    taken = set[str]()
    for pair, _ in questions:
        name = "/".join(pair)
        if name in named:
            continue
        image = image_of[pair.study]
        key = f"{image}/{pair.earlier}" if image in taken else image
        taken.add(image)
        named[name] = dataclasses.replace(places[image], image_id=key)
        if image_of.get(pair.earlier) in places:
            extra[name] = {"prior": deid.image(image_of[pair.earlier])}
    asked = [("/".join(pair), question) for pair, question in questions]
    counts = Counter[str]()
    return vqa.plan_questions(
        corpus, deid, named, asked, rows, counts, extra=extra, folders=allowed
    )


def _earlier(
    corpus: str,
    deid: Deidentifier,
    questions: Sequence[tuple[_Pair, Question]],
    image_of: Mapping[str, str],
    places: Mapping[str, vqa.ImagePlace],
) -> Iterator[Record]:
    """Yield the earlier images that no question is about, in the split of the later one."""
    known = {image_of[pair.study] for pair, _ in questions}
    for pair, question in questions:
        image = image_of.get(pair.earlier, "")
        place = places.get(image)
        if place is None or image in known:
            continue
        known.add(image)
        sample = Sample(
            key=deid.image(image),
            corpus=corpus,
            split=question.split,
            patient=deid.patient(place.patient),
            study=deid.study(place.patient, place.study),
            image=place.file,
            view=place.view,
            order=place.order,
            extra={"questions": []},
        )
        yield Record(sample)
