"""MS-CXR-T: change of five findings between two images of MIMIC-CXR. Layout and access:
`data_cards/ms-cxr-t.md`.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    find_suffix,
    malformed,
    read_table,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.schema import CHANGES, Sample

TABLE = "MS_CXR_T_temporal_image_classification_v1.0.0.csv"
LABELS = ("Consolidation", "Edema", "Pleural Effusion", "Pneumonia", "Pneumothorax")

_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{8}){4}"
_PATH = re.compile(rf"p\d{{2}}/p(\d{{8}})/s(\d{{8}})/({_ID})")


def column(label: str) -> str:
    """Return the table's column with the change of a finding."""
    return f"{label.lower().replace(' ', '_')}_progression"


@register_corpus("ms-cxr-t")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MSCXRT(Corpus):
    """Convert MS-CXR-T: image pairs and the change of findings, for `medvl eval change`.

    Use the salt of your MIMIC-CXR shards, so that training patients are recognized.
    """

    labels: ClassVar[tuple[str, ...]] = LABELS
    textless: ClassVar[bool] = True

    root: Path
    """folder of the release with its table of image pairs."""
    images: Path | None = None
    """folder with files/ of MIMIC-CXR-JPG or MIMIC-CXR; default root."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of MS-CXR-T from its table; no image is opened.

        A row gives two samples: the current image, with `extra["change"]` (finding -> improving,
        stable or worsening) and `extra["prior"]` (key of the earlier image), and the earlier image,
        unless another row has it already. An image that is compared with several earlier ones gives
        one sample for each. All are test samples. Ids are hashed as in MIMIC-CXR.

        Raises CorpusError when the table is missing or a value does not match the data card.
        """
        root = self.root
        images = self.images or root
        allowed = access.folders(root, images)
        table = find_file(root, TABLE)
        suffix: str | None = None
        samples: dict[str, Sample] = {}
        rows = RowCounts("comparisons")
        names = ("dicom_id", "previous_dicom_id", *map(column, self.labels))
        for row in rows.reading(read_table(table, names, allowed)):
            change = _read_change(row, table)
            if not change:
                rows.exclude("no_label")
                continue
            suffix = suffix or find_suffix(images / "files" / row["dicom_id"], (".jpg", ".dcm"))
            pair = (row["dicom_id"], row["previous_dicom_id"])
            current, prior = (_sample(name, table, images, suffix or ".jpg", deid) for name in pair)
            if current.patient != prior.patient:
                raise malformed(table, "expected two images of one patient", "previous_dicom_id")
            key = (
                f"{current.key}-{prior.key}"
                if samples.get(current.key, current).extra
                else current.key
            )
            samples[key] = dataclasses.replace(
                current, key=key, extra={"change": change, "prior": prior.key}
            )
            samples.setdefault(prior.key, prior)
            rows.kept += 1
        return Plan(
            self.corpus, Records(map(Record, samples.values())), self.labels, rows, folders=allowed
        )


def _read_change(row: Mapping[str, str], table: Path) -> dict[str, str]:
    """Return the change of each labelled finding. Raises CorpusError for another value."""
    change = {
        label: row[column(label)].strip().lower() for label in LABELS if row[column(label)].strip()
    }
    for label, value in change.items():
        if value not in CHANGES:
            raise malformed(
                table, f"expected one of {', '.join(CHANGES)}, or nothing", column(label)
            )
    return change


def _sample(name: str, table: Path, images: Path, suffix: str, deid: Deidentifier) -> Sample:
    match = _PATH.fullmatch(name)
    if match is None:
        raise malformed(table, "expected paths like p10/p10000032/s50414267/IMAGE", "dicom_id")
    subject, study, image = match.groups()
    return Sample(
        key=deid.image(image),
        corpus=MSCXRT.corpus,
        split="test",
        patient=deid.patient(subject),
        study=deid.study(subject, study),
        image=images / "files" / f"{name}{suffix}",
    )
