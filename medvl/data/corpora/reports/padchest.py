"""PadChest (2019). Layout, counts and access: `data_cards/padchest.md`.

English translations of its reports are in the files of the RRG24 challenge: line n of
`report.en.tok` is a report in tokens, lower case and separated by blanks; line n of `image.tok` (or
`image.en.tok`) lists its images, separated by commas.
"""

import dataclasses
import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, python_names, quoted_names
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    malformed,
    order_studies,
    read_lines,
    read_table,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier, cap_age
from medvl.data.splits import hash_split, parse_fractions
from medvl.errors import ConfigError
from medvl.schema import Sample

VIEWS = {"PA": "PA", "L": "LATERAL", "AP": "AP", "AP_horizontal": "AP", "COSTAL": "COSTAL"}
"""Projection of the release -> view."""

Annotators = Literal["all", "physician"]
Text = Literal["english", "spanish"]

_TABLES = tuple(
    f"PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv{suffix}" for suffix in ("", ".gz")
)
_COLUMNS = (
    "ImageID", "ImageDir", "StudyDate_DICOM", "StudyID", "PatientID", "PatientBirth",
    "PatientSex_DICOM", "Projection", "PhotometricInterpretation_DICOM", "Report", "MethodLabel",
    "Labels", "LabelsLocalizationsBySentence", "labelCUIS", "LocalizationsCUIS",
)  # fmt: skip
RENAMED = {
    "normal": "No Finding", "atelectasis": "Atelectasis", "cardiomegaly": "Cardiomegaly",
    "consolidation": "Consolidation", "pulmonary edema": "Edema",
    "pleural effusion": "Pleural Effusion", "pneumonia": "Pneumonia",
    "pneumothorax": "Pneumothorax",
}  # fmt: skip
"""Release name -> CheXpert name where the finding is the same."""
# a label, and in capitals a projection: not a radiograph of the chest, or unusable
_EXCLUDED = "exclude"
_PLACE = "loc "
_IMAGE = re.compile(r"\d[\w.-]{0,200}\.png")
_ITEM = r"'[^']*'|\"[^\"]*\"|nan|None"
_LISTS = re.compile(rf"\[[\s,]*+(?:\[[\s,]*+(?:(?:{_ITEM})[\s,]*+)*+\][\s,]*+)*+\]")
_NO_LIST = ("", "nan")


@register_corpus("padchest")
@dataclasses.dataclass(frozen=True, kw_only=True)
class PadChest(Corpus):
    """Convert PadChest: labels, and sentences of findings with their places."""

    counts: ClassVar[Mapping[str, int]] = {"images": 160_861}
    """Rows of the table."""

    root: Path
    """folder with the table."""
    images: Path | None = None
    """folder with 0/ to 54/, or with all PNG files; default root."""
    annotators: Annotators = "all"
    """physician excludes images labelled by a model only."""
    text: Text = "english"
    """english writes sentences from the names of findings and places; spanish keeps the reports'
    word stems.
    """
    reports_en: Path | None = None
    """report.en.tok of RRG24, with image.tok beside it: translated reports in place of text; images
    that it lacks have no text.
    """
    views: tuple[str, ...] = ()
    """keep only these of PA, AP, LATERAL and COSTAL."""
    splits: tuple[str, ...] = ("train=0.8", "validate=0.1", "test=0.1")
    """fractions of the splits, by patient."""
    without: tuple[Path, ...] = ()
    """folders of shards whose patients are excluded, such as PadChest-GR for evaluation."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of PadChest from its table; no image is opened.

        StudyDate gives each sample's age and `order`, and is not kept.

        Raises CorpusError when the table or a column is missing, or a list cannot be read;
        ConfigError when an option is unknown or the fractions do not sum to one.
        """
        root = self.root
        images = self.images or root
        beside = () if self.reports_en is None else (self.reports_en.parent,)
        allowed = access.folders(root, images, *beside)
        check_choice(self.annotators, get_args(Annotators), "annotators")
        check_choice(self.text, get_args(Text), "text")
        if self.reports_en is not None and self.text != "english":
            message = "reports_en are in English, got text spanish; give one of them"
            raise ConfigError(message, "conflict", field="reports_en")
        for view in self.views:
            check_choice(view, tuple(dict.fromkeys(VIEWS.values())), "views")
        fractions = parse_fractions(self.splits)
        table = find_file(root, *_TABLES)
        exclusion = functools.partial(
            _exclusion, table=table, annotators=self.annotators, views=self.views
        )
        read_rows = functools.partial(read_table, table, _COLUMNS, allowed)
        label_names = tuple(
            sorted(
                {
                    name
                    for row in read_rows()
                    if exclusion(row) is None
                    for name in _labels(row, table)
                }
            )
        )
        orders = _orders(read_rows())
        rows = RowCounts()
        warnings = Counter[str]()
        english = self._read_translations(allowed, warnings)
        records = Records()
        folders = dict[str, Path]()
        for row in rows.reading(read_rows()):
            reason = exclusion(row)
            if reason is not None:
                rows.exclude(reason)
                continue
            name = row["ImageDir"]
            if name not in folders:
                folders[name] = images / name if (images / name).is_dir() else images
            sample = _sample(row, table, deid, label_names, self.text)
            if english is not None:
                text = english.get(row["ImageID"], "")
                warnings["no_translation"] += not text
                sample = dataclasses.replace(sample, sections={"report": text} if text else {})
            warnings["no_labels"] += not sample.labels
            warnings["unknown_projection"] += sample.view is None
            split = hash_split(sample.patient, fractions)
            image = folders[name] / row["ImageID"]
            order = orders.get(row["StudyID"])
            records.append(
                Record(dataclasses.replace(sample, split=split, image=image, order=order))
            )
            rows.kept += 1
        return Plan(self.corpus, records, label_names, rows, +warnings, allowed)

    def _read_translations(
        self, allowed: InputFolders, warnings: Counter[str]
    ) -> dict[str, str] | None:
        if self.reports_en is None:
            return None
        return read_translations(self.reports_en, allowed, warnings)

    def excluded_folders(self) -> Sequence[Path]:
        return self.without


def _orders(rows: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """Return the place of each study among its patient's studies; studies without a date are
    left out.
    """
    times: defaultdict[str, dict[str, tuple[int, str]]] = defaultdict(dict)
    for row in rows:
        if row["StudyDate_DICOM"].isdecimal():
            times[row["PatientID"]].setdefault(
                row["StudyID"], (int(row["StudyDate_DICOM"]), row["StudyID"])
            )
    return order_studies(times)


def _sample(
    row: Mapping[str, str], table: Path, deid: Deidentifier, names: Sequence[str], text: Text
) -> Sample:
    """Return the sample of a row, without image, split and order."""
    present = _labels(row, table)
    sentences = _sentences(row, table)
    return Sample(
        key=deid.image(row["ImageID"]),
        corpus=PadChest.corpus,
        split="",
        patient=deid.patient(row["PatientID"]),
        study=deid.study(row["PatientID"], row["StudyID"]),
        sections={"findings": _english(sentences)}
        if text == "english"
        else {"report": row["Report"].strip()},
        labels={name: int(name in present) for name in names} if present else {},
        view=VIEWS.get(row["Projection"]),
        sex=row["PatientSex_DICOM"] if row["PatientSex_DICOM"] in ("F", "M") else None,
        age=_age(row),
        extra=_extra(row, table, sentences),
    )


def _exclusion(
    row: Mapping[str, str], table: Path, annotators: Annotators, views: Sequence[str]
) -> str | None:
    """Return why an image is left out, or None."""
    if not _IMAGE.fullmatch(row["ImageID"]) or not row["ImageDir"].isdecimal():
        return "no_image_name"
    if annotators == "physician" and row["MethodLabel"] != "Physician":
        return "labelled_by_model"
    if _EXCLUDED in (row["Projection"].lower(), *_read_list(row, "Labels", table)):
        return "marked_exclude"
    return "view" if views and VIEWS.get(row["Projection"]) not in views else None


def _labels(row: Mapping[str, str], table: Path) -> set[str]:
    names = _read_list(row, "Labels", table)
    return {RENAMED.get(name, name) for name in names if not name.startswith(_PLACE)}


def _extra(row: Mapping[str, str], table: Path, sentences: list[list[str]]) -> dict[str, object]:
    photometric = row["PhotometricInterpretation_DICOM"]
    return {
        "labels_localizations_by_sentence": sentences,
        "label_cuis": _read_list(row, "labelCUIS", table),
        "localization_cuis": _read_list(row, "LocalizationsCUIS", table),
        "annotated_by": "physician" if row["MethodLabel"] == "Physician" else "model",
        **({"photometric": photometric} if photometric in ("MONOCHROME1", "MONOCHROME2") else {}),
    }


def _english(sentences: list[list[str]]) -> str:
    """Return one English sentence for each distinct sentence of the report: findings, then
    places.
    """
    texts = []
    for names in sentences:
        words = [name for name in names if not name.startswith(_PLACE)]
        words += [name.removeprefix(_PLACE) for name in names if name.startswith(_PLACE)]
        texts.append(f"{', '.join(words).capitalize()}.")
    return " ".join(dict.fromkeys(texts))


def _sentences(row: Mapping[str, str], table: Path) -> list[list[str]]:
    """Return the names of findings and places (beginning with "loc ") of each sentence that has
    any.
    """
    column = "LabelsLocalizationsBySentence"
    cell = row[column].strip()
    if cell in _NO_LIST:
        return []
    if not _LISTS.fullmatch(cell):
        raise malformed(table, f"expected a list of lists of names in {column}", column)
    return [names for part in cell[1:-1].split("]") if (names := quoted_names(part))]


def _read_list(row: Mapping[str, str], column: str, table: Path) -> list[str]:
    cell = row[column].strip()
    if cell in _NO_LIST:
        return []
    try:
        return python_names(cell)
    except ValueError:
        raise malformed(table, f"expected a list of names in {column}", column) from None


def _age(row: Mapping[str, str]) -> int | None:
    """Return the difference of the years of study and birth."""
    taken = row["StudyDate_DICOM"][:4]
    born = row["PatientBirth"].partition(".")[0]
    return cap_age(int(taken) - int(born)) if taken.isdecimal() and born.isdecimal() else None


_REPORT = "report.en.tok"
_BEFORE_MARK = re.compile(r"\s+([.,;:!?%)\]])")
_AFTER_BRACKET = re.compile(r"([(\[])\s+")
_HYPHEN = re.compile(r"(?<=\w) - (?=\w)")
_DECIMAL = re.compile(r"(?<=\d) ?([.,]) ?(?=\d)")
_START = re.compile(r"(^|[.!?] )([a-z])")


def read_translations(path: Path, folders: InputFolders, warnings: Counter[str]) -> dict[str, str]:
    """Return file name of an image -> its report, with blanks and capitals as in English.

    Reports whose text changes are counted as `detokenized`.

    Raises CorpusError when a file is missing, has another number of lines than the other, or lists
    an image twice with different reports.
    """
    if not path.name.endswith(_REPORT):
        raise malformed(path, f"expected a file named {_REPORT}, or ending so", "reports_en")
    prefix = path.name.removesuffix(_REPORT)
    names = find_file(path.parent, f"{prefix}image.tok", f"{prefix}image.en.tok")
    texts: dict[str, str] = {}
    lines = itertools.zip_longest(read_lines(path, folders), read_lines(names, folders))
    for number, (tokens, images) in enumerate(lines, start=1):
        if tokens is None or images is None:
            shorter = path if tokens is None else names
            message = f"expected as many lines as in {names.name if tokens is None else path.name}"
            raise malformed(shorter, f"{message}, got {number - 1}; download both again")
        text = detokenize(tokens)
        warnings["detokenized"] += text != tokens.strip()
        for image in filter(None, (part.strip() for part in images.split(","))):
            name = image.rpartition("/")[2]
            if texts.setdefault(name, text) != text:
                raise malformed(f"{names}, line {number}", "expected each image with one report")
    return texts


def detokenize(tokens: str) -> str:
    """Return the text of tokens: no blanks before marks, and capitals after full stops.

    `the heart is 1 . 5 cm wide . no effusion .` is "The heart is 1.5 cm wide. No effusion."
    """
    text = " ".join(tokens.split())
    text = _DECIMAL.sub(r"\1", text)
    text = _HYPHEN.sub("-", _AFTER_BRACKET.sub(r"\1", _BEFORE_MARK.sub(r"\1", text)))
    return _START.sub(lambda match: match[1] + match[2].upper(), text)
