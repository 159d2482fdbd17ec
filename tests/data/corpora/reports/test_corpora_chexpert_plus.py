"""CheXpert Plus: the converter on fixtures in the published layout and on its phantom."""

import csv
import json
from pathlib import Path

import pytest
from helpers.dicom_builder import image_dataset, write_dataset
from helpers.errors import raises
from helpers.mimic_files import textured

from medvl.cli import main as cli
from medvl.data.corpora.labels.chexpert import CheXpert
from medvl.data.corpora.reports.chexpert_plus import CheXpertPlus
from medvl.data.images.codecs import encode_png
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest, sample_to_json
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, CorpusError
from medvl.phantom import write_chexpert, write_chexpert_plus
from medvl.phantom.layouts.tables import PLUS_COLUMNS, PLUS_LIST, PLUS_TABLE
from medvl.schema import FINDINGS

FRONTAL = "train/patient00107/study2/view1_frontal.jpg"
LATERAL = "train/patient00107/study2/view2_lateral.jpg"
EARLIER = "train/patient00107/study1/view1_frontal.jpg"
VALID = "valid/patient64541/study1/view1_frontal.jpg"
ROW = {
    "frontal_lateral": "Frontal", "ap_pa": "AP", "patient_report_date_order": "2",
    "report": "Signed by Dr. Whitfield", "section_end_of_impression": "Dr. Whitfield",
    "section_accession_number": "A12345", "section_history": "Cough.",
    "section_impression": "1. Left basal opacity, larger than before.", "age": "58.0",
    "sex": "Female", "split": "train",
}  # fmt: skip
ROWS = [
    ROW | {"path_to_image": FRONTAL, "section_clinical_history": "Fever."},
    ROW
    | {
        "path_to_image": LATERAL,
        "frontal_lateral": "Lateral",
        "ap_pa": "",
        "section_impression": "1. Left basal opacity, larger than ___.",
    },
    ROW
    | {
        "path_to_image": EARLIER,
        "patient_report_date_order": "1",
        "ap_pa": "",
        "age": "",
        "sex": "Unknown",
        "section_impression": "None",
    },
    ROW | {"path_to_image": VALID, "frontal_lateral": "Lateral", "ap_pa": "LL", "age": "89"},
]
LABELS = {
    FRONTAL: {"Lung Opacity": 1, "Edema": -1, "Fracture": 0},
    LATERAL: {"Lung Opacity": 0},
    VALID: {"No Finding": 1.0},
}


def write(root: Path, rows: list[dict[str, str]] = ROWS, part: str = "report") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    with (root / PLUS_TABLE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, PLUS_COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        json.dumps({"path_to_image": path, **dict.fromkeys(FINDINGS), **values})
        for path, values in LABELS.items()
    ]
    (root / f"{part}_fixed.json").write_text("\n".join(lines) + "\n")
    return root


def write_image(folder: Path, name: str, suffix: str = ".png") -> Path:
    path = (folder / name).with_suffix(suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_png(textured(len(name), 40, 50)))
    return path


def test_text_and_labels_are_those_of_the_first_row_of_a_study(
    tmp_path: Path, deid: Deidentifier
) -> None:
    plan = CheXpertPlus(root=write(tmp_path)).plan(deid)
    first, second, earlier, valid = plan.iter_samples()
    assert first.sections == {
        "indication": "Fever.",
        "impression": "1. Left basal opacity, larger than before.",
    }
    assert second.sections == first.sections
    assert first.labels == second.labels == {"Lung Opacity": 1, "Edema": -1, "Fracture": 0}
    assert plan.warnings["texts_of_study_differ"] == plan.warnings["labels_of_study_differ"] == 1
    assert (first.view, second.view, earlier.view, valid.view) == ("AP", "LATERAL", "FRONTAL", "LL")
    assert (first.age, earlier.age, valid.age) == (58, None, 89)
    assert (first.sex, earlier.sex) == ("F", None)
    assert (first.order, second.order, earlier.order) == (1, 1, 0)
    assert (first.split, valid.split) == ("train", "valid")
    assert earlier.sections == {"indication": "Cough."}
    assert earlier.labels == {}
    assert plan.warnings["no_labels"] == 1
    stored = b"".join(map(sample_to_json, (first, second, earlier, valid)))
    assert b"Whitfield" not in stored
    assert b"A12345" not in stored
    assert b"00107" not in stored

    own = CheXpertPlus(root=tmp_path, all_texts=True).plan(deid)
    _, second, *_ = own.iter_samples()
    assert second.sections["impression"] == "1. Left basal opacity, larger than ___."
    assert second.labels == {"Lung Opacity": 0}
    assert "texts_of_study_differ" not in own.warnings


def test_options_choose_views_and_labels(tmp_path: Path, deid: Deidentifier) -> None:
    write(write(tmp_path), part="impression")
    plan = CheXpertPlus(root=tmp_path, views=("AP", "LL"), labels_from="impression").plan(deid)
    assert {sample.view for sample in plan.iter_samples()} == {"AP", "LL"}
    assert plan.excluded == {"view": 2}
    with raises(ConfigError, "unknown_name", "labels_from"):
        CheXpertPlus(root=tmp_path, labels_from="summary").plan(deid)
    with raises(CorpusError, "not_found", names="findings_fixed.json"):
        CheXpertPlus(root=tmp_path, labels_from="findings").plan(deid)


@pytest.mark.parametrize(
    "lines", [["Path,No Finding", f"x/{LATERAL},1"], [f"CheXpert-v1.0-small/{LATERAL}"]]
)
def test_patients_of_listed_images_are_left_out(
    lines: list[str], tmp_path: Path, deid: Deidentifier
) -> None:
    unknown = "train/patient00009/study1/view1_frontal.jpg"
    list_file = tmp_path / "5x200.csv"
    list_file.write_text("\n".join([*lines, unknown + (",0" if len(lines) > 1 else "")]) + "\n")
    corpus = CheXpertPlus(root=write(tmp_path / "plus"), exclude=list_file)
    plan = corpus.plan(deid)
    assert [sample.split for sample in plan.iter_samples()] == ["valid"]
    assert plan.excluded == {"listed_image": 1, "patient_of_listed_image": 2}
    assert plan.warnings["listed_without_row"] == 1
    assert corpus.notes(plan) == []
    (note,) = CheXpertPlus(root=tmp_path / "plus").notes(plan)
    assert "--exclude" in note


@pytest.mark.parametrize(
    ("tree", "suffix"),
    [("PNG/PNG", ".png"), ("PNG", ".png"), ("DICOM/Compressed", ".dcm"), ("", ".jpg")],
)
def test_the_tree_that_exists_is_read(
    tree: str, suffix: str, tmp_path: Path, deid: Deidentifier
) -> None:
    path = write_image(tmp_path / tree, LATERAL, suffix)
    (path.parent / ".azDownload-1-view1_frontal.png").write_bytes(b"")
    plan = CheXpertPlus(root=write(tmp_path)).plan(deid)
    assert [sample.image for sample in plan.iter_samples()][1] == path
    other = tmp_path / "elsewhere"
    image = write_image(other, FRONTAL, ".jpg")
    plan = CheXpertPlus(root=tmp_path, images=other).plan(deid)
    assert next(iter(plan.iter_samples())).image == image


def test_damaged_input_raises(tmp_path: Path, deid: Deidentifier) -> None:
    write(tmp_path)
    write_image(tmp_path / "PNG/PNG", FRONTAL)
    write_image(tmp_path / "PNG", VALID, ".jpg")
    with raises(CorpusError, "conflict", "images"):
        CheXpertPlus(root=tmp_path).plan(deid)
    write(tmp_path, [ROW | {"path_to_image": "train/../view1_frontal.jpg"}])
    with raises(CorpusError, "malformed", "Path", names=PLUS_TABLE):
        CheXpertPlus(root=tmp_path).plan(deid)
    write(tmp_path)
    row = {"path_to_image": FRONTAL, **dict.fromkeys(FINDINGS), "Edema": "yes"}
    (tmp_path / "report_fixed.json").write_text(json.dumps(row) + "\n")
    with raises(CorpusError, "malformed", "Edema"):
        CheXpertPlus(root=tmp_path).plan(deid)


def test_dicom_without_high_bit_and_inverted_with_a_window(tmp_path: Path) -> None:
    write(tmp_path, ROWS[:2])
    folder = tmp_path / "DICOM" / "Uncompressed" / Path(FRONTAL).parent
    folder.mkdir(parents=True)
    pixels = textured(1, 40, 50).astype("uint16") * 16
    window = {"WindowCenter": 2048, "WindowWidth": 4096}
    plain = image_dataset(pixels, BitsStored=12, HighBit=None, **window)
    inverted = image_dataset(
        4095 - pixels,
        BitsStored=12,
        HighBit=11,
        PhotometricInterpretation="MONOCHROME1",
        **window,
    )
    write_dataset(folder / "view1_frontal.dcm", plain)
    write_dataset(folder / "view2_lateral.dcm", inverted)
    command = ["shards", "chexpert-plus", "--root", tmp_path, "--out", tmp_path / "out"]
    cli.main([*map(str, command), "--workers", "1", "--image-format", "png"])
    source = ShardSource(tmp_path / "out" / "train")
    one, other = (source.pixels(position) for position in range(2))
    assert abs(one.astype(int) - other.astype(int)).max() <= 2


def test_phantom_has_the_patients_of_chexpert_and_verifies(
    tmp_path: Path, deid: Deidentifier
) -> None:
    size = {"patients": 12, "seed": 3, "size": 64, "workers": 1}
    root = write_chexpert_plus(tmp_path / "plus", **size)
    chexpert = write_chexpert(tmp_path / "chexpert", **size)
    plus = {sample.key: sample for sample in CheXpertPlus(root=root).plan(deid).iter_samples()}
    base = {sample.key: sample for sample in CheXpert(root=chexpert).plan(deid).iter_samples()}
    shared = plus.keys() & base.keys()
    assert shared, "an image of train has the same key in both"
    assert {plus[key].patient for key in shared} == {base[key].patient for key in shared}
    assert {plus[key].study for key in shared} == {base[key].study for key in shared}
    plan = CheXpertPlus(root=root, exclude=root / PLUS_LIST).plan(deid)
    assert plan.excluded["listed_image"] == 3
    assert plan.warnings["labels_of_study_differ"] > 0

    arguments = ["shards", "chexpert-plus", "--root", root, "--out", tmp_path / "out"]
    cli.main([*map(str, arguments), "--workers", "1"])
    manifest = Manifest.read(tmp_path / "out" / "train")
    assert not [name for name in manifest.warnings if name.startswith("possible_")]
    with pytest.raises(SystemExit):
        cli.main(["verify", str(tmp_path / "out"), "--full"])
