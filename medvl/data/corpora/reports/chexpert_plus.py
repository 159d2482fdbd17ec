"""CheXpert Plus (2024). Layout, counts and access: `data_cards/chexpert-plus.md`."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, get_args

from medvl.common.config_io import check_choice
from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.published_lists import Place, Selection, list_folders
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, report_text
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    malformed,
    order_studies,
    read_json_lines,
    read_table,
)
from medvl.data.corpora.labels.chexpert import SEX, image_name
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier, cap_age
from medvl.errors import CorpusError
from medvl.schema import FINDINGS, Sample

TABLE = "df_chexpert_plus_240401.csv"
TREES = ("PNG/PNG", "PNG", "DICOM/Uncompressed", "DICOM/Compressed", "")
"""Folders of train/ and valid/, below the folder of images."""
SUFFIXES = (".png", ".jpg", ".dcm")
SECTIONS = {
    "section_clinical_history": "indication",
    "section_history": "indication",
    "section_comparison": "comparison",
    "section_technique": "technique",
    "section_findings": "findings",
    "section_impression": "impression",
}
"""Column -> section, in the order of a report. The other sections hold names and numbers."""

Labels = Literal["report", "findings", "impression"]

_COLUMNS = (
    *("path_to_image", "frontal_lateral", "ap_pa", "patient_report_date_order"),
    *SECTIONS,
    *("age", "sex", "split"),
)


class _StudyText(NamedTuple):
    """Sections and labels of the first row of a study."""

    sections: Mapping[str, str]
    labels: Mapping[str, int]


class _Tree(NamedTuple):
    """Folder of train/ and valid/, and suffix of the images in it."""

    folder: Path
    suffix: str


@register_corpus("chexpert-plus")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheXpertPlus(Corpus):
    """Convert CheXpert Plus: reports and labels of CheXpert's images."""

    labels: ClassVar[tuple[str, ...]] = FINDINGS
    counts: ClassVar[Mapping[str, int]] = {"images": 223_462, "train": 223_228, "valid": 234}
    """Rows of the table."""

    root: Path
    """folder with the table and the label files."""
    images: Path | None = None
    """folder with PNG/, DICOM/, or train/ and valid/; default root."""
    labels_from: Labels = "report"
    """part of the report that the labels come from."""
    views: tuple[str, ...] = ()
    """keep only these of PA, AP, LATERAL, LL, RL and FRONTAL."""
    only: Path | None = None
    """published list of images, such as CheXpert 5x200: convert them alone, as split test with the
    labels of the list.
    """
    exclude: Path | None = None
    """published list of images whose patients are excluded."""
    all_texts: bool = False
    """keep the text and labels of each image, not those of its study's first row."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of CheXpert Plus from its table; no image is opened.

        Ids are hashed as in CheXpert: with the same salt, images and patients have the same hashes
        in both corpora.

        Raises CorpusError when a table or column is missing, a value does not match the data card,
        or the images are in several trees; ConfigError when an option is unknown.
        """
        check_choice(self.labels_from, get_args(Labels), "labels_from")
        listed = list_folders(self.only, self.exclude)
        allowed = access.folders(self.root, self.images or self.root, *listed)
        table = self.root / TABLE
        labels = _read_labels(self.root / f"{self.labels_from}_fixed.json", allowed)
        places = (
            _place(_name(row["path_to_image"], table))
            for row in read_table(table, ("path_to_image",), allowed)
        )
        selection = Selection(self.only, self.exclude, allowed, image_name, places)
        tree = _find_tree(self.images or self.root, table, allowed)
        sizes, orders = _scan(table, allowed)
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        first: dict[str, _StudyText] = {}
        for row in rows.reading(read_table(table, _COLUMNS, allowed)):
            name = _name(row["path_to_image"], table)
            split, patient, study, _ = name.split("/")
            text = _StudyText(_sections(row, warnings), labels.get(name, {}))
            number = f"{patient}/{study}"
            if sizes[number] > 1 and not self.all_texts:
                own = text
                text = first.setdefault(number, own)
                warnings["texts_of_study_differ"] += text.sections != own.sections
                warnings["labels_of_study_differ"] += text.labels != own.labels
            view = row["ap_pa"].strip() or row["frontal_lateral"].strip().upper() or None
            reason = selection.reason(_place(name))
            if reason is not None:
                rows.exclude(reason)
                continue
            if self.views and view not in self.views:
                rows.exclude("view")
                continue
            warnings["no_labels"] += not text.labels
            sample = Sample(
                key=deid.image(name),
                corpus=self.corpus,
                split=split,
                patient=deid.patient(patient),
                study=deid.study(patient, study),
                image=(tree.folder / name).with_suffix(tree.suffix),
                sections=text.sections,
                labels=text.labels,
                view=view,
                sex=SEX.get(row["sex"].strip()),
                age=cap_age(row["age"]),
                order=orders.get(number),
            )
            records.append(Record(selection.apply(sample, _place(name))))
            rows.kept += 1
        selection.count_missing(warnings)
        return Plan(self.corpus, records, self.labels, rows, +warnings, allowed)

    def notes(self, plan: Plan) -> list[str]:
        if self.exclude is not None or self.only is not None:
            return []
        return [
            "The 1,000 images of CheXpert 5x200 are in train: give their list with --exclude if "
            "you test zero-shot classification on them."
        ]


def _name(path: str, where: Path) -> str:
    """Return a path of the release without its prefix: split, patient, study and file."""
    try:
        return image_name(path.strip())
    except CorpusError as error:
        raise error.prefixed(f"{where}: ") from None


def _place(name: str) -> Place:
    _, patient, study, _ = name.split("/")
    return Place(name, f"{patient}/{study}", patient)


def _sections(row: Mapping[str, str], warnings: Counter[str]) -> dict[str, str]:
    """Return the sections of a row that have text; clinical history goes before history."""
    sections: dict[str, str] = {}
    for column, section in SECTIONS.items():
        text = report_text(row[column], warnings)
        if text:
            sections.setdefault(section, text)
    return sections


def _scan(table: Path, allowed: InputFolders) -> tuple[Counter[str], dict[str, int]]:
    """Return the number of images of each study, and its place among its patient's studies."""
    sizes = Counter[str]()
    times: defaultdict[str, dict[str, tuple[float, str]]] = defaultdict(dict)
    for row in read_table(table, ("path_to_image", "patient_report_date_order"), allowed):
        _, patient, study, _ = _name(row["path_to_image"], table).split("/")
        number = f"{patient}/{study}"
        sizes[number] += 1
        place = row["patient_report_date_order"].strip()
        if place.replace(".", "", 1).isdecimal():
            times[patient].setdefault(number, (float(place), number))
    return sizes, order_studies(times)


def _read_labels(path: Path, allowed: InputFolders) -> dict[str, Mapping[str, int]]:
    """Return the labels of each image that has any; equal ones share one object."""
    labels: dict[str, Mapping[str, int]] = {}
    shared: dict[tuple[object, ...], Mapping[str, int]] = {}
    for number, row in read_json_lines(path, ("path_to_image", *FINDINGS), allowed):
        where = f"{path}, row {number}"
        values = tuple(_label(row[name], name, where) for name in FINDINGS)
        present = {
            name: value for name, value in zip(FINDINGS, values, strict=True) if value is not None
        }
        if present:
            labels[_name(str(row["path_to_image"]), path)] = shared.setdefault(values, present)
    return labels


def _label(value: object, name: str, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in (1, 0, -1):
        raise malformed(where, f"expected 1, 0, -1 or null for {name}", name)
    return int(value)


def _find_tree(images: Path, table: Path, allowed: InputFolders) -> _Tree:
    """Return the tree of the images, which the first image of each split that exists decides.

    Without any image, returns the first of `TREES` with `.png`.

    Raises CorpusError when images are in several trees.
    """
    trees_of_split: dict[str, set[_Tree]] = {}
    for row in read_table(table, ("path_to_image",), allowed):
        name = _name(row["path_to_image"], table)
        split = name.split("/")[0]
        if split not in trees_of_split:
            trees = {
                _Tree(images / tree, suffix)
                for tree in TREES
                for suffix in SUFFIXES
                if (images / tree / name).with_suffix(suffix).is_file()
            }
            if trees:
                trees_of_split[split] = trees
    trees = set().union(*trees_of_split.values())
    if len(trees) > 1:
        places = ", ".join(f"{tree.folder} ({tree.suffix})" for tree in sorted(trees))
        message = f"expected images in one tree, got {places}; give one with --images"
        raise CorpusError(message, "conflict", field="images")
    return trees.pop() if trees else _Tree(images / TREES[0], SUFFIXES[0])
