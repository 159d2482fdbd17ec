"""ReXVQA (2025): multiple-choice questions about ReXGradient-160K. Layout, repairs and counts:
`data_cards/rexvqa.md`.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from medvl.data.annotations import Question
from medvl.data.corpora.common import questions as vqa
from medvl.data.corpora.common.formats import read_json_items
from medvl.data.corpora.common.rows import RowCounts, cell_text
from medvl.data.corpora.common.tables import Plan, malformed
from medvl.data.corpora.registry import FileAccess, register_corpus
from medvl.data.corpora.reports.rexgradient import SPLITS, image_path, view_of
from medvl.data.privacy import Deidentifier, cap_age
from medvl.errors import CorpusError

_FILE = "{}_vqa_data.json"
_FOLDERS = ("metadata", "download/metadata", "")
_FRONTAL = ("PA", "AP")
_PARTS = 5  # deid_png, patient, accession, "studies", study


@register_corpus("rexvqa")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReXVQA(vqa.QuestionCorpus):
    """Convert ReXVQA: multiple-choice questions about the studies of ReXGradient-160K.

    Use the salt of your ReXGradient shards, so that training patients are recognized.
    """

    root: Path
    """folder with metadata/ of ReXVQA."""
    images: Path | None = None
    """folder with deid_png/ of ReXGradient-160K; default root."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan one sample for each image with questions. Reports in the records are not kept.

        A question about several images belongs to the first frontal one whose file exists. Ids are
        hashed as in ReXGradient.

        Raises CorpusError when no file of questions exists, or an entry does not match the data
        card.
        """
        images = self.images or self.root
        allowed = access.folders(self.root, images)
        rows = RowCounts("questions")
        warnings = Counter[str]()
        questions: list[tuple[str, Question]] = []
        places: dict[str, vqa.ImagePlace] = {}
        exists = lru_cache(maxsize=1 << 20)(lambda name: (images / name).is_file())
        for split, file in _find_files(self.root).items():
            for number, name, entry in rows.reading(read_json_items(file, allowed)):
                where = f"{file}, entry {number}"
                image = _choose_image(entry, where, exists, warnings)
                if image is None:
                    rows.exclude("image_missing")
                    continue
                question = _question(name, entry, split, where)
                if question is None:
                    rows.exclude("malformed_options")
                    continue
                questions.append((image, question))
                places[image] = _place(images, image, entry, where)
        return vqa.plan_questions(
            self.corpus, deid, places, questions, rows, warnings, folders=allowed
        )


def _find_files(root: Path) -> dict[str, Path]:
    """Return the file of each split that exists; the first folder with any decides."""
    for folder in _FOLDERS:
        files = {
            split: root / folder / _FILE.format(name)
            for name, split in SPLITS.items()
            if (root / folder / _FILE.format(name)).is_file()
        }
        if files:
            return files
    names = ", ".join(_FILE.format(name) for name in SPLITS)
    raise CorpusError(f"{root} contains none of {names}: is it the release?", "not_found")


def _paths_and_views(entry: Mapping[str, Any], where: str) -> list[tuple[str, str | None]]:
    paths = entry.get("ImagePath")
    views = entry.get("ImageViewPosition")
    if not isinstance(paths, list) or not paths:
        raise malformed(where, "expected a list of paths", "ImagePath")
    if not isinstance(views, list) or len(views) != len(paths):
        views = [None] * len(paths)
    return [
        (image_path(path, where), view_of(view)) for path, view in zip(paths, views, strict=True)
    ]


def _choose_image(
    entry: Mapping[str, Any], where: str, exists: Any, warnings: Counter[str]
) -> str | None:
    """Return the first frontal image whose file exists, else the first one; None without any."""
    images = [(name, view) for name, view in _paths_and_views(entry, where) if exists(name)]
    warnings["several_images"] += len(images) > 1
    frontal = [name for name, view in images if view in _FRONTAL]
    names = frontal or [name for name, _ in images]
    return names[0] if names else None


def _question(name: str, entry: Mapping[str, Any], split: str, where: str) -> Question | None:
    """Return the question; None where its options are malformed."""
    published = entry.get("options")
    if not isinstance(published, list) or not all(isinstance(each, str) for each in published):
        raise malformed(where, "expected a list of texts", "options")
    fields = vqa.choice_fields(published, entry.get("correct_answer"))
    if fields is None:
        return None
    return Question(
        id=name,
        question=vqa.clean_text(entry.get("question")),
        kind=vqa.clean_text(entry.get("task_name")),
        category=vqa.clean_text(entry.get("category")),
        split=split,
        **fields,
    )


def _place(images: Path, name: str, entry: Mapping[str, Any], where: str) -> vqa.ImagePlace:
    """Return the image with its patient and study, as in ReXGradient."""
    parts = PurePosixPath(name).parts
    if len(parts) < _PARTS:
        raise malformed(where, "expected deid_png/PATIENT/ACCESSION/studies/STUDY", "ImagePath")
    views = dict(_paths_and_views(entry, where))
    sex = cell_text(entry.get("PatientSex"))
    return vqa.ImagePlace(
        file=images / name,
        patient=parts[1],
        study=parts[_PARTS - 1],
        view=views[name],
        sex=sex if sex in ("F", "M") else None,
        age=cap_age(entry.get("PatientAge")),
    )
