"""ROCO (2018) and ROCOv2 (2023): figures of PubMed Central with their captions. Data card:
`data_cards/roco.md`.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.figures import (
    SplitRule,
    apply_split_rule,
    figure_sections,
    read_references,
)
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import (
    Plan,
    Record,
    find_file,
    malformed,
    read_json_lines,
    read_lines,
    read_table,
)
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

NAME_OTHERS = "roco-non-radiology"
NAME_V2 = "rocov2"
SPLITS = ("train", "validation", "test")
SPLITS_V2 = ("train", "valid", "test")

_ID = re.compile(r"ROCO_\d+")
_ID_V2 = re.compile(r"[A-Za-z0-9_-]{1,80}")  # used as a file name
_LICENCE = re.compile(r"CC0|CC[ -]BY(?:-NC)?(?:-SA|-ND)?")
_ARTICLE = re.compile(r"PMC\d+")
_FILE = re.compile(r"(PMC\d+)_([\w .()+,-]+)")  # used as a file name, so without slashes
_REFERENCES = tuple(f"roco_{split}_references.jsonl" for split in ("train", "val", "test"))


@register_corpus("roco")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ROCO(Corpus):
    """Convert ROCO or ROCOv2, figures with captions."""

    counts: ClassVar[Mapping[str, int]] = {"images": 81_807}
    """Rows of the published tables of all splits."""
    other_counts: ClassVar[Mapping[str, Mapping[str, int]]] = {
        NAME_OTHERS: {"images": 6_118},
        NAME_V2: {"images": 79_789},
    }
    """Name in the manifest -> counts, for the other figures and for ROCOv2."""

    root: Path
    """folder with train/, validation/ and test/ (ROCO) or train_captions.csv (ROCOv2)."""
    references: Path | None = None
    """folder of MedICaT's roco_*_references.jsonl: sentences about the figures of ROCO."""
    non_radiology: bool = False
    """convert the drawings and photographs of ROCO instead of its radiology."""
    splits: SplitRule = "official"
    """official refuses splits that share an article; repaired excludes the figures of shared
    articles from the training splits; by-article draws new splits.
    """

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of ROCO or ROCOv2 from its tables; no image is opened.

        Raises CorpusError when a table is missing or does not match the data card; SplitError when
        `splits` is "official" and an article is in two splits; ConfigError when an option is
        unknown, or not supported by ROCOv2.
        """
        root = self.root
        rows = RowCounts()
        warnings = Counter[str]()
        allowed = access.folders(root, *([self.references] if self.references else []))
        if any((root / f"{split}_captions.csv").is_file() for split in SPLITS_V2):
            if self.references is not None or self.non_radiology:
                field = "references" if self.references is not None else "non_radiology"
                raise ConfigError(
                    f"ROCOv2 ({root}) has no references or non-radiology figures",
                    "unsupported",
                    field=field,
                )
            figures = _read_v2(root, rows, allowed)
            return apply_split_rule(
                _plan(NAME_V2, figures, deid, rows, warnings, allowed), self.splits, SPLITS_V2
            )
        base = root / "data" if (root / "data").is_dir() else root
        name = NAME_OTHERS if self.non_radiology else self.corpus
        figures = _read_v1(
            base,
            "non-radiology" if self.non_radiology else "radiology",
            self.references,
            rows,
            allowed,
        )
        return apply_split_rule(
            _plan(name, figures, deid, rows, warnings, allowed), self.splits, SPLITS
        )

    @classmethod
    def full_counts(cls, release: str) -> Mapping[str, int]:
        return cls.other_counts.get(release, cls.counts)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Origin of a figure."""

    article: str
    """Id in PubMed Central: PMC and a number."""
    file: str = ""
    """File name of the figure, where known: the article's id, `_`, and the name in the article."""
    licence: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Figure:
    """A figure in the tables of either release."""

    id: str
    split: str
    caption: str
    image: Path
    source: _Source | None
    terms: Mapping[str, list[str]]
    references: list[str] = dataclasses.field(default_factory=list)


def _plan(
    name: str,
    figures: Iterable[_Figure],
    deid: Deidentifier,
    rows: RowCounts,
    warnings: Counter[str],
    allowed: InputFolders,
) -> Plan:
    records = Records()
    for figure in figures:
        if figure.source is None:
            rows.exclude("no_article")  # splits are by article
            continue
        extra: dict[str, object] = {field: terms for field, terms in figure.terms.items() if terms}
        if figure.source.licence:
            extra["licence"] = figure.source.licence
        sample = Sample(
            key=deid.image(figure.id),
            corpus=name,
            split=figure.split,
            patient=deid.patient(figure.source.article),
            study=deid.study(figure.source.article, figure.id),
            image=figure.image,
            sections=figure_sections(figure.caption, figure.references, warnings),
            extra=extra,
        )
        records.append(Record(sample))
        rows.kept += 1
    return Plan(name, records, (), rows, warnings, allowed)


def _read_v1(
    base: Path, kind: str, references: Path | None, rows: RowCounts, allowed: InputFolders
) -> Iterator[_Figure]:
    folders = {split: base / split / kind for split in SPLITS if (base / split / kind).is_dir()}
    if not folders:
        names = ", ".join(f"{split}/{kind}" for split in SPLITS)
        raise CorpusError(f"{base} contains none of {names}: see the data card", "not_found")
    sentences = _read_references(references, allowed)
    for split, folder in folders.items():
        sources = _read_sources(folder, allowed)
        cuis, keywords = (
            _read_terms(folder / name, allowed) for name in ("cuis.txt", "keywords.txt")
        )
        images = folder / "images"
        present = {path.name for path in images.iterdir()} if images.is_dir() else set[str]()
        lines = (
            (figure, " ".join(fields))
            for figure, fields in _read_lines(folder / "captions.txt", allowed)
        )
        for figure, caption in _first_captions(lines, rows).items():
            source = sources.get(figure)
            file = source.file if source else ""
            yield _Figure(
                id=figure,
                split=split,
                caption=caption,
                image=images / (file if file in present else f"{figure}.jpg"),
                source=source,
                terms={"cuis": cuis.get(figure, []), "keywords": keywords.get(figure, [])},
                references=sentences.get(file, []),
            )


def _read_v2(root: Path, rows: RowCounts, allowed: InputFolders) -> Iterator[_Figure]:
    sources = _read_licences_v2(root / "license_information.csv", allowed)
    for split in SPLITS_V2:
        table = root / f"{split}_captions.csv"
        if not table.is_file():
            continue
        folders = (f"{split}_images/{split}", f"{split}_images", split)
        images = root / next((name for name in folders if (root / name).is_dir()), split)
        concepts = root / f"{split}_concepts.csv"
        concept_rows = read_table(concepts, ("ID", "CUIs"), allowed) if concepts.is_file() else ()
        cuis = {row["ID"]: row["CUIs"].split(";") for row in concept_rows}
        lines = (
            (row["ID"], row["Caption"]) for row in read_table(table, ("ID", "Caption"), allowed)
        )
        for figure, caption in _first_captions(lines, rows).items():
            if not _ID_V2.fullmatch(figure):
                raise malformed(table, "expected an ID like ROCOv2_2023_train_000001", "ID")
            yield _Figure(
                id=figure,
                split=split,
                caption=caption,
                image=images / f"{figure}.jpg",
                source=sources.get(figure),
                terms={"cuis": [term.strip() for term in cuis.get(figure, []) if term.strip()]},
            )


def _first_captions(lines: Iterable[tuple[str, str]], rows: RowCounts) -> dict[str, str]:
    """Return id -> first caption; the tables repeat some lines."""
    captions: dict[str, str] = {}
    for figure, caption in rows.reading(lines):
        first = captions.get(figure)
        if first is None:
            captions[figure] = caption
        else:
            rows.exclude("duplicate_line" if caption == first else "second_caption_ignored")
    return captions


def _read_sources(folder: Path, allowed: InputFolders) -> dict[str, _Source]:
    """Read figure -> source from licences.txt and, where that has no entry, from dlinks.txt."""
    sources: dict[str, _Source] = {}
    if find_file(folder, "licences.txt", "dlinks.txt").name == "licences.txt":
        for row in read_table(folder / "licences.txt", ("ROCO_ID", "PMC_ID", "CC"), allowed):
            match = _FILE.fullmatch(row["PMC_ID"].strip())
            if match:
                sources[row["ROCO_ID"]] = _Source(
                    article=match[1], file=match[0], licence=row["CC"].strip()
                )
    if (folder / "dlinks.txt").is_file():
        for figure, fields in _read_lines(folder / "dlinks.txt", allowed):
            article = _ARTICLE.search(fields[0]) if fields else None
            if figure not in sources and article is not None:
                match = _FILE.fullmatch(f"{article[0]}_{fields[-1]}")
                sources[figure] = _Source(article=article[0], file=match[0] if match else "")
    return sources


def _read_licences_v2(path: Path, allowed: InputFolders) -> dict[str, _Source]:
    """Read figure -> source; the article's id is in a column of its own or in the link."""
    sources = {}
    for row in read_table(path, ("ID",), allowed):
        text = " ".join(value for column, value in row.items() if column != "ID")
        article = _ARTICLE.search(text)
        licence = _LICENCE.search(text)
        if article is not None:
            sources[row["ID"]] = _Source(article=article[0], licence=licence[0] if licence else "")
    return sources


def _read_terms(path: Path, allowed: InputFolders) -> dict[str, list[str]]:
    """Read figure -> terms; empty when the file is missing, as in some copies."""
    if not path.is_file():
        return {}
    return {
        figure: [term for term in fields if term] for figure, fields in _read_lines(path, allowed)
    }


def _read_lines(path: Path, allowed: InputFolders) -> Iterator[tuple[str, list[str]]]:
    """Yield (id, other fields) of a tab-separated table, with surrounding white space removed."""
    for number, line in enumerate(read_lines(path, allowed), start=1):
        figure, *fields = (field.strip() for field in line.split("\t"))
        if not figure and not any(fields):
            continue
        if not _ID.fullmatch(figure):
            raise malformed(f"{path}, line {number}", "expected an id like ROCO_00001 first")
        yield figure, fields


def _read_references(folder: Path | None, allowed: InputFolders) -> dict[str, list[str]]:
    """Read figure file -> sentences that refer to it."""
    if folder is None:
        return {}
    paths = [folder / name for name in _REFERENCES if (folder / name).is_file()]
    if not paths:
        message = (
            f"{folder} contains none of {', '.join(_REFERENCES)}: expected MedICaT's "
            f"roco_references"
        )
        raise CorpusError(message, "not_found", field="references")
    sentences: dict[str, list[str]] = {}
    for path in paths:
        for number, row in read_json_lines(path, ("roco_image_id", "gorc_references"), allowed):
            references = read_references(row, "gorc_references", f"{path}, line {number}")
            sentences.setdefault(str(row["roco_image_id"]), []).extend(references)
    return sentences
