"""QaTa-COV19, MosMedData+, MoNuSeg and MELINDA: both layouts, workbooks, masks, splits; the
phantom's texts.
"""

import csv
import dataclasses
import io
import zipfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import openpyxl
import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.common.untrusted import InputFolders
from medvl.data import Deidentifier, decode_runs
from medvl.data.corpora.boxes_and_masks import lvit_layout
from medvl.data.corpora.common import formats
from medvl.data.corpora.common.formats import read_sheet
from medvl.data.corpora.figures import melinda
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, CorpusError, SplitError
from medvl.phantom import World, masks, write_qata
from medvl.phantom.layouts.kaggle import (
    describe,
    image_uid_hex,
    infection,
    named_zones,
    sample_distractors,
    square_frontal_views,
)
from medvl.phantom.layouts.writer import read_truth, workbook_bytes

DEID = Deidentifier(b"0123456789abcdef")


def write_folder(images: Path, masks: Path, names: list[str], mask: str = "mask_{}.png") -> None:
    for folder in (images, masks):
        folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        plane = np.zeros((20, 24), np.uint8)
        plane[4 : 8 + number, 5:9] = 1 if number % 2 else 255  # masks of both kinds are published
        cv2.imwrite(str(images / f"{name}.png"), np.full((20, 24), 90, np.uint8))
        cv2.imwrite(str(masks / mask.format(name)), plane)


def write_table(path: Path, header: list[str], rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".xlsx":
        path.write_bytes(workbook_bytes(header, rows))
        return
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """LViT's layout, with `study_1` in training and test, one image without a mask and one
    without a text.
    """
    for split, names in (
        ("Train", ["study_1_a", "study_2_a", "study_3_a"]),
        ("Val", ["study_4_a"]),
        ("Test", ["study_1_b"]),
    ):
        part = tmp_path / f"{split}_Folder"
        write_folder(part / "img", part / "labelcol", names)
        rows = [
            [f"mask_{name}.png", f" one area of {name} "] for name in names if name != "study_3_a"
        ]
        write_table(part / f"{split}_text.xlsx", ["Image", "Description"], rows)
    (tmp_path / "Train_Folder" / "labelcol" / "mask_study_2_a.png").unlink()
    return tmp_path


def test_a_table_of_training_has_the_texts_of_validation(tmp_path: Path) -> None:
    """As `Train_text_for_Covid19.xlsx`, which LViT published next to the folders: 7,145 rows for
    5,716 + 1,429 images.
    """
    for split, name in (("Train", "covid_1"), ("Val", "covid_2"), ("Test", "covid_3")):
        write_folder(
            tmp_path / f"{split}_Folder" / "img", tmp_path / f"{split}_Folder" / "labelcol", [name]
        )
    for table, names in (("Train", ["covid_1", "covid_2"]), ("Test", ["covid_3"])):
        rows = [[f"mask_{name}.png", f"text of {name}"] for name in names]
        write_table(tmp_path / f"{table}_text_for_Covid19.xlsx", ["Image", "Description"], rows)
    plan = lvit_layout.QaTa(root=tmp_path).plan(DEID)
    texts = {
        record.sample.split: record.sample.sections.get("description") for record in plan.records
    }
    assert texts == {
        "train": "text of covid_1",
        "validate": "text of covid_2",
        "test": "text of covid_3",
    }
    assert not plan.warnings["no_text"] + plan.warnings["second_text_ignored"]


def test_masks_and_texts_of_lvits_layout(
    released: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan = lvit_layout.MosMed(root=released).plan(DEID)
    assert plan.excluded == {"no_mask": 1}
    assert plan.warnings["no_text"] == 1
    assert sorted(record.sample.split for record in plan.records) == [
        "test",
        "train",
        "train",
        "validate",
    ]
    out = tmp_path_factory.mktemp("out")
    arguments = ["--out", str(out / "shards"), "--workers", "1", "--short-side", "20"]
    cli.main(["shards", "mosmed", "--root", str(released), *arguments])
    source = ShardSource(out / "shards" / "train")
    samples = [source.sample(place) for place in range(len(source))]
    assert sorted(sample.sections.get("description", "") for sample in samples) == [
        "",
        "one area of study_1_a",
    ]
    for sample in samples:
        ((entry,), height, width) = (
            sample.extra[name] for name in ("masks", "image_height", "image_width")
        )
        mask_HW = decode_runs(entry["runs"], height, width)
        assert (height, width, entry["label"]) == (20, 24, "Infection")
        assert mask_HW[4:8, 5:9].all()
        assert mask_HW.sum() in (16, 24)


def test_patients_in_file_names_and_splits(released: Path) -> None:
    with raises(SplitError, "leak", "splits"):
        lvit_layout.MosMed(root=released, patients="file").plan(DEID)
    repaired = lvit_layout.MosMed(root=released, patients="file", splits="repaired").plan(DEID)
    assert repaired.excluded["article_in_test"] == 1
    with raises(CorpusError, "not_found"):
        lvit_layout.QaTa(root=released / "Val_Folder").plan(DEID)


def test_layout_with_tables_of_splits(tmp_path: Path) -> None:
    write_folder(
        tmp_path / "Train Set" / "Images", tmp_path / "Train Set" / "Ground-truths", ["a", "b", "c"]
    )
    write_folder(tmp_path / "Test Set" / "Images", tmp_path / "Test Set" / "Ground-truths", ["d"])
    write_table(
        tmp_path / "Train_ID.xlsx", ["", "Image"], [["0", "mask_a.png"], ["1", "mask_b.png"]]
    )
    write_table(tmp_path / "Val_ID.csv", ["Image"], [["mask_c.png"]])
    texts = [[f"mask_{name}.png", f"text {name}"] for name in "abc"]
    write_table(
        tmp_path / "Train Set" / "Text" / "Train_text_for_Covid19.xlsx",
        ["Image", "Description"],
        texts,
    )
    write_table(
        tmp_path / "Test_text_for_Covid19.csv", ["Image", "Description"], [["d.png", "text d"]]
    )
    plan = lvit_layout.QaTa(root=tmp_path).plan(DEID)
    got = {record.sample.sections["description"]: record.sample.split for record in plan.records}
    assert got == {"text a": "train", "text b": "train", "text c": "validate", "text d": "test"}
    assert not plan.warnings["listed_image_missing"]
    write_table(tmp_path / "Val_ID.csv", ["Image"], [["mask_c.png"], ["mask_lost.png"]])
    assert lvit_layout.QaTa(root=tmp_path).plan(DEID).warnings["listed_image_missing"] == 1
    write_table(tmp_path / "Val_ID.csv", ["Image"], [["mask_other.png"]])
    with raises(CorpusError, "malformed", "Image"):
        lvit_layout.QaTa(root=tmp_path).plan(DEID)


def test_a_mask_of_another_size_is_skipped(
    released: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cv2.imwrite(
        str(released / "Val_Folder" / "labelcol" / "mask_study_4_a.png"), np.zeros((9, 9), np.uint8)
    )
    out = tmp_path_factory.mktemp("out") / "shards"
    arguments = ["--root", str(released), "--out", str(out), "--workers", "1", "--max-skipped", "2"]
    cli.main(["shards", "mosmed", *arguments])
    assert ShardSource(out / "train").manifest.skipped == {}
    assert sum(ShardSource(out / split).manifest.samples for split in ("train", "test")) == 3


# Workbooks


SPACE = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
SHEET, STRINGS = "xl/worksheets/sheet1.xml", "xl/sharedStrings.xml"


def sheet(path: Path, xml: str, strings: str | None = None) -> Path:
    """Write the phantom's workbook with another sheet, and with shared strings."""
    empty = zipfile.ZipFile(io.BytesIO(workbook_bytes([], [])))
    parts = {name: empty.read(name).decode() for name in empty.namelist()} | {SHEET: xml}
    if strings is not None:
        kind = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"
        parts[STRINGS] = strings
        entry = f'<Override PartName="/{STRINGS}" ContentType="{kind}"/></Types>'
        parts["[Content_Types].xml"] = parts["[Content_Types].xml"].replace("</Types>", entry)
    with zipfile.ZipFile(path, "w") as book:
        for name, text in parts.items():
            book.writestr(name, text)
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(read_sheet(path, ("Image",), InputFolders()))


def test_workbooks_with_shared_strings_runs_and_gaps(tmp_path: Path) -> None:
    strings = (
        f"<sst {SPACE}><si><t>Image</t></si><si><r><t>a </t></r><r><t>b</t></r><rPh "
        f"sb='0' eb='1'><t>no</t></rPh></si></sst>"
    )
    cells = (
        '<row r="1"><c r="B1" t="s"><v>0</v></c><c r="D1" t="str"><v>N</v></c></row><row r="2"/>'
    )
    cells += '<row r="3"><c r="B3" t="s"><v>1</v></c><c r="D3"><v>7</v></c></row>'
    path = sheet(
        tmp_path / "a.xlsx",
        f"<worksheet {SPACE}><sheetData>{cells}</sheetData></worksheet>",
        strings,
    )
    assert rows_of(path) == [{"Image": "a b", "N": "7"}]


def test_workbooks_of_a_spreadsheet_program(tmp_path: Path) -> None:
    """The first sheet is read, whatever its file is called."""
    book = openpyxl.Workbook()
    book.active.title = "texts"
    for row in (["Image", None, "n"], ["a.png", "left out", 3], [], ["b.png", None, 0.5]):
        book.active.append(row)
    book.create_sheet("more").append(["Image"])
    book.save(tmp_path / "a.xlsx")
    assert rows_of(tmp_path / "a.xlsx") == [
        {"Image": "a.png", "n": "3"},
        {"Image": "b.png", "n": "0.5"},
    ]


FAR = "<row r='99999999999'><c r='XFD99999999999' t='str'><v>far</v></c></row>"


@pytest.mark.parametrize(
    ("xml", "code"),
    [
        ("<worksheet", "malformed"),
        (f'<!DOCTYPE a [<!ENTITY b "c">]><worksheet {SPACE}/>', "malformed"),
        (
            f"<worksheet {SPACE}><sheetData><row><c t='s' "
            f"r='A1'><v>3</v></c></row></sheetData></worksheet>",
            "malformed",
        ),
        (f"<worksheet {SPACE}/>", "missing"),
        (
            f"<worksheet {SPACE}><dimension "
            f"ref='A1:XFD1048576'/><sheetData>{FAR}</sheetData></worksheet>",
            "missing",
        ),
    ],
)
def test_damaged_workbooks_are_refused(xml: str, code: str, tmp_path: Path) -> None:
    with raises(CorpusError, code):
        rows_of(sheet(tmp_path / "a.xlsx", xml))


def test_large_workbooks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_UNPACKED_BYTES", 2000)
    (tmp_path / "a.xlsx").write_bytes(workbook_bytes(["Image"], [["a" * 3000]]))
    with raises(CorpusError, "too_large"):
        rows_of(tmp_path / "a.xlsx")
    monkeypatch.setattr(formats, "MAX_UNPACKED_BYTES", 1 << 20)
    monkeypatch.setattr(formats, "MAX_CELL_CHARACTERS", 2999)
    with raises(CorpusError, "too_large"):
        rows_of(tmp_path / "a.xlsx")


def test_files_that_are_no_workbooks(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"Image\n")
    with raises(CorpusError, "malformed"):
        rows_of(tmp_path / "a.xlsx")
    with raises(CorpusError, "not_found"):
        rows_of(tmp_path / "b.xlsx")


# Phantom


def test_phantom_texts_agree_with_the_masks(tmp_path: Path) -> None:
    root, size = tmp_path / "qata", 64
    arguments = [
        "--out",
        str(root),
        "--patients",
        "10",
        "--size",
        str(size),
        "--seed",
        "46",
        "--workers",
        "1",
    ]
    cli.main(["phantom", "qata", *arguments])
    views = {
        image_uid_hex(view): view
        for patient in World(46).patients(10)
        for _, view in square_frontal_views(patient)
    }
    plan = lvit_layout.QaTa(root=root).plan(DEID)
    assert len(plan.records) > 3
    assert not plan.excluded
    for record in plan.records:
        assert record.sample.image is not None
        view, text = views[record.sample.image.stem], record.sample.sections["description"]
        mask_HW = cv2.imread(str(record.masks["Infection"]), cv2.IMREAD_GRAYSCALE) > 0
        found = [
            mask
            for label, mask in masks(view, size).items()
            if label in ("Consolidation", "Lung Opacity")
        ]
        np.testing.assert_array_equal(mask_HW, np.logical_or.reduce(found))
        assert text == describe(view, mask_HW)
        columns = np.flatnonzero(
            mask_HW.any(axis=0)
        )  # the patient's left lung is on the right of the image
        sides = {"left": columns.max() > size / 2, "right": columns.min() < size / 2}
        assert {side for side in sides if f"{side} lung" in text} <= {
            side for side, there in sides.items() if there
        }
        assert text.startswith("Bilateral" if "left lung and" in text else "Unilateral")


def write_phantom(root: Path, *options: str) -> Path:
    arguments = [
        "--out",
        str(root),
        "--patients",
        "8",
        "--size",
        "64",
        "--seed",
        "46",
        "--workers",
        "1",
    ]
    cli.main(["phantom", "qata", *arguments, *options])
    return root


def test_distractors_change_images_alone_and_lie_where_the_text_names_nothing(
    tmp_path: Path,
) -> None:
    plain, mixed = (
        write_phantom(tmp_path / "plain"),
        write_phantom(tmp_path / "mixed", "--distractors", "2"),
    )
    drawn = {row["path"]: row["distractors"] for row in read_truth(mixed)}
    assert any(drawn.values())
    assert not any("distractors" in row for row in read_truth(plain))
    for path, boxes in drawn.items():
        same = (plain / path).read_bytes() == (mixed / path).read_bytes()
        assert same == (not boxes)
    for file in plain.rglob("*"):
        if file.is_file() and file.parent.name != "img" and not file.name.startswith("phantom"):
            assert file.read_bytes() == (mixed / file.relative_to(plain)).read_bytes(), (
                "masks and texts are the same"
            )
    views = {
        image_uid_hex(view): view
        for patient in World(46).patients(8)
        for _, view in square_frontal_views(patient)
    }
    for path, boxes in drawn.items():
        view = views[Path(path).stem]
        mask_HW = infection(view, 64)
        assert mask_HW is not None
        found = sample_distractors(view, mask_HW, 2)
        assert len(found) == len(boxes)
        for finding in found:
            other_HW = infection(dataclasses.replace(view, findings=(finding,)), 64)
            assert other_HW is not None
            assert not (other_HW & mask_HW).any()
            zones = named_zones(view, other_HW)
            assert zones
            assert not set(zones) & set(named_zones(view, mask_HW))


def test_a_phantom_with_other_distractors_is_not_continued(tmp_path: Path) -> None:
    root = write_phantom(tmp_path / "mixed", "--distractors", "1")
    with raises(CorpusError, "exists", "out"):
        write_qata(root, patients=8, size=64, seed=46, workers=1)
    with raises(ConfigError, "out_of_range", "distractors"):
        write_qata(tmp_path / "other", patients=8, size=64, distractors=-1)


# MELINDA


def test_melinda(tmp_path: Path) -> None:
    header = ["figure_file", "caption", "i_meth", "p_meth", "i_meth_label", "p_meth_label", "pmcid"]
    (tmp_path / "melinda_images").mkdir()
    for split, number in (("train", 1), ("dev", 2), ("test", 3)):
        kind = "blot" if number % 2 else "array"
        row = [
            f"{number}.png",
            "A blot of three proteins.",
            "anti tag",
            "western",
            kind,
            "western",
            f"PMC10{number}",
        ]
        write_table(tmp_path / f"{split}.csv", header, [row])
    plan = melinda.MELINDA(root=tmp_path).plan(DEID)
    assert plan.label_names == ("array", "blot")
    samples = {record.sample.split: record.sample for record in plan.records}
    assert samples["dev"].labels == {"array": 1, "blot": 0}
    assert samples["train"].extra["p_meth"] == "western"
    assert samples["test"].sections == {"caption": "A blot of three proteins."}
    assert melinda.MELINDA(root=tmp_path, level="i_meth").plan(DEID).label_names == ("anti tag",)
    other = [*row[:2], "tandem tag", *row[3:]]
    write_table(tmp_path / "test.csv", header, [row, other, row])
    repeated = melinda.MELINDA(root=tmp_path).plan(DEID)
    assert repeated.excluded == {"duplicate": 1}
    methods = [
        record.sample.extra["i_meth"]
        for record in repeated.records
        if record.sample.split == "test"
    ]
    assert methods == ["anti tag", "tandem tag"]
    assert len({record.sample.key for record in repeated.records}) == 4
    row[-1] = "PMC101"
    write_table(tmp_path / "test.csv", header, [row])
    with raises(SplitError, "leak", "splits"):
        melinda.MELINDA(root=tmp_path).plan(DEID)
    row[2] = ""
    write_table(tmp_path / "test.csv", header, [row])
    with raises(CorpusError, "malformed", "i_meth"):
        melinda.MELINDA(root=tmp_path).plan(DEID)
    bad: Any = "other"
    with raises(ConfigError, "unknown_name", "level"):
        melinda.MELINDA(root=tmp_path, level=bad).plan(DEID)
