"""MELINDA (2021): figures of articles with captions and experiment methods. Data card:
`data_cards/melinda.md`.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal, get_args

from medvl.common.config_io import check_choice
from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.figures import SplitRule, apply_split_rule, figure_sections
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, find_file, malformed, read_table
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.schema import Sample

Level = Literal["i_meth", "p_meth", "i_meth_label", "p_meth_label"]
"""Method of detecting the interaction or the participant, in fine (85 and 45) or coarse classes
(15 and 7).
"""
SPLITS = ("train", "dev", "test")

_FILE = re.compile(r"[^/\\]{1,200}\.(?:png|jpe?g)", re.IGNORECASE)
_ARTICLE = re.compile(r"PMC\d+|(?<!\d)\d{7,8}(?!\d)")
_IDS = ("pmcid", "pmc", "pmid", "ID", "id")


@register_corpus("melinda")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MELINDA(Corpus):
    """Convert MELINDA: figures with captions and the methods of their experiments."""

    counts: ClassVar[Mapping[str, int]] = {"images": 5_371}
    """Figures with captions of all splits."""

    root: Path
    """folder with train.csv, dev.csv, test.csv and melinda_images/."""
    level: Level = "i_meth_label"
    """column whose classes are the labels."""
    splits: SplitRule = "official"
    """as in roco."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of MELINDA from its tables; no image is opened. A row that repeats
        another of its split is left out, counted as `duplicate`.

        Raises CorpusError when a table is missing or does not match the data card; SplitError when
        `splits` is "official" and an article is in two splits; ConfigError when an option is
        unknown.
        """
        root = self.root
        check_choice(self.level, get_args(Level), "level")
        allowed = access.folders(root)
        find_file(root, "train.csv")
        classes = tuple(sorted({row[self.level].strip() for _, row in _rows(root, allowed)}))
        records = Records()
        warnings = Counter[str]()
        rows = RowCounts()
        keys = set[str]()
        for split, row in rows.reading(_rows(root, allowed)):
            figure = row["figure_file"].strip()
            methods = {name: row[name].strip() for name in get_args(Level)}
            key = deid.image(f"{split} {figure} {row['caption']} {list(methods.values())}")
            if key in keys:
                rows.exclude("duplicate")
                continue
            keys.add(key)
            patient = deid.patient(_article(row, figure))
            sample = Sample(
                key=key,
                corpus=self.corpus,
                split=split,
                patient=patient,
                study=deid.study(patient, figure),
                image=root / "melinda_images" / figure,
                sections=figure_sections(row["caption"], None, warnings),
                labels={name: int(name == methods[self.level]) for name in classes},
                extra=methods,
            )
            records.append(Record(sample))
            rows.kept += 1
        return apply_split_rule(
            Plan(self.corpus, records, classes, rows, warnings, allowed), self.splits, SPLITS
        )


def _rows(root: Path, allowed: InputFolders) -> Iterator[tuple[str, dict[str, str]]]:
    for split in SPLITS:
        table = root / f"{split}.csv"
        if not table.is_file():
            continue
        for row in read_table(table, ("figure_file", "caption", *get_args(Level)), allowed):
            if not _FILE.fullmatch(row["figure_file"].strip()):
                raise malformed(table, "expected the name of a PNG or JPEG file", "figure_file")
            if not all(row[level].strip() for level in get_args(Level)):
                raise malformed(
                    table, "expected a class in each of the four columns of methods", "i_meth"
                )
            yield split, row


def _article(row: Mapping[str, str], figure: str) -> str:
    """Return the article of a figure from an id column or the file name; the file where neither
    names one.
    """
    for value in (*(row[name] for name in _IDS if name in row), figure):
        match = _ARTICLE.search(value)
        if match is not None:
            return match[0]
    return figure
