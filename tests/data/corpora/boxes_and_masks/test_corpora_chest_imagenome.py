"""Chest ImaGenome: the converter on fixtures in the published layout and on its phantom."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises
from helpers.mimic_files import write_csv_gz

from medvl.cli import main as cli
from medvl.data.corpora.boxes_and_masks.chest_imagenome import ChestImaGenome
from medvl.data.corpora.reports.mimic_cxr import MimicCXR
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest, sample_to_json
from medvl.errors import CorpusError
from medvl.phantom import write_chest_imagenome, write_mimic_cxr_jpg, write_ms_cxr

FIRST = "02aa804e-bde0afdd-112c0b34-7bc16630-4e384014"
SECOND = "096052b7-d256dc40-453a102b-fa7d01c6-1b22c6b4"
GOLD = "174413ec-4ec4c1f7-34ea26b7-c5f994f8-79ef1962"
GOLD_2 = "2a2277a9-b0ded155-c0de8eb9-c124d10e-82c5caab"
BARE = "b79e55c3-735ce5ac-64412506-cdc9ea79-f1af521f"
METADATA = [
    [FIRST, "10000032", "50414267", "PA", "2000", "1600", "21800506", "213014.5"],
    [SECOND, "10000764", "57375967", "AP", "2000", "1600", "21800507", "1"],
    [GOLD, "11000001", "51000001", "PA", "2000", "1600", "21800508", "1"],
    [GOLD_2, "11000001", "51000002", "PA", "2000", "1600", "21800509", "1"],
    [BARE, "12000001", "52000001", "", "2000", "1600", "21800509", "1"],
]
HEADER = ["dicom_id", "subject_id", "study_id", "ViewPosition", "Rows", "Columns", "StudyDate",
          "StudyTime"]  # fmt: skip


def region(name: str, *corners: object) -> dict[str, object]:
    square = {"x1": 0, "y1": 0, "x2": 9, "y2": 9}
    names = ("original_x1", "original_y1", "original_x2", "original_y2")
    return {"bbox_name": name, **square, **dict(zip(names, corners, strict=False))}


GRAPH: dict[str, Any] = {
    "viewpoint": "PA", "gender": "F",
    "objects": [
        region("left lung", 800, 100, 1500, 1500), region("trachea", 800, 0, 800, 90),
        region("spine", 0, 0, 1700, 1900), region("carina", 10, 20),
    ],
    "attributes": [
        {
            "bbox_name": "left lung",
            "attributes": [
                ["anatomicalfinding|yes|lung opacity", "nlp|yes|abnormal", "severity|yes|mild"],
                ["anatomicalfinding|no|lung opacity", "disease|no|pneumonia"],
                ["tubesandlines|yes|chest tube", "technicalassessment|yes|rotated", "broken"],
            ],
            "phrases": ["Mild left opacity.", "No pneumonia.", "Chest tube."],
        },
        {"bbox_name": "right lung", "attributes": [["disease|no|pneumonia"]], "phrases": []},
    ],
}  # fmt: skip


def write(root: Path, graphs: dict[str, str] | None = None) -> Path:
    splits = root / "silver_dataset" / "splits"
    splits.mkdir(parents=True, exist_ok=True)
    for name, images in (("train", (FIRST, GOLD_2, BARE)), ("valid", (SECOND,)), ("test", (GOLD,))):
        (splits / f"{name}.csv").write_text("\n".join(["dicom_id", *images]) + "\n")
    (splits / "images_to_avoid.csv").write_text(f"dicom_id\n{GOLD}\n")
    write_csv_gz(root / "mimic-cxr-2.0.0-metadata.csv.gz", HEADER, METADATA)
    text = json.dumps(GRAPH)
    with zipfile.ZipFile(root / "silver_dataset" / "scene_graph.zip", "w") as archive:
        for name, content in (graphs or dict.fromkeys((FIRST, SECOND, GOLD, GOLD_2), text)).items():
            archive.writestr(f"scene_graph/{name}_SceneGraph.json", content)
            archive.writestr(f"__MACOSX/scene_graph/._{name}_SceneGraph.json", "")
    return root


def test_regions_have_findings_attributes_and_boxes(tmp_path: Path, deid: Deidentifier) -> None:
    corpus = ChestImaGenome(root=write(tmp_path))
    plan = corpus.plan(deid)
    first, second, test = plan.iter_samples()
    assert [each.split for each in (first, second, test)] == ["train", "validate", "test"]
    assert plan.excluded == {"gold_patient": 1, "no_scene_graph": 1}
    assert (first.key, first.patient) == (deid.image(FIRST), deid.patient("10000032"))
    assert first.study == deid.study("10000032", "50414267")
    assert (first.view, first.sex, first.order, first.sections) == ("PA", "F", 0, {})
    assert first.labels == {"Lung Opacity": 1, "Pneumonia": 0, "chest tube": 1}
    assert plan.label_names == ("Lung Opacity", "Pneumonia", "chest tube")
    assert first.extra["boxes"] == [
        {"label": "left lung", "x": 800, "y": 100, "width": 700, "height": 1400}
    ]
    assert (first.extra["image_width"], first.extra["image_height"]) == (1600, 2000)
    left, right = first.extra["regions"]
    assert left["findings"] == {"lung opacity": 1, "pneumonia": 0, "chest tube": 1}
    assert left["attributes"] == {
        "nlp": ["abnormal"], "severity": ["mild"], "technicalassessment": ["rotated"]
    }  # fmt: skip
    assert left["phrases"][1] == "No pneumonia."
    assert right["findings"] == {"pneumonia": 0}
    of_three = {"box_empty": 3, "box_malformed": 6, "relation_malformed": 3}
    assert {name: plan.warnings[name] for name in of_three} == of_three
    assert FIRST.encode() not in sample_to_json(first)
    (note,) = corpus.notes(plan)
    assert "--without" in note
    assert ChestImaGenome(root=tmp_path, without=(tmp_path,)).notes(plan) == []


def test_reports_are_read_where_they_are_given(tmp_path: Path, deid: Deidentifier) -> None:
    write(tmp_path / "release")
    folder = tmp_path / "reports" / "files" / "p10" / "p10000032"
    folder.mkdir(parents=True)
    (folder / "s50414267.txt").write_text(" FINDINGS: Clear lungs.\n")
    plan = ChestImaGenome(root=tmp_path / "release", reports=tmp_path / "reports").plan(deid)
    assert next(iter(plan.iter_samples())).sections == {"findings": "Clear lungs."}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"objects": [], "attributes": [1]}', '{"objects": []}']
)
def test_damaged_scene_graph_raises(text: str, tmp_path: Path, deid: Deidentifier) -> None:
    write(tmp_path, {FIRST: text})
    with raises(CorpusError, "malformed", names="scene_graph.zip"):
        ChestImaGenome(root=tmp_path).plan(deid)


def test_damaged_archive_and_missing_files_raise(tmp_path: Path, deid: Deidentifier) -> None:
    write(tmp_path)
    archive = tmp_path / "silver_dataset" / "scene_graph.zip"
    archive.write_bytes(b"PK" + b"0" * 50)
    with raises(CorpusError, "malformed", names="scene_graph.zip"):
        ChestImaGenome(root=tmp_path).plan(deid)
    archive.unlink()
    with raises(CorpusError, "not_found", names="scene_graph.zip"):
        ChestImaGenome(root=tmp_path).plan(deid)
    with raises(CorpusError, "not_found", names="metadata"):
        ChestImaGenome(root=tmp_path, images=tmp_path / "silver_dataset").plan(deid)


def test_phantom_has_the_patients_of_mimic_cxr_and_ms_cxr(
    tmp_path: Path, deid: Deidentifier, capsys: pytest.CaptureFixture[str]
) -> None:
    size = {"patients": 12, "seed": 3, "size": 64, "workers": 1}
    genome = write_chest_imagenome(tmp_path / "genome", **size)
    mimic = write_mimic_cxr_jpg(tmp_path / "mimic", **size)
    of_genome = {each.key: each for each in ChestImaGenome(root=genome).plan(deid).iter_samples()}
    of_mimic = {each.key: each for each in MimicCXR(root=mimic).plan(deid).iter_samples()}
    assert of_genome.keys() < of_mimic.keys()
    for key, sample in of_genome.items():
        other = of_mimic[key]
        assert (sample.patient, sample.study) == (other.patient, other.study)
        assert sample.order == other.order

    salt = tmp_path / "salt"
    salt.write_text("ab" * 32)
    common = ["--workers", "1", "--salt-file", str(salt)]
    ms_cxr = write_ms_cxr(tmp_path / "ms", **(size | {"patients": 4}))
    cli.main(["shards", "ms-cxr", "--root", str(ms_cxr), "--out", str(tmp_path / "a"), *common])
    command = ["shards", "chest-imagenome", "--root", str(genome), "--out", str(tmp_path / "b")]
    cli.main([*command, "--without", str(tmp_path / "a" / "test"), *common])
    assert "579" not in capsys.readouterr().out
    held_out = set(Manifest.read(tmp_path / "a" / "test").patients)
    manifests = [Manifest.read(folder) for folder in sorted((tmp_path / "b").glob("*/"))]
    assert held_out
    assert not held_out & {name for each in manifests for name in each.patients}
    assert manifests[0].excluded_from_corpus["gold_patient"] > 0
    assert manifests[0].excluded_from_corpus["no_scene_graph"] > 0
    assert not [name for each in manifests for name in each.warnings if name.startswith("possible")]


GOLD_BOXES = f"""image_id,bbox_name,original_x1,original_y1,original_x2,original_y2,annotator
{GOLD}.dcm,left lung,800,100,1500,1500,A
{GOLD}.dcm,carina,,,,,A
{GOLD_2}.dcm,left lung,800,100,700,1500,A
"""
GOLD_ATTRIBUTES = "\n".join(
    "\t".join(cells)
    for cells in (
        ("row_id", "image_id", "bbox", "relation", "context", "categoryID", "label_name", "sentence"),
        ("1", f"{GOLD}.dcm", "left lung", "1", "yes", "anatomicalfinding", "lung opacity", "Opacity."),
        ("1", f"{GOLD}.dcm", "left lung", "1", "no", "disease", "pneumonia", "Opacity."),
        ("2", f"{GOLD}.dcm", "left lung", "0", "yes", "disease", "hernia", "Hernia."),
        ("3", f"{GOLD}.dcm", "right lung", "1", "yes", "severity", "mild", "Mild."),
    )
)  # fmt: skip


def write_gold(root: Path, boxes: str = GOLD_BOXES, attributes: str = GOLD_ATTRIBUTES) -> Path:
    write(root)
    (root / "gold_dataset").mkdir(exist_ok=True)
    name = "gold_bbox_coordinate_annotations_1000images.csv"
    (root / "gold_dataset" / name).write_text(boxes)
    name = "gold_object_attribute_with_coordinates.txt"
    (root / "gold_dataset" / name).write_text(attributes)
    return root


def test_the_gold_set_is_a_test_split(tmp_path: Path, deid: Deidentifier) -> None:
    corpus = ChestImaGenome(root=write_gold(tmp_path), gold=True)
    plan = corpus.plan(deid)
    first, second = plan.iter_samples()
    assert {first.split, second.split} == {"test"}
    assert first.key == deid.image(GOLD)
    assert first.patient == second.patient == deid.patient("11000001")
    assert first.labels == {"Lung Opacity": 1, "Pneumonia": 0}
    left, right = first.extra["regions"]
    assert left["findings"] == {"lung opacity": 1, "pneumonia": 0}
    assert left["phrases"] == ["Opacity.", "Hernia."]
    assert right["attributes"] == {"severity": ["mild"]}
    assert [box["label"] for box in first.extra["boxes"]] == ["left lung"]
    assert (plan.warnings["box_malformed"], plan.warnings["box_empty"]) == (1, 1)
    assert (second.labels, corpus.notes(plan)) == ({}, [])


@pytest.mark.parametrize(
    ("boxes", "attributes", "expected"),
    [
        (GOLD_BOXES.replace(GOLD, "../a"), GOLD_ATTRIBUTES, ("malformed", "image_id")),
        (GOLD_BOXES, GOLD_ATTRIBUTES.replace(GOLD, FIRST), ("mismatch",)),
        (GOLD_BOXES, GOLD_ATTRIBUTES.replace("\t1\tno", "\t2\tno"), ("malformed", "relation")),
        (GOLD_BOXES, GOLD_ATTRIBUTES.replace("context", "polarity"), ("missing", "context")),
    ],
)
def test_a_damaged_gold_set_raises(
    boxes: str, attributes: str, expected: tuple[str, ...], tmp_path: Path, deid: Deidentifier
) -> None:
    with raises(CorpusError, *expected):
        ChestImaGenome(root=write_gold(tmp_path, boxes, attributes), gold=True).plan(deid)


def test_the_gold_set_of_the_phantom_has_the_regions_of_its_scene_graphs(
    tmp_path: Path, deid: Deidentifier
) -> None:
    root = write_chest_imagenome(tmp_path / "genome", patients=8, seed=3, size=64, workers=1)
    avoided = root / "silver_dataset/splits/images_to_avoid.csv"
    listed = avoided.read_text().splitlines()
    avoided.write_text(listed[0] + "\n")
    silver = {one.key: one for one in ChestImaGenome(root=root).plan(deid).iter_samples()}
    gold = list(ChestImaGenome(root=root, gold=True).plan(deid).iter_samples())
    assert len(gold) == len(listed) - 1 > 1
    compared = [(one, silver[one.key]) for one in gold if one.key in silver]
    assert compared
    for one, other in compared:
        assert (one.labels, one.extra["boxes"]) == (other.labels, other.extra["boxes"])
        assert [each["findings"] for each in one.extra["regions"]] == [
            each["findings"] for each in other.extra["regions"]
        ]
