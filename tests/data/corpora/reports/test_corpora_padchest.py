"""PadChest converter on valid and damaged fixtures in the published layout, and on its phantom."""

import csv
import gzip
from pathlib import Path

import cv2
import numpy as np
import pytest
from helpers.errors import raises
from helpers.mimic_files import textured

from medvl.cli import main as cli
from medvl.data.corpora.reports import padchest
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import sample_to_json
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, CorpusError
from medvl.phantom import World, read_truth
from medvl.phantom.layouts.reports import COLUMNS, NAMES
from medvl.schema import Sample

CARD = Path(__file__).parents[4] / "data_cards" / "padchest.md"
TABLE = "PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv"
PREFIX = "2168401113669640138295431665120133"
FIRST = {
    "ImageID": f"{PREFIX}38135747880_02-094-102.png",
    "ImageDir": "13",
    "StudyDate_DICOM": "20131204",
    "StudyID": "20536686640136348236148679891455886468",
    "PatientID": "839860488694292331637988235681460987",
    "PatientBirth": "1920.0",
    "PatientSex_DICOM": "F",
    "Projection": "PA",
    "PhotometricInterpretation_DICOM": "MONOCHROME1",
    "Report": " derram pleural derech . cardiomegali . ",
    "MethodLabel": "Physician",
    "Labels": "['pleural effusion', ' pleural effusion', '', \"mini 'stent\"]",
    "LabelsLocalizationsBySentence": "[['loc  right', 'pleural effusion'], ['normal'], "
    "['normal'], ['exclude x', nan]]",
    "labelCUIS": "['C0032227' 'C0038257'\n ''  'C0032227']",
    "LocalizationsCUIS": "[]",
}
EARLIER = FIRST | {
    "ImageID": f"{PREFIX}_2.png", "ImageDir": "0", "StudyDate_DICOM": "20100101", "StudyID": "7",
    "Projection": "L", "MethodLabel": "RNN_model", "Labels": "['normal']",
    "LabelsLocalizationsBySentence": "[['normal']]", "PatientSex_DICOM": "O", "PatientBirth": "",
    "PhotometricInterpretation_DICOM": "",
}  # fmt: skip
OTHERS = [
    EARLIER
    | {
        "ImageID": "3.png",
        "PatientID": "5",
        "Projection": "AP_horizontal",
        "Labels": "",
        "labelCUIS": "nan",
    },
    EARLIER | {"ImageID": "4.png", "Projection": "EXCLUDE"},
    EARLIER | {"ImageID": "5.png", "Labels": "['exclude']"},
    EARLIER | {"ImageID": "nan"},
    EARLIER | {"ImageID": "6.png", "ImageDir": "../.."},
]


def write(
    root: Path, *rows: dict[str, str], columns: tuple[str, ...] = COLUMNS, compressed: bool = False
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if compressed else open
    with opened(
        root / f"{TABLE}{'.gz' if compressed else ''}", "wt", encoding="utf-8", newline=""
    ) as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return root


def planned(root: Path, deid: Deidentifier, **options) -> dict[str, Sample]:
    return {
        sample.key: sample
        for sample in padchest.PadChest(root=root, **options).plan(deid).iter_samples()
    }


@pytest.mark.parametrize("compressed", [False, True])
def test_samples_have_labels_sentences_and_order(
    compressed: bool, tmp_path: Path, deid: Deidentifier
) -> None:
    (tmp_path / "13").mkdir()
    plan = padchest.PadChest(
        root=write(tmp_path, FIRST, EARLIER, *OTHERS, compressed=compressed)
    ).plan(deid)
    assert plan.label_names == ("No Finding", "Pleural Effusion", "mini 'stent")
    assert plan.excluded == {"marked_exclude": 2, "no_image_name": 2}
    assert plan.warnings == {"no_labels": 1}
    samples = {sample.key: sample for sample in plan.iter_samples()}
    first, earlier, bare = (
        samples[deid.image(row["ImageID"])] for row in (FIRST, EARLIER, OTHERS[0])
    )
    assert first.labels == {"No Finding": 0, "Pleural Effusion": 1, "mini 'stent": 1}
    assert first.sections == {"findings": "Pleural effusion, right. Normal. Exclude x."}
    assert first.extra == {
        "labels_localizations_by_sentence": [
            ["loc right", "pleural effusion"],
            ["normal"],
            ["normal"],
            ["exclude x"],
        ],
        "label_cuis": ["C0032227", "C0038257"],
        "localization_cuis": [],
        "annotated_by": "physician",
        "photometric": "MONOCHROME1",
    }
    assert (first.view, first.sex, first.age, first.order) == ("PA", "F", 90, 1)
    assert first.image == tmp_path / "13" / FIRST["ImageID"]
    assert (earlier.view, earlier.sex, earlier.age, earlier.order) == ("LATERAL", None, None, 0)
    assert earlier.labels == {"No Finding": 1, "Pleural Effusion": 0, "mini 'stent": 0}
    assert earlier.extra["annotated_by"] == "model"
    assert earlier.image == tmp_path / EARLIER["ImageID"]  # all files in one folder
    assert (first.patient, first.split) == (earlier.patient, earlier.split)
    assert first.study != earlier.study
    assert (bare.view, bare.labels, bare.patient == first.patient) == ("AP", {}, False)
    stored = sample_to_json(first).decode()
    assert not any(FIRST[name].strip() in stored for name in ("ImageID", "StudyID", "PatientID",
        "StudyDate_DICOM", "Report"))  # fmt: skip


def test_options_choose_images_and_text(tmp_path: Path, deid: Deidentifier) -> None:
    write(tmp_path, FIRST, EARLIER, *OTHERS)
    plan = padchest.PadChest(
        root=tmp_path, annotators="physician", text="spanish", splits=("test=1.0",)
    ).plan(deid)
    (sample,) = plan.iter_samples()
    assert plan.label_names == ("Pleural Effusion", "mini 'stent")
    assert plan.excluded == {"labelled_by_model": 4, "no_image_name": 2}
    assert (sample.split, sample.sections) == ("test", {"report": FIRST["Report"].strip()})
    frontal = padchest.PadChest(root=tmp_path, views=("PA", "AP")).plan(deid)
    assert {sample.view for sample in frontal.iter_samples()} == {"PA", "AP"}
    assert frontal.excluded["view"] == 1
    for options, expected in (
        ({"annotators": "nobody"}, ("unknown_name", "annotators")), ({"text": "latin"}, ("unknown_name", "text")),
        ({"views": ("L",)}, ("unknown_name", "views")), ({"splits": ("train=0.5",)}, ("out_of_range", "splits")),
    ):  # fmt: skip
        with raises(ConfigError, *expected):
            padchest.PadChest(root=tmp_path, **options).plan(deid)


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("Labels", "pneumonia"), ("Labels", "['pneumonia'"), ("Labels", "[['pneumonia']]"), ("Labels", "[pneumonia]"),
        ("Labels", "[" + " ," * 50_000), ("labelCUIS", "['C1' C2]"), ("LocalizationsCUIS", "{}"),
        ("LabelsLocalizationsBySentence", "['normal']"), ("LabelsLocalizationsBySentence", "[" * 50_000),
        ("LabelsLocalizationsBySentence", "[['normal'], [__import__('os')]]"),
    ],
)  # fmt: skip
def test_damaged_list_raises(column: str, cell: str, tmp_path: Path, deid: Deidentifier) -> None:
    with raises(CorpusError, "malformed", column, names=TABLE):
        padchest.PadChest(root=write(tmp_path, FIRST, EARLIER | {column: cell})).plan(deid)


def test_missing_table_or_column_raises(tmp_path: Path, deid: Deidentifier) -> None:
    with raises(CorpusError, "not_found"):
        padchest.PadChest(root=tmp_path).plan(deid)
    columns = tuple(name for name in COLUMNS if name != "labelCUIS")
    row = {name: FIRST.get(name, "") for name in columns}
    with raises(CorpusError, "missing", "labelCUIS"):
        padchest.PadChest(root=write(tmp_path, row, columns=columns)).plan(deid)


def test_truncated_files_are_skipped(tmp_path: Path) -> None:
    rows = [FIRST | {"ImageID": f"{number}.png", "PatientID": str(number)} for number in range(4)]
    (write(tmp_path / "corpus", *rows) / "13").mkdir()
    for row in rows[:3]:
        path = tmp_path / "corpus" / "13" / row["ImageID"]
        cv2.imwrite(str(path), textured(0, 40, 40).astype(np.uint16) * 16)
    path.write_bytes(path.read_bytes()[:-300])
    cli.main([
        "shards", "padchest", "--root", str(tmp_path / "corpus"), "--out", str(tmp_path / "out"),
        "--workers", "1", "--splits", "test=1", "--max-skipped", "0.5", "--short-side", "32",
    ])  # fmt: skip
    source = ShardSource(tmp_path / "out" / "test")
    assert len(source) == 2
    assert source.manifest.skipped == {"truncated": 1, "image_missing": 1}


def test_phantom_round_trip(
    tmp_path: Path, deid: Deidentifier, capsys: pytest.CaptureFixture[str]
) -> None:
    patients, seed, size, root = 8, 43, 48, tmp_path / "corpus"
    sizes = ["--patients", str(patients), "--size", str(size), "--seed", str(seed)]
    cli.main(["phantom", "padchest", "--out", str(root), "--workers", "1", *sizes])
    assert "medvl shards padchest" in capsys.readouterr().out
    shares = ["--splits", "train=0.7", "test=0.3"]
    cli.main(
        [
            "shards",
            "padchest",
            "--root",
            str(root),
            "--out",
            str(tmp_path / "out"),
            "--workers",
            "1",
            *shares,
        ]
    )
    sources = [ShardSource(tmp_path / "out" / split) for split in ("train", "test")]
    samples = {
        sample.key: sample
        for source in sources
        for sample in map(source.sample, range(len(source)))
    }
    studies = [study for patient in World(seed).patients(patients) for study in patient.studies]
    rows = {deid.image(Path(row["path"]).name): row for row in read_truth(root)}
    assert samples.keys() == rows.keys()
    assert len(rows) == sum(len(study.views) for study in studies)
    assert {sample.extra["annotated_by"] for sample in samples.values()} == {"physician", "model"}
    for key, sample in samples.items():
        row = rows[key]
        assert (sample.sex, sample.age) == (row["sex"], min(90, row["age"]))
        assert (sample.view == "LATERAL") == (row["view"] in ("LATERAL", "LL"))
        assert sample.labels["No Finding"] == row["labels"]["No Finding"]
        for label, side in row["side"].items():
            if label in NAMES:
                name = NAMES[label][0]
                assert sample.labels[padchest.RENAMED.get(name, name)] == 1
                place = f", {side}" if side != "midline" else ""
                assert f"{name.capitalize()}{place}." in sample.sections["findings"]
    assert {sample.order for sample in samples.values()} >= {0, 1}
    path = next(root.glob("*/*.png"))
    pixels_HW = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    assert (pixels_HW.dtype, max(pixels_HW.shape)) == (np.uint16, size)
