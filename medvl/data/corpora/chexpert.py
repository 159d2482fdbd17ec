"""CheXpert v1.0 (small or full). Layout, counts and access: `data_cards/chexpert.md`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record, read_table
from medvl.data.corpora.mimic_cxr import parse_labels
from medvl.data.privacy.deidentify import Deidentifier, cap_age
from medvl.errors import CorpusError
from medvl.schema import FINDINGS, Sample

NAME = "chexpert"
SPLITS = ("train", "valid", "test")
COUNTS: Mapping[str, int] = {"train": 223_414, "valid": 234}
"""Rows of the full release's tables: what `medvl verify --full` compares with."""

_COLUMNS = ("Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *FINDINGS)
_TEST_COLUMNS = ("Path", *FINDINGS)  # the later release of the test labels has the path and the labels only
_PATH = re.compile(r"(?:.*/)?(train|valid|test)/(patient\d+)/(study\d+)/(view\d+_(?:frontal|lateral)\.jpg)")
_SEX = {"Male": "M", "Female": "F"}


def plan(root: Path, deid: Deidentifier, *, frontal_only: bool = False, split: str | None = None) -> Plan:
    """Everything that the tables say about the images; no image is opened.

    Args:
        root: the folder that holds `train.csv`, `valid.csv` and the folders `train/`, `valid/`.
        deid: hashes patient, study and image ids.
        frontal_only: leave out lateral views.
        split: "train", "valid" or "test"; default all whose table exists.

    Raises:
        CorpusError: a table or column is missing, or a value is not what the data card says.
    """
    root = Path(root)
    if split is not None and split not in SPLITS:
        raise CorpusError(f"{NAME} has the splits {', '.join(SPLITS)}, not {split!r}")
    wanted = (split,) if split else tuple(name for name in SPLITS if (root / f"{name}.csv").is_file())
    if not wanted:
        raise CorpusError(f"{root} holds none of train.csv, valid.csv, test.csv: name the folder of the release itself")
    excluded: Counter[str] = Counter()
    records = Records()
    for name in wanted:
        table = root / f"{name}.csv"
        for row in read_table(table, _TEST_COLUMNS if name == "test" else _COLUMNS):
            sample = _sample(root, table, name, row, deid)
            if frontal_only and sample.view == "LATERAL":
                excluded["lateral"] += 1
                continue
            records.append(Record(sample))
    return Plan(NAME, records, FINDINGS, excluded)


def iter_samples(root: Path, *, deid: Deidentifier, split: str | None = None) -> Iterator[Sample]:
    """Samples of one split or of all; CheXpert has labels and no text. Raises CorpusError."""
    for record in plan(root, deid, split=split).records:
        yield record.sample


def image_key(path: str, deid: Deidentifier) -> str:
    """The key of the image that a `Path` of the release names. Raises CorpusError when it is none."""
    match = _PATH.fullmatch(path)
    if match is None:
        raise CorpusError("a Path is not of the form train/patient00001/study1/view1_frontal.jpg")
    return deid.image("/".join(match.groups()))


def _sample(root: Path, table: Path, split: str, row: Mapping[str, str], deid: Deidentifier) -> Sample:
    match = _PATH.fullmatch(row["Path"])
    if match is None:
        raise CorpusError(f"{table}: a Path is not of the form train/patient00001/study1/view1_frontal.jpg")
    folder, patient, study, file = match.groups()
    view = "LATERAL" if "lateral" in file else row.get("AP/PA") or "FRONTAL"
    return Sample(
        key=deid.image(f"{folder}/{patient}/{study}/{file}"),
        corpus=NAME,
        split=split,
        # Patient numbers run on through the splits of the release, so the number alone names a patient.
        patient=deid.patient(patient),
        study=deid.study(patient, study),
        image=root / folder / patient / study / file,
        labels=parse_labels(row, table),
        view=view,
        sex=_SEX.get(row.get("Sex", "")),
        age=_age(row.get("Age", "")),
    )


def _age(text: str) -> int | None:
    return cap_age(text) or None  # the release writes 0 for a missing age
