"""The phantom's case reports in the layout of ROCO (2018), with MedICaT's references to its figures."""

import json
import re
from pathlib import Path

from medvl.phantom.language.case_reports import Figure, article_figures, article_id
from medvl.phantom.layouts.figures.figure_files import figure_bytes
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.findings import truth_labels
from medvl.phantom.population.world import MAX_STUDIES, Patient

SPLITS = ("train", "validation", "test")
KINDS = ("radiology", "non-radiology")
REFERENCES = {
    split: f"roco_references/roco_{name}_references.jsonl"
    for split, name in zip(SPLITS, ("train", "val", "test"), strict=True)
}
"""Split -> file of MedICaT's references."""
_LINES = ("captions", "keywords", "cuis", "semtypes", "dlinks")
_MAX_FIGURES = 4 * MAX_STUDIES + 1  # figures of one article
_FILM = "C1306645"  # plain radiography
_SLICES = {"CT": "C0040405", "MRI": "C0024485"}
_CUIS = {
    "Atelectasis": "C0004144", "Cardiomegaly": "C0018800", "Consolidation": "C0521530", "Edema": "C0034063",
    "Fracture": "C0016658", "Pleural Effusion": "C0032227", "Pneumonia": "C0032285", "Pneumothorax": "C0032326",
}  # fmt: skip
_STOP_WORDS = {"and", "the", "with", "for", "view", "showing", "shows", "chest"}


def write_roco(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.8, 0.1, 0.1),
    workers: int | None = None,
) -> Path:
    """Write a phantom ROCO: `data/{train,validation,test}/{radiology,non-radiology}/` with images and tables.

    An article is the case report of one patient, and all its figures are in one split. The sentences that refer to a
    figure are in `roco_references/`, in MedICaT's format.

    `patients` is the number of articles, with five figures on average; the other arguments and the errors are those of
    `write_mimic_cxr`. Returns the folder that contains `data/`.
    """
    options = Options(corpus="roco", patients=patients, seed=seed, size=size, split=split, reports=True)
    tables: dict[str, tuple[str, ...] | None] = {}
    for part in SPLITS:
        for kind in KINDS:
            tables |= {_table(part, kind, name): None for name in _LINES}
            tables[_table(part, kind, "licences")] = ("ROCO_ID", "PMC_ID", "CC")
        tables[REFERENCES[part]] = None
    return write_release(Path(out), options, _write_patient, tables, workers)


def _table(split: str, kind: str, name: str) -> str:
    return f"data/{split}/{kind}/{name}.txt"


def _write_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = SPLITS[options.split_index(patient.index)]
    tables: dict[str, list[list[object]]] = {}
    truth = []
    for figure in article_figures(patient):
        kind = KINDS[not figure.radiology]
        figure_id = f"ROCO_{patient.index * _MAX_FIGURES + figure.number:05d}"
        path = Path("data", split, kind, "images", f"{figure_id}.jpg")
        if not (root / path).exists() and (content := figure_bytes(figure, options.size, ".jpg")) is not None:
            write_file(root / path, content)
        file = f"{article_id(patient)}_phantom-g{figure.number:03d}.jpg"
        lines = _lines(figure, figure_id, article_id(patient))
        for name, line in lines.items():
            tables.setdefault(_table(split, kind, name), []).extend([[line]] * (1 + figure.duplicated))
        tables.setdefault(_table(split, kind, "licences"), []).append([figure_id, file, "CC BY"])
        if figure.references:
            reference = json.dumps({"roco_image_id": file, "gorc_references": figure.references})
            tables.setdefault(REFERENCES[split], []).append([reference])
        if figure.view is not None and figure.study is not None:
            ids = {"figure": figure_id, "article": article_id(patient), "path": path.as_posix(), "split": split}
            truth.append(truth_row(figure.view, figure.study, options.size, **ids, subject_id=patient.subject_id))
    return PatientRows(patient.index, tables, truth)


def _lines(figure: Figure, figure_id: str, article: str) -> dict[str, str]:
    """Return table -> line of the figure."""
    words = [word for word in re.findall(r"[a-z]{3,}", figure.caption.lower()) if word not in _STOP_WORDS]
    cuis = []
    if figure.view is not None:
        present = truth_labels(figure.view.findings)
        cuis = [_FILM, *(cui for label, cui in _CUIS.items() if present[label])]
    if figure.ct_mr_slice is not None:
        cuis = [_SLICES[figure.ct_mr_slice.modality]]
    types = ["T060", "Diagnostic Procedure", *(["T047", "Disease or Syndrome"] if len(cuis) > 1 else [])]
    link = f"wget -r ftp://phantom.invalid/pub/pmc/oa_package/{article[-4:-2]}/{article[-2:]}/{article}.tar.gz"
    fields = {
        "captions": [f" {figure.caption}"],
        "keywords": ["", *dict.fromkeys(words)],
        "cuis": ["", *cuis],
        "semtypes": ["", *(types if cuis else [])],
        "dlinks": [f"{link} -P /path/to/Dir", f"phantom-g{figure.number:03d}.jpg"],
    }
    return {name: "\t".join([figure_id, *values]) for name, values in fields.items()}
