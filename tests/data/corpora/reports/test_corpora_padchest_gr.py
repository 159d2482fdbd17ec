"""PadChest-GR: the converter on fixtures in the published layout and on its phantom."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises
from helpers.mimic_files import textured

from medvl.cli import main as cli
from medvl.data.annotations import phrases_of
from medvl.data.corpora.reports.padchest import PadChest
from medvl.data.corpora.reports.padchest_gr import PadChestGR
from medvl.data.images.codecs import encode_png
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest, sample_to_json
from medvl.errors import ConfigError, CorpusError
from medvl.phantom import write_padchest, write_padchest_gr
from medvl.phantom.layouts.grounded_reports import GR_COLUMNS, GR_REPORTS, GR_TABLE

EFFUSION = {
    "sentence_en": "Small effusions.", "sentence_es": "Derrames.", "abnormal": True,
    "boxes": [[0.1, 0.5, 0.3, 0.9], [0.6, 0.5, 0.9, 1.0004]], "extra_boxes": [[0, 0, 0.5, 0.5]],
    "labels": ["pleural effusion"], "locations": ["bilateral"], "progression": "worsening",
}  # fmt: skip
NORMAL = {"sentence_en": "Heart is normal.", "sentence_es": "Normal.", "abnormal": False}
SPINE = {
    "sentence_en": "Scoliosis.", "sentence_es": "Escoliosis.", "abnormal": True, "boxes": [],
    "labels": ["scoliosis"], "locations": [],
}  # fmt: skip
FIRST: dict[str, Any] = {
    "StudyID": "S1", "ImageID": "11_a.png", "PreviousStudyID": "S0",
    "PreviousImageID": "10_p.png", "findings": [NORMAL, EFFUSION],
}  # fmt: skip
SECOND: dict[str, Any] = {"StudyID": "S2", "ImageID": "12_b.png", "findings": [SPINE, NORMAL]}
ROW = {
    "StudyID": "S1", "ImageID": "11_a.png", "split": "train", "PatientID": "77",
    "patient_is_benchmark": "False", "PatientSex_DICOM": "F", "StudyDate_DICOM": "20150102",
    "PatientAge": "71", "label_group": "pleural effusion",
}  # fmt: skip
OTHER = ROW | {
    "StudyID": "S2", "ImageID": "12_b.png", "split": "validation", "PatientID": "78",
    "patient_is_benchmark": "True", "label_group": "Normal",
}  # fmt: skip


def write(
    root: Path,
    entries: Sequence[dict[str, Any]] = (FIRST, SECOND),
    rows: Sequence[dict[str, str]] = (ROW, ROW | {"label_group": "Normal"}, OTHER),
) -> Path:
    folder = root / "deep" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("10_p.png", "11_a.png", "12_b.png"):
        (folder / name).write_bytes(encode_png(textured(1, 200, 100)))
    (root / GR_REPORTS).write_text(json.dumps([*entries]))
    with (root / GR_TABLE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, GR_COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return root


def test_sentences_with_boxes_are_phrases(tmp_path: Path, deid: Deidentifier) -> None:
    plan = PadChestGR(root=write(tmp_path)).plan(deid)
    first, second = plan.iter_samples()
    assert plan.label_names == ("Pleural Effusion", "scoliosis")
    assert first.sections == {"findings": "Heart is normal. Small effusions."}
    assert first.labels == {"Pleural Effusion": 1, "scoliosis": 0}
    (phrase,) = phrases_of(first)
    assert (phrase.label, phrase.text) == ("Pleural Effusion", "Small effusions.")
    one, other = phrase.boxes
    sides = ("x", "y", "width", "height")
    assert [one[side] for side in sides] == pytest.approx([10, 100, 20, 80])
    assert [other[side] for side in sides] == pytest.approx([60, 100, 30, 100])
    normal, effusion = first.extra["sentences"]
    assert normal["labels"] == normal["boxes"] == normal["locations"] == []
    assert (normal["abnormal"], normal["progression"]) == (False, None)
    assert (effusion["progression"], effusion["translation"]) == ("worsening", "Derrames.")
    assert len(effusion["extra_boxes"]) == 1
    assert first.extra["label_groups"] == ["Normal", "pleural effusion"]
    assert first.extra["prior"] == deid.image("10_p.png")
    assert (first.sex, first.age, first.order, first.view) == ("F", 71, 0, None)
    assert first.image == tmp_path / "deep" / "images" / "11_a.png"
    assert (first.split, second.split) == ("train", "validate")
    assert phrases_of(second) == ()
    assert second.extra["sentences"][0]["abnormal"] is True
    assert second.extra["patient_is_benchmark"] is True
    stored = sample_to_json(first) + sample_to_json(second)
    assert not any(text in stored for text in (b"S1", b"11_a", b"20150102"))


def test_options_choose_language_priors_and_views(tmp_path: Path, deid: Deidentifier) -> None:
    write(tmp_path)
    spanish = PadChestGR(root=tmp_path, language="spanish").plan(deid)
    first, _ = spanish.iter_samples()
    assert first.sections == {"findings": "Normal. Derrames."}
    assert phrases_of(first)[0].text == "Derrames."
    with raises(ConfigError, "unknown_name", "language"):
        PadChestGR(root=tmp_path, language="latin").plan(deid)

    corpus = PadChestGR(root=tmp_path, priors=True)
    first, _, prior = corpus.plan(deid).iter_samples()
    assert corpus.keeps_textless()
    assert prior.key == first.extra["prior"]
    assert prior.sections == prior.labels == {}
    assert (prior.split, prior.patient) == ("train", first.patient)
    assert prior.study == deid.study("77", "S0")

    table = tmp_path / "padchest.csv"
    table.write_text("ImageID,Projection\n11_a.png,L\n12_b.png,EXCLUDE\n")
    views = PadChestGR(root=tmp_path, padchest_table=table).plan(deid)
    assert [sample.view for sample in views.iter_samples()] == ["LATERAL", None]


def test_defects_are_counted(tmp_path: Path, deid: Deidentifier) -> None:
    boxes = [[0.5, 0.1, 0.4, 0.2], [0.1, 0.1, 1.2, 0.2], [0.1, 0.1, 0.2], [0, 0, 1, 1], None]
    entry = FIRST | {"findings": [EFFUSION | {"boxes": boxes, "labels": []}]}
    lost = SECOND | {"ImageID": "99_x.png"}
    plan = PadChestGR(root=write(tmp_path, [entry, lost])).plan(deid)
    (sample,) = plan.iter_samples()
    assert plan.excluded == {"not_in_table": 1, "not_in_reports": 1}
    assert plan.warnings["box_malformed"] == 4
    (phrase,) = phrases_of(sample)
    assert (phrase.label, len(phrase.boxes)) == ("finding", 1)


@pytest.mark.parametrize(
    ("entries", "rows", "field"),
    [
        ([FIRST | {"ImageID": "../x.png"}], [ROW], None),
        ([FIRST | {"PreviousImageID": "a/b.png"}], [ROW], "PreviousImageID"),
        ([FIRST | {"findings": "none"}], [ROW], None),
        ([FIRST | {"findings": ["none"]}], [ROW], "findings"),
        ([FIRST], [ROW | {"split": "dev"}], "split"),
        ([FIRST], [ROW, ROW | {"PatientID": "9"}], "split"),
    ],
)
def test_damaged_input_raises(
    entries: list[dict[str, Any]],
    rows: list[dict[str, str]],
    field: str | None,
    tmp_path: Path,
    deid: Deidentifier,
) -> None:
    write(tmp_path, entries, rows)
    with raises(CorpusError, "malformed", field):
        PadChestGR(root=tmp_path).plan(deid)


def test_missing_image_is_skipped_and_missing_files_raise(
    tmp_path: Path, deid: Deidentifier
) -> None:
    with raises(CorpusError, "not_found", names=GR_TABLE):
        PadChestGR(root=tmp_path).plan(deid)
    write(tmp_path)
    (tmp_path / "deep" / "images" / "12_b.png").unlink()
    arguments = ["shards", "padchest-gr", "--root", tmp_path, "--out", tmp_path / "out"]
    cli.main([*map(str, arguments), "--workers", "1", "--max-skipped", "1"])
    assert Manifest.read(tmp_path / "out" / "train").samples == 1


def test_patients_of_the_test_split_are_left_out_of_padchest(
    tmp_path: Path, deid: Deidentifier
) -> None:
    size = {"patients": 8, "seed": 3, "size": 64, "workers": 1}
    grounded = write_padchest_gr(tmp_path / "gr", split=(0.5, 0.0, 0.5), **size)
    whole = write_padchest(tmp_path / "padchest", **size)
    of_gr = {each.key: each for each in PadChestGR(root=grounded).plan(deid).iter_samples()}
    of_whole = {each.key: each for each in PadChest(root=whole).plan(deid).iter_samples()}
    assert of_gr.keys() < of_whole.keys()
    for key, sample in of_gr.items():
        assert (sample.patient, sample.study) == (of_whole[key].patient, of_whole[key].study)
    assert any(phrases_of(sample) for sample in of_gr.values())

    salt = tmp_path / "salt"
    salt.write_text("ab" * 32)
    common = ["--workers", "1", "--salt-file", str(salt)]
    first = ["shards", "padchest-gr", "--root", str(grounded), "--out", str(tmp_path / "a")]
    cli.main([*first, *common])
    second = ["shards", "padchest", "--root", str(whole), "--out", str(tmp_path / "b")]
    cli.main([*second, "--without", str(tmp_path / "a" / "test"), *common])
    held_out = set(Manifest.read(tmp_path / "a" / "test").patients)
    folders = sorted((tmp_path / "b").glob("*/"))
    assert held_out
    assert not held_out & {name for each in folders for name in Manifest.read(each).patients}
