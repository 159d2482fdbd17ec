"""Open-i (Indiana University): chest radiographs with reports. Data card: `data_cards/openi.md`."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from medvl.common.checks import check_choice
from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.row_counts import RowCounts
from medvl.data.corpora.common.tables import Plan, Record, malformed, read_table
from medvl.data.privacy.deidentify import Deidentifier
from medvl.data.reports.openi_xml import iter_openi_reports
from medvl.data.splits import DEFAULT_FRACTIONS, check_fractions, hash_split
from medvl.errors import CorpusError
from medvl.schema import Sample

NAME = "openi"
COUNTS: Mapping[str, int] = {"images": 7_470}
"""Images of the full collection, which `medvl verify --full` compares with."""
NO_FINDING = "No Finding"
LABELS = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Emphysema", "Fibrosis", "Hernia", "Infiltration", "Mass",
    NO_FINDING, "Nodule", "Pleural Effusion", "Pleural Thickening", "Pneumonia", "Pneumothorax",
)  # fmt: skip
"""The 14 findings of ChestX-ray14 and No Finding (Li, Wang and Luo, arXiv 2009.01523, who call it Normal)."""

_LABEL_OF = {
    "pulmonary atelectasis": "Atelectasis", "cardiomegaly": "Cardiomegaly", "consolidation": "Consolidation",
    "pulmonary edema": "Edema", "emphysema": "Emphysema", "pulmonary emphysema": "Emphysema",
    "bullous emphysema": "Emphysema", "fibrosis": "Fibrosis", "pulmonary fibrosis": "Fibrosis",
    "hernia, hiatal": "Hernia", "hernia, diaphragmatic": "Hernia", "infiltrate": "Infiltration", "mass": "Mass",
    "nodule": "Nodule", "pleural effusion": "Pleural Effusion", "thickening/pleura": "Pleural Thickening",
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


def plan(
    root: Path,
    deid: Deidentifier,
    *,
    images: Path | None = None,
    views: Sequence[str] = (),
    fractions: Mapping[str, float] = DEFAULT_FRACTIONS,
    follow_links: bool = False,
) -> Plan:
    """Plan the samples of Open-i from its reports; no image is opened. Labels come from `mesh_labels`.

    Args:
        root: folder with `ecgen-radiology/` or `NLMCXR_reports.tgz`.
        deid: hashes reports and images. The collection has no patient ids, so each report counts as a patient.
        images: folder of the PNG files; default `NLMCXR_png` in `root`. File names of the copy on Kaggle
            (1_IM-0001-3001.dcm.png) are recognised too.
        views: keep only these views, FRONTAL or LATERAL; needs the table of projections. Default: all images.
        fractions: fractions of the splits; the collection has no splits.
        follow_links: also read files that links outside of the folders lead to, as in trees of git-annex.

    Raises CorpusError when there is no report, one is damaged, or `views` lack their table; ConfigError when
    a view is unknown or the fractions do not sum to one.
    """
    root = Path(root)
    images = Path(images) if images is not None else root / _IMAGES
    allowed = InputFolders.of(root, images, follow_links=follow_links)
    check_fractions(fractions)
    for kept in views:
        check_choice(kept, tuple(_VIEWS.values()), "views")
    projections = _read_projections(root / _PROJECTIONS, allowed)
    if views and not projections:
        raise CorpusError(f"views need {root / _PROJECTIONS}: see the data card", "not_found", field="views")
    files = {_image_id(path.name): path for path in images.iterdir()} if images.is_dir() else {}
    rows, warnings, records = RowCounts(), Counter[str](), Records()
    for report in iter_openi_reports(_find_reports(root), folders=allowed):
        warnings["report_without_image"] += not report.images
        warnings["no_findings_or_impression"] += not {"findings", "impression"} & report.sections.keys()
        patient = deid.patient(report.id)
        labels = mesh_labels(report.mesh_major)
        warnings["not_indexed"] += not labels
        for image in rows.reading(report.images):
            view = projections.get(_image_id(image.id))
            if views and view not in views:
                rows.exclude("view")
                continue
            sample = Sample(
                key=deid.image(image.id),
                corpus=NAME,
                split=hash_split(patient, fractions),
                patient=patient,
                study=deid.study(report.id, report.id),
                image=files.get(_image_id(image.id), images / f"{image.id}.png"),
                sections=report.sections,
                labels=labels,
                view=view,
                extra={"mesh_major": list(report.mesh_major), "mesh_automatic": list(report.mesh_automatic)},
            )
            records.append(Record(sample))
            rows.kept += 1
    return Plan(NAME, records, LABELS, rows, +warnings, allowed)


def mesh_labels(terms: Iterable[str]) -> dict[str, int]:
    """Return label -> 1 or 0 from the MeSH terms that two readers assigned (`OpeniReport.mesh_major`).

    No Finding is 1 without any of the 14 findings, even with others such as a granuloma; the MeSH term `normal` is
    narrower. A report that was not indexed has no labels.
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
    raise CorpusError(f"{root} contains none of {', '.join(_REPORTS)}: see the data card", "not_found")


def _image_id(name: str) -> tuple[str, ...]:
    """Return an image's id, such as (12, IM-0001-3001), from its id in a report or its file name in any copy."""
    match = _NAME.fullmatch(name)
    return match.groups() if match else (name,)


def _read_projections(path: Path, allowed: InputFolders) -> dict[tuple[str, ...], str]:
    """Read image id -> view from the table in the copy on Kaggle.

    The captions of the reports cannot be used: they describe all images of a study at once, with masks ("XXXX and
    lateral"), even where a study has one image.
    """
    if not path.is_file():
        return {}
    views = {}
    for row in read_table(path, ("filename", "projection"), allowed):
        if row["projection"] not in _VIEWS:
            raise malformed(path, f"expected one of {', '.join(_VIEWS)} for projection", "projection")
        views[_image_id(row["filename"])] = _VIEWS[row["projection"]]
    return views
