"""ODIR-5K: colour fundus photographs with a doctor's keywords. Layout, labels and access:
`data_cards/odir.md`.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, find_file, malformed, read_table
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier, cap_age
from medvl.data.splits import hash_split, parse_fractions
from medvl.errors import CorpusError
from medvl.schema import Sample

_KEYWORDS = {
    "Normal": "normal fundus",
    "Diabetic Retinopathy": "proliferative (diabetic )?retinopathy|diabetic retinopathy",
    "Glaucoma": "glaucoma",
    "Cataract": "cataract",
    "AMD": "age-related macular degeneration",
    "Hypertensive Retinopathy": "hypertensive retinopathy",
    "Pathological Myopia": "pathological myopia|myopic maculopathy|myopi[ac] retinopathy",
}
"""Label -> pattern within a keyword."""
_PATTERNS = {label: re.compile(pattern) for label, pattern in _KEYWORDS.items()}
_DOUBT = "suspected"
_NO_FUNDUS = ("no fundus image", "anterior segment image")
_COLUMNS = (
    *("ID", "Patient Age", "Patient Sex", "Left-Diagnostic Keywords"),
    *("Right-Diagnostic Keywords", "filename"),
)
_FILE = re.compile(r"(?P<patient>\d{1,6})_(?P<eye>left|right)\.(?:jpe?g|png)", re.IGNORECASE)
_FOLDERS = (
    *("preprocessed_images", "ODIR-5K/ODIR-5K/Training Images", "ODIR-5K/Training Images"),
    *("ODIR-5K_Training_Dataset", "Training Images"),
)
_SEPARATOR = re.compile("[,，]")
_SEXES = {"Female": "F", "Male": "M"}


@register_corpus("odir")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ODIR(Corpus):
    """Convert ODIR-5K: colour fundus photographs of both eyes with a doctor's keywords."""

    labels: ClassVar[tuple[str, ...]] = tuple(_KEYWORDS)
    color: ClassVar[bool] = True

    root: Path
    """folder with full_df.csv and a folder of images."""
    images: Path | None = None
    """folder of the images; default preprocessed_images/ of root, else the folder of the originals.
    """
    splits: tuple[str, ...] = ("train=0.7", "validate=0.1", "test=0.2")
    """fractions of the patients in the splits, by hash; the release has none with labels."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan a sample of each eye from the table; no image is opened.

        Raises CorpusError when the table or the folder of images is missing, or a row does not
        match the data card; ConfigError for impossible fractions.
        """
        shares = parse_fractions(self.splits)
        folder = self._image_folder()
        allowed = access.folders(self.root, folder)
        table = find_file(self.root, "full_df.csv")
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        for row in rows.reading(read_table(table, _COLUMNS, allowed)):
            match = _FILE.fullmatch(row["filename"])
            if match is None or match["patient"] != row["ID"]:
                raise malformed(
                    table,
                    f"expected a name like 7_left.jpg with the ID, got {row['filename']!r}",
                    "filename",
                )
            eye = match["eye"].capitalize()
            keywords = _keywords(row[f"{eye}-Diagnostic Keywords"])
            if not keywords or any(name in keywords for name in _NO_FUNDUS):
                rows.exclude("no_fundus" if keywords else "no_keywords")
                continue
            warnings["doubtful_keywords"] += any(_DOUBT in keyword for keyword in keywords)
            patient = deid.patient(row["ID"])
            sample = Sample(
                key=deid.image(row["filename"]),
                corpus=self.corpus,
                split=hash_split(patient, shares),
                patient=patient,
                study=deid.study(row["ID"], "both eyes"),
                image=folder / row["filename"],
                sections={"impression": ", ".join(keywords)},
                labels=_labels(keywords),
                sex=_SEXES.get(row["Patient Sex"]),
                age=cap_age(row["Patient Age"]),
                extra={"eye": match["eye"]},
            )
            records.append(Record(sample))
            rows.kept += 1
        return Plan(self.corpus, records, self.labels, rows, +warnings, allowed)

    def _image_folder(self) -> Path:
        folders = [self.root / name for name in _FOLDERS] if self.images is None else [self.images]
        image_folder = next((folder for folder in folders if folder.is_dir()), None)
        if image_folder is None:
            message = (
                f"{self.root} has none of {', '.join(_FOLDERS)}; name the folder with --images"
            )
            raise CorpusError(message, "not_found", field="images")
        return image_folder


def _keywords(cell: str) -> list[str]:
    """Return the keywords of an eye, in lower case, each once."""
    parts = (" ".join(part.lower().split()) for part in _SEPARATOR.split(cell))
    return list(dict.fromkeys(part for part in parts if part))


def _labels(keywords: list[str]) -> Mapping[str, int]:
    """Return 1 for a label with a keyword, -1 where all of its keywords are doubted, else 0."""
    labels = {}
    for label, pattern in _PATTERNS.items():
        matches = [keyword for keyword in keywords if pattern.search(keyword)]
        certain = any(_DOUBT not in keyword for keyword in matches)
        labels[label] = int(certain) if certain or not matches else -1
    return labels
