"""ReXGradient-160K (2025). Layout, counts and access: `data_cards/rexgradient.md`."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.formats import read_json_entries
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, cell_text, report_text
from medvl.data.corpora.common.tables import Plan, Record, malformed, order_studies
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier, cap_age
from medvl.errors import CorpusError
from medvl.schema import Sample

SPLITS = {"train": "train", "valid": "validate", "test": "test"}
"""First word of a file of metadata -> split."""
SECTIONS = {
    "Indication": "indication",
    "Comparison": "comparison",
    "Findings": "findings",
    "Impression": "impression",
}
VIEWS = {
    **dict.fromkeys(("PA", "POSTERO_ANTERIOR"), "PA"),
    **dict.fromkeys(("AP", "ANTERO_POSTERIOR", "AP AXIAL"), "AP"),
    **dict.fromkeys(("LATERAL", "LL", "LAT", "RL"), "LATERAL"),
    "LAO": "LAO",
    "RAO": "RAO",
}
"""Spelling of the release -> view. Other spellings that begin with AP_ are AP too."""

_FILE = "{}_metadata_view_position.json"
_FOLDERS = ("metadata", "download/metadata", "")
_WITHOUT_PATHS = ("{}_metadata.csv", "{}_metadata.json")
_LISTS = ("ImagePath", "ImageViewPosition", "ImageShape", "ImageModality", "ImageBodyPart")
_NO_VIEW = ("", "UNKNOWN", "N/A", "NONE", "NULL", "PICC LINE")
_NOT_CHEST = ("KUB", "ABD")
_PATH = re.compile(r"(?:\.\./)*(deid_png(?:/[\w-][\w.-]*)+\.png)")
_SLUG_LENGTH = 30


@register_corpus("rexgradient")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReXGradient(Corpus):
    """Convert ReXGradient-160K: chest radiographs with reports, without labels."""

    counts: ClassVar[Mapping[str, int]] = {"images": 273_004}
    """Images of the three files of metadata."""

    root: Path
    """folder with deid_png/ and metadata/."""
    metadata: Path | None = None
    """folder with the files of metadata; default metadata/ or download/metadata/ of root."""
    views: tuple[str, ...] = ()
    """keep only these of PA, AP, LATERAL, LAO and RAO."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of ReXGradient from its metadata; no image is opened.

        StudyDate gives each sample's `order`, and is not kept.

        Raises CorpusError when the metadata is missing, or an entry does not match the data card.
        """
        folders = (self.root, *(() if self.metadata is None else (self.metadata,)))
        allowed = access.folders(*folders)
        files = _find_metadata(self.root, self.metadata)
        orders = _orders(files.values(), allowed)
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        for split, file in files.items():
            for number, study in read_json_entries(file, allowed):
                where = f"{file}, entry {number}"
                images = list(_images(study, where))
                if not images:
                    continue
                base = _study_sample(study, split, deid, orders, warnings)
                for name, spelling in rows.reading(images):
                    view = view_of(spelling)
                    if spelling.startswith(_NOT_CHEST):
                        rows.exclude("not_chest")
                        continue
                    if self.views and view not in self.views:
                        rows.exclude("view")
                        continue
                    if view is None:
                        warnings[_warning(spelling)] += 1
                    image = self.root / name
                    key = deid.image(name)
                    records.append(
                        Record(dataclasses.replace(base, key=key, image=image, view=view))
                    )
                    rows.kept += 1
        return Plan(self.corpus, records, (), rows, +warnings, allowed)


def _find_metadata(root: Path, metadata: Path | None) -> dict[str, Path]:
    """Return the file of each split that exists; the first folder with any decides."""
    folders = [root / name for name in _FOLDERS] if metadata is None else [metadata]
    for folder in folders:
        files = {
            split: folder / _FILE.format(name)
            for name, split in SPLITS.items()
            if (folder / _FILE.format(name)).is_file()
        }
        if files:
            return files
    for folder in folders:
        for pattern in _WITHOUT_PATHS:
            for name in SPLITS:
                file = folder / pattern.format(name)
                if file.is_file():
                    message = f"expected {_FILE.format(name)} beside {file}, which has no paths"
                    raise CorpusError(f"{message}; download it", "not_found", field="metadata")
    names = ", ".join(_FILE.format(name) for name in SPLITS)
    message = f"{folders[0]} contains none of {names}; give their folder with --metadata"
    raise CorpusError(message, "not_found", field="metadata")


def _orders(files: Iterable[Path], allowed: InputFolders) -> dict[str, int]:
    """Return the place of each study among its patient's studies; studies without a date have
    none.
    """
    times: defaultdict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for file in files:
        for _, study in read_json_entries(file, allowed):
            date = cell_text(study.get("StudyDate"))
            if date:
                number = _study_number(study)
                times[str(study.get("PatientID"))][number] = (date, number)
    return order_studies(times)


def _study_number(study: Mapping[str, Any]) -> str:
    return f"{study.get('PatientID')}/{study.get('StudyInstanceUid')}"


def _study_sample(
    study: Mapping[str, Any],
    split: str,
    deid: Deidentifier,
    orders: Mapping[str, int],
    warnings: Counter[str],
) -> Sample:
    """Return the sample of a study, without key, image and view."""
    patient = cell_text(study.get("PatientID"))
    sections = {
        section: text
        for field, section in SECTIONS.items()
        if (text := report_text(cell_text(study.get(field)), warnings))
    }
    sex = cell_text(study.get("PatientSex"))
    return Sample(
        key="",
        corpus=ReXGradient.corpus,
        split=split,
        patient=deid.patient(patient),
        study=deid.study(patient, cell_text(study.get("StudyInstanceUid"))),
        sections=sections,
        sex=sex if sex in ("F", "M") else None,
        age=cap_age(study.get("PatientAge")),
        order=orders.get(_study_number(study)),
    )


def _images(study: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Yield path below the root, and view in capitals, of the images of a study."""
    lists = {name: study[name] for name in _LISTS if name in study}
    for name in _LISTS[:2]:
        if not isinstance(lists.get(name), list):
            raise malformed(where, f"expected a list for {name}", name)
    for name, values in lists.items():
        if isinstance(values, list) and len(values) != len(lists["ImagePath"]):
            expected = f"expected {len(lists['ImagePath'])} values for {name} as for ImagePath"
            raise malformed(where, f"{expected}, got {len(values)}", name)
    for path, view in zip(lists["ImagePath"], lists["ImageViewPosition"], strict=True):
        yield image_path(path, where), _spelling(view)


def image_path(path: object, where: str) -> str:
    """Return the path of an image below the root. Raises CorpusError where it is another path."""
    match = _PATH.fullmatch(str(path))
    if match is None or ".." in PurePosixPath(match[1]).parts:
        raise malformed(where, "expected a path like ../deid_png/.../1.2.3.png", "ImagePath")
    return match[1]


def _spelling(view: object) -> str:
    return " ".join(str("" if view is None else view).upper().split())


def view_of(view: object) -> str | None:
    """Return the view of a spelling of the release; None: unknown."""
    spelling = _spelling(view)
    return "AP" if spelling.startswith("AP_") else VIEWS.get(spelling)


def _warning(spelling: str) -> str:
    """Return the name that an image without a view is counted under."""
    if spelling in _NO_VIEW:
        return "unknown_view"
    return f"unlisted_view_{re.sub(r'[^a-z0-9]+', '_', spelling.lower())[:_SLUG_LENGTH]}"
