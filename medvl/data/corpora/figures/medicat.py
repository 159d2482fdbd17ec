"""MedICaT (2020): figures of papers with captions and inline references. Data card:
`data_cards/medicat.md`.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.figures import figure_sections, read_references
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, find_file, malformed, read_json_lines
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split, parse_fractions
from medvl.schema import Sample

_TABLE = "s2_full_figures_oa_nonroco_combined_medical_top4_public.jsonl"
_TABLES = (_TABLE, f"{_TABLE}.gz", "sample.jsonl")
_FIELDS = ("pdf_hash", "fig_uri", "s2_caption", "radiology")
_SUBCAPTIONS = "subcaptions_public.jsonl"
# used as file names
_HASH = re.compile(r"[0-9a-f]{40}")
_URI = re.compile(r"[\w .()+-]{1,120}\.(?:png|jpg)")


@register_corpus("medicat")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MedICaT(Corpus):
    """Convert MedICaT, figures with captions and the sentences that refer to them."""

    counts: ClassVar[Mapping[str, int]] = {"images": 217_060}
    """Images of the full release."""

    root: Path
    """folder of the release: the table of figures and figures/."""
    radiology_only: bool = False
    """only figures that the release classifies as radiology."""
    splits: tuple[str, ...] = ("train=0.8", "validate=0.1", "test=0.1")
    """fractions of the splits, by article."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of MedICaT from its tables; no image is opened.

        Raises CorpusError when a table is missing or does not match the data card; ConfigError when
        the fractions do not sum to one.
        """
        root = self.root
        allowed = access.folders(root)
        fractions = parse_fractions(self.splits)
        table = find_file(root, *_TABLES)
        compound = _read_compound(root / _SUBCAPTIONS, allowed)
        rows = RowCounts()
        warnings = Counter[str]()
        seen: set[tuple[str, str]] = set()
        records = Records()
        for number, row in rows.reading(read_json_lines(table, _FIELDS, allowed)):
            article = _text(row, "pdf_hash")
            file = _text(row, "fig_uri")
            if not _HASH.fullmatch(article) or not _URI.fullmatch(file):
                raise malformed(
                    f"{table}, line {number}",
                    "expected a hash and a file name in fig_uri",
                    "fig_uri",
                )
            if (article, file) in seen:
                rows.exclude("duplicate_line")
                continue
            seen.add((article, file))
            if self.radiology_only and row["radiology"] is not True:
                rows.exclude("not_radiology")
                continue
            patient = deid.patient(article)
            name = f"{article}_{file}"
            sample = Sample(
                key=deid.image(name),
                corpus=self.corpus,
                split=hash_split(patient, fractions),
                patient=patient,
                study=deid.study(article, file),
                image=root / "figures" / name,
                sections=figure_sections(
                    _caption(row),
                    read_references(row, "s2orc_references", f"{table}, line {number}"),
                    warnings,
                ),
                extra=_extra(row, (article, _text(row, "fig_key")) in compound),
            )
            records.append(Record(sample))
            rows.kept += 1
        return Plan(self.corpus, records, (), rows, warnings, allowed)


def _caption(row: Mapping[str, Any]) -> str:
    """Return the caption extracted by Semantic Scholar or, where it found none, the one of
    S2ORC.
    """
    return _text(row, "s2_caption") or _text(row, "s2orc_caption")


def _extra(row: Mapping[str, Any], compound: bool) -> dict[str, object]:
    """Return the release's classes of a figure, its licence, and whether annotators marked
    sub-figures.

    Only some figures were annotated for sub-figures, so the flag is present only where it is true.
    The DOI is left out because it would identify the article behind the hash.
    """
    extra: dict[str, object] = {
        name: row[name] for name in ("radiology", "scope") if isinstance(row.get(name), bool)
    }
    if kind := _text(row, "predicted_type"):
        extra["figure_type"] = kind
    info = row.get("oa_info")
    access = info.get("oa") if isinstance(info, dict) else None
    if isinstance(access, dict) and (licence := _text(access, "license")):
        extra["licence"] = licence
    return extra | ({"subfigures": True} if compound else {})


def _read_compound(path: Path, allowed: InputFolders) -> set[tuple[str, str]]:
    """Read (pdf_hash, fig_key) of the figures in which an annotator marked sub-figures."""
    if not path.is_file():
        return set()
    rows = (row for _, row in read_json_lines(path, ("pdf_hash", "fig_key", "answer"), allowed))
    return {
        (_text(row, "pdf_hash"), _text(row, "fig_key")) for row in rows if row["answer"] == "accept"
    }


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return value.strip() if isinstance(value, str) else ""
