"""MS-CXR: the converter on fixtures in the published layout and on the phantom, and excluded
patients.
"""

import csv
import json
from pathlib import Path
from typing import Any, cast

import pytest
import simplejpeg
from helpers.errors import raises
from helpers.mimic_files import textured

from medvl.cli import main as cli
from medvl.data.annotations import phrases_of, published_size
from medvl.data.convert.plan import hold_out
from medvl.data.corpora.boxes_and_masks import ms_cxr
from medvl.data.corpora.reports import mimic_cxr
from medvl.data.images.codecs import encode_jpeg
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import sample_from_json, sample_to_json
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, CorpusError, SplitError
from medvl.phantom import World, write_ms_cxr
from medvl.phantom.rendering.findings import boxes
from medvl.schema import Sample

FIRST = "02aa804e-bde0afdd-112c0b34-7bc16630-4e384014"
SECOND = "096052b7-d256dc40-453a102b-fa7d01c6-1b22c6b4"
PATHS = {
    FIRST: f"files/p10/p10000032/s50414267/{FIRST}.jpg",
    SECOND: f"files/p10/p10000764/s57375967/{SECOND}.jpg",
}
HEADER = "dicom_id,category_name,label_text,path,x,y,w,h,image_width,image_height,split"
ROWS = [
    f"{FIRST},Pneumonia,Bibasilar  opacities,{PATHS[FIRST]},19,113,53,31,176,202,train",
    f"{FIRST},Pneumonia,Bibasilar  opacities,{PATHS[FIRST]},100,113,49,35,176,202,train",
    f"{FIRST},Pleural Effusion,\"small, left effusion\",{PATHS[FIRST]},100,150,40,40,176,202,train",
    f"{SECOND},Pneumothorax,Large right-sided pneumothorax,{PATHS[SECOND]},26,9,88,200,305,254,val",
]  # fmt: skip


def write(
    root: Path, rows: list[str] = ROWS, header: str = HEADER, name: str = ms_cxr.TABLES[0]
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("\n".join([header, *rows]) + "\n")
    return root


def test_ms_cxr_rows_form_samples_by_image_and_phrases_by_text(
    tmp_path: Path, deid: Deidentifier
) -> None:
    first, second = ms_cxr.MSCXR(root=write(tmp_path)).plan(deid).iter_samples()
    assert first.key == deid.image(FIRST)
    assert first.patient == deid.patient("10000032")
    assert first.study == deid.study("10000032", "50414267")
    assert first.image == tmp_path / PATHS[FIRST]
    assert (first.split, second.split) == ("test", "test")
    assert first.labels == {"Pneumonia": 1, "Pleural Effusion": 1}
    pneumonia, effusion = phrases_of(first)
    assert (pneumonia.label, pneumonia.text) == ("Pneumonia", "Bibasilar opacities")
    assert [box["x"] for box in pneumonia.boxes] == [19, 100]
    assert effusion.text == "small, left effusion"
    assert effusion.boxes == (
        {"label": "Pleural Effusion", "x": 100, "y": 150, "width": 40, "height": 40},
    )
    assert published_size(first) == (202, 176)
    stored = sample_to_json(first)
    assert phrases_of(sample_from_json(stored)) == phrases_of(first)
    assert not any(name in stored.decode() for name in (FIRST, "10000032", "50414267"))


def test_ms_cxr_ids_equal_those_of_mimic_cxr(
    mimic_root: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    """Both images are in the fixture of MIMIC-CXR, with the same keys and patients."""
    mimic = {
        record.sample.key: record.sample
        for record in mimic_cxr.MimicCXR(root=mimic_root).plan(deid).records
    }
    records = list(ms_cxr.MSCXR(root=write(tmp_path / "ms"), images=mimic_root).plan(deid).records)
    assert len(records) == 2
    for record in records:
        same = mimic[record.sample.key]
        assert (same.patient, same.study, same.image) == (
            record.sample.patient, record.sample.study, record.sample.image
        )  # fmt: skip


def test_ms_cxr_release_splits_require_the_newer_table(tmp_path: Path, deid: Deidentifier) -> None:
    newer = ms_cxr.MSCXR(root=write(tmp_path / "new"), splits="release").plan(deid)
    assert [record.sample.split for record in newer.records] == ["train", "validate"]
    rows = [row.rsplit(",", 1)[0] for row in ROWS]
    older = write(tmp_path / "old", rows, HEADER.removesuffix(",split"), ms_cxr.TABLES[1])
    assert len(ms_cxr.MSCXR(root=older).plan(deid).records) == 2
    with raises(CorpusError, "missing", "split"):
        ms_cxr.MSCXR(root=older, splits="release").plan(deid)
    with raises(ConfigError, "unknown_name", "splits"):
        ms_cxr.MSCXR(root=older, splits=cast(Any, "official")).plan(deid)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("Pneumothorax,Large", "Nodule,Large", ("malformed", "category_name")),
        ("Large right-sided pneumothorax", " ", ("malformed", "label_text")),
        ("26,9,88,200", "26,9,88,250", ("out_of_range", "boxes")),
        ("26,9,88,200", "26,9,88,", ("malformed", "boxes")),
        ("50,40,40,176,202", "50,40,40,176,203", ("malformed", "image_width")),
        ("305,254", "305,x", ("malformed", "image_width")),
        (f"{SECOND},Pneu", f"{FIRST},Pneu", ("malformed", "path")),
        ("files/p10/p10000764", "../p10/p10000764", ("malformed", "path")),
        (",val", ",holdout", ("malformed", "split")),
        ("176,202,train", "176,202,test", None),
        ("100,150,40,40,176,202,train", "100,150,40,40,176,202,test", ("malformed", "split")),
    ],
)
def test_ms_cxr_invalid_value_raises_without_quoting_it(
    old: str, new: str, expected: tuple[str, ...] | None, tmp_path: Path, deid: Deidentifier
) -> None:
    root = write(tmp_path, [row.replace(old, new) for row in ROWS])
    if expected is None:
        ms_cxr.MSCXR(root=root, splits="release").plan(deid)
        return
    with raises(CorpusError, *expected) as error:
        ms_cxr.MSCXR(root=root, splits="release").plan(deid)
    assert "right-sided" not in str(error.value)
    assert "10000764" not in str(error.value)


def test_ms_cxr_missing_table_raises(tmp_path: Path, deid: Deidentifier) -> None:
    with raises(CorpusError, "not_found"):
        ms_cxr.MSCXR(root=tmp_path).plan(deid)


# Phrases of other corpora


def sample_with(**extra: object) -> Sample:
    return Sample(key="k", corpus="rsna", split="test", patient="p", study="s", extra=extra)


def test_phrases_of_boxes_are_the_labels() -> None:
    box = {"label": "Mass", "x": 1.0, "y": 2.0, "width": 3.0, "height": 4.0}
    other = {**box, "label": "Nodule"}
    phrases = phrases_of(sample_with(boxes=[box, other, box], image_width=9, image_height=9))
    assert [(phrase.text, len(phrase.boxes)) for phrase in phrases] == [("Mass", 2), ("Nodule", 1)]
    assert phrases_of(sample_with(boxes=[])) == ()
    assert phrases_of(sample_with()) == ()


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            {"boxes": [{"label": "Mass"}], "image_width": 9, "image_height": 9},
            ("malformed", "phrases"),
        ),
        ({"phrases": "Mass", "image_width": 9, "image_height": 9}, ("malformed", "phrases")),
        (
            {"phrases": [{"label": "Mass", "text": "mass", "boxes": []}]},
            ("missing", "image_height"),
        ),
        (
            {"boxes": [{"label": "Mass", "x": 1, "y": 1, "width": 1, "height": 1}]},
            ("missing", "image_height"),
        ),
    ],
)
def test_invalid_phrases_raise(extra: dict, expected: tuple[str, ...]) -> None:
    with raises(CorpusError, *expected, names="sample k"):
        phrases_of(sample_with(**extra))


# The phantom


@pytest.fixture(scope="module")
def phantom_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ms_cxr(tmp_path_factory.mktemp("ms-cxr"), patients=8, seed=5, size=96, workers=1)


def test_phantom_ms_cxr_has_the_layout_and_true_boxes(phantom_root: Path) -> None:
    with (phantom_root / ms_cxr.TABLES[0]).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == HEADER.split(",")
    views = {
        view.dicom_id: view
        for index in range(8)
        for study in World(5).patient(index).studies
        for view in study.views
    }
    assert len({row["category_name"] for row in rows}) >= 5
    for row in rows:
        view = views[row["dicom_id"]]
        assert not view.lateral
        height, width, _, _ = simplejpeg.decode_jpeg_header(
            (phantom_root / row["path"]).read_bytes()
        )
        assert (int(row["image_height"]), int(row["image_width"])) == (height, width)
        place = tuple(int(row[name]) for name in ("x", "y", "w", "h"))
        truth = [
            (b.x, b.y, b.width, b.height)
            for b in boxes(view, 96)
            if b.label == row["category_name"]
        ]
        assert place in truth
    assert any(
        "effusion" in row["label_text"].lower()
        for row in rows
        if row["category_name"] == "Pleural Effusion"
    )


def test_phantom_ms_cxr_is_deterministic_and_converts(
    phantom_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    again = write_ms_cxr(tmp_path / "again", patients=8, seed=5, size=96, workers=1)
    assert (again / ms_cxr.TABLES[0]).read_bytes() == (phantom_root / ms_cxr.TABLES[0]).read_bytes()
    out = ["--out", str(tmp_path / "shards"), "--workers", "1"]
    cli.main(["shards", "ms-cxr", "--root", str(phantom_root), *out, "--short-side", "48"])
    source = ShardSource(tmp_path / "shards" / "test")
    phrases = [phrases_of(source.sample(position)) for position in range(len(source))]
    assert all(phrases)
    assert source.label_names == ms_cxr.LABELS
    assert "test: " in capsys.readouterr().out


# Leaving patients out


def test_held_out_patients_are_excluded_and_counted(
    mimic_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in PATHS.values():
        (mimic_root / name).parent.mkdir(parents=True, exist_ok=True)
        (mimic_root / name).write_bytes(encode_jpeg(textured(3, 202, 176)))
    common = ["--workers", "1"]
    held_out = tmp_path / "ms-shards"
    cli.main(["shards", "ms-cxr", "--root", str(write(tmp_path / "ms")), "--images",
        str(mimic_root),
              "--out", str(held_out), *common])  # fmt: skip
    cli.main(["shards", "mimic-cxr", "--root", str(mimic_root), "--out",
        str(tmp_path / "mimic-shards"),
              "--without", str(held_out / "test"), *common])  # fmt: skip
    held_out_patients = json.loads((held_out / "test" / "manifest.json").read_text())["patients"]
    manifest = json.loads((tmp_path / "mimic-shards" / "validate" / "manifest.json").read_text())
    assert manifest["excluded_from_corpus"] == {"held_out_patient": 4}
    assert not (tmp_path / "mimic-shards" / "train").exists()
    assert not {*manifest["patients"]} & {*held_out_patients}
    capsys.readouterr()
    plan = mimic_cxr.MimicCXR(root=mimic_root).plan(Deidentifier(b"fedcba9876543210"))
    with raises(SplitError, "mismatch", "salt"):
        hold_out(plan, [held_out / "test"], Deidentifier(b"fedcba9876543210"))
