"""BIMCV-COVID19+ (2020). Layout, counts and access: `data_cards/bimcv-covid19.md`."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, report_text
from medvl.data.corpora.common.tables import Plan, Record, malformed, read_table
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.corpora.reports.padchest import read_translations
from medvl.data.privacy import Deidentifier
from medvl.data.splits import hash_split, parse_fractions
from medvl.schema import Sample

TABLE = "final_annotations.csv"
VIEWS = {"pa": "PA", "ap": "AP", "ll": "LATERAL", "lat": "LATERAL", "lateral": "LATERAL"}
"""View in the table or the file name -> view."""

_COLUMNS = ("file_path", "view", "report")
_PATH = re.compile(r"(?:.*/)?(sub-\w{1,40})/(ses-\w{1,40})/(?:mod-(\w+)/)?(sub-[\w.-]{1,150}\.png)")
_NAME = re.compile(r"(sub-[A-Za-z0-9]{1,40})_(ses-[A-Za-z0-9]{1,40})_.*\.png")
_VIEW = re.compile(r"_vp-([a-z]+)")
_RADIOGRAPHS = (None, "rx")


class _Row(NamedTuple):
    """An image: its path or file name, its view, and the report of its session."""

    path: str
    view: str
    report: str


@register_corpus("bimcv-covid19")
@dataclasses.dataclass(frozen=True, kw_only=True)
class BimcvCovid19(Corpus):
    """Convert BIMCV-COVID19+, radiographs with reports in Spanish or translated to English."""

    counts: ClassVar[Mapping[str, int]] = {"images": 73_401}
    """Rows of final_annotations.csv."""

    root: Path
    """folder with final_annotations.csv and the images, as sub-*/ses-*/mod-rx/*.png."""
    images: Path | None = None
    """folder with the images at any depth; default root."""
    reports_en: Path | None = None
    """test.report.en.tok of RRG24, with test.image.en.tok beside it: English reports, of the images
    that it lists.
    """
    splits: tuple[str, ...] = ("train=0.8", "validate=0.1", "test=0.1")
    """fractions of the splits, by patient."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Plan the samples of BIMCV-COVID19+ from its table; no image is opened.

        Raises CorpusError when a file or column is missing, or the two files of translations differ
        in length; ConfigError when the fractions do not sum to one.
        """
        folder = self.images or self.root
        beside = () if self.reports_en is None else (self.reports_en.parent,)
        allowed = access.folders(self.root, folder, *beside)
        fractions = parse_fractions(self.splits)
        warnings = Counter[str]()
        english = (
            None
            if self.reports_en is None
            else read_translations(self.reports_en, allowed, warnings)
        )
        files = {path.name: path for path in sorted(folder.rglob("sub-*.png"), reverse=True)}
        rows = RowCounts()
        records = Records()
        of_session: dict[tuple[str, str], str] = {}
        for row in rows.reading(self._read_rows(english, allowed)):
            place = _place(row.path)
            if place is None or place.modality not in _RADIOGRAPHS:
                rows.exclude("no_bids_name" if place is None else "not_a_radiograph")
                continue
            text = report_text(row.report, warnings)
            if english is not None:
                text = english.get(place.name, "")
                if not text:
                    rows.exclude("no_translation")
                    continue
            first = of_session.setdefault((place.patient, place.session), text)
            warnings["reports_of_session_differ"] += text != first
            view = _view(row.view, place.name)
            warnings["unknown_view"] += view is None
            patient = deid.patient(place.patient)
            sample = Sample(
                key=deid.image(place.name),
                corpus=self.corpus,
                split=hash_split(patient, fractions),
                patient=patient,
                study=deid.study(place.patient, place.session),
                image=files.get(place.name, folder / place.name),
                sections={"report": first} if first else {},
                view=view,
            )
            records.append(Record(sample))
            rows.kept += 1
        return Plan(self.corpus, records, (), rows, +warnings, allowed)

    def _read_rows(
        self, english: Mapping[str, str] | None, allowed: InputFolders
    ) -> Iterator[_Row]:
        """Yield the rows of the table, or the translated images if there is no table."""
        table = self.root / TABLE
        if english is not None and not table.is_file():
            yield from (_Row(name, "", "") for name in english)
            return
        for row in read_table(table, _COLUMNS, allowed):
            if not row["file_path"].strip():
                raise malformed(table, "expected a path", "file_path")
            yield _Row(row["file_path"].strip(), row["view"].strip().lower(), row["report"])


class _Place(NamedTuple):
    """Patient, session, modality where the path has it, and file name of an image."""

    patient: str
    session: str
    modality: str | None
    name: str


def _place(path: str) -> _Place | None:
    match = _PATH.fullmatch(path)
    if match is not None:
        return _Place(*match.groups())
    name = path.rpartition("/")[2]
    match = _NAME.fullmatch(name)
    return None if match is None else _Place(match[1], match[2], None, name)


def _view(text: str, name: str) -> str | None:
    """Return the view that the table states, else that of the file name."""
    in_name = _VIEW.search(name)
    return VIEWS.get(text) or (VIEWS.get(in_name[1]) if in_name else None)
