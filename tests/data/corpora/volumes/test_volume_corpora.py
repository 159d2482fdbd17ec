"""Corpora of volumes: the phantom in each layout gives its own arrays, reports and labels."""

import csv
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from helpers.errors import raises

from medvl.cli import main as cli
from medvl.data.corpora.volumes.ct_rate import CTRate
from medvl.data.corpora.volumes.inspect_ctpa import Inspect
from medvl.data.corpora.volumes.merlin import Merlin
from medvl.data.corpora.volumes.rad_chestct import RADChestCT
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest, split_folders
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.errors import CorpusError
from medvl.phantom import (
    compose_ct_report,
    draw_volume,
    sample_chest_ct,
    write_ct_rate,
    write_inspect,
    write_merlin,
    write_rad_chestct,
    write_volumes,
)

SHAPE = (12, 24, 24)
PATIENTS = 6
SIDES = tuple(map(str, SHAPE))


@pytest.fixture(scope="module")
def ct_rate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ct_rate")
    write_ct_rate(root, patients=PATIENTS, shape=SHAPE)
    return root


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        cli.main([str(argument) for argument in arguments])
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def sources(out: Path) -> dict[str, tuple[ShardSource, int]]:
    """Return source and position of each sample, by the file that it was made from."""
    lines = (out.with_name(f"{out.name}-private") / "sources.tsv").read_text().splitlines()
    paths = dict(line.split("\t") for line in lines)
    found = {}
    for folder in split_folders(out):
        source = ShardSource(folder)
        for position in range(len(source)):
            found[Path(paths[source.key(position)]).name] = (source, position)
    return found


def chest_key(name: str) -> tuple[int, ...]:
    """Return the key of a scan of the phantom CT-RATE."""
    part, number, letter = name.split("_")[:3]
    patients = [patient for patient in range(PATIENTS) if (patient % 4 == 1) == (part == "valid")]
    key = (0, patients[int(number) - 1])
    return (*key, 1) if letter == "b" else key


def test_ct_rate_gives_the_volumes_of_the_phantom(
    ct_rate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of both releases, feet first and head first."""
    out = tmp_path / "out"
    command = ("shards", "ct-rate", "--root", ct_rate, "--out", out, "--workers", 1)
    status, printed, problem = run(capsys, *command, "--samples-per-shard", 3)
    assert status == 0, problem
    assert "read 18 images: kept 16, left out 2 (2 not_chest)" in printed
    found = sources(out)
    assert len(found) == 16
    trees = Counter(path.parents[2].name for path in ct_rate.rglob("*.nii.gz"))
    assert trees["train"] + trees["valid"] == 6, "raw files are among them"
    studies: dict[str, set[str]] = {}
    for name, (source, position) in found.items():
        chest = sample_chest_ct(chest_key(name))
        reconstruction = int(name.removesuffix(".nii.gz")[-1])
        drawn = draw_volume(chest, SHAPE, reconstruction=reconstruction - 1)
        volume = source.volume(position)
        np.testing.assert_array_equal(volume.hu_DHW, drawn, err_msg=name)
        assert volume.spacing == pytest.approx((25, 15, 15))
        sample = source.sample(position)
        report = compose_ct_report(chest)
        assert sample.sections["findings"] == report["findings"]
        assert ("indication" in sample.sections) == (not name.startswith("train_1_a"))
        assert {label: sample.labels[label] for label in chest.labels} == chest.labels
        assert len(sample.labels) == 18
        assert sample.extra["reconstruction"] == reconstruction
        assert (source.manifest.split == "test") == name.startswith("valid")
        assert (sample.sex, sample.age) == ("M" if sample.age % 2 else "F", sample.age)
        studies.setdefault(name[: name.rindex("_")], set()).add(sample.study)
    assert all(len(study) == 1 for study in studies.values()), "reconstructions share a study"
    assert len(set.union(*studies.values())) == len(studies)
    status, printed, _ = run(capsys, "verify", out)
    assert status == 0
    assert "not the full release: 18 of 50188 images" in printed
    assert run(capsys, "verify", out, "--full")[0] == 1


def test_spacing_and_size_are_in_the_manifest(
    ct_rate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ("shards", "ct-rate", "--root", ct_rate, "--out", out, "--workers", 1)
    options = ("--spacing", 50, 15, 15, "--size", 4, 30, 20)
    status, _, problem = run(capsys, *command, *options)
    assert status == 0, problem
    for folder in split_folders(out):
        stored = Manifest.read(folder).options["volume"]
        assert stored["spacing"] == [50, 15, 15]
        assert stored["size"] == [4, 30, 20]
        assert "short_side" not in Manifest.read(folder).options
        assert ShardSource(folder).volume(0).hu_DHW.shape == (4, 30, 20)
    status, _, problem = run(capsys, *command, "--spacing", 25, 15, 15)
    assert status == 1
    assert "options" in problem


def copy_of(ct_rate: Path, tmp_path: Path) -> Path:
    shutil.copytree(ct_rate, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_second_rescale_is_refused(
    ct_rate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that are already Hounsfield units in the raw tree, and stored values in the fixed
    one.
    """
    root = copy_of(ct_rate, tmp_path)
    raw = next((root / "dataset" / "train").rglob("*.nii.gz"))
    image = nibabel.load(raw)
    values = np.asanyarray(image.dataobj)
    nibabel.save(nibabel.Nifti1Image(values - np.int16(1024), np.eye(4)), raw)
    fixed = next((root / "dataset" / "valid_fixed").rglob("*.nii.gz"))
    image = nibabel.load(fixed)
    values = np.asanyarray(image.dataobj)
    nibabel.save(nibabel.Nifti1Image(values - np.int16(1024), image.affine), fixed)
    out = tmp_path / "out"
    command = ("shards", "ct-rate", "--root", root, "--out", out, "--workers", 1)
    status, printed, problem = run(capsys, *command, "--max-skipped", 2)
    assert status == 0, problem
    assert sum(map(int, re.findall(r"(\d+) not_hu", printed))) == 2
    status, _, problem = run(capsys, *command[:-1], 1, "--out", tmp_path / "o", "--max-skipped", 1)
    assert status == 1
    assert "budget" in problem


def test_a_rescale_in_the_header_of_a_raw_file_is_a_conflict(
    ct_rate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copy_of(ct_rate, tmp_path)
    raw = next((root / "dataset" / "train").rglob("*.nii.gz"))
    image = nibabel.load(raw)
    stored = nibabel.Nifti1Image(np.asanyarray(image.dataobj), np.eye(4))
    stored.header.set_slope_inter(1, -1024)
    nibabel.save(stored, raw)
    command = ("shards", "ct-rate", "--root", root, "--out", tmp_path / "out", "--workers", 1)
    status, printed, _ = run(capsys, *command, "--max-skipped", 1)
    assert status == 0
    assert "1 conflict" in printed


def rewrite(path: Path, change: Any) -> None:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    change(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_ct_rate_rows_that_cannot_be_used(
    ct_rate: Path, tmp_path: Path, deid: Deidentifier
) -> None:
    dataset = copy_of(ct_rate, tmp_path) / "dataset"
    reports = dataset / "radiology_text_reports/train_reports.csv"

    def change(rows: list[dict[str, str]]) -> None:
        rows[0]["VolumeName"] = "train_1267_a_4.nii.gz"
        rows[1]["VolumeName"] = "valid_9_a_1.nii.gz"
        rows[3]["Findings_EN"] = "Another report."

    rewrite(reports, change)
    metadata = dataset / "metadata/train_metadata.csv"
    raw = {path.name for path in (dataset / "train").rglob("*.nii.gz")}

    def damage(rows: list[dict[str, str]]) -> None:
        for row in rows:
            if row["VolumeName"] in raw:
                row["XYSpacing"] = "[15.0]"

    rewrite(metadata, damage)
    (dataset / "metadata/no_chest_valid.txt").unlink()
    plan = CTRate(root=dataset).plan(deid)
    assert plan.rows.excluded == Counter(broken=1, not_chest=2)
    usable = raw - {"train_1267_a_4.nii.gz"}
    assert plan.rows.skipped == Counter(row_malformed=1 + len(usable))
    assert plan.warnings["reports_of_a_scan_differ"] == 1
    assert plan.warnings["no_list_of_other_body_parts"] == 1
    with raises(CorpusError, "not_found", names="validation_reports.csv"):
        CTRate(root=tmp_path / "nothing").plan(deid)
    missing = CTRate(root=dataset, release="fixed").plan(deid)
    assert all("_fixed/" in str(record.sample.image) for record in missing.records)


def test_training_patients_are_split_and_ordered(ct_rate: Path, deid: Deidentifier) -> None:
    plan = CTRate(root=ct_rate, validate_share=0.5).plan(deid)
    splits: dict[str, set[str]] = {}
    orders: dict[str, set[int | None]] = {}
    for sample in plan.iter_samples():
        splits.setdefault(sample.patient, set()).add(sample.split)
        orders.setdefault(sample.patient, set()).add(sample.order)
    assert all(len(each) == 1 for each in splits.values())
    assert {split for each in splits.values() for split in each} == {"train", "validate", "test"}
    assert {frozenset(each) for each in orders.values()} == {frozenset({0}), frozenset({0, 1})}


def test_rad_chestct_and_merlin_give_the_volumes_of_the_phantom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose axes lead to the feet, and to the right and the front."""
    write_rad_chestct(tmp_path / "rad", patients=4, shape=SHAPE)
    write_merlin(tmp_path / "mer", patients=4, shape=SHAPE)
    (tmp_path / "rad" / "val00002.npz").unlink()
    for name, folder, spacing in (
        ("rad-chestct", "rad", (0.8, 0.8, 0.8)),
        ("merlin", "mer", (25, 15, 15)),
    ):
        out = tmp_path / f"{folder}-out"
        command = ("shards", name, "--root", tmp_path / folder, "--out", out, "--workers", 1)
        status, printed, problem = run(capsys, *command)
        assert status == 0, problem
        found = sources(out)
        assert len(found) == (3 if folder == "rad" else 4)
        assert ("1 not_public" in printed) == (folder == "rad")
        assert ("names no patient" in printed or "names no patients" in printed) == (
            folder == "mer"
        )
        for file, (source, position) in found.items():
            chest = sample_chest_ct((0, int(file.partition(".")[0][-5:])))
            volume = source.volume(position)
            np.testing.assert_array_equal(volume.hu_DHW, draw_volume(chest, SHAPE))
            assert volume.spacing == pytest.approx(spacing)
            sample = source.sample(position)
            present = sum(chest.labels.values())
            assert sum(sample.labels.values()) == present
            if folder == "mer":
                assert sample.sections == {"findings": compose_ct_report(chest)["findings"]}
                assert len(sample.labels) == (present if file[-8] in "13" else 7)
            else:
                assert sample.sections == {}
                assert sample.labels["cardiomegaly"] == chest.labels["Cardiomegaly"]
        assert {folder.name for folder in split_folders(out)} >= {"train", "test"}
        assert verify_folder(out / "train", decode=True).problems == ()


def test_inspect_gives_impressions_labels_and_the_splits_of_its_tables(
    tmp_path: Path, deid: Deidentifier, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "full"
    write_inspect(root, patients=4, shape=(4, 8, 8))
    (root / "splits_20240101.tsv").write_text("impression_id\tsplit\n")  # an older one
    out = tmp_path / "out"
    command = ("shards", "inspect", "--root", root, "--out", out, "--workers", 1)
    status, printed, problem = run(capsys, *command)
    assert status == 0, problem
    assert "1 duplicate_row" in printed
    found = sources(out)
    assert len(found) == 4
    for file, (source, position) in found.items():
        patient = int(file.partition(".")[0][-5:])
        chest = sample_chest_ct((0, patient))
        np.testing.assert_array_equal(source.volume(position).hu_DHW, draw_volume(chest, (4, 8, 8)))
        sample = source.sample(position)
        assert sample.split == ("train", "train", "validate", "test")[patient]
        assert sample.sections == {"impression": compose_ct_report(chest)["impression"]}
        outcome = {"PH within 12 months": patient % 3} if patient != 2 else {}
        embolism = {"Pulmonary embolism": chest.labels["Consolidation"]}
        assert sample.labels == {**embolism, **outcome}
    table = root / "impressions_20250611.tsv"
    table.write_text(table.read_text() + "1000\tAnother text.\n")
    with raises(CorpusError, "malformed", "impressions"):
        Inspect(root=root).plan(deid)
    (root / "labels_20250611.tsv").write_text("impression_id\tpe_positive_nlp\n1000\tperhaps\n")
    with raises(CorpusError, "malformed"):
        Inspect(root=root).plan(deid)
    with raises(CorpusError, "not_found", "root"):
        Inspect(root=tmp_path).plan(deid)


def test_damaged_archives_and_tables(tmp_path: Path, deid: Deidentifier, capsys: Any) -> None:
    root = tmp_path / "rad"
    write_rad_chestct(root, patients=8, shape=SHAPE)
    np.savez(root / "trn00000.npz", ct=np.array([{}], object))
    np.savez(root / "trn00001.npz", other=np.zeros(3))
    (root / "val00002.npz").write_bytes((root / "val00002.npz").read_bytes()[:300])
    np.savez(root / "tst00003.npz", ct=np.zeros((3, 3), np.int16))
    command = ("shards", "rad-chestct", "--root", root, "--out", tmp_path / "out", "--workers", 1)
    status, printed, problem = run(capsys, *command, "--max-skipped", 4)
    assert status == 0, problem
    assert sum(int(n) for n in re.findall(r"(\d+) unsupported", printed)) == 2
    assert "1 missing" in printed
    assert "1 malformed" in printed
    with raises(CorpusError, "not_found", names="imgtrain"):
        RADChestCT(root=tmp_path).plan(deid)
    with raises(CorpusError, "not_found", names="reports_final.xlsx"):
        Merlin(root=tmp_path).plan(deid)


def test_own_volumes_are_converted_from_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NIfTI files and DICOM series alike; a missing one is counted."""
    root = tmp_path / "own"
    write_volumes(root, patients=3, shape=SHAPE, reconstructions=2, dicom=True)
    shutil.rmtree(root / "dicom" / "s00001_1")
    for column in ("path", "series"):
        out = tmp_path / column
        command = ["shards", "volumes", "--table", root / "volumes.csv", "--out", out]
        command += ["--image-column", column, "--patient-column", "patient", "--workers", 1]
        command += ["--study-column", "study", "--text-column", "findings", "impression"]
        command += ["--label-column", "Emphysema", "--splits", "train=1", "--max-skipped", 1]
        status, printed, problem = run(capsys, *command, "--size", *SIDES)
        assert status == 0, problem
        assert ("1 image_missing" in printed) == (column == "series")
        source = ShardSource(out / "train")
        assert source.label_names == ("Emphysema",)
        for name, (_, position) in sources(out).items():
            patient, reconstruction = map(int, re.findall(r"\d+", name.partition(".")[0]))
            chest = sample_chest_ct((0, patient))
            drawn = draw_volume(chest, SHAPE, reconstruction=reconstruction - 1)
            np.testing.assert_array_equal(source.volume(position).hu_DHW, drawn)
        studies = Counter(source.sample(position).study for position in range(len(source)))
        assert sorted(studies.values()) == ([2, 2, 2] if column == "path" else [1, 2, 2])
        assert b"Ashgrove" not in b"".join(path.read_bytes() for path in out.rglob("*.tar"))


def test_phantom_commands_print_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ct-rate", "rad-chestct", "merlin", "inspect", "volumes"):
        out = tmp_path / name
        status, printed, problem = run(
            capsys, "phantom", name, "--out", out, "--patients", 2, "--shape", 4, 8, 8
        )
        assert status == 0, problem
        assert f"medvl shards {name} " in printed
        assert len((out / "truth.jsonl").read_text().splitlines()) >= 2
        assert json.loads((out / "truth.jsonl").read_text().splitlines()[0])["labels"]
