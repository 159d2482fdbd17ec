"""`medvl infer` on NIfTI files and DICOM series, as on the shards of a model's training."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.volume_files import write_series
from helpers.volume_shards import SHAPE, volume_shards

import medvl
from medvl.cli import main as cli
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.volumes.dicom_series import read_dicom_series
from medvl.data.volumes.options import VolumeOptions
from medvl.data.volumes.transform import OriginalVolumeTransform, VolumeTransform
from medvl.errors import CheckpointError, ConfigError, ImageError, VolumeError
from medvl.inference.folder import find_volumes
from medvl.models.checkpoint import load, save
from medvl.phantom import write_volumes

STORED = VolumeOptions(spacing=(37.5, 11.25, 11.25), size=(8, 32, 32))
SIZE = (8, 24, 24)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose shards are coarser than the files, and files of other patients."""
    home = tmp_path_factory.mktemp("infer_volumes")
    folder = volume_shards(home / "corpus", 2, options=STORED, reconstructions=1)
    manifest = ShardSource(folder).manifest
    torch.manual_seed(0)
    model = medvl.create_model(
        "hlip",
        volume_size=SIZE,
        image_arguments={"patch_size": (4, 8, 8), "embed_dim": 24, "depth": 2, "num_heads": 2},
        text_encoder="tiny_bert",
        text_arguments={"num_hidden_layers": 1},
        tokenizer=train_wordpiece(["There is no pleural effusion."] * 3),
        projection_dim=16,
    )
    (home / "run").mkdir()
    save(model, home / "run", {"train_manifest": manifest.to_json()})
    write_volumes(home / "scans", patients=2, shape=SHAPE, dicom=True, seed=0)
    return home


def test_original_files_are_prepared_as_shards(home: Path) -> None:
    model = load(home / "run")
    assert isinstance(model.transform, OriginalVolumeTransform)
    assert model.transform.stored == STORED
    source = ShardSource(home / "corpus" / "shards" / "train")
    transform = VolumeTransform(size=SIZE)
    for row in range(2):
        values = source.volume(row).hu_DHW
        expected = transform.fill(values, transform.cut(values.shape))
        files = (
            home / "scans" / "nifti" / f"s0000{row}_1.nii.gz",
            str(home / "scans" / "dicom" / f"s0000{row}_1"),
            read_dicom_series(home / "scans" / "dicom" / f"s0000{row}_1"),
            values,
        )
        prepared = model.transform(files)
        assert prepared.shape == (4, 1, *SIZE)
        assert prepared.dtype == torch.int16
        for volume in prepared:
            np.testing.assert_array_equal(volume[0].numpy(), expected)


def test_volumes_below_folders_are_found(home: Path, tmp_path: Path) -> None:
    scans = home / "scans"
    names = [str(path.relative_to(scans)) for path in find_volumes([scans])]
    assert sorted(names) == [
        *("dicom/s00000_1", "dicom/s00001_1"),
        *("nifti/s00000_1.nii.gz", "nifti/s00001_1.nii.gz"),
    ]
    with raises(ImageError, "empty"):
        find_volumes([tmp_path])
    with raises(ImageError, "not_found"):
        find_volumes([tmp_path / "nowhere"])


def test_the_command_scores_series_and_files_alike(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.nii.gz"
    bad.write_bytes(b"\x1f\x8b not a volume")
    head = {"step": 20, "PixelSpacing": [12, 12], "Modality": "MR"}
    write_series(tmp_path / "mr", np.full((16, 32, 32), 40), **head)
    command = ["infer", home / "scans", bad, tmp_path / "mr", "--checkpoint", home / "run"]
    command += ["--device", "cpu", "--out", tmp_path / "out", "--batch", 3]
    cli.main([str(word) for word in command])
    printed = capsys.readouterr().out
    assert "1 of 6 images skipped: 1 malformed" in printed
    assert "1 of 5 images are no CT scans by their header (1 MR)" in printed
    with (tmp_path / "out" / "results.csv").open() as file:
        rows = {Path(row["image"]).name: row for row in csv.DictReader(file)}
    assert len(rows) == 6
    assert (rows["s00001_1"]["modality"], rows["mr"]["warning"]) == ("CT", "MR")
    names = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert names["prompts"] == "ct_clip"
    of_series, of_file = rows["s00001_1"], rows["s00001_1.nii.gz"]
    same, other = (float(row["Emphysema"]) for row in (of_file, rows["s00000_1"]))
    assert float(of_series["Emphysema"]) == pytest.approx(same, abs=5e-8)
    assert abs(same - other) > 1e-7


def test_other_inputs_are_refused(home: Path, tmp_path: Path) -> None:
    transform = VolumeTransform(size=SIZE)
    (tmp_path / "chest.png").write_bytes(b"png")
    with raises(VolumeError, "unsupported", names="chest.png"):
        transform(tmp_path / "chest.png")
    with raises(VolumeError, "unsupported", names="float64"):
        transform([np.zeros((4, 4, 4))])
    with raises(ConfigError, "empty"):
        transform([])


def test_impossible_options_of_shards_are_refused(home: Path, tmp_path: Path) -> None:
    model = load(home / "run")
    manifest = ShardSource(home / "corpus" / "shards" / "train").manifest.to_json()
    manifest["options"] = {**manifest["options"], "volume": {"spacing": [0, 1, 1]}}
    (tmp_path / "run").mkdir()
    save(model, tmp_path / "run", {"train_manifest": manifest})
    with raises(CheckpointError, "malformed"):
        load(tmp_path / "run")


def test_models_of_images_say_what_reads_volumes(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scan = home / "scans" / "nifti" / "s00000_1.nii.gz"
    with pytest.raises(SystemExit):
        cli.main(["infer", str(scan), "--checkpoint", "demo"])
    assert "demo reads images and these are volumes" in capsys.readouterr().err
