"""Open-i (Indiana University): chest radiographs with reports. Data card: `data_cards/openi.md`."""

import dataclasses
import gzip
import io
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import ClassVar
from xml.etree import ElementTree

from medvl.common.config_io import check_choice
from medvl.common.untrusted import ANYWHERE, InputFolders, parse_xml, read_limited
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, malformed, read_table
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.reports.cleaning import clean_text
from medvl.data.reports.sentences import join_texts, one_line
from medvl.data.splits import hash_split, parse_fractions
from medvl.errors import CorpusError
from medvl.schema import Sample

# Open-i: chest X-ray reports of Indiana University as XML, one file per report, in a folder or
# `NLMCXR_reports.tgz`.
#
# 3,955 reports; each has COMPARISON, INDICATION, FINDINGS and IMPRESSION (any may be empty), two
# lists of MeSH terms and 0 to 5 images. Text removed for privacy is masked as `XXXX`, which is
# kept.

MAX_XML_BYTES = 1 << 20
"""Largest accepted report; the longest of the collection has 25 kB."""
MAX_ARCHIVE_BYTES = 1 << 28
"""Largest accepted unpacked archive; that of the collection has 40 MB."""

_ID = re.compile(r"CXR\d{1,6}")
_IMAGE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # used as a file name, so without dots and slashes


@dataclasses.dataclass(frozen=True, slots=True)
class OpeniImage:
    """One image of a report; its file is `{id}.png`."""

    id: str
    caption: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpeniReport:
    """One report."""

    id: str
    """`CXR` and a number; also used for patient and study, as the collection has no patient ids."""
    sections: Mapping[str, str]
    """findings, impression, indication, comparison; those without text are left out."""
    empty_sections: tuple[str, ...]
    mesh_major: tuple[str, ...]
    """Terms given by two readers, `Cardiomegaly/borderline`; `normal` for a normal image."""
    mesh_automatic: tuple[str, ...]
    """Terms assigned by a program."""
    images: tuple[OpeniImage, ...]


def iter_openi_reports(
    path: Path | str, *, folders: InputFolders = ANYWHERE
) -> Iterator[OpeniReport]:
    """Yield the reports below a folder, sorted by file name, or in a `.tgz`, in its order, without
    unpacking to disk.

    Raises CorpusError when there is no report, a report is damaged, too large or has a document
    type (whose entities can expand a small file to gigabytes), or the archive contains links, paths
    outside it, or far too large files.
    """
    path = Path(path)
    count = 0
    for name, data in (
        _archive_files(path, folders) if path.is_file() else _folder_files(path, folders)
    ):
        yield _parse(data, f"{path}: {name}")
        count += 1
    if not count:
        raise CorpusError(
            f"{path} has no XML reports: expected NLMCXR_reports.tgz, or the folder in it", "empty"
        )


def _parse(data: bytes, where: str) -> OpeniReport:
    try:
        return _report(parse_xml(data))
    except ElementTree.ParseError as error:
        message = f"{where}, line {error.position[0]}: not well-formed XML: download it again"
        raise CorpusError(message, "malformed") from None
    except CorpusError as error:
        raise error.prefixed(f"{where} is not an Open-i report: ") from None
    except (ValueError, LookupError):
        raise CorpusError(
            f"{where} is not an Open-i report: unknown encoding", "unsupported"
        ) from None


def _report(root: ElementTree.Element) -> OpeniReport:
    id_element = root.find("uId")
    report_id = id_element.get("id", "") if id_element is not None else ""
    if not _ID.fullmatch(report_id):
        raise CorpusError("expected an id like CXR1 (uId)", "malformed", field="uId")
    sections: dict[str, str] = {}
    empty = []
    for element in root.iter("AbstractText"):
        name = element.get("Label", "").lower()
        text = _text(element)
        if text:
            sections[name] = join_texts([sections.get(name, ""), text])
        else:
            empty.append(name)
    return OpeniReport(
        id=report_id,
        sections=sections,
        empty_sections=tuple(name for name in empty if name not in sections),
        mesh_major=_terms(root, "major"),
        mesh_automatic=_terms(root, "automatic"),
        images=tuple(_image(element) for element in root.iter("parentImage")),
    )


def _image(element: ElementTree.Element) -> OpeniImage:
    image_id = element.get("id", "")
    if not _IMAGE_ID.fullmatch(image_id):
        raise CorpusError(
            "expected a file name as the id of an image (parentImage)",
            "malformed",
            field="parentImage",
        )
    return OpeniImage(image_id, _text(element.find("caption")) or None)


def _terms(root: ElementTree.Element, kind: str) -> tuple[str, ...]:
    return tuple(filter(None, (_text(element) for element in root.iterfind(f"MeSH/{kind}"))))


def _text(element: ElementTree.Element | None) -> str:
    return "" if element is None else one_line(clean_text("".join(element.itertext())))


def _folder_files(folder: Path, folders: InputFolders) -> Iterator[tuple[str, bytes]]:
    if not folder.is_dir():
        raise CorpusError(
            f"{folder} does not exist: give NLMCXR_reports.tgz, or the folder in it", "not_found"
        )
    # 2.xml before 10.xml
    paths = sorted(folder.rglob("*.xml"), key=lambda path: (len(path.name), path.name))
    for path in paths:
        yield path.name, _read_bounded(path, folders)


def _archive_files(path: Path, folders: InputFolders) -> Iterator[tuple[str, bytes]]:
    try:
        with (
            folders.open(path, CorpusError) as file,
            gzip.GzipFile(fileobj=file) as unpacked,
            tarfile.open(fileobj=_Bounded(unpacked), mode="r|") as archive,
        ):
            for member in archive:
                name = PurePosixPath(member.name)
                if member.isdir():
                    continue
                if not member.isfile() or name.is_absolute() or ".." in name.parts:
                    raise CorpusError(
                        f"{path} contains a link or an outside path: not NLMCXR_reports.tgz",
                        "malformed",
                    )
                if member.size > MAX_XML_BYTES:
                    raise CorpusError(
                        f"{path} has a file of {member.size} bytes: not NLMCXR_reports.tgz",
                        "too_large",
                    )
                content = archive.extractfile(member)
                if name.suffix == ".xml" and content is not None:
                    yield name.name, content.read()
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, OSError) as error:
        message = (
            f"{path} is not a complete .tgz archive ({type(error).__name__}): download it again"
        )
        raise CorpusError(message, "malformed") from error


class _Bounded(io.BufferedIOBase):
    """Stream for tarfile that limits the unpacked size, including headers."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self._left = MAX_ARCHIVE_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` unpacked bytes. Raises CorpusError beyond the limit and for an
        unknown size.
        """
        if size is None or not 0 <= size <= self._left:
            raise CorpusError(
                "the archive is far larger than the collection: not NLMCXR_reports.tgz", "too_large"
            )
        self._left -= size
        return self._file.read(size)


def _read_bounded(path: Path, folders: InputFolders) -> bytes:
    try:
        with folders.open(path, CorpusError) as file:
            return read_limited(file, MAX_XML_BYTES, CorpusError)
    except OSError as error:
        raise CorpusError(f"{path} cannot be read ({error.strerror})", "unreadable") from None


NO_FINDING = "No Finding"
LABELS = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Emphysema", "Fibrosis", "Hernia",
    "Infiltration", "Mass", NO_FINDING, "Nodule", "Pleural Effusion", "Pleural Thickening",
    "Pneumonia", "Pneumothorax",
)  # fmt: skip
"""The 14 findings of ChestX-ray14 and No Finding (Li, Wang and Luo, arXiv 2009.01523, who call
it Normal).
"""

_LABEL_OF = {
    "pulmonary atelectasis": "Atelectasis", "cardiomegaly": "Cardiomegaly",
    "consolidation": "Consolidation", "pulmonary edema": "Edema", "emphysema": "Emphysema",
    "pulmonary emphysema": "Emphysema", "bullous emphysema": "Emphysema", "fibrosis": "Fibrosis",
    "pulmonary fibrosis": "Fibrosis", "hernia, hiatal": "Hernia", "hernia, diaphragmatic": "Hernia",
    "infiltrate": "Infiltration", "mass": "Mass", "nodule": "Nodule",
    "pleural effusion": "Pleural Effusion", "thickening/pleura": "Pleural Thickening",
    "pneumonia": "Pneumonia", "pneumothorax": "Pneumothorax", "hydropneumothorax": "Pneumothorax",
    "hemopneumothorax": "Pneumothorax",
}  # fmt: skip
"""MeSH heading, alone or with its first qualifier -> label."""
_NOT_INDEXED = "no indexing"
_REPORTS = ("ecgen-radiology", "NLMCXR_reports.tgz")
_IMAGES = "NLMCXR_png"
_PROJECTIONS = "indiana_projections.csv"
_VIEWS = {"Frontal": "FRONTAL", "Lateral": "LATERAL"}
_NAME = re.compile(r"(?:CXR)?(\d+)_(?:\d+_)?(IM-[\d-]+)(?:\.dcm)?(?:\.png)?")


@register_corpus("openi")
@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenI(Corpus):
    """Convert Open-i, chest radiographs of Indiana University with reports and 15 labels from their
    MeSH terms.
    """

    labels: ClassVar[tuple[str, ...]] = LABELS
    counts: ClassVar[Mapping[str, int]] = {"images": 7_470}
    """Images of the full collection."""

    root: Path
    """folder with ecgen-radiology/ or NLMCXR_reports.tgz."""
    images: Path | None = None
    """folder of the PNG files; default NLMCXR_png in root."""
    views: tuple[str, ...] = ()
    """keep only FRONTAL or LATERAL images; needs the table of projections."""
    splits: tuple[str, ...] = ("train=0.8", "validate=0.1", "test=0.1")
    """fractions of the splits, by report."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of Open-i from its reports; no image is opened. Labels come from
        `mesh_labels`.

        Raises CorpusError when there is no report, one is damaged, or `views` lack their table;
        ConfigError when a view is unknown or the fractions do not sum to one.
        """
        root = self.root
        images = self.images if self.images is not None else root / _IMAGES
        allowed = access.folders(root, images)
        fractions = parse_fractions(self.splits)
        for name in self.views:
            check_choice(name, tuple(_VIEWS.values()), "views")
        projections = _read_projections(root / _PROJECTIONS, allowed)
        if self.views and not projections:
            raise CorpusError(
                f"views need {root / _PROJECTIONS}: see the data card", "not_found", field="views"
            )
        files = {_image_id(path.name): path for path in images.iterdir()} if images.is_dir() else {}
        rows = RowCounts()
        warnings = Counter[str]()
        records = Records()
        for report in iter_openi_reports(_find_reports(root), folders=allowed):
            warnings["report_without_image"] += not report.images
            warnings["no_findings_or_impression"] += (
                not {"findings", "impression"} & report.sections.keys()
            )
            patient = deid.patient(report.id)
            labels = mesh_labels(report.mesh_major)
            warnings["not_indexed"] += not labels
            for image in rows.reading(report.images):
                view = projections.get(_image_id(image.id))
                if self.views and view not in self.views:
                    rows.exclude("view")
                    continue
                sample = Sample(
                    key=deid.image(image.id),
                    corpus=self.corpus,
                    split=hash_split(patient, fractions),
                    patient=patient,
                    study=deid.study(report.id, report.id),
                    image=files.get(_image_id(image.id), images / f"{image.id}.png"),
                    sections=report.sections,
                    labels=labels,
                    view=view,
                    extra={
                        "mesh_major": list(report.mesh_major),
                        "mesh_automatic": list(report.mesh_automatic),
                    },
                )
                records.append(Record(sample))
                rows.kept += 1
        return Plan(self.corpus, records, self.labels, rows, +warnings, allowed)


def mesh_labels(terms: Iterable[str]) -> dict[str, int]:
    """Return label -> 1 or 0 from the MeSH terms that two readers assigned
    (`OpeniReport.mesh_major`).

    No Finding is 1 without any of the 14 findings, even with others such as a granuloma; the MeSH
    term `normal` is narrower. A report that was not indexed has no labels.
    """
    parts = [term.lower().split("/") for term in terms]
    if not parts or parts == [[_NOT_INDEXED]]:
        return {}
    headings = {"/".join(part[:depth]) for part in parts for depth in (1, 2)}
    present = {_LABEL_OF[heading] for heading in headings & _LABEL_OF.keys()} or {NO_FINDING}
    return {label: int(label in present) for label in LABELS}


def _find_reports(root: Path) -> Path:
    for name in _REPORTS:
        if (root / name).exists():
            return root / name
    raise CorpusError(
        f"{root} contains none of {', '.join(_REPORTS)}: see the data card", "not_found"
    )


def _image_id(name: str) -> tuple[str, ...]:
    """Return an image's id, such as (12, IM-0001-3001), from its id in a report or its file name
    in any copy.
    """
    match = _NAME.fullmatch(name)
    return match.groups() if match else (name,)


def _read_projections(path: Path, allowed: InputFolders) -> dict[tuple[str, ...], str]:
    """Read image id -> view from the table in the copy on Kaggle.

    The captions of the reports cannot be used: they describe all images of a study at once, with
    masks ("XXXX and lateral"), even where a study has one image.
    """
    if not path.is_file():
        return {}
    views = {}
    for row in read_table(path, ("filename", "projection"), allowed):
        if row["projection"] not in _VIEWS:
            raise malformed(
                path, f"expected one of {', '.join(_VIEWS)} for projection", "projection"
            )
        views[_image_id(row["filename"])] = _VIEWS[row["projection"]]
    return views
