"""MIMIC-CXR 2.0.0 (DICOM) and MIMIC-CXR-JPG 2.0.0. Layout, counts and access: `data_cards/mimic-cxr.md`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record, find_file, read_record, read_table
from medvl.data.privacy.deidentify import Deidentifier
from medvl.errors import CorpusError
from medvl.schema import FINDINGS, Sample

NAME = "mimic-cxr"
SPLITS = ("train", "validate", "test")
COUNTS: Mapping[str, int] = {"images": 377_110}
"""Of the full release: what `medvl verify --full` compares with."""

_ID = re.compile(r"[\w-]{1,80}")  # names a file or a folder: neither dots nor slashes
_RELEASES = ("2.1.0", "2.0.0")
_LABEL_VALUES = {"1.0": 1, "0.0": 0, "-1.0": -1, "1": 1, "0": 0, "-1": -1}


def plan(
    root: Path,
    deid: Deidentifier,
    *,
    reports: Path | None = None,
    labeler: str = "chexpert",
    views: tuple[str, ...] = (),
    split: str | None = None,
) -> Plan:
    """Everything that the tables of the release say about its images; no image or report is opened.

    Args:
        root: the folder that holds `files/` and the tables, of the DICOM or of the JPG release.
        deid: hashes patient, study and image ids.
        reports: folder that holds the reports' `files/` tree; default `root`. The JPG release has none of its own.
        labeler: "chexpert" or "negbio": which table the labels come from.
        views: keep only these values of ViewPosition ("PA", "AP", "LATERAL", ...); empty keeps all.
        split: only this split; default all three.

    Raises:
        CorpusError: a table or column is missing, or a value is not what the data card says.
    """
    root, reports = Path(root), Path(reports or root)
    if not root.is_dir():
        raise CorpusError(f"{root} does not exist or is no folder: --root must name that of the release")
    if not (reports / "files").is_dir():
        raise CorpusError(
            f"{reports} has no folder files/: --reports must name the folder that holds that of the reports"
        )
    if split is not None and split not in SPLITS:
        raise CorpusError(f"{NAME} has the splits {', '.join(SPLITS)}, not {split!r}")
    labels = _read_labels(root, labeler)
    splits = _read_splits(root)
    excluded: Counter[str] = Counter()
    records = Records()
    suffix: str | None = None
    for row in read_table(table := _table(root, "metadata"), ("dicom_id", "subject_id", "study_id", "ViewPosition")):
        dicom_id, subject, study = row["dicom_id"], row["subject_id"], row["study_id"]
        if dicom_id not in splits:
            excluded["not_in_split_table"] += 1
            continue
        if split is not None and splits[dicom_id] != split:
            continue
        if views and row["ViewPosition"] not in views:
            excluded["view"] += 1
            continue
        folder = _folder(table, dicom_id, subject, study)
        suffix = suffix or _suffix_of_release(root / folder / dicom_id)
        sample = Sample(
            key=deid.image(dicom_id),
            corpus=NAME,
            split=splits[dicom_id],
            patient=deid.patient(subject),
            study=deid.study(subject, study),
            image=(root / folder / dicom_id).with_suffix(suffix or ".dcm"),
            labels=labels.get(study, {}),
            view=row["ViewPosition"] or None,
        )
        records.append(Record(sample, report=(reports / folder).with_suffix(".txt")))
    return Plan(NAME, records, FINDINGS, excluded)


def iter_samples(root: Path, *, deid: Deidentifier, split: str | None = None) -> Iterator[Sample]:
    """Samples with their report, read one after another. Raises CorpusError and ReportError."""
    warnings: Counter[str] = Counter()
    for record in plan(root, deid, split=split).records:
        yield read_record(record, warnings)


def _folder(table: Path, dicom_id: str, subject: str, study: str) -> Path:
    """Of a study, within the release. Raises CorpusError where an id would lead elsewhere."""
    if not all(map(_ID.fullmatch, (dicom_id, subject, study))):
        raise CorpusError(f"{table}: a dicom_id, subject_id or study_id is no plain id, such as 10000032")
    return Path("files", f"p{subject[:2]}", f"p{subject}", f"s{study}")


def _table(root: Path, kind: str) -> Path:
    names = [f"mimic-cxr-{release}-{kind}.csv{suffix}" for release in _RELEASES for suffix in (".gz", "")]
    return find_file(root, *names)


def _suffix_of_release(image: Path) -> str | None:
    """A release is all DICOM or all JPG, so the first image that is there decides: no 377,110 looks at the disk."""
    return next((suffix for suffix in (".dcm", ".jpg") if image.with_suffix(suffix).is_file()), None)


def _read_splits(root: Path) -> dict[str, str]:
    path = _table(root, "split")
    known = {name: name for name in SPLITS}
    splits = {}
    for row in read_table(path, ("dicom_id", "split")):
        if row["split"] not in known:
            raise CorpusError(f"{path}: split {row['split']!r} is none of {', '.join(SPLITS)}")
        splits[row["dicom_id"]] = known[row["split"]]
    return splits


def _read_labels(root: Path, labeler: str) -> dict[str, Mapping[str, int]]:
    if labeler not in ("chexpert", "negbio"):
        raise CorpusError(f"labeler must be chexpert or negbio, got {labeler!r}")
    path = _table(root, labeler)
    labels: dict[str, Mapping[str, int]] = {}
    for row in read_table(path, ("study_id", *FINDINGS)):
        labels[row["study_id"]] = parse_labels(row, path)
    return labels


def parse_labels(row: Mapping[str, str], path: Path) -> dict[str, int]:
    """The 14 findings of a table row: 1, 0, -1; blanks left out. Raises CorpusError on any other value."""
    labels = {}
    for name in FINDINGS:
        value = row[name].strip()
        if not value:
            continue
        if value not in _LABEL_VALUES:
            raise CorpusError(f"{path}: {name} is {value!r}, which is none of 1, 0, -1 and blank")
        labels[name] = _LABEL_VALUES[value]
    return labels
