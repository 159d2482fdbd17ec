"""Files of small real collections in the folder that `MEDVL_REAL_DATA` names, for `medvl shards
table`.

Splits are those of the collections' files, which share no patient or case; all collections of the
images of Cohen's COVID-19 set, with texts or with masks, have the same ones. MedPix is without the
images of VQA-RAD. Of the paediatric radiographs, images of a person number that the training images
have too are left out, and a tenth of the training persons are for validation. All images with boxes
are test images, as no text belongs to them.
"""

import csv
import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import cv2

from medvl.common.files import write_atomic
from medvl.common.untrusted import parse_json
from medvl.data.annotations import encode_runs, read_corners, region_fields
from medvl.data.reports.labeler import label_report
from medvl.data.text_tasks.tasks import TASKS
from medvl.errors import ConfigError
from medvl.schema import FINDINGS

_REGIONS = ("Head", "Spine and Muscles", "Thorax", "Abdomen", "Reproductive and Urinary System")
_NIH = (
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Effusion",
    "Infiltration",
    "Mass",
    "Nodule",
    "Pneumonia",
    "Pneumothorax",
    "No Finding",
)
_STRUCTURES = {
    "left_lung": "left lung",
    "right_lung": "right lung",
    "cardiomediastinum": "heart",
    "ground_glass_opacities": "ground-glass opacities",
    "consolidation": "consolidation",
}
"""Masks of at least five test images, and the names by which systems are asked for them."""
_FUNDUS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "Normal": (["normal fundus"], ["a healthy retina"]),
    "Diabetic Retinopathy": (
        ["moderate non proliferative retinopathy", "mild nonproliferative retinopathy"],
        ["damage of the retina by diabetes"],
    ),
    "Glaucoma": (["glaucoma"], ["an optic nerve damaged by high pressure in the eye"]),
    "Cataract": (["cataract"], ["clouding of the lens"]),
    "AMD": (
        ["dry age-related macular degeneration", "wet age-related macular degeneration"],
        ["loss of central vision in old age"],
    ),
    "Hypertensive Retinopathy": (
        ["hypertensive retinopathy"],
        ["damage of the retina by high blood pressure"],
    ),
    "Pathological Myopia": (["pathological myopia"], ["severe short-sightedness"]),
}
"""Labels of ODIR, with the doctor's commonest keywords and with other words for them."""
_FUNDUS_PARAPHRASES = {
    "normal fundus": ["no abnormality of the retina", "retina without findings"],
    "mild nonproliferative retinopathy": ["a few microaneurysms", "mild diabetic changes"],
    "moderate non proliferative retinopathy": [
        "haemorrhages and exudates of a diabetic",
        "moderate diabetic changes without new vessels",
    ],
    "severe nonproliferative retinopathy": [
        "haemorrhages in all quadrants of a diabetic",
        "severe diabetic changes",
    ],
    "proliferative diabetic retinopathy": ["new vessels on the retina of a diabetic"],
    "diabetic retinopathy": ["retinal disease due to diabetes"],
    "cataract": ["opacity of the lens", "blurred view through a cloudy lens"],
    "glaucoma": ["cupping of the optic disc", "optic neuropathy from raised pressure"],
    "dry age-related macular degeneration": ["ageing of the macula without fluid"],
    "wet age-related macular degeneration": ["bleeding and fluid under an ageing macula"],
    "hypertensive retinopathy": ["narrow arterioles due to hypertension", "hypertensive vessels"],
    "pathological myopia": ["changes of a stretched, very nearsighted eye", "degenerative myopia"],
    "drusen": ["yellow deposits under the retina"],
    "epiretinal membrane": ["a film on the surface of the retina"],
    "macular epiretinal membrane": ["a film on the surface of the macula"],
    "myelinated nerve fibers": ["white streaks of nerve fibres with myelin"],
    "vitreous degeneration": ["opacities in the vitreous"],
    "refractive media opacity": ["a hazy view"],
    "laser spot": ["scars of laser treatment"],
    "branch retinal vein occlusion": ["a blocked branch of the retinal vein"],
}
"""Other words for the doctor's keywords in training, none of them a prompt of `_FUNDUS`."""
_OPAQUE = {"Atelectasis", "Consolidation", "Edema", "Infiltration", "Pneumonia"}
"""NIH's labels that are opacities, which the boxes are named after."""
_BOXES = "boxes_nih/boxes.jsonl"
_OPACITY = "Lung Opacity"
_PARTS = {"train": "train", "val": "validate", "test": "test"}
Row = dict[str, Any]
Prompts = Mapping[str, tuple[str, Sequence[str]]]
"""Label -> sentence, and the sentences that it is compared with."""


def write_table(name: str, folder: Path) -> list[Path]:
    """Write NAME.jsonl for `medvl shards table`, with NAME.json of zero-shot prompts where it has
    labels, and NAME-other-words.json if there are other words for them; of ODIR also
    paraphrases for training.

    "openi" is the folder of a task of `medvl eval text` in place of a table. Raises ConfigError
    where `MEDVL_REAL_DATA` names no folder with the collection.
    """
    real = Path(os.environ.get("MEDVL_REAL_DATA") or "/MEDVL_REAL_DATA is not set")
    try:
        rows = list(TABLES[name](real))
    except FileNotFoundError as error:
        message = (
            f"{error.filename} does not exist; set MEDVL_REAL_DATA to the folder of the "
            f"real collections"
        )
        raise ConfigError(message, "not_found", field="MEDVL_REAL_DATA") from None
    if name == "openi":
        parts = {"train": "train", "dev": "validate", "test": "test"}
        return [
            _write_lines(
                folder / f"text/openi/{part}.jsonl", [row for row in rows if row["split"] == split]
            )
            for part, split in parts.items()
        ]
    written = [_write_lines(folder / f"{name}.jsonl", rows)]
    if name == "odir":
        written += [
            write_atomic(folder / f"{file}.json", json.dumps(content) + "\n")
            for file, content in _fundus_files().items()
        ]
    for file, sentences in ((name, _PROMPTS), (f"{name}-other-words", _OTHER_WORDS)):
        if name in sentences:
            classes = {
                label: {"positive": [text], "negative": list(others)}
                for label, (text, others) in sentences[name].items()
            }
            rule = {"scoring": "pair_softmax", "temperature": 0.1}
            prompts = {"name": file, **rule, "classes": classes}
            written.append(write_atomic(folder / f"{file}.json", json.dumps(prompts) + "\n"))
    return written


def _medpix(real: Path) -> Iterator[Row]:
    for row in _lines(real / "medpix/captions.jsonl"):
        if row["also_in_vqa_rad"]:
            continue
        labels = {name: int(row["location_category"] == name) for name in _REGIONS}
        labels |= {name: int(row["modality_type"] == name) for name in ("CT", "MR")}
        yield _row(f"medpix/{row['image']}", row["case_id"], row["split"], labels) | {
            "impression": row["caption"]
        }


def _radiographs(real: Path) -> Iterator[Row]:
    for row in _lines(real / "cxr/cxr.jsonl"):
        if row["text"]:
            yield _row(f"cxr/{row['image']}", row["patient_id"], row["split"], {}) | {
                "impression": row["text"]
            }


def _nih(real: Path) -> Iterator[Row]:
    for row in _lines(real / "cxr/cxr.jsonl"):
        if row["source"] == "nih-chestxray14":
            labels = {name: int(name in row["labels"]) for name in _NIH}
            yield _row(f"cxr/{row['image']}", row["patient_id"], row["split"], labels)


def _sentences(real: Path) -> Iterator[Row]:
    """Yield MedPix, and the radiographs of `_chest`."""
    unknown = dict.fromkeys(FINDINGS)
    yield from (row | unknown for row in _medpix(real))
    yield from _chest(real)


def _chest(real: Path) -> Iterator[Row]:
    """Yield the radiographs with texts, and NIH's with their labels as sentences, but patients
    with boxes.

    Labels are those that `label_report` finds in their texts.
    """
    for row in (*_radiographs(real), *_nih_sentences(real)):
        yield row | dict.fromkeys(FINDINGS) | label_report(row["impression"])


def _nih_sentences(real: Path) -> Iterator[Row]:
    with_boxes = {row["patient"] for row in _boxes(real)}
    for row in _lines(real / "cxr/cxr.jsonl"):
        if row["source"] == "nih-chestxray14" and row["patient_id"] not in with_boxes:
            text = " ".join(f"There is {name.lower()}." for name in _findings_of(row["labels"]))
            yield _row(f"cxr/{row['image']}", row["patient_id"], row["split"], {}) | {
                "impression": text
            }


def _findings_of(labels: Sequence[str]) -> list[str]:
    """Return the findings that an image's sentences name: its labels, and lung opacity where one
    of them is that.
    """
    if "No Finding" in labels:
        return ["no lung opacity, pleural effusion, pneumothorax or cardiomegaly"]
    return [*(("lung opacity",) if _OPAQUE.intersection(labels) else ()), *labels]


def _paediatric(real: Path) -> Iterator[Row]:
    """Yield the images; the cause of a normal image is -1, which evaluations leave out."""
    for row in _lines(real / "cxr_pediatric_pneumonia/items.jsonl"):
        if row["split"] == "test" and row["person_also_in_train"]:
            continue
        person = f"{row['label']}-{row['person']}"  # numbers are those of a class
        kept_out = row["split"] == "train" and crc32(person.encode()) % 10 == 0
        labels = {"Pneumonia": int(row["label"] != "normal")}
        labels["Bacterial"] = int(row["label"] == "bacteria") if labels["Pneumonia"] else -1
        split = "val" if kept_out else row["split"]
        yield _row(f"cxr_pediatric_pneumonia/{row['image']}", person, split, labels)


def _odir(real: Path) -> Iterator[Row]:
    """Yield the fundus photographs, whose text is a doctor's keywords."""
    for row in _lines(real / "odir_fundus/items.jsonl"):
        labels = {name: int(name in row["labels"]) for name in _FUNDUS}
        yield _row(f"odir_fundus/{row['image']}", row["patient_id"], row["split"], labels) | {
            "impression": row["text"]
        }


def _fundus_files() -> dict[str, object]:
    """Return the prompts of ODIR, in words of the training and in others, and the paraphrases."""
    words = {
        label: [*keywords, *(text for word in keywords for text in _FUNDUS_PARAPHRASES[word])]
        for label, (keywords, _) in _FUNDUS.items()
    }
    other_words = {label: list(texts) for label, (_, texts) in _FUNDUS.items()}
    files: dict[str, object] = {"odir-paraphrases": _FUNDUS_PARAPHRASES}
    # The better rule of each on validation images.
    for name, texts, scoring in (
        ("odir", words, "positive"),
        ("odir-other-words", other_words, "class_softmax"),
    ):
        classes = {label: {"positive": positive} for label, positive in texts.items()}
        files[name] = {"name": name, "scoring": scoring, "temperature": 0.1, "classes": classes}
    return files


def _boxes(real: Path) -> Iterator[Row]:
    """Yield the images with boxes; the boxes of a finding and a source are a phrase."""
    for row in _lines(real / _BOXES):
        by_finding = _boxes_by_finding(row)
        if by_finding:
            yield _boxed_row(row, by_finding, "test")


def _opacities(real: Path) -> Iterator[Row]:
    """Yield the images that RSNA's radiologists looked at for lung opacity: with their boxes, half
    of the patients for validation; and without any, of the validation and test splits.
    """
    for row, official in _looked_at(real):
        if row[_OPACITY]:
            yield row | {"split": "validate" if crc32(row["patient"].encode()) % 2 else "test"}
        elif official != "train":
            yield row | {"split": _PARTS[official]}


def _opacity_parts(real: Path) -> Iterator[Row]:
    """Yield all of these images, in six parts by patient for a cross-validation."""
    for row, _ in _looked_at(real):
        yield row | {"split": f"part-{crc32(row['patient'].encode()) % 6}"}


def _looked_at(real: Path) -> Iterator[tuple[Row, str]]:
    """Yield the images that RSNA's radiologists looked at for lung opacity, and the collection's
    split of each. Images without opacity of patients who have any box are left out.
    """
    rows = list(_lines(real / _BOXES))
    boxed = {row["patient_id"] for row in rows if _boxes_by_finding(row)}
    for row in rows:
        boxes = _boxes_by_finding(row).get(_OPACITY, [])
        if row.get("rsna_class") and (boxes or row["patient_id"] not in boxed):
            yield _boxed_row(row, {_OPACITY: boxes}, "test"), row["split"]


def _boxes_by_finding(row: Row) -> dict[str, list[Any]]:
    size = (row["width"], row["height"])
    by_finding = dict[str, list[Any]]()
    for box in (*row.get("rsna_boxes", ()), *row.get("nih_boxes", ())):
        parsed = read_corners(box["finding"], box["box_xyxy"], size, Path(_BOXES))
        by_finding.setdefault(box["finding"], []).append(parsed)
    return by_finding


def _boxed_row(row: Row, by_finding: Mapping[str, list[Any]], split: str) -> Row:
    phrases = [{"label": name, "text": name, "boxes": boxes} for name, boxes in by_finding.items()]
    labels = {_OPACITY: int(bool(by_finding.get(_OPACITY)))}
    placed = region_fields((row["width"], row["height"]), {"phrases": phrases})
    return _row(f"cxr/{row['image']}", row["patient_id"], split, labels) | placed


def _structures(real: Path) -> Iterator[Row]:
    for row in _lines(real / "seg_covid_cxr100/items.jsonl"):
        files = {
            label: real / "seg_covid_cxr100" / row["masks"][name]["mask"]
            for name, label in _STRUCTURES.items()
            if name in row["masks"]
        }
        yield _row(
            f"seg_covid_cxr100/{row['image']}", row["patient_id"], row["split"], {}
        ) | _masks(files)


def _lungs(real: Path) -> Iterator[Row]:
    for row in _lines(real / "lung_masks_cohen/items.jsonl"):
        files = {"lungs": real / "lung_masks_cohen" / row["lung_mask"]}
        yield _row(f"cxr/{row['image']}", row["patient_id"], row["split"], {}) | _masks(files)


def _openi(real: Path) -> Iterator[Row]:
    """Yield the reports that people labelled, as documents of a task of `medvl eval text`."""
    with (real / "openi_gold_labels/openi_gold.csv").open(newline="", encoding="utf-8") as file:
        labels = {row["filename"]: row for row in csv.DictReader(file)}
    for report in _lines(real / "openi/openi_reports.jsonl.gz"):
        sentences = [text for name in ("findings", "impression") if (text := report[name])]
        if report["uid"] in labels and sentences:
            given = labels[report["uid"]]
            found = [
                place for place, name in enumerate(TASKS["openi"].labels) if given[name] == "1"
            ]
            yield {
                "id": report["uid"],
                "sentences": sentences,
                "labels": found,
                "split": _PARTS[report["split"]],
            }


TABLES: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    "medpix": _medpix,
    "nih": _nih,
    "paediatric": _paediatric,
    "sentences": _sentences,
    "chest": _chest,
    "odir": _odir,
    "boxes": _boxes,
    "opacities": _opacities,
    "opacity-parts": _opacity_parts,
    "structures": _structures,
    "lungs": _lungs,
    "openi": _openi,
}


def _against_each_other(texts: Mapping[str, str]) -> Prompts:
    """Return prompts of classes of which an image has one, from a sentence for each."""
    return {
        name: (text, [other for other in texts.values() if other != text])
        for name, text in texts.items()
    }


def _denied(texts: Mapping[str, str]) -> Prompts:
    """Return prompts of findings, against the same words after "no"."""
    return {name: (f"There is {text}.", [f"There is no {text}."]) for name, text in texts.items()}


_PROMPTS: Mapping[str, Prompts] = {
    "medpix": {
        **_against_each_other({name: f"{name.lower()}." for name in _REGIONS}),
        **_against_each_other({name: f"{name.lower()}." for name in ("CT", "MR")}),
    },
    "nih": {
        **_denied({name: name.lower() for name in _NIH[:-1]}),
        "No Finding": ("There is no lung opacity.", ["There is lung opacity."]),
    },
    "paediatric": {
        "Pneumonia": ("There is lung opacity.", ["There is no lung opacity."]),
        "Bacterial": ("bacterial pneumonia.", ["viral pneumonia."]),
    },
}
_OTHER_WORDS: Mapping[str, Prompts] = {
    "medpix": {
        **_against_each_other(
            {
                "Head": "the brain and the skull.",
                "Spine and Muscles": "vertebrae, limbs and joints.",
                "Thorax": "the lungs and the heart.",
                "Abdomen": "the liver, bowel and kidneys.",
                "Reproductive and Urinary System": "the bladder, prostate, uterus or ovaries.",
            }
        ),
        **_against_each_other({"CT": "computed tomography.", "MR": "magnetic resonance imaging."}),
    },
    "nih": {
        **_denied(
            {
                "Atelectasis": "collapsed lung tissue",
                "Cardiomegaly": "enlarged heart",
                "Consolidation": "air spaces filled with fluid or pus",
                "Edema": "fluid overload of the lungs",
                "Effusion": "fluid around the lung",
                "Infiltration": "hazy density in the lung",
                "Mass": "large tumour of the lung",
                "Nodule": "small round spot in the lung",
                "Pneumonia": "infection of the lung",
                "Pneumothorax": "air around the lung",
            }
        ),
        "No Finding": ("a healthy chest.", ["a sick chest."]),
    },
    "paediatric": {
        "Pneumonia": ("infection of the lung.", ["healthy lungs."]),
        "Bacterial": ("infection by bacteria.", ["infection by a virus."]),
    },
}
"""Prompts of the same classes in words that differ from the labels'."""


def _row(image: str, patient: str, split: str, labels: Mapping[str, int]) -> Row:
    return {"image": image, "patient": patient, "split": _PARTS[split], **labels}


def _masks(files: Mapping[str, Path]) -> dict[str, object]:
    """Return the fields of masks, one or more, in files of the size of their image."""
    planes = {label: cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) for label, path in files.items()}
    entries = []
    for label, plane_HW in planes.items():
        if plane_HW is None:
            raise FileNotFoundError(None, None, str(files[label]))
        entries.append({"label": label, "runs": encode_runs(plane_HW > 0)})
    height, width = next(plane_HW.shape for plane_HW in planes.values() if plane_HW is not None)
    return region_fields((width, height), {"masks": entries})


def _write_lines(path: Path, rows: Iterable[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        yield from map(parse_json, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file)
