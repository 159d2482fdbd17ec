"""RSNA, SIIM, NIH ChestX-ray14 and COVIDx converters on valid and invalid fixtures in the
published layouts.
"""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from helpers.mimic_files import textured
from hypothesis import given, strategies as st

from medvl.cli import main as cli
from medvl.data.annotations import decode_runs, encode_runs, read_box
from medvl.data.corpora.boxes_and_masks import rsna, siim
from medvl.data.corpora.labels import covidx, nih_cxr14
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import sample_to_json
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, CorpusError

CARDS = Path(__file__).parents[4] / "data_cards"
MAPPING = "pneumonia-challenge-dataset-mappings_2018.json"


def write_dicom(path: Path, seed: int, side: int = 1024) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_dataset(
        path,
        image_dataset(
            textured(seed, side, side), PatientSex="F", PatientAge="051Y", ViewPosition="PA"
        ),
    )


def write_png(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), textured(seed, 40, 40))


# Boxes and masks


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (["1", "2", "3"], ("malformed", "boxes")),
        (["1", "2", "3", "x"], ("malformed", "boxes")),
        (["1", "2", "0", "4"], ("out_of_range", "boxes")),
        (["1", "2", "nan", "4"], ("out_of_range", "boxes")),
        (["1000", "2", "26", "4"], ("out_of_range", "boxes")),
        (["-3", "2", "26", "4"], ("out_of_range", "boxes")),
    ],
)
def test_invalid_box_raises(fields, expected):
    with raises(CorpusError, *expected, names="table.csv"):
        read_box("Mass", fields, (1024, 1024), Path("table.csv"))


def test_mask_runs_are_column_major_with_relative_gaps():
    mask_HW = decode_runs("1 2 3 1", 4, 3)
    np.testing.assert_array_equal(
        mask_HW, np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=bool)
    )
    assert encode_runs(mask_HW) == "1 2 3 1"
    assert not decode_runs("-1", 4, 3).any()
    assert encode_runs(np.zeros((4, 3), bool)) == "-1"
    assert decode_runs("0 12", 4, 3).all()


@given(st.integers(1, 9), st.integers(1, 9), st.randoms(use_true_random=False))
def test_mask_runs_round_trip(height, width, random):
    mask_HW = np.array([[random.random() < 0.4 for _ in range(width)] for _ in range(height)])
    runs = encode_runs(mask_HW)
    np.testing.assert_array_equal(decode_runs(runs, height, width), mask_HW)
    assert encode_runs(decode_runs(runs, height, width)) == runs


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ("", ("malformed", "masks")), ("3", ("malformed", "masks")), ("1 2 "
                                                                      "3", ("malformed", "masks")), ("1 0", ("malformed", "masks")), ("-2 3", ("malformed", "masks")),
        ("a b", ("malformed", "masks")), ("1 99999999999999999999", ("malformed", "masks")),
        ("1 "
         "12", ("out_of_range", "masks")), ("1 9223372036854775807 1 "
                                            "9223372036854775807", ("out_of_range", "masks")),
    ],
)  # fmt: skip
def test_invalid_mask_runs_raise(runs, expected):
    with raises(CorpusError, *expected):
        decode_runs(runs, 4, 3)


# RSNA

OPACITY, NORMAL, OTHER, SECOND = (f"{letter * 8}-14fd-4e49-80ba-63a80b6bddd6" for letter in "0123")
RSNA_LABELS = f"""patientId,x,y,width,height,Target
{OPACITY},264.0,152.0,213.0,379.0,1
{OPACITY},562.0,152.0,256.0,453.0,1
{NORMAL},,,,,0
{OTHER},,,,,0
{SECOND},,,,,0
"""
RSNA_CLASSES = f"""patientId,class
{OPACITY},Lung Opacity
{OPACITY},Lung Opacity
{NORMAL},Normal
{OTHER},No Lung Opacity / Not Normal
{SECOND},Normal
"""
RSNA_FILES = {
    OPACITY: "00000013_005.png",
    NORMAL: "00000013_006.png",
    OTHER: "00000020_000.png",
    SECOND: "00030805_000.png",
}


def write_rsna(
    root: Path, labels: str = RSNA_LABELS, classes: str = RSNA_CLASSES, files: dict = RSNA_FILES
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "stage_2_train_labels.csv").write_text(labels)
    (root / "stage_2_detailed_class_info.csv").write_text(classes)
    rows = [
        {
            "subset_img_id": image,
            "img_id": name,
            "SOPInstanceUID": "1.2.276.0",
            "orig_labels": ["Mass"],
        }
        for image, name in files.items()
    ]
    (root / MAPPING).write_text(json.dumps(rows))
    return root


def test_rsna_samples_have_labels_boxes_and_nih_patients(
    tmp_path: Path, deid: Deidentifier
) -> None:
    samples = {
        sample.key: sample
        for sample in rsna.RSNA(root=write_rsna(tmp_path)).plan(deid).iter_samples()
    }
    assert len(samples) == 4
    opacity, normal = samples[deid.image(OPACITY)], samples[deid.image(NORMAL)]
    assert opacity.labels == {"Pneumonia": 1, "No Finding": 0}
    assert opacity.extra == {
        "class": "Lung Opacity",
        "boxes": [
            {"label": "Pneumonia", "x": 264.0, "y": 152.0, "width": 213.0, "height": 379.0},
            {"label": "Pneumonia", "x": 562.0, "y": 152.0, "width": 256.0, "height": 453.0},
        ],
        "image_width": 1024,
        "image_height": 1024,
    }
    assert (normal.labels, normal.extra["boxes"]) == ({"Pneumonia": 0, "No Finding": 1}, [])
    assert samples[deid.image(OTHER)].labels == {"Pneumonia": 0, "No Finding": 0}
    assert opacity.patient == normal.patient == deid.patient("00000013")
    assert opacity.split == normal.split
    assert opacity.image == tmp_path / "stage_2_train_images" / f"{OPACITY}.dcm"
    stored = b"".join(map(sample_to_json, samples.values())).decode()
    assert not any(word in stored for word in (*RSNA_FILES, *RSNA_FILES.values(), "00000013"))


def test_rsna_missing_mapping_raises_unless_patients_are_images(
    tmp_path: Path, deid: Deidentifier
) -> None:
    root = write_rsna(tmp_path)
    (root / MAPPING).unlink()
    with raises(CorpusError, "not_found"):
        rsna.RSNA(root=root).plan(deid)
    plan = rsna.RSNA(root=root, patients="image").plan(deid)
    assert len({record.sample.patient for record in plan.records}) == 4
    with raises(ConfigError, "unknown_name", "patients"):
        rsna.RSNA(root=root, patients="nobody").plan(deid)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"labels": RSNA_LABELS.replace("379.0,1", "379.0,0")}, ("malformed", "Target")),
        ({"labels": RSNA_LABELS.replace("213.0", "913.0")}, ("out_of_range", "boxes")),
        ({"labels": RSNA_LABELS.replace("264.0", "")}, ("malformed", "boxes")),
        ({"labels": RSNA_LABELS.replace(f"{SECOND},,,,,0\n", "")}, ("mismatch",)),
        ({"labels": RSNA_LABELS.replace("Target", "target")}, ("missing", "Target")),
        ({"classes": RSNA_CLASSES.replace("Not Normal", "Odd")}, ("malformed", "class")),
        ({"classes": RSNA_CLASSES.replace(NORMAL, "7")}, ("malformed", "patientId")),
        ({"classes": RSNA_CLASSES.replace(NORMAL, "4" + NORMAL[1:])}, ("mismatch",)),
        ({"files": {OPACITY: "00000013_005.png"}}, ("mismatch",)),
        ({"files": RSNA_FILES | {OTHER: "20.png"}}, ("malformed", "img_id")),
    ],
)
def test_rsna_invalid_value_raises(
    change: dict, expected: tuple[str, ...], tmp_path: Path, deid: Deidentifier
) -> None:
    with raises(CorpusError, *expected):
        rsna.RSNA(root=write_rsna(tmp_path, **change)).plan(deid)


def test_rsna_malformed_mapping_raises(tmp_path: Path, deid: Deidentifier) -> None:
    root = write_rsna(tmp_path)
    (root / MAPPING).write_text('[{"img_id": 1}]')
    with raises(CorpusError, "malformed"):
        rsna.RSNA(root=root).plan(deid)


# SIIM

UIDS = [f"1.2.276.0.7230010.3.1.4.8323329.{number}.1517875" for number in range(3)]
SIIM = {UIDS[0]: ["10 5 1019 5"], UIDS[1]: ["-1"], UIDS[2]: ["0 3", "2048 4", "0 3"]}


def write_siim(root: Path, stage: int = 2, masks: dict[str, list[str]] = SIIM) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    blank = " " if stage == 1 else ""
    lines = [f"ImageId,{blank}EncodedPixels"]
    lines += [f"{image},{blank}{runs}" for image, texts in masks.items() for runs in texts]
    (root / ("train-rle.csv" if stage == 1 else "stage_2_train.csv")).write_text(
        "\n".join(lines) + "\n"
    )
    return root


@pytest.mark.parametrize("stage", [1, 2])
def test_siim_samples_have_each_mask_once(stage: int, tmp_path: Path, deid: Deidentifier) -> None:
    write_dicom(tmp_path / "dicom-images-train" / "1.2.3" / "4.5.6" / f"{UIDS[0]}.dcm", 0, side=8)
    samples = {
        sample.key: sample
        for sample in siim.SIIM(root=write_siim(tmp_path, stage)).plan(deid).iter_samples()
    }
    first, second, third = (samples[deid.image(uid)] for uid in UIDS)
    assert [sample.labels["Pneumothorax"] for sample in (first, second, third)] == [1, 0, 1]
    assert first.extra == {
        "masks": [{"label": "Pneumothorax", "runs": "10 5 1019 5"}],
        "image_width": 1024,
        "image_height": 1024,
    }
    assert second.extra["masks"] == []
    assert [mask["runs"] for mask in third.extra["masks"]] == ["0 3", "2048 4"]
    assert first.image is not None
    assert first.image.parent.name == "4.5.6"
    assert not any(
        uid in sample_to_json(sample).decode() for sample in samples.values() for uid in UIDS
    )


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({UIDS[0]: ["1 2 3"]}, ("malformed", "masks")),
        ({UIDS[0]: ["1 1048576"]}, ("out_of_range", "masks")),
        ({"../x": ["-1"]}, ("malformed", "ImageId")),
    ],
)
def test_siim_invalid_value_raises(
    masks: dict, expected: tuple[str, ...], tmp_path: Path, deid: Deidentifier
) -> None:
    with raises(CorpusError, *expected, names="stage_2_train.csv"):
        siim.SIIM(root=write_siim(tmp_path, masks=masks)).plan(deid)


# NIH ChestX-ray14

NIH_HEADER = (
    "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient {sex},View Position,"
    "OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y]"
)
NIH_ROWS = [  # file, findings, patient, age, sex, view
    ("00000001_000.png", "Cardiomegaly|Effusion", 1, 58, "M", "PA"),
    ("00000001_001.png", "No Finding", 1, 58, "M", "AP"),
    ("00000002_000.png", "Infiltration|Pleural_Thickening", 2, 414, "F", "PA"),
    ("00000003_000.png", "Hernia", 3, 95, "F", "PA"),
    ("00000004_000.png", "Mass", 4, 40, "F", "PA"),
]
NIH_TEST = ("00000003_000.png",)
NIH_BOXES = """Image Index,Finding Label,Bbox [x,y,w,h],,,
00000002_000.png,Infiltrate,225.084745762712,547.019216763771,86.7796610169491,79.1864406779661,,,
00000003_000.png,Mass,686.101694915254,131.543498235279,185.491525423729,313.492063492063
"""


def write_nih(
    root: Path, first: bool = True, rows: list = NIH_ROWS, boxes: str = NIH_BOXES
) -> Path:
    """Write the first release (ages like 058Y, a comma at the end of each line) or that of 2020."""
    root.mkdir(parents=True, exist_ok=True)
    end = "," if first else ""
    lines = [NIH_HEADER.format(sex="Gender") + end if first else NIH_HEADER.format(sex="Sex")]
    for file, findings, patient, age, sex, view in rows:
        age_text = f"{age:03d}Y" if first else str(age)
        lines.append(
            f"{file},{findings},0,{patient},{age_text},{sex},{view},2682,2749,0.143,0.143{end}"
        )
    table = "Data_Entry_2017.csv" if first else "Data_Entry_2017_v2020.csv"
    (root / table).write_text("\n".join(lines) + "\n")
    listed = [row[0] for row in rows if row[0] not in (*NIH_TEST, "00000004_000.png")]
    (root / "train_val_list.txt").write_text("\n".join(listed))
    (root / "test_list.txt").write_text("\n".join(NIH_TEST) + "\n")
    (root / "BBox_List_2017.csv").write_text(boxes)
    for number, row in enumerate(rows):
        folder = root / (f"images_{1 + number % 2:03d}/images" if first else "images")
        write_png(folder / str(row[0]), number)
    return root


@pytest.mark.parametrize("first", [True, False], ids=["2017", "2020"])
def test_nih_samples_have_labels_boxes_and_the_official_test_split(
    first: bool, tmp_path: Path, deid: Deidentifier
) -> None:
    plan = nih_cxr14.NIHCXR14(root=write_nih(tmp_path, first)).plan(deid)
    samples = {record.sample.key: record.sample for record in plan.records}
    assert (len(samples), plan.excluded, plan.warnings) == (
        4,
        {"in_no_official_list": 1},
        {"impossible_age": 1},
    )
    assert plan.label_names == nih_cxr14.LABELS
    one, two, three, four = (samples[deid.image(row[0])] for row in NIH_ROWS[:4])
    assert {name for name, value in one.labels.items() if value} == {
        "Cardiomegaly",
        "Pleural Effusion",
    }
    assert set(one.labels) == set(nih_cxr14.LABELS)
    assert {name for name, value in three.labels.items() if value} == {
        "Infiltration",
        "Pleural Thickening",
    }
    assert (one.sex, one.age, one.view, three.age, four.age) == ("M", 58, "PA", None, 90)
    assert one.patient == two.patient == deid.patient("00000001")
    assert one.split == two.split
    assert [sample.split for sample in samples.values()].count("test") == 1
    assert four.split == "test"
    assert three.extra["boxes"] == [
        {
            "label": "Infiltration",
            "x": 225.084745762712,
            "y": 547.019216763771,
            "width": 86.7796610169491,
            "height": 79.1864406779661,
        }
    ]
    assert (three.extra["image_width"], one.extra) == (1024, {})
    assert all(sample.image is not None and sample.image.is_file() for sample in samples.values())
    assert not any(row[0][:-4] in sample_to_json(one).decode() for row in NIH_ROWS)


def test_nih_and_rsna_hash_patients_equally(tmp_path: Path, deid: Deidentifier) -> None:
    rsna_patients = {
        s.patient for s in rsna.RSNA(root=write_rsna(tmp_path / "rsna")).plan(deid).iter_samples()
    }
    rows = [("00000013_001.png", "No Finding", 13, 40, "F", "PA")]
    nih_patients = {
        s.patient
        for s in nih_cxr14.NIHCXR14(root=write_nih(tmp_path / "nih", rows=rows))
        .plan(deid)
        .iter_samples()
    }
    assert nih_patients < rsna_patients


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"rows": [("00000001_000.png", "Flu", 1, 58, "M", "PA")]},
            ("malformed", "Finding Labels"),
        ),
        ({"rows": [("00000001_000.png", "Mass", 2, 58, "M", "PA")]}, ("malformed", "Image Index")),
        (
            {"rows": [("00000001_000.png", "Mass", "one", 58, "M", "PA")]},
            ("malformed", "Image Index"),
        ),
        ({"boxes": NIH_BOXES.replace("Infiltrate", "Spot")}, ("malformed",)),
        ({"boxes": NIH_BOXES.replace("Finding Label", "Label")}, ("missing", "Finding Label")),
        ({"boxes": NIH_BOXES.replace("547.019216763771", "")}, ("malformed", "boxes")),
        ({"boxes": NIH_BOXES + "00000001_000.png\n"}, ("malformed",)),
        ({"boxes": NIH_BOXES + '"' + "x" * (1 << 18)}, ("malformed",)),
    ],
)
def test_nih_invalid_value_raises(
    change: dict, expected: tuple[str, ...], tmp_path: Path, deid: Deidentifier
) -> None:
    with raises(CorpusError, *expected):
        nih_cxr14.NIHCXR14(root=write_nih(tmp_path, **change)).plan(deid)


def test_nih_blank_lines_of_the_boxes_are_skipped(tmp_path: Path, deid: Deidentifier) -> None:
    one, other = (
        [
            record.sample.extra
            for record in nih_cxr14.NIHCXR14(root=write_nih(tmp_path / name, boxes=boxes))
            .plan(deid)
            .records
        ]
        for name, boxes in (("plain", NIH_BOXES), ("blank", f"{NIH_BOXES}\n\n"))
    )
    assert one == other


def test_nih_invalid_lists_or_share_raise(tmp_path: Path, deid: Deidentifier) -> None:
    root = write_nih(tmp_path)
    (root / "test_list.txt").write_text("00000001_000.png\n")
    with raises(CorpusError, "malformed"):
        nih_cxr14.NIHCXR14(root=root).plan(deid)
    (root / "test_list.txt").unlink()
    with raises(CorpusError, "not_found"):
        nih_cxr14.NIHCXR14(root=root).plan(deid)
    with raises(ConfigError, "out_of_range", "validate_share"):
        nih_cxr14.NIHCXR14(root=root, validate_share=1.0).plan(deid)


# COVIDx

COVIDX_3A = {
    "train": [
        "1 1-s2.0 S0140 gr1 a.png COVID-19 cohen",
        "1 COVID-19(1).png COVID-19 sirm",
        f"{NORMAL} {NORMAL}.png normal rsna",
        f"{OTHER} {OTHER}.png pneumonia rsna",
    ],
    "test": ["419639-003251 MIDRC-RICORD-1C-419639-003251-46647-0.png COVID-19 ricord"],
}
COVIDX_4 = {
    "train": ["101 ARDSSevere.png negative cohen"],
    "val": ["sub-S03047 sub-S03047_ses-E07985_run-1_bp-chest_vp-ap_dx.png positive bimcv"],
    "test": [f"{NORMAL} {NORMAL}.png negative rsna"],
}


def write_covidx(root: Path, lists: dict[str, list[str]] = COVIDX_4, version: str = "") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for split, lines in lists.items():
        (root / f"{split}{version}.txt").write_text("\n".join(lines) + "\n")
        for number, line in enumerate(lines):
            write_png(root / split / " ".join(line.split()[1:-2]), number)
    return root


def test_covidx_4_has_official_splits_and_two_classes(tmp_path: Path, deid: Deidentifier) -> None:
    plan = covidx.COVIDx(root=write_covidx(tmp_path)).plan(deid)
    by_split = {record.sample.split: record.sample for record in plan.records}
    assert plan.label_names == ("COVID-19",)
    assert {split: sample.labels["COVID-19"] for split, sample in by_split.items()} == {
        "train": 0, "validate": 1, "test": 0,
    }  # fmt: skip
    assert by_split["test"].patient == deid.patient(NORMAL)  # the RSNA patient
    assert by_split["train"].patient == deid.patient("cohen 101")
    assert all(sample.image is not None and sample.image.is_file() for sample in by_split.values())


def test_covidx_3a_validation_is_hashed_and_patients_are_per_source(
    tmp_path: Path, deid: Deidentifier
) -> None:
    root = write_covidx(tmp_path, COVIDX_3A, "_COVIDx_CXR-3A")
    with raises(CorpusError, "not_found"):
        covidx.COVIDx(root=root).plan(deid)
    plan = covidx.COVIDx(root=root, version="COVIDx_CXR-3A", validate_share=0.5).plan(deid)
    assert plan.label_names == ("COVID-19", "Other Pneumonia", "Normal")
    samples = [record.sample for record in plan.records]
    assert [sum(sample.labels.values()) for sample in samples] == [1] * 5
    assert samples[0].patient != samples[1].patient  # patient 1 of two sources
    assert samples[0].image == root / "train" / "1-s2.0 S0140 gr1 a.png"
    assert {sample.split for sample in samples} >= {"train", "validate", "test"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("101 a.png sick cohen", ("malformed",)),
        ("101 positive cohen", ("malformed",)),
        ("101 ../a.png positive cohen", ("malformed",)),
        ("101 a.txt positive cohen", ("malformed",)),
    ],
)
def test_covidx_invalid_line_raises(
    line: str, expected: tuple[str, ...], tmp_path: Path, deid: Deidentifier
) -> None:
    root = write_covidx(tmp_path)
    (root / "train.txt").write_text(line + "\n")
    with raises(CorpusError, *expected, names="train.txt, line 1"):
        covidx.COVIDx(root=root).plan(deid)


# As commands


def test_shard_commands_write_regions(tmp_path, monkeypatch, capsys):
    root = write_rsna(tmp_path / "rsna")
    for number, image in enumerate(RSNA_FILES):
        write_dicom(root / "stage_2_train_images" / f"{image}.dcm", number, side=64)
    shares = ["--splits", "train=0.999999", "test=0.000001"]
    common = ["--workers", "1", "--short-side", "32"]
    cli.main(
        ["shards", "rsna", "--root", str(root), "--out", str(tmp_path / "out"), *common, *shares]
    )
    source = ShardSource(tmp_path / "out" / "train")
    samples = [source.sample(place) for place in range(len(source))]
    assert [len(sample.extra["boxes"]) for sample in samples if sample.labels["Pneumonia"]] == [2]
    assert (samples[0].sex, samples[0].age, samples[0].view) == (
        "F",
        51,
        "PA",
    )  # from the DICOM header
    assert source.label_names == rsna.LABELS
    nih, covid = write_nih(tmp_path / "nih"), write_covidx(tmp_path / "covidx")
    cli.main(
        ["shards", "nih-cxr14", "--root", str(nih), "--out", str(tmp_path / "nih-out"), *common]
    )
    cli.main(
        ["shards", "covidx", "--root", str(covid), "--out", str(tmp_path / "covid-out"), *common]
    )
    assert ShardSource(tmp_path / "nih-out" / "test").label_names == nih_cxr14.LABELS
    assert {path.name for path in (tmp_path / "covid-out").iterdir()} == {
        "train",
        "validate",
        "test",
    }
    siim_root = write_siim(tmp_path / "siim")
    for number, uid in enumerate(UIDS):
        write_dicom(siim_root / "dicom-images-train" / "1" / "2" / f"{uid}.dcm", number, side=64)
    cli.main(
        [
            "shards",
            "siim",
            "--root",
            str(siim_root),
            "--out",
            str(tmp_path / "siim-out"),
            *common,
            *shares,
        ]
    )
    assert ShardSource(tmp_path / "siim-out" / "train").manifest.samples == 3
    assert "13_005" not in capsys.readouterr().err


@pytest.mark.real
def test_nih_real_images_convert_in_the_release_layout(real_data, tmp_path, deid):
    """1,171 NIH images with a table in NIH's format and the file names of the release."""
    renamed = {label: name for name, label in nih_cxr14._RENAMED.items()} | {
        "Infiltration": "Infiltration"
    }
    rows = [json.loads(line) for line in (real_data / "cxr" / "cxr.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["source"] == "nih-chestxray14"]
    lines, folder = [NIH_HEADER.format(sex="Sex")], tmp_path / "images"
    folder.mkdir()
    for row in rows:
        file = row["id"].removeprefix("nih_") + ".png"
        (folder / file).symlink_to(real_data / "cxr" / row["image"])
        findings = "|".join(renamed.get(name, name) for name in row["labels"])
        patient = int(file[:8])
        lines.append(
            f"{file},{findings},0,{patient},{row['age']},{row['sex']},{row['view']},1,1,1,1"
        )
    (tmp_path / "Data_Entry_2017_v2020.csv").write_text("\n".join(lines))
    files = [path.name for path in sorted(folder.iterdir())]
    (tmp_path / "train_val_list.txt").write_text("\n".join(files[:900]))
    (tmp_path / "test_list.txt").write_text("\n".join(files[900:]))
    plan = nih_cxr14.NIHCXR14(root=tmp_path).plan(deid)
    assert len(plan.records) == 1171
    assert sum(record.sample.labels["Pleural Effusion"] for record in plan.records) == 146
    assert sum(record.sample.labels["Edema"] for record in plan.records) == 87
    assert len({record.sample.patient for record in plan.records}) == len(
        {file[:8] for file in files}
    )
