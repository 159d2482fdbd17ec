"""SIIM-ACR Pneumothorax Segmentation (2019). Layout, counts and access: `data_cards/siim.md`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from medvl.data.annotations.boxes import region_fields
from medvl.data.annotations.mask_rle import EMPTY, decode_runs
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record, find_file, read_table
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.splits import check_fractions, hash_split
from medvl.errors import CorpusError
from medvl.schema import Sample

NAME = "siim"
COUNTS: Mapping[str, int] = {"images": 12_047}
"""Annotated images of stage 2: what `medvl verify --full` compares with."""
LABELS = ("Pneumothorax",)
FRACTIONS: Mapping[str, float] = {"train": 0.7, "validate": 0.15, "test": 0.15}
"""Of GLoRIA and those who followed it; the release has no test labels."""

_TABLES = ("stage_2_train.csv", "train-rle.csv")
_SIZE = (1024, 1024)
_UID = re.compile(r"[0-9.]{8,64}")


def plan(root: Path, deid: Deidentifier, *, fractions: Mapping[str, float] = FRACTIONS) -> Plan:
    """Everything that the table says about the images; no image is opened.

    Args:
        root: the folder that holds `stage_2_train.csv` or `train-rle.csv`, and the DICOM files at any depth.
        deid: hashes the images, each of which stands for a patient: the release names none.
        fractions: of the splits.

    Raises:
        CorpusError: the table is missing, or a value is not what the data card says.
        ConfigError: the fractions do not sum to one.
    """
    root = Path(root)
    check_fractions(fractions)
    masks = _read_masks(find_file(root, *_TABLES))
    files = {path.stem: path for path in sorted(root.rglob("*.dcm"), reverse=True)}
    records = Records()
    for image, runs in masks.items():
        patient = deid.patient(image)
        regions = {"masks": [{"label": "Pneumothorax", "runs": text} for text in runs]}
        sample = Sample(
            key=deid.image(image),
            corpus=NAME,
            split=hash_split(patient, fractions),
            patient=patient,
            study=deid.study(image, image),
            image=files.get(image, root / f"{image}.dcm"),
            labels={"Pneumothorax": int(bool(runs))},
            extra=region_fields(_SIZE, regions),
        )
        records.append(Record(sample))
    return Plan(NAME, records, LABELS, Counter())


def iter_samples(root: Path, *, deid: Deidentifier) -> Iterator[Sample]:
    """Samples of all splits. Raises CorpusError."""
    for record in plan(root, deid).records:
        yield record.sample


def _read_masks(table: Path) -> dict[str, list[str]]:
    """Image -> runs of each of its masks, none where it has no pneumothorax."""
    masks: dict[str, list[str]] = {}
    for row in read_table(table, ("ImageId",)):
        cells = {name.strip(): value.strip() for name, value in row.items()}  # stage 1 has a blank before the name
        if "EncodedPixels" not in cells or not _UID.fullmatch(cells["ImageId"]):
            raise CorpusError(f"{table}: a row has no ImageId that names a file, or there is no column EncodedPixels")
        runs = masks.setdefault(cells["ImageId"], [])
        text = cells["EncodedPixels"]
        if text == EMPTY or text in runs:  # stage 1 repeats some rows
            continue
        try:
            decode_runs(text, _SIZE[1], _SIZE[0])
        except CorpusError as error:
            raise CorpusError(f"{table}: {error}") from None
        runs.append(text)
    return masks
