"""PadChest-GR (2024). Layout, counts and access: `data_cards/padchest-gr.md`."""

import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.common.untrusted import InputFolders, parse_json, read_limited
from medvl.data.annotations import Box, Phrase, region_fields
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, report_text
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    malformed,
    order_studies,
    read_table,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.corpora.reports.padchest import RENAMED, VIEWS
from medvl.data.privacy import Deidentifier, cap_age
from medvl.errors import CorpusError
from medvl.schema import Sample

REPORTS = "grounded_reports_20240819.json"
TABLE = "master_table.csv"
SPLITS = {"train": "train", "validation": "validate", "test": "test"}

Language = Literal["english", "spanish"]

_COLUMNS = (
    "StudyID", "ImageID", "split", "PatientID", "patient_is_benchmark", "PatientSex_DICOM",
    "StudyDate_DICOM", "PatientAge", "label_group",
)  # fmt: skip
_SENTENCES = {"english": "sentence_en", "spanish": "sentence_es"}
_MAX_BYTES = 1 << 28
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER_BYTES = 24
_ROUNDING = 1e-3
"""Part of the image by which a box may exceed it."""
_UNLABELLED = "finding"


@dataclasses.dataclass(slots=True)
class _Image:
    """Fields of an image in the table; its rows repeat all but the group of the label."""

    row: Mapping[str, str]
    groups: set[str] = dataclasses.field(default_factory=set)


@register_corpus("padchest-gr")
@dataclasses.dataclass(frozen=True, kw_only=True)
class PadChestGR(Corpus):
    """Convert PadChest-GR: sentences of reports with boxes, for `medvl eval grounding`.

    Use the salt of your PadChest shards, so that training patients are recognized.
    """

    counts: ClassVar[Mapping[str, int]] = {"images": 4_555}
    """Entries of the file of reports."""

    root: Path
    """folder with the file of reports and the table."""
    images: Path | None = None
    """folder with the PNG files at any depth; default root."""
    language: Language = "english"
    """language of the report; sentences keep the other as their translation."""
    priors: bool = False
    """store prior images too, without text, in the split of the later image."""
    padchest_table: Path | None = None
    """PadChest's table, which has the view of each image."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of PadChest-GR; of each image, 24 bytes are read for its size.

        Ids are hashed as in PadChest: with the same salt, images and patients have the same hashes
        in both corpora.

        Raises CorpusError when a file or column is missing, or a value does not match the data
        card; ConfigError when an option is unknown.
        """
        check_choice(self.language, get_args(Language), "language")
        folder = self.images or self.root
        views = () if self.padchest_table is None else (self.padchest_table.parent,)
        allowed = access.folders(self.root, folder, *views)
        table = find_file(self.root, TABLE)
        entries = _read_reports(find_file(self.root, REPORTS), allowed)
        listed = _read_table(table, allowed)
        view_of = _read_views(self.padchest_table, allowed)
        names = tuple(sorted({name for entry in entries.values() for name in _labels(entry)}))
        image_names = {*entries, *(str(entry.get("PreviousImageID")) for entry in entries.values())}
        files = _find_images(folder, image_names)
        orders = _orders(listed)
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        for name in rows.reading(dict.fromkeys((*entries, *listed))):
            if name not in listed or name not in entries:
                rows.exclude("not_in_table" if name in entries else "not_in_reports")
                continue
            image = files.get(name, folder / name)
            size = _png_size(image, allowed)
            sentences = list(_sentences(entries[name], self.language, size, warnings))
            base = _table_sample(listed[name], deid, table)
            present = _labels(entries[name])
            sample = dataclasses.replace(
                base,
                image=image,
                sections={"findings": " ".join(str(each["text"]) for each in sentences)},
                labels={label: int(label in present) for label in names},
                view=view_of.get(name),
                order=orders.get(listed[name].row["StudyID"]),
                extra={**base.extra, **_annotations(sentences, size)},
            )
            earlier = str(entries[name].get("PreviousImageID") or "")
            if earlier:
                sample = dataclasses.replace(
                    sample, extra={**sample.extra, "prior": deid.image(earlier)}
                )
            records.append(Record(sample))
            rows.kept += 1
        if self.priors:
            for prior in rows.reading(_priors(entries, listed, deid, table)):
                path = files.get(prior.name, folder / prior.name)
                records.append(Record(dataclasses.replace(prior.sample, image=path)))
                rows.kept += 1
        return Plan(self.corpus, records, names, rows, +warnings, allowed)

    def keeps_textless(self) -> bool:
        return self.priors


@dataclasses.dataclass(frozen=True, slots=True)
class _Prior:
    """File name and sample of a prior image."""

    name: str
    sample: Sample


def _priors(
    entries: Mapping[str, Mapping[str, Any]],
    listed: Mapping[str, _Image],
    deid: Deidentifier,
    table: Path,
) -> Iterator[_Prior]:
    """Yield each prior image that has no report here, in the split of the first later image."""
    done = set(entries)
    for name, entry in entries.items():
        prior = str(entry.get("PreviousImageID") or "")
        if not prior or prior in done or name not in listed:
            continue
        done.add(prior)
        later = _table_sample(listed[name], deid, table)
        study = str(entry.get("PreviousStudyID") or prior)
        patient = listed[name].row["PatientID"]
        yield _Prior(
            prior,
            dataclasses.replace(
                later,
                key=deid.image(prior),
                study=deid.study(patient, study),
                age=None,
                extra={},
            ),
        )


def _read_reports(path: Path, allowed: InputFolders) -> dict[str, Mapping[str, Any]]:
    """Return the entry of each image."""
    with allowed.open(path, CorpusError) as file:
        data = read_limited(file, _MAX_BYTES, CorpusError)
    try:
        entries = parse_json(data)
    except ValueError as error:
        raise malformed(path, f"expected JSON, got {type(error).__name__}") from None
    if not isinstance(entries, list):
        raise malformed(path, "expected a list of reports")
    result: dict[str, Mapping[str, Any]] = {}
    for number, entry in enumerate(entries, 1):
        is_report = isinstance(entry, dict) and isinstance(entry.get("findings"), list)
        if not is_report or not _is_file_name(entry.get("ImageID")):
            raise malformed(f"{path}, entry {number}", "expected ImageID and a list of findings")
        prior = entry.get("PreviousImageID")
        if prior and not _is_file_name(prior):
            raise malformed(f"{path}, entry {number}", "expected a file name", "PreviousImageID")
        if not all(isinstance(each, dict) for each in entry["findings"]):
            raise malformed(f"{path}, entry {number}", "expected objects", "findings")
        result[str(entry["ImageID"])] = entry
    return result


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value.endswith(".png") and "/" not in value


def _read_table(table: Path, allowed: InputFolders) -> dict[str, _Image]:
    images: dict[str, _Image] = {}
    for row in read_table(table, _COLUMNS, allowed):
        image = images.setdefault(row["ImageID"], _Image(row))
        if any(row[name] != image.row[name] for name in ("split", "PatientID", "StudyID")):
            message = "expected one split, PatientID and StudyID in all rows of an image"
            raise malformed(table, message, "split")
        if row["label_group"].strip():
            image.groups.add(row["label_group"].strip())
    return images


def _read_views(table: Path | None, allowed: InputFolders) -> dict[str, str]:
    if table is None:
        return {}
    return {
        row["ImageID"]: VIEWS[row["Projection"]]
        for row in read_table(table, ("ImageID", "Projection"), allowed)
        if row["Projection"] in VIEWS
    }


def _find_images(folder: Path, file_names: set[str]) -> dict[str, Path]:
    """Return the path of each wanted file name, at any depth of a folder."""
    return {
        name: Path(parent, name)
        for parent, _, names in os.walk(folder)
        for name in sorted(file_names.intersection(names))
    }


def _orders(listed: Mapping[str, _Image]) -> dict[str, int]:
    times: defaultdict[str, dict[str, tuple[int, str]]] = defaultdict(dict)
    for image in listed.values():
        row = image.row
        if row["StudyDate_DICOM"].isdecimal():
            time = (int(row["StudyDate_DICOM"]), row["StudyID"])
            times[row["PatientID"]].setdefault(row["StudyID"], time)
    return order_studies(times)


def _table_sample(image: _Image, deid: Deidentifier, table: Path) -> Sample:
    """Return a sample with the fields of the table."""
    row = image.row
    if row["split"] not in SPLITS:
        raise malformed(table, f"expected one of {', '.join(SPLITS)}", "split")
    sex = row["PatientSex_DICOM"]
    benchmark = row["patient_is_benchmark"].strip().lower() in ("true", "1", "1.0")
    return Sample(
        key=deid.image(row["ImageID"]),
        corpus=PadChestGR.corpus,
        split=SPLITS[row["split"]],
        patient=deid.patient(row["PatientID"]),
        study=deid.study(row["PatientID"], row["StudyID"]),
        sex=sex if sex in ("F", "M") else None,
        age=cap_age(row["PatientAge"]),
        extra={"label_groups": sorted(image.groups), "patient_is_benchmark": benchmark},
    )


def _labels(entry: Mapping[str, Any]) -> set[str]:
    return {name for finding in entry["findings"] for name in _names(finding)}


def _names(finding: Mapping[str, Any]) -> list[str]:
    """Return the labels of a sentence, with CheXpert's names where the finding is the same."""
    names = (" ".join(str(name).split()) for name in finding.get("labels") or ())
    return [RENAMED.get(name.lower(), name) for name in names if name]


def _sentences(
    entry: Mapping[str, Any],
    language: Language,
    size: tuple[int, int] | None,
    warnings: Counter[str],
) -> Iterator[dict[str, Any]]:
    """Yield the sentences of a report that have text, with boxes in pixels."""
    other = next(name for name in _SENTENCES if name != language)
    for finding in entry["findings"]:
        text = report_text(finding.get(_SENTENCES[language]), warnings)
        if not text:
            continue
        labels = _names(finding)
        label = labels[0] if labels else _UNLABELLED
        sentence = {
            "text": text,
            "translation": report_text(finding.get(_SENTENCES[other]), warnings),
            "abnormal": bool(finding.get("abnormal")),
            "labels": labels,
            "locations": [str(place) for place in finding.get("locations") or ()],
            "progression": finding.get("progression"),
        }
        for name in ("boxes", "extra_boxes"):
            boxes = [_box(label, box, size) for box in finding.get(name) or ()] if size else []
            warnings["box_malformed"] += boxes.count(None)
            sentence[name] = [box for box in boxes if box is not None]
        yield sentence


def _box(label: str, corners: object, size: tuple[int, int]) -> Box | None:
    """Return a box in pixels from its corners in parts of the image; None where it is malformed."""
    if not isinstance(corners, Sequence) or len(corners) != 4:
        return None
    if not all(isinstance(value, int | float) for value in corners):
        return None
    if min(corners) < -_ROUNDING or max(corners) > 1 + _ROUNDING:
        return None
    left, top, right, bottom = (min(max(float(value), 0.0), 1.0) for value in corners)
    if left >= right or top >= bottom:
        return None
    width, height = size
    return {
        "label": label,
        "x": left * width,
        "y": top * height,
        "width": (right - left) * width,
        "height": (bottom - top) * height,
    }


def _annotations(
    sentences: Sequence[Mapping[str, Any]], size: tuple[int, int] | None
) -> dict[str, object]:
    """Return the extra fields of an image: all sentences, and those with boxes as phrases."""
    if size is None:
        return {"sentences": list(sentences)}
    phrases = [
        Phrase(
            label=each["boxes"][0]["label"], text=each["text"], boxes=tuple(each["boxes"])
        ).as_json()
        for each in sentences
        if each["boxes"]
    ]
    return region_fields(size, {"sentences": list(sentences), "phrases": phrases})


def _png_size(path: Path, allowed: InputFolders) -> tuple[int, int] | None:
    """Return (width, height) from the header of a PNG file; None where it cannot be read."""
    try:
        with allowed.open(path, CorpusError) as file:
            header = file.read(_PNG_HEADER_BYTES)
    except FileNotFoundError:
        return None
    if not header.startswith(_PNG) or len(header) < _PNG_HEADER_BYTES:
        return None
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])
