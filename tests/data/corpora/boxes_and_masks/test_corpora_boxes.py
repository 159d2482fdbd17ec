"""VinDr-CXR, VinDr-PCXR and ChestX-Det converters on valid and damaged fixtures in the published layout,
and on their phantoms.
"""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from helpers.box_corpora import box, convert, samples_of, write_phantom
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from helpers.mimic_files import textured

from medvl.data.annotations import add_size, decode_runs, merge_readers, read_corners
from medvl.data.corpora.boxes_and_masks import chestxdet10, vindr_cxr, vindr_pcxr
from medvl.data.corpora.labels import nih_cxr14
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import sample_to_json
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, CorpusError, ImageError
from medvl.phantom import World, masks, read_truth
from medvl.phantom.layouts.boxes import (
    NAMES as DET10_NAMES,
    NAMES_13,
    PCXR_DISEASES,
    PCXR_FINDINGS,
    findings,
)
from medvl.phantom.layouts.kaggle import square_frontal_views
from medvl.schema import Sample

CARDS = Path(__file__).parents[4] / "data_cards"


# Boxes


def test_corners_are_read_with_and_without_the_size() -> None:
    where = Path("table.csv")
    assert read_corners("Mass", ["10", "20.5", "30", "60"], None, where) == box(
        "Mass", 10, 20.5, 20, 39.5
    )
    assert read_corners("Mass", [10, 20, 30, 60], (30, 60), where) == box("Mass", 10, 20, 20, 40)
    for fields, size, code in (
        ([30, 20, 10, 60], None, "out_of_range"),
        ([-2, 20, 10, 60], None, "out_of_range"),
        ([0, 0, "inf", 60], None, "out_of_range"),
        ([10, 20, 32, 60], (30, 60), "out_of_range"),
        ([10, 20, 30], None, "malformed"),
        ([10, 20, 30, [4]], None, "malformed"),
    ):
        with raises(CorpusError, code, "boxes", names="table.csv"):
            read_corners("Mass", fields, size, where)


def test_size_is_filled_in_only_where_boxes_lack_it() -> None:
    extra = {"boxes": [box("Mass", 10, 20, 20, 40)]}
    assert add_size(extra, (60, 30)) == {**extra, "image_width": 30, "image_height": 60}
    assert add_size({}, (60, 30)) == {}
    sized = {**extra, "image_width": 1024, "image_height": 1024}
    assert add_size(sized, (60, 30)) == sized
    with raises(ImageError, "mismatch", "boxes"):
        add_size(extra, (30, 60))


def test_boxes_of_readers_are_merged_by_object() -> None:
    first = [box("Mass", 0, 0, 10, 10), box("Mass", 50, 0, 10, 10)]
    second = [box("Mass", 2, 0, 10, 10), box("Edema", 0, 0, 10, 10), box("Mass", 1, 0, 10, 10)]
    third = [box("Mass", 4, 0, 10, 10)]  # overlaps the first box by less than a half
    assert merge_readers([first, second, third]) == [
        box("Mass", 1, 0, 10, 10), box("Mass", 50, 0, 10, 10), box("Edema", 0, 0, 10, 10),
        box("Mass", 2.5, 0, 10, 10),
    ]  # fmt: skip
    assert merge_readers([]) == []


# VinDr-CXR

SICK, WELL, ALONE, TEST = (letter * 32 for letter in "abcd")
VINDR_BOXES = f"""image_id,rad_id,class_name,x_min,y_min,x_max,y_max
{SICK},R8,Pleural effusion,10,10,30,40
{SICK},R9,Pleural effusion,12,10,32,40
{SICK},R9,Nodule/Mass,5,5,9,9
{SICK},R10,No finding,,,,
{WELL},R8,No finding,,,,
{WELL},R9,No finding,,,,
{WELL},R10,No finding,,,,
"""
VINDR_TEST_BOXES = f"""image_id,class_name,x_min,y_min,x_max,y_max
{TEST},Aortic enlargement,1.5,2.5,20,30
{TEST},Other disease,,,,
"""
VINDR_VOTES = {
    (SICK, "R8"): {"Pleural effusion", "Pneumonia"},
    (SICK, "R9"): {"Pleural effusion", "Nodule/Mass", "Pneumonia"},
    (SICK, "R10"): {"No finding"},
    (WELL, "R8"): {"No finding"},
    (WELL, "R9"): {"No finding"},
    (WELL, "R10"): {"No finding"},
    (ALONE, "R8"): {"Tuberculosis"},
    (ALONE, "R9"): {"No finding"},
    (ALONE, "R10"): set(),
}
RELEASE_NAMES = {"Pleural Effusion": "Pleural effusion", "Pleural Thickening": "Pleural thickening"}


def label_table(votes: dict[tuple[str, ...], set[str]], other: str, one: str = "1") -> str:
    names = [
        RELEASE_NAMES.get(name, name) for name in (*vindr_cxr.LABELS[:-2], other, "No finding")
    ]
    ids = ["image_id", "rad_id"][: len(next(iter(votes)))]
    lines = [[*ids, *names]]
    lines += [
        [*key, *(one if name in named else "0" for name in names)] for key, named in votes.items()
    ]
    return "".join(",".join(line) + "\n" for line in lines)


def write_vindr(root: Path, **tables: str) -> Path:
    content = {
        "annotations_train": VINDR_BOXES,
        "annotations_test": VINDR_TEST_BOXES,
        "image_labels_train": label_table(VINDR_VOTES, "Other diseases"),
        "image_labels_test": label_table(
            {(TEST,): {"Aortic enlargement", "Other disease"}}, "Other disease", "1.0"
        ),
    }
    (root / "annotations").mkdir(parents=True)
    for name, text in (content | tables).items():
        (root / "annotations" / f"{name}.csv").write_text(text)
    return root


def vindr_samples(root: Path, deid: Deidentifier, **options) -> list[Sample]:
    samples = {
        sample.key: sample
        for sample in vindr_cxr.VinDrCXR(root=root, **options).plan(deid).iter_samples()
    }
    return [samples[deid.image(image)] for image in (SICK, WELL, ALONE, TEST)]


def positives(sample: Sample) -> set[str]:
    assert set(sample.labels) == set(vindr_cxr.LABELS)
    return {name for name, value in sample.labels.items() if value}


def test_vindr_labels_need_two_readers_and_boxes_are_merged(
    tmp_path: Path, deid: Deidentifier
) -> None:
    sick, well, alone, test = vindr_samples(write_vindr(tmp_path), deid)
    assert positives(sick) == {"Pleural Effusion", "Pneumonia"}
    assert sick.extra == {"boxes": [box("Pleural Effusion", 11, 10, 20, 30)]}
    assert (positives(well), well.extra) == ({"No Finding"}, {"boxes": []})
    assert (positives(alone), alone.extra) == (set(), {"boxes": []})
    assert positives(test) == {"Aortic enlargement", "Other diseases"}
    assert test.extra == {"boxes": [box("Aortic enlargement", 1.5, 2.5, 18.5, 27.5)]}
    assert (test.split, sick.split in ("train", "validate"), sick.view) == ("test", True, "PA")
    assert test.image == tmp_path / "test" / f"{TEST}.dicom"
    assert not any(word in sample_to_json(sick).decode() for word in (SICK, "R8", "R9"))


def test_vindr_union_of_the_readers(tmp_path: Path, deid: Deidentifier) -> None:
    sick, _, alone, _ = vindr_samples(write_vindr(tmp_path), deid, agreement=1, boxes="all")
    assert positives(sick) == {
        "Pleural Effusion",
        "Pneumonia",
        "Nodule/Mass",
    }  # a finding outweighs No finding
    assert [entry["x"] for entry in sick.extra["boxes"]] == [10, 12, 5]
    assert positives(alone) == {"Tuberculosis"}
    assert positives(vindr_samples(tmp_path, deid, agreement=3)[0]) == set()


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"annotations_train": VINDR_BOXES.replace("12,10", "42,10")}, ("out_of_range", "boxes")),
        ({"annotations_train": VINDR_BOXES.replace("12,10", ",10")}, ("malformed", "boxes")),
        ({"annotations_train": VINDR_BOXES.replace("Nodule/Mass", "Spot")}, ("malformed", "class_name")),
        ({"annotations_train": VINDR_BOXES.replace("x_min", "left")}, ("missing", "x_min")),
        ({"annotations_train": VINDR_BOXES.replace(SICK, "e" * 32)}, ("mismatch",)),
        ({"annotations_test": VINDR_TEST_BOXES.replace(TEST, "../d")}, ("malformed", "image_id")),
        ({"image_labels_train": label_table(VINDR_VOTES, "Other "
                                                         "diseases", "2")}, ("malformed", "Pleural Effusion")),
        ({"image_labels_train": label_table(VINDR_VOTES, "Others")}, ("missing", "Other diseases")),
        ({"image_labels_train": label_table(VINDR_VOTES, "Other diseases").replace("R9", "R8")},
         ("malformed", "image_id")),
    ],
)  # fmt: skip
def test_vindr_damaged_table_raises(
    tables: dict, expected: tuple[str, ...], tmp_path: Path, deid
) -> None:
    with raises(CorpusError, *expected):
        vindr_cxr.VinDrCXR(root=write_vindr(tmp_path, **tables)).plan(deid)


def test_vindr_options_are_checked(tmp_path: Path, deid: Deidentifier) -> None:
    for options, code in (
        ({"agreement": 4}, "out_of_range"), ({"boxes": "none"}, "unknown_name"), ({"validate_share": 1.0}, "out_of_range"),
    ):  # fmt: skip
        with raises(ConfigError, code, next(iter(options))):
            vindr_cxr.VinDrCXR(root=tmp_path, **options).plan(deid)
    with raises(CorpusError, "not_found"):
        vindr_cxr.VinDrCXR(root=tmp_path).plan(deid)


def test_vindr_shards_have_the_size_of_the_dicom_images(tmp_path: Path) -> None:
    root = write_vindr(tmp_path / "vindr")
    for number, (folder, image) in enumerate(
        (("train", SICK), ("train", WELL), ("train", ALONE), ("test", TEST))
    ):
        (root / folder).mkdir(exist_ok=True)
        height = 20 if image == SICK else 48  # too small for its boxes
        write_dataset(
            root / folder / f"{image}.dicom",
            image_dataset(textured(number, height, 64), PatientSex="F"),
        )
    convert(root, "vindr-cxr", tmp_path / "out", "--max-skipped", "1")
    test = samples_of(tmp_path / "out", "test")
    assert [(one.extra["image_width"], one.extra["image_height"], one.sex) for one in test] == [
        (64, 48, "F")
    ]
    manifests = [ShardSource(path).manifest for path in (tmp_path / "out").iterdir()]
    assert sum(dict(manifest.skipped).get("mismatch", 0) for manifest in manifests) == 1


def test_vindr_phantom_round_trip(
    tmp_path: Path, deid: Deidentifier, capsys: pytest.CaptureFixture[str]
) -> None:
    patients, size, seed = 10, 128, 42
    write_phantom("vindr-cxr", tmp_path / "corpus", patients, size, seed)
    assert "medvl shards vindr-cxr" in capsys.readouterr().out
    convert(tmp_path / "corpus", "vindr-cxr", tmp_path / "shards", "--validate-share", "0.3")
    samples = samples_of(tmp_path / "shards", "train", "validate", "test")
    truth = {deid.image(Path(row["path"]).stem): row for row in read_truth(tmp_path / "corpus")}
    views = [
        study.frontal for patient in World(seed).patients(patients) for study in patient.studies
    ]
    view_of = {deid.image(view.dicom_id.replace("-", "")[:32]): view for view in views}
    assert {sample.key for sample in samples} == truth.keys() == view_of.keys()
    assert {sample.split for sample in samples} >= {"train", "test"}
    renamed = {name: label for label, name in RELEASE_NAMES.items()}
    for sample in samples:
        row = truth[sample.key]
        assert (sample.split == "test") == (row["split"] == "test")
        assert (sample.extra["image_width"], sample.extra["image_height"]) == (
            row["width"],
            row["height"],
        )
        expected = [
            (renamed.get(name, name), one.x, one.y)
            for name, one in findings(view_of[sample.key], size)
        ]
        actual = [(one["label"], one["x"], one["y"]) for one in sample.extra["boxes"]]
        assert sorted(actual) == sorted(expected)
        labels = {label for label, _, _ in expected} | (
            {"Pneumonia"} if row["labels"]["Pneumonia"] else set()
        )
        assert positives(sample) == (labels or {"No Finding"})
        assert (sample.sex, sample.age) == (row["sex"], min(90, row["age"]))
    assert sum(len(sample.extra["boxes"]) for sample in samples) > 20


# ChestX-Det10

DET10_TRAIN = [
    {
        "file_name": "36200.png",
        "syms": ["Effusion", "Fracture"],
        "boxes": [[632, 721, 909, 969], [1, 2, 3.5, 4]],
    },
    {"file_name": "36201.png", "syms": [], "boxes": []},
    {"file_name": "00000042_006.png", "syms": ["Mass"], "boxes": [[0, 0, 1024, 1024]]},
    {"file_name": "00000043_000.png", "syms": [], "boxes": []},
]
DET10_TEST = [{"file_name": "00000042_001.png", "syms": ["Nodule"], "boxes": [[10, 20, 30, 40]]}]


def write_det10(root: Path, train: object = DET10_TRAIN, test: object = DET10_TEST) -> Path:
    for split, rows in (("train", train), ("test", test)):
        (root / f"{split}_data").mkdir(parents=True)
        (root / f"{split}.json").write_text(json.dumps(rows))
    return root


def test_det10_samples_have_boxes_and_disjoint_patients(tmp_path: Path, deid: Deidentifier) -> None:
    plan = chestxdet10.ChestXDet10(root=write_det10(tmp_path)).plan(deid)
    samples = {sample.key: sample for sample in plan.iter_samples()}
    first, empty, nih, test = (samples[deid.image(f"{name}.png")] for name in ("36200", "36201",
        "00000043_000", "00000042_001"))  # fmt: skip
    assert (len(samples), plan.excluded) == (4, {"patient_in_test": 1})
    assert {name for name, value in first.labels.items() if value} == {
        "Pleural Effusion",
        "Fracture",
    }
    assert first.extra == {
        "boxes": [box("Pleural Effusion", 632, 721, 277, 248), box("Fracture", 1, 2, 2.5, 2)],
        "image_width": 1024,
        "image_height": 1024,
    }
    assert (empty.extra["boxes"], set(empty.labels.values())) == ([], {0})
    assert set(first.labels) == set(plan.label_names) == set(chestxdet10.LABELS) < {*nih_cxr14.LABELS, "Calcification", "Fracture"}  # fmt: skip
    assert nih.patient == deid.patient("00000043")
    assert first.patient != empty.patient
    assert (test.split, test.image) == ("test", tmp_path / "test_data" / "00000042_001.png")
    assert "36200" not in sample_to_json(first).decode()


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"images": []}, ("malformed",)),
        ([{"file_name": "1.png", "syms": []}], ("missing", "boxes")),
        ([{"file_name": "../1.png", "syms": [], "boxes": []}], ("malformed", "file_name")),
        ([{"file_name": 1, "syms": [], "boxes": []}], ("malformed", "file_name")),
        ([{"file_name": "1.png", "syms": ["Mass"], "boxes": []}], ("malformed", "boxes")),
        ([{"file_name": "1.png", "syms": ["Mass"], "boxes": ["1234"]}], ("malformed", "boxes")),
        ([{"file_name": "1.png", "syms": ["Mass"], "boxes": [[1, 2, 3]]}], ("malformed", "boxes")),
        (
            [{"file_name": "1.png", "syms": ["Mass"], "boxes": [[1, 2, 1030, 9]]}],
            ("out_of_range", "boxes"),
        ),
        (
            [{"file_name": "1.png", "syms": ["Cardiomegaly"], "boxes": [[1, 2, 3, 4]]}],
            ("malformed", "syms"),
        ),
        (
            [{"file_name": "1.png", "syms": [["Mass"]], "boxes": [[1, 2, 3, 4]]}],
            ("malformed", "syms"),
        ),
    ],
)
def test_det10_damaged_annotations_raise(
    train: object, expected: tuple[str, ...], tmp_path: Path, deid
) -> None:
    with raises(CorpusError, *expected, names="train.json"):
        chestxdet10.ChestXDet10(root=write_det10(tmp_path, train=train)).plan(deid)


def test_det10_phantom_round_trip(tmp_path: Path, deid: Deidentifier) -> None:
    write_phantom("chestxdet10", tmp_path / "corpus", 8, 64, 44)
    convert(tmp_path / "corpus", "chestxdet10", tmp_path / "shards", "--validate-share", "0.3")
    samples = samples_of(tmp_path / "shards", "train", "validate", "test")
    truth = {deid.image(Path(row["path"]).name): row for row in read_truth(tmp_path / "corpus")}
    assert {sample.key for sample in samples} == truth.keys()
    assert {sample.split for sample in samples} >= {"train", "test"}
    for sample in samples:
        row, renamed = truth[sample.key], chestxdet10._RENAMED
        expected = [
            box(renamed.get(name, name), *(one[side] for side in ("x", "y", "width", "height")))
            for one in row["boxes"]
            if (name := DET10_NAMES.get(one["label"]))
        ]
        assert sample.extra["boxes"] == expected
        assert {name for name, value in sample.labels.items() if value} == {
            one["label"] for one in expected
        }
        assert (sample.split == "test") == (row["split"] == "test")
    path = next((tmp_path / "corpus" / "test_data").iterdir())
    assert cv2.imread(str(path), cv2.IMREAD_UNCHANGED).shape == (64, 64)


# ChestX-Det

DET_TRAIN = [
    {
        "file_name": "36200.png",
        "syms": ["Diffuse Nodule", "Cardiomegaly"],
        "boxes": [[10, 20, 14, 23], [0, 0, 1, 1]],
        "polygons": [[[10, 20], [13, 20], [13, 22], [10, 22]], [[0, 0]]],
    }
]


def write_det(root: Path, train: object = DET_TRAIN) -> Path:
    empty = {"file_name": "1.png", "syms": [], "boxes": [], "polygons": []}
    for split, rows in (("train", train), ("test", [empty])):
        (root / f"ChestX_Det_{split}.json").write_text(json.dumps(rows))
    return root


def test_det_outlines_become_masks(tmp_path: Path, deid: Deidentifier) -> None:
    plan = chestxdet10.ChestXDet(root=write_det(tmp_path)).plan(deid)
    test, sample = plan.iter_samples()
    assert (test.split, test.extra["masks"]) == ("test", [])
    assert set(plan.label_names) - set(chestxdet10.LABELS) == {
        "Cardiomegaly", "Diffuse Nodule", "Pleural Thickening",
    }  # fmt: skip
    assert {name for name, value in sample.labels.items() if value} == {
        "Diffuse Nodule", "Cardiomegaly",
    }  # fmt: skip
    first, second = sample.extra["masks"]
    mask_HW = decode_runs(first["runs"], 1024, 1024)
    assert (mask_HW.sum(), mask_HW[20:23, 10:14].all()) == (12, True)
    assert (second["label"], decode_runs(second["runs"], 1024, 1024).sum()) == ("Cardiomegaly", 1)


@pytest.mark.parametrize("polygons", [[], [[], [[0, 0]]], [[[1, 2, 3]], [[0, 0]]], "x",
                                      [[[1, 2000]], [[0, 0]]], [[["a", "b"]], [[0, 0]]]])  # fmt: skip
def test_det_damaged_outlines_raise(polygons: object, tmp_path: Path, deid: Deidentifier) -> None:
    with raises(CorpusError, "malformed", "polygons", names="ChestX_Det_train"):
        train = [DET_TRAIN[0] | {"polygons": polygons}]
        chestxdet10.ChestXDet(root=write_det(tmp_path, train)).plan(deid)


def test_det_phantom_masks_are_those_of_the_world(tmp_path: Path, deid: Deidentifier) -> None:
    write_phantom("chestxdet", tmp_path / "corpus", 4, 64, 44)
    plan = chestxdet10.ChestXDet(root=tmp_path / "corpus").plan(deid)
    samples = {sample.key: sample for sample in plan.iter_samples()}
    found = set()
    for patient in World(44).patients(4):
        for study, view in square_frontal_views(patient):
            sample = samples[deid.image(f"{study.study_id}.png")]
            truth = masks(view, 1024)
            for label in ("Cardiomegaly", "Pleural Effusion", "Pneumothorax", "Consolidation"):
                runs = [one["runs"] for one in sample.extra["masks"] if one["label"] == label]
                assert bool(runs) == (label in truth) == bool(sample.labels[label])
                if runs:
                    found.add(label)
                    mask_HW = np.any([decode_runs(text, 1024, 1024) for text in runs], axis=0)
                    overlap = (mask_HW & truth[label]).sum() / (mask_HW | truth[label]).sum()
                    assert overlap > 0.9
    assert len(found) > 1
    assert NAMES_13.keys() > DET10_NAMES.keys()


# VinDr-PCXR


def write_pcxr(root: Path, **changes: tuple[str, str]) -> Path:
    header = ",".join(["image_id", "rad_ID", *PCXR_DISEASES])

    def labels(image: str, *named: str) -> str:
        return ",".join([image, "R1", *(str(int(name in named)) for name in PCXR_DISEASES)])

    content = {
        "image_labels_train": "\n".join(
            [header, labels(SICK, "Brocho-pneumonia", "No finding"), labels(SICK, "CPAM")]
        ),
        "image_labels_test": "\n".join([header, labels(TEST, "No finding")]),
        "annotations_train": "image_id,rad_ID,class_name,x_min,y_min,x_max,y_max\n"
        f"{SICK},R1,Bronchectasis,1,2,3,4\n{SICK},R1,Pleural effusion,1,2,3,4\n",
        "annotations_test": "image_id,rad_ID,class_name,x_min,y_min,x_max,y_max\n"
        f"{TEST},R1,No finding,,,,\n",
    }
    for name, text in content.items():
        old, new = changes.get(name, ("", ""))
        (root / f"{name}.csv").write_text(text.replace(old, new) if old else text)
    return root


def test_pcxr_names_are_spelled_right_and_kept(tmp_path: Path, deid: Deidentifier) -> None:
    plan = vindr_pcxr.VinDrPCXR(root=write_pcxr(tmp_path)).plan(deid)
    sick, well = plan.iter_samples()
    assert len(plan.label_names) == 15
    assert {name for name, value in sick.labels.items() if value} == {"Broncho-pneumonia", "CPAM"}
    assert {name for name, value in well.labels.items() if value} == {"No Finding"}
    assert sick.extra["boxes"] == [
        {**box("Bronchiectasis", 1, 2, 2, 2), "release_label": "Bronchectasis"},
        {**box("Pleural Effusion", 1, 2, 2, 2), "release_label": "Pleural effusion"},
    ]
    assert sick.extra["release_names"] == {
        "Broncho-pneumonia": "Brocho-pneumonia", "Bronchiectasis": "Bronchectasis",
        "No Finding": "No finding", "Pleural Effusion": "Pleural effusion",
    }  # fmt: skip
    assert plan.warnings == {"rows_are_patients": 2, "several_readers": 1}
    assert (well.split, well.extra["boxes"]) == ("test", [])


@pytest.mark.parametrize(
    ("table", "change", "expected"),
    [
        ("image_labels_train", ("CPAM,", "CPAM,More,"), ("malformed", "image_id")),
        ("image_labels_train", (",1,", ",2,"), ("malformed",)),
        ("annotations_train", (SICK, "e" * 32), ("mismatch",)),
        ("annotations_train", ("1,2,3,4", "3,2,1,4"), ("out_of_range", "boxes")),
        ("annotations_train", (f"{SICK},R1,B", "../x,R1,B"), ("malformed", "image_id")),
    ],
)
def test_pcxr_damaged_tables_raise(
    table: str, change: tuple[str, str], expected: tuple[str, ...], tmp_path: Path, deid
) -> None:
    with raises(CorpusError, *expected):
        vindr_pcxr.VinDrPCXR(root=write_pcxr(tmp_path, **{table: change})).plan(deid)


def test_pcxr_too_many_findings_raise(tmp_path: Path, deid: Deidentifier) -> None:
    write_pcxr(tmp_path)
    lines = [f"{SICK},R1,Finding {number},1,2,3,4" for number in range(37)]
    header = "image_id,rad_ID,class_name,x_min,y_min,x_max,y_max"
    (tmp_path / "annotations_train.csv").write_text("\n".join([header, *lines]))
    with raises(CorpusError, "malformed", "class_name"):
        vindr_pcxr.VinDrPCXR(root=tmp_path).plan(deid)


def test_pcxr_phantom_has_children_and_their_boxes(tmp_path: Path, deid: Deidentifier) -> None:
    write_phantom("vindr-pcxr", tmp_path / "corpus", 6, 64, 49)
    convert(tmp_path / "corpus", "vindr-pcxr", tmp_path / "shards", "--validate-share", "0.3")
    truth = {deid.image(Path(row["path"]).stem): row for row in read_truth(tmp_path / "corpus")}
    samples = samples_of(tmp_path / "shards", "train", "validate", "test")
    assert {sample.key for sample in samples} == truth.keys()
    for sample in samples:
        row = truth[sample.key]
        names = [
            PCXR_FINDINGS[one["label"]] for one in row["boxes"] if one["label"] in PCXR_FINDINGS
        ]
        assert [one["release_label"] for one in sample.extra["boxes"]] == names
        assert (sample.age, sample.age < 10) == (row["age"], True)
