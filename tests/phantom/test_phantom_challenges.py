"""Phantom RSNA and SIIM: read by the converters of the real releases, in agreement with the
ground truth.
"""

from pathlib import Path

import numpy as np
import pydicom
import pytest

from medvl.cli import main as cli
from medvl.data.annotations import decode_runs, encode_runs
from medvl.data.corpora.boxes_and_masks import rsna, siim
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.phantom import World, boxes, masks, write_rsna, write_siim
from medvl.phantom.layouts.kaggle import (
    BOXED_LABELS,
    REFERENCE_SIZE,
    encode_run_lengths,
    image_uid_hex,
    square_frontal_views,
    uid,
)

PATIENTS, SEED, SIZE = 10, 40, 64


@pytest.fixture
def deid() -> Deidentifier:
    return Deidentifier(b"0123456789abcdef")


@pytest.fixture(scope="module")
def pneumonia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rsna(
        tmp_path_factory.mktemp("rsna"), patients=PATIENTS, seed=SEED, size=SIZE, workers=1
    )


def test_rsna_converter_reads_all_boxes(pneumonia: Path, deid: Deidentifier) -> None:
    read = {
        sample.image.stem: sample
        for sample in rsna.RSNA(root=pneumonia).plan(deid).iter_samples()
        if sample.image
    }
    views = {
        image_uid_hex(view): (study, view)
        for patient in World(SEED).patients(PATIENTS)
        for study, view in square_frontal_views(patient)
    }
    assert len(read) == len(views) > PATIENTS
    assert len({sample.patient for sample in read.values()}) == PATIENTS
    boxed = 0
    for name, sample in read.items():
        study, view = views[name.replace("-", "")]
        expected = {
            (b.x, b.y, b.width, b.height)
            for b in boxes(view, REFERENCE_SIZE)
            if b.label in BOXED_LABELS
        }
        actual = [
            (box["x"], box["y"], box["width"], box["height"]) for box in sample.extra["boxes"]
        ]
        assert len(actual) == len(expected)
        assert set(actual) == expected
        assert sample.labels == {
            "Pneumonia": int(bool(expected)),
            "No Finding": study.labels["No Finding"],
        }
        boxed += bool(expected)
    assert 0 < boxed < len(read)


def test_rsna_images_are_square_with_8_bits(pneumonia: Path) -> None:
    paths = list((pneumonia / "stage_2_train_images").glob("*.dcm"))
    assert paths
    for path in paths:
        dataset = pydicom.dcmread(path)
        assert (dataset.Rows, dataset.Columns, dataset.BitsStored) == (SIZE, SIZE, 8)
        assert dataset.PatientID == path.stem
        assert 20 < dataset.pixel_array.mean() < 220


def test_siim_converter_reads_all_masks(tmp_path: Path, deid: Deidentifier) -> None:
    count = 60
    root = write_siim(tmp_path / "siim", patients=count, seed=SEED, size=32, workers=1)
    views = {
        str(uid(view)): view
        for patient in World(SEED).patients(count)
        for _, view in square_frontal_views(patient)
    }
    samples = [sample for sample in siim.SIIM(root=root).plan(deid).iter_samples() if sample.image]
    with_mask = 0
    for sample in samples:
        assert sample.image is not None
        assert sample.image.is_file()
        truth_HW = masks(views[sample.image.stem], REFERENCE_SIZE).get("Pneumothorax")
        entries = sample.extra["masks"]
        assert (truth_HW is not None) == bool(entries) == bool(sample.labels["Pneumothorax"])
        if truth_HW is not None:
            np.testing.assert_array_equal(
                decode_runs(entries[0]["runs"], REFERENCE_SIZE, REFERENCE_SIZE), truth_HW
            )
            with_mask += 1
    positives = sum("Pneumothorax" in masks(view, 64) for view in views.values())
    assert 0 < with_mask == positives  # all of them, and a share of the others
    assert len(samples) < len(views) / 2


def test_run_lengths_agree_with_the_reader() -> None:
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (7, 5), (16, 16)):
        mask_HW = rng.random(shape) < 0.4
        mask_HW[-1, -1] = True
        assert encode_run_lengths(mask_HW) == encode_runs(mask_HW)
        np.testing.assert_array_equal(decode_runs(encode_run_lengths(mask_HW), *shape), mask_HW)


def test_commands_write_corpora_and_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = ["--splits", "train=0.000001", "test=0.999999"]
    for name, patients in (("rsna", "4"), ("siim", "12")):
        root, out = tmp_path / name, tmp_path / f"{name}-shards"
        cli.main(
            [
                "phantom",
                name,
                "--out",
                str(root),
                "--patients",
                patients,
                "--size",
                "32",
                "--workers",
                "1",
            ]
        )
        assert f"medvl shards {name}" in capsys.readouterr().out
        cli.main(["shards", name, "--root", str(root), "--out", str(out), "--workers", "1",
            "--short-side", "32", *shares])  # fmt: skip
        capsys.readouterr()
        source = ShardSource(out / "test")
        assert len(source) > 2
        assert source.manifest.skipped == {}
        assert source.sample(0).extra["image_width"] == REFERENCE_SIZE
