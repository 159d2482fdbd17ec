"""MIMIC-CXR 2.0.0 (DICOM) and MIMIC-CXR-JPG 2.0.0. Layout, counts and access:
`data_cards/mimic-cxr.md`.
"""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from medvl.common.config_io import check_choice
from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common import tables
from medvl.data.corpora.common.published_lists import Place, Selection, list_folders
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, malformed
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError
from medvl.schema import FINDINGS, Sample

SPLITS = ("train", "validate", "test")

_ID = re.compile(r"[\w-]{1,80}")  # used as a file or folder name, so without dots and slashes
_DICOM_ID = re.compile(r"(?:.*/)?([0-9a-f]{8}(?:-[0-9a-f]{8}){4})(?:\.\w+)?")
_RELEASES = ("2.1.0", "2.0.0")
_COLUMNS = ("dicom_id", "subject_id", "study_id", "ViewPosition")


@register_corpus("mimic-cxr")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MimicCXR(Corpus):
    """Convert MIMIC-CXR (DICOM) or MIMIC-CXR-JPG, with the official split."""

    labels: ClassVar[tuple[str, ...]] = FINDINGS
    counts: ClassVar[Mapping[str, int]] = {"images": 377_110}
    """Images of the full release."""

    root: Path
    """folder of the release: files/ and the tables."""
    reports: Path | None = None
    """folder with the reports' files/; default root."""
    labeler: Literal["chexpert", "negbio"] = "chexpert"
    """labels of CheXpert or NegBio."""
    views: tuple[str, ...] = ()
    """keep only these values of ViewPosition, such as PA AP."""
    without: tuple[Path, ...] = ()
    """folders of shards whose patients are excluded, such as MS-CXR for evaluation."""
    split: Literal["train", "validate", "test"] | None = None
    """read only this split; default all three."""
    only: Path | None = None
    """published list of images or studies, such as MIMIC 5x200: convert them alone, as split test
    with the labels of the list.
    """
    exclude: Path | None = None
    """published list of images or studies whose patients are excluded."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of MIMIC-CXR from its tables; no image or report is opened.

        StudyDate and StudyTime give each sample's `order`, its study's place among the patient's
        studies, and are not kept.

        Raises CorpusError when a table or column is missing, or a value does not match the data
        card; ConfigError when the split or the labeler is unknown.
        """
        root = self.root
        reports = self.reports or root
        allowed = access.folders(root, reports, *list_folders(self.only, self.exclude))
        _check_folders(root, reports)
        if self.split is not None:
            check_choice(self.split, SPLITS, "split")
        labels = _read_labels(root, self.labeler, allowed)
        splits = _read_splits(root, allowed)
        table = find_table(root, "metadata")
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        orders = read_orders(table, allowed)
        places = (_place(row) for row in tables.read_table(table, _COLUMNS, allowed))
        selection = Selection(self.only, self.exclude, allowed, image_name, places)
        suffix: str | None = None
        for row in rows.reading(tables.read_table(table, _COLUMNS, allowed)):
            dicom_id = row["dicom_id"]
            subject = row["subject_id"]
            study = row["study_id"]
            if dicom_id not in splits:
                rows.exclude("not_in_split_table")
                continue
            if self.split is not None and splits[dicom_id] != self.split:
                rows.exclude("other_split")
                continue
            if self.views and row["ViewPosition"] not in self.views:
                rows.exclude("view")
                continue
            reason = selection.reason(_place(row))
            if reason is not None:
                rows.exclude(reason)
                continue
            folder = study_folder(table, dicom_id, subject, study)
            suffix = suffix or tables.find_suffix(root / folder / dicom_id, (".dcm", ".jpg"))
            sample = Sample(
                key=deid.image(dicom_id),
                corpus=self.corpus,
                split=splits[dicom_id],
                patient=deid.patient(subject),
                study=deid.study(subject, study),
                image=(root / folder / dicom_id).with_suffix(suffix or ".dcm"),
                labels=_labels_of(study, labels, warnings),
                view=row["ViewPosition"] or None,
                order=orders.get(study),
            )
            sample = selection.apply(sample, _place(row))
            records.append(Record(sample, report=(reports / folder).with_suffix(".txt")))
            rows.kept += 1
        selection.count_missing(warnings)
        return Plan(self.corpus, records, self.labels, rows, +warnings, allowed)

    def excluded_folders(self) -> Sequence[Path]:
        return self.without


def image_name(text: str) -> str:
    """Return the dicom_id of an image from its path or from itself. Raises CorpusError when it is
    malformed.
    """
    match = _DICOM_ID.fullmatch(text)
    if match is None:
        message = "expected a dicom_id, or a path that ends in one"
        raise CorpusError(message, "malformed", field="dicom_id")
    return match[1]


def _place(row: Mapping[str, str]) -> Place:
    return Place(row["dicom_id"], row["study_id"], row["subject_id"])


def _check_folders(root: Path, reports: Path) -> None:
    if not root.is_dir():
        raise CorpusError(
            f"{root} is not a folder: set --root to the release", "not_found", field="root"
        )
    if not (reports / "files").is_dir():
        message = (
            f"{reports} has no files/: set --reports to the folder with the files/ tree "
            f"of the reports"
        )
        raise CorpusError(message, "not_found", field="reports")


def study_folder(table: Path, dicom_id: str, subject: str, study: str) -> Path:
    """Return a study's folder in the release. Raises CorpusError when an id is not safe as part
    of a path.
    """
    if not all(map(_ID.fullmatch, (dicom_id, subject, study))):
        raise malformed(table, "expected dicom_id, subject_id and study_id like 10000032")
    return Path("files", f"p{subject[:2]}", f"p{subject}", f"s{study}")


def find_table(root: Path, kind: str) -> Path:
    """Return a table of either release. Raises CorpusError when there is none."""
    names = [
        f"mimic-cxr-{release}-{kind}.csv{suffix}" for release in _RELEASES for suffix in (".gz", "")
    ]
    return tables.find_file(root, *names)


def _read_splits(root: Path, allowed: InputFolders) -> dict[str, str]:
    path = find_table(root, "split")
    known = {name: name for name in SPLITS}  # one string object per split instead of one per image
    splits = {}
    for row in tables.read_table(path, ("dicom_id", "split"), allowed):
        if row["split"] not in known:
            raise malformed(
                path, f"expected one of {', '.join(SPLITS)} for split, got another value", "split"
            )
        splits[row["dicom_id"]] = known[row["split"]]
    return splits


def read_orders(table: Path, allowed: InputFolders) -> dict[str, int]:
    """Return the place of each study among its patient's studies; dates and times are used here
    only.

    Studies without a date are left out, and studies of the same time are ordered by their number.
    """
    times: defaultdict[str, dict[str, tuple[int, float, str]]] = defaultdict(dict)
    for row in tables.read_table(table, _COLUMNS, allowed):
        date = row.get("StudyDate", "")
        time = row.get("StudyTime", "") or "0"
        if date.isdecimal() and time.replace(".", "", 1).isdecimal():
            times[row["subject_id"]].setdefault(
                row["study_id"], (int(date), float(time), row["study_id"])
            )
    return tables.order_studies(times)


def _labels_of(
    study: str, labels: Mapping[str, Mapping[str, int]], warnings: Counter[str]
) -> Mapping[str, int]:
    warnings["no_labels"] += study not in labels
    return labels.get(study, {})


def _read_labels(root: Path, labeler: str, allowed: InputFolders) -> dict[str, Mapping[str, int]]:
    check_choice(labeler, ("chexpert", "negbio"), "labeler")
    path = find_table(root, labeler)
    labels: dict[str, Mapping[str, int]] = {}
    for row in tables.read_table(path, ("study_id", *FINDINGS), allowed):
        labels[row["study_id"]] = tables.parse_findings(row, path)
    return labels
