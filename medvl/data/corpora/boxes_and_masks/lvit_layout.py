"""QaTa-COV19, MosMedData+ and MoNuSeg with LViT's texts: images, masks and descriptions.

Layouts, counts and access: `data_cards/qata.md`, `data_cards/mosmed.md`, `data_cards/monuseg.md`.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.figures import SplitRule, apply_split_rule
from medvl.data.corpora.common.formats import read_sheet
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, report_text
from medvl.data.corpora.common.tables import Plan, Record, malformed
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError
from medvl.schema import Sample

Patients = Literal["image", "file"]
SPLITS = ("train", "validate", "test")

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
_FOLDERS = {"train": "Train_Folder", "validate": "Val_Folder", "test": "Test_Folder"}
_SETS = {"train": "Train Set", "test": "Test Set"}
_SUBJECT = re.compile(r"sub-[A-Za-z0-9]+|study_\d+|TCGA-\w{2}-\w{4}|P\d{3,}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Folder:
    """A folder of images and masks, and the tables of its texts."""

    images: Path
    masks: Path
    tables: tuple[Path, ...]
    lists: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    """Split -> table of its images, for a folder with two splits."""
    split: str = "train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LViTCorpus(Corpus):
    """A corpus of images, masks of one structure, and LViT's texts."""

    textless: ClassVar[bool] = True
    structure: ClassVar[str]
    """Label of the masks."""

    root: Path
    """folder with Train_Folder/, Val_Folder/ and Test_Folder/."""
    patients: Patients = "image"
    """image treats every image as a patient, as the published splits do; file takes the patient (of
    MosMedData+ the study) in the file name, where it has one.
    """
    splits: SplitRule = "official"
    """official refuses splits that share a patient; repaired leaves images of shared patients out
    of the training splits; by-article draws new splits, by patient.
    """

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of the images; no image is opened.

        Raises CorpusError when a folder or table is missing or does not match the data card;
        SplitError when `splits` is "official" and a patient is in two splits; ConfigError when an
        option is unknown.
        """
        root = self.root
        check_choice(self.patients, get_args(Patients), "patients")
        allowed = access.folders(root)
        records = Records()
        rows = RowCounts()
        warnings = Counter[str]()
        for folder in _folders(root):
            for split, image, mask, text in rows.reading(_images(folder, allowed, warnings)):
                if mask is None:
                    rows.exclude("no_mask")
                    continue
                warnings["no_text"] += not text
                subject = _SUBJECT.search(image.stem) if self.patients == "file" else None
                patient = deid.patient(f"{self.corpus} {subject[0] if subject else image.stem}")
                sample = Sample(
                    key=deid.image(f"{self.corpus} {split} {image.name}"),
                    corpus=self.corpus,
                    split=split,
                    patient=patient,
                    study=deid.study(patient, image.stem),
                    image=image,
                    sections={"description": text} if text else {},
                )
                records.append(Record(sample, masks={self.structure: mask}))
                rows.kept += 1
        result = Plan(self.corpus, records, (), rows, warnings, allowed)
        return apply_split_rule(result, self.splits, SPLITS)


@register_corpus("qata")
@dataclasses.dataclass(frozen=True, kw_only=True)
class QaTa(LViTCorpus):
    """Convert QaTa-COV19: radiographs with masks of infections and LViT's texts."""

    counts: ClassVar[Mapping[str, int]] = {"train": 5_716, "validate": 1_429, "test": 2_113}
    structure: ClassVar[str] = "Infection"

    root: Path
    """folder with Train_Folder/, Val_Folder/ and Test_Folder/, or with Train Set/ and Test Set/."""


@register_corpus("mosmed")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MosMed(LViTCorpus):
    """Convert MosMedData+: slices of chest CT with masks of infections and LViT's texts."""

    counts: ClassVar[Mapping[str, int]] = {"train": 2_183, "validate": 273, "test": 273}
    structure: ClassVar[str] = "Infection"


@register_corpus("monuseg")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MoNuSeg(LViTCorpus):
    """Convert MoNuSeg: tissue with masks of nuclei and LViT's texts; use --color."""

    counts: ClassVar[Mapping[str, int]] = {"train": 24, "validate": 6, "test": 14}
    structure: ClassVar[str] = "Nucleus"

    patients: Patients = "file"
    """image treats every image as a patient, as the published splits do; file takes the patient
    from the TCGA barcode in the file name.
    """


def _folders(root: Path) -> list[_Folder]:
    """Return the folders of images of the layout that is found."""
    if (root / _FOLDERS["train"]).is_dir():
        parts = {split: root / name for split, name in _FOLDERS.items() if (root / name).is_dir()}
        return [
            _Folder(
                part / "img",
                part / "labelcol",
                _tables(split, part, root, parts["train"]),
                split=split,
            )
            for split, part in parts.items()
        ]
    if (root / _SETS["train"]).is_dir():
        folders = []
        for split, name in _SETS.items():
            part = root / name
            places = (part, part / "Text", root)
            lists = (
                {}
                if split == "test"
                else {each: _id_table(each, places) for each in ("train", "validate")}
            )
            tables = _tables("validate" if lists else split, *places)
            folders.append(_Folder(part / "Images", part / "Ground-truths", tables, lists, split))
        return folders
    names = ", ".join([*_FOLDERS.values(), *_SETS.values()])
    raise CorpusError(
        f"{root} contains none of {names}: is it the root of the release? See the card.",
        "not_found",
    )


def _tables(split: str, *places: Path) -> tuple[Path, ...]:
    """Return the tables of a split's texts: `Train_text.xlsx`, `Train_Val_text.xlsx`,
    `Test_text_for_...`.

    Those of training may have the texts of validation too, as `Train_text_for_Covid19.xlsx` has.
    """
    words = {"train": ("train",), "validate": ("val", "train"), "test": ("test",)}[split]
    tables: dict[Path, None] = {}
    for place in places:
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            low = path.name.lower()
            if path.suffix.lower() in (".xlsx", ".csv") and "text" in low and low.startswith(words):
                tables[path] = None
    return tuple(tables)


def _id_table(split: str, places: tuple[Path, ...]) -> Path:
    name = {"train": "Train_ID", "validate": "Val_ID"}[split]
    for place in places:
        for suffix in (".xlsx", ".csv"):
            if (place / f"{name}{suffix}").is_file():
                return place / f"{name}{suffix}"
    raise CorpusError(
        f"{places[-1]} has no {name}.xlsx, which names the images of a split; see the card",
        "not_found",
    )


def _images(
    folder: _Folder, allowed: InputFolders, warnings: Counter[str]
) -> Iterator[tuple[str, Path, Path | None, str]]:
    """Yield split, image, mask and text of each image of a folder, in the order of the names."""
    texts: dict[str, str] = {}
    for table in folder.tables:
        for row in read_sheet(table, ("Image", "Description"), allowed):
            text = " ".join(report_text(row["Description"], warnings).split())
            repeated = texts.setdefault(_stem(row["Image"]), text)
            warnings["second_text_ignored"] += repeated != text
    split_of = {
        _stem(row["Image"]): split
        for split, table in folder.lists.items()
        for row in read_sheet(table, ("Image",), allowed)
    }
    for path in (folder.images, folder.masks):
        if not path.is_dir():
            raise CorpusError(f"{path} does not exist: see the data card", "not_found")
    masks = {
        _stem(path.name): path
        for path in sorted(folder.masks.iterdir())
        if path.suffix.lower() in _SUFFIXES
    }
    images = {
        path: _stem(path.name)
        for path in sorted(folder.images.iterdir())
        if path.suffix.lower() in _SUFFIXES
    }
    warnings["listed_image_missing"] += len(split_of.keys() - images.values())
    warnings["mask_without_image"] += len(masks.keys() - images.values())
    for image, stem in images.items():
        if split_of and stem not in split_of:
            raise malformed(
                folder.images, f"{image.name} is in none of the tables of splits", "Image"
            )
        yield split_of.get(stem, folder.split), image, masks.get(stem), texts.get(stem, "")


def _stem(file: str) -> str:
    """Return a file name without folder, suffix and the `mask_` of masks."""
    name = file.strip().replace("\\", "/").rpartition("/")[2]
    return (name.rpartition(".")[0] or name).removeprefix("mask_")
