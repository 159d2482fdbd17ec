"""The phantom corpus in the layout of Open-i: one XML report for each study, PNG files and a table of projections."""

from pathlib import Path
from xml.sax.saxutils import escape

from medvl.phantom.language.reports import compose_report
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.findings import Finding
from medvl.phantom.population.world import Patient, Study
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.encode import encode_png

PROJECTIONS = "indiana_projections.csv"
_TERMS = {
    "Atelectasis": "Pulmonary Atelectasis", "Cardiomegaly": "Cardiomegaly", "Consolidation": "Consolidation/lung",
    "Edema": "Pulmonary Edema", "Enlarged Cardiomediastinum": "Mediastinum/enlarged",
    "Fracture": "Fractures, Bone", "Lung Lesion": "Nodule/lung", "Lung Opacity": "Opacity/lung",
    "Pleural Effusion": "Pleural Effusion", "Pleural Other": "Thickening/pleura", "Pneumonia": "Pneumonia",
    "Pneumothorax": "Pneumothorax", "Support Devices": "Implanted Medical Device",
}  # fmt: skip
_NORMAL = "normal"
_SIDES = ("right", "left", "bilateral")


def write_openi(
    out: Path | str, *, patients: int = 400, seed: int = 0, size: int = 512, workers: int | None = None
) -> Path:
    """Write a phantom Open-i: `ecgen-radiology/`, `NLMCXR_png/` and the table of projections.

    Each patient has one report, that of the first study, because the collection has no patient ids. MeSH terms are the
    ground truth, with side and severity, also of findings that the report omits.

    The other arguments and the errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = Options(corpus="openi", patients=patients, seed=seed, size=size, split=(1.0, 0.0, 0.0), reports=True)
    return write_release(Path(out), options, _write_patient, {PROJECTIONS: ("uid", "filename", "projection")}, workers)


def mesh_terms(study: Study) -> list[str]:
    """Return the MeSH terms of a study."""
    return [_term(finding) for finding in study.findings] or [_NORMAL]


def _term(finding: Finding) -> str:
    side = [finding.side] if finding.side in _SIDES else []
    return "/".join([_TERMS[finding.label], *side, finding.severity])


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    study, uid = patient.studies[0], patient.index + 1
    rows: list[list[object]] = []
    truth = []
    for number, view in enumerate(study.views, start=1):
        image = f"CXR{uid}_IM-{uid:04d}-{number}001"
        path = Path("NLMCXR_png", f"{image}.png")
        if not (root / path).exists():
            write_file(root / path, encode_png(draw(view, options.size)))
        rows.append([uid, path.name, "Lateral" if view.lateral else "Frontal"])
        truth.append(truth_row(view, study, options.size, path=path.as_posix(), uid=uid))
    write_file(root / "ecgen-radiology" / f"{uid}.xml", _xml(uid, study).encode())
    return PatientRows(patient.index, {PROJECTIONS: rows}, truth)


def _xml(uid: int, study: Study) -> str:
    report = compose_report(study)
    sections = {"COMPARISON": "None.", "INDICATION": "", "FINDINGS": report.findings, "IMPRESSION": report.impression}
    texts = [f'<AbstractText Label="{name}">{escape(text)}</AbstractText>' for name, text in sections.items()]
    terms = [f"<major>{escape(term)}</major>" for term in mesh_terms(study)]
    images = [
        f'<parentImage id="CXR{uid}_IM-{uid:04d}-{number}001"><caption>Xray Chest</caption></parentImage>'
        for number in range(1, len(study.views) + 1)
    ]
    return "\n".join(
        [
            '<?xml version="1.0" encoding="utf-8"?>',
            f'<eCitation><uId id="CXR{uid}"/><MedlineCitation><Article><Abstract>',
            *texts,
            "</Abstract></Article></MedlineCitation><MeSH>",
            *terms,
            "</MeSH>",
            *images,
            "</eCitation>\n",
        ]
    )
