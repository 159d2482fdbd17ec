"""Padding: air in CT, and in volumes of other modalities their least value."""

import dataclasses
import io
from pathlib import Path

import nibabel
import numpy as np
import pytest
from helpers.volume_files import write_series
from helpers.volume_shards import DEID

from medvl.common.untrusted import ANYWHERE
from medvl.data.convert.options import ShardRun, VolumeShardOptions
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.loading.readers import cut_volume, read_slices
from medvl.data.shards.source import ShardSource
from medvl.data.volumes.dicom_series import read_dicom_series
from medvl.data.volumes.nifti import decode_nifti, read_nifti
from medvl.data.volumes.options import VolumeFile, VolumeOptions
from medvl.data.volumes.reading import read_volume
from medvl.data.volumes.resampling import resample_volume
from medvl.data.volumes.transform import OriginalVolumeTransform, VolumeTransform
from medvl.data.volumes.volume import Volume
from medvl.schema import Sample

SHAPE = (20, 6, 5)
MR = np.random.default_rng(0).integers(-1500, 900, SHAPE).astype(np.int16)
MR[2] = -1600  # its least value, in one chunk of slices alone
CUT = VolumeTransform(size=(4, 8, 5))


def nifti(path: Path, values_DHW: np.ndarray) -> Path:
    affine = np.diag([-1, -1, 1, 1.0])  # x to the left, y to the back
    nibabel.save(nibabel.Nifti1Image(values_DHW.transpose(2, 1, 0), affine), path)
    return path


def shards(root: Path, modality: str, values_DHW: np.ndarray, **volume: object) -> ShardSource:
    sample = Sample(
        key="key",
        corpus="lab",
        split="train",
        patient="patient",
        study="study",
        image=nifti(root / "scan.nii", values_DHW),
        sections={"findings": "A scan."},
    )
    records = Records([Record(sample, volume=VolumeFile(modality=modality))])
    stored = VolumeShardOptions(modality=modality, volume=VolumeOptions(**volume))
    run = ShardRun(out=root / "shards", workers=1)
    write_shards(Plan("lab", records, (), RowCounts()), DEID, run, stored)
    return ShardSource(root / "shards" / "train")


def test_cuts_of_shards_and_of_files_have_the_least_value_of_the_volume(tmp_path):
    """Also where the least value is in slices that the cut does not read."""
    source = shards(tmp_path, "MR", MR)
    sample = source.sample(0)
    assert sample.extra["padding"] == -1600
    assert source.manifest.options["modality"] == "MR"
    cut = cut_volume(source, 0, sample, CUT)
    np.testing.assert_array_equal(cut.hu_DHW[:, 1:7], MR[8:12])
    assert (cut.hu_DHW[:, [0, 7]] == -1600).all()
    transform = OriginalVolumeTransform(size=CUT.size, shards_modality="MR")
    for volume in (tmp_path / "scan.nii", MR, source.volume(0)):
        np.testing.assert_array_equal(transform(volume)[0, 0].numpy(), cut.hu_DHW)


def test_shards_of_other_sizes_are_padded_likewise(tmp_path):
    source = shards(tmp_path, "MR", MR, size=(20, 8, 5))
    hu_DHW = source.volume(0).hu_DHW
    np.testing.assert_array_equal(hu_DHW[:, 1:7], MR)
    assert (hu_DHW[:, [0, 7]] == -1600).all()


def test_ct_is_padded_with_air_and_has_no_further_field(tmp_path):
    ct_DHW = np.full(SHAPE, 40, np.int16)
    source = shards(tmp_path, "CT", ct_DHW)
    assert "padding" not in source.sample(0).extra
    assert "modality" not in source.manifest.options
    cut = cut_volume(source, 0, source.sample(0), CUT)
    assert set(cut.hu_DHW[:, [0, 7]].ravel()) == {-1024}
    assert set(CUT(ct_DHW)[0, 0, :, 0].ravel().tolist()) == {-1024}


def test_older_shards_take_the_least_of_the_slices_that_are_read(tmp_path):
    source = shards(tmp_path, "MR", MR)
    sample = source.sample(0)
    extra = {name: value for name, value in sample.extra.items() if name != "padding"}
    cut = cut_volume(source, 0, dataclasses.replace(sample, extra=extra), CUT)
    assert (cut.hu_DHW[:, [0, 7]] == MR[8:12].min()).all()


@pytest.mark.parametrize(("modality", "expected"), [(None, -1024), ("CT", -1024), ("MR", -1600)])
def test_values_that_are_not_finite_are_padding(tmp_path, modality, expected):
    values = MR.astype(np.float32)
    values[0, 0] = np.nan
    values[19, 2, 3] = np.inf
    path = nifti(tmp_path / "a.nii", values)
    padded = MR.copy()
    padded[0, 0] = padded[19, 2, 3] = expected
    np.testing.assert_array_equal(read_nifti(path, modality=modality).hu_DHW, padded)
    uploaded = decode_nifti(io.BytesIO(path.read_bytes()), modality=modality)
    np.testing.assert_array_equal(uploaded.hu_DHW, padded)
    if modality == "MR":
        read = read_volume(path, VolumeFile(modality="MR"), VolumeOptions(), ANYWHERE)
        np.testing.assert_array_equal(read.hu_DHW, padded)


@pytest.mark.parametrize(("modality", "least"), [("CT", -1024), ("MR", -1600)])
def test_resampling_keeps_low_values_of_other_modalities(modality, least):
    volume = Volume(hu_DHW=np.full(SHAPE, -1600, np.int16), spacing=(1, 1, 1), modality=modality)
    assert set(resample_volume(volume, (2, 2, 2)).hu_DHW.ravel()) == {least}


def test_corrected_tilt_moves_the_least_value_of_a_slice_in(tmp_path):
    hu_DHW = 100 + np.arange(240).reshape(6, 8, 5)
    fields = {index: {"ImagePositionPatient": [0, 0.7 * index, 3.0 * index]} for index in range(6)}
    write_series(tmp_path, hu_DHW, fields=fields, Modality="MR")
    volume = read_dicom_series(tmp_path, tilt="correct")
    for index in range(1, 6):
        assert set(volume.hu_DHW[index, :index].ravel()) == {100 + 40 * index}


def test_slices_of_other_modalities_have_the_window_of_their_values(tmp_path):
    """Windows of Hounsfield units would show an MR volume as black or white."""
    values = (30 * np.random.default_rng(1).random(SHAPE)).astype(np.int16) + 3000
    source = shards(tmp_path, "MR", values)
    slices_NHWC = read_slices(source, 0, source.sample(0), 16)
    assert slices_NHWC.min() == 0
    assert slices_NHWC.max() == 255
    assert (slices_NHWC[..., :1] == slices_NHWC).all()
    assert slices_NHWC.std() > 60
