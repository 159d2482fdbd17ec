"""Open-i (Indiana University): chest radiographs with reports. Data card: `data_cards/openi.md`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.tables import Plan, Record, read_table
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.reports.openi_xml import iter_openi_reports
from medvl.data.splits import DEFAULT_FRACTIONS, check_fractions, hash_split
from medvl.errors import CorpusError
from medvl.schema import Sample

NAME = "openi"
COUNTS: Mapping[str, int] = {"images": 7_470}
"""Of the full collection: what `medvl verify --full` compares with."""

_REPORTS = ("ecgen-radiology", "NLMCXR_reports.tgz")
_IMAGES = "NLMCXR_png"
_PROJECTIONS = "indiana_projections.csv"
_VIEWS = {"Frontal": "FRONTAL", "Lateral": "LATERAL"}
_NAME = re.compile(r"(?:CXR)?(\d+)_(?:\d+_)?(IM-[\d-]+)(?:\.dcm)?(?:\.png)?")


def plan(
    root: Path,
    deid: Deidentifier,
    *,
    images: Path | None = None,
    fractions: Mapping[str, float] = DEFAULT_FRACTIONS,
) -> Plan:
    """Everything that the reports say about the images; no image is opened.

    Args:
        root: the folder that holds `ecgen-radiology/` or `NLMCXR_reports.tgz`.
        deid: hashes reports and images. The collection tells no patients apart, so that a report counts as a patient.
        images: folder of the PNG files; default `NLMCXR_png` in `root`. Files that are named as in the copy on Kaggle
            (1_IM-0001-3001.dcm.png) are found too.
        fractions: of the splits; the collection has none.

    Raises:
        CorpusError: there is no report, or one of them is damaged.
        ConfigError: the fractions do not sum to one.
    """
    root = Path(root)
    images = Path(images) if images is not None else root / _IMAGES
    check_fractions(fractions)
    projections = _read_projections(root / _PROJECTIONS)
    files = {_place(path.name): path for path in images.iterdir()} if images.is_dir() else {}
    noticed = Counter[str]()
    records = Records()
    for report in iter_openi_reports(_find_reports(root)):
        noticed["report_without_image"] += not report.images
        noticed["no_findings_or_impression"] += not {"findings", "impression"} & report.sections.keys()
        patient = deid.patient(report.id)
        for image in report.images:
            sample = Sample(
                key=deid.image(image.id),
                corpus=NAME,
                split=hash_split(patient, fractions),
                patient=patient,
                study=deid.study(report.id, report.id),
                image=files.get(_place(image.id), images / f"{image.id}.png"),
                sections=report.sections,
                view=projections.get(_place(image.id)),
                extra={"mesh_major": list(report.mesh_major), "mesh_automatic": list(report.mesh_automatic)},
            )
            records.append(Record(sample))
    return Plan(NAME, records, (), Counter(), +noticed)


def iter_samples(root: Path, *, deid: Deidentifier) -> Iterator[Sample]:
    """Samples of all splits. Raises CorpusError."""
    for record in plan(root, deid).records:
        yield record.sample


def _find_reports(root: Path) -> Path:
    for name in _REPORTS:
        if (root / name).exists():
            return root / name
    raise CorpusError(f"{root} holds neither {' nor '.join(_REPORTS)}: see the data card")


def _place(name: str) -> tuple[str, ...]:
    """(12, IM-0001-3001): what the id of an image and the names of its file in different copies have in common."""
    match = _NAME.fullmatch(name)
    return match.groups() if match else (name,)


def _read_projections(path: Path) -> dict[tuple[str, ...], str]:
    """Place of an image -> its view, from the table that the copy on Kaggle adds.

    The captions of the reports do not tell: they describe all images of a study at once, with masks ("XXXX and
    lateral"), and stand under a lone image just the same.
    """
    if not path.is_file():
        return {}
    views = {}
    for row in read_table(path, ("filename", "projection")):
        if row["projection"] not in _VIEWS:
            raise CorpusError(f"{path}: a projection is none of {', '.join(_VIEWS)}")
        views[_place(row["filename"])] = _VIEWS[row["projection"]]
    return views
