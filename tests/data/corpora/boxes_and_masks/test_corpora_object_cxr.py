"""Object-CXR converter on valid and damaged fixtures in the published layout, and on its
phantom.
"""

from pathlib import Path

import cv2
import pytest
from helpers.box_corpora import box, convert, samples_of, write_phantom
from helpers.errors import raises

from medvl.data.corpora.boxes_and_masks import object_cxr
from medvl.data.privacy import Deidentifier
from medvl.errors import CorpusError
from medvl.phantom import read_truth

CARD = Path(__file__).parents[4] / "data_cards" / "object-cxr.md"
OBJECTS = """image_name,annotation
00001.jpg,0 10 20 30 40;2 5 6 15 4 11 16
00002.jpg,
00003.jpg,1 40.5 30 20 10;0 7 7 7 9;
"""


def write_objects(root: Path, train: str = OBJECTS, dev: str = OBJECTS) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "train.csv").write_text(train)
    (root / "dev.csv").write_text(dev)
    return root


def test_objects_have_boxes_around_their_shapes(tmp_path: Path, deid: Deidentifier) -> None:
    plan = object_cxr.ObjectCXR(root=write_objects(tmp_path)).plan(deid)
    samples = {sample.key: sample for sample in plan.iter_samples()}
    assert (len(samples), plan.label_names, plan.warnings) == (
        6,
        ("Foreign Object",),
        {"empty_shape": 2},
    )
    first, empty, third, test = (samples[deid.image(f"{name}.jpg")] for name in ("train/00001",
        "train/00002", "train/00003", "dev/00001"))  # fmt: skip
    assert first.extra == {
        "boxes": [box("Foreign Object", 10, 20, 20, 20), box("Foreign Object", 5, 4, 10, 12)],
        "shapes": [
            {"shape": "rectangle", "points": [10, 20, 30, 40]},
            {"shape": "polygon", "points": [5, 6, 15, 4, 11, 16]},
        ],
    }
    assert (empty.labels, empty.extra) == ({"Foreign Object": 0}, {"boxes": [], "shapes": []})
    assert third.extra["boxes"] == [
        box("Foreign Object", 20, 10, 20.5, 20)
    ]  # an ellipse with its corners exchanged
    assert [shape["shape"] for shape in third.extra["shapes"]] == ["ellipse", "rectangle"]
    assert (test.split, test.image) == ("test", tmp_path / "dev" / "00001.jpg")
    paths = OBJECTS.replace("image_name", "image_path").replace("\n0", "\n/home/0")
    again = object_cxr.ObjectCXR(root=write_objects(tmp_path, train=paths)).plan(deid)
    assert {sample.key for sample in again.iter_samples()} == samples.keys()
    assert (first.split in ("train", "validate"), first.labels) == (True, {"Foreign Object": 1})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("0 10 20 30 40", "3 10 20 30 40"), ("malformed", "annotation")),
        (("0 10 20 30 40", "0 10 20 30"), ("malformed", "annotation")),
        (("0 10 20 30 40", "0 10 20 30 x"), ("malformed", "annotation")),
        (("0 10 20 30 40", "0 10 20 30 nan"), ("malformed", "annotation")),
        (("0 10 20 30 40", "0 -10 20 30 40"), ("out_of_range", "boxes")),
        (("15 4 11 16", "15 4 11"), ("malformed", "annotation")),
        (("00002.jpg", ".2.jpg"), ("malformed", "image_name")),
        (("image_name", "name"), ("malformed", "image_name")),
        (("annotation", "shapes"), ("missing", "annotation")),
    ],
)
def test_damaged_objects_raise(
    change: tuple[str, str], expected: tuple[str, ...], tmp_path: Path, deid
) -> None:
    with raises(CorpusError, *expected, names="dev.csv"):
        object_cxr.ObjectCXR(root=write_objects(tmp_path, dev=OBJECTS.replace(*change))).plan(deid)


def test_objects_phantom_round_trip(tmp_path: Path, deid: Deidentifier) -> None:
    root = tmp_path / "corpus"
    write_phantom("object-cxr", root, 16, 96, 45)
    convert(root, "object-cxr", tmp_path / "shards", "--short-side", "96")
    samples = samples_of(tmp_path / "shards", "train", "validate", "test")
    truth = {deid.image(row["path"]): row for row in read_truth(root)}
    assert {sample.key for sample in samples} == truth.keys()
    seen, bright = set(), []
    for sample in samples:
        row = truth[sample.key]
        shapes = row["objects"].split(";") if row["objects"] else []
        image_HW = cv2.imread(str(root / row["path"]), cv2.IMREAD_UNCHANGED)
        assert image_HW.shape == (row["height"], row["width"])
        assert (sample.extra["image_width"], sample.extra["image_height"]) == (
            row["width"],
            row["height"],
        )
        assert sample.labels == {"Foreign Object": int(bool(shapes))}
        assert len(sample.extra["boxes"]) == len(shapes)
        for one, shape in zip(sample.extra["boxes"], shapes, strict=True):
            kind, *points = map(int, shape.split())
            assert (one["x"], one["y"]) == (min(points[::2]), min(points[1::2]))
            bright.append(
                image_HW[int(one["y"] + one["height"] / 2), int(one["x"] + one["width"] / 2)]
            )
            seen.add(kind)
        assert (sample.split == "test") == (row["split"] == "dev")
    assert seen == {0, 1, 2}
    assert min(bright) > 210
    assert {bool(row["objects"]) for row in truth.values()} == {True, False}
