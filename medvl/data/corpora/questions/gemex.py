"""GEMeX: grounded questions about radiographs of MIMIC-CXR in four forms. Layout, repairs and
counts: `data_cards/gemex.md`.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from medvl.data.annotations import Box, Question, region_fields
from medvl.data.corpora.common import questions as vqa
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, malformed, read_json_lines, read_table
from medvl.data.corpora.questions.mimic_cxr_vqa import read_places, read_splits
from medvl.data.corpora.registry import FileAccess, register_corpus
from medvl.data.corpora.reports.mimic_cxr import find_table
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError

FORMS = ("open_ended", "closed_ended", "single_choice", "multi_choice")
FILE = "{}_question.jsonl"
_IMAGE = re.compile(r"(?:.*/)?([0-9a-f]{8}(?:-[0-9a-f]{8}){4})(?:\.\w+)?")
_FIELDS = ("q_id", "image_path", "question", "answer")
_Places = dict[str, list[dict[str, object]]]


@register_corpus("gemex")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GEMeX(vqa.QuestionCorpus):
    """Convert GEMeX: questions about MIMIC-CXR with the regions that their answers are about.

    Use the salt of your MIMIC-CXR shards, so that training patients are recognized.
    """

    root: Path
    """folder of the four files of questions."""
    images: Path | None = None
    """folder of MIMIC-CXR-JPG or MIMIC-CXR, with its tables; default root."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan one sample for each image with questions; no image is opened. Reports and reasons in
        the records are not kept.

        `extra["phrases"]` are the regions, in pixels of the published image, and
        `extra["answer_regions"]` the names of those of each question. Splits are those of
        MIMIC-CXR. Raises CorpusError when no file exists, or an entry does not match the data card.
        """
        images = self.images or self.root
        allowed = access.folders(self.root, images)
        rows = RowCounts("questions")
        files = {form: self.root / FILE.format(form) for form in FORMS}
        files = {form: file for form, file in files.items() if file.is_file()}
        if not files:
            raise CorpusError(f"{self.root} has none of the files of questions", "not_found")
        asked: list[tuple[str, Question, Mapping[str, Any]]] = []
        for form, file in files.items():
            for number, entry in rows.reading(read_json_lines(file, _FIELDS, allowed)):
                match = _IMAGE.fullmatch(str(entry["image_path"]))
                if match is None:
                    where = f"{file}, line {number}"
                    raise malformed(where, "expected a path to a dicom_id", "image_path")
                question = _question(form, entry)
                if question is None:
                    rows.exclude("malformed_options")
                    continue
                asked.append((match[1], question, entry))
        image_names = {image for image, *_ in asked}
        table = find_table(images, "metadata")
        places = read_places(images, table, image_names, allowed)
        splits = read_splits(images, places, allowed)
        warnings = Counter[str]()
        questions: list[tuple[str, Question]] = []
        regions: dict[str, _Places] = {}
        names: dict[str, dict[str, list[str]]] = {}
        for image, question, entry in asked:
            if image not in splits:
                rows.exclude("not_in_metadata")
                continue
            found = _regions(entry, warnings)
            for box in found:
                boxes = regions.setdefault(image, {}).setdefault(str(box["label"]), [])
                boxes += [box] if box not in boxes else []
            names.setdefault(image, {})[question.id] = [
                *dict.fromkeys(str(box["label"]) for box in found)
            ]
            questions.append((image, dataclasses.replace(question, split=splits[image])))
        plan = vqa.plan_questions(
            self.corpus, deid, places, questions, rows, +warnings, folders=allowed
        )
        sizes = {
            row["dicom_id"]: (int(row["Columns"]), int(row["Rows"]))
            for row in read_table(table, ("dicom_id", "Rows", "Columns"), allowed)
            if row["dicom_id"] in regions
        }
        by_key = {deid.image(image): image for image in names}
        records = Records(_with_regions(plan, by_key, regions, names, sizes))
        return dataclasses.replace(plan, records=records)


def _question(form: str, entry: Mapping[str, Any]) -> Question | None:
    """Return the question without its split; None where its options are malformed."""
    answer = entry.get("answer")
    published = entry.get("choices") or []
    options: tuple[str, ...] = ()
    right: tuple[int, ...] = ()
    if form.endswith("_choice"):
        if not isinstance(published, list) or not all(isinstance(one, str) for one in published):
            return None
        options = vqa.strip_letters(published)
        right = vqa.choose_right(answer, options, lettered=vqa.have_letters(published))
        if not right or (form == "single_choice" and len(right) > 1):
            return None
    text = ", ".join(options[place] for place in right) if right else vqa.clean_text(answer)
    return Question(
        id=f"{form}-{entry['q_id']}",  # unique only inside of a file
        question=vqa.clean_text(entry.get("question")),
        answer=text,
        answer_type="open" if form == "open_ended" else "closed",
        kind=form,
        category=vqa.clean_text(entry.get("type")),
        split="",
        options=options,
        right=right,
    )


def _regions(entry: Mapping[str, Any], warnings: Counter[str]) -> list[Box]:
    """Return the boxes of an answer, whose labels are the names of the regions."""
    names = entry.get("visual_regions") or []
    corners = entry.get("visual_locations") or []
    if not isinstance(names, list) or not isinstance(corners, list) or len(names) != len(corners):
        warnings["regions_differ"] += 1
        return []
    boxes: list[Box] = []
    for name, sides in zip(names, corners, strict=True):
        numbers = sides if isinstance(sides, list) else []
        whole = len(numbers) == 4 and all(isinstance(one, int | float) for one in numbers)
        if not whole or min(numbers[:2]) < 0 or min(numbers[2:]) <= 0:
            warnings["box_malformed"] += 1
            continue
        x, y, width, height = map(float, numbers)
        label = vqa.clean_text(name)
        boxes.append({"label": label, "x": x, "y": y, "width": width, "height": height})
    return boxes


def _with_regions(
    plan: Plan,
    by_key: Mapping[str, str],
    regions: Mapping[str, _Places],
    names: Mapping[str, Mapping[str, list[str]]],
    sizes: Mapping[str, tuple[int, int]],
) -> Iterator[Record]:
    """Yield the records with the regions of their image, and the names of those of each answer."""
    for record in plan.records:
        image = by_key[record.sample.key]
        extra: dict[str, object] = {**record.sample.extra, "answer_regions": names[image]}
        if image in regions:
            phrases = [
                {"label": name, "text": name, "boxes": boxes}
                for name, boxes in regions[image].items()
            ]
            extra = region_fields(sizes[image], {**extra, "phrases": phrases})
        yield Record(dataclasses.replace(record.sample, extra=extra))
