"""R2Gen's preparations of IU X-ray and MIMIC-CXR: `annotation.json` and its images. Data card:
`data_cards/r2gen-annotation.md`.
"""

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medvl.common.untrusted import InputFolders, parse_json, read_limited
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, malformed
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.reports.cleaning import clean_text
from medvl.data.reports.sentences import one_line
from medvl.errors import CorpusError
from medvl.schema import Sample

MAX_BYTES = 1 << 30
"""Largest accepted annotation file; that of MIMIC-CXR has about 200 MB."""

_SPLITS = {"train": "train", "val": "validate", "test": "test"}
_IU = re.compile(r"(CXR\d+)_IM-[\w-]+")
_ID = re.compile(r"\d{1,12}")


@register_corpus("r2gen-annotation")
@dataclasses.dataclass(frozen=True, kw_only=True)
class R2GenAnnotation(Corpus):
    """Convert R2Gen's preparation of IU X-ray (two views) or MIMIC-CXR, with its split."""

    root: Path
    """folder with annotation.json."""
    images: Path | None = None
    """folder of the images; default images/ in root."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of an annotation file: one for each image, with the report of its study;
        no image is opened.

        Raises CorpusError when the file is missing, damaged, or has an entry of another form.
        """
        root = self.root
        images = Path(os.path.realpath(self.images or root / "images"))
        allowed = access.folders(root, images)
        path = root / "annotation.json"
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        for split, entries in _read(path, allowed).items():
            if split not in _SPLITS or not isinstance(entries, list):
                raise malformed(path, f"expected lists {', '.join(_SPLITS)}, got {split!r:.40}")
            for number, entry in enumerate(entries):
                where = f"{path}, {split} {number}"
                for sample in rows.reading(
                    _samples(entry, where, _SPLITS[split], deid, images, warnings)
                ):
                    records.append(Record(sample))
                    rows.kept += 1
        return Plan(self.corpus, records, (), rows, +warnings, allowed)


def _read(path: Path, allowed: InputFolders) -> Mapping[str, Any]:
    try:
        with allowed.open(path, CorpusError) as file:
            content = parse_json(read_limited(file, MAX_BYTES, CorpusError))
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist: see the data card", "not_found") from None
    except ValueError as error:
        raise malformed(path, "it is not JSON") from error
    if not isinstance(content, dict):
        raise malformed(path, "expected an object with the lists train, val and test")
    return content


def _samples(
    entry: Any, where: str, split: str, deid: Deidentifier, images: Path, warnings: Counter[str]
) -> list[Sample]:
    fields = entry if isinstance(entry, dict) else {}
    name = fields.get("id")
    report = fields.get("report")
    paths = fields.get("image_path")
    if (
        not isinstance(name, str)
        or not isinstance(report, str)
        or not isinstance(paths, list)
        or not paths
    ):
        raise malformed(where, "expected id, report and image_path")
    patient, study = _ids(name, fields, where)
    text = one_line(clean_text(report))
    warnings["empty_report"] += not text
    samples = []
    for number, relative in enumerate(paths):
        file = Path(os.path.normpath(images / str(relative)))
        if not file.is_relative_to(images):
            raise malformed(where, "image_path leads out of the folder of images", "image_path")
        samples.append(
            Sample(
                key=deid.image(name if len(paths) == 1 else f"{name}/{number}"),
                corpus=R2GenAnnotation.corpus,
                split=split,
                patient=deid.patient(patient),
                study=deid.study(patient, study),
                image=file,
                sections={"findings": text} if text else {},
                extra={"image_number": number} if len(paths) > 1 else {},
            )
        )
    return samples


def _ids(name: str, fields: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Return the ids of patient and study as in the original corpus, so that shared patients are
    recognised.
    """
    report = _IU.fullmatch(name)
    if report is not None:
        return report[1], report[1]
    patient, study = (str(fields.get(field, "")) for field in ("subject_id", "study_id"))
    if not _ID.fullmatch(patient) or not _ID.fullmatch(study):
        raise malformed(
            where,
            "expected an id as CXR1_IM-0001, or numbers as subject_id and study_id",
            "subject_id",
        )
    return patient, study
