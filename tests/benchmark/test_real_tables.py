"""Tables of the small real collections: no patient in two splits, boxes and masks as in their
files.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any
from zlib import crc32

import cv2
import numpy as np
import pytest
from helpers.errors import raises

from medvl.benchmark.real_tables import TABLES, write_table
from medvl.data import Paraphrases
from medvl.data.annotations import decode_runs, phrases_of
from medvl.data.text_tasks.read import read_text_task
from medvl.data.text_tasks.tasks import TASKS
from medvl.errors import ConfigError
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.schema import Sample


def written(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_missing_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(tmp_path))
    for name, folder in (
        ("medpix", "medpix"),
        ("lungs", "lung_masks_cohen"),
        ("openi", "openi_gold_labels"),
    ):
        with raises(ConfigError, "not_found", "MEDVL_REAL_DATA", names=str(tmp_path / folder)):
            write_table(name, tmp_path)


def test_boxes_of_a_finding_are_a_phrase_of_a_test_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(tmp_path))
    image = {
        "image": "images/a.jpg",
        "split": "train",
        "patient_id": "p",
        "width": 384,
        "height": 300,
    }
    opacities = [
        {"finding": "Lung Opacity", "box_xyxy": box}
        for box in ([10, 20, 30.5, 60], [200, 20, 300, 60])
    ]
    nodule = [{"finding": "Nodule", "box_xyxy": [5, 5, 9, 9]}]
    lines = [image | {"rsna_boxes": opacities, "nih_boxes": nodule}, image | {"rsna_boxes": []}]
    written(tmp_path / "boxes_nih/boxes.jsonl", lines)
    [path] = write_table("boxes", tmp_path / "out")
    [row] = rows_of(path)
    assert (row["image"], row["split"], row["Lung Opacity"]) == ("cxr/images/a.jpg", "test", 1)
    extra = {name: row[name] for name in ("phrases", "image_width", "image_height")}
    opacity, other = phrases_of(
        Sample(key="k", corpus="c", split="test", patient="p", study="s", extra=extra)
    )
    assert (opacity.text, other.text) == ("Lung Opacity", "Nodule")
    assert opacity.boxes[0] == {
        "label": "Lung Opacity",
        "x": 10,
        "y": 20,
        "width": 20.5,
        "height": 40,
    }
    assert len(opacity.boxes) == 2


def test_looked_at_images_without_opacity_are_phrases_without_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(tmp_path))
    image = {"image": "a.jpg", "width": 20, "height": 20, "rsna_class": "Normal", "rsna_boxes": []}
    box = {"rsna_boxes": [{"finding": "Lung Opacity", "box_xyxy": [5, 5, 9, 9]}]}
    lines = [
        image | box | {"patient_id": "p", "split": "train"},
        image | {"patient_id": "p", "split": "test"},  # another image of a patient with boxes
        image | {"patient_id": "q", "split": "train"},
        image | {"patient_id": "r", "split": "test"},
        image | {"patient_id": "s", "split": "val"},
        image | {"patient_id": "t", "split": "test", "rsna_class": None},
    ]
    written(tmp_path / "boxes_nih/boxes.jsonl", lines)
    [path] = write_table("opacities", tmp_path / "out")
    boxed, *others = rows_of(path)
    assert [len(each["boxes"]) for each in boxed["phrases"]] == [1]
    assert [(row["patient"], row["split"]) for row in others] == [("r", "test"), ("s", "validate")]
    assert all(row["phrases"][0]["boxes"] == [] and row["Lung Opacity"] == 0 for row in others)
    parts = rows_of(write_table("opacity-parts", tmp_path / "out")[0])
    assert [row["patient"] for row in parts] == ["p", "q", "r", "s"]
    assert [row["Lung Opacity"] for row in parts] == [1, 0, 0, 0]
    assert all(row["split"] == f"part-{crc32(row['patient'].encode()) % 6}" for row in parts)


def test_labels_become_sentences_but_those_of_patients_with_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(tmp_path))
    nih = {"source": "nih-chestxray14", "split": "train", "text": None}
    labels = {"p": ["Nodule"], "q": ["Pneumonia", "Effusion"], "r": ["No Finding"], "s": ["Hernia"]}
    images = [
        nih | {"image": f"{name}.jpg", "patient_id": name, "labels": found}
        for name, found in labels.items()
    ]
    cohen = {
        "source": "cohen",
        "image": "c.jpg",
        "patient_id": "c",
        "split": "test",
        "text": "Hazy.",
        "labels": [],
    }
    written(tmp_path / "cxr/cxr.jsonl", [*images, cohen])
    box = [{"finding": "Nodule", "box_xyxy": [5, 5, 9, 9]}]
    other = {
        "image": "other.jpg",
        "patient_id": "p",
        "split": "test",
        "width": 20,
        "height": 20,
        "nih_boxes": box,
    }
    written(tmp_path / "boxes_nih/boxes.jsonl", [other])
    medpix = {
        "image": "m.jpg",
        "case_id": "m",
        "split": "val",
        "location_category": "Head",
        "modality_type": "MR",
    }
    seen = [
        medpix | {"also_in_vqa_rad": True},
        medpix | {"also_in_vqa_rad": False, "caption": "A mass."},
    ]
    written(tmp_path / "medpix/captions.jsonl", seen)
    rows = rows_of(write_table("sentences", tmp_path / "out")[0])
    assert {row["patient"]: row["impression"] for row in rows} == {
        "m": "A mass.",
        "c": "Hazy.",
        "q": "There is lung opacity. There is pneumonia. There is effusion.",
        "r": "There is no lung opacity, pleural effusion, pneumothorax or cardiomegaly.",
        "s": "There is hernia.",
    }
    labels = {
        row["patient"]: {name: row[name] for name in ("Lung Opacity", "Pneumonia")} for row in rows
    }
    assert labels["q"] == {"Lung Opacity": 1, "Pneumonia": 1}
    assert labels["r"] == {"Lung Opacity": 0, "Pneumonia": None}
    assert labels["m"] == {"Lung Opacity": None, "Pneumonia": None}
    assert rows_of(write_table("chest", tmp_path / "out")[0]) == [
        row for row in rows if row["patient"] != "m"
    ]


@pytest.mark.parametrize("name", ["medpix", "nih"])
def test_prompts_in_other_words_share_the_classes_and_no_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(tmp_path))
    for table in ("medpix/captions.jsonl", "cxr/cxr.jsonl"):
        written(tmp_path / table, [])
    write_table(name, tmp_path)
    files = (tmp_path / f"{name}.json", tmp_path / f"{name}-other-words.json")
    known, other = (load_prompts(path).classes for path in files)
    assert known.keys() == other.keys()
    for label in known:
        assert not {*known[label].positive} & {*other[label].positive}


def test_masks_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(tmp_path))
    mask_HW = np.zeros((6, 8), np.uint8)
    mask_HW[1:3, 2:7] = 255
    line = {"image": "images/a.jpg", "split": "val", "patient_id": "p", "lung_mask": "masks/a.png"}
    written(tmp_path / "lung_masks_cohen/items.jsonl", [line])
    (tmp_path / "lung_masks_cohen/masks").mkdir()
    with raises(ConfigError, "not_found", "MEDVL_REAL_DATA", names="a.png"):
        write_table("lungs", tmp_path / "out")
    cv2.imwrite(str(tmp_path / "lung_masks_cohen/masks/a.png"), mask_HW)
    [row] = rows_of(write_table("lungs", tmp_path / "out")[0])
    assert (row["split"], row["image_width"], row["image_height"]) == ("validate", 8, 6)
    [entry] = row["masks"]
    assert entry["label"] == "lungs"
    assert np.array_equal(decode_runs(entry["runs"], 6, 8), mask_HW > 0)


def test_odir_has_prompts_in_two_wordings_and_paraphrases_of_its_keywords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(tmp_path))
    eye = {"image": "images/0_left.jpg", "patient_id": "odir-0", "split": "val"}
    written(
        tmp_path / "odir_fundus/items.jsonl",
        [{**eye, "text": "cataract, drusen", "labels": ["Cataract"]}],
    )
    table, *files = write_table("odir", tmp_path / "out")
    (row,) = rows_of(table)
    assert (row["image"], row["split"]) == ("odir_fundus/images/0_left.jpg", "validate")
    assert (row["impression"], row["Cataract"], row["AMD"]) == ("cataract, drusen", 1, 0)
    known, other = (
        load_prompts(tmp_path / f"out/{name}.json") for name in ("odir", "odir-other-words")
    )
    assert set(known.classes) == set(other.classes) <= set(row)
    paraphrases = Paraphrases(file=tmp_path / "out/odir-paraphrases.json", rate=1.0)
    paraphrases.check()
    of_prompts = {text for name in other.classes for text in other.classes[name].positive}
    for keyword, others in json.loads(paraphrases.file.read_text()).items():
        assert not of_prompts & {keyword, *others}, "prompts in other words are not trained with"
    assert {path.name for path in files} == {
        "odir.json",
        "odir-other-words.json",
        "odir-paraphrases.json",
    }


@pytest.mark.real
@pytest.mark.parametrize("name", [name for name in TABLES if name != "openi"])
def test_no_patient_is_in_two_splits(
    name: str, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(real_data))
    splits: dict[str, set[str]] = defaultdict(set)
    for row in rows_of(write_table(name, tmp_path)[0]):
        splits[row["patient"]].add(row["split"])
        assert (real_data / row["image"]).is_file()
    assert {len(found) for found in splits.values()} == {1}
    parts = {"boxes": {"test"}, "opacities": {"validate", "test"}}
    parts["opacity-parts"] = {f"part-{number}" for number in range(6)}
    expected = parts.get(name, {"train", "validate", "test"})
    assert {split for found in splits.values() for split in found} == expected


@pytest.mark.real
def test_reports_with_labels_of_people_are_a_text_task(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDVL_REAL_DATA", str(real_data))
    write_table("openi", tmp_path)
    splits = read_text_task(tmp_path / "text", TASKS["openi"])
    assert {split: len(rows) > 300 for split, rows in splits.items()} == {
        "train": True,
        "dev": True,
        "test": True,
    }
    assert (
        sum("normal" in row.label for row in splits["test"] if isinstance(row.label, tuple)) > 100
    )
