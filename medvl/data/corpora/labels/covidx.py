"""COVIDx CXR, versions 2 to 4 of the COVID-Net initiative. Layout, counts and access:
`data_cards/covidx.md`.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, malformed, read_lines, split_training
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split
from medvl.errors import CorpusError
from medvl.schema import Sample

_COVID = "COVID-19"
_OTHER = "Other Pneumonia"
_NORMAL = "Normal"
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


@register_corpus("covidx")
@dataclasses.dataclass(frozen=True, kw_only=True)
class COVIDx(Corpus):
    """Convert COVIDx CXR, with its official splits."""

    counts: ClassVar[Mapping[str, int]] = {"images": 84_818}
    """Images of COVIDx CXR-4."""
    textless: ClassVar[bool] = True

    root: Path
    """folder with the lists, train/ and test/."""
    version: str | None = None
    """version of the lists, such as COVIDx_CXR-3A for train_COVIDx_CXR-3A.txt; default train.txt.
    """
    validate_share: float = 0.1
    """fraction of the training patients for validation, where the release has no list for it."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of COVIDx from its lists; no image is opened.

        Raises CorpusError when a list is missing, or a line does not match the data card;
        ConfigError when the share is not between 0 and 1.
        """
        root = self.root
        allowed = access.folders(root)
        shares = split_training(self.validate_share)
        lists = {
            split: root / (f"{split}_{self.version}.txt" if self.version else f"{split}.txt")
            for split in _SPLITS
        }
        if not (lists["train"].is_file() and lists["test"].is_file()):
            known = sorted(path.stem.removeprefix("train_") for path in root.glob("train_*.txt"))
            hint = (
                f"--version takes one of {', '.join(known)}"
                if known
                else "is it the root of the release?"
            )
            raise CorpusError(
                f"{root} lacks {lists['train'].name} or {lists['test'].name}: {hint}", "not_found"
            )
        rows = RowCounts()
        records = Records()
        names: dict[str, None] = {}
        present = {split: path for split, path in lists.items() if path.is_file()}
        for split, path in present.items():
            for image, patient, labels in rows.reading(_read_list(path, deid, allowed)):
                sample = Sample(
                    key=deid.image(f"{split}/{image}"),
                    corpus=self.corpus,
                    split=hash_split(patient, shares)
                    if split == "train" and "val" not in present
                    else _SPLITS[split],
                    patient=patient,
                    study=deid.study(patient, image),
                    image=root / split / image,
                    labels=labels,
                )
                names |= dict.fromkeys(labels)
                records.append(Record(sample))
                rows.kept += 1
        return Plan(self.corpus, records, tuple(names), rows, folders=allowed)


def _read_list(
    path: Path, deid: Deidentifier, allowed: InputFolders
) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Yield (file, hashed patient, labels) of each line: patient, file, class and source, separated
    by blanks.

    File names may contain blanks. Each source numbers its patients from 1, so the source is part of
    the hashed id; RSNA ids are unique and are hashed alone, as the RSNA converter does.
    """
    for number, line in enumerate(read_lines(path, allowed), start=1):
        if not line.strip():
            continue
        words = line.split()
        image, label, source = " ".join(words[1:-2]), *words[-2:]
        if len(words) < 4 or label not in _CLASSES or not _FILE.fullmatch(image):
            raise malformed(
                f"{path}, line {number}", "expected a patient, an image file, a class and a source"
            )
        name = words[0] if _UUID.fullmatch(words[0]) else f"{source} {words[0]}"
        yield image, deid.patient(name), dict(_CLASSES[label])
