"""SIIM-ACR Pneumothorax Segmentation (2019). Layout, counts and access: `data_cards/siim.md`."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.annotations import EMPTY, decode_runs, region_fields
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    malformed,
    own_study,
    read_table,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split, parse_fractions
from medvl.errors import CorpusError
from medvl.schema import Sample

LABELS = ("Pneumothorax",)

_TABLES = ("stage_2_train.csv", "train-rle.csv")
_SIZE = (1024, 1024)
_UID = re.compile(r"[0-9.]{8,64}")


@register_corpus("siim")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SIIM(Corpus):
    """Convert the SIIM-ACR pneumothorax challenge: labels and masks."""

    labels: ClassVar[tuple[str, ...]] = LABELS
    counts: ClassVar[Mapping[str, int]] = {"images": 12_047}
    """Annotated images of stage 2."""
    textless: ClassVar[bool] = True

    root: Path
    """folder with stage_2_train.csv or train-rle.csv, and the DICOM files."""
    # fractions of GLoRIA and later work; the release has no test labels
    splits: tuple[str, ...] = ("train=0.7", "validate=0.15", "test=0.15")
    """fractions of the splits, by image: the release has no patient ids."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of the SIIM-ACR challenge from its table; no image is opened.

        Raises CorpusError when the table is missing, or a value does not match the data card;
        ConfigError when the fractions do not sum to one.
        """
        root = self.root
        allowed = access.folders(root)
        fractions = parse_fractions(self.splits)
        warnings = Counter[str]()
        masks = _read_masks(find_file(root, *_TABLES), warnings, allowed)
        files = {path.stem: path for path in sorted(root.rglob("*.dcm"), reverse=True)}
        rows = RowCounts()
        records = Records()
        for image, runs in rows.reading(masks.items()):
            own = own_study(image, deid)
            regions = {"masks": [{"label": "Pneumothorax", "runs": text} for text in runs]}
            sample = Sample(
                **own,
                corpus=self.corpus,
                split=hash_split(own["patient"], fractions),
                image=files.get(image, root / f"{image}.dcm"),
                labels={"Pneumothorax": int(bool(runs))},
                extra=region_fields(_SIZE, regions),
            )
            records.append(Record(sample))
            rows.kept += 1
        return Plan(self.corpus, records, self.labels, rows, +warnings, allowed)


def _read_masks(table: Path, warnings: Counter[str], allowed: InputFolders) -> dict[str, list[str]]:
    """Read image -> runs of each of its masks, an empty list for images without pneumothorax."""
    masks: dict[str, list[str]] = {}
    for row in read_table(table, ("ImageId",), allowed):
        # stage 1 has a blank before the column names
        cells = {name.strip(): value.strip() for name, value in row.items()}
        if "EncodedPixels" not in cells or not _UID.fullmatch(cells["ImageId"]):
            field = "ImageId" if "EncodedPixels" in cells else "EncodedPixels"
            raise malformed(
                table, "expected an ImageId of digits and dots, and a column EncodedPixels", field
            )
        runs = masks.setdefault(cells["ImageId"], [])
        text = cells["EncodedPixels"]
        warnings["repeated_mask"] += text in runs  # stage 1 repeats some rows
        if text == EMPTY or text in runs:
            continue
        try:
            decode_runs(text, _SIZE[1], _SIZE[0])
        except CorpusError as error:
            raise error.prefixed(f"{table}: ") from None
        runs.append(text)
    return masks
