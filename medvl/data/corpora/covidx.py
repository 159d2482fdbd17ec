"""COVIDx CXR, versions 2 to 4 of the COVID-Net initiative. Layout, counts and access: `data_cards/covidx.md`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record, open_text
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.splits import hash_split
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

NAME = "covidx"
COUNTS: Mapping[str, int] = {"images": 84_818}
"""Of COVIDx CXR-4: what `medvl verify --full` compares with."""

_COVID, _OTHER, _NORMAL = "COVID-19", "Other Pneumonia", "Normal"
_CLASSES: Mapping[str, Mapping[str, int]] = {
    "positive": {_COVID: 1},
    "negative": {_COVID: 0},
    "COVID-19": {_COVID: 1, _OTHER: 0, _NORMAL: 0},
    "pneumonia": {_COVID: 0, _OTHER: 1, _NORMAL: 0},
    "normal": {_COVID: 0, _OTHER: 0, _NORMAL: 1},
}
_SPLITS = {"train": "train", "val": "validate", "test": "test"}
_FILE = re.compile(r"[^/\\]{1,200}\.(?:png|jpe?g)", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def plan(root: Path, deid: Deidentifier, *, version: str | None = None, validate_share: float = 0.1) -> Plan:
    """Everything that the lists say about the images; no image is opened.

    Args:
        root: the folder that holds the lists and the images in `train/`, `val/` and `test/`.
        deid: hashes patients and images.
        version: of the lists: `COVIDx_CXR-3A` takes `train_COVIDx_CXR-3A.txt` and `test_COVIDx_CXR-3A.txt`; None takes
            `train.txt`, `val.txt` and `test.txt`.
        validate_share: of the patients of the training list, by hash, who validate where there is no list for that.

    Raises:
        CorpusError: a list is missing, or a line is not what the data card says.
        ConfigError: the share is not within 0 and 1.
    """
    root = Path(root)
    if not 0 < validate_share < 1:
        raise ConfigError(f"validate_share must be between 0 and 1, got {validate_share:g}")
    lists = {split: root / (f"{split}_{version}.txt" if version else f"{split}.txt") for split in _SPLITS}
    if not (lists["train"].is_file() and lists["test"].is_file()):
        known = sorted(path.stem.removeprefix("train_") for path in root.glob("train_*.txt"))
        hint = f"--version takes one of {', '.join(known)}" if known else "is it the root of the release?"
        raise CorpusError(f"{root} lacks {lists['train'].name} or {lists['test'].name}: {hint}")
    shares = None if lists["val"].is_file() else {"train": 1 - validate_share, "validate": validate_share}
    records = Records()
    names: dict[str, None] = {}
    for split, path in lists.items():
        if not path.is_file():
            continue
        for image, patient, labels in _read_list(path, deid):
            drawn = shares is not None and split == "train"
            sample = Sample(
                key=deid.image(f"{split}/{image}"),
                corpus=NAME,
                split=hash_split(patient, shares) if shares and drawn else _SPLITS[split],
                patient=patient,
                study=deid.study(patient, image),
                image=root / split / image,
                labels=labels,
            )
            names |= dict.fromkeys(labels)
            records.append(Record(sample))
    return Plan(NAME, records, tuple(names), Counter())


def iter_samples(root: Path, *, deid: Deidentifier, version: str | None = None) -> Iterator[Sample]:
    """Samples of all splits. Raises CorpusError."""
    for record in plan(root, deid, version=version).records:
        yield record.sample


def _read_list(path: Path, deid: Deidentifier) -> Iterator[tuple[str, str, dict[str, int]]]:
    """(file, hashed patient, labels) of each line: patient, file, class and source, with blanks between.

    A file's name may have blanks of its own. Sources number their patients from 1 each, so the source goes into the
    hash; the ids of RSNA are unique by themselves and are hashed as the converter of that corpus does.
    """
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            words = line.split()
            image, label, source = " ".join(words[1:-2]), *words[-2:]
            if len(words) < 4 or label not in _CLASSES or not _FILE.fullmatch(image):
                raise CorpusError(f"{path}, line {number}: not a patient, an image file, a class and a source")
            name = words[0] if _UUID.fullmatch(words[0]) else f"{source} {words[0]}"
            yield image, deid.patient(name), dict(_CLASSES[label])
