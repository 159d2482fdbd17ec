"""CheXpert v1.0 (small or full). Layout, counts and access: `data_cards/chexpert.md`."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from medvl.common.config_io import check_choice
from medvl.data.corpora.common.published_lists import Place, Selection, list_folders
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, parse_findings, read_table
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier, cap_age
from medvl.errors import CorpusError
from medvl.schema import FINDINGS, Sample

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

_COLUMNS = ("Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *FINDINGS)
# the later release of the test labels has the path and the labels only
_TEST_COLUMNS = ("Path", *FINDINGS)
_PATH = re.compile(
    r"(?:.*/)?(train|valid|test)/(patient\d+)/(study\d+)/(view\d+_(?:frontal|lateral)\.jpg)"
)
SEX = {"Male": "M", "Female": "F"}


@register_corpus("chexpert")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheXpert(Corpus):
    """Convert CheXpert, which has labels and no text."""

    labels: ClassVar[tuple[str, ...]] = FINDINGS
    counts: ClassVar[Mapping[str, int]] = {"train": 223_414, "valid": 234}
    """Rows of the full release's tables."""
    textless: ClassVar[bool] = True

    root: Path
    """the folder CheXpert-v1.0-small or CheXpert-v1.0."""
    frontal_only: bool = False
    """exclude lateral views."""
    split: Split | None = None
    """read only this split; default all whose table exists."""
    only: Path | None = None
    """published list of images, such as CheXpert 5x200: convert them alone, as split test with the
    labels of the list.
    """
    exclude: Path | None = None
    """published list of images whose patients are excluded."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of CheXpert from its tables; no image is opened. CheXpert has labels and
        no text.

        Raises CorpusError when a table or column is missing, or a value does not match the data
        card; ConfigError when the split is unknown.
        """
        root = self.root
        allowed = access.folders(root, *list_folders(self.only, self.exclude))
        if self.split is not None:
            check_choice(self.split, SPLITS, "split")
        splits = (
            (self.split,)
            if self.split
            else tuple(name for name in SPLITS if (root / f"{name}.csv").is_file())
        )
        if not splits:
            raise CorpusError(
                f"{root} lacks train.csv, valid.csv or test.csv: is it the release's root?",
                "not_found",
            )
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        places = (
            _place(row["Path"], root / f"{name}.csv")
            for name in splits
            for row in read_table(root / f"{name}.csv", ("Path",), allowed)
        )
        selection = Selection(self.only, self.exclude, allowed, image_name, places)
        for name in splits:
            table = root / f"{name}.csv"
            columns = _TEST_COLUMNS if name == "test" else _COLUMNS
            for row in rows.reading(read_table(table, columns, allowed)):
                place = _place(row["Path"], table)
                reason = selection.reason(place)
                if reason is not None:
                    rows.exclude(reason)
                    continue
                sample = selection.apply(_sample(root, table, name, row, deid), place)
                if self.frontal_only and sample.view == "LATERAL":
                    rows.exclude("lateral")
                    continue
                records.append(Record(sample))
                rows.kept += 1
        selection.count_missing(warnings)
        return Plan(self.corpus, records, self.labels, rows, +warnings, allowed)


def image_key(path: str, deid: Deidentifier) -> str:
    """Return the sample key of the image at a `Path` of the release. Raises CorpusError when it
    is malformed.
    """
    return deid.image(image_name(path))


def image_name(path: str) -> str:
    """Return split, patient, study and file name of a `Path`, joined by slashes. Raises CorpusError
    when it is malformed.
    """
    return "/".join(parse_path(path))


def _place(path: str, table: Path) -> Place:
    try:
        folder, patient, study, file = parse_path(path)
    except CorpusError as error:
        raise error.prefixed(f"{table}: ") from None
    return Place(f"{folder}/{patient}/{study}/{file}", f"{patient}/{study}", patient)


def parse_path(path: str) -> tuple[str, ...]:
    """Return split, patient, study and file name of a `Path`. Raises CorpusError when it is
    malformed.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        raise CorpusError(
            "expected a Path like train/patient00001/study1/view1_frontal.jpg",
            "malformed",
            field="Path",
        )
    return match.groups()


def _sample(
    root: Path, table: Path, split: str, row: Mapping[str, str], deid: Deidentifier
) -> Sample:
    try:
        folder, patient, study, file = parse_path(row["Path"])
    except CorpusError as error:
        raise error.prefixed(f"{table}: ") from None
    view = "LATERAL" if "lateral" in file else row.get("AP/PA") or "FRONTAL"
    return Sample(
        key=deid.image(f"{folder}/{patient}/{study}/{file}"),
        corpus=CheXpert.corpus,
        split=split,
        # Patient numbers are unique across the splits of the release.
        patient=deid.patient(patient),
        study=deid.study(patient, study),
        image=root / folder / patient / study / file,
        labels=parse_findings(row, table),
        view=view,
        sex=SEX.get(row.get("Sex", "")),
        age=cap_age(row.get("Age", "")) or None,  # the release writes 0 for a missing age
    )
