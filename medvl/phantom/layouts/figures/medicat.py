"""The phantom's case reports in the layout of MedICaT (2020)."""

import json
from pathlib import Path

from medvl.phantom.language.case_reports import Figure, article_figures
from medvl.phantom.language.sentences import pick
from medvl.phantom.layouts.figures.figure_files import figure_bytes
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.world import Patient
from medvl.phantom.seeds import generator

TABLE = "s2_full_figures_oa_nonroco_combined_medical_top4_public.jsonl"
SUBCAPTIONS = "subcaptions_public.jsonl"
_STREAM = 93
_LICENCES = ("cc-by", "cc-by-nc", "cc-by-nc-nd", None)


def write_medicat(
    out: Path | str, *, patients: int = 400, seed: int = 0, size: int = 512, workers: int | None = None
) -> Path:
    """Write a phantom MedICaT: the table of figures and `figures/`. The release has no split.

    An article is the case report of one patient. No figure has sub-figures, so sub-figure annotations only reject.

    `patients` is the number of articles, with five figures on average; the other arguments and the errors are those of
    `write_mimic_cxr`. Returns the folder.
    """
    options = Options(corpus="medicat", patients=patients, seed=seed, size=size, split=(1.0, 0.0, 0.0), reports=True)
    return write_release(Path(out), options, _write_patient, {TABLE: None, SUBCAPTIONS: None}, workers)


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    rng = generator(*patient.studies[0].key, _STREAM)
    pdf_hash = rng.bytes(20).hex()
    status, doi = pick(rng, ["gold", "bronze"]), f"10.0/phantom.{patient.subject_id}"
    access = {
        "is_oa": True,
        "oa_status": status,
        "journal_is_oa": status == "gold",
        "journal_is_in_doaj": status == "gold",
        "license": _LICENCES[int(rng.integers(len(_LICENCES)))],
        "provenance": "unpaywall",
    }
    article = {"doi": doi, "doi_url": f"https://phantom.invalid/{doi}", "oa": access}
    rows: list[list[object]] = []
    truth = []
    for figure in article_figures(patient):
        uri = f"{2 + figure.number // 3}-Figure{figure.number}-1.png"
        path = Path("figures", f"{pdf_hash}_{uri}")
        if not (root / path).exists() and (content := figure_bytes(figure, options.size, ".png")) is not None:
            write_file(root / path, content)
        line = json.dumps({"pdf_hash": pdf_hash, "fig_uri": uri, **_fields(figure, rng.random()), "oa_info": article})
        rows.extend([[line]] * (1 + figure.duplicated))
        if figure.view is not None and figure.study is not None:
            ids = {"pdf_hash": pdf_hash, "fig_uri": uri, "path": path.as_posix()}
            truth.append(truth_row(figure.view, figure.study, options.size, **ids, subject_id=patient.subject_id))
    annotation = {"pdf_hash": pdf_hash, "fig_key": "Figure1", "answer": "reject", "spans": [], "tokens": []}
    annotations = [[json.dumps(annotation)]] if rng.random() < 0.05 else []
    return PatientRows(patient.index, {TABLE: rows, SUBCAPTIONS: annotations}, truth)


def _fields(figure: Figure, u: float) -> dict[str, object]:
    """Return the table's fields of a figure; `u`, uniform in [0, 1), selects the missing caption source."""
    caption = f"Figure {figure.number}. {figure.caption}" if figure.caption else ""
    return {
        "fig_key": f"Figure{figure.number}",
        "s2_caption": "" if u < 0.03 else caption,
        "s2orc_caption": None if 0.03 <= u < 0.4 or not caption else caption,
        "s2orc_references": list(figure.references) or (None if u < 0.9 else []),
        "radiology": figure.radiology,
        "scope": False,
        "predicted_type": "Medical images" if figure.radiology else "Graph",
    }
