"""ROCO (2018) and ROCOv2 (2023): figures of PubMed Central with their captions. Data card: `data_cards/roco.md`."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from medvl.data.corpora.common.figures import SplitRule, figure_sections, settle_splits
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record, find_file, open_text, read_table
from medvl.data.corpora.table import read_json_lines
from medvl.data.privacy.deidentify import Deidentifier
from medvl.errors import CorpusError
from medvl.schema import Sample

NAME, NAME_OTHERS, NAME_V2 = "roco", "roco-non-radiology", "rocov2"
SPLITS, SPLITS_V2 = ("train", "validation", "test"), ("train", "valid", "test")
COUNTS: Mapping[str, Mapping[str, int]] = {
    NAME: {"images": 81_807},
    NAME_OTHERS: {"images": 6_118},
    NAME_V2: {"images": 79_789},
}
"""Corpus name -> rows of the published tables, over all splits: what `medvl verify --full` compares with."""

_ID = re.compile(r"ROCO_\d+")
_ID_V2 = re.compile(r"[A-Za-z0-9_-]{1,80}")  # names a file
_LICENCE = re.compile(r"CC0|CC[ -]BY(?:-NC)?(?:-SA|-ND)?")
_ARTICLE = re.compile(r"PMC\d+")
_FILE = re.compile(r"(PMC\d+)_([\w .()+,-]+)")  # names a file too: no slashes
_REFERENCES = tuple(f"roco_{split}_references.jsonl" for split in ("train", "val", "test"))


def plan(
    root: Path,
    deid: Deidentifier,
    *,
    references: Path | None = None,
    non_radiology: bool = False,
    splits: SplitRule = "official",
) -> Plan:
    """Everything that the tables say about the figures; no image is opened.

    Args:
        root: of ROCO, the folder that holds `train/`, `validation/` and `test/`, or its parent `data/`'s; of ROCOv2,
            the folder that holds `train_captions.csv`. Which of the two it is shows by its files.
        deid: hashes articles and figures.
        references: folder of MedICaT's `roco_{train,val,test}_references.jsonl`, whose sentences about a figure become
            its further sections (the first ROCO only).
        non_radiology: the out-of-class figures (drawings, photographs) instead of the radiology (the first ROCO only).
        splits: what to do about articles that have figures in several published splits; see `settle_splits`.

    Raises:
        CorpusError: a table is missing or is not what the data card says.
        SplitError: `splits` is "official" and an article stands in two splits.
    """
    root, noticed = Path(root), Counter[str]()
    if any((root / f"{split}_captions.csv").is_file() for split in SPLITS_V2):
        if references is not None or non_radiology:
            raise CorpusError(f"{root} is ROCOv2, which has neither references nor figures outside radiology")
        return settle_splits(_plan(NAME_V2, _read_v2(root, noticed), deid, noticed), splits, SPLITS_V2)
    base = root / "data" if (root / "data").is_dir() else root
    name = NAME_OTHERS if non_radiology else NAME
    figures = _read_v1(base, "non-radiology" if non_radiology else "radiology", references, noticed)
    return settle_splits(_plan(name, figures, deid, noticed), splits, SPLITS)


def iter_samples(root: Path, *, deid: Deidentifier, splits: SplitRule = "official") -> Iterator[Sample]:
    """Samples of all splits. Raises CorpusError and SplitError."""
    for record in plan(root, deid, splits=splits).records:
        yield record.sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Where a figure comes from."""

    article: str
    """PMC and a number."""
    file: str = ""
    """Of the figure: the article's id, `_`, and its name in the article; where known."""
    licence: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Figure:
    """A figure as the tables of either release describe it."""

    id: str
    split: str
    caption: str
    image: Path
    source: _Source | None
    terms: Mapping[str, list[str]]
    references: list[str] = dataclasses.field(default_factory=list)


def _plan(name: str, figures: Iterable[_Figure], deid: Deidentifier, noticed: Counter[str]) -> Plan:
    excluded = Counter[str]()
    records = Records()
    for figure in figures:
        if figure.source is None:
            excluded["no_article"] += 1  # so it cannot be told which split it may stand in
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
            sections=figure_sections(figure.caption, figure.references, noticed),
            extra=extra,
        )
        records.append(Record(sample))
    return Plan(name, records, (), excluded, noticed)


def _read_v1(base: Path, kind: str, references: Path | None, noticed: Counter[str]) -> Iterator[_Figure]:
    folders = {split: base / split / kind for split in SPLITS if (base / split / kind).is_dir()}
    if not folders:
        raise CorpusError(f"{base} holds none of {', '.join(f'{split}/{kind}' for split in SPLITS)}: see the data card")
    said = _read_references(references)
    for split, folder in folders.items():
        sources = _read_sources(folder)
        cuis, keywords = _read_terms(folder / "cuis.txt"), _read_terms(folder / "keywords.txt")
        images = folder / "images"
        present = {path.name for path in images.iterdir()} if images.is_dir() else set[str]()
        lines = ((figure, " ".join(fields)) for figure, fields in _read_lines(folder / "captions.txt"))
        for figure, caption in _first_captions(lines, noticed).items():
            source = sources.get(figure)
            file = source.file if source else ""
            yield _Figure(
                id=figure,
                split=split,
                caption=caption,
                image=images / (file if file in present else f"{figure}.jpg"),
                source=source,
                terms={"cuis": cuis.get(figure, []), "keywords": keywords.get(figure, [])},
                references=said.get(file, []),
            )


def _read_v2(root: Path, noticed: Counter[str]) -> Iterator[_Figure]:
    sources = _read_licences_v2(root / "license_information.csv")
    for split in SPLITS_V2:
        table = root / f"{split}_captions.csv"
        if not table.is_file():
            continue
        folders = (f"{split}_images/{split}", f"{split}_images", split)
        images = root / next((name for name in folders if (root / name).is_dir()), split)
        concepts = root / f"{split}_concepts.csv"
        cuis = (
            {r["ID"]: r["CUIs"].split(";") for r in read_table(concepts, ("ID", "CUIs"))} if concepts.is_file() else {}
        )
        rows = ((row["ID"], row["Caption"]) for row in read_table(table, ("ID", "Caption")))
        for figure, caption in _first_captions(rows, noticed).items():
            if not _ID_V2.fullmatch(figure):
                raise CorpusError(f"{table}: an ID is not of the form ROCOv2_2023_train_000001")
            yield _Figure(
                id=figure,
                split=split,
                caption=caption,
                image=images / f"{figure}.jpg",
                source=sources.get(figure),
                terms={"cuis": [term.strip() for term in cuis.get(figure, []) if term.strip()]},
            )


def _first_captions(rows: Iterable[tuple[str, str]], noticed: Counter[str]) -> dict[str, str]:
    """Id -> caption: some lines are there twice."""
    captions: dict[str, str] = {}
    for figure, caption in rows:
        first = captions.get(figure)
        if first is None:
            captions[figure] = caption
        else:
            noticed["duplicate_line" if caption == first else "second_caption_ignored"] += 1
    return captions


def _read_sources(folder: Path) -> dict[str, _Source]:
    """Figure -> source, from licences.txt and, for those that it lacks, from dlinks.txt."""
    sources: dict[str, _Source] = {}
    if find_file(folder, "licences.txt", "dlinks.txt").name == "licences.txt":
        for row in read_table(folder / "licences.txt", ("ROCO_ID", "PMC_ID", "CC")):
            match = _FILE.fullmatch(row["PMC_ID"].strip())
            if match:
                sources[row["ROCO_ID"]] = _Source(article=match[1], file=match[0], licence=row["CC"].strip())
    if (folder / "dlinks.txt").is_file():
        for figure, fields in _read_lines(folder / "dlinks.txt"):
            article = _ARTICLE.search(fields[0]) if fields else None
            if figure not in sources and article is not None:
                match = _FILE.fullmatch(f"{article[0]}_{fields[-1]}")
                sources[figure] = _Source(article=article[0], file=match[0] if match else "")
    return sources


def _read_licences_v2(path: Path) -> dict[str, _Source]:
    """Figure -> source; the article's id stands in a column of its own and in the link."""
    sources = {}
    for row in read_table(path, ("ID",)):
        told = " ".join(value for column, value in row.items() if column != "ID")
        article, licence = _ARTICLE.search(told), _LICENCE.search(told)
        if article is not None:
            sources[row["ID"]] = _Source(article=article[0], licence=licence[0] if licence else "")
    return sources


def _read_terms(path: Path) -> dict[str, list[str]]:
    """Figure -> terms; nothing where the file is missing, as in some copies."""
    if not path.is_file():
        return {}
    return {figure: [term for term in fields if term] for figure, fields in _read_lines(path)}


def _read_lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(id, the other fields without surrounding white space) of a table whose fields are separated by tabs."""
    with open_text(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                figure, *fields = (field.strip() for field in line.split("\t"))
                if not figure and not any(fields):
                    continue
                if not _ID.fullmatch(figure):
                    raise CorpusError(f"{path}, line {number}: it does not begin with an id of the form ROCO_00001")
                yield figure, fields
        except UnicodeDecodeError:
            raise CorpusError(f"{path} is no text in UTF-8: fetch it again") from None


def _read_references(folder: Path | None) -> dict[str, list[str]]:
    """File of a figure -> the sentences that refer to it."""
    if folder is None:
        return {}
    paths = [folder / name for name in _REFERENCES if (folder / name).is_file()]
    if not paths:
        raise CorpusError(f"{folder} holds none of {', '.join(_REFERENCES)}: it should be MedICaT's roco_references")
    said: dict[str, list[str]] = {}
    for path in paths:
        for number, row in read_json_lines(path, ("roco_image_id", "gorc_references")):
            sentences = row["gorc_references"] or []
            if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
                raise CorpusError(f"{path}, line {number}: gorc_references is neither null nor a list of texts")
            said.setdefault(str(row["roco_image_id"]), []).extend(sentences)
    return said
