"""The phantom's case reports in the layouts of MedICaT and ROCO."""

import json
import re
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.phantom.language.captions import Figure, article_figures, article_id
from medvl.phantom.language.reports import pick
from medvl.phantom.layouts.writer import Options, PatientRows, truth_row, write_file, write_release
from medvl.phantom.population.findings import truth_labels
from medvl.phantom.population.world import MAX_STUDIES, Patient, generator
from medvl.phantom.rendering.draw import draw_image
from medvl.phantom.rendering.scene import encode_jpeg, encode_png

# Image files of the figures of case reports.


def figure_bytes(figure: Figure, size: int, suffix: str) -> bytes | None:
    """Return the content of a figure's file (".jpg" or ".png") with `size` pixels on the longer
    side.

    It is empty for an empty file, and None for a missing one.
    """
    if figure.file != "intact":
        return b"" if figure.file == "empty" else None
    source = figure.view or figure.ct_mr_slice
    image_HW = _chart(figure.number, size) if source is None else draw_image(source, size)
    return encode_jpeg(image_HW) if suffix == ".jpg" else encode_png(image_HW)


def _chart(number: int, size: int) -> NDArray[np.uint16]:
    """Draw a curve in a frame, as a 12-bit image."""
    chart_HW = np.full((max(16, 3 * size // 4), size), 255, np.uint8)
    height, width = chart_HW.shape
    left = width // 8
    right = width - width // 16
    top = height // 10
    bottom = height - height // 6
    cv2.rectangle(chart_HW, (left, top), (right, bottom), 0, max(1, size // 200))
    x = np.linspace(left, right, 24)
    y = (top + bottom) / 2 + 0.3 * (bottom - top) * np.sin(np.arange(24) * (0.4 + 0.1 * number))
    points = np.stack([x, y], axis=1).round().astype(np.int32)
    cv2.polylines(chart_HW, [points], False, 60, max(1, size // 120), cv2.LINE_AA)
    return chart_HW.astype(np.uint16) * np.uint16(16)


# The phantom's case reports in the layout of MedICaT (2020).

TABLE = "s2_full_figures_oa_nonroco_combined_medical_top4_public.jsonl"
SUBCAPTIONS = "subcaptions_public.jsonl"
_STREAM = 93
_LICENCES = ("cc-by", "cc-by-nc", "cc-by-nc-nd", None)


def write_medicat(
    out: Path | str,
    *,
    patients: int = 400,
    seed: int = 0,
    size: int = 512,
    workers: int | None = None,
) -> Path:
    """Write a phantom MedICaT: the table of figures and `figures/`. The release has no split.

    An article is the case report of one patient. No figure has sub-figures, so sub-figure
    annotations only reject.

    `patients` is the number of articles, with five figures on average; the other arguments and the
    errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = Options(
        corpus="medicat",
        patients=patients,
        seed=seed,
        size=size,
        split=(1.0, 0.0, 0.0),
        reports=True,
    )
    return write_release(
        Path(out), options, _write_medicat_patient, {TABLE: None, SUBCAPTIONS: None}, workers
    )


def _write_medicat_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    rng = generator(*patient.studies[0].key, _STREAM)
    pdf_hash = rng.bytes(20).hex()
    status = pick(rng, ["gold", "bronze"])
    doi = f"10.0/phantom.{patient.subject_id}"
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
        if (
            not (root / path).exists()
            and (content := figure_bytes(figure, options.size, ".png")) is not None
        ):
            write_file(root / path, content)
        line = json.dumps(
            {
                "pdf_hash": pdf_hash,
                "fig_uri": uri,
                **_fields(figure, rng.random()),
                "oa_info": article,
            }
        )
        rows.extend([[line]] * (1 + figure.duplicated))
        if figure.view is not None and figure.study is not None:
            ids = {"pdf_hash": pdf_hash, "fig_uri": uri, "path": path.as_posix()}
            truth.append(
                truth_row(
                    figure.view, figure.study, options.size, **ids, subject_id=patient.subject_id
                )
            )
    annotation = {
        "pdf_hash": pdf_hash,
        "fig_key": "Figure1",
        "answer": "reject",
        "spans": [],
        "tokens": [],
    }
    annotations = [[json.dumps(annotation)]] if rng.random() < 0.05 else []
    return PatientRows(patient.index, {TABLE: rows, SUBCAPTIONS: annotations}, truth)


def _fields(figure: Figure, u: float) -> dict[str, object]:
    """Return the table's fields of a figure; `u`, uniform in [0, 1), selects the missing caption
    source.
    """
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


# The phantom's case reports in the layout of ROCO (2018), with MedICaT's references to its
# figures.

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
    "Atelectasis": "C0004144", "Cardiomegaly": "C0018800", "Consolidation": "C0521530",
    "Edema": "C0034063", "Fracture": "C0016658", "Pleural Effusion": "C0032227",
    "Pneumonia": "C0032285", "Pneumothorax": "C0032326",
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
    """Write a phantom ROCO: `data/{train,validation,test}/{radiology,non-radiology}/` with images
    and tables.

    An article is the case report of one patient, and all its figures are in one split. The
    sentences that refer to a figure are in `roco_references/`, in MedICaT's format.

    `patients` is the number of articles, with five figures on average; the other arguments and the
    errors are those of `write_mimic_cxr`. Returns the folder that contains `data/`.
    """
    options = Options(
        corpus="roco", patients=patients, seed=seed, size=size, split=split, reports=True
    )
    tables: dict[str, tuple[str, ...] | None] = {}
    for part in SPLITS:
        for kind in KINDS:
            tables |= {_table(part, kind, name): None for name in _LINES}
            tables[_table(part, kind, "licences")] = ("ROCO_ID", "PMC_ID", "CC")
        tables[REFERENCES[part]] = None
    return write_release(Path(out), options, _write_roco_patient, tables, workers)


def _table(split: str, kind: str, name: str) -> str:
    return f"data/{split}/{kind}/{name}.txt"


def _write_roco_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = SPLITS[options.split_index(patient.index)]
    tables: dict[str, list[list[object]]] = {}
    truth = []
    for figure in article_figures(patient):
        kind = KINDS[not figure.radiology]
        figure_id = f"ROCO_{patient.index * _MAX_FIGURES + figure.number:05d}"
        path = Path("data", split, kind, "images", f"{figure_id}.jpg")
        if (
            not (root / path).exists()
            and (content := figure_bytes(figure, options.size, ".jpg")) is not None
        ):
            write_file(root / path, content)
        file = f"{article_id(patient)}_phantom-g{figure.number:03d}.jpg"
        lines = _lines(figure, figure_id, article_id(patient))
        for name, line in lines.items():
            tables.setdefault(_table(split, kind, name), []).extend(
                [[line]] * (1 + figure.duplicated)
            )
        tables.setdefault(_table(split, kind, "licences"), []).append([figure_id, file, "CC BY"])
        if figure.references:
            reference = json.dumps({"roco_image_id": file, "gorc_references": figure.references})
            tables.setdefault(REFERENCES[split], []).append([reference])
        if figure.view is not None and figure.study is not None:
            ids = {
                "figure": figure_id,
                "article": article_id(patient),
                "path": path.as_posix(),
                "split": split,
            }
            truth.append(
                truth_row(
                    figure.view, figure.study, options.size, **ids, subject_id=patient.subject_id
                )
            )
    return PatientRows(patient.index, tables, truth)


def _lines(figure: Figure, figure_id: str, article: str) -> dict[str, str]:
    """Return table -> line of the figure."""
    words = [
        word for word in re.findall(r"[a-z]{3,}", figure.caption.lower()) if word not in _STOP_WORDS
    ]
    cuis = []
    if figure.view is not None:
        present = truth_labels(figure.view.findings)
        cuis = [_FILM, *(cui for label, cui in _CUIS.items() if present[label])]
    if figure.ct_mr_slice is not None:
        cuis = [_SLICES[figure.ct_mr_slice.modality]]
    types = [
        "T060",
        "Diagnostic Procedure",
        *(["T047", "Disease or Syndrome"] if len(cuis) > 1 else []),
    ]
    link = (
        f"wget -r "
        f"ftp://phantom.invalid/pub/pmc/oa_package/{article[-4:-2]}/{article[-2:]}/{article}.tar.gz"
    )
    fields = {
        "captions": [f" {figure.caption}"],
        "keywords": ["", *dict.fromkeys(words)],
        "cuis": ["", *cuis],
        "semtypes": ["", *(types if cuis else [])],
        "dlinks": [f"{link} -P /path/to/Dir", f"phantom-g{figure.number:03d}.jpg"],
    }
    return {name: "\t".join([figure_id, *values]) for name, values in fields.items()}
