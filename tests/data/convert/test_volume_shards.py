"""Shards of volumes: the phantom's scans through conversion, verification and ShardSource."""

import dataclasses
import io
import json

import nibabel
import numpy as np
import pytest
from helpers.errors import raises
from helpers.shard_plans import OPTIONS, make_plan, reseal

from medvl.common.untrusted import ANYWHERE
from medvl.data.convert.options import ShardRun, VolumeShardOptions
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import read_samples
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.data.volumes.codec import decode_volume
from medvl.data.volumes.nifti import read_nifti
from medvl.data.volumes.options import VolumeFile, VolumeOptions
from medvl.data.volumes.reading import encode_stored_volume
from medvl.data.volumes.resampling import crop_or_pad, resample_volume
from medvl.errors import ImageError, ShardError, VolumeError
from medvl.phantom import draw_volume, sample_chest_ct, write_volumes
from medvl.schema import Sample

SHAPE = (16, 32, 32)
DEID = Deidentifier(b"0" * 32)


def record(path, number: int, volume: VolumeFile) -> Record:
    sample = Sample(
        key=f"key{number}",
        corpus="lab",
        split="train",
        patient=f"patient{number}",
        study=f"study{number}",
        image=path,
        sections={"findings": f"Scan {number}."},
        extra={"reconstruction": 1},
    )
    return Record(sample, volume=volume)


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Two NIfTI files, a series, a file that was rescaled twice, and half a file."""
    root = tmp_path_factory.mktemp("scans")
    write_volumes(root, patients=3, shape=SHAPE, dicom=True)
    twice = nibabel.Nifti1Image(draw_volume(sample_chest_ct((0, 0)), SHAPE) - 1024, np.eye(4))
    nibabel.save(twice, root / "twice.nii")
    half = root / "half.nii.gz"
    half.write_bytes((root / "nifti" / "s00000_1.nii.gz").read_bytes()[:3000])
    return [
        root / "nifti" / "s00000_1.nii.gz",
        root / "nifti" / "s00001_1.nii.gz",
        root / "dicom" / "s00002_1",
        root / "twice.nii",
        half,
    ]


def convert(scans, out, **options):
    volume = VolumeOptions(**options)
    records = Records(record(path, number, VolumeFile()) for number, path in enumerate(scans))
    plan = Plan("lab", records, (), RowCounts())
    run = ShardRun(out=out, workers=1, max_skipped=5)
    write_shards(plan, DEID, run, VolumeShardOptions(samples_per_shard=5, volume=volume))
    return ShardSource(out / "train")


def test_stored_volumes_are_those_of_the_phantom(scans, tmp_path):
    source = convert(scans, tmp_path / "out")
    assert len(source) == 3
    assert dict(source.manifest.skipped) == {"not_hu": 1, "truncated": 1}
    assert dict(source.manifest.warnings) == {"files_localizer": 1}
    for position in range(3):
        drawn = draw_volume(sample_chest_ct((0, position)), SHAPE)
        volume = source.volume(position)
        np.testing.assert_array_equal(volume.hu_DHW, drawn)
        np.testing.assert_array_equal(source.volume(position, slice(3, 9)).hu_DHW, drawn[3:9])
        assert volume.spacing == pytest.approx((18.75, 11.25, 11.25))
        assert (volume.modality, volume.is_hounsfield) == ("CT", True)
        extra = source.sample(position).extra
        assert extra["orientation"] == "LPS"
        assert extra["shape"] == list(SHAPE)
        assert extra["reconstruction"] == 1
        with raises(ImageError, "unsupported", names=source.key(position)):
            source.pixels(position)
    assert verify_folder(tmp_path / "out" / "train", decode=True).problems == ()


def test_series_of_another_modality_are_refused(scans):
    options = (VolumeFile(modality="MR"), VolumeOptions(), ANYWHERE, {}, "organs")
    with raises(VolumeError, "mismatch", "modality", names="expected MR, got CT"):
        encode_stored_volume(scans[2], *options)
    assert encode_stored_volume(scans[0], *options).fields["modality"] == "MR"  # states none


def test_volumes_without_a_voxel_or_a_grid_or_with_a_wrong_one_are_skipped(scans, tmp_path):
    thin = nibabel.Nifti1Image(np.full((20, 20, 2), 40, np.int16), np.diag([-1, -1, 0.6, 1]))
    nibabel.save(thin, tmp_path / "thin.nii")
    np.savez(tmp_path / "array.npz", ct=np.zeros((4, 4, 4), np.int16))
    far = nibabel.Nifti1Image(np.full((9, 9, 9), 40, np.int16), np.diag([-9e3, -9e3, 9e3, 1]))
    nibabel.save(far, tmp_path / "far.nii")  # as if millimetres were metres
    (tmp_path / "s.nii.gz").mkdir()  # some archives unpack to a folder
    (tmp_path / "s.nii.gz" / "s.nii.gz").write_bytes(scans[0].read_bytes())
    names = ("thin.nii", "array.npz", "far.nii", "s.nii.gz")
    paths = [scans[0], *(tmp_path / name for name in names)]
    source = convert(paths, tmp_path / "out", spacing=(3, 15, 15))
    assert dict(source.manifest.skipped) == {"too_small": 1, "missing": 1, "too_large": 1}
    np.testing.assert_array_equal(source.volume(0).hu_DHW, source.volume(1).hu_DHW)


def test_spacing_and_size_are_those_of_the_options(scans, tmp_path):
    source = convert(scans[:1], tmp_path / "out", spacing=(37.5, 11.25, 22.5), size=(8, 40, 12))
    expected = resample_volume(read_nifti(scans[0]), (37.5, 11.25, 22.5))
    volume = source.volume(0)
    np.testing.assert_array_equal(volume.hu_DHW, crop_or_pad(expected, (8, 40, 12)).hu_DHW)
    assert volume.spacing == pytest.approx((37.5, 11.25, 22.5))


def test_records_of_volumes_survive_their_file(scans):
    file = VolumeFile(spacing=(3.0, 1.0, 1.0), rescale=(1.0, -8192.0), orientation="LPS")
    one = record(scans[0], 0, file)
    image = dataclasses.replace(record(scans[1], 1, file), volume=None)
    assert list(Records([one, image])) == [one, image]


def test_damaged_chunks_are_found(scans, tmp_path):
    convert(scans[:2], tmp_path / "out")
    folder = tmp_path / "out" / "train"
    (tar,) = folder.glob("*.tar")
    content = tar.read_bytes()
    first, *_ = read_samples(io.BytesIO(content), "the tar")
    place = content.index(first["vol"]) + len(first["vol"]) - 5
    tar.write_bytes(content[:place] + bytes(5) + content[place + 5 :])
    reseal(folder, 0)
    assert verify_folder(folder).problems == ()
    (problem,) = verify_folder(folder, decode=True).problems
    assert "key0.vol" in problem
    with raises(ShardError, "mismatch", names="key0"):
        ShardSource(folder).volume(0)


def test_images_have_no_volume(tmp_path):
    write_shards(
        make_plan(tmp_path / "images", 2), DEID, ShardRun(out=tmp_path / "out", workers=1), OPTIONS
    )
    source = ShardSource(tmp_path / "out" / "train")
    assert not source.has_volume(0)
    with raises(ImageError, "no_image"):
        source.volume(0)


def test_members_of_other_readers(scans, tmp_path):
    convert(scans[:1], tmp_path / "out")
    (tar,) = (tmp_path / "out" / "train").glob("*.tar")
    (sample,) = read_samples(io.BytesIO(tar.read_bytes()), "the tar")
    assert set(sample) == {"__key__", "vol", "json"}
    assert decode_volume(sample["vol"]).shape == SHAPE
    assert json.loads(sample["json"])["extra"]["modality"] == "CT"
