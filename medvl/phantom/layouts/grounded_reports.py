"""The phantom corpus in the layouts of PadChest-GR and Chest ImaGenome."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.phantom.layouts.boxes import phrases
from medvl.phantom.layouts.kaggle import image_uid_hex
from medvl.phantom.layouts.reports import NAMES
from medvl.phantom.layouts.writer import (
    Form,
    Options,
    PatientRows,
    Tabs,
    truth_row,
    write_release,
    write_view,
)
from medvl.phantom.population.findings import change_of
from medvl.phantom.population.world import Patient, Study
from medvl.phantom.rendering.scene import encode_deep_png, encode_jpeg

# The phantom corpus in the layout of PadChest-GR (2024).

GR_REPORTS = "grounded_reports_20240819.json"
GR_TABLE = "master_table.csv"
GR_COLUMNS = (
    "StudyID", "ImageID", "label", "boxes_count", "extra_boxes_count", "locations", "prior_study",
    "progression_status", "prior_imageID", "sentence_en", "sentence_es", "study_is_benchmark",
    "study_is_validation", "split", "PatientID", "patient_is_benchmark", "PatientBirth",
    "PatientSex_DICOM", "StudyDate", "StudyDate_DICOM", "PatientAge", "label_group", "Year",
)  # fmt: skip
GR_SPLITS = ("train", "validation", "test")
_NORMAL = ("The lungs are otherwise clear.", "Pulmones sin otros hallazgos.")
_WITHOUT_BOX = ("Degenerative changes of the spine.", "Cambios degenerativos de la columna.")
_IMAGES = Path("images_grounding")
_PRIORS = Path("prior_studies")


def write_padchest_gr(
    out: Path | str,
    *,
    patients: int = 100,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.7, 0.1, 0.2),
    workers: int | None = None,
) -> Path:
    """Write a phantom PadChest-GR: reports with boxes, a table, and PNG files of 12 bits in 16.

    Each patient's last study has a report of its frontal image; the study before is its prior.
    Findings have a sentence with the boxes of their parts. Each report has a normal sentence
    without labels and boxes; each third one has an abnormal sentence without a box. The patients
    and images are those of `write_padchest` with the same seed.

    `split` has the shares of patients in train, validation and test. The other arguments and the
    errors are those of `write_mimic_cxr`. Returns the folder.
    """
    options = Options(
        corpus="padchest-gr", patients=patients, seed=seed, size=size, split=split, reports=True
    )
    columns = {GR_REPORTS: None, GR_TABLE: GR_COLUMNS}
    return write_release(Path(out), options, _write_padchest_gr_patient, columns, workers)


def _write_padchest_gr_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = GR_SPLITS[options.split_index(patient.index)]
    study = patient.studies[-1]
    before = patient.studies[-2] if len(patient.studies) > 1 else None
    findings = _findings(study, before, options.size, bare=not patient.index % 3)
    entry: dict[str, object] = {"StudyID": str(study.study_id), "ImageID": _file_name(study)}
    if before is not None:
        entry |= {"PreviousStudyID": str(before.study_id), "PreviousImageID": _file_name(before)}
    entry["findings"] = findings
    for folder, each in ((_IMAGES, study), (_PRIORS, before)):
        if each is not None:
            path = root / folder / _file_name(each)
            write_view(path, each.frontal, options.size, encode_deep_png)
    rows = [_row(entry, finding, patient, study, split) for finding in findings]
    listed = (_IMAGES / _file_name(study)).as_posix()
    truth = [truth_row(study.frontal, study, options.size, path=listed, split=split)]
    return PatientRows(patient.index, {GR_REPORTS: [[json.dumps(entry)]], GR_TABLE: rows}, truth)


def _file_name(study: Study) -> str:
    """Return the name of a study's frontal image, as in the phantom PadChest."""
    number = int(image_uid_hex(study.frontal), 16)
    return f"{number}_{number % 100:02d}-{number % 199:03d}-000.png"


def _findings(
    study: Study, before: Study | None, size: int, *, bare: bool
) -> list[dict[str, object]]:
    height, width = study.frontal.camera.shape(size)
    result: list[dict[str, object]] = []
    for finding, text, boxes in phrases(study, study.frontal, size):
        corners = [
            [box.x / width, box.y / height, (box.x + box.width) / width,
             (box.y + box.height) / height]
            for box in boxes
        ]  # fmt: skip
        spanish = f"{NAMES[finding.label][2]} {finding.side}."
        entry = _finding((text, spanish), NAMES[finding.label][0], [finding.side], corners)
        if before is not None:
            entry["progression"] = change_of(finding.label, before.findings, study.findings)
        result.append(entry)
    if bare:
        result.append(_finding(_WITHOUT_BOX, "vertebral degenerative changes", ["spine"], []))
    return [*result, {"sentence_en": _NORMAL[0], "sentence_es": _NORMAL[1], "abnormal": False}]


def _finding(
    sentences: tuple[str, str], label: str, locations: list[str], boxes: list[list[float]]
) -> dict[str, object]:
    return {
        "sentence_en": sentences[0],
        "sentence_es": sentences[1],
        "abnormal": True,
        "boxes": boxes,
        "extra_boxes": [],
        "labels": [label],
        "locations": locations,
        "progression": None,
    }


def _row(
    entry: dict[str, object],
    finding: dict[str, object],
    patient: Patient,
    study: Study,
    split: str,
) -> list[object]:
    labels = finding.get("labels")
    label = labels[0] if isinstance(labels, list) else "Normal"
    cells: dict[str, object] = {
        "StudyID": entry["StudyID"],
        "ImageID": entry["ImageID"],
        "label": label,
        "prior_imageID": entry.get("PreviousImageID", ""),
        "sentence_en": finding["sentence_en"],
        "sentence_es": finding["sentence_es"],
        "split": split,
        "PatientID": patient.subject_id,
        "patient_is_benchmark": split == "test",
        "PatientSex_DICOM": study.sex,
        "StudyDate_DICOM": study.taken.strftime("%Y%m%d"),
        "PatientAge": study.age,
        "label_group": label,
    }
    return [cells.get(column, "") for column in GR_COLUMNS]


# The phantom corpus in the layout of Chest ImaGenome, with images of MIMIC-CXR-JPG.

GENOME_ARCHIVE = "silver_dataset/scene_graph.zip"
GENOME_SPLITS = {
    split: f"silver_dataset/splits/{split}.csv" for split in ("train", "valid", "test")
}
GENOME_AVOID = "silver_dataset/splits/images_to_avoid.csv"
GENOME_GOLD_BOXES = "gold_dataset/gold_bbox_coordinate_annotations_1000images.csv"
GENOME_GOLD_ATTRIBUTES = "gold_dataset/gold_object_attribute_with_coordinates.txt"
GENOME_METADATA = "mimic-cxr-2.0.0-metadata.csv.gz"
_REGIONS = {
    "right lung": (0.1, 0.1, 0.45, 0.8),
    "left lung": (0.55, 0.1, 0.9, 0.8),
    "cardiac silhouette": (0.35, 0.45, 0.7, 0.8),
    "trachea": (0.5, 0.0, 0.5, 0.2),
}
"""Region -> its corners in parts of the image; the last one is empty."""
_CATEGORIES = {"Pneumonia": "disease", "Support Devices": "device"}
_SQUARE = 224
_ORIGINAL = ("original_x1", "original_y1", "original_x2", "original_y2")


def write_chest_imagenome(
    out: Path | str,
    *,
    patients: int = 100,
    seed: int = 0,
    size: int = 512,
    split: tuple[float, float, float] = (0.7, 0.1, 0.2),
    workers: int | None = None,
) -> Path:
    """Write a phantom Chest ImaGenome: scene graphs in a zip archive, splits, and images and
    metadata of MIMIC-CXR-JPG.

    There is one frontal image of each study, with the patients and images of `write_mimic_cxr` with
    the same seed. Four regions lie at fixed places; one is empty. A region has the findings of its
    side, and Pneumothorax where it is absent. Each eleventh patient's first image has no scene
    graph. Each seventh patient's images are to be avoided: they are the gold set, in two tables
    with a row for each region and for each relation, and one that does not hold.

    `split` has the shares of patients in train, valid and test. The other arguments and the errors
    are those of `write_mimic_cxr`. Returns the folder.
    """
    options = Options(
        corpus="chest-imagenome",
        patients=patients,
        seed=seed,
        size=size,
        split=split,
        reports=False,
    )
    ids = ("subject_id", "study_id", "dicom_id")
    columns: dict[str, Sequence[str] | Form] = dict.fromkeys(GENOME_SPLITS.values(), ids)
    columns |= {GENOME_ARCHIVE: Form.ZIP, GENOME_AVOID: ids}
    columns[GENOME_GOLD_BOXES] = ("image_id", "bbox_name", *_ORIGINAL)
    columns[GENOME_GOLD_ATTRIBUTES] = Tabs(
        ("image_id", "bbox", "relation", "context", "categoryID", "label_name", "sentence")
    )
    columns[GENOME_METADATA] = (*ids, "ViewPosition", "Rows", "Columns", "StudyDate", "StudyTime")
    return write_release(Path(out), options, _write_chest_imagenome_patient, columns, workers)


def _write_chest_imagenome_patient(root: Path, patient: Patient, options: Options) -> PatientRows:
    split = tuple(GENOME_SPLITS)[options.split_index(patient.index)]
    tables: dict[str, list[list[object]]] = {
        name: []
        for name in (
            *(GENOME_SPLITS[split], GENOME_ARCHIVE, GENOME_AVOID, GENOME_METADATA),
            *(GENOME_GOLD_BOXES, GENOME_GOLD_ATTRIBUTES),
        )
    }
    truth = []
    subject = patient.subject_id
    for number, study in enumerate(patient.studies):
        view = study.frontal
        folder = Path("files", f"p{subject // 10**6}", f"p{subject}", f"s{study.study_id}")
        path = folder / f"{view.dicom_id}.jpg"
        write_view(root / path, view, options.size, encode_jpeg)
        height, width = view.camera.shape(options.size)
        ids = [subject, study.study_id, view.dicom_id]
        taken = (study.taken.strftime("%Y%m%d"), study.taken.strftime("%H%M%S.%f"))
        tables[GENOME_METADATA].append([*ids, view.position, height, width, *taken])
        tables[GENOME_SPLITS[split]].append(ids)
        if not patient.index % 7:
            tables[GENOME_AVOID].append(ids)
            boxes, attributes = _gold_rows(view.dicom_id, _scene_graph(study, width, height))
            tables[GENOME_GOLD_BOXES] += boxes
            tables[GENOME_GOLD_ATTRIBUTES] += attributes
        if patient.index % 11 or number:
            member = f"scene_graph/{view.dicom_id}_SceneGraph.json"
            tables[GENOME_ARCHIVE].append([member, json.dumps(_scene_graph(study, width, height))])
        truth.append(truth_row(view, study, options.size, path=path.as_posix(), split=split))
    return PatientRows(subject, tables, truth)


def _gold_rows(
    dicom_id: str, graph: Mapping[str, Sequence[Mapping[str, Any]]]
) -> tuple[list[list[object]], list[list[object]]]:
    """Return the rows of an image in the tables of the gold set, from its scene graph."""
    name = f"{dicom_id}.dcm"
    boxes = [
        [name, region["bbox_name"], *(region[corner] for corner in _ORIGINAL)]
        for region in graph["objects"]
    ]
    attributes: list[list[object]] = []
    for region in graph["attributes"]:
        for group, phrase in zip(region["attributes"], region["phrases"], strict=True):
            for relation in group:
                category, context, label = relation.split("|")
                attributes.append([name, region["bbox_name"], 1, context, category, label, phrase])
        attributes.append([name, region["bbox_name"], 0, "yes", "disease", "hernia", ""])
    return boxes, attributes


def _scene_graph(study: Study, width: int, height: int) -> dict[str, Any]:
    objects = []
    attributes = []
    for name, corners in _REGIONS.items():
        x1, y1, x2, y2 = corners
        region: dict[str, object] = {"object_id": f"{study.study_id}_{name}", "bbox_name": name}
        square = dict(
            zip(("x1", "y1", "x2", "y2"), (round(_SQUARE * c) for c in corners), strict=True)
        )
        pixels = (round(x1 * width), round(y1 * height), round(x2 * width), round(y2 * height))
        objects.append(region | square | dict(zip(_ORIGINAL, pixels, strict=True)))
        relations = _relations(study, name)
        if relations:
            phrases = [f"{text.rpartition('|')[2]} seen." for text in relations]
            groups = [[text, "nlp|yes|abnormal"] for text in relations]
            attributes.append(region | {"attributes": groups, "phrases": phrases})
    return {
        "viewpoint": study.frontal.position,
        "gender": study.sex,
        "objects": objects,
        "attributes": attributes,
    }


def _relations(study: Study, region: str) -> list[str]:
    """Return the findings of a lung, and of the heart, as relations."""
    side = region.partition(" ")[0]
    labels = [
        finding.label
        for finding in study.findings
        if (finding.side in (side, "bilateral") if side in ("left", "right") else False)
        or (region == "cardiac silhouette" and finding.label == "Cardiomegaly")
    ]
    present = [
        f"{_CATEGORIES.get(label, 'anatomicalfinding')}|yes|{label.lower()}" for label in labels
    ]
    absent = side in ("left", "right") and "Pneumothorax" not in labels
    return [*dict.fromkeys(present), *(["anatomicalfinding|no|pneumothorax"] if absent else [])]
