"""Chest ImaGenome (silver or gold): regions of MIMIC-CXR's images with findings and attributes.
Layout, counts and access: `data_cards/chest-imagenome.md`.
"""

import contextlib
import dataclasses
import re
import zipfile
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from medvl.common.untrusted import ZIP_ERRORS, InputFolders, parse_json
from medvl.data.annotations import Box, read_corners, region_fields
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    find_suffix,
    malformed,
    read_table,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.corpora.reports.mimic_cxr import find_table, read_orders, study_folder
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError
from medvl.schema import FINDINGS, Sample

SPLITS = {"train": "train", "valid": "validate", "test": "test"}
"""Name of a table of the release -> split."""
FINDING_CATEGORIES = ("anatomicalfinding", "disease", "tubesandlines", "device")
"""Categories of relations whose names are findings; the others are attributes."""

_ARCHIVE = "silver_dataset/scene_graph.zip"
_SPLITS = "silver_dataset/splits"
_AVOID = f"{_SPLITS}/images_to_avoid.csv"
_GOLD_BOXES = "gold_dataset/gold_bbox_coordinate_annotations_1000images.csv"
_GOLD_ATTRIBUTES = "gold_dataset/gold_object_attribute_with_coordinates.txt"
_GOLD_COLUMNS = (
    "image_id", "bbox", "relation", "context", "categoryID", "label_name", "sentence",
)  # fmt: skip
_METADATA = ("dicom_id", "subject_id", "study_id", "ViewPosition", "Rows", "Columns")
_MEMBER = re.compile(r"(?:.*/)?([0-9a-f-]+)_SceneGraph\.json")
_IMAGE = re.compile(r"[0-9a-f-]{8,64}")
_MAX_BYTES = 1 << 24
_CORNERS = ("original_x1", "original_y1", "original_x2", "original_y2")
_PARTS = ("objects", "attributes")
_NAMES = {name.lower(): name for name in FINDINGS}


class _Image(NamedTuple):
    """Fields of an image in MIMIC-CXR's metadata."""

    subject: str
    study: str
    view: str
    size: tuple[int, int]
    """Width and height."""


@register_corpus("chest-imagenome")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChestImaGenome(Corpus):
    """Convert Chest ImaGenome: regions of MIMIC-CXR's images with findings and attributes.

    Use the salt of your MIMIC-CXR shards, so that training patients are recognized.
    """

    textless: ClassVar[bool] = True

    root: Path
    """folder of the release: silver_dataset/."""
    images: Path | None = None
    """folder of MIMIC-CXR-JPG or MIMIC-CXR, with its tables; default root."""
    reports: Path | None = None
    """folder with files/ of MIMIC-CXR's reports; without it, samples have no text."""
    gold: bool = False
    """convert the gold set, 1,000 images that radiologists annotated, as split test."""
    without: tuple[Path, ...] = ()
    """folders of shards whose patients are excluded, such as MS-CXR for evaluation."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of Chest ImaGenome from its scene graphs; no image is opened.

        Ids are hashed as in MIMIC-CXR: with the same salt, images and patients have the same hashes
        in both corpora. The archive of scene graphs is read member by member.

        Raises CorpusError when a file or column is missing, or a value does not match the data
        card.
        """
        images = self.images or self.root
        reports = () if self.reports is None else (self.reports,)
        allowed = access.folders(self.root, images, *reports)
        table = find_table(images, "metadata")
        gold = _read_gold(self.root, allowed) if self.gold else None
        split_of = (
            dict(_read_splits(self.root, allowed)) if gold is None else dict.fromkeys(gold, "test")
        )
        metadata = _read_metadata(table, allowed, split_of.keys())
        avoided = set[str]() if self.gold else set(_read_avoided(self.root, table, allowed))
        orders = read_orders(table, allowed)
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        names = set[str]()
        suffix: str | None = None
        with self._open_graphs(gold, allowed) as graphs:
            for dicom_id, split in rows.reading(split_of.items()):
                image = metadata.get(dicom_id)
                if image is None:
                    rows.exclude("not_in_metadata")
                    continue
                if split == "train" and image.subject in avoided:
                    rows.exclude("gold_patient")
                    continue
                if dicom_id not in graphs:
                    rows.exclude("no_scene_graph")
                    continue
                sample = _sample(graphs[dicom_id], image, deid, warnings)
                names.update(sample.labels)
                folder = study_folder(table, dicom_id, image.subject, image.study)
                suffix = suffix or find_suffix(images / folder / dicom_id, (".jpg", ".dcm"))
                file = (images / folder / dicom_id).with_suffix(suffix or ".jpg")
                report = self.reports and (self.reports / folder).with_suffix(".txt")
                sample = dataclasses.replace(
                    sample,
                    key=deid.image(dicom_id),
                    split=split,
                    image=file,
                    order=orders.get(image.study),
                )
                records.append(Record(sample, report=report))
                rows.kept += 1
        return Plan(self.corpus, records, tuple(sorted(names)), rows, +warnings, allowed)

    def _open_graphs(
        self, gold: Mapping[str, Mapping[str, Any]] | None, allowed: InputFolders
    ) -> "contextlib.AbstractContextManager[Mapping[str, Mapping[str, Any]]]":
        """Open the scene graphs by image: those of the archive, or of the gold set."""
        if gold is not None:
            return contextlib.nullcontext(gold)
        return _open_archive(find_file(self.root, _ARCHIVE), allowed)

    def excluded_folders(self) -> Sequence[Path]:
        return self.without

    def notes(self, plan: Plan) -> list[str]:
        if self.without or self.gold:
            return []
        return [
            "579 of the 851 patients of MS-CXR are in train: leave them out with --without MS-CXR "
            "if you evaluate phrase grounding on it."
        ]


def _read_splits(root: Path, allowed: InputFolders) -> Iterator[tuple[str, str]]:
    for name, split in SPLITS.items():
        for row in read_table(find_file(root, f"{_SPLITS}/{name}.csv"), ("dicom_id",), allowed):
            yield row["dicom_id"], split


def _read_metadata(
    table: Path, allowed: InputFolders, dicom_ids: Container[str]
) -> dict[str, _Image]:
    result: dict[str, _Image] = {}
    for row in read_table(table, _METADATA, allowed):
        if row["dicom_id"] not in dicom_ids:
            continue
        if not (row["Rows"].isdecimal() and row["Columns"].isdecimal()):
            raise malformed(table, "expected whole numbers", "Rows")
        size = (int(row["Columns"]), int(row["Rows"]))
        result[row["dicom_id"]] = _Image(
            row["subject_id"], row["study_id"], row["ViewPosition"], size
        )
    return result


def _read_avoided(root: Path, table: Path, allowed: InputFolders) -> Iterator[str]:
    """Yield the patients of the images that the release tells to avoid in training."""
    file = find_file(root, _AVOID)
    images = {row["dicom_id"] for row in read_table(file, ("dicom_id",), allowed)}
    for row in read_table(table, ("dicom_id", "subject_id"), allowed):
        if row["dicom_id"] in images:
            yield row["subject_id"]


def _read_gold(root: Path, allowed: InputFolders) -> dict[str, dict[str, Any]]:
    """Return the gold set in the form of scene graphs, by image.

    A row of attributes counts where its relation is 1; its context is yes or no.
    """
    table = find_file(root, _GOLD_BOXES)
    graphs: dict[str, dict[str, Any]] = {}
    for row in read_table(table, ("image_id", "bbox_name", *_CORNERS), allowed):
        graph = graphs.setdefault(_gold_image(row, table), {"objects": [], "attributes": []})
        corners = {name: _number(row[name]) for name in _CORNERS}
        graph["objects"].append({"bbox_name": row["bbox_name"], **corners})
    table = find_file(root, _GOLD_ATTRIBUTES)
    regions: dict[tuple[str, str], dict[str, Any]] = {}
    for row in read_table(table, _GOLD_COLUMNS, allowed):
        image, name = _gold_image(row, table), row["bbox"].strip()
        if image not in graphs:
            message = f"{table} has an image without boxes: download the gold set again"
            raise CorpusError(message, "mismatch")
        if row["relation"].strip() not in ("0", "1", "0.0", "1.0"):
            raise malformed(table, "expected 0 or 1", "relation")
        if (image, name) not in regions:
            regions[image, name] = {"bbox_name": name, "attributes": [[]], "phrases": []}
            graphs[image]["attributes"].append(regions[image, name])
        region = regions[image, name]
        if row["sentence"].strip() and row["sentence"] not in region["phrases"]:
            region["phrases"].append(row["sentence"])
        if float(row["relation"]):
            parts = (row[column].strip() for column in ("categoryID", "context", "label_name"))
            region["attributes"][0].append("|".join(parts))
    return graphs


def _gold_image(row: Mapping[str, str], table: Path) -> str:
    image = row["image_id"].strip().removesuffix(".dcm")
    if not _IMAGE.fullmatch(image):
        raise malformed(table, "expected a dicom_id, or one with .dcm", "image_id")
    return image


def _number(text: str) -> float | None:
    """Return the number of a cell; None where it has none, as for a region that is absent."""
    try:
        return float(text)
    except ValueError:
        return None


class _SceneGraphs(Mapping[str, Mapping[str, Any]]):
    """Scene graphs of an archive by image, which are read one by one."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._archive = archive
        self._members = {
            match[1]: info
            for info in archive.infolist()
            if (match := _MEMBER.fullmatch(info.filename))
        }

    def __contains__(self, dicom_id: object) -> bool:
        return dicom_id in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, dicom_id: str) -> Mapping[str, Any]:
        """Return the scene graph of an image. Raises CorpusError when it is damaged."""
        info = self._members[dicom_id]
        where = f"{self._path}, a member"
        if info.file_size > _MAX_BYTES:
            raise CorpusError(f"{where}: expected at most {_MAX_BYTES} bytes", "too_large")
        try:
            graph = parse_json(self._archive.read(info))
        except ZIP_ERRORS as error:
            message = f"expected JSON that medvl reads, got {type(error).__name__}"
            raise malformed(where, message) from None
        parts = [graph.get(name) if isinstance(graph, dict) else None for name in _PARTS]
        if not all(_is_list_of_objects(part) for part in parts):
            raise malformed(where, f"expected lists of objects for {' and '.join(_PARTS)}")
        return dict(graph)


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


@contextlib.contextmanager
def _open_archive(path: Path, allowed: InputFolders) -> Iterator[_SceneGraphs]:
    with allowed.open(path, CorpusError) as file:
        try:
            archive = zipfile.ZipFile(file)
        except ZIP_ERRORS:
            raise malformed(path, "expected a zip archive; copy the file again") from None
        with archive:
            yield _SceneGraphs(path, archive)


def _sample(
    graph: Mapping[str, Any], image: _Image, deid: Deidentifier, warnings: Counter[str]
) -> Sample:
    """Return the sample of a scene graph, without key, split, image and order."""
    regions = list(_regions(graph["attributes"], warnings))
    labels: dict[str, int] = {}
    for region in regions:
        for name, value in region["findings"].items():
            label = _NAMES.get(name, name)
            labels[label] = max(labels.get(label, 0), value)
    boxes = list(_boxes(graph["objects"], image.size, warnings))
    sex = graph.get("gender")
    return Sample(
        key="",
        corpus=ChestImaGenome.corpus,
        split="",
        patient=deid.patient(image.subject),
        study=deid.study(image.subject, image.study),
        labels=labels,
        view=image.view or None,
        sex=str(sex) if sex in ("F", "M") else None,
        extra=region_fields(image.size, {"boxes": boxes, "regions": regions}),
    )


def _boxes(
    objects: Sequence[Mapping[str, Any]], size: tuple[int, int], warnings: Counter[str]
) -> Iterator[Box]:
    """Yield the boxes of regions in pixels of the published image."""
    for region in objects:
        values = [region.get(name) for name in _CORNERS]
        corners = [value for value in values if isinstance(value, int | float)]
        if len(corners) == 4 and (corners[0] >= corners[2] or corners[1] >= corners[3]):
            warnings["box_empty"] += 1
            continue
        try:
            yield read_corners(str(region.get("bbox_name")), corners, size, Path(_ARCHIVE))
        except CorpusError:
            warnings["box_malformed"] += 1


def _regions(
    entries: Sequence[Mapping[str, Any]], warnings: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yield the regions with their findings (1 or 0), attributes by category, and phrases.

    A finding that one phrase affirms is 1. One that no phrase mentions is absent.
    """
    for entry in entries:
        findings: dict[str, int] = {}
        attributes: dict[str, list[str]] = {}
        for relation in (text for group in entry.get("attributes") or () for text in group):
            parts = str(relation).split("|")
            if len(parts) != 3 or parts[1] not in ("yes", "no"):
                warnings["relation_malformed"] += 1
                continue
            category, answer, name = parts
            if category in FINDING_CATEGORIES:
                findings[name] = max(findings.get(name, 0), int(answer == "yes"))
            elif answer == "yes" and name not in attributes.setdefault(category, []):
                attributes[category].append(name)
        yield {
            "name": str(entry.get("bbox_name")),
            "findings": findings,
            "attributes": attributes,
            "phrases": [str(text) for text in entry.get("phrases") or ()],
        }
